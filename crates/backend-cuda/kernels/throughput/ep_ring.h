/*
 * ep_ring.h: both ends of a credit ring, each held by one warp (ep_core::ring says what must hold).
 *
 * Counts run on for the life of the communicator; slots are counted anew from the start of every operation, when the ring is
 * empty: the consumer returns all credit at the end of its own. So rings may be cut differently from call to call.
 *
 * The cursors are ep_protocol.h's; here are their places in windows, publishes and waits. A producer's count is written
 * by its warp at the end of its role, and read by the warps of the same peer when they open theirs.
 *
 * A ring is called near or far by its track alone: a far one has its producer's slots staged, and pushes them by puts (ep_far_ring.h). Roles read the
 * same for both, with the `rings` that ep_rings_of gives for the track.
 *
 * Polite waiting: an end publishes what is pending before it waits; a warp with several rings does so for all of them.
 */
#ifndef EP_RING_H
#define EP_RING_H
#include "ep_far_ring.h"
#include "ep_notes.h"

/* To a slot at the consumer, or to the own memory. */
EP_DEV void ep_store16(EpAt to, EpUnit unit) { ep_put16(to, unit); }
EP_DEV void ep_store16(ep_u8* to, EpUnit unit) { ep_st16(to, unit); }
EP_DEV void ep_store4(EpAt to, ep_u32 word) { ep_put4(to, word); }
EP_DEV void ep_store4(ep_u8* to, ep_u32 word) { *(ep_u32*)to = word; }

/* A row's bytes of the own memory, 16 at a time: eight loads of each lane in flight. Both places and the length in units of 16. */
template <class To> EP_DEV void ep_copy_row(To to, const ep_u8* from, ep_u32 bytes) {
    for (ep_u32 at = ep_warp_lane() * 16; at < bytes; at += 512 * 8) {
        EpUnit held[8];
#pragma unroll
        for (ep_u32 i = 0; i < 8; ++i)
            if (at + i * 512 < bytes) held[i] = ep_ld16_put(from + at + i * 512);
#pragma unroll
        for (ep_u32 i = 0; i < 8; ++i)
            if (at + i * 512 < bytes) ep_store16(to + (at + i * 512), held[i]);
    }
}

/* A row's scales in words of 4 bytes, which lie `step` bytes apart where they come from. */
template <class To> EP_DEV void ep_copy_words(To to, const ep_u8* from, ep_u64 step, ep_u32 bytes) {
    for (ep_u32 w = ep_warp_lane(); w < bytes / 4; w += 32) ep_store4(to + w * 4, *(const volatile ep_u32*)(from + w * step));
}

/* Where the count of a ring is kept between launches. side: 0 sent, 1 taken. */
EP_DEV ep_u64* ep_cursor(const EpRank& r, ep_u32 side, ep_u32 peer, ep_u32 track) {
    return (ep_u64*)r.cursors + ((ep_u64)side * r.w.ranks + peer) * r.w.tracks + track;
}

/* The filling end. All lanes hold the same values. */
struct EpOutlet {
    EpProducer ring;
    ep_u32 peer, track;
    EpStaged staged; /* of a ring between nodes; the first lane's alone is right */
};

/* One to a rank of this node, as the text says: so compilers leave out what rings between nodes need. */
struct EpOutletWithin : EpOutlet {};

EP_DEV EpOutletWithin ep_outlet_within(const EpProducer& ring, ep_u32 peer, ep_u32 track) { return EpOutletWithin{EpOutlet{ring, peer, track, EpStaged{}}}; }

/* Whether it leads to another node. */
EP_DEV bool ep_leads_beyond(const EpRank& r, const EpOutlet& o) { return ep_is_beyond(r, o.peer); }
EP_DEV bool ep_leads_beyond(const EpRank&, const EpOutletWithin&) { return false; }

/* Publishes the tail of a ring within the node. By one thread, which has fenced. */
EP_DEV void ep_outlet_tell(const EpRank& r, const EpOutlet& o) { ep_publish(r, o.peer, ep_lane_data(o.track), EP_COUNTER_TAIL, o.ring.tail); }
EP_DEV void ep_outlet_tell(const EpRank& r, const EpOutletWithin& o) {
    const ep_u32 lane = ep_lane_data(o.track);
    ep_raise_fenced(r, o.peer, lane, ep_at(r, o.peer, ep_cell(r.w, r.generation, r.me, lane, EP_COUNTER_TAIL)), o.ring.tail);
}

template <class Outlet> EP_DEV void ep_outlet_publish(const EpRank& r, const EpRings& rings, Outlet& o) {
    if (o.ring.published == o.ring.tail) return;
    ep_warp_meet();
    if (ep_warp_lane() == 0) {
        ep_event(r, EP_EVENT_PUBLISHED, o.peer, o.track, o.ring.tail, ep_op(r));
        if (ep_leads_beyond(r, o)) {
            ep_staged_post(r, rings, o.ring, o.staged, o.peer, o.track);
        } else {
            ep_fence_sys();
            ep_outlet_tell(r, o);
        }
    }
    o.ring.published = o.ring.tail;
}

