/*
 * ep_combine_far.h: the sum of a token begins where its rows are: of each node one row crosses the network, along the rail.
 *
 *   roles    one warp each: gatherer of what this node's ranks return for another node's rank on this rail, on a channel
 *   memory   as a reducer; sums are written into the staging memory of the ring between nodes
 *   rules    sums are rounded to bf16, those of the own node, too (ep_add_nodes). No circle of waits: returners wait for the gatherer, it for the
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
    t.step = r.w.ranks_per_node;
    t.first = r.me - r.me % r.w.ranks_per_node;
    t.positions = ep_fanout_of(r, a.fanout, a.tokens_of, source);
    t.own = EpSource{ep_here(c.y + first * c.y_stride), ep_nowhere(), (ep_u32)c.y_stride, r.w.topk * 4, 0, 0};
    if (c.own_weights) t.own.choices = ep_here(c.own_weights + (ep_u64)first * r.w.topk * 4);
    return t;
}

/* Whether any rank of this node has a row of a token. */
EP_DEV bool ep_is_gathered(const EpTokens& t, ep_u32 token) {
    for (ep_u32 local = 0; local < t.step; ++local)
        if (t.positions[(ep_u64)token * t.step + local] >= 0) return true;
    return false;
}

/* Writes the sum of a token into a slot. */
EP_DEV void ep_lay_sum(const EpRank& r, const EpTokens& t, const EpRoute* routes, EpAt to, ep_u32 token, ep_u32 number) {
    const ep_u32 lane = ep_warp_lane(), end = t.first + t.step;
    if (lane == 0) ep_put16(to, ep_row_header(r, token, number));
    for (ep_u32 k = lane; k < r.w.topk; k += 32)
        ep_put_message(to + (sizeof(EpRowHeader) + k * sizeof(EpChoice)), EpChoice{-1, ep_add_weights(routes, t.first, end, k)});
    for (ep_u32 at = lane * 16; at < r.w.result_stride; at += 512 * EP_COLUMNS) {
        EpSums<EP_COLUMNS> sums;
        ep_sums_clear(sums);
        ep_add_rows(r, routes, t.first, end, at, sums);
#pragma unroll
        for (int i = 0; i < EP_COLUMNS; ++i)
            if (at + i * 512 < r.w.result_stride) ep_put16(to + (r.w.header_bytes + at + i * 512), ep_sum_round(sums.of[i]));
    }
}

EP_DEV void ep_gather(const EpRank& r, const EpCombineRingArgs& a, const EpRole& role, const EpSource* sources, EpRoute* routes,
                      ep_u64 began) {
    const ep_u32 lane = ep_warp_lane(), source = role.peer, channel = role.channel, track = ep_far_track(r.w, channel);
    if (!ep_node_gives_back(r, a, source, r.me)) return;
    const EpRings rings = ep_rings_of(r, a.rings, track);
    const EpTokens tokens = ep_far_tokens(r, a, source);
    const ep_u32 count = ((const ep_u32*)a.tokens_of)[source];
    const ep_u32 begin = ep_channel_first(count, rings.channels, channel), end = ep_channel_first(count, rings.channels, channel + 1);
    ep_u32 rows = 0;
    for (ep_u32 base = begin; base < end; base += 32)
        rows += ep_bits(ep_warp_votes(base + lane < end && ep_is_gathered(tokens, base + lane)));
    EpOutlet ring;
    EpAt to;
    if (!ep_open_rings(r, a, sources, routes, source, channel, began)) return;
    if (!ep_outlet_open(r, ring, source, track, began) || !ep_outlet_slot(r, rings, ring, began, &to)) return;
    if (lane == 0) {
        ep_put_message(to, ep_header(r, rows, 0));
        ep_tally_far(r, 2, source, rows);
    }
    ep_outlet_push(r, rings, ring);
    ep_u32 number = 0;
    for (ep_u32 token = begin; token < end; ++token) {
        if (!ep_is_gathered(tokens, token)) continue;
        /* What is pending is published before any wait. */
        if (ep_rows_are_late(r, a, tokens, routes, token)) ep_outlet_publish(r, rings, ring);
        if (!ep_find_rows(r, a, sources, tokens, routes, token, began)) return;
        if (ep_producer_is_full(ring.ring, rings)) ep_routes_return(r, routes);
        if (!ep_outlet_slot(r, rings, ring, began, &to)) return;
        ep_lay_sum(r, tokens, routes, to, token, number++);
        ep_outlet_push(r, rings, ring);
        ep_routes_pop(r, a, routes);
    }
    ep_routes_close(r, routes);
    ep_outlet_close(r, rings, ring);
}
#endif
