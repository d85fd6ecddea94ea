/*
 * ep_fail.h: how a rank fails: it reports, and tells its peers. Who is to blame is ep_protocol.h's to say.
 */
#ifndef EP_FAIL_H
#define EP_FAIL_H
#include "ep_near.h"

/* Writes a report: what went wrong in operation op. By the one thread that found it first. */
EP_DEV void ep_report(const EpRank& r, ep_u64 op, ep_u32 status, ep_u32 phase, ep_u32 peer, ep_u32 culprit, ep_u32 lane,
                      ep_u64 seen, ep_u64 awaited, ep_u64 waited, ep_u32 field) {
    EpReport* out = (EpReport*)r.report;
    out->phase = phase;
    out->peer = peer;
    out->lane = lane;
    out->op = op;
    out->seen = seen;
    out->awaited = awaited;
    out->waited = waited;
    out->field = field;
    out->culprit = culprit;
    ep_fence_sys();
    ep_st_release4(&out->status, status);
}

/* Lets one thread at a time publish on the lanes of Watch: alarms must not fall, and lanes between nodes have one poster. */
EP_DEV bool ep_try_speaking(const EpRank& r) {
    if (ep_atomic_replace(&ep_local(r)->speaking, 0u, 1u) != 0) return false;
    ep_fence_device();
    return true;
}
EP_DEV void ep_begin_speaking(const EpRank& r) {
    while (!ep_try_speaking(r)) ep_nap(100);
}
EP_DEV void ep_end_speaking(const EpRank& r) {
    ep_fence_device();
    ep_atomic_exchange(&ep_local(r)->speaking, 0u);
}

/* Publishes an alarm to all neighbours. By the thread that has set EpLocal.speaking. */
EP_DEV void ep_tell(const EpRank& r, ep_u32 verdict, ep_u64 op, ep_u32 phase, ep_u32 whom) {
    volatile ep_u32* last = &ep_local(r)->serial;
    /* The last serial is kept for a verdict. */
    if (*last >= EP_MAX_ALARM_SERIAL - (verdict ? 0 : 1)) return;
    const ep_u32 serial = *last + 1;
    *last = serial;
    for (ep_u32 other = 0; other < r.w.ranks; ++other)
        if (ep_is_neighbour(r, other))
            ep_publish(r, other, EP_LANE_WATCH, EP_COUNTER_ALARM, ep_alarm(serial, verdict, op, phase, whom));
}

/* What rank has said that it waits for, by its alarm; this rank by what it has told the others. */
EP_DEV ep_u32 ep_wait_of(const EpRank& r, ep_u32 rank, ep_u64 op) {
    if (rank == r.me) return ep_wait_of_key(r.w.ranks, rank, op, *(volatile ep_u64*)&ep_local(r)->told);
    const ep_u64 alarm = ep_takes_part(r, rank) ? ep_peek(r, rank, EP_LANE_WATCH, EP_COUNTER_ALARM) : 0;
    return ep_wait_of_alarm(r.w.ranks, rank, op, alarm);
}

/* What this rank tells of its foremost wait: between nodes, where not everybody hears everybody, what that comes from. */
EP_DEV ep_u64 ep_told_of(const EpRank& r, ep_u64 op, ep_u64 front) {
    if (ep_one_node(r) || front == 0) return front;
    const ep_u32 wait = ep_wait_of_key(r.w.ranks, r.me, op, front);
    if (wait == EP_NO_WAIT) return front;
    return ep_key_of_wait(op, ep_wait_origin(r.w.ranks, r.me, wait, [&](ep_u32 rank) { return ep_wait_of(r, rank, op); }));
}

/* This rank waits long: tells the others, unless they know. */
EP_DEV void ep_suspect(const EpRank& r, ep_u64 op, ep_u32 phase, ep_u32 peer) {
    EpLocal* local = ep_local(r);
    ep_atomic_max(&local->foremost, ep_wait_key(op, phase, peer));
    const ep_u64 front = ep_told_of(r, op, *(volatile ep_u64*)&local->foremost);
    volatile ep_u64 *told = &local->told, *told_at = &local->told_at;
    if (front == 0 || front == *told) return;
    const ep_u64 now = ep_now();
    if (!ep_one_node(r) && *told != 0 && now - *told_at < ep_speaks_again_after(r.allowed)) return;
    if (!ep_try_speaking(r)) return;
    if (front != *told && !ep_failed(r)) {
        *told = front;
        *told_at = now;
        ep_tell(r, 0, ep_key_op(front), ep_key_phase(front), ep_key_whom(front));
    }
    ep_end_speaking(r);
}

/* The wait has ended well: it explains nothing any more. */
EP_DEV void ep_unsuspect(const EpRank& r, ep_u64 op, ep_u32 phase, ep_u32 peer) {
    const ep_u64 key = ep_wait_key(op, phase, peer);
    if (*(volatile ep_u64*)&ep_local(r)->foremost == key) ep_atomic_replace(&ep_local(r)->foremost, key, (ep_u64)0);
}

/* Reports a failure, once a rank, and tells all peers whom this rank has given up on. */
EP_DEV void ep_fail(const EpRank& r, ep_u32 status, ep_u32 phase, ep_u32 peer, ep_u32 culprit, ep_u32 lane, ep_u64 seen,
                    ep_u64 awaited, ep_u64 waited, ep_u32 field) {
    EpLocal* local = ep_local(r);
    if (ep_crashed(r)) return;
    if (ep_atomic_replace(&local->failed, 0u, 1u) != 0) return;
    const ep_u64 op = local->ops_done + 1;
    ep_report(r, op, status, phase, peer, culprit, lane, seen, awaited, waited, field);
    ep_begin_speaking(r);
    ep_tell(r, 1, op, phase, culprit);
    ep_end_speaking(r);
}

/* Whether a kernel must end at once: this rank has failed, or the launch is of a graph from before a recovery, whose stamps and
   places mean nothing now; that is reported, and nobody else is told. By all threads, at the start. */
EP_DEV bool ep_closed(const EpRank& r) {
    EpLocal* local = ep_local(r);
    const ep_u32 generation = local->generation;
    const bool failed = ep_failed(r);
    if (generation == r.generation) return failed;
    if (ep_block() == 0 && ep_thread() == 0 && ep_atomic_replace(&local->failed, 0u, 1u) == 0)
        ep_report(r, local->ops_done + 1, EP_STATUS_MISMATCH, 0, r.me, r.me, 0, r.generation, local->generation, 0,
                  EP_FIELD_GENERATION);
    return true;
}

EP_DEV void ep_fail_mismatch(const EpRank& r, ep_u32 peer, ep_u32 field, ep_u64 mine, ep_u64 theirs) {
    ep_fail(r, EP_STATUS_MISMATCH, 0, peer, peer, 0, theirs, mine, 0, field);
}

#endif