/* Waits until the consumer's head has reached at_least. */
EP_DEV bool ep_outlet_await(const EpRank& r, EpOutlet& o, ep_u64 at_least, ep_u64 began) {
    bool there = true;
    if (ep_warp_lane() == 0) {
        const ep_u32 lane = ep_lane_credit(o.track);
        there = ep_wait(r, o.peer, lane, EP_COUNTER_HEAD, at_least, EP_PHASE_CREDIT, began);
        if (there) {
            const ep_u64 head = ep_peek(r, o.peer, lane, EP_COUNTER_HEAD);
            there = ep_producer_saw(o.ring, head);
            if (there) ep_event(r, EP_EVENT_SAW_HEAD, o.peer, o.track, head, ep_op(r));
            else ep_fail_mismatch(r, o.peer, EP_FIELD_HEAD, o.ring.tail, head);
        }
    }
    ep_warp_meet(); /* What the first lane has seen orders what the others do: a shuffle alone does not. */
    o.ring.head = ep_warp_shuffle(o.ring.head, 0);
    return ep_warp_shuffle(there, 0);
}

EP_DEV bool ep_outlet_open(const EpRank& r, EpOutlet& o, ep_u32 peer, ep_u32 track, ep_u64 began) {
    o.peer = peer;
    o.track = track;
    o.ring = ep_producer_at(*ep_cursor(r, 0, peer, track));
    o.staged = ep_staged_at(r, o.ring.tail, began);
    if (ep_warp_lane() == 0) ep_event(r, EP_EVENT_FILLS, peer, o.track, o.ring.tail, ep_op(r));
    /* The part may have been cut otherwise before: all rings into the peer must be empty, not just this one. They are when the peer has ended
       the operation before. To wait for the heads of the other rings would not do: those may be of this operation already, filled by a warp that
       was faster, and a reducer empties them when it has other ranks' rows, whose warps may wait like this one: a circle. */
    const ep_u64 before = ep_op(r) - 1;
    const bool empty = before < r.first_op || ep_warp_lane() != 0 ||
                       ep_wait(r, peer, EP_LANE_CONTROL, EP_COUNTER_DONE, before, EP_PHASE_BANK, began);
    if (!ep_warp_all(empty)) return false;
    return ep_outlet_await(r, o, o.ring.tail, began);
}

/* Before a row is put, in builds for tests. */
EP_DEV void ep_outlet_plant(const EpRank& r, const EpOutlet& o) {
#ifdef EP_TEST
    if (ep_warp_lane() == 0) {
        ep_delay(r, o.peer, o.ring.tail);
        if (ep_planted(r, EP_PLANT_TAIL_BEFORE_DATA)) {
            ep_publish(r, o.peer, ep_lane_data(o.track), EP_COUNTER_TAIL, o.ring.tail + 1);
            ep_be_slow();
        }
    }
    ep_warp_meet();
#endif
}

/* The next slot of the staging memory, once it may be written. */
EP_DEV bool ep_outlet_stage(const EpRank& r, const EpRings& rings, EpOutlet& o, EpAt* at) {
    const ep_u32 depth = ep_staging_slots(r.w, rings, o.track), before = (ep_u32)(o.ring.tail - o.ring.origin);
    const ep_u64 frees = before < depth ? 0 : o.ring.tail + 1 - depth;
    /* What is not put is never freed. */
    if (frees > o.ring.published) ep_outlet_publish(r, rings, o);
    const bool free = ep_warp_lane() != 0 || ep_planted(r, EP_PLANT_STAGING_NOT_FLUSHED) ||
                      ep_staged_flush(r, o.staged, frees, o.peer, o.track);
    *at = ep_at(r, r.me, ep_staging_slot(r.w, rings, o.peer, o.track, before % depth));
    return ep_warp_shuffle(free, 0);
}

/* Looks how far the consumer is, and waits for nothing. */
EP_DEV void ep_outlet_refresh(const EpRank& r, EpOutlet& o) {
    if (ep_warp_lane() == 0) {
        const ep_u64 head = ep_peek(r, o.peer, ep_lane_credit(o.track), EP_COUNTER_HEAD);
        /* What cannot be is left to who waits. */
        if (head > o.ring.head && ep_producer_saw(o.ring, head)) ep_event(r, EP_EVENT_SAW_HEAD, o.peer, o.track, head, ep_op(r));
    }
    o.ring.head = ep_warp_shuffle(o.ring.head, 0);
}

