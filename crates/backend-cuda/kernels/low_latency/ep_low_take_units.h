/*
 * ep_low_take_units.h: how the rows of a low-latency dispatch are taken where they come as units (ep_low_send_units.h): each thread polls the units that it
 * needs, and copies what it has polled. Nothing else says that a row is there.
 */
#ifndef EP_LOW_TAKE_UNITS_H
#define EP_LOW_TAKE_UNITS_H
#include "ep_low_arrivals.h"
#include "ep_low_receiver.h"

/* The rare part of a wait for a unit of source: true when the wait is over because it will not come, which is reported. */
EP_RARE bool ep_low_unit_over(const EpRank& r, ep_u64 op, ep_u32 source, const ep_u8* at, ep_u32 tag, ep_u64 began) {
    const ep_u32 counter = op % 2 ? EP_COUNTER_ODD : EP_COUNTER_EVEN;
    const bool masked = ep_peek(r, source, EP_LANE_LOW_ROWS, counter) == EP_MASKED;
    if (!masked && !ep_low_vain(r, source, began)) return false;
    const bool gone = ep_low_is_gone(r, source);
    /* Who is gone, or has masked this rank, may have delivered before. */
    ep_u32 data[3];
    if (ep_poll_unit(at, tag, data)) return false;
    if (ep_low_failed(r)) return true;
    const ep_u32 status = masked ? EP_STATUS_MASKED : gone ? EP_STATUS_GONE : EP_STATUS_TIMEOUT;
    const ep_u32 culprit = masked || gone ? source : ep_low_culprit(r, source);
    ep_low_fail(r, op, status, EP_PHASE_ROWS, source, culprit, EP_LANE_LOW_ROWS, 0, ep_arrival(r.w, op, 0, 0), ep_now() - began, 0);
    return true;
}

/* Waits for a unit that was not there when it was first looked at. Its tag is another when it will not come, after a fault. By one thread. */
EP_RARE EpUnit ep_low_unit_later(const EpRank& r, ep_u64 op, ep_u32 source, const ep_u8* at, ep_u32 tag, ep_u64 began) {
    ep_u32 data[3];
    for (ep_u32 spin = 1;; ++spin) {
        if (ep_poll_unit(at, tag, data)) {
            if (spin > EP_LOW_LONG) ep_low_came(r, source);
            return ep_unit((int)data[0], (int)data[1], (int)data[2], (int)tag);
        }
        if (spin % EP_LOW_LONG == 0 && ep_low_unit_over(r, op, source, at, tag, began)) return ep_unit(0, 0, 0, 0);
    }
}
/* The same of one that was polled already, and has `come` or not; false after a fault. */
EP_DEV bool ep_low_await_unit(const EpRank& r, ep_u64 op, ep_u32 source, const ep_u8* at, ep_u32 tag, ep_u64 began, bool come, ep_u32* data) {
    if (come) return true;
    const EpUnit unit = ep_low_unit_later(r, op, source, at, tag, began);
    data[0] = (ep_u32)unit.x;
    data[1] = (ep_u32)unit.y;
    data[2] = (ep_u32)unit.z;
    return (ep_u32)unit.w == tag;
}

/* Waits until source has said how many rows come; false after a fault. By one thread. */
EP_DEV bool ep_low_await_count(const EpRank& r, const EpLowReceiver& s, ep_u64 op, ep_u32 source, ep_u64 began, ep_u32* rows) {
    ep_verb(r, EP_LANE_LOW_ROWS << 16 | source, ep_arrival(r.w, op, 0, 0));
    const ep_u8* at = ep_low_own(r) + ep_low_unit_head(r.w, op, source);
    ep_u32 data[3];
    const bool come = ep_poll_unit(at, s.tag, data);
    if (!ep_low_await_unit(r, op, source, at, s.tag, began, come, data)) return false;
    const ep_u64 seen = data[0] | (ep_u64)data[1] << 32, over = seen - ep_arrival(r.w, op, EP_LOW_DISPATCH, 0);
    *rows = (ep_u32)over;
    if (over <= ep_low_limit(r.w)) return true;
    ep_low_refuse_arrival(r, op, EP_LOW_DISPATCH, source, seen);
    return false;
}

/* Where the units of the header of a row begin. */
EP_DEV const ep_u8* ep_low_header(const EpRank& r, const EpLowReceiver& s, ep_u64 op, ep_u32 row, ep_u32* source) {
    *source = ep_low_source(s.first, row);
    return ep_low_own(r) + ep_low_unit_header(r.w, op, *source, row - s.first[*source]);
}

