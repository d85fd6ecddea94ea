/*
 * ep_unpack_kernel: from the headers of placed rows to the arrays that the user gets; refuses rows that do not belong there.
 *
 *   launch   any number of blocks of 256 threads, after ep_dispatch_kernel on the same stream; nothing is waited for
 *   memory   the headers in the own block; outputs in device memory. Rows beyond the received ones are marked as none
 */
#include "ep_notes.h"

extern "C" __global__ void __launch_bounds__(256) ep_unpack_kernel(const __grid_constant__ EpRank r,
                                                                  const __grid_constant__ EpUnpackArgs a) {
    const ep_u32 ranks = r.w.ranks, topk = r.w.topk;
    const ep_u32* first_of = (const ep_u32*)a.first_of;
    if (ep_closed(r)) return;
    /* The dispatch has ended: its number is ops_done. */
    const ep_u32 op = (ep_u32)ep_local(r)->ops_done;
    const ep_u32 received = first_of[ranks], parts = 1 + topk, step = gridDim.x * blockDim.x;
    const ep_u64 items = (ep_u64)a.rows * parts;
    for (ep_u64 item = blockIdx.x * blockDim.x + threadIdx.x; item < items; item += step) {
        const ep_u32 row = (ep_u32)(item / parts), part = (ep_u32)(item % parts);
        const ep_u8* header = ep_own(r) + ep_block_header(r.w, a.base, a.rows, row);
        if (part == 0) {
            EpRowHeader own = {0xffffffffu, 0xffffffffu, 0, op};
            if (row < received) {
                const int4 bytes = ep_ld16(header);
                own.source_rank = (ep_u32)bytes.x;
                own.source_token = (ep_u32)bytes.y;
                own.position = (ep_u32)bytes.z;
                own.op = (ep_u32)bytes.w;
                ep_u32 source = 0;
                while (source + 1 < ranks && first_of[source + 1] <= row) ++source;
                const ep_u32 position = row - first_of[source];
                EpDifference d = {EP_SAME, 0, 0};
                if (own.op != op) d = EpDifference{EP_FIELD_ROW_OP, op, own.op};
                else if (own.source_rank != source) d = EpDifference{EP_FIELD_ROW_SOURCE, source, own.source_rank};
                else if (own.position != position) d = EpDifference{EP_FIELD_ROW_POSITION, position, own.position};
                ep_is_same(r, source, d);
            }
            ((ep_u32*)a.source_rank)[row] = own.source_rank;
            ((ep_u32*)a.source_token)[row] = own.source_token;
        } else if (a.topk_idx) {
            EpChoice choice = {-1, 0.0f};
            if (row < received) choice = ((const EpChoice*)(header + sizeof(EpRowHeader)))[part - 1];
            const ep_u64 at = (ep_u64)row * topk + part - 1;
            ((ep_i64*)a.topk_idx)[at] = choice.expert;
            ((float*)a.topk_weights)[at] = choice.weight;
        }
    }
}
