/*
 * ep_offers.h: what both kernels of a combine know: where the peers' rows can be pulled from.
 */
#ifndef EP_OFFERS_H
#define EP_OFFERS_H
#include "ep_notes.h"
#include "ep_pieces.h"

/* Where a token's rows lie among those of each rank; -1: it did not go there. */
EP_DEV const ep_i32* ep_positions(const EpRank& r, const EpCombineArgs& a, ep_u32 token) {
    return (const ep_i32*)a.position + (ep_u64)token * r.w.ranks;
}

/* What an offer's note says in `first`: that its rows have headers; that they come in pieces (ep_pieces.h). */
#define EP_OFFERS_WEIGHTS 1u
#define EP_OFFERS_PIECES 2u

/* Where the rows of one rank for this one lie: the first row and its first choice. Nowhere: elsewhere, or none. */
struct EpSource {
    EpAt payload;
    EpAt choices;
    ep_u32 payload_step;
    ep_u32 choices_step;
    ep_u32 rows;
    ep_u32 piece; /* rows of a piece; 0 where all are there from the start */
};
static_assert(sizeof(EpSource) == EP_SOURCE_BYTES, "the host makes room for another EpSource");

/* Whether all rows can be pulled, of the ranks that this thread looked at. By the first `threads` threads of a block. */
EP_DEV bool ep_learn_sources(const EpRank& r, const EpCombineArgs& a, EpSource* sources, ep_u32 threads, ep_u64 began) {
    const ep_u32* first_at = (const ep_u32*)a.first_at;
    bool all = true;
    for (ep_u32 rank = ep_thread(); rank < r.w.ranks; rank += threads) {
        EpSource source = {ep_nowhere(), ep_nowhere(), (ep_u32)r.w.result_stride, (ep_u32)r.w.header_bytes, 0, 0};
        const ep_u32 first = first_at[rank];
        EpNote note;
        if (rank == r.me) {
            source.payload = ep_here(a.y + first * a.y_stride);
            source.payload_step = (ep_u32)a.y_stride;
            if (a.own_weights) source.choices = ep_here(a.own_weights + (ep_u64)first * r.w.topk * 4);
            source.choices_step = r.w.topk * 4;
            if (a.folds) {
                source.rows = ((const ep_u32*)a.matrix)[r.me * r.w.ranks + rank];
                source.piece = ep_rows_of_piece(source.rows);
            }
        } else if (ep_is_neighbour(r, rank) && !ep_is_beyond(r, rank) && ep_take_note(r, rank, began, &note) &&
                   ep_check_block(r, rank, note, ep_results_bytes(r.w, note.opening.rows))) {
            source.rows = ((const ep_u32*)a.matrix)[r.me * r.w.ranks + rank];
            if (note.base != EP_NO_BASE) {
                source.payload = ep_at(r, rank, ep_results_payload(r.w, note.base, note.opening.rows, first));
                if (note.opening.first & EP_OFFERS_PIECES) source.piece = ep_rows_of_piece(source.rows);
                if (note.opening.first & EP_OFFERS_WEIGHTS)
                    source.choices = ep_at(r, rank, ep_results_header(r.w, note.base, first) + sizeof(EpRowHeader));
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
EP_DEV EpAt ep_source_row(const EpSource& s, ep_i32 position) {
    return s.payload + (ep_u64)(ep_u32)position * s.payload_step;
}
EP_DEV float ep_source_weight(const EpSource& s, ep_i32 position, ep_u32 k, bool own) {
    if (!ep_is_somewhere(s.choices)) return 0.0f;
    const EpAt row = s.choices + (ep_u64)(ep_u32)position * s.choices_step;
    return ep_float_of(ep_get4(row + (own ? k * 4 : k * sizeof(EpChoice) + 4)));
}

#endif
