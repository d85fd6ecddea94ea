/*
 * ep_low_units.h: low latency within a node, whose rows and results travel as units (F11): how one is put, waited for, and turned into 16 bytes.
 */
#ifndef EP_LOW_UNITS_H
#define EP_LOW_UNITS_H
#include "ep_low_arrivals.h"

/* ---- put ---- */

/* A planted fault: a unit that is stored in two parts, first the one with the tag. */
EP_RARE void ep_low_tear(EpAt to, ep_u32 x, ep_u32 y, ep_u32 z, ep_u32 tag) {
    ep_put4(to + 12, tag);
    ep_be_slow();
    ep_put_unit(to, x, y, z, tag);
}

/* Puts a unit, or tears it where that is planted. */
EP_DEV void ep_low_put_unit(EpAt to, ep_u32 x, ep_u32 y, ep_u32 z, ep_u32 tag, bool torn) {
    if (torn) ep_low_tear(to, x, y, z, tag);
    else ep_put_unit(to, x, y, z, tag);
}

/* Says to peer how many rows come, and of a dispatch how many tokens this rank has. By one thread. */
EP_DEV void ep_low_put_head(const EpRank& r, ep_u64 op, ep_u32 kind, ep_u32 peer, ep_u32 rows, ep_u32 tokens, ep_u32 tag) {
    const ep_u64 value = ep_arrival(r.w, op, kind, rows + (ep_planted(r, EP_PLANT_LOW_COUNT_OFF_BY_ONE) ? 1 : 0));
    if (!ep_posts(r, peer, EP_LANE_LOW_ROWS, value)) return;
    ep_put_unit(ep_low_at(peer, ep_low_unit_head(r.w, op, r.me)), (ep_u32)value, (ep_u32)(value >> 32), tokens, tag);
}

/* ---- waits ---- */

/* The rare part of a wait for a unit of source: true when the wait is over because it will not come, which is reported. */
EP_RARE bool ep_low_unit_over(const EpRank& r, ep_u64 op, ep_u32 kind, ep_u32 source, const ep_u8* at, ep_u32 tag, ep_u64 began) {
    const ep_u32 counter = op % 2 ? EP_COUNTER_ODD : EP_COUNTER_EVEN;
    const ep_u64 arrived = ep_peek(r, source, EP_LANE_LOW_ROWS, counter);
    const bool masked = arrived == EP_MASKED, other = !masked && arrived >= ep_arrival(r.w, op, 0, 0);
    if (!masked && !other && !ep_low_vain(r, source, began)) return false;
    const bool gone = ep_low_is_gone(r, source);
    /* Who is gone, or has masked this rank, may have delivered before. */
    ep_u32 data[3];
    if (ep_poll_unit(at, tag, data)) return false;
    if (ep_low_failed(r)) return true;
    if (other) {
        /* Its operation is of another kind, whose rows are announced. */
        ep_low_mismatch(r, op, source, EP_LOW_FIELD_KIND, kind, ep_arrival_kind(r.w, arrived));
        return true;
    }
    const ep_u32 status = masked ? EP_STATUS_MASKED : gone ? EP_STATUS_GONE : EP_STATUS_TIMEOUT;
    const ep_u32 culprit = masked || gone ? source : ep_low_culprit(r, source);
    ep_low_fail(r, op, status, EP_PHASE_ROWS, source, culprit, EP_LANE_LOW_ROWS, 0, ep_arrival(r.w, op, 0, 0), ep_now() - began, 0);
    return true;
}

/* Waits for a unit that was not there when it was first looked at. Its tag is another when it will not come, after a fault. By one thread. */
EP_RARE EpUnit ep_low_unit_later(const EpRank& r, ep_u64 op, ep_u32 kind, ep_u32 source, const ep_u8* at, ep_u32 tag, ep_u64 began) {
    ep_u32 data[3];
    for (ep_u32 spin = 1;; ++spin) {
        if (ep_poll_unit(at, tag, data)) {
            if (spin > EP_LOW_LONG) ep_low_came(r, source);
            return ep_unit((int)data[0], (int)data[1], (int)data[2], (int)tag);
        }
        if (spin % EP_LOW_LONG == 0 && ep_low_unit_over(r, op, kind, source, at, tag, began)) return ep_unit(0, 0, 0, 0);
    }
}
/* The same of one that was polled already, and has `come` or not; false after a fault. */
EP_DEV bool ep_low_await_unit(const EpRank& r, ep_u64 op, ep_u32 kind, ep_u32 source, const ep_u8* at, ep_u32 tag, ep_u64 began, bool come,
                              ep_u32* data) {
    if (come) return true;
    const EpUnit unit = ep_low_unit_later(r, op, kind, source, at, tag, began);
    data[0] = (ep_u32)unit.x;
    data[1] = (ep_u32)unit.y;
    data[2] = (ep_u32)unit.z;
    return (ep_u32)unit.w == tag;
}

/* Waits until source has said how many rows come, and how many tokens it has; false after a fault. By one thread. */
EP_DEV bool ep_low_await_count(const EpRank& r, ep_u64 op, ep_u32 kind, ep_u32 source, ep_u32 tag, ep_u64 began, ep_u32* rows, ep_u32* tokens) {
    ep_verb(r, EP_LANE_LOW_ROWS << 16 | source, ep_arrival(r.w, op, 0, 0));
    const ep_u8* at = ep_low_own(r) + ep_low_unit_head(r.w, op, source);
    ep_u32 data[3];
    const bool come = ep_poll_unit(at, tag, data);
    if (!ep_low_await_unit(r, op, kind, source, at, tag, began, come, data)) return false;
    const ep_u64 seen = data[0] | (ep_u64)data[1] << 32, over = seen - ep_arrival(r.w, op, kind, 0);
    *rows = (ep_u32)over;
    *tokens = data[2];
    if (over <= ep_low_limit(r.w)) return true;
    ep_low_refuse_arrival(r, op, kind, source, seen);
    return false;
}

/* ---- pieces ---- */

/* Units that a thread has in flight, of a row or of the parts of a sum. */
#define EP_LOW_HELD 4u

/* 16 bytes of what four lanes have polled, for three of them: the end of the own unit, and the beginning of the next lane's. By a warp. */
EP_DEV EpUnit ep_low_join(const ep_u32* own) {
    const ep_u32 lane = threadIdx.x % 32, next = (lane + 1) % 32;
    const int x = (int)own[0], y = (int)own[1], z = (int)own[2];
    const int p = __shfl_sync(EP_FULL, x, next), q = __shfl_sync(EP_FULL, y, next), t = __shfl_sync(EP_FULL, z, next);
    return lane % 4 == 0 ? ep_unit(x, y, z, p) : lane % 4 == 1 ? ep_unit(y, z, p, q) : ep_unit(z, p, q, t);
}

/* The reverse: the unit of each of four lanes, of which three have 16 bytes. By a warp. */
EP_DEV EpUnit ep_low_divide(const EpUnit& own) {
    const ep_u32 lane = threadIdx.x % 32, before = (lane + 31) % 32;
    const int y = __shfl_sync(EP_FULL, own.y, before), z = __shfl_sync(EP_FULL, own.z, before), w = __shfl_sync(EP_FULL, own.w, before);
    return lane % 4 == 0   ? ep_unit(own.x, own.y, own.z, 0)
           : lane % 4 == 1 ? ep_unit(w, own.x, own.y, 0)
           : lane % 4 == 2 ? ep_unit(z, w, own.x, 0)
                           : ep_unit(y, z, w, 0);
}
#endif
