/*
 * ep_offer_kernel: writes the headers of rows that are offered for pulling, so that weights travel back with them.
 *
 *   launch   any number of blocks of 256 threads, before ep_combine_kernel on the same stream; nothing is waited for
 */
#include "ep_notes.h"

extern "C" __global__ void __launch_bounds__(256) ep_offer_kernel(const __grid_constant__ EpRank r,
                                                                 const __grid_constant__ EpOfferArgs a) {
    if (ep_closed(r)) return;
    const ep_u32 ranks = r.w.ranks, topk = r.w.topk, parts = 1 + topk;
    const ep_u32* first_of = (const ep_u32*)a.first_of;
    const ep_u64 items = (ep_u64)a.rows * parts, step = (ep_u64)gridDim.x * blockDim.x;
    for (ep_u64 item = (ep_u64)blockIdx.x * blockDim.x + threadIdx.x; item < items; item += step) {
        const ep_u32 row = (ep_u32)(item / parts), part = (ep_u32)(item % parts);
        ep_u8* header = ep_own(r) + ep_results_header(r.w, a.base, row);
        if (row >= first_of[ranks]) continue;
        if (part == 0) {
            ep_u32 source = 0;
            while (source + 1 < ranks && first_of[source + 1] <= row) ++source;
            ep_st16(header, make_int4((int)r.me, ((const ep_i32*)a.source_token)[row], (int)(row - first_of[source]),
                                      (int)(ep_u32)ep_op(r)));
        } else {
            EpChoice choice = {-1, ((const float*)a.topk_weights)[(ep_u64)row * topk + part - 1]};
            ((EpChoice*)(header + sizeof(EpRowHeader)))[part - 1] = choice;
        }
    }
}
