/*
 * ep_rings.h: both ends of a credit ring, each held by one core. The cursors are ep_protocol.h's; here are their places, publishes and looks.
 *
 * No end waits by itself: a role looks at all its rings, moves what can move, and publishes what is pending before it looks again in vain
 * (polite waiting). Counts run on for the life of the communicator; slots are counted anew from the start of every operation, when all
 * rings of the writer into the peer are empty, so that calls may cut them differently.
 *
 * A ring from another server is emptied like one of the own: its rows lie in the own window. Credit goes by mail.
 */
#ifndef EP_RINGS_H
#define EP_RINGS_H
#include "ep_mail.h"

/* Keeps a count for the next launch: by a copy, since other cores keep theirs in the same line. */
EP_DEV void ep_keep_cursor(EpCore& c, ep_u64 at, ep_u64 count) {
    if (EP_PLANTED(c, SCALAR_STORE) || EP_PLANTED(c, SHARED_LINE)) {
        GlobalTensor<uint64_t> word = ep_gm<uint64_t>(at);
        word.SetValue(0, count);
        if (EP_PLANTED(c, SHARED_LINE)) DataCacheCleanAndInvalid<uint64_t, CacheLine::SINGLE_CACHE_LINE, DcciDst::CACHELINE_OUT>(word);
        return;
    }
    ep_store_word(c, at, count, 8);
}

/* How the ring on a track is cut. */
EP_DEV const EpRings& ep_cut(const EpCore& c, ep_u32 track) { return ep_is_far(c.launch.r.w, track) ? c.far : c.launch.rings; }

/* ---- the filling end ---- */

struct EpOutlet {
    EpProducer ring;
    ep_u32 peer, track;
};

EP_DEV void ep_outlet_begin(const EpCore& c, EpOutlet& o, ep_u32 peer, ep_u32 track) {
    o.peer = peer;
    o.track = track;
    o.ring = ep_producer_at(ep_fresh<uint64_t>(ep_cursor(c, 0, peer, track)));
}

/* Whether all rings into the peer are empty, as they must be since calls may cut them differently: the peer has ended the operation before.
   Heads of the other channels' rings would not do: they may belong to this operation already, and to wait for them closes a circle where
   the cores that empty them wait for this one. */
EP_DEV bool ep_outlet_is_clear(const EpCore& c, const EpOutlet& o) {
    if (c.op <= c.launch.r.first_op || EP_PLANTED(c, NOT_CLEAR)) return true;
    return ep_peek(c, o.peer, EP_LANE_CONTROL, EP_COUNTER_DONE) >= c.op - 1;
}

/* Publishes what is pending. Its rows have landed before. */
EP_DEV void ep_outlet_publish(EpCore& c, EpOutlet& o) {
    if (o.ring.published == o.ring.tail) return;
    if (EP_PLANTED(c, TAIL_LOST) && o.ring.tail - o.ring.origin > 2) return;
    if (!EP_PLANTED(c, TAIL_BEFORE_ROWS)) ep_landed(c);
    ep_publish(c, o.peer, ep_lane_data(o.track), EP_COUNTER_TAIL, o.ring.tail + (EP_PLANTED(c, TAIL_BEYOND) ? c.launch.rings.slots : 0));
    o.ring.published = o.ring.tail;
}

/* Whether a slot is free. A head beyond the tail is refused. */
EP_DEV bool ep_outlet_has_room(EpCore& c, EpOutlet& o) {
    const EpRings& rings = c.launch.rings;
    if (!ep_producer_is_full(o.ring, rings)) return true;
    const ep_u64 head = ep_peek(c, o.peer, ep_lane_credit(o.track), EP_COUNTER_HEAD);
    if (!ep_producer_saw(o.ring, head)) {
        ep_refuse(c, o.peer, EP_FIELD_HEAD, o.ring.tail, head);
        return false;
    }
    return EP_PLANTED(c, NO_CREDIT) || !ep_producer_is_full(o.ring, rings);
}

