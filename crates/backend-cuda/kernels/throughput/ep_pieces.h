/*
 * ep_pieces.h: rows that are offered before they are in the window. Their owner copies them there piece by piece, and says of each
 * piece when it may be pulled.
 *
 *   cells    ep_piece_cell, by generation, writer and piece. Each is raised to the number of the operation
 *            once that piece of the writer's rows for this rank is in the writer's window. Pieces are raised in any order
 *   pieces   the rows for a rank are cut into EP_PIECES of equal length, the last ones shorter or empty; empty ones are never raised
 */
#ifndef EP_PIECES_H
#define EP_PIECES_H
#include "ep_wait.h"

/* One for each lane of a warp, which looks at all cells of a writer at once. */
static_assert(EP_PIECES == 32, "a lane for each piece");

/* Rows of a piece, but for the last ones, of so many rows for a rank. */
EP_DEV ep_u32 ep_rows_of_piece(ep_u32 rows) { return (rows + EP_PIECES - 1) / EP_PIECES; }

/* The lane that rows of this node travel on: pieces are told of there. */
EP_DEV ep_u32 ep_piece_lane(const EpRank& r) { return ep_lane_data(ep_own_track(r.w, r.me, 0)); }

/* Waits until a piece of writer's rows is there. How many are, from the first on; 0 when that will not happen. By a warp, all of which
   may then load them. */
EP_DEV_APART ep_u32 ep_await_piece(const EpRank& r, ep_u32 writer, ep_u32 piece, ep_u64 began) {
    const ep_u32 lane = ep_warp_lane(), at = ep_piece_lane(r);
    const ep_u64 op = ep_op(r), cell = ep_piece_cell(r.w, r.generation, writer, lane);
    bool vain = lane == 0 && !ep_verb(r, at << 16 | EP_COUNTER_PLACED << 12 | writer, op);
    for (ep_u32 spin = 1;; ++spin) {
        if (ep_warp_shuffle(vain, 0)) return 0;
        const ep_u64 seen = ep_look(r, cell);
        const ep_u32 there = ep_bits_below(ep_warp_votes(seen >= op));
        if (there > piece) {
            if (spin > 64 && lane == 0) ep_unsuspect(r, op, EP_PHASE_ROWS, writer);
            ep_warp_meet();
            return there;
        }
        const ep_u64 of_piece = ep_warp_shuffle(seen, piece);
        if (spin % 64 == 0 && lane == 0)
            vain = ep_wait_is_vain(r, writer, at, ep_piece_cell(r.w, r.generation, writer, piece), EP_PHASE_ROWS, of_piece, op, began);
    }
}
#endif
