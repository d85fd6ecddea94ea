/*
 * ep_ring.h: both ends of a credit ring, each held by one warp (ep_core::ring says what must hold).
 *
 * Counts run on for the life of the communicator; slots are counted anew from the start of every operation, when the ring is
 * empty: the consumer returns all credit at the end of its own. So rings may be cut differently from call to call.
 *
 * A producer's count is written by its warp at the end of its role, and read by the warps of the same peer when they open theirs.
 *
 * Polite waiting: an end publishes what is pending before it waits; a warp with several rings does so for all of them.
 */
#ifndef EP_RING_H
#define EP_RING_H
#include "ep_notes.h"

/* A row's bytes from lane to lane, 16 at a time: eight loads in flight. Both places and the length in units of 16. */
EP_DEV void ep_copy_row(ep_u8* to, const ep_u8* from, ep_u32 bytes) {
    for (ep_u32 at = threadIdx.x % 32 * 16; at < bytes; at += 512 * 8) {
        int4 held[8];
#pragma unroll
        for (ep_u32 i = 0; i < 8; ++i)
            if (at + i * 512 < bytes) held[i] = ep_ld16_peer(from + at + i * 512);
#pragma unroll
        for (ep_u32 i = 0; i < 8; ++i)
            if (at + i * 512 < bytes) ep_st16(to + at + i * 512, held[i]);
    }
}

/* A row's scales in words of 4 bytes, which lie `step` bytes apart where they come from. */
EP_DEV void ep_copy_words(ep_u8* to, const ep_u8* from, ep_u64 step, ep_u32 bytes) {
    for (ep_u32 w = threadIdx.x % 32; w < bytes / 4; w += 32) ((ep_u32*)to)[w] = *(const volatile ep_u32*)(from + w * step);
}

/* Where the count of a ring is kept between launches. side: 0 sent, 1 taken. */
EP_DEV ep_u64* ep_cursor(const EpRank& r, ep_u32 side, ep_u32 peer, ep_u32 channel) {
    return (ep_u64*)r.cursors + ((ep_u64)side * r.w.ranks + peer) * r.w.channels + channel;
}

/* The filling end. All lanes hold the same values. */
struct EpProducer {
    ep_u64 origin, tail, published, head;
    ep_u32 peer, channel, track;
};

EP_DEV void ep_producer_publish(const EpRank& r, EpProducer& p) {
    if (p.published == p.tail) return;
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        ep_event(r, EP_EVENT_PUBLISHED, p.peer, p.track, p.tail, ep_op(r));
        ep_fence_sys();
        ep_publish(r, p.peer, ep_lane_data(p.track), EP_COUNTER_TAIL, p.tail);
    }
    p.published = p.tail;
}

/* Waits until the consumer's head has reached at_least. */
EP_DEV bool ep_producer_await(const EpRank& r, EpProducer& p, ep_u64 at_least, ep_u64 began) {
    ep_u64 head = p.head;
    bool there = true;
    if (threadIdx.x % 32 == 0) {
        const ep_u32 lane = ep_lane_credit(p.track);
        there = ep_wait(r, p.peer, lane, EP_COUNTER_HEAD, at_least, EP_PHASE_CREDIT, began);
        if (there) head = ep_peek(r, p.peer, lane, EP_COUNTER_HEAD);
        if (head > p.tail) {
            ep_fail_mismatch(r, p.peer, EP_FIELD_HEAD, p.tail, head);
            there = false;
        }
        if (there) ep_event(r, EP_EVENT_SAW_HEAD, p.peer, p.track, head, ep_op(r));
    }
    p.head = __shfl_sync(EP_FULL, head, 0);
    return __shfl_sync(EP_FULL, there, 0);
}

