/*
 * ep_low.h: what the kernels of low latency have in common: the rules, their state, windows and cells, faults.
 *
 * The roles are those of ep_core::roles::low_latency. An operation has two halves, each a launch of its own, or both in one;
 * its number is read from EpLow, so that a captured launch may be replayed.
 *
 *   banks     rows for operation op may be put once the reader's Received is at least op - 2
 *   arrival   Even or Odd, by the parity of op: says how many rows come, ahead of them. In front of a dispatch's lie their headers (heads),
 *             in order, so that receivers find all places while the rows are under way
 *   rows      each has a cell of its own (ep_low_cell), by bank, writer and token, raised to op when the row is there. Those between nodes have not:
 *             their arrival comes behind them (ep_low_far.h)
 *   end       Received = op, published to all peers by the block that ends last
 *   F3        a block's stores, a barrier; then one thread: fence.acq_rel.sys and a relaxed store of system scope
 *   F6        every wait ends by the deadline. A fault is reported once, every block runs to its end, and later launches do
 *             nothing until the host has heard of it. Nothing is said to the others, and nothing is poisoned
 *
 * In launches of low latency EpRank.windows has 0 for ranks that are masked here, EpRank.local is the EpLow, EpRank.report a report of their
 * own, and EpRank.cursors, of several nodes, the EpLowFar of each rank.
 */
#ifndef EP_LOW_H
#define EP_LOW_H
#include "ep_wait.h"

/* Code that runs once in a launch is as slow as it is long, as every line of it must be fetched. So loops of few turns are not unrolled,
   and what happens rarely is kept out of the way. */
#define EP_SHORT _Pragma("unroll 1")
#define EP_RARE __device__ __noinline__

#define EP_LOW_WARPS (EP_LOW_THREADS / 32)

/* Threads serve ranks from the last thread on: the first are busy with rows. */
EP_DEV ep_u32 ep_low_served() { return EP_LOW_THREADS - 1 - threadIdx.x; }

/* In EpLow.arrived: something of this launch is to be settled at its end: it failed, a rank was skipped, or something was said. Who comes
   last then knows without looking at anything else. */
#define EP_LOW_TROUBLE 0x80000000u
/* The same: a block has counted what came. */
#define EP_LOW_COUNTED 0x40000000u

EP_DEV EpLow* ep_low_state(const EpRank& r) { return (EpLow*)r.local; }
EP_DEV ep_u32* ep_low_skipped(const EpRank& r) { return (ep_u32*)ep_low_skipped_at(r.local, 0); }
EP_DEV ep_u32* ep_low_late(const EpRank& r, ep_u64 op) { return (ep_u32*)ep_low_late_at(r.local, r.w.ranks, op, 0); }
EP_DEV void ep_low_trouble(const EpRank& r) {
    ep_fence_device();
    atomicOr(&ep_low_state(r)->arrived, EP_LOW_TROUBLE);
}
EP_DEV void ep_low_skip(const EpRank& r, ep_u32 peer) {
    atomicExch(ep_low_skipped(r) + peer, 1u);
    ep_low_trouble(r);
}
EP_DEV bool ep_low_is_gone(const EpRank& r, ep_u32 rank) { return ep_flag(ep_low_gone_at(r.local, r.w.ranks, rank)); }

/* ---- windows and cells: where the windows begin, [ranks], lies where shared memory begins, as it is needed at every turn ---- */

EP_POOL(ep_pool);
/* Where the rest of shared memory begins. */
EP_DEV ep_u8* ep_low_pool(const EpRank& r) { return ep_pool + r.w.ranks * 8; }

/* Brings them. A barrier comes before they are read. */
EP_DEV void ep_low_bring_windows(const EpRank& r) {
    EP_SHORT for (ep_u32 rank = threadIdx.x; rank < r.w.ranks; rank += EP_LOW_THREADS) ((EpAt*)ep_pool)[rank] = ep_begin(r, rank);
}
/* As ep_at, ep_takes_part and ep_own. */
EP_DEV EpAt ep_low_at(ep_u32 rank, ep_u64 offset) { return ((const EpAt*)ep_pool)[rank] + offset; }
EP_DEV bool ep_low_takes_part(ep_u32 rank) { return ep_is_somewhere(((const EpAt*)ep_pool)[rank]); }
EP_DEV ep_u8* ep_low_own(const EpRank& r) { return ep_own_of((const EpAt*)ep_pool, r.me); }
/* As ep_look and ep_peek. */
EP_DEV ep_u64 ep_low_value(const EpRank& r, ep_u64 cell) { return ep_value_in(r.generation, ep_ld_acquire(ep_low_own(r) + cell)); }
EP_DEV ep_u64 ep_low_peek(const EpRank& r, ep_u32 writer, ep_u32 lane, ep_u32 counter) {
    return ep_low_value(r, ep_cell(r.w, r.generation, writer, lane, counter));
}

