/*
 * ep_far_ring.h: the filling end of a ring between nodes, as ep_ring.h uses it: rows are written into staging memory of the own window, and a run of them is
 * put when its tail is due.
 *
 *   memory   staging slots (ep_staging_slot), as far apart as the ring's: so a run of slots is one put, but where the ring or the staging memory begins
 *            anew
 *   rules    F3: all lanes have met when a run is put. F4: the first lane of the warp posts, and has the numbers below. F5: a staging slot is
 *            written again when the put that read it was flushed
 */
#ifndef EP_FAR_RING_H
#define EP_FAR_RING_H
#include "ep_wait.h"

/* The rings of a call as the ends of a ring between nodes see them, or of one within a node. */
EP_DEV EpRings ep_rings_of(const EpRank& r, const EpRings& rings, ep_u32 track) {
    EpRings of = rings;
#ifdef EP_FAR_H
    if (ep_is_far(r.w, track)) {
        of.slots = rings.far_slots;
        of.chunk = rings.far_chunk;
        of.credit = rings.far_credit;
    }
#endif
    return of;
}

#ifdef EP_FAR_H

/* Counts rows of a ring between nodes on a line of EpRank.tally (ep_count_op); their other ends do not stand in what all ranks told. By one thread. */
EP_DEV void ep_tally_far(const EpRank& r, ep_u32 line, ep_u32 peer, ep_u32 rows) {
    if (r.tally == 0) return;
    ep_u64* sum = (ep_u64*)r.tally + line * r.w.ranks + peer;
    for (ep_u64 seen = 0, was; (was = ep_atomic_replace(sum, seen, seen + rows)) != seen;) seen = was;
}

/* Where it is noted which of source's tokens went where in this node, as EpDispatchRingArgs.fanout has it: source is of this rail, and of another node. */
EP_DEV ep_i32* ep_fanout_of(const EpRank& r, ep_u64 fanout, ep_u64 tokens_of, ep_u32 source) {
    ep_u64 tokens = 0;
    for (ep_u32 rank = r.me % r.w.ranks_per_node; rank < source; rank += r.w.ranks_per_node)
        if (rank != r.me) tokens += ((const ep_u32*)tokens_of)[rank];
    return (ep_i32*)fanout + tokens * r.w.ranks_per_node;
}

/* How many of a ring's rows its first put has; 0: as all others, of a chunk. What does not fill chunks is halved between the first put and the last, and a chunk with it where
   that is less than half of one: so the other end begins early, and has little left behind the last. */
EP_DEV ep_u32 ep_first_run(ep_u32 rows, ep_u32 chunk) {
    ep_u32 rest = rows % chunk;
    if (rest < chunk / 2 && rows >= chunk) rest += chunk;
    return rest < chunk / 2 ? 0 : rest / 2;
}
/* Of `wanted` rows behind `sent` ones those that the same put has, where that is the first. */
EP_DEV ep_u32 ep_within_run(ep_u32 first_run, ep_u32 sent, ep_u32 wanted) {
    return sent < first_run && first_run - sent < wanted ? first_run - sent : wanted;
}

/* What has been staged of a ring: slots, ever. Of the runs that were put two are kept, free <= oldest <= newest: those between are known to have been read when the
   newest is. */
struct EpStaged {
    ep_u64 free;   /* staging memory up to here may be written */
    ep_u64 oldest; /* the first run of which that is not known ends here; no such run where it is free */
    ep_u64 newest; /* and the last one here */
    ep_u64 oldest_ticket, newest_ticket;
    ep_u64 until; /* when posts give up */
};

EP_DEV EpStaged ep_staged_at(const EpRank& r, ep_u64 count, ep_u64 began) {
    return EpStaged{count, count, count, 0, 0, began + ep_gives_up_after(r.allowed, r.w.ranks, r.me)};
}

