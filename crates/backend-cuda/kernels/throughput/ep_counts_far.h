/*
 * ep_counts_far.h: counts between nodes go along the rail, and what came along the rail is passed on within the node, with the own counts: so every
 * rank learns those of all. They lie at the same place in every window.
 *
 *   rules    F5: a put's source is the own bank; it is written anew when the peers are done with the operation that had it
 */
#ifndef EP_COUNTS_FAR_H
#define EP_COUNTS_FAR_H
#include "ep_far_ring.h"

/* Whether peer is this rail's rank of another node. */
EP_DEV bool ep_is_on_rail(const EpRank& r, ep_u32 peer) { return ep_is_neighbour(r, peer) && ep_is_beyond(r, peer); }

/* Sends the own counts to a rank of another node. By the thread that posts to its lane. */
EP_DEV void ep_send_counts_far(const EpRank& r, ep_u32 peer, ep_u64 began) {
    const EpFar lane = ep_far_lane(r, peer, EP_LANE_CONTROL);
    const ep_u64 op = ep_op(r), at = ep_counts(r.w, op, r.me), until = began + ep_gives_up_after(r.allowed, r.w.ranks, r.me);
    ep_u64 ticket;
    ep_u32 status = ep_far_put(lane, at, at, r.w.counts_bytes, until, &ticket);
    if (status == EP_FAR_OK && ep_posts(r, peer, EP_LANE_CONTROL, op))
        status = ep_far_publish(lane, ep_cell(r.w, r.generation, r.me, EP_LANE_CONTROL, EP_COUNTER_COUNTS), ep_stamp(r.generation, op), until);
    ep_far_is_well(r, peer, EP_LANE_CONTROL, status, op);
}

/* Sends the own counts along the rail, and waits for those of its ranks; whether they have come. By a block. */
EP_DEV bool ep_exchange_along_rail(const EpRank& r, const EpCountsArgs& a, ep_u64 began) {
    const ep_u32 warp = ep_thread() / 32, warps = ep_threads() / 32;
    const ep_u64 op = ep_op(r);
    for (ep_u32 peer = warp; peer < r.w.ranks; peer += warps)
        if (ep_is_on_rail(r, peer)) ep_open_counts(r, peer, began);
    if (ep_block_any(ep_failed(r))) return false;
    if (warp == 0) ep_write_counts(r, a, ep_at(r, r.me, ep_counts(r.w, op, r.me)));
    ep_block_meet();
    for (ep_u32 peer = warp; peer < r.w.ranks; peer += warps)
        if (ep_is_on_rail(r, peer) && ep_warp_lane() == 0) {
            ep_send_counts_far(r, peer, began);
            ep_wait(r, peer, EP_LANE_CONTROL, EP_COUNTER_COUNTS, op, EP_PHASE_COUNTS, began);
        }
    return !ep_block_any(ep_failed(r));
}

/* Puts what came along the rail into the window of a rank of this node. By a warp. */
EP_DEV void ep_pass_on(const EpRank& r, ep_u32 peer) {
    const ep_u64 op = ep_op(r);
    for (ep_u32 source = r.me % r.w.ranks_per_node; source < r.w.ranks; source += r.w.ranks_per_node) {
        if (!ep_is_on_rail(r, source)) continue;
        const ep_u64 at = ep_counts(r.w, op, source);
        for (ep_u64 byte = 4 * ep_warp_lane(); byte < r.w.counts_bytes; byte += 128)
            ep_put4(ep_at(r, peer, at + byte), *(const volatile ep_u32*)(ep_own(r) + at + byte));
    }
}
#endif
