
/* --- What lies behind the structs: addresses of words of 32 bits. --- */

/* Whether the host knows that a rank does nothing any more: behind EpLocal. */
EP_HD static inline ep_u64 ep_gone_at(ep_u64 local, ep_u32 rank) { return local + sizeof(EpLocal) + 4ull * rank; }

/* Whether a block of this launch has not put its rows for a rank: behind EpLow. */
EP_HD static inline ep_u64 ep_low_skipped_at(ep_u64 low, ep_u32 rank) { return low + sizeof(EpLow) + 4ull * rank; }

/* Whether a rank is still to be sent rows of the bank of op: behind EpLow. */
EP_HD static inline ep_u64 ep_low_late_at(ep_u64 low, ep_u32 ranks, ep_u64 op, ep_u32 rank) {
    return low + sizeof(EpLow) + 4 * ((1 + op % 2) * ranks + rank);
}

/* Whether the host knows that a rank does nothing any more: behind EpLow. */
EP_HD static inline ep_u64 ep_low_gone_at(ep_u64 low, ep_u32 ranks, ep_u32 rank) {
    return low + sizeof(EpLow) + 4 * (3ull * ranks + rank);
}

/* Whether a block of this launch has taken a share of what is sent: behind EpLow. */
EP_HD static inline ep_u64 ep_low_taken_at(ep_u64 low, ep_u32 ranks, ep_u32 share) {
    return low + sizeof(EpLow) + 4 * (4ull * ranks + share);
}

/* --- Counters of early consumers, behind EpEarly: words of 64 bits, so many in each of three arrays. --- */

/* One batch more. */
#define EP_EPOCH 0x100000000ull
EP_HD static inline ep_u64 ep_early_arrived_at(ep_u64 early, ep_u32 at) { return early + sizeof(EpEarly) + 8ull * at; }
EP_HD static inline ep_u64 ep_early_expected_at(ep_u64 early, ep_u32 counters, ep_u32 at) { return ep_early_arrived_at(early, counters + at); }
EP_HD static inline ep_u64 ep_early_ready_at(ep_u64 early, ep_u32 counters, ep_u32 at) { return ep_early_arrived_at(early, 2 * counters + at); }

#endif