#ifdef EP_FAR_H
/* For how many rows, up to `most`, a ring between nodes has room now, and its staging memory, too. The first one's slot has been awaited. By a warp, whose first
   lane knows what was flushed. */
EP_DEV ep_u32 ep_outlet_room(const EpRank& r, const EpRings& rings, EpOutlet& o, ep_u32 most) {
    if (o.ring.tail + most - o.ring.head > rings.slots) ep_outlet_refresh(r, o);
    const ep_u64 room = rings.slots - (o.ring.tail - o.ring.head);
    const ep_u64 flushed = ep_warp_shuffle(o.staged.free, 0) + ep_staging_slots(r.w, rings, o.track);
    const ep_u64 staged = flushed > o.ring.tail ? flushed - o.ring.tail : 1;
    const ep_u64 rows = room < staged ? room : staged;
    return rows < most ? (ep_u32)rows : most;
}

/* The staging slot of the row behind `ahead` that are being filled. */
EP_DEV EpAt ep_outlet_staging(const EpRank& r, const EpRings& rings, const EpProducer& ring, ep_u32 peer, ep_u32 track, ep_u32 ahead) {
    const ep_u32 slot = ((ep_u32)(ring.tail - ring.origin) + ahead) % ep_staging_slots(r.w, rings, track);
    return ep_at(r, r.me, ep_staging_slot(r.w, rings, peer, track, slot));
}
#endif

/* Where the next row goes; false when there will be no room. */
template <class Outlet> EP_DEV bool ep_outlet_slot(const EpRank& r, const EpRings& rings, Outlet& o, ep_u64 began, EpAt* at) {
    if (ep_producer_is_full(o.ring, rings)) {
        if (!ep_planted(r, EP_PLANT_IMPOLITE_WAITING)) ep_outlet_publish(r, rings, o);
        if (!ep_outlet_await(r, o, ep_producer_awaits(o.ring, rings), began)) return false;
    }
    ep_outlet_plant(r, o);
    if (ep_leads_beyond(r, o)) return ep_outlet_stage(r, rings, o, at);
    EpProducer ring = o.ring;
    if (ep_planted(r, EP_PLANT_WRONG_SLOT)) ++ring.tail;
    *at = ep_at(r, o.peer, ep_ring_slot(r.w, rings, r.me, o.track, ep_producer_slot(ring, rings)));
    return true;
}

/* The slot has been filled by all lanes. */
template <class Outlet> EP_DEV void ep_outlet_push(const EpRank& r, const EpRings& rings, Outlet& o) {
    const bool due = ep_producer_push(o.ring, rings);
    if (ep_warp_lane() == 0) ep_event(r, EP_EVENT_FILLED, o.peer, o.track, o.ring.tail, ep_op(r));
    if (due) ep_outlet_publish(r, rings, o);
}

template <class Outlet> EP_DEV void ep_outlet_close(const EpRank& r, const EpRings& rings, Outlet& o) {
    ep_outlet_publish(r, rings, o);
    if (ep_warp_lane() != 0) return;
    if (ep_leads_beyond(r, o)) ep_staged_flush(r, o.staged, o.ring.tail, o.peer, o.track);
    *ep_cursor(r, 0, o.peer, o.track) = o.ring.tail;
}

/* The emptying end: held by a whole warp (a receiver) or, of several rings, each by a lane (a reducer). */
struct EpInlet {
    EpConsumer ring;
    ep_u32 peer, track;
};

EP_DEV void ep_inlet_open(const EpRank& r, EpInlet& i, ep_u32 peer, ep_u32 track) {
    i.peer = peer;
    i.track = track;
    i.ring = ep_consumer_at(*ep_cursor(r, 1, peer, track));
}
/* Notes that an end opens. By one thread. */
EP_DEV void ep_inlet_begin(const EpRank& r, const EpInlet& i) {
    ep_event(r, EP_EVENT_EMPTIES, i.peer, i.track, i.ring.head, ep_op(r));
}

/* By one thread; everybody's reads of the slots were joined before. */
EP_DEV void ep_inlet_return(const EpRank& r, EpInlet& i) {
    if (i.ring.returned == i.ring.head) return;
    ep_event(r, EP_EVENT_CREDITED, i.peer, i.track, i.ring.head, ep_op(r));
    ep_fence_sys();
    ep_publish(r, i.peer, ep_lane_credit(i.track), EP_COUNTER_HEAD, i.ring.head);
    i.ring.returned = i.ring.head;
}

/* Whether there is a row, behind `ahead` that are being read; the cell, whose value is given back, is looked at where no such row was seen yet. What cannot
   be is none, and left to who waits. */
