/*
 * ep_combine_far.h: the sum of a token begins where its rows are: of each node one row crosses the network, along the rail.
 *
 *   roles    a team of warps each (ep_combine_team.h): gatherer of what this node's ranks return for another node's rank on this rail, on a channel
 *   memory   as a reducer; sums are written into the staging memory of the ring between nodes
 *   rules    sums are rounded to bf16, those of the own node, too (ep_add_part). No circle of waits: returners wait for the gatherer, it for the
 *            reducer at the tokens' rank, and that one for nobody who waits for it: all take tokens in ascending order
 */
#ifndef EP_COMBINE_FAR_H
#define EP_COMBINE_FAR_H
#include "ep_combine_team.h"

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
    ep_u32 number; /* of the sums */
    ep_u32 first_run;
};

/* Tokens without a row here have no sum here. */
EP_DEV ep_u32 ep_wanted(const EpToNode&, ep_u32, ep_u32 gathered) { return gathered; }
/* What is pending is published before any wait. */
EP_DEV void ep_before_wait(const EpRank& r, EpToNode& to) { ep_outlet_publish(r, to.rings, to.ring); }
EP_DEV bool ep_wants_weights(const EpCombineRingArgs&, const EpToNode&) { return true; }
/* For how many sums there is room, up to `most`; waits for that of one. */
EP_DEV ep_u32 ep_room(const EpRank& r, const EpCombineRingArgs&, EpToNode& to, const EpDesk& desk, ep_u32 most, ep_u64 began) {
    if (ep_producer_is_full(to.ring.ring, to.rings)) ep_routes_return(r, desk.routes);
    EpAt first;
    if (!ep_outlet_slot(r, to.rings, to.ring, began, &first)) return 0;
    return ep_outlet_room(r, to.rings, to.ring, ep_within_run(to.first_run, to.number, most));
}
/* Where the sum behind `before` others goes, and its header. */
EP_DEV EpAt ep_sum_slot(const EpRank& r, const EpToNode& to, ep_u32 before) { return ep_outlet_staging(r, to.rings, to.ring.ring, to.ring.peer, to.ring.track, before); }
EP_DEV void ep_head_sum(const EpRank& r, const EpToNode& to, EpAt slot, ep_u32 token, ep_u32 before) {
    if (ep_warp_lane() == 0) ep_put16(slot, ep_row_header(r, token, to.number + before));
}
EP_DEV void ep_put_weight(const EpRank&, const EpCombineRingArgs&, const EpToNode&, EpAt slot, ep_u32, ep_u32 k, float weight) {
    ep_put_message(slot + (sizeof(EpRowHeader) + k * sizeof(EpChoice)), EpChoice{-1, weight});
}
template <int columns> EP_DEV void ep_start_sum(const EpCombineRingArgs&, const EpToNode&, ep_u32, ep_u32, ep_u32, EpSums<columns>&) {}
EP_DEV void ep_put_sum(const EpRank& r, const EpCombineRingArgs&, const EpToNode&, EpAt slot, ep_u32, ep_u32 at, const EpUnit& sum) {
    ep_put16(slot + (r.w.header_bytes + at), sum);
}
EP_DEV void ep_end_sums(const EpRank& r, EpToNode& to, ep_u32 sums) {
    to.number += sums;
#pragma unroll 1
    for (; sums > 0; --sums) ep_outlet_push(r, to.rings, to.ring);
    if (to.number == to.first_run) ep_outlet_publish(r, to.rings, to.ring);
}

/* Before a gatherer sums: its rings are open, and it has told how many sums come. */
EP_DEV bool ep_begin_gather(const EpRank& r, const EpCombineRingArgs& a, const EpSource* sources, const EpDesk& desk, EpLead<EpToNode>& lead,
                            ep_u32 channel, ep_u64 began) {
    const EpTokens& t = lead.tokens;
    EpToNode& to = lead.to;
    ep_u32 rows = 0;
    for (ep_u32 base = lead.next; base < lead.end; base += 32) {
        const ep_u32 token = base + ep_warp_lane();
        rows += ep_bits(ep_warp_votes(token < lead.end && ep_is_gathered(t, t.positions + (ep_u64)token * t.step)));
    }
    to.first_run = a.short_runs ? ep_first_run(rows, to.rings.chunk) : 0;
    EpAt at;
    if (!ep_open_rings(r, a, sources, t, desk.routes, channel, began)) return false;
    if (!ep_outlet_open(r, to.ring, t.source, ep_far_track(r.w, channel), began) || !ep_outlet_slot(r, to.rings, to.ring, began, &at)) return false;
    if (ep_warp_lane() == 0) {
        ep_put_message(at, ep_header(r, rows, 0));
        ep_tally_far(r, 2, t.source, rows);
    }
    ep_outlet_push(r, to.rings, to.ring);
    return true;
}

EP_DEV void ep_gather(const EpRank& r, const EpCombineRingArgs& a, const EpRole& role, const EpTeam& team, const EpSource* sources,
                      const EpDesk& desk, ep_u64 began) {
    const ep_u32 source = role.peer, channel = role.channel;
    if (!ep_node_gives_back(r, a, source, r.me)) return;
    if (ep_leads(team)) {
        EpLead<EpToNode> lead;
        lead.tokens = ep_far_tokens(r, a, source);
        lead.to.rings = ep_rings_of(r, a.rings, ep_far_track(r.w, channel));
        lead.to.number = 0;
        const ep_u32 count = ((const ep_u32*)a.tokens_of)[source];
        lead.next = ep_channel_first(count, a.rings.channels, channel);
        lead.end = ep_channel_first(count, a.rings.channels, channel + 1);
        lead.right = ep_begin_gather(r, a, sources, desk, lead, channel, began);
        ep_lay_down(desk, lead);
    }
    ep_sum_in_team<EP_COLUMNS, EpToNode>(r, a, sources, desk, team, began);
    ep_fetch_wait<0>();
    if (!ep_leads(team)) return;
    EpLead<EpToNode> lead = ep_take_up<EpToNode>(desk);
    if (!lead.right) return;
    ep_routes_close(r, desk.routes);
    ep_outlet_close(r, lead.to.rings, lead.to.ring);
}

EP_DEV void ep_reduce(const EpRank& r, const EpCombineRingArgs& a, const EpRole& role, const EpTeam& team, const EpSource* sources,
                      const EpDesk& desk, ep_u64 began) {
    if (ep_leads(team)) {
        EpLead<EpToUser> lead;
        lead.tokens = ep_own_tokens(r, a, sources);
        lead.to.none = 0;
        lead.next = ep_channel_first(a.combine.tokens, a.rings.channels, role.channel);
        lead.end = ep_channel_first(a.combine.tokens, a.rings.channels, role.channel + 1);
        lead.right = ep_begin_reduce(r, a, sources, lead.tokens, desk, role.channel, began);
        ep_lay_down(desk, lead);
    }
    ep_sum_in_team<EP_COLUMNS, EpToUser>(r, a, sources, desk, team, began);
    ep_fetch_wait<0>();
    if (ep_leads(team) && ep_take_up<EpToUser>(desk).right) ep_routes_close(r, desk.routes);
}
#endif
