/*
 * ep_unpack_kernel: from the headers of placed rows to the arrays that the user gets; refuses rows that do not belong there.
 *
 *   launch   any number of blocks of 256 threads, behind the launch of ep_dispatch_kernel that brought the headers; nothing is waited for
 *   memory   the headers in the own block; outputs in device memory. Rows beyond the received ones are marked as none
 */
#include "ep_notes.h"

extern "C" __global__ void __launch_bounds__(256) ep_unpack_kernel(const __grid_constant__ EpRank r,
                                                                  const __grid_constant__ EpUnpackArgs a) {
    const ep_u32 ranks = r.w.ranks, topk = r.w.topk;
    const ep_u32* first_of = (const ep_u32*)a.first_of;
    if (ep_closed(r)) return;
    /* Of the dispatch, which may have ended or be under way. */
    const ep_u32 op = (ep_u32)((const EpPlan*)r.plan)->op;
    /* A thread's items are `step` apart; divisions of 64 bits would be calls. */
    const ep_u32 received = first_of[ranks], parts = 1 + topk, step = gridDim.x * blockDim.x;
    const ep_u32 begin = blockIdx.x * blockDim.x + threadIdx.x, rows = step / parts, rest = step - rows * parts;
    ep_u32 part = begin % parts, carry = 0;
    /* The first row that does not belong there. */
    ep_u32 wrong = EP_SAME, wrong_source = 0, mine = 0, theirs = 0;
    for (ep_u64 at_row = begin / parts; at_row < a.rows; at_row += rows + carry) {
        const ep_u32 row = (ep_u32)at_row;
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
                ep_u32 field = EP_SAME;
                if (own.op != op) field = EP_FIELD_ROW_OP;
                else if (own.source_rank != source) field = EP_FIELD_ROW_SOURCE;
                else if (own.position != position) field = EP_FIELD_ROW_POSITION;
                if (field != EP_SAME && wrong == EP_SAME) {
                    wrong = field;
                    wrong_source = source;
                    mine = field == EP_FIELD_ROW_OP ? op : field == EP_FIELD_ROW_SOURCE ? source : position;
                    theirs = field == EP_FIELD_ROW_OP ? own.op : field == EP_FIELD_ROW_SOURCE ? own.source_rank : own.position;
                }
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
        part += rest;
        carry = part >= parts;
        part -= carry * parts;
    }
    if (wrong != EP_SAME) ep_fail_mismatch(r, wrong_source, wrong, mine, theirs);
}
