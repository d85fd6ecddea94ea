/*
 * ep_unpack_kernel: what the user learns of placed rows (ep_unpack.h), where no launch finds their slots, and does that beside.
 *
 *   launch   any number of blocks of 256 threads, behind the launch of ep_dispatch_kernel that brought the headers; nothing is waited for
 *   memory   the headers in the own block; outputs in device memory
 */
#include "ep_unpack.h"

extern "C" __global__ void __launch_bounds__(256) ep_unpack_kernel(const __grid_constant__ EpRank r,
                                                                  const __grid_constant__ EpUnpackArgs a) {
    if (ep_closed(r)) return;
    if (ep_stays(r, a.ahead)) return;
    ep_unpack_rows(r, a, 0, a.rows, blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x);
}