/* Units of a header that a thread has in flight: of 8 choices. */
#define EP_LOW_HEADER_HELD 6u

/* Calls `each` with the indices of the local experts of a row; false after a fault. By one thread. */
template <class F> EP_DEV bool ep_low_each_expert(const EpRank& r, const EpLowReceiver& s, ep_u64 op, ep_u32 row, ep_u64 began, F each) {
    const ep_u32 low = r.me * r.w.local_experts, experts = r.w.local_experts, units = (ep_u32)ep_unit_count(r.w.header_bytes);
    ep_u32 source;
    const ep_u8* header = ep_low_header(r, s, op, row, &source);
    /* From unit 1 on one with an expert in its middle (an odd one) and one with an expert at each end take turns (ep_low_make_header_part). */
    EP_SHORT for (ep_u32 base = 1; base < units; base += EP_LOW_HEADER_HELD) {
        ep_u32 data[EP_LOW_HEADER_HELD][3];
        bool come[EP_LOW_HEADER_HELD];
#pragma unroll
        for (ep_u32 i = 0; i < EP_LOW_HEADER_HELD; ++i)
            come[i] = base + i >= units || ep_poll_unit(header + (base + i) * EP_UNIT_BYTES, s.tag, data[i]);
#pragma unroll
        for (ep_u32 i = 0; i < EP_LOW_HEADER_HELD; ++i) {
            if (base + i >= units) continue;
            if (!ep_low_await_unit(r, op, source, header + (base + i) * EP_UNIT_BYTES, s.tag, began, come[i], data[i])) return false;
            if (i % 2 == 0) {
                if (data[i][1] - low < experts) each(data[i][1] - low);
            } else {
                if (data[i][0] - low < experts) each(data[i][0] - low);
                if (data[i][2] - low < experts) each(data[i][2] - low);
            }
        }
    }
    return true;
}

/* Word `at` of the units that the lanes have, a unit each. By a warp. */
EP_DEV ep_u32 ep_low_word(const ep_u32* data, ep_u32 at) {
    const ep_u32 lane = at / 3, x = __shfl_sync(EP_FULL, data[0], lane), y = __shfl_sync(EP_FULL, data[1], lane), z = __shfl_sync(EP_FULL, data[2], lane);
    return at % 3 == 0 ? x : at % 3 == 1 ? y : z;
}

/* Reads the header of a row, by a warp; `there` becomes false after a fault. A header has at most 23 units: the last lane reads the beginning of the one
   before it. */
EP_DEV EpLowRead ep_low_read_header(const EpRank& r, const EpLowReceiver& s, ep_u64 op, ep_u32 row, ep_u64 began, bool* there) {
    const ep_u32 lane = threadIdx.x % 32, units = (ep_u32)ep_unit_count(r.w.header_bytes);
    EpLowRead read;
    const ep_u8* header = ep_low_header(r, s, op, row, &read.source);
    const bool first = row == s.first[read.source], before = lane == 31 && !first, reads = lane < units || before;
    const ep_u8* at = before ? header - ep_unit_bytes(r.w.header_bytes) : header + lane * EP_UNIT_BYTES;
    ep_u32 data[3] = {0, 0, 0};
    const bool come = !reads || ep_poll_unit(at, s.tag, data);
    *there = __all_sync(EP_FULL, ep_low_await_unit(r, op, read.source, at, s.tag, began, come, data));
    read.choice.expert = (ep_i32)ep_low_word(data, 4 + 2 * lane);
    read.choice.weight = ep_float_of(ep_low_word(data, 5 + 2 * lane));
    if (lane >= r.w.topk) read.choice = EpChoice{-1, 0.0f};
    read.from = ep_low_word(data, 0);
    read.token = ep_low_word(data, 1);
    read.op = ep_low_word(data, 3);
    const ep_u32 previous = __shfl_sync(EP_FULL, data[1], 31);
    read.least = first ? 0 : previous + 1;
    return read;
}

/* Where the payload of a row begins in the own window. */
EP_DEV ep_u64 ep_low_payload(const EpRank& r, ep_u64 op, ep_u32 source, ep_u32 token) { return (ep_u64)ep_low_own(r) + ep_low_unit_row(r.w, op, source, token); }
/* Who copies a row waits for it. */
EP_DEV bool ep_low_await_payload(const EpRank&, ep_u64, const EpLowRead&, ep_u64) { return true; }
EP_DEV EpUnit ep_low_slot_header(const EpRank&, const EpLowReceiver&, ep_u32) { return ep_unit(0, 0, 0, 0); }
EP_DEV void ep_low_check_slot(const EpRank&, ep_u64, EpUnit, const EpLowRead&) {}