EP_DEV bool ep_inlet_sees(const EpRank& r, const EpRings& rings, EpInlet& i, ep_u32 ahead, ep_u64* tail) {
    *tail = i.ring.tail;
    if (i.ring.head + ahead < i.ring.tail) return true;
    *tail = ep_peek(r, i.peer, ep_lane_data(i.track), EP_COUNTER_TAIL);
    if (*tail > i.ring.tail) ep_event(r, EP_EVENT_SAW_TAIL, i.peer, i.track, *tail, ep_op(r));
    return ep_consumer_saw(i.ring, rings, *tail) && i.ring.head + ahead < i.ring.tail;
}
/* Whether there is a row. */
EP_DEV bool ep_inlet_look(const EpRank& r, const EpRings& rings, EpInlet& i) {
    ep_u64 tail;
    if (ep_inlet_sees(r, rings, i, 0, &tail)) return true;
    if (tail <= ep_consumer_limit(i.ring, rings)) return false;
    ep_fail_mismatch(r, i.peer, EP_FIELD_TAIL, ep_consumer_limit(i.ring, rings), tail);
    return false;
}

/* Waits for the next row, by one thread that has returned all credit it holds. */
EP_DEV bool ep_inlet_await(const EpRank& r, const EpRings& rings, EpInlet& i, ep_u64 began) {
    return ep_wait(r, i.peer, ep_lane_data(i.track), EP_COUNTER_TAIL, i.ring.head + 1, EP_PHASE_ROWS, began) &&
           ep_inlet_look(r, rings, i);
}

/* Waits until there is a row, by a warp that holds this inlet; polite. */
EP_DEV bool ep_inlet_next(const EpRank& r, const EpRings& rings, EpInlet& i, ep_u64 began) {
    bool there = true;
    if (ep_warp_lane() == 0 && !ep_inlet_look(r, rings, i)) {
        if (!ep_planted(r, EP_PLANT_IMPOLITE_WAITING)) ep_inlet_return(r, i);
        there = ep_inlet_await(r, rings, i, began);
    }
    ep_warp_meet(); /* As in ep_outlet_await. */
    return ep_warp_shuffle(there, 0);
}

/* The slot of the next row, or of one further ahead. */
EP_DEV const ep_u8* ep_inlet_slot(const EpRank& r, const EpRings& rings, const EpInlet& i, ep_u32 ahead = 0) {
    EpConsumer ring = i.ring;
    ring.head += ahead;
    return ep_own(r) + ep_ring_slot(r.w, rings, i.peer, i.track, ep_consumer_slot(ring, rings));
}

/* A row is about to be read that may be overwritten already. By one thread. */
EP_DEV void ep_inlet_plant(const EpRank& r, const EpInlet& i) {
    if (!ep_planted(r, EP_PLANT_CREDIT_EARLY)) return;
    ep_publish(r, i.peer, ep_lane_credit(i.track), EP_COUNTER_HEAD, i.ring.head + 1);
    ep_be_slow();
}

/* The row has been read. Of an end that all lanes hold, one `posts`. */
EP_DEV void ep_inlet_pop(const EpRank& r, const EpRings& rings, EpInlet& i, bool posts) {
    const bool due = ep_consumer_pop(i.ring, rings);
    if (posts) ep_event(r, EP_EVENT_READ, i.peer, i.track, i.ring.head, ep_op(r));
    if (!due) return;
    if (posts) ep_inlet_return(r, i);
    i.ring.returned = i.ring.head;
}

EP_DEV void ep_inlet_close(const EpRank& r, EpInlet& i) {
    ep_inlet_return(r, i);
    *ep_cursor(r, 1, i.peer, i.track) = i.ring.head;
}

/* A row's own header, checked against what is due. By one thread. */
EP_DEV bool ep_check_row(const EpRank& r, const EpUnit& h, ep_u32 source, ep_u32 position, ep_u32* token) {
    const EpRowHeader row = {(ep_u32)h.x, (ep_u32)h.y, (ep_u32)h.z, (ep_u32)h.w};
    *token = row.source_token;
    return ep_is_same(r, source, ep_compare_rows(EpRowHeader{source, 0, position, (ep_u32)ep_op(r)}, row));
}
EP_DEV bool ep_check_row(const EpRank& r, const ep_u8* at, ep_u32 source, ep_u32 position, ep_u32* token) {
    return ep_check_row(r, ep_ld16_put(at), source, position, token);
}

/* A row's own header. */
EP_DEV EpUnit ep_row_header(const EpRank& r, ep_u32 token, ep_u32 position) {
    return ep_unit((int)r.me, (int)token, (int)position, (int)(ep_u32)ep_op(r));
}

/* Reads the slot that opens an operation's part of a ring. */
EP_DEV EpOpHeader ep_read_opening(const ep_u8* at) {
    EpOpHeader h;
    ((EpUnit*)&h)[0] = ep_ld16_put(at);
    ((EpUnit*)&h)[1] = ep_ld16_put(at + 16);
    return h;
}
#endif