EP_DEV bool ep_producer_open(const EpRank& r, EpProducer& p, ep_u32 peer, ep_u32 channel, ep_u64 began) {
    p.peer = peer;
    p.channel = channel;
    p.track = ep_near_track(r.w, 0, channel);
    p.origin = p.tail = p.published = *ep_cursor(r, 0, peer, channel);
    p.head = 0;
    if (threadIdx.x % 32 == 0) ep_event(r, EP_EVENT_FILLS, peer, p.track, p.tail, ep_op(r));
    /* The part may have been cut otherwise before: all rings into the peer must be empty, not just this one. What other warps
       send meanwhile is waited for, too; its receivers wait for nobody here. */
    bool empty = true;
    for (ep_u32 other = threadIdx.x % 32; other < r.w.channels; other += 32) {
        const ep_u64 sent = *(const volatile ep_u64*)ep_cursor(r, 0, peer, other);
        empty &= ep_wait(r, peer, ep_lane_credit(ep_near_track(r.w, 0, other)), EP_COUNTER_HEAD, sent, EP_PHASE_CREDIT, began);
    }
    if (!__all_sync(EP_FULL, empty)) return false;
    return ep_producer_await(r, p, p.tail, began);
}

/* Before a row is put, in builds for tests. */
EP_DEV void ep_producer_plant(const EpRank& r, const EpProducer& p) {
#ifdef EP_TEST
    if (threadIdx.x % 32 == 0) {
        ep_delay(r, p.peer, p.tail);
        if (ep_planted(r, EP_PLANT_TAIL_BEFORE_DATA)) {
            ep_publish(r, p.peer, ep_lane_data(p.track), EP_COUNTER_TAIL, p.tail + 1);
            ep_be_slow();
        }
    }
    __syncwarp();
#endif
}

/* Where the next row goes; 0 when there will be no room. */
EP_DEV ep_u8* ep_producer_slot(const EpRank& r, const EpRings& rings, EpProducer& p, ep_u64 began) {
    if (p.tail - p.head >= rings.slots) {
        if (!ep_planted(r, EP_PLANT_IMPOLITE_WAITING)) ep_producer_publish(r, p);
        if (!ep_producer_await(r, p, p.tail + 1 - rings.slots, began)) return nullptr;
    }
    ep_producer_plant(r, p);
    const ep_u32 skewed = ep_planted(r, EP_PLANT_WRONG_SLOT) ? 1 : 0;
    const ep_u32 slot = (ep_u32)((p.tail - p.origin + skewed) % rings.slots);
    return ep_window(r, p.peer) + ep_ring_slot(r.w, rings, r.me, p.track, slot);
}

/* The slot has been filled by all lanes. */
EP_DEV void ep_producer_push(const EpRank& r, const EpRings& rings, EpProducer& p) {
    ++p.tail;
    if (threadIdx.x % 32 == 0) ep_event(r, EP_EVENT_FILLED, p.peer, p.track, p.tail, ep_op(r));
    if (p.tail - p.published >= rings.chunk) ep_producer_publish(r, p);
}

EP_DEV void ep_producer_close(const EpRank& r, EpProducer& p) {
    ep_producer_publish(r, p);
    if (threadIdx.x % 32 == 0) *ep_cursor(r, 0, p.peer, p.channel) = p.tail;
}

/* The emptying end: held by a whole warp (a receiver) or, of several rings, each by a lane (a reducer). */
struct EpConsumer {
    ep_u64 origin, head, returned, tail;
    ep_u32 peer, channel, track;
};

EP_DEV void ep_consumer_open(const EpRank& r, EpConsumer& c, ep_u32 peer, ep_u32 channel) {
    c.peer = peer;
    c.channel = channel;
    c.track = ep_near_track(r.w, 0, channel);
    c.origin = c.head = c.returned = c.tail = *ep_cursor(r, 1, peer, channel);
}
/* Notes that an end opens. By one thread. */
EP_DEV void ep_consumer_begin(const EpRank& r, const EpConsumer& c) {
    ep_event(r, EP_EVENT_EMPTIES, c.peer, c.track, c.head, ep_op(r));
}

