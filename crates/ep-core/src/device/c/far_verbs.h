
/* A lane: the address of its state, which the host has made. */
struct EpFar {
    ep_u64 state;
};

/* ---- by the one thread that posts to the lane ---- */

/* Posts a copy of bytes of the own window at `from` to `to` in the peer's; none are a no-op. Its ticket, or that of the last put. */
EP_DEV ep_u32 ep_far_put(EpFar lane, ep_u64 from, ep_u64 to, ep_u64 bytes, ep_u64 until, ep_u64* ticket);
/* Posts that the cell at this offset of the peer's window becomes `bits`. All that was posted is on its way. */
EP_DEV ep_u32 ep_far_publish(EpFar lane, ep_u64 cell, ep_u64 bits, ep_u64 until);
/* Waits until the sources of all puts up to a ticket may be overwritten. */
EP_DEV ep_u32 ep_far_flush(EpFar lane, ep_u64 ticket, ep_u64 until);
/* What is known to be wrong with the lane, without waiting. */
EP_DEV ep_u32 ep_far_poll(EpFar lane);
/* Of a lane of Watch: a number that changes as long as whoever posts for the device goes on. By any thread. */
EP_DEV ep_u64 ep_far_pulse(EpFar lane);

#endif
