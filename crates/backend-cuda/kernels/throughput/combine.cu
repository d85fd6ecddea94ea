/*
 * ep_combine_kernel: every token's rows are pulled from the windows of the ranks that got it, and summed.
 *
 *   launch   any number of blocks, co-resident with those of the other ranks (cooperative); all have the roles of the table `block`,
 *            reducers first: they meet without the others
 *   memory   offered blocks in the peers' windows; own rows, bias and sums in memory of the own GPU. shared: where rows lie; what a
 *            reducer of rings needs; how many of each rank's rows are known to be there, for each warp; what the warps that pull need, and
 *            copiers (ep_copy.h)
 *   roles    block 0 offers; every block learns the peers' offers. Reducers pull: a warp sums a part of a token (ep_pull.h).
 *            Where the own rows are not in the window yet, returners copy them there (ep_copy.h). Where a rank with rows for this one
 *            offered nothing, nothing is pulled: one warp of each block takes the row of the block's number from the table of the rings'
 *            reducers (ep_combine_ring.h). The block that comes last publishes Done, and waits until all that pull from here are done. Where this rank itself offered nothing, or
 *            there are more channels than blocks, all that concerns rings is left to ep_combine_ring_kernel, which follows
 *   rules    those of ep_pull_bulk.h, or of ep_pull_loads.h where there is no bulk copy engine. Copiers wait for nobody: pulling warps may wait
 *            for them
 */
#include "ep_combine_ring.h"
#include "ep_copy.h"
#include "ep_last_look.h"
#include "ep_pull.h"

EP_POOL(ep_pool);

/* Sums the weights that came back, ranks ascending. Those of the own rank lie without headers. By the first `threads` threads. */
EP_DEV void ep_sum_weights(const EpRank& r, const EpCombineArgs& a, const EpSource* sources, ep_u32 threads) {
    const ep_u32 ranks = r.w.ranks, topk = r.w.topk;
    const ep_u64 items = (ep_u64)a.tokens * topk, step = (ep_u64)gridDim.x * threads;
    for (ep_u64 item = (ep_u64)blockIdx.x * threads + threadIdx.x; item < items; item += step) {
        const ep_u32 token = (ep_u32)(item / topk), k = (ep_u32)(item % topk);
        float sum = 0.0f;
        for (ep_u32 rank = 0; rank < ranks; ++rank) {
            const ep_i32 position = ((const ep_i32*)a.position)[(ep_u64)token * ranks + rank];
            if (position >= 0) sum += ep_source_weight(sources[rank], position, k, rank == r.me);
        }
        ((float*)a.weights)[item] = sum;
    }
}

/* Offers, learns the offers and pulls, where all rows can be pulled: whether they can. By the block's reducers. */
EP_DEV bool ep_pull(const EpRank& r, const EpCombineArgs& a, const EpSumShape& shape, EpSource* sources, ep_u8* memory, ep_u32* there,
                    const EpBlockRole& role, ep_u64 began) {
    const ep_u32 threads = 32 * role.count;
    const ep_u32 offer = (a.offers_weights ? EP_OFFERS_WEIGHTS : 0) | (a.copiers > 0 ? EP_OFFERS_PIECES : 0);
    if (blockIdx.x == 0) ep_send_notes(r, a.base, a.base_rows, offer, threads, began);
    __shared__ EpWalk walk;
    if (threadIdx.x == 0) walk = ep_walk(r, ep_part(shape), gridDim.x * role.count);
    const bool all = ep_all_of(ep_learn_sources(r, a, sources, threads, began), threads);
    ep_delay(r, EP_LANE_CONTROL, (ep_u64)blockIdx.x << 32 | role.index);
    if (ep_planted(r, EP_PLANT_NOT_WAITING_FOR_PULLS)) ep_be_last(r);
    if (all && !ep_warp_any(ep_failed(r))) {
        ep_sum_rows(r, a, shape, sources, walk, memory, there + role.index * r.w.ranks, role.index, role.count, began);
        if (a.weights) ep_sum_weights(r, a, sources, threads);
    }
    return all;
}

extern "C" __global__ void __launch_bounds__(32 * EP_PULL_WARPS, 1) ep_combine_kernel(const __grid_constant__ EpRank r,
                                                                       const __grid_constant__ EpCombineOfferedArgs given) {
    if (ep_block_any(ep_closed(r))) return;
    const ep_u64 began = ep_now();
    const EpCombineRingArgs& ring = given.ring;
    const EpCombineArgs& a = ring.combine;
    const EpBlockRole& role = given.block[ep_warp()];
    const ep_u32 pulling = ep_threads() / 32 - a.copiers, ranks = r.w.ranks;
    EpSource* sources = (EpSource*)ep_pool;
    /* For the reducer of rings: a part of a row at a time, of one unit of each lane. Shared, as registers are all needed. */
    __shared__ EpDesk desk;
    if (threadIdx.x == 0) desk = ep_desk(r, (ep_u8*)(sources + ranks), 2, 512);
    ep_u32* there = (ep_u32*)((ep_u8*)(sources + ranks) + ep_desk_bytes(r, 2, 512)); /* [pulling, ranks] */
    ep_u8* memory = ep_pool + ep_round_128((ep_u32)((ep_u8*)(there + pulling * ranks) - ep_pool));
    bool pulled = true;
    if (role.duty == EP_DUTY_REDUCER) pulled = ep_pull(r, a, given.sums, sources, memory, there, role, began);
    else ep_offer_rows(r, a, memory + ep_pull_bytes(given.sums, pulling), role, began);
    const bool all = !ep_block_any(!pulled), leaves = a.base == EP_NO_BASE || ring.role_count > ep_blocks();
    const bool reduces = role.duty == EP_DUTY_REDUCER && role.index == 0 && ep_block() < ring.role_count;
    if (!all && !leaves && reduces && !ep_warp_any(ep_failed(r)))
        ep_reduce<1>(r, ring, sources, desk, ((const EpRole*)ring.roles)[ep_block()].channel, began);
    if (!ep_last_block_has_pulled(r, EP_MEETING_MOVED)) return;
    if (leaves) {
        const bool gives = a.base == EP_NO_BASE;
        if (threadIdx.x == 0) ep_local(r)->rings = !all ? 1 : gives ? 2 : 0;
        if (!all || gives) return;
    }
    ep_end_combine(r, a, began);
}
