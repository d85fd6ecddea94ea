/*
 * ep_ceiling_kernel: what stores of so many multiprocessors can carry to all peers at once. For measurements.
 *
 *   launch   any number of blocks of 1024 threads
 *   memory   `bytes` bytes of the own GPU, stored to every peer's window at `base`, each source at a place of its own
 *
 * A thread loads 64 bytes and stores them to every peer, so that only the links limit it. Nothing else may run.
 */
#include "ep_near.h"

extern "C" __global__ void __launch_bounds__(1024, 1) ep_ceiling_kernel(const __grid_constant__ EpRank r,
                                                                       const __grid_constant__ EpCeilingArgs a) {
    const ep_u64 step = (ep_u64)gridDim.x * blockDim.x, pieces = a.bytes / 16;
    const ep_u8* from = (const ep_u8*)a.source;
    for (ep_u64 first = (ep_u64)blockIdx.x * blockDim.x + threadIdx.x; first < pieces; first += 4 * step) {
        int4 held[4];
#pragma unroll
        for (ep_u32 i = 0; i < 4; ++i)
            if (first + i * step < pieces) held[i] = ep_ld16(from + (first + i * step) * 16);
        for (ep_u32 turn = 1; turn < r.w.ranks; ++turn) {
            const ep_u32 peer = (r.me + turn) % r.w.ranks;
            const EpAt to = ep_at(r, peer, a.base + r.me * a.bytes);
#pragma unroll
            for (ep_u32 i = 0; i < 4; ++i)
                if (first + i * step < pieces) ep_put16(to + (first + i * step) * 16, held[i]);
        }
    }
}
