/*
 * ep_outbox.h: rows lie in the outbox of their sender, a credit ring of its own window, and whoever wants them pulls them (ep_core::ring says
 * what must hold). A dispatch lays each row once, for all readers; a combine has an outbox for each reader.
 *
 *   roles    of one channel, warps of one block: those that fill slots, and the teller, which lets them, by the readers' heads, and tells the
 *            readers tails; those that pull, and the creditor, which tells their heads to the senders. Teller and creditor never wait for
 *            one peer while another could go on, and keep nothing back while they have nothing else to do
 *   memory   shared: counts of slots, from the operation's first on. Each is written by one warp
 *   rules    F3: a slot is written (ep_flow.h), fence, count; the teller sees the count, fence, tail. F9: a row has been loaded, fence,
 *            count; the creditor sees the count, fence, head
 *
 * How many slots are filled at a time decides the rank whose outbox it is (`window`), in which steps they are taken, each reader: ranks may differ. A reader
 * takes at most 32 slots at once, and any window is of as many, if the outbox is: so whoever waits for a whole piece gets it.
 *
 * Cursors run on for the life of the communicator; slots are counted anew in every operation. The teller ends when all readers have taken all: so
 * outboxes are empty between operations, and a rank may leave.
 */
#ifndef EP_OUTBOX_H
#define EP_OUTBOX_H
#include "ep_flow.h"
#include "ep_ring.h"

/* Turns without news after which what is pending is told. */
#define EP_OUTBOX_IDLE 8u

/* One end of the rings with a rank on this block's channel, in shared memory. Counts are those of this operation. */
struct EpOutboxEnd {
    ep_u64 base;  /* the cursor before the operation */
    ep_u32 slots; /* that are filled in this operation */
    ep_u32 first; /* results: the position of the first row */
    ep_u32 limit; /* the filling end: slots that may be filled */
    ep_u32 told;  /* slots that are filled, or taken, as the other end has been told */
    ep_u32 row;   /* results: the first row, among all that this rank has */
    ep_u32 seen;  /* results: tokens that the creditor has looked at; whether all that is filled has been taken */
};

static_assert(sizeof(EpOutboxEnd) == EP_OUTBOX_END_BYTES, "the host makes room for another EpOutboxEnd");

/* A word that one warp writes while others read it: by an atomic, as racecheck takes any other store for a race. By one thread. */
EP_DEV void ep_tell_word(ep_u32* at, ep_u32 word) { ep_atomic_exchange(at, word); }
/* The same of a count: what it counts is there for whoever fences after the read. */
EP_DEV void ep_tell_count(ep_u32* at, ep_u32 count) {
    ep_fence_block();
    ep_tell_word(at, count);
}
EP_DEV ep_u32 ep_count_of(const ep_u32* at) { return *(const volatile ep_u32*)at; }

/* Units below which all are done, where warp w of `warps` has done `done[w]` of w, w + warps, ... By one thread. */
EP_DEV ep_u32 ep_units_done(const ep_u32* done, ep_u32 warps) {
    ep_u32 units = EP_FULL;
    for (ep_u32 w = 0; w < warps; ++w) {
        const ep_u32 own = ep_count_of(done + w) * warps + w;
        units = own < units ? own : units;
    }
    return units;
}

/* Whether `count` slots may be filled. By a warp. */
EP_DEV bool ep_may_fill(const ep_u32* limit, ep_u32 count) { return ep_warp_shuffle(ep_count_of(limit), 0) >= count; }
/* Waits until they may; false when that will not happen. By a warp. */
EP_DEV bool ep_await_limit(const EpRank& r, const ep_u32* limit, ep_u32 count) {
    for (ep_u32 spin = 1; !ep_may_fill(limit, count); ++spin)
        if (spin % 64 == 0 && ep_warp_any(ep_failed(r))) return false;
    return true;
}

/* Slots that the reader at the other end has taken. By one thread; EP_FULL where it says what cannot be. */
EP_DEV ep_u32 ep_taken(const EpRank& r, ep_u32 peer, ep_u32 track, const EpOutboxEnd& end, ep_u32 told) {
    const ep_u64 head = ep_peek(r, peer, ep_lane_credit(track), EP_COUNTER_HEAD);
    if (head <= end.base) return 0;
    if (head - end.base <= told) return (ep_u32)(head - end.base);
    ep_fail_mismatch(r, peer, EP_FIELD_HEAD, end.base + told, head);
    return EP_FULL;
}

