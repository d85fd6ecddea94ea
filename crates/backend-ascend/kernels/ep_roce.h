/*
 * ep_roce.h: a queue to a rank of another server, held by one core: the coordinator that posts to it (F4).
 *
 *   element  48 bytes, written to the queue by a copy that has landed before the doorbell is rung. The owner bit turns with each lap of the
 *            queue's own depth. The doorbell has 16 bits of the count; counts here have 32, and differences are taken in 32
 *   F3       a value is published by a message of its own, of 8 bytes, behind those of its data: of two messages only the first piece of the
 *            second is ordered behind the first, and a message of 8 bytes has one piece. Its source is a word of a ring as deep as the queue: a
 *            word that was written anew would let the later value overtake the data of that value
 *   F5       ep_queue_look says how many elements are done: the count that the card's firmware raises, or completions that this core polls
 *   full     one place stays free, so that a full queue and an empty one differ
 *   UB       two blocks for an element. Nothing waits here: callers ask for room, and come again
 */
#ifndef EP_ROCE_H
#define EP_ROCE_H
#include "ep_npu.h"

#define EP_ELEMENT_BYTES 48u
#define EP_ELEMENT_STEP 64u
#define EP_COMPLETION_STEP 32u
#define EP_QUEUE_UB_BYTES 64u
#define EP_OPCODE_WRITE 3u
#define EP_ELEMENT_OWNER (1u << 7)
#define EP_ELEMENT_SIGNALLED (1u << 8)
#define EP_ONE_SOURCE (1u << 24)

struct EpPoster {
    EpQueue q;
    ep_u64 kept;   /* where the counts are kept between launches: EpQueueKept */
    ep_u32 head;   /* elements posted, ever */
    ep_u32 done;   /* elements done, as last seen */
    ep_u32 taken;  /* completions taken, ever, where this core polls */
    bool broken;   /* a completion says that the peer cannot be reached */
    LocalTensor<uint32_t> element;
};

EP_DEV void ep_queue_open(EpPoster& p, ep_u64 queue, const EpBytes& ub) {
    ep_load_struct(p.q, queue);
    p.kept = queue + __builtin_offsetof(EpQueue, head);
    p.head = ep_fresh<uint32_t>(p.kept);
    p.done = ep_fresh<uint32_t>(p.q.tail);
    p.taken = ep_fresh<uint32_t>(queue + __builtin_offsetof(EpQueue, taken));
    p.broken = false;
    p.element = ub.ReinterpretCast<uint32_t>();
}

/* Keeps the counts for the next launch. */
EP_DEV void ep_queue_close(EpCore& c, const EpPoster& p) {
    ep_store_word(c, p.kept, p.head, 4);
    if (p.q.completions) ep_store_word(c, p.kept + 4, p.taken, 4);
}

/* Takes the completions that have come, and gives their places back. Each names its element by 16 bits of its count. */
EP_DEV void ep_queue_poll(EpCore& c, EpPoster& p) {
    const ep_u32 before = p.taken;
    for (;;) {
        const ep_u64 entry = p.q.completions + (ep_u64)(p.taken % p.q.completion_depth) * EP_COMPLETION_STEP;
        const ep_u32 says = ep_fresh<uint32_t>(entry);
        if ((says >> 7 & 1) == ((p.taken & p.q.completion_depth) != 0 ? 1u : 0u)) break;
        if ((says >> 8 & 0xff) != 0) {
            p.broken = true;
            break;
        }
        ++p.taken;
        p.done += (ep_u32)(uint16_t)((says >> 16) + 1 - p.done);
    }
    if (p.taken == before) return;
    if (!EP_PLANTED(c, COMPLETIONS_KEPT)) ep_store_word(c, p.q.completions_taken, p.taken & 0xffffff, 4);
    ep_store_word(c, p.q.tail, p.done, 4);
}

/* Looks how many elements are done. */
EP_DEV void ep_queue_look(EpCore& c, EpPoster& p) {
    if (p.q.completions) ep_queue_poll(c, p);
    else p.done = ep_fresh<uint32_t>(p.q.tail);
}

/* Whether so many more elements have room. */
EP_DEV bool ep_queue_has_room(EpCore& c, EpPoster& p, ep_u32 more) {
    if (EP_PLANTED(c, QUEUE_FULL)) return true;
    if (p.head + more - p.done < p.q.depth) return true;
    ep_queue_look(c, p);
    return p.head + more - p.done < p.q.depth;
}

EP_DEV void ep_queue_ring(EpCore& c, const EpPoster& p) {
    const ep_u64 count = EP_PLANTED(c, BELL_WIDE) ? (ep_u64)p.head << 32 : (ep_u64)(p.head & 0xffff) << 32;
    ep_store_word(c, p.q.doorbell, (ep_u64)p.q.number | count | (ep_u64)p.q.level << 48, 8);
}

/* Writes an element: a copy of bytes of registered memory to the peer's window. There is room; the bell is still to be rung. */
EP_DEV void ep_queue_element(EpCore& c, EpPoster& p, ep_u64 from, ep_u64 to, ep_u32 bytes) {
    const ep_u32 lap = EP_PLANTED(c, OTHER_DEPTH) ? p.q.depth * 2 : p.q.depth;
    const ep_u32 owner = EP_PLANTED(c, OWNER_STAYS) || (p.head & lap) == 0 ? EP_ELEMENT_OWNER : 0;
    const ep_u32 words[12] = {EP_OPCODE_WRITE | owner | EP_ELEMENT_SIGNALLED,
                              bytes,
                              0,
                              EP_ONE_SOURCE,
                              0,
                              EP_PLANTED(c, KEYS_SWAPPED) ? p.q.source_key : p.q.target_key,
                              (ep_u32)to,
                              (ep_u32)(to >> 32),
                              bytes,
                              EP_PLANTED(c, KEYS_SWAPPED) ? p.q.target_key : p.q.source_key,
                              (ep_u32)from,
                              (ep_u32)(from >> 32)};
    for (ep_u32 i = 0; i < 12; ++i) p.element.SetValue(i, words[i]);
    if (!EP_PLANTED(c, ELEMENT_FLAG)) {
        SetFlag<HardEvent::S_MTE3>(5);
        WaitFlag<HardEvent::S_MTE3>(5);
    }
    ep_store(p.q.elements + (ep_u64)(p.head % p.q.depth) * EP_ELEMENT_STEP, p.element.ReinterpretCast<uint8_t>(), EP_ELEMENT_BYTES);
    ++p.head;
    if (EP_PLANTED(c, BELL_EARLY)) ep_queue_ring(c, p);
    ep_landed(c);
}

/* Posts that 8 bytes of the peer's window become a value, behind all that was posted before, and rings for all. There is room. */
EP_DEV void ep_queue_publish(EpCore& c, EpPoster& p, ep_u64 to, ep_u64 value) {
    const ep_u64 word = p.q.words + (ep_u64)(EP_PLANTED(c, ONE_WORD) ? 0 : p.head % p.q.depth) * 8;
    ep_store_word(c, word, value, 8);
    ep_queue_element(c, p, word, to, 8);
    ep_queue_ring(c, p);
}

#endif