/* By one thread; everybody's reads of the slots were joined before. */
EP_DEV void ep_consumer_return(const EpRank& r, EpConsumer& c) {
    if (c.returned == c.head) return;
    ep_event(r, EP_EVENT_CREDITED, c.peer, c.track, c.head, ep_op(r));
    ep_fence_sys();
    ep_publish(r, c.peer, ep_lane_credit(c.track), EP_COUNTER_HEAD, c.head);
    c.returned = c.head;
}

EP_DEV bool ep_consumer_look(const EpRank& r, const EpRings& rings, EpConsumer& c) {
    const ep_u64 tail = ep_peek(r, c.peer, ep_lane_data(c.track), EP_COUNTER_TAIL);
    if (tail > c.head + rings.slots) {
        ep_fail_mismatch(r, c.peer, EP_FIELD_TAIL, c.head + rings.slots, tail);
        return false;
    }
    if (tail > c.tail) {
        ep_event(r, EP_EVENT_SAW_TAIL, c.peer, c.track, tail, ep_op(r));
        c.tail = tail;
    }
    return c.head < c.tail;
}

/* Waits for the next row, by one thread that has returned all credit it holds. */
EP_DEV bool ep_consumer_await(const EpRank& r, const EpRings& rings, EpConsumer& c, ep_u64 began) {
    return ep_wait(r, c.peer, ep_lane_data(c.track), EP_COUNTER_TAIL, c.head + 1, EP_PHASE_ROWS, began) &&
           ep_consumer_look(r, rings, c);
}

EP_DEV const ep_u8* ep_consumer_slot(const EpRank& r, const EpRings& rings, const EpConsumer& c) {
    return ep_own(r) + ep_ring_slot(r.w, rings, c.peer, c.track, (ep_u32)((c.head - c.origin) % rings.slots));
}

/* A row is about to be read that may be overwritten already. By one thread. */
EP_DEV void ep_consumer_plant(const EpRank& r, const EpConsumer& c) {
    if (!ep_planted(r, EP_PLANT_CREDIT_EARLY)) return;
    ep_publish(r, c.peer, ep_lane_credit(c.track), EP_COUNTER_HEAD, c.head + 1);
    ep_be_slow();
}

/* The row has been read. */
EP_DEV void ep_consumer_pop(const EpRank& r, const EpRings& rings, EpConsumer& c) {
    ++c.head;
    ep_event(r, EP_EVENT_READ, c.peer, c.track, c.head, ep_op(r));
    if (c.head - c.returned >= rings.credit) ep_consumer_return(r, c);
}

EP_DEV void ep_consumer_close(const EpRank& r, EpConsumer& c) {
    ep_consumer_return(r, c);
    *ep_cursor(r, 1, c.peer, c.channel) = c.head;
}

/* A row's own header, checked against what is due. By one thread. */
EP_DEV bool ep_check_row(const EpRank& r, const ep_u8* at, ep_u32 source, ep_u32 position, ep_u32* token) {
    const int4 h = ep_ld16_peer(at);
    const ep_u32 op = (ep_u32)ep_op(r);
    *token = (ep_u32)h.y;
    if ((ep_u32)h.w != op) ep_fail_mismatch(r, source, EP_FIELD_ROW_OP, op, (ep_u32)h.w);
    else if ((ep_u32)h.x != source) ep_fail_mismatch(r, source, EP_FIELD_ROW_SOURCE, source, (ep_u32)h.x);
    else if ((ep_u32)h.z != position) ep_fail_mismatch(r, source, EP_FIELD_ROW_POSITION, position, (ep_u32)h.z);
    else return true;
    return false;
}

/* Writes the slot that opens an operation's part of a ring. By one thread. */
EP_DEV void ep_write_opening(const EpRank& r, ep_u8* at, ep_u32 rows, ep_u32 first) {
    *(EpOpHeader*)at = ep_header(r, rows, first);
}
/* Reads it. */
EP_DEV EpOpHeader ep_read_opening(const ep_u8* at) {
    EpOpHeader h;
    ((int4*)&h)[0] = ep_ld16_peer(at);
    ((int4*)&h)[1] = ep_ld16_peer(at + 16);
    return h;
}
#endif
