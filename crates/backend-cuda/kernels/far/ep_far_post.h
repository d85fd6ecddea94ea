/*
 * ep_far_post.h: what kernels post to ranks of other nodes, where they are compiled with lanes between nodes. A publish reads the same near
 * and far; rows leave by the end of a ring (ep_far_ring.h).
 *
 *   F4   a lane has one posting thread at a time. That of Watch is the thread that has set EpLocal.speaking
 *   F6   a publish waits only for room in its lane, for an eighth of what waits may take, and then is given up. Whoever waits for what would have
 *        come of it fails, and so does the end of a ring
 */
#ifndef EP_FAR_POST_H
#define EP_FAR_POST_H
#include "ep_far_lanes.h"

#ifdef EP_FAR_H

/* Whether there are no other nodes. */
EP_DEV bool ep_one_node(const EpRank& r) { return r.w.nodes == 1; }

/* Whether a rank is of another node: stores do not reach it. */
EP_DEV bool ep_is_beyond(const EpRank& r, ep_u32 rank) { return rank / r.w.ranks_per_node != r.me / r.w.ranks_per_node; }

/* The lane of this index to a rank of another node that is a neighbour. */
EP_DEV EpFar ep_far_lane(const EpRank& r, ep_u32 peer, ep_u32 lane) {
    return EpFar{((const ep_u64*)r.far)[(ep_u64)peer * ep_lane_count(r.w.tracks) + lane]};
}

EP_DEV void ep_far_raise(const EpRank& r, ep_u32 peer, ep_u32 lane, ep_u64 cell, ep_u64 value) {
    ep_far_publish(ep_far_lane(r, peer, lane), cell, ep_stamp(r.generation, value), ep_now() + r.allowed / 8);
}

/* Whom a lane's trouble is of: who posts for this rank, or the peer. */
EP_DEV ep_u32 ep_far_culprit(const EpRank& r, ep_u32 peer, ep_u32 status) {
    return status == EP_FAR_STALLED || status == EP_FAR_GONE || status == EP_FAR_REFUSED ? r.me : peer;
}

/* What is known to be wrong with the lanes to a rank: with that of its watch, and with one more, drawn anew each time. Whoever only posts to a lane may
 * never look at it again. */
EP_DEV ep_u32 ep_far_trouble(const EpRank& r, ep_u32 peer) {
    if (!ep_is_beyond(r, peer)) return EP_FAR_OK;
    const ep_u32 status = ep_far_poll(ep_far_lane(r, peer, EP_LANE_WATCH));
    const ep_u32 drawn = (ep_u32)(ep_now() * 0x9e3779b97f4a7c15ull >> 40) % ep_lane_count(r.w.tracks);
    const EpFar other = ep_far_lane(r, peer, drawn);
    return status != EP_FAR_OK || other.state == 0 ? status : ep_far_poll(other);
}

/* A rank of another node that this one has a lane of Watch to; itself where there is none. */
EP_DEV ep_u32 ep_far_watched(const EpRank& r) {
    for (ep_u32 peer = 0; peer < r.w.ranks; ++peer)
        if (ep_is_beyond(r, peer) && ep_takes_part(r, peer) && ep_far_lane(r, peer, EP_LANE_WATCH).state != 0) return peer;
    return r.me;
}

/* What is wrong with whoever posts for this rank: EP_FAR_GONE, or EP_FAR_STALLED where it gives no sign of life for as long as this looks. Who waits long, or
   is waited for, asks: where nothing that it posts leaves, it waits for ranks that wait for it. */
EP_DEV_APART ep_u32 ep_far_poster(const EpRank& r) {
    const ep_u32 peer = ep_far_watched(r);
    if (peer == r.me) return EP_FAR_OK;
    const EpFar lane = ep_far_lane(r, peer, EP_LANE_WATCH);
    const ep_u64 pulse = ep_far_pulse(lane), until = ep_now() + ep_stands_still_after(r.allowed);
    /* Looked at once more when the time is up: this kernel may have been held up itself. */
    for (bool late = false; ep_far_pulse(lane) == pulse; late = ep_now() >= until) {
        if (ep_far_poll(lane) == EP_FAR_GONE) return EP_FAR_GONE;
        if (late) return EP_FAR_STALLED;
        ep_nap(1000);
    }
    return EP_FAR_OK;
}

#else

EP_DEV bool ep_one_node(const EpRank&) { return true; }
EP_DEV bool ep_is_beyond(const EpRank&, ep_u32) { return false; }
EP_DEV void ep_far_raise(const EpRank&, ep_u32, ep_u32, ep_u64, ep_u64) {}
EP_DEV ep_u32 ep_far_culprit(const EpRank&, ep_u32 peer, ep_u32) { return peer; }
EP_DEV ep_u32 ep_far_trouble(const EpRank&, ep_u32) { return 0; }
EP_DEV ep_u32 ep_far_watched(const EpRank& r) { return r.me; }
EP_DEV ep_u32 ep_far_poster(const EpRank&) { return 0; }

#endif

/* The rank of this node through which what source has for this node comes, and goes back: the one on its rail. In the source's own node it is the source. */
EP_DEV ep_u32 ep_gate(const EpRank& r, ep_u32 source) {
    if (!ep_is_beyond(r, source)) return source;
    return r.me - r.me % r.w.ranks_per_node + source % r.w.ranks_per_node;
}

/* Whether this rank has lanes with another: within a node with all, between nodes along the rail. The rank takes part. */
EP_DEV bool ep_is_neighbour(const EpRank& r, ep_u32 rank) {
    if (rank == r.me || !ep_takes_part(r, rank)) return false;
    return !ep_is_beyond(r, rank) || rank % r.w.ranks_per_node == r.me % r.w.ranks_per_node;
}
#endif
