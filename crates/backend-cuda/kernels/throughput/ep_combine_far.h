/*
 * ep_combine_far.h: the sum of a token begins where its rows are: of each node one row crosses the network, along the rail.
 *
 *   roles    one warp each: gatherer of what this node's ranks return for another node's rank on this rail, on a channel
 *   memory   as a reducer; sums are written into the staging memory of the ring between nodes
 *   rules    sums are rounded to bf16, those of the own node, too (ep_add_part). No circle of waits: returners wait for the gatherer, it for the
 *            reducer at the tokens' rank, and that one for nobody who waits for it: all take tokens in ascending order
 */
#ifndef EP_COMBINE_FAR_H
#define EP_COMBINE_FAR_H
#include "ep_combine_ring.h"

/* The tokens of a rank of another node, as ep_forward has noted them. */
EP_DEV EpTokens ep_far_tokens(const EpRank& r, const EpCombineRingArgs& a, ep_u32 source) {
    const EpCombineArgs& c = a.combine;
    const ep_u32 first = ((const ep_u32*)c.first_of)[source];
    EpTokens t;
    t.source = source;
    t.held = EP_FULL;
    t.step = r.w.ranks_per_node;
    t.first = r.me - r.me % r.w.ranks_per_node;
    t.positions = ep_fanout_of(r, a.fanout, a.tokens_of, source);
    t.own = EpSource{ep_here(c.y + first * c.y_stride), ep_nowhere(), (ep_u32)c.y_stride, r.w.topk * 4, 0, 0};
    if (c.own_weights) t.own.choices = ep_here(c.own_weights + (ep_u64)first * r.w.topk * 4);
    return t;
}

/* Whether any rank of this node has a row of a token with these positions. */
EP_DEV bool ep_is_gathered(const EpTokens& t, const ep_i32* positions) {
    for (ep_u32 local = 0; local < t.step; ++local)
        if (positions[local] >= 0) return true;
    return false;
}

/* Where a gatherer's sums go: into slots of the ring to the tokens' rank. */
struct EpToNode {
    EpOutlet ring;
    EpRings rings;
    EpAt to;
    ep_u32 number; /* of the sums */
};

EP_DEV ep_u32 ep_next_token(EpTokens& t, const EpDesk& desk, const EpToNode&, ep_u32 token, ep_u32 end) {
    for (; token < end; ++token) {
        ep_hold(t, desk, token, end);
        if (ep_is_gathered(t, ep_held(t, desk, token))) break;
    }
    return token;
}
/* What is pending is published before any wait. */
EP_DEV void ep_before_wait(const EpRank& r, EpToNode& to) { ep_outlet_publish(r, to.rings, to.ring); }
EP_DEV bool ep_wants_weights(const EpCombineRingArgs&, const EpToNode&) { return true; }
EP_DEV bool ep_begin_sum(const EpRank& r, const EpCombineRingArgs&, EpToNode& to, const EpDesk& desk, ep_u32 token, ep_u64 began) {
    if (ep_producer_is_full(to.ring.ring, to.rings)) ep_routes_return(r, desk.routes);
    if (!ep_outlet_slot(r, to.rings, to.ring, began, &to.to)) return false;
    if (ep_warp_lane() == 0) ep_put16(to.to, ep_row_header(r, token, to.number));
    ++to.number;
    return true;
}
EP_DEV void ep_put_weight(const EpRank&, const EpCombineRingArgs&, const EpToNode& to, ep_u32, ep_u32 k, float weight) {
    ep_put_message(to.to + (sizeof(EpRowHeader) + k * sizeof(EpChoice)), EpChoice{-1, weight});
}
template <int columns> EP_DEV void ep_start_sum(const EpCombineRingArgs&, const EpToNode&, ep_u32, ep_u32, ep_u32, EpSums<columns>&) {}
EP_DEV void ep_put_sum(const EpRank& r, const EpCombineRingArgs&, const EpToNode& to, ep_u32, ep_u32 at, const EpUnit& sum) {
    ep_put16(to.to + (r.w.header_bytes + at), sum);
}
EP_DEV void ep_end_sum(const EpRank& r, EpToNode& to) { ep_outlet_push(r, to.rings, to.ring); }

EP_DEV void ep_gather(const EpRank& r, const EpCombineRingArgs& a, const EpRole& role, const EpSource* sources, const EpDesk& desk,
                      ep_u64 began) {
    const ep_u32 lane = ep_warp_lane(), source = role.peer, channel = role.channel, track = ep_far_track(r.w, channel);
    if (!ep_node_gives_back(r, a, source, r.me)) return;
    EpToNode to;
    to.rings = ep_rings_of(r, a.rings, track);
    to.number = 0;
    EpTokens tokens = ep_far_tokens(r, a, source);
    const ep_u32 count = ((const ep_u32*)a.tokens_of)[source];
    const ep_u32 begin = ep_channel_first(count, a.rings.channels, channel), end = ep_channel_first(count, a.rings.channels, channel + 1);
    ep_u32 rows = 0;
    for (ep_u32 base = begin; base < end; base += 32)
        rows += ep_bits(ep_warp_votes(base + lane < end && ep_is_gathered(tokens, tokens.positions + (ep_u64)(base + lane) * tokens.step)));
    if (!ep_open_rings(r, a, sources, tokens, desk.routes, channel, began)) return;
    if (!ep_outlet_open(r, to.ring, source, track, began) || !ep_outlet_slot(r, to.rings, to.ring, began, &to.to)) return;
    if (lane == 0) {
        ep_put_message(to.to, ep_header(r, rows, 0));
        ep_tally_far(r, 2, source, rows);
    }
    ep_outlet_push(r, to.rings, to.ring);
    if (ep_sum_tokens<EP_COLUMNS>(r, a, sources, tokens, desk, begin, end, to, began)) {
        ep_routes_close(r, desk.routes);
        ep_outlet_close(r, to.rings, to.ring);
    }
    ep_fetch_wait<0>();
}
#endif