/* A lane to peer does not go on. Lanes break when a rank leaves: where a neighbour has said whom it gives up, that is taken over. */
EP_DEV_APART void ep_fail_lane(const EpRank& r, ep_u32 peer, ep_u32 lane, ep_u32 status, ep_u64 slots) {
    for (ep_u32 other = 0; other < r.w.ranks && status == EP_FAR_BROKEN; ++other) {
        const ep_u64 alarm = ep_is_neighbour(r, other) ? ep_peek(r, other, EP_LANE_WATCH, EP_COUNTER_ALARM) : 0;
        if (ep_alarm_serial(alarm) == 0 || !ep_alarm_verdict(alarm)) continue;
        return ep_fail(r, EP_STATUS_ABORTED, EP_PHASE_CREDIT, other, ep_alarm_peer(alarm), lane, 0, slots, 0, 0);
    }
    /* A lane that is full is the peer's affair as long as whoever posts goes on. */
    if (status == EP_FAR_STALLED && ep_far_poster(r) == EP_FAR_OK) status = EP_FAR_TIMEOUT;
    ep_fail(r, EP_STATUS_LANE, EP_PHASE_CREDIT, peer, ep_far_culprit(r, peer, status), lane, 0, slots, 0, status);
}

/* Whether a lane goes on. That of a peer that is done with the operation may break: it needs nothing more, and may have left. */
EP_DEV bool ep_far_is_well(const EpRank& r, ep_u32 peer, ep_u32 lane, ep_u32 status, ep_u64 slots) {
    if (status == EP_FAR_OK) return true;
    if (status == EP_FAR_BROKEN && ep_peek(r, peer, EP_LANE_CONTROL, EP_COUNTER_DONE) >= ep_op(r)) return true;
    ep_fail_lane(r, peer, lane, status, slots);
    return false;
}

/* Puts the slots published .. tail, and publishes the tail. By the thread that posts to the lane. */
EP_DEV bool ep_staged_post(const EpRank& r, const EpRings& rings, const EpProducer& ring, EpStaged& s, ep_u32 peer, ep_u32 track) {
    const ep_u32 index = ep_lane_data(track);
    const EpFar lane = ep_far_lane(r, peer, index);
    const ep_u32 depth = ep_staging_slots(r.w, rings, track);
    ep_u32 status = EP_FAR_OK;
    for (ep_u64 slot = ring.published; slot < ring.tail && status == EP_FAR_OK;) {
        const ep_u32 from = (ep_u32)((slot - ring.origin) % depth), to = (ep_u32)((slot - ring.origin) % rings.slots);
        ep_u64 run = ring.tail - slot;
        if (run > depth - from) run = depth - from;
        if (run > rings.slots - to) run = rings.slots - to;
        status = ep_far_put(lane, ep_staging_slot(r.w, rings, peer, track, from), ep_ring_slot(r.w, rings, r.me, track, to),
                            run * rings.far_slot_bytes, s.until, &s.newest_ticket);
        slot += run;
    }
    const ep_u64 cell = ep_cell(r.w, r.generation, r.me, index, EP_COUNTER_TAIL);
    if (status == EP_FAR_OK && ep_posts(r, peer, index, ring.tail))
        status = ep_far_publish(lane, cell, ep_stamp(r.generation, ring.tail), s.until);
    s.newest = ring.tail;
    if (s.oldest <= s.free) {
        s.oldest = s.newest;
        s.oldest_ticket = s.newest_ticket;
    }
    return ep_far_is_well(r, peer, index, status, ring.tail);
}

/* Waits until the staging memory of slots up to `count` may be written; all of them were put. By the thread that posts to the lane. */
EP_DEV bool ep_staged_flush(const EpRank& r, EpStaged& s, ep_u64 count, ep_u32 peer, ep_u32 track) {
    const ep_u32 index = ep_lane_data(track);
    while (s.free < count) {
        const ep_u32 status = ep_far_flush(ep_far_lane(r, peer, index), s.oldest_ticket, s.until);
        if (!ep_far_is_well(r, peer, index, status, count)) return false;
        s.free = s.oldest;
        s.oldest = s.newest;
        s.oldest_ticket = s.newest_ticket;
    }
    return true;
}

#else

struct EpStaged {};
EP_DEV EpStaged ep_staged_at(const EpRank&, ep_u64, ep_u64) { return EpStaged{}; }
EP_DEV bool ep_staged_post(const EpRank&, const EpRings&, const EpProducer&, EpStaged&, ep_u32, ep_u32) { return true; }
EP_DEV bool ep_staged_flush(const EpRank&, EpStaged&, ep_u64, ep_u32, ep_u32) { return true; }

#endif
#endif
