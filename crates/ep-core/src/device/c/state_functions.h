
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

#endif
