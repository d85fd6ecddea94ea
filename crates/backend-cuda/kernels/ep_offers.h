/*
 * ep_offers.h: what both kernels of a combine know: its parameters, and where the peers' rows can be pulled from.
 */
#ifndef EP_OFFERS_H
#define EP_OFFERS_H
#include "ep_notes.h"

struct EpCombineArgs {
    ep_u64 y;          /* own rows; y_stride bytes apart */
    ep_u64 y_stride;
    ep_u64 position;   /* i32 [tokens, ranks] */
    ep_u64 first_at;   /* u32 [ranks]: at each rank, the first row from here */
    ep_u64 matrix;     /* u32 [ranks, ranks]: rows from source to destination of the dispatch */
    ep_u64 bias[2];    /* rows, bias_stride bytes apart, or 0; the first is given where the second is */
    ep_u64 bias_stride;
    ep_u64 out;        /* [tokens] rows, out_stride bytes apart */
    ep_u64 out_stride;
    ep_u64 weights;    /* out: f32 [tokens, topk], or 0 */
    ep_u64 own_weights; /* f32 [rows, topk] of the own rows, or 0 */
    ep_u64 base;       /* the offered block, or EP_NO_BASE */
    ep_u32 base_rows;
    ep_u32 offers_weights; /* whether the block has headers */
    ep_u32 tokens;
    ep_u32 reserved;
};

/* Where the rows of one rank for this one lie: addresses of the first row and of its first choice. 0: elsewhere, or none. */
struct EpSource {
    ep_u64 payload;
    ep_u64 choices;
    ep_u64 payload_step;
    ep_u64 choices_step;
};

/* Whether all rows can be pulled. By all threads of a block. */
EP_DEV bool ep_learn_sources(const EpRank& r, const EpCombineArgs& a, EpSource* sources, ep_u64 began) {
    const ep_u32* first_at = (const ep_u32*)a.first_at;
    bool all = true;
    for (ep_u32 rank = threadIdx.x; rank < r.w.ranks; rank += blockDim.x) {
        EpSource source = {0, 0, r.w.result_stride, r.w.header_bytes};
        const ep_u32 first = first_at[rank];
        EpNote note;
        if (rank == r.me) {
            source.payload = a.y + first * a.y_stride;
            source.payload_step = a.y_stride;
            source.choices = a.own_weights ? a.own_weights + (ep_u64)first * r.w.topk * 4 : 0;
            source.choices_step = r.w.topk * 4;
        } else if (ep_takes_part(r, rank) && ep_take_note(r, rank, began, &note) &&
                   ep_check_block(r, rank, note, ep_results_bytes(r.w, note.opening.rows))) {
            if (note.base != EP_NO_BASE) {
                const ep_u64 window = (ep_u64)ep_window(r, rank);
                source.payload = window + ep_results_payload(r.w, note.base, first);
                if (note.opening.first)
                    source.choices = window + ep_results_header(r.w, note.base, note.opening.rows, first) + sizeof(EpRowHeader);
            } else {
                all &= ((const ep_u32*)a.matrix)[r.me * r.w.ranks + rank] == 0;
            }
        }
        sources[rank] = source;
    }
    return __syncthreads_and(all);
}

/* Where row position of a source lies, and the choice k of it: own weights lie without headers. */
EP_DEV const ep_u8* ep_source_row(const EpSource& s, ep_i32 position) {
    return (const ep_u8*)s.payload + (ep_u64)position * s.payload_step;
}
EP_DEV float ep_source_weight(const EpSource& s, ep_i32 position, ep_u32 k, bool own) {
    if (s.choices == 0) return 0.0f;
    const ep_u8* row = (const ep_u8*)s.choices + (ep_u64)position * s.choices_step;
    return *(const volatile float*)(own ? row + k * 4 : row + k * sizeof(EpChoice) + 4);
}

#endif
