/*
 * ep_low_send_cells.h: how the rows of a low-latency dispatch leave, where there are several nodes: into slots. A row within the node is announced by a cell
 * of its own; those of other nodes are staged and counted (ep_low_far.h). Headers go ahead, with the arrival behind them.
 */
#ifndef EP_LOW_SEND_CELLS_H
#define EP_LOW_SEND_CELLS_H
#include "ep_low_headers.h"

/* Choices are looked at while the first row is under way: nothing is announced before that. */
#define EP_LOW_LOOKS_FIRST false

/* Where the row of token goes, at a rank: to the slot of its token. */
EP_DEV EpAt ep_low_row_place(const EpRank& r, ep_u64 op, ep_u32 rank, ep_u32 token) {
    return ep_is_beyond(r, rank)
               ? ep_low_staged_row(r, rank, token)
               : ep_low_at(rank, ep_low_row(r.w, ep_planted(r, EP_PLANT_LOW_WRONG_BANK) ? op + 1 : op, r.me, token));
}
/* Choice k of the row's own header, and its beginning. */
EP_DEV void ep_low_keep_header(const EpRank& r, const EpLowSender& s, ep_u64 op, ep_u32 token, ep_u32 k, EpChoice choice) {
    if (k < r.w.topk) ((EpChoice*)(s.row + sizeof(EpRowHeader)))[k] = choice;
    if (k == 31) ep_st16(s.row, make_int4((int)r.me, (int)token, 0, (int)ep_low_stamp(r.generation, op)));
}

/* Puts the row at hand to the ranks that are free. By all threads. */
EP_DEV void ep_low_put_row(const EpRank& r, const EpLowSender& s) {
    const ep_u32 units = (ep_u32)(r.w.wire_bytes / 16);
    EP_SHORT for (ep_u32 unit = threadIdx.x; unit < units; unit += EP_LOW_THREADS) {
        const int4 v = ep_ld16(s.row + (ep_u64)unit * 16);
        EP_SHORT for (ep_u32 turn = 1; turn <= r.w.ranks; ++turn) {
            const ep_u32 rank = r.me + turn < r.w.ranks ? r.me + turn : r.me + turn - r.w.ranks;
            if (ep_low_goes_now(s, rank)) ep_put16(s.place[rank] + (ep_u64)unit * 16, v);
        }
    }
}
/* Says that it is where it goes, and counts it where it is staged. `early`: a planted fault, within the node. By the last warp, after a barrier. */
EP_DEV void ep_low_row_was_put(const EpRank& r, const EpLowSender& s, ep_u64 op, ep_u32 token, bool early) {
    EP_SHORT for (ep_u32 rank = ep_low_served(); rank < r.w.ranks; rank += 32) {
        if (!ep_low_goes_now(s, rank)) continue;
        if (!ep_is_beyond(r, rank)) ep_low_raise(r, op, rank, token);
        else if (!early) ep_low_staged_one(r, op, rank);
    }
}

/* Parts of a header as it is sent ahead: of its beginning, or two choices. */
EP_DEV ep_u32 ep_low_header_parts(const EpRank& r) { return (ep_u32)r.w.header_bytes / 16; }
EP_DEV EpUnit ep_low_make_header_part(const EpRank& r, const EpLowDispatchArgs& a, ep_u64 op, bool all, ep_u32 token, ep_u32 part) {
    if (part == 0) return make_int4((int)r.me, (int)token, 0, (int)ep_low_stamp(r.generation, op));
    const EpChoice first = ep_low_choice_to_send(r, a, all, token, 2 * part - 2), second = ep_low_choice_to_send(r, a, all, token, 2 * part - 1);
    return make_int4(first.expert, __float_as_int(first.weight), second.expert, __float_as_int(second.weight));
}
EP_DEV void ep_low_put_header_part(const EpRank& r, const EpLowSender&, ep_u64 op, ep_u32 rank, ep_u32 position, ep_u32 part, EpUnit v) {
    const EpAt head = ep_is_beyond(r, rank) ? ep_low_staged_head(r, rank, position) : ep_low_at(rank, ep_low_head(r.w, op, r.me, position));
    ep_put16(head + part * 16, v);
}

/* Says to the ranks that are filled now how many rows come. After a barrier behind their headers. */
EP_DEV void ep_low_say_rows(const EpRank& r, const EpLowSender& s, ep_u64 op) { ep_low_announce(r, op, EP_LOW_DISPATCH, s.rows, true, s.state); }
#endif
