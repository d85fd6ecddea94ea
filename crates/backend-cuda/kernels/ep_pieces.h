/*
 * ep_pieces.h: rows that are offered before they are in the window. Their owner copies them there piece by piece, and says of each
 * piece when it may be pulled.
 *
 *   cells    behind the window, [2, ranks, EP_PIECES]: by generation, writer and piece. Each is raised to the number of the operation
 *            once that piece of the writer's rows for this rank is in the writer's window. Pieces are raised in any order
 *   pieces   the rows for a rank are cut into EP_PIECES of equal length, the last ones shorter or empty; empty ones are never raised
 */
#ifndef EP_PIECES_H
#define EP_PIECES_H
#include "ep_verbs.h"

/* One for each lane of a warp, which looks at all cells of a writer at once. */
#define EP_PIECES 32u
#ifdef EP_SIZE_PIECES
static_assert(EP_PIECES == EP_SIZE_PIECES, "the host makes room for another number of pieces");
#endif

/* Rows of a piece, but for the last ones, of so many rows for a rank. */
EP_DEV ep_u32 ep_rows_of_piece(ep_u32 rows) { return (rows + EP_PIECES - 1) / EP_PIECES; }

EP_DEV ep_u64 ep_piece_cell(const EpRank& r, ep_u32 writer, ep_u32 piece) {
    const ep_u64 line = (ep_u64)(r.generation % 2) * r.w.ranks + writer;
    return (r.w.window_bytes + 127) / 128 * 128 + (line * EP_PIECES + piece) * EP_CELL_BYTES;
}

/* What lies behind the cells, in the windows of all ranks. */
EP_DEV ep_u64 ep_behind_pieces(const EpRank& r) {
    return (r.w.window_bytes + 127) / 128 * 128 + 2ull * r.w.ranks * EP_PIECES * EP_CELL_BYTES;
}

/* The lane that rows of this node travel on: pieces are told of there. */
EP_DEV ep_u32 ep_piece_lane(const EpRank& r) { return ep_lane_data(ep_near_track(r.w, 0, 0)); }

/* Waits until a piece of writer's rows is there. How many are, from the first on; 0 when that will not happen. By a warp, all of which
   may then load them. */
__device__ __noinline__ ep_u32 ep_await_piece(const EpRank& r, ep_u32 writer, ep_u32 piece, ep_u64 began) {
    const ep_u32 lane = threadIdx.x % 32, at = ep_piece_lane(r);
    const ep_u64 op = ep_op(r), cell = ep_piece_cell(r, writer, lane);
    bool vain = lane == 0 && !ep_verb(r, at << 16 | EP_COUNTER_PLACED << 12 | writer, op);
    for (ep_u32 spin = 1;; ++spin) {
        if (__shfl_sync(EP_FULL, vain, 0)) return 0;
        const ep_u64 seen = ep_look(r, cell);
        const ep_u32 there = __clz(__brev(~__ballot_sync(EP_FULL, seen >= op)));
        if (there > piece) {
            if (spin > 64 && lane == 0) ep_unsuspect(r, op, EP_PHASE_ROWS, writer);
            __syncwarp();
            return there;
        }
        const ep_u64 of_piece = __shfl_sync(EP_FULL, seen, piece);
        if (spin % 64 == 0 && lane == 0)
            vain = ep_wait_is_vain(r, writer, at, ep_piece_cell(r, writer, piece), EP_PHASE_ROWS, of_piece, op, began);
    }
}
#endif
