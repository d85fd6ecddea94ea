/*
 * ep_offers.h: what both kernels of a combine know: its parameters, and where the peers' rows can be pulled from.
 */
#ifndef EP_OFFERS_H
#define EP_OFFERS_H
#include "ep_notes.h"
#include "ep_pieces.h"

/* What an offer's note says in `first`: that its rows have headers; that they come in pieces (ep_pieces.h). */
#define EP_OFFERS_WEIGHTS 1u
#define EP_OFFERS_PIECES 2u

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
    ep_u64 first_of;   /* u32 [ranks + 1]: first row of each source; last: rows in all */
    ep_u64 copied;     /* u32 [ranks, EP_PIECES], zero before and after: chunks of each piece that are in the block */
    ep_u32 base_rows;
    ep_u32 offers_weights; /* whether the block has headers */
    ep_u32 tokens;
    ep_u32 copiers;    /* warps of a block that copy rows from y to the block; 0: they are there */
    ep_u32 stages;     /* of each copier, in shared memory */
    ep_u32 chunk;      /* bytes of a stage, a multiple of 16 */
};

/* Where the rows of one rank for this one lie: addresses of the first row and of its first choice. 0: elsewhere, or none. */
struct EpSource {
    ep_u64 payload;
    ep_u64 choices;
    ep_u32 payload_step;
    ep_u32 choices_step;
    ep_u32 rows;
    ep_u32 piece; /* rows of a piece; 0 where all are there from the start */
};

/* Whether all rows can be pulled, of the ranks that this thread looked at. By the first `threads` threads of a block. */
EP_DEV bool ep_learn_sources(const EpRank& r, const EpCombineArgs& a, EpSource* sources, ep_u32 threads, ep_u64 began) {
    const ep_u32* first_at = (const ep_u32*)a.first_at;
    bool all = true;
    for (ep_u32 rank = threadIdx.x; rank < r.w.ranks; rank += threads) {
        EpSource source = {0, 0, (ep_u32)r.w.result_stride, (ep_u32)r.w.header_bytes, 0, 0};
        const ep_u32 first = first_at[rank];
        EpNote note;
        if (rank == r.me) {
            source.payload = a.y + first * a.y_stride;
            source.payload_step = (ep_u32)a.y_stride;
            source.choices = a.own_weights ? a.own_weights + (ep_u64)first * r.w.topk * 4 : 0;
            source.choices_step = r.w.topk * 4;
        } else if (ep_takes_part(r, rank) && ep_take_note(r, rank, began, &note) &&
                   ep_check_block(r, rank, note, ep_results_bytes(r.w, note.opening.rows))) {
            source.rows = ((const ep_u32*)a.matrix)[r.me * r.w.ranks + rank];
            if (note.base != EP_NO_BASE) {
                const ep_u64 window = (ep_u64)ep_window(r, rank);
                source.payload = window + ep_results_payload(r.w, note.base, first);
                if (note.opening.first & EP_OFFERS_PIECES) source.piece = ep_rows_of_piece(source.rows);
                if (note.opening.first & EP_OFFERS_WEIGHTS)
                    source.choices = window + ep_results_header(r.w, note.base, note.opening.rows, first) + sizeof(EpRowHeader);
            } else {
                all &= source.rows == 0;
            }
        }
        sources[rank] = source;
    }
    return all;
}

/* Waits until the row at position of a rank's rows is there. How many are, from the first on, EP_FULL for all; 0 when that will not
   happen. By a warp. */
EP_DEV ep_u32 ep_await_row(const EpRank& r, const EpSource& s, ep_u32 rank, ep_u32 position, ep_u64 began) {
    const ep_u32 rows = ep_await_piece(r, rank, position / s.piece, began) * s.piece;
    return rows < s.rows ? rows : EP_FULL;
}

/* Where row position of a source lies, and the choice k of it: own weights lie without headers. */
EP_DEV const ep_u8* ep_source_row(const EpSource& s, ep_i32 position) {
    return (const ep_u8*)s.payload + (ep_u64)(ep_u32)position * s.payload_step;
}
EP_DEV float ep_source_weight(const EpSource& s, ep_i32 position, ep_u32 k, bool own) {
    if (s.choices == 0) return 0.0f;
    const ep_u8* row = (const ep_u8*)s.choices + (ep_u64)(ep_u32)position * s.choices_step;
    return *(const volatile float*)(own ? row + k * 4 : row + k * sizeof(EpChoice) + 4);
}

#endif
