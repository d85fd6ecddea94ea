/*
 * ep_fill.h: how a core fills the rings of a channel to all its peers, each at its own pace: senders of a dispatch, returners of a combine.
 *
 *   UB      two buffers: a piece of a payload, and the row's header
 *   waits   for no ring in particular. A core that waited for one peer would keep rows from the others: what they then wait for would hide who
 *           is to blame, and in a combine, where a reducer waits for one rank's row at a time, close a circle of waits
 */
#ifndef EP_FILL_H
#define EP_FILL_H
#include "ep_rows.h"

/* Rows that go into a ring before the next ring is looked at. */
#define EP_ROWS_A_VISIT 8u

/* Rings of the server that a core fills at a time: to each of its ranks, the rows of each server. */
#define EP_STREAMS 32u

/* The rows of a ring to one peer. */
struct EpStream {
    EpOutlet to;
    ep_u32 next;  /* where the next row is looked for: a token of a sender, a position of a returner */
    ep_u32 first; /* position of the first row */
    ep_u32 rows, left;
    ep_u32 source; /* of a returner: whose rows they are */
    bool clear, opened, closed;
};

EP_DEV void ep_stream_begin(const EpCore& c, EpStream& s, ep_u32 peer, ep_u32 track, ep_u32 next, ep_u32 first, ep_u32 rows) {
    ep_outlet_begin(c, s.to, peer, track);
    s.next = next;
    s.first = first;
    s.rows = s.left = rows;
    s.source = peer;
    s.clear = s.opened = s.closed = false;
}

/* Stores a row's header and choices: `choice(k)` for each k. The buffer is this core's; its payload follows. */
template <class Choice>
EP_DEV void ep_put_header(const EpCore& c, const EpBuffers& b, ep_u64 slot, ep_u32 token, ep_u32 position, const Choice& choice) {
    const ep_u32 i = b.turn, topk = c.launch.r.w.topk;
    ep_write_row_header(c, b.side[i], token, position);
    for (ep_u32 k = 0; k < topk; ++k) ep_write_choice(b.side[i], k, choice(k));
    if (!EP_PLANTED(c, HEADER_FLAG)) ep_written(i);
    ep_store(slot, b.side[i], (ep_u32)sizeof(EpRowHeader) + topk * (ep_u32)sizeof(EpChoice));
}

/* Puts a row into its ring, which has room: header, choices, and `bytes` of payload from `payload`. */
template <class Choice>
EP_DEV void ep_put_row(EpCore& c, EpBuffers& b, EpStream& s, ep_u32 token, ep_u32 position, const Choice& choice, ep_u64 payload, ep_u64 all) {
    const ep_u64 slot = ep_outlet_slot(c, s.to);
    for (ep_u64 at = 0; at < all; at += EP_PIECE_BYTES) {
        const ep_u32 i = ep_turn(c, b), bytes = ep_min(all - at, EP_PIECE_BYTES);
        ep_load(b.payload[i], payload + at, bytes);
        if (at == 0) ep_put_header(c, b, slot, token, position, choice);
        ep_filled(c, i);
        ep_store(slot + c.launch.r.w.header_bytes + at, b.payload[i], bytes);
        ep_turn_over(c, b);
    }
    --s.left;
    ep_outlet_push(c, s.to);
}

/* Moves what can move into a ring; whether something did. `put(c, b, s)` puts the next row. */
template <class Put> EP_DEV bool ep_fill(EpCore& c, EpBuffers& b, EpStream& s, const Put& put) {
    if (!s.clear && !ep_outlet_is_clear(c, s.to)) return false;
    s.clear = true;
    bool moved = false;
    if (!s.opened) {
        if (!ep_outlet_has_room(c, s.to)) return false;
        ep_put_opening(c, b, s.to, s.rows, s.first);
        s.opened = moved = true;
    }
    for (ep_u32 count = 0; count < EP_ROWS_A_VISIT && s.left > 0 && ep_outlet_has_room(c, s.to); ++count) {
        put(c, b, s);
        moved = true;
    }
    if (s.left == 0) {
        ep_outlet_close(c, s.to);
        s.closed = moved = true;
    }
    return moved;
}

/* Says what a stream waits for; whether that is in vain. */
EP_DEV bool ep_stream_vain(EpCore& c, const EpStream& s) {
    const EpOutlet& o = s.to;
    if (!s.clear) return ep_vain(c, o.peer, EP_LANE_CONTROL, EP_PHASE_BANK, 0, c.op - 1);
    return ep_vain(c, o.peer, ep_lane_credit(o.track), EP_PHASE_CREDIT, o.ring.head, ep_producer_awaits(o.ring, c.launch.rings));
}

/* Nothing but rings of the server. */
struct EpNoMore {
    EP_DEV bool fill(EpCore&, EpBuffers&) { return false; }
    EP_DEV bool is_open() const { return false; }
    EP_DEV bool vain(EpCore&) const { return false; }
};

/* Fills rings by turns until all their rows are there, or the rank has failed; and `more`, which fills other rings, by turns with these. */
template <class Put, class More>
EP_DEV void ep_fill_all(EpCore& c, EpBuffers& b, EpStream* of, ep_u32 streams, const Put& put, More& more) {
    for (;;) {
        bool moved = more.fill(c, b);
        ep_u32 open = streams;
        if (c.failed) return;
        for (ep_u32 i = streams; i-- > 0; ) {
            if (!of[i].closed) moved |= ep_fill(c, b, of[i], put);
            if (!of[i].closed) open = i;
            if (c.failed) return;
        }
        if (open == streams && !more.is_open()) return;
        if (moved) {
            ep_moved(c);
            continue;
        }
        for (ep_u32 i = 0; i < streams; ++i)
            if (!EP_PLANTED(c, IMPOLITE)) ep_outlet_publish(c, of[i].to);
        if (open == streams ? more.vain(c) : ep_stream_vain(c, of[open])) return;
    }
}

#endif