/* Tells a reader that so many slots are filled. By one thread. */
EP_DEV void ep_tell_tail(const EpRank& r, ep_u32 peer, ep_u32 track, const EpOutboxEnd& end, ep_u32 count) {
    ep_fence_sys();
    ep_publish(r, peer, ep_lane_data(track), EP_COUNTER_TAIL, end.base + count);
}

/* Whether what is done is due to be told: `step` slots, the last one, or where nothing else happens. */
EP_DEV bool ep_is_due(ep_u32 done, ep_u32 told, ep_u32 step, ep_u32 all, ep_u32 idle) {
    return done > told && (done - told >= step || done == all || idle >= EP_OUTBOX_IDLE);
}

/* The rare part of a turn of the teller or the creditor: whether the rank has failed or has no time left. */
EP_DEV bool ep_turns_end(const EpRank& r, ep_u32 spin, ep_u64 began) {
    return spin % 64 == 0 && (ep_failed(r) || ep_now() - began > r.allowed);
}

/* The end of a teller, or of a creditor, that has not told all. Time may be up although no peer is waited for: then this rank was too slow itself, and
   says so, as its warps that wait for room look at nothing but that. By a warp. */
EP_DEV void ep_teller_ends(const EpRank& r, ep_u64 began) {
    if (ep_warp_lane() == 0 && !ep_failed(r)) ep_fail(r, EP_STATUS_TIMEOUT, EP_PHASE_ROWS, r.me, r.me, 0, 0, 0, ep_now() - began, 0);
}

/* The creditor: tells each sender what has been taken of its outbox; `taken(rank)` says how many slots, by one thread. Until all are. By a
   warp, a lane for each rank. */
template <class Taken>
EP_DEV void ep_give_credit(const EpRank& r, const EpRings& rings, EpOutboxEnd* in, ep_u32 track, ep_u64 began, Taken taken) {
    ep_u32 idle = 0;
    for (ep_u32 spin = 1;; ++spin) {
        bool all = true, news = false;
        for (ep_u32 rank = ep_warp_lane(); rank < r.w.ranks; rank += 32) {
            EpOutboxEnd& end = in[rank];
            const ep_u32 told = end.told;
            if (told == end.slots) continue;
            const ep_u32 now = taken(rank);
            news |= now - told >= rings.credit;
            if (ep_is_due(now, told, rings.credit, end.slots, idle)) {
                ep_fence_sys();
                ep_publish(r, rank, ep_lane_credit(track), EP_COUNTER_HEAD, end.base + now);
                end.told = now;
            }
            all &= end.told == end.slots;
        }
        if (__all_sync(EP_FULL, all)) return;
        idle = __any_sync(EP_FULL, news) ? 0 : idle + 1;
        if (__any_sync(EP_FULL, ep_turns_end(r, spin, began))) return;
    }
}

/* The cursors behind this operation. By a warp, after all ends of the channel. */
EP_DEV void ep_keep_cursors(const EpRank& r, const EpOutboxEnd* ends, ep_u32 side, ep_u32 track) {
    for (ep_u32 rank = ep_warp_lane(); rank < r.w.ranks; rank += 32)
        if (rank != r.me && ep_takes_part(r, rank)) *ep_cursor(r, side, rank, track) = ends[rank].base + ends[rank].slots;
}

/* The reader's end of a channel, behind all of its roles. Time may have been up before all that came was credited: nobody here has waited for a peer then, but
   the senders wait for the rest. So the rank says so. By a warp. */
EP_DEV void ep_end_credit(const EpRank& r, const EpOutboxEnd* in, ep_u32 track, ep_u64 began) {
    bool owed = false;
    for (ep_u32 rank = ep_warp_lane(); rank < r.w.ranks; rank += 32) owed |= in[rank].told != in[rank].slots;
    if (__any_sync(EP_FULL, owed)) ep_teller_ends(r, began);
    ep_keep_cursors(r, in, 1, track);
}
#endif