/* The same as ep_publish, of a rank of another node. */
EP_RARE void ep_low_publish_far(const EpRank& r, ep_u32 peer, ep_u32 lane, ep_u32 counter, ep_u64 value) {
    ep_publish(r, peer, lane, counter, value);
}
/* Raises a cell at peer, after a fence of the caller's. */
EP_DEV void ep_low_publish(const EpRank& r, ep_u32 peer, ep_u32 lane, ep_u32 counter, ep_u64 value) {
    if (ep_is_beyond(r, peer)) return ep_low_publish_far(r, peer, lane, counter, value);
    ep_raise_fenced(r, peer, lane, ep_low_at(peer, ep_cell(r.w, r.generation, r.me, lane, counter)), value);
}

/* ---- rows that are announced ---- */

/* The row of token is at peer. By one thread, after a barrier behind all that it consists of. */
EP_DEV void ep_low_raise(const EpRank& r, ep_u64 op, ep_u32 peer, ep_u32 token) {
    ep_fence_sys();
    ep_raise_fenced(r, peer, EP_LANE_LOW_ROWS, ep_low_at(peer, ep_low_cell(r.w, r.generation, op, r.me, token)), op);
}

/* Adds to what is counted for the user, without waiting for it. */
EP_DEV void ep_low_add(ep_u64* counter, ep_u64 more) { atomicAdd((unsigned long long*)counter, (unsigned long long)more); }

/* ---- faults ---- */

/* The verdict about another rank that a rank has told, and above it who that is; 0 for none. Who tells it gives up whom it blames, and comes no more.
   Low latency of one node tells none. */
#ifdef EP_FAR_H
EP_RARE ep_u64 ep_low_verdict(const EpRank& r) {
    EP_SHORT for (ep_u32 rank = 0; rank < r.w.ranks; ++rank) {
        if (rank == r.me || !ep_low_takes_part(rank)) continue;
        const ep_u64 alarm = ep_low_peek(r, rank, EP_LANE_WATCH, EP_COUNTER_ALARM);
        const bool tells = ep_alarm_serial(alarm) != 0 && ep_alarm_verdict(alarm) && ep_alarm_peer(alarm) != r.me;
        if (tells) return (ep_u64)rank << EP_VALUE_BITS | alarm;
    }
    return 0;
}
#else
EP_DEV ep_u64 ep_low_verdict(const EpRank&) { return 0; }
#endif
/* Whether a fault is of a wait, which a verdict explains. */
EP_DEV bool ep_low_is_waiting(ep_u32 status) {
    return status == EP_STATUS_TIMEOUT || status == EP_STATUS_GONE || status == EP_STATUS_MASKED || status == EP_STATUS_LANE;
}

