/*
 * ep_combine_kernel: every token's rows are pulled from the windows of the ranks that got it, and summed.
 *
 *   launch   any number of blocks, co-resident with those of the other ranks (cooperative); a thread sums 16 bytes of a token
 *   memory   offered blocks in the peers' windows; own rows, bias and sums in memory of the own GPU
 *   roles    block 0 offers; every block learns the peers' offers. Where a rank with rows for this one offered nothing, nothing
 *            is summed here, and ep_combine_ring_kernel, which follows, does it all. The block that comes last publishes Done, and
 *            waits until all that pull from here are done
 *   rules    F10: acquire of the notes, barrier, then coherent loads. All rows of a token, up to EP_PULL_WIDTH of them, are in
 *            flight before the first is added
 *
 * Compiled for each EP_PULL_WIDTH.
 */
#include "ep_offers.h"
#include "ep_sum.h"

#ifndef EP_PULL_WIDTH
#define EP_PULL_WIDTH 4
#endif


EP_CHECK_ARGS(EpCombineArgs);

extern __shared__ __align__(16) ep_u8 ep_pool[];

EP_DEV void ep_sum_rows(const EpRank& r, const EpCombineArgs& a, const EpSource* sources) {
    const ep_u32 ranks = r.w.ranks, columns = (ep_u32)(r.w.result_stride / 16);
    const ep_u32 step = gridDim.x * blockDim.x, tokens_of_step = step / columns, rest = step % columns;
    const ep_i32* positions = (const ep_i32*)a.position;
    /* From one unit of 16 bytes to that of `step` units further, without a division. */
    ep_u32 unit = blockIdx.x * blockDim.x + threadIdx.x, token = unit / columns;
    for (unit %= columns; token < a.tokens;) {
        const ep_u32 at = unit * 16;
        EpSum sum;
        ep_sum_clear(sum);
        if (a.bias[0]) ep_sum_start(sum, ep_ld16((const ep_u8*)a.bias[0] + token * a.bias_stride + at));
        if (a.bias[1]) ep_sum_add(sum, ep_ld16((const ep_u8*)a.bias[1] + token * a.bias_stride + at));
        for (ep_u32 first = 0; first < ranks; first += EP_PULL_WIDTH) {
            int4 rows[EP_PULL_WIDTH];
            bool there[EP_PULL_WIDTH];
#pragma unroll
            for (ep_u32 i = 0; i < EP_PULL_WIDTH; ++i) {
                const ep_i32 position = first + i < ranks ? positions[(ep_u64)token * ranks + first + i] : -1;
                there[i] = position >= 0;
                rows[i] = make_int4(0, 0, 0, 0);
                if (there[i]) rows[i] = ep_ld16_peer(ep_source_row(sources[first + i], position) + at);
            }
#pragma unroll
            for (ep_u32 i = 0; i < EP_PULL_WIDTH; ++i) {
                if (there[i]) ep_sum_add(sum, rows[i]);
                if (ep_planted(r, EP_PLANT_ROUNDED_TOO_EARLY)) ep_sum_start(sum, ep_sum_round(sum));
            }
        }
        ep_st16((ep_u8*)a.out + token * a.out_stride + at, ep_sum_round(sum));
        token += tokens_of_step;
        unit += rest;
        if (unit >= columns) { unit -= columns; ++token; }
    }
}

/* Sums the weights that came back, ranks ascending. Those of the own rank lie without headers. */
EP_DEV void ep_sum_weights(const EpRank& r, const EpCombineArgs& a, const EpSource* sources) {
    const ep_u32 ranks = r.w.ranks, topk = r.w.topk;
    const ep_u64 items = (ep_u64)a.tokens * topk, step = (ep_u64)gridDim.x * blockDim.x;
    for (ep_u64 item = (ep_u64)blockIdx.x * blockDim.x + threadIdx.x; item < items; item += step) {
        const ep_u32 token = (ep_u32)(item / topk), k = (ep_u32)(item % topk);
        float sum = 0.0f;
        for (ep_u32 rank = 0; rank < ranks; ++rank) {
            const ep_i32 position = ((const ep_i32*)a.position)[(ep_u64)token * ranks + rank];
            if (position >= 0) sum += ep_source_weight(sources[rank], position, k, rank == r.me);
        }
        ((float*)a.weights)[item] = sum;
    }
}

extern "C" __global__ void __launch_bounds__(1024, 1) ep_combine_kernel(const __grid_constant__ EpRank r,
                                                                       const __grid_constant__ EpCombineArgs a) {
    if (ep_closed(r)) return;
    const ep_u64 began = ep_now();
    EpSource* sources = (EpSource*)ep_pool;
    if (blockIdx.x == 0) ep_send_notes(r, a.base, a.base_rows, a.offers_weights, began);
    const bool all = ep_learn_sources(r, a, sources, began);
    ep_delay(r, EP_LANE_CONTROL, (ep_u64)blockIdx.x << 32 | threadIdx.x / 32);
    if (ep_planted(r, EP_PLANT_NOT_WAITING_FOR_PULLS)) ep_be_last(r);
    if (all && !ep_failed(r)) {
        ep_sum_rows(r, a, sources);
        if (a.weights) ep_sum_weights(r, a, sources);
    }
    if (!ep_last_block(r, EP_MEETING_MOVED) || ep_failed(r)) return;
    /* Who has offered nothing may have to give rows back through rings. */
    const bool rings = !all || a.base == EP_NO_BASE;
    if (threadIdx.x == 0) ep_local(r)->rings = rings ? (all ? 2 : 1) : 0;
    if (rings) return;
    ep_say_done(r);
    for (ep_u32 peer = threadIdx.x; peer < r.w.ranks; peer += blockDim.x)
        if (peer != r.me && ep_takes_part(r, peer) && ((const ep_u32*)a.matrix)[peer * r.w.ranks + r.me] > 0)
            if (!ep_planted(r, EP_PLANT_NOT_WAITING_FOR_PULLS))
                ep_wait(r, peer, EP_LANE_CONTROL, EP_COUNTER_DONE, ep_op(r), EP_PHASE_PULLED, began);
    ep_count_op(r);
}