/* What rows are shared by: four units, which are three times 16 bytes. */
EP_DEV ep_u32 ep_low_pieces(const EpRank& r) { return ((ep_u32)ep_unit_count(r.w.payload_bytes) + 3) / 4; }

/* Units that a thread has in flight. */
#define EP_LOW_HELD 4u

/* Copies pieces begin .. end of a batch to their experts, as they come; false after a fault. By all threads. */
EP_DEV bool ep_low_copy(const EpRank& r, const EpLowDispatchArgs& a, const EpLowReceiver& s, ep_u64 op, ep_u32 begin, ep_u32 end, ep_u64 began) {
    const ep_u32 wide = 4 * ep_low_pieces(r), units = (ep_u32)ep_unit_count(r.w.payload_bytes), lane = threadIdx.x % 32, quarter = lane % 4;
    bool there = true;
    /* A warp goes through this together: its lanes exchange words. */
    EP_SHORT for (ep_u32 first = 4 * begin + threadIdx.x - lane; first < 4 * end; first += EP_LOW_HELD * EP_LOW_THREADS) {
        ep_u32 data[EP_LOW_HELD][3];
        bool come[EP_LOW_HELD];
#pragma unroll
        for (ep_u32 i = 0; i < EP_LOW_HELD; ++i) {
            const ep_u32 item = first + i * EP_LOW_THREADS + lane, turn = item / wide, unit = item - turn * wide;
            data[i][0] = data[i][1] = data[i][2] = 0;
            come[i] = item >= 4 * end || unit >= units || ep_poll_unit((const ep_u8*)s.from[turn] + unit * EP_UNIT_BYTES, s.tag, data[i]);
        }
#pragma unroll
        for (ep_u32 i = 0; i < EP_LOW_HELD; ++i) {
            const ep_u32 item = first + i * EP_LOW_THREADS + lane, turn = item / wide, unit = item - turn * wide;
            if (first + i * EP_LOW_THREADS >= 4 * end) continue;
            const bool is = item < 4 * end;
            if (!come[i]) there &= ep_low_await_unit(r, op, s.source[turn], (const ep_u8*)s.from[turn] + unit * EP_UNIT_BYTES, s.tag, began, false, data[i]);
            /* Three lanes of four have 16 bytes each: the end of their own unit, and the beginning of the next. */
            const ep_u32 x = data[i][0], y = data[i][1], z = data[i][2];
            const ep_u32 p = __shfl_sync(EP_FULL, x, (lane + 1) % 32), q = __shfl_sync(EP_FULL, y, (lane + 1) % 32), t = __shfl_sync(EP_FULL, z, (lane + 1) % 32);
            const EpUnit v = quarter == 0 ? ep_unit((int)x, (int)y, (int)z, (int)p) : quarter == 1 ? ep_unit((int)y, (int)z, (int)p, (int)q) : ep_unit((int)z, (int)p, (int)q, (int)t);
            const ep_u32 at = unit / 4 * 48 + quarter * 16;
            if (is && quarter < 3 && at < (ep_u32)r.w.payload_stride) ep_low_store(r, a, s, turn, at, v);
        }
    }
    return there;
}

#ifdef EP_TEST
/* What was read is overwritten, and has no tag. By a warp. */
EP_DEV void ep_low_forget(const EpRank& r, const EpLowReceiver& s, ep_u64 op, ep_u32 row) {
    if (!ep_test(r)->poison) return;
    ep_u32 source, data[3];
    const ep_u8* header = ep_low_header(r, s, op, row, &source);
    ep_poll_unit(header, s.tag, data);
    __syncwarp();
    const ep_u64 payload = ep_low_payload(r, op, source, data[1]);
    const EpUnit none = ep_unit(EP_POISON, EP_POISON, EP_POISON, 0);
    EP_SHORT for (ep_u32 unit = threadIdx.x % 32; unit < ep_unit_count(r.w.payload_bytes); unit += 32) ep_st16((void*)(payload + unit * EP_UNIT_BYTES), none);
    EP_SHORT for (ep_u32 unit = threadIdx.x % 32; unit < ep_unit_count(r.w.header_bytes); unit += 32) ep_st16((void*)(header + unit * EP_UNIT_BYTES), none);
}
#endif
#endif
