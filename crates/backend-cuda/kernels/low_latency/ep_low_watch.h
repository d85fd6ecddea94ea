/*
 * ep_low_watch.h: the lookout of low latency: who waits for whom, and whom to blame.
 *
 * The role is ep_core::roles::low_latency::lookout: a rank that waits long, or is waited for, says for whom it waits; the culprit is at
 * the end of that chain.
 */
#ifndef EP_LOW_WATCH_H
#define EP_LOW_WATCH_H
#include "ep_low_far.h"

/* Looks after which a wait looks at its rare part, too. */
#define EP_LOW_LONG 64u

/* Between nodes a wait that is not short pauses: hundreds of warps that look without one hold up what the driver copies, manyfold. */
#ifdef EP_FAR_H
EP_DEV void ep_low_pause(ep_u32 spin) {
    if (spin > 16) ep_nap(100);
}
#else
EP_DEV void ep_low_pause(ep_u32) {}
#endif

/* A wait of so little, in parts of the time allowed, is nothing to worry about. */
#define EP_LOW_EARLY 64u

/* The rank that `rank` has said it waits for; itself where it waits for nobody. */
EP_DEV ep_u32 ep_low_named(const EpRank& r, ep_u32 rank) {
    const ep_u64 said = ep_peek(r, rank, EP_LANE_WATCH, EP_COUNTER_WAITING);
    const ep_u32 named = (ep_u32)(said & 0xffff);
    return said == 0 || named >= r.w.ranks ? rank : named;
}

EP_RARE void ep_low_say(const EpRank& r, ep_u32 rank) {
    ep_low_begin_speaking(r);
    const ep_u64 serial = atomicAdd(&ep_low_state(r)->serial, 1u) + 1ull;
    EP_SHORT for (ep_u32 other = 0; other < r.w.ranks; ++other)
        if (other != r.me && ep_takes_part(r, other))
            ep_publish(r, other, EP_LANE_WATCH, EP_COUNTER_WAITING, serial << 16 | rank);
    ep_low_end_speaking(r);
}

/* The end of the chain of those who wait for each other, which begins with `first`. */
EP_RARE ep_u32 ep_low_culprit(const EpRank& r, ep_u32 first) {
    ep_u32 last = first;
    EP_SHORT for (ep_u32 hops = 0; hops < r.w.ranks; ++hops) {
        const ep_u32 next = ep_low_named(r, last);
        if (next == last || next == r.me || !ep_takes_part(r, next)) break;
        ep_u32 before = first;
        EP_SHORT for (ep_u32 hop = 0; hop < hops && before != next; ++hop) before = ep_low_named(r, before);
        if (before == next) break;
        last = next;
    }
    return last;
}

/* The rare part of a wait for peer: says that this rank waits, when it has waited long or is waited for; true when time is up, peer
   is gone, or the launch has failed. */
EP_RARE bool ep_low_vain(const EpRank& r, ep_u32 peer, ep_u64 began) {
    EpLow* low = ep_low_state(r);
    if (ep_low_failed(r) || ep_low_is_gone(r, peer) || ep_low_is_cut(r, peer)) return true;
    const ep_u64 waited = ep_now() - began;
    /* The others may have begun to wait long before this rank: it answers however short its own wait has been. */
    if (waited < r.allowed / EP_LOW_EARLY || blockIdx.x != 0) return waited >= r.allowed;
    bool speak = waited >= r.allowed / 4 * 3;
    EP_SHORT for (ep_u32 other = 0; other < r.w.ranks && !speak; ++other)
        speak = other != r.me && ep_takes_part(r, other) && ep_low_named(r, other) == r.me;
    if (speak && atomicCAS(&low->voice, 0u, peer + 1) == 0) {
        atomicExch(&low->said, 1u);
        ep_low_trouble(r);
        ep_low_say(r, peer);
    }
    /* Where nothing that this rank posts leaves, it names itself. Its neighbours hear that. */
    if (ep_ld_relaxed(&low->voice) != 0) {
        const ep_u32 poster = ep_far_poster(r);
        if (poster != 0) {
            ep_low_trouble(r);
            if (atomicExch(&low->poster, poster) == 0) ep_low_say(r, r.me);
            return true;
        }
    }
    return waited >= r.allowed;
}

/* Peer has delivered, after a wait so long that the rare part looked at it. */
EP_DEV void ep_low_came(const EpRank& r, ep_u32 peer) {
    if (blockIdx.x == 0 && ep_ld_relaxed(&ep_low_state(r)->voice) == peer + 1) atomicCAS(&ep_low_state(r)->voice, peer + 1, 0u);
}
#endif
