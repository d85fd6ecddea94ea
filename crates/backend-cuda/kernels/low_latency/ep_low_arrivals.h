/*
 * ep_low_arrivals.h: the receiving halves of low latency: waits for arrivals and for rows.
 */
#ifndef EP_LOW_ARRIVALS_H
#define EP_LOW_ARRIVALS_H
#include "ep_low_watch.h"

/* Whether source has begun an operation of another kind, whose rows travel as units; reports that. */
#ifdef EP_FAR_H
EP_DEV bool ep_low_is_of_units(const EpRank&, ep_u64, ep_u32, ep_u32) { return false; }
#else
EP_RARE bool ep_low_is_of_units(const EpRank& r, ep_u64 op, ep_u32 kind, ep_u32 source) {
    ep_u32 data[3];
    const ep_u32 tag = ep_unit_tag(ep_low_state(r)->serials + op);
    if (source == r.me || !ep_poll_unit(ep_low_own(r) + ep_low_unit_head(r.w, op, source), tag, data)) return false;
    ep_low_mismatch(r, op, source, EP_LOW_FIELD_KIND, kind, ep_arrival_kind(r.w, data[0] | (ep_u64)data[1] << 32));
    return true;
}
#endif

/* The rare part of a wait for what source brings: true when the wait is over because nothing will come, which is reported. */
EP_RARE bool ep_low_over(const EpRank& r, ep_u64 op, ep_u32 kind, ep_u32 source, ep_u64 cell, ep_u64 due, ep_u64 began) {
    const ep_u32 counter = op % 2 ? EP_COUNTER_ODD : EP_COUNTER_EVEN;
    const bool masked = ep_peek(r, source, EP_LANE_LOW_ROWS, counter) == EP_MASKED;
    if (!masked && !ep_low_vain(r, source, began)) return ep_low_is_of_units(r, op, kind, source);
    const bool gone = ep_low_is_gone(r, source);
    const ep_u32 trouble = ep_low_far_trouble(r, source);
    /* Who is gone, or has masked this rank, may have delivered before. */
    const ep_u64 seen = ep_look(r, cell);
    if (seen >= due) return false;
    if (ep_low_failed(r)) return true;
    const ep_u32 status = masked ? EP_STATUS_MASKED : gone ? EP_STATUS_GONE : trouble != 0 ? EP_STATUS_LANE : EP_STATUS_TIMEOUT;
    const ep_u32 culprit = masked || gone ? source : trouble != 0 ? ep_far_culprit(r, source, trouble) : ep_low_culprit(r, source);
    ep_low_fail(r, op, status, EP_PHASE_ROWS, source, culprit, EP_LANE_LOW_ROWS, seen, due, ep_now() - began, trouble);
    return true;
}

/* Waits until this cell, of source, has reached `due`; 0 when it will not, after a fault. By one thread. */
EP_DEV ep_u64 ep_low_await_cell(const EpRank& r, ep_u64 op, ep_u32 kind, ep_u32 source, ep_u64 cell, ep_u64 due, ep_u64 began) {
    for (ep_u32 spin = 1;; ++spin) {
        const ep_u64 seen = ep_low_value(r, cell);
        if (seen >= due) {
            if (spin > EP_LOW_LONG) ep_low_came(r, source);
            return seen;
        }
        if (spin % EP_LOW_LONG == 0 && ep_low_over(r, op, kind, source, cell, due, began)) return 0;
        ep_low_pause(spin);
    }
}

/* Says what is wrong with an arrival. */
EP_RARE void ep_low_refuse_arrival(const EpRank& r, ep_u64 op, ep_u32 kind, ep_u32 source, ep_u64 seen) {
    const ep_u64 due = ep_arrival(r.w, op, 0, 0), its_op = ep_arrival_op(r.w, seen);
    const ep_u32 its_kind = ep_arrival_kind(r.w, seen);
    if (seen == EP_MASKED)
        ep_low_fail(r, op, EP_STATUS_MASKED, EP_PHASE_ROWS, source, source, EP_LANE_LOW_ROWS, seen, due, 0, 0);
    else if (its_op != op)
        ep_low_mismatch(r, op, source, EP_LOW_FIELD_OP, op, its_op);
    else if (its_kind != kind && its_kind <= EP_LOW_PER_RANK)
        ep_low_mismatch(r, op, source, EP_LOW_FIELD_KIND, kind, its_kind);
    else
        ep_low_mismatch(r, op, source, EP_LOW_FIELD_ARRIVAL, due, seen);
}

/* Waits until source has said how many rows come; false after a fault. By one thread. */
EP_DEV bool ep_low_await(const EpRank& r, ep_u64 op, ep_u32 kind, ep_u32 source, ep_u64 began, ep_u32* rows) {
    const ep_u64 due = ep_arrival(r.w, op, 0, 0);
    ep_verb(r, EP_LANE_LOW_ROWS << 16 | source, due);
    const ep_u64 cell =
        ep_cell(r.w, r.generation, source, EP_LANE_LOW_ROWS, op % 2 ? EP_COUNTER_ODD : EP_COUNTER_EVEN);
    const ep_u64 seen = ep_low_await_cell(r, op, kind, source, cell, due, began);
    if (seen == 0) return false;
    const ep_u64 over = seen - ep_arrival(r.w, op, kind, 0);
    *rows = (ep_u32)over;
    if (over <= ep_low_limit(r.w)) return true;
    ep_low_refuse_arrival(r, op, kind, source, seen);
    return false;
}

/* Waits until writer's row of token is there; false after a fault. By one thread. Those of other nodes are there, as their arrival is. */
EP_DEV bool ep_low_await_row(const EpRank& r, ep_u64 op, ep_u32 kind, ep_u32 writer, ep_u32 token, ep_u64 began) {
    if (ep_is_beyond(r, writer)) return true;
    return ep_low_await_cell(r, op, kind, writer, ep_low_cell(r.w, r.generation, op, writer, token), op, began) != 0;
}

/* Whether peer has masked this rank. */
EP_DEV bool ep_low_masked_by(const EpRank& r, ep_u32 peer) {
    /* Nothing is read that was written before it: no acquire, for which later loads would wait. */
    const ep_u64 cell = ep_cell(r.w, r.generation, peer, EP_LANE_LOW_DONE, EP_COUNTER_RECEIVED);
    return ep_value_in(r.generation, ep_ld_relaxed_sys(ep_low_own(r) + cell)) == EP_MASKED;
}
/* Fails the receiving half where a peer has masked this rank: then nothing may come. Only one block looks, by threads that do not wait for
   arrivals meanwhile. False after a fault. */
EP_DEV bool ep_low_is_unmasked(const EpRank& r, ep_u64 op) {
    bool unmasked = true;
    EP_SHORT for (ep_u32 peer = threadIdx.x ^ EP_LOW_THREADS / 2; blockIdx.x == 0 && peer < r.w.ranks; peer += EP_LOW_THREADS) {
        if (peer == r.me || !ep_low_takes_part(peer) || !ep_low_masked_by(r, peer)) continue;
        ep_low_fail(r, op, EP_STATUS_MASKED, EP_PHASE_BANK, peer, peer, EP_LANE_LOW_DONE, EP_MASKED, 0, 0, 0);
        unmasked = false;
    }
    return unmasked;
}
#endif
