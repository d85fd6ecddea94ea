/*
 * ep_unpack.h: from the headers of placed rows to the arrays that the user gets; refuses rows that do not belong there. Rows beyond the received ones are
 * marked as none.
 */
#ifndef EP_UNPACK_H
#define EP_UNPACK_H
#include "ep_notes.h"

/* Unpacks rows begin .. end, an item of one in `threads` of them by thread `number`: its source, or one of its choices. */
EP_DEV void ep_unpack_rows(const EpRank& r, const EpUnpackArgs& a, ep_u32 begin, ep_u32 end, ep_u32 number, ep_u32 threads) {
    const ep_u32 ranks = r.w.ranks, topk = r.w.topk;
    const ep_u32* first_of = (const ep_u32*)a.first_of;
    /* Of the dispatch, which may have ended or be under way. */
    const ep_u32 op = (ep_u32)((const EpPlan*)r.plan)->op;
    /* Divisions of 64 bits would be calls. */
    const ep_u32 received = first_of[ranks], parts = 1 + topk, rows = threads / parts, rest = threads - rows * parts;
    ep_u32 part = number % parts, carry = 0;
    /* The first row that does not belong there. */
    ep_u32 wrong = EP_SAME, wrong_source = 0, mine = 0, theirs = 0;
    for (ep_u64 at_row = (ep_u64)begin + number / parts; at_row < end; at_row += rows + carry) {
        const ep_u32 row = (ep_u32)at_row;
        const ep_u8* header = ep_own(r) + ep_block_header(r.w, a.base, row);
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
#endif