/* Where the next row goes, in the peer's window. */
EP_DEV ep_u64 ep_outlet_slot(const EpCore& c, const EpOutlet& o) {
    const EpRank& r = c.launch.r;
    const ep_u32 slot = ep_producer_slot(o.ring, c.launch.rings);
    const ep_u32 other = EP_PLANTED(c, WRONG_SLOT) ? (slot + 1) % c.launch.rings.slots : EP_PLANTED(c, BEYOND_THE_RING) ? slot + 1 : slot;
    const ep_u64 window = EP_PLANTED(c, NO_WINDOW) ? r.windows : ep_window(c, o.peer);
    return window + ep_ring_slot(r.w, c.launch.rings, r.me, o.track, other);
}

/* The slot's copies were issued. */
EP_DEV void ep_outlet_push(EpCore& c, EpOutlet& o) {
    if (ep_producer_push(o.ring, c.launch.rings)) ep_outlet_publish(c, o);
}

EP_DEV void ep_outlet_close(EpCore& c, EpOutlet& o) {
    ep_outlet_publish(c, o);
    ep_keep_cursor(c, ep_cursor(c, 0, o.peer, o.track), o.ring.tail);
}

/* ---- the emptying end ---- */

struct EpInlet {
    EpConsumer ring;
    ep_u32 peer, track;
};

EP_DEV void ep_inlet_begin(const EpCore& c, EpInlet& i, ep_u32 peer, ep_u32 track) {
    i.peer = peer;
    i.track = track;
    i.ring = ep_consumer_at(ep_fresh<uint64_t>(ep_cursor(c, 1, peer, track)));
}

/* Whether a row is there. A tail beyond the ring is refused. */
EP_DEV bool ep_inlet_look(EpCore& c, EpInlet& i) {
    if (ep_consumer_has_row(i.ring)) return true;
    const ep_u64 tail = ep_peek(c, i.peer, ep_lane_data(i.track), EP_COUNTER_TAIL);
    if (ep_consumer_saw(i.ring, ep_cut(c, i.track), tail)) return ep_consumer_has_row(i.ring);
    ep_refuse(c, i.peer, EP_FIELD_TAIL, ep_consumer_limit(i.ring, ep_cut(c, i.track)), tail);
    return false;
}

EP_DEV ep_u64 ep_inlet_slot(const EpCore& c, const EpInlet& i) {
    return c.own + ep_ring_slot(c.launch.r.w, c.launch.rings, i.peer, i.track, ep_consumer_slot(i.ring, ep_cut(c, i.track)));
}

/* Returns what credit is held. All rows that were popped have been read. */
EP_DEV void ep_inlet_return(EpCore& c, EpInlet& i) {
    if (i.ring.returned == i.ring.head) return;
    if (ep_is_far(c.launch.r.w, i.track)) {
        const ep_u32 channel = i.track - ep_far_track(c.launch.r.w, 0);
        ep_store_word(c, ep_mail_of_ring(c, ep_node_of(c, i.peer), channel, EP_MAIL_OWED), i.ring.head, 8);
    } else ep_publish(c, i.peer, ep_lane_credit(i.track), EP_COUNTER_HEAD, i.ring.head + (EP_PLANTED(c, HEAD_BEYOND) ? c.launch.rings.slots : 0));
    i.ring.returned = i.ring.head;
}

/* A row has been read. */
EP_DEV void ep_inlet_pop(EpCore& c, EpInlet& i) {
    if (ep_consumer_pop(i.ring, ep_cut(c, i.track))) ep_inlet_return(c, i);
}

EP_DEV void ep_inlet_close(EpCore& c, EpInlet& i) {
    ep_inlet_return(c, i);
    ep_keep_cursor(c, ep_cursor(c, 1, i.peer, i.track), i.ring.head);
}

#endif
