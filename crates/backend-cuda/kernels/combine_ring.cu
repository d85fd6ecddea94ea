/*
 * ep_combine_ring_kernel: the rings of a rank that has offered no block, or that has more channels than blocks: it gives rows back, and
 * reduces where some of its own come through rings (ep_combine_ring.h). Follows ep_combine_kernel, and ends at once where that left
 * nothing to do.
 *
 *   launch   enough warps for all roles, co-resident with those of the other ranks (cooperative)
 *   roles    those of the rings. The block that comes last ends the operation
 *   memory   shared: where rows lie; what reducers need
 */
#include "ep_combine_ring.h"

EP_CHECK_ARGS(EpCombineRingArgs);

extern __shared__ __align__(16) ep_u8 ep_pool[];

extern "C" __global__ void __launch_bounds__(256, 1) ep_combine_ring_kernel(const __grid_constant__ EpRank r,
                                                                        const __grid_constant__ EpCombineRingArgs a) {
    if (ep_closed(r)) return;
    const ep_u32 left = ep_local(r)->rings;
    if (left == 0) return;
    const ep_u64 began = ep_now();
    EpSource* sources = (EpSource*)ep_pool;
    ep_learn_sources(r, a.combine, sources, blockDim.x, began);
    __syncthreads();
    /* Returners of all peers, and in the place of the own rank's, the reducer. */
    const ep_u32 ranks = r.w.ranks, in_block = threadIdx.x / 32, warp = blockIdx.x * (blockDim.x / 32) + in_block;
    const ep_u32 channel = warp / ranks, peer = warp % ranks;
    if (channel < a.rings.channels && ep_takes_part(r, peer)) {
        /* Of so many warps in a row every ranks-th is a reducer. */
        EpRoute* routes = (EpRoute*)(sources + ranks) + in_block / ranks * ranks;
        if (peer == r.me && left == 1) ep_reduce(r, a, sources, routes, channel, began);
        if (peer != r.me && a.combine.base == EP_NO_BASE && ep_gives_back(r, a, peer, r.me)) ep_give_back(r, a, peer, channel, began);
    }
    if (!ep_last_block(r, EP_MEETING_MOVED)) return;
    if (ep_failed(r)) return;
    ep_end_combine(r, a.combine, began);
}
