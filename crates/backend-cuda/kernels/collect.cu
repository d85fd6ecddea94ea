/*
 * ep_collect_kernel: copies an output that lies anywhere into the block of the window that peers pull from.
 *
 *   launch   any number of blocks of 1024 threads; waits for nobody
 *   memory   both in memory of the own GPU. The rows of the own rank are read where they are. How many rows there are is known to
 *            the device alone, so that a graph may replay it
 *
 * Loads are not kept in the first cache, stores are in the second: peers pull them next.
 */
#include "ep_verbs.h"

struct EpCollectArgs {
    ep_u64 from;
    ep_u64 to;
    ep_u64 stride;   /* from row to row, at both: a multiple of 16 bytes */
    ep_u64 first_of; /* u32 [ranks + 1]: first row of each source; last: rows in all */
};
EP_CHECK_ARGS(EpCollectArgs);

extern "C" __global__ void __launch_bounds__(1024, 1) ep_collect_kernel(const __grid_constant__ EpRank r,
                                                                        const __grid_constant__ EpCollectArgs a) {
    if (ep_closed(r)) return;
    const ep_u32* first_of = (const ep_u32*)a.first_of;
    const ep_u64 step = (ep_u64)gridDim.x * blockDim.x, pieces_of_row = a.stride / 16;
    const ep_u64 before = first_of[r.me] * pieces_of_row;
    const ep_u64 skipped = (first_of[r.me + 1] - first_of[r.me]) * pieces_of_row;
    const ep_u64 pieces = first_of[r.w.ranks] * pieces_of_row - skipped;
    for (ep_u64 first = (ep_u64)blockIdx.x * blockDim.x + threadIdx.x; first < pieces; first += 8 * step) {
        int4 held[8];
#pragma unroll
        for (ep_u32 i = 0; i < 8; ++i) {
            const ep_u64 at = first + i * step;
            if (at < pieces) held[i] = ep_ld16_once((const ep_u8*)a.from + (at < before ? at : at + skipped) * 16);
        }
#pragma unroll
        for (ep_u32 i = 0; i < 8; ++i) {
            const ep_u64 at = first + i * step;
            if (at < pieces) ep_st16((ep_u8*)a.to + (at < before ? at : at + skipped) * 16, held[i]);
        }
    }
}
