/*
 * ep_low_latency::combine: low-latency combine. The experts' results go back to the tokens' ranks, which sum them.
 *
 *   launch   any number of blocks of 512 threads, which need not all run at a time (ep_low_shares.h); phases says which halves
 *   memory   the experts' rows and the records of the dispatch in memory of the own GPU: nothing is staged; slots, units and cells of the
 *            windows; shared: the rows of a batch
 *   send     the received rows are cut into as many shares as there are blocks. Per choice: each expert's row is copied to the token's place
 *            of that choice. Per rank: the rows of a token are weighed and summed, choices ascending, and rounded
 *            results that are still being made are waited for batch by batch, where the caller says so (ep_low_ready.h)
 *   receive  the tokens are cut into as many shares as there are blocks, which wait for all that is owed to theirs, and sum it: per choice
 *            with the weights given here, per rank as it is, ranks ascending; f32, rounded once
 *   travel   as units, which announce themselves (ep_low_return_units.h, ep_low_reduce_units.h); or in slots, which cells announce
 *            (ep_low_return_cells.h, ep_low_reduce_cells.h)
 *   rules    ep_low.h
 */
#include "ep_low_end.h"
#include "ep_low_reduce_cells.h"
#include "ep_low_return.h"
#ifndef EP_FAR_H
#include "ep_low_reduce_units.h"
#endif

/* Brings what a launch begins with on its way. */
EP_DEV void ep_low_begin(const EpRank& r, const EpLowCombineArgs& a) {
    const ep_u32 tid = threadIdx.x;
    if (tid == 0) ep_prefetch((const void*)a.records);
    if (tid == 32) ep_prefetch((const void*)a.routed);
    if ((a.phases & EP_LOW_RECEIVE) == 0 || tid < 64 || tid >= 96) return;
    /* Choices and weights of the tokens that this block will sum. */
    const ep_u64 first = (ep_u64)a.tokens * blockIdx.x / gridDim.x * r.w.topk + (tid - 64) * 16;
    if (first >= (ep_u64)a.tokens * r.w.topk) return;
    ep_prefetch((const ep_i64*)a.topk_idx + first);
    if (a.kind == EP_LOW_PER_CHOICE) ep_prefetch((const float*)a.topk_weights + first);
}

/* What the shares of a batch are cut by: pieces of a result, or 16 bytes. */
EP_DEV ep_u32 ep_low_columns_of(const EpRank& r, bool as_units) {
    return as_units ? ep_low_pieces_of(r.w.result_bytes) : (ep_u32)(r.w.result_stride / 16);
}

/* Waits for the results, and sums this block's share of the tokens. */
EP_DEV void ep_low_reduce(const EpRank& r, const EpLowCombineArgs& a, EpLowBatch& s, const EpShareOfRows& share, bool found, ep_u64 op, ep_u32 tag,
                          bool as_units, ep_u64 began) {
#ifndef EP_FAR_H
    if (as_units) return ep_low_reduce_units(r, a, s, share, found, op, tag, began);
#endif
    ep_low_reduce_cells(r, a, s, share, found, op, began);
}

#ifdef EP_TEST
/* What was read is overwritten, and has no tag. By a warp. */
EP_DEV void ep_low_forget_results(const EpRank& r, ep_u64 op, ep_u32 writer, ep_u32 token, bool as_units) {
    ep_u8* slots = ep_low_own(r) + ep_low_result(r.w, op, writer, token, 0);
    if (!as_units) return ep_poison(r, slots, (ep_u32)(r.w.low_columns * r.w.low_result_bytes));
    if (!ep_test(r)->poison) return;
    ep_u8* units = ep_low_own(r) + ep_low_unit_result(r.w, op, writer, token, 0);
    EP_SHORT for (ep_u32 i = threadIdx.x % 32; i < r.w.low_columns * ep_unit_count(r.w.result_bytes); i += 32)
        ep_st16(units + i * EP_UNIT_BYTES, ep_unit(EP_POISON, EP_POISON, EP_POISON, 0));
}
#endif

namespace ep_low_latency {
/* Profilers, and those who look for kernels in their tables by such names, see it as ep_low_latency::combine. */
__global__ void __launch_bounds__(EP_LOW_THREADS, 1)
    combine(const __grid_constant__ EpRank r, const __grid_constant__ EpLowCombineArgs a) {
    ep_wait_for_launches_before();
    const ep_u64 began = ep_now();
    /* Loads that wait for nothing come first. */
    const EpLowNow now = ep_low_now(r);
    const bool sends = a.phases & EP_LOW_SEND, receives = a.phases & EP_LOW_RECEIVE;
    bool own = true;
    if (sends && threadIdx.x == 0) own = ep_low_take(r, blockIdx.x);
    ep_low_begin(r, a);
    ep_low_bring_windows(r);
    if (sends) ep_low_count_rows(r, a);
    const ep_u64 early = ep_low_early(r, a.window);
    if (ep_low_closed(r, now, a.phases, a.in_flight) || ep_low_crashed(r)) {
        if (sends && threadIdx.x == 0 && own) *ep_low_taken(r, blockIdx.x) = 0;
        return;
    }
    const ep_u64 op = sends ? now.sent + 1 : now.received + 1;
    const bool tries = sends || now.late(op);
    if (tries && !sends) {
        if (threadIdx.x == 0) own = ep_low_take(r, blockIdx.x);
        ep_low_count_rows(r, a);
    }
    __shared__ EpLowBatch sent, summed;
    const ep_u32 tag = ep_unit_tag(now.serials + op);
    const bool as_units = ep_low_as_units(a, a.tokens);
    const EpShareOfRows share = ep_low_share(a.tokens, ep_low_columns_of(r, as_units), blockIdx.x, gridDim.x);
    if (tries)
        ep_low_return_rows(r, a, sent, op, tag, !sends, own, early, began, [&] {
            if (sends && receives) ep_low_load_tokens(r, a, summed, share.last, share.first, as_units);
        });
    if (receives) {
        __syncthreads();
        ep_low_come_late(r);
        ep_low_reduce(r, a, summed, share, sends, op, tag, as_units, began);
        ep_low_tell_early(r, op);
    }
    ep_let_next_begin();
    const ep_u32 last = ep_low_last_block(r, false, false);
    if (last == EP_LOW_NOT_LAST) return;
#ifdef EP_TEST
    /* What a launch in trouble leaves may be received once more. */
    if (receives && last == EP_LOW_LAST)
        EP_SHORT for (ep_u32 item = threadIdx.x / 32; item < a.tokens * r.w.ranks; item += EP_LOW_WARPS)
            ep_low_forget_results(r, op, item % r.w.ranks, item / r.w.ranks, as_units);
    /* Before anybody is told that it may put there again. */
    __syncthreads();
#endif
    const bool received = ep_low_end(r, now, op, a.phases, tries, false, last != EP_LOW_LAST, began);
    ep_u64* counters = (ep_u64*)a.counters + 2 * r.w.ranks;
    const ep_u32 part = a.kind == EP_LOW_PER_RANK ? 0 : r.w.ranks;
    EP_SHORT for (ep_u32 rank = threadIdx.x; rank < r.w.ranks; rank += EP_LOW_THREADS) {
        if (sends) ep_low_add(counters + rank, ((const ep_u32*)a.records)[part + rank]);
        if (received && ep_low_takes_part(rank)) ep_low_add(counters + r.w.ranks + rank, ((const ep_u32*)a.routed)[part + rank]);
    }
    if (received && threadIdx.x == 0) ep_low_add(counters + 2 * r.w.ranks + r.w.local_experts, 1);
}
} // namespace ep_low_latency
