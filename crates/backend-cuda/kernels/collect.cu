/*
 * ep_collect_kernel: copies an output that lies anywhere into the block of the window that peers pull from.
 *
 *   launch   any number of blocks of 1024 threads; waits for nobody
 *   memory   both in memory of the own GPU. The rows of the own rank, skip_begin .. skip_end, are read where they are
 *
 * Loads are not kept in the first cache, stores are in the second: peers pull them next.
 */
#include "ep_verbs.h"

struct EpCollectArgs {
    ep_u64 from;
    ep_u64 to;
    ep_u64 bytes; /* all in bytes, multiples of 16 */
    ep_u64 skip_begin;
    ep_u64 skip_end;
};
EP_CHECK_ARGS(EpCollectArgs);

extern "C" __global__ void __launch_bounds__(1024, 1) ep_collect_kernel(const __grid_constant__ EpRank r,
                                                                        const __grid_constant__ EpCollectArgs a) {
    if (ep_failed(r)) return;
    const ep_u64 step = (ep_u64)gridDim.x * blockDim.x, skipped = (a.skip_end - a.skip_begin) / 16;
    const ep_u64 before = a.skip_begin / 16, pieces = a.bytes / 16 - skipped;
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
