/* ---- ep_far_proxy.h: the verbs on lanes between nodes where a thread of the host posts for the device (ep_cuda::proxy) ----
 *
 * A lane has a FIFO of its own in memory that device and host reach: commands of 16 bytes, written by the one thread that posts to the lane,
 * taken by the proxy in order.
 *
 *   first word   phase 1 | kind 2 | offset in the own window, or of the cell 42 | low 19 bits of the length, or of the value
 *   second word  phase 1 | bell 1 | of a put: 1 unused, high 19 bits of the length, offset in the peer's window 42
 *                                   of a publish: 17 unused, high 45 bits of the value
 *
 *   phase   the top bit of both words: 1 in the first round of the FIFO, 0 in the second, and so on. The proxy takes a command when both
 *           words have the phase of its round, so one that is written in halves is not taken; zeroed memory is none
 *   bell    the proxy takes commands up to one with a bell: a put has none, as a fence for each would wait until the one before has crossed the
 *           bus. A publish has one, a flush rings that of the last put, and so does every quarter of the FIFO, so that there is credit again
 *   credit  a slot is written when the proxy has said that it took what lay there (EpFifoAnswers.taken)
 *   ticket  of a put: the number of commands up to it, ever; its source was read when EpFifoAnswers.settled has reached that
 *   F3      what the poster has seen or done comes before the bell: one ep_fence_sys and then the words in one store, or a release. The proxy posts in order
 */

#define EP_FIFO_OFFSET_BITS 42
#define EP_FIFO_LOW_BITS 19
#define EP_FIFO_LENGTH_BITS 38
#define EP_FIFO_KIND_SHIFT 61
#define EP_FIFO_PHASE 63
#define EP_FIFO_BELL (1ull << 62)
#define EP_FIFO_PUT 1ull
#define EP_FIFO_PUBLISH 2ull

EP_DEV EpFifo* ep_fifo(EpFar lane) { return (EpFifo*)lane.state; }
EP_DEV const EpFifoAnswers* ep_fifo_answers(const EpFifo* fifo) { return (const EpFifoAnswers*)fifo->answers; }

EP_DEV ep_u32 ep_far_poll(EpFar lane) { return (ep_u32)ep_ld_acquire(&ep_fifo_answers(ep_fifo(lane))->status); }

/* Waits until `word` of the answers is at least so much. A look crosses the bus, and so do the driver's commands for the copies that are waited for: so
   looks become rarer, up to one in 2 us. */
EP_DEV ep_u32 ep_fifo_await(EpFar lane, const ep_u64* word, ep_u64 at_least, ep_u64 until, ep_u64* seen) {
    for (ep_u32 spin = 1;; ++spin) {
        *seen = ep_ld_acquire(word);
        if (*seen >= at_least) return EP_FAR_OK;
        ep_nap(spin < 20 ? 100 * spin : 2000);
        if (spin % 16 != 0) continue;
        const ep_u32 status = ep_far_poll(lane);
        if (status != EP_FAR_OK) return status;
        if (ep_now() >= until) return EP_FAR_TIMEOUT;
    }
}

EP_DEV ep_u64* ep_fifo_slot(const EpFifo* fifo, ep_u64 index) {
    return (ep_u64*)(fifo->commands + 16 * (index & ((1ull << fifo->log_slots) - 1)));
}

/* Writes a command into the next slot, once there is credit for it; `bell`: everything up to it may be taken. */
EP_DEV ep_u32 ep_fifo_post(EpFar lane, bool bell, ep_u64 kind, ep_u64 offset, ep_u64 low, ep_u64 second, ep_u64 until) {
    EpFifo* fifo = ep_fifo(lane);
    const ep_u64 index = fifo->issued, slots = 1ull << fifo->log_slots;
    if (index - fifo->taken >= slots) {
        const ep_u64* taken = &ep_fifo_answers(fifo)->taken;
        const ep_u32 status = ep_fifo_await(lane, taken, index + 1 - slots, until, &fifo->taken);
        if (status != EP_FAR_OK) return status == EP_FAR_TIMEOUT ? EP_FAR_STALLED : status;
    }
    const ep_u64 phase = (~(index >> fifo->log_slots) & 1) << EP_FIFO_PHASE;
    const ep_u64 first = kind << EP_FIFO_KIND_SHIFT | offset << EP_FIFO_LOW_BITS | low;
    ep_u64* slot = ep_fifo_slot(fifo, index);
    if (bell || (4 * (index + 1) & (slots - 1)) == 0) {
        ep_fence_sys();
        second |= EP_FIFO_BELL;
    }
    ep_st_relaxed2(slot, first | phase, second | phase);
    fifo->issued = index + 1;
    fifo->silent = second & EP_FIFO_BELL ? 0 : second | phase;
    return EP_FAR_OK;
}

/* Rings the bell of the last command, where it has none. Its slot is not taken before. */
EP_DEV void ep_fifo_ring(EpFifo* fifo) {
    if (fifo->silent == 0) return;
    ep_st_release(ep_fifo_slot(fifo, fifo->issued - 1) + 1, fifo->silent | EP_FIFO_BELL);
    fifo->silent = 0;
}

EP_DEV ep_u32 ep_far_put(EpFar lane, ep_u64 from, ep_u64 to, ep_u64 bytes, ep_u64 until, ep_u64* ticket) {
    EpFifo* fifo = ep_fifo(lane);
    *ticket = fifo->put;
    if (bytes == 0) return EP_FAR_OK;
    if ((from | to) >> EP_FIFO_OFFSET_BITS != 0 || bytes >> EP_FIFO_LENGTH_BITS != 0) return EP_FAR_REFUSED;
    const ep_u64 low = bytes & ((1ull << EP_FIFO_LOW_BITS) - 1), high = bytes >> EP_FIFO_LOW_BITS;
    const ep_u32 status = ep_fifo_post(lane, false, EP_FIFO_PUT, from, low, high << EP_FIFO_OFFSET_BITS | to, until);
    if (status == EP_FAR_OK) *ticket = fifo->put = fifo->issued;
    return status;
}

EP_DEV ep_u32 ep_far_publish(EpFar lane, ep_u64 cell, ep_u64 bits, ep_u64 until) {
    if (cell >> EP_FIFO_OFFSET_BITS != 0) return EP_FAR_REFUSED;
    const ep_u64 low = bits & ((1ull << EP_FIFO_LOW_BITS) - 1);
    return ep_fifo_post(lane, true, EP_FIFO_PUBLISH, cell, low, bits >> EP_FIFO_LOW_BITS, until);
}

EP_DEV ep_u32 ep_far_flush(EpFar lane, ep_u64 ticket, ep_u64 until) {
    const EpFifoAnswers* answers = ep_fifo_answers(ep_fifo(lane));
    ep_fifo_ring(ep_fifo(lane));
    ep_u64 seen;
    const ep_u32 status = ep_fifo_await(lane, &answers->settled, ticket, until, &seen);
    if (status != EP_FAR_TIMEOUT) return status;
    return ep_ld_acquire(&answers->taken) < ticket ? EP_FAR_STALLED : EP_FAR_TIMEOUT;
}

EP_DEV ep_u64 ep_far_pulse(EpFar lane) { return ep_ld_acquire(&ep_fifo_answers(ep_fifo(lane))->pulse); }

#endif
