/*
 * ep_low_reduce_cells.h: the receiving half of the low-latency combine where results come into slots: a token's are there when its cells say so.
 */
#ifndef EP_LOW_REDUCE_CELLS_H
#define EP_LOW_REDUCE_CELLS_H
#include "ep_low_arrivals.h"
#include "ep_low_results.h"
#include "ep_sum.h"

/* Results that a thread has in flight. */
#define EP_LOW_WIDTH 8u

/* Waits until those that owe results have said how many come, each thread for its own; false after a fault. */
EP_DEV bool ep_low_await_results(const EpRank& r, const EpLowCombineArgs& a, ep_u64 op, ep_u64 began) {
    bool there = ep_low_is_unmasked(r, op);
    const ep_u32* routed = (const ep_u32*)a.routed;
    EP_SHORT for (ep_u32 rank = ep_low_served(); rank < r.w.ranks; rank += EP_LOW_THREADS) {
        ep_u32 rows = 0;
        const ep_u32 owed = ep_low_takes_part(rank) ? routed[(a.kind == EP_LOW_PER_RANK ? 0 : r.w.ranks) + rank] : 0;
        if (owed > 0 && there) {
            const bool came = ep_low_await(r, op, a.kind, rank, began, &rows);
            if (came && rows != owed) ep_low_mismatch(r, op, rank, EP_LOW_FIELD_RESULTS, owed, rows);
            there &= came && rows == owed;
        }
    }
    return there;
}

/* The warps wait for the results of the tokens that they have found; false after a fault. */
EP_DEV bool ep_low_await_tokens(const EpRank& r, const EpLowBatch& s, const EpShareOfRows& share, ep_u32 base, ep_u64 op, ep_u32 kind, ep_u64 began) {
    const ep_u32 lane = threadIdx.x % 32, turn = ep_low_turn();
    __syncwarp();
    return base + turn >= share.last || lane >= s.count[turn] || ep_low_await_row(r, op, kind, s.row[turn * 32 + lane], s.token[turn], began);
}

/* Refuses a result that is not the one due; `own` is its header. */
EP_DEV void ep_low_check_result(const EpRank& r, ep_u64 op, int4 own, ep_u32 rank, ep_u32 token) {
    if ((ep_u32)own.w != ep_low_stamp(r.generation, op)) return ep_low_refuse_stamp(r, op, rank, (ep_u32)own.w);
    if ((ep_u32)own.x != rank) ep_low_mismatch(r, op, rank, EP_LOW_FIELD_ROW_SOURCE, rank, (ep_u32)own.x);
    else if ((ep_u32)own.y != token) ep_low_mismatch(r, op, rank, EP_LOW_FIELD_ROW_TOKEN, token, (ep_u32)own.y);
}

/* Waits for the results, and sums this block's share of the tokens, of which the first were found before if `found`. */
EP_DEV void ep_low_reduce_cells(const EpRank& r, const EpLowCombineArgs& a, EpLowBatch& s, const EpShareOfRows& share, bool found, ep_u64 op,
                                ep_u64 began) {
    const ep_u32 tid = threadIdx.x, turn = ep_low_turn(), mine = turn * 32 + tid % 32, columns = (ep_u32)(r.w.result_stride / 16);
    const ep_u8* slots = ep_low_own(r) + ep_low_part(r.w, op, 0);
    bool there = ep_low_await_results(r, a, op, began);
    EP_SHORT for (ep_u32 base = share.first; base < share.last || base == share.first; base += EP_LOW_WARPS) {
        if (!found || base != share.first) ep_low_load_tokens(r, a, s, share.last, base, false);
        there &= ep_low_await_tokens(r, s, share, base, op, a.kind, began);
        if (!__syncthreads_and(there)) return;
        const EpRange part = ep_low_within(share, base, EP_LOW_WARPS, columns, 1);
        /* The block with a token's beginning looks at the headers of its results, a warp a token. */
        const bool keeps = base + turn < share.last && (ep_u64)(base + turn) * columns >= share.begin;
        const bool checks = keeps && tid % 32 < s.count[turn];
        int4 own = make_int4(0, 0, 0, 0);
        if (checks)
            own = ep_ld16_put(slots + s.slot[mine] * r.w.low_result_bytes);
        EP_SHORT for (ep_u32 unit = part.begin + tid; unit < part.end; unit += EP_LOW_THREADS) {
            const ep_u32 row = unit / columns, at = (unit - row * columns) * 16, parts = s.count[row], token = s.token[row];
            EpSum sum;
            ep_sum_clear(sum);
            EP_SHORT for (ep_u32 first = 0; first < parts; first += EP_LOW_WIDTH) {
                int4 v[EP_LOW_WIDTH];
#pragma unroll
                for (ep_u32 i = 0; i < EP_LOW_WIDTH; ++i)
                    if (first + i < parts)
                        v[i] = ep_ld16_put(slots + s.slot[row * 32 + first + i] * r.w.low_result_bytes +
                                            r.w.low_result_header_bytes + at);
#pragma unroll
                for (ep_u32 i = 0; i < EP_LOW_WIDTH; ++i)
                    if (first + i < parts) ep_sum_add_scaled(sum, s.weight[row * 32 + first + i], v[i]);
            }
            ep_st16((ep_u8*)a.out + token * a.out_stride + at, ep_sum_round(sum));
        }
        if (checks) ep_low_check_result(r, op, own, s.row[mine], s.token[turn]);
        __syncthreads();
    }
}
#endif