/* Reports a fault of op; the first of a launch counts. */
EP_RARE void ep_low_fail(const EpRank& r, ep_u64 op, ep_u32 status, ep_u32 phase, ep_u32 peer, ep_u32 culprit, ep_u32 lane,
                        ep_u64 seen, ep_u64 awaited, ep_u64 waited, ep_u32 field) {
    if (ep_crashed(r) || atomicCAS(&ep_low_state(r)->failed, 0u, 1u) != 0) return;
    ep_low_trouble(r);
    const ep_u64 said = ep_low_is_waiting(status) ? ep_low_verdict(r) : 0;
    if (said != 0) {
        status = EP_STATUS_ABORTED;
        peer = (ep_u32)(said >> EP_VALUE_BITS);
        culprit = ep_alarm_peer(said);
    }
    if (status == EP_STATUS_LANE && ep_low_state(r)->poster != 0) {
        peer = ep_far_watched(r);
        lane = EP_LANE_WATCH;
    }
    ep_report(r, op, status, phase, peer, culprit, lane, seen, awaited, waited, field);
}
EP_DEV void ep_low_mismatch(const EpRank& r, ep_u64 op, ep_u32 peer, ep_u32 field, ep_u64 mine, ep_u64 theirs) {
    ep_low_fail(r, op, EP_STATUS_MISMATCH, 0, peer, peer, 0, theirs, mine, 0, field);
}
/* Says what is wrong with the stamp of a row of peer. */
EP_RARE void ep_low_refuse_stamp(const EpRank& r, ep_u64 op, ep_u32 peer, ep_u32 theirs) {
    const ep_u32 mine = ep_low_stamp(r.generation, op);
    if (mine >> 16 != theirs >> 16) ep_low_mismatch(r, op, peer, EP_LOW_FIELD_ROW_GENERATION, mine >> 16, theirs >> 16);
    else ep_low_mismatch(r, op, peer, EP_LOW_FIELD_ROW_OP, mine & 0xffff, theirs & 0xffff);
}
EP_DEV bool ep_low_failed(const EpRank& r) {
    return ep_ld_relaxed(&ep_low_state(r)->failed) != 0 || ep_crashed(r);
}

/* Where low latency is when a launch begins; loaded at once. */
struct EpLowNow {
    ep_u64 sent;
    ep_u64 received;
    ep_u32 broken;
    ep_u32 late_even;
    ep_u32 late_odd;
    ep_u32 generation;
    ep_u64 serials;
    ep_u64 last;
    EP_DEV bool late(ep_u64 op) const { return (op % 2 ? late_odd : late_even) != 0; }
};
EP_DEV EpLowNow ep_low_now(const EpRank& r) {
    const EpLow* low = ep_low_state(r);
    return EpLowNow{low->sent, low->received, low->broken, low->late[0], low->late[1], low->generation, low->serials, low->last};
}

/* Whether op is the first in its bank of a stretch of tags: what lies there is to be cleared. Between nodes nothing travels as units. */
#ifdef EP_FAR_H
EP_DEV bool ep_low_begins_era(const EpLowNow&, ep_u64) { return false; }
#else
EP_DEV bool ep_low_begins_era(const EpLowNow& now, ep_u64 op) {
    const ep_u64 serial = now.serials + op;
    return ep_unit_era(serial) != ep_unit_era(op > 2 ? serial - 2 : now.last);
}
#endif

/* Whether a test has ended this rank. Another block may do that now, and all threads of this one must know the same: a meeting of the block. */
#ifdef EP_TEST
EP_DEV bool ep_low_crashed(const EpRank& r) { return __syncthreads_or(ep_crashed(r)); }
#else
EP_DEV bool ep_low_crashed(const EpRank&) { return false; }
#endif

/* Whether a launch must end at once: an earlier one has failed, or it cannot go on from where low latency is. The host sees to that
   for its own calls, but what a graph replays may come at any time: after a recovery; with more or fewer operations in flight than
   `in_flight`, as when it was captured; when no number is left. By all threads, at the start. */
EP_DEV bool ep_low_closed(const EpRank& r, const EpLowNow& at, ep_u32 phases, ep_u32 in_flight) {
    if (at.broken) {
        if (blockIdx.x == 0 && threadIdx.x == 0) ((EpReport*)r.report)->behind = 1;
        return true;
    }
    const ep_u64 op = at.sent + 1, flying = at.sent - at.received;
    const bool stale = at.generation != r.generation, other = phases != 0 && flying != in_flight;
    const bool spent = (phases & EP_LOW_SEND) && ep_arrival(r.w, op + 1, 0, 0) > EP_MASKED;
    if (!stale && !other && !spent) return false;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        EpLow* low = ep_low_state(r);
        const ep_u32 field = stale ? EP_LOW_FIELD_GENERATION : other ? EP_LOW_FIELD_IN_FLIGHT : EP_LOW_FIELD_LAST_OP;
        const ep_u64 now = stale ? at.generation : other ? flying : op - 1;
        ep_low_mismatch(r, op, r.me, field, now, stale ? r.generation : other ? in_flight : op);
        low->failed = low->arrived = 0;
        low->broken = 1;
    }
    return true;
}
#endif
