/*
 * ep_combine_team.h: a role that sums, played by a team (ep_team.h). Each of its warps sums whole tokens: of a batch, of up to 32 tokens side by side whose rows
 * are all there, those that come to it in turn.
 *
 *   leader    brings positions to the desk, and finds of which tokens ranks have rows; waits; behind the batch it gives slots back, and pushes sums
 *   memory    shared: desks (ep_combine_rows.h). Which tokens have a row from a rank are votes, a bit for each token that is held. So each warp finds the
 *             rows of its tokens by itself: those of a ring that come before are the votes below a token's bit
 */
#ifndef EP_COMBINE_TEAM_H
#define EP_COMBINE_TEAM_H
#include "ep_combine_ring.h"
#include "ep_team.h"

/* What the leader says: of which tokens, bits of those that are held, sums are made now; none where there is no more, or something is wrong. Of them and
   those between, up to `behind`, all rows are there. */
struct EpSumsDue {
    ep_u32 first; /* the token of the lowest bit */
    ep_u32 sums;
    ep_u32 behind; /* behind the last token */
};
static_assert(sizeof(EpSumsDue) <= EP_BATON_BYTES, "the host makes room for another EpSumsDue");

/* A reducer's sums have a place in the user's memory, whenever they come. */
EP_DEV void ep_before_wait(const EpRank&, EpToUser&) {}
EP_DEV ep_u32 ep_wanted(const EpToUser&, ep_u32 tokens, ep_u32) { return tokens; }
EP_DEV ep_u32 ep_room(const EpRank&, const EpCombineRingArgs&, EpToUser&, const EpDesk&, ep_u32 most, ep_u64) { return most; }
EP_DEV EpAt ep_sum_slot(const EpRank&, const EpToUser&, ep_u32) { return ep_nowhere(); }
EP_DEV void ep_head_sum(const EpRank&, const EpToUser&, EpAt, ep_u32, ep_u32) {}
EP_DEV void ep_end_sums(const EpRank&, EpToUser&, ep_u32) {}

/* What a leader knows, in shared memory between its turns: beside sums it has no room in registers. */
template <class To> struct EpLead {
    EpTokens tokens;
    To to;
    ep_u32 next, end; /* tokens: not summed yet, up to the last one */
    ep_u32 right;     /* whether nothing has failed */
};

/* Takes up what the leader knows, and lays it down. By all its lanes, of which the first has it all. */
template <class To> EP_DEV EpLead<To> ep_take_up(const EpDesk& desk) {
    ep_warp_meet();
    return *(const EpLead<To>*)desk.lead;
}
template <class To> EP_DEV void ep_lay_down(const EpDesk& desk, const EpLead<To>& lead) {
    static_assert(sizeof(EpLead<To>) <= EP_LEAD_BYTES, "the host makes room for another EpLead");
    ep_warp_meet();
    if (ep_warp_lane() == 0) *(EpLead<To>*)desk.lead = lead;
}

/* Bits of the tokens that are held below the token `token`, which is not before the first of them. */
EP_DEV ep_u32 ep_held_before(ep_u32 token, ep_u32 first) { return token - first == 32 ? EP_FULL : (1u << (token - first)) - 1; }

/* Finds which of the tokens held, from `next` on, have a row from which rank. Bits of those that have any. Lanes serve tokens. */
EP_DEV ep_u32 ep_vote(const EpRank& r, const EpTokens& t, const EpDesk& desk, ep_u32 next, ep_u32 behind) {
    const ep_u32 token = t.held + ep_warp_lane();
    ep_u32 any = 0;
    for (ep_u32 rank = 0; rank < r.w.ranks; ++rank) {
        const ep_u32 votes = ep_warp_votes(token >= next && token < behind && ep_is_due(desk.routes[rank], ep_held(t, desk, token)));
        if (ep_warp_lane() == 0) desk.votes[rank] = votes;
        any |= votes;
    }
    ep_warp_meet();
    return any;
}

/* The first token that lacks a row that has not come yet, or `behind`. Lanes serve ranks. */
EP_DEV ep_u32 ep_rows_reach(const EpRank& r, const EpCombineRingArgs& a, const EpTokens& t, const EpDesk& desk, ep_u32 behind) {
    ep_u32 reach = behind;
#pragma unroll 1
    for (ep_u32 rank = ep_warp_lane(); rank < r.w.ranks; rank += 32) {
        EpRoute& route = desk.routes[rank];
        ep_u32 votes = desk.votes[rank];
        if (!route.through_ring || votes == 0) continue;
        ep_u64 tail;
        ep_inlet_sees(r, ep_rings_of(r, a.rings, route.ring.track), route.ring, ep_bits(votes) - 1, &tail);
        for (ep_u64 there = route.ring.ring.tail - route.ring.ring.head; there > 0 && votes; --there) votes &= votes - 1;
        if (votes && t.held + ep_lowest_bit(votes) < reach) reach = t.held + ep_lowest_bit(votes);
    }
    for (ep_u32 step = 16; step > 0; step /= 2) {
        const ep_u32 other = ep_warp_shuffle(reach, ep_warp_lane() ^ step);
        if (other < reach) reach = other;
    }
    return reach;
}

/* The next batch. Its rows, and room for its sums, are waited for where there are none. By the leader. */
template <class To>
EP_DEV EpSumsDue ep_next_due(const EpRank& r, const EpCombineRingArgs& a, const EpDesk& desk, EpLead<To>& lead, ep_u64 began) {
    EpTokens& t = lead.tokens;
    while (lead.right && lead.next < lead.end) {
        ep_hold(t, desk, lead.next, lead.end);
        ep_u32 behind = lead.end - t.held < EP_DESK_HELD ? lead.end : t.held + EP_DESK_HELD;
        const ep_u32 any = ep_vote(r, t, desk, lead.next, behind);
        behind = ep_rows_reach(r, a, t, desk, behind);
        const ep_u32 there = ep_held_before(behind, t.held) & ~ep_held_before(lead.next, t.held);
        ep_u32 sums = ep_wanted(lead.to, there, any & there);
        if (sums == 0) {
            lead.next = behind;
            if (lead.next == lead.end || lead.next == t.held + EP_DESK_HELD) continue;
            ep_before_wait(r, lead.to);
            lead.right = ep_await_due(r, a, t, desk, lead.next, began);
            continue;
        }
        const ep_u32 room = ep_room(r, a, lead.to, desk, ep_bits(sums), began);
        if (room == 0) break;
        ep_u32 beyond = sums;
        for (ep_u32 i = 0; i < room; ++i) beyond &= beyond - 1;
        if (beyond) behind = t.held + ep_lowest_bit(beyond);
        return EpSumsDue{t.held, sums & ~beyond, behind};
    }
    if (lead.next < lead.end) lead.right = false;
    return EpSumsDue{0, 0, 0};
}

/* All warps have read the rows of a batch, and have written its sums. By the leader. */
template <class To>
EP_DEV void ep_close_due(const EpRank& r, const EpCombineRingArgs& a, const EpDesk& desk, EpLead<To>& lead, const EpSumsDue& batch) {
    if (!lead.right) return;
    ep_end_sums(r, lead.to, ep_bits(batch.sums));
    const ep_u32 closed = ep_held_before(batch.behind, batch.first);
    for (ep_u32 rank = 0; rank < r.w.ranks; ++rank)
        for (ep_u32 i = 0, rows = desk.routes[rank].through_ring ? ep_bits(desk.votes[rank] & closed) : 0; i < rows; ++i) {
            const EpInlet& ring = desk.routes[rank].ring;
            ep_poison(r, ep_inlet_slot(r, ep_rings_of(r, a.rings, ring.track), ring, i), (ep_u32)(r.w.header_bytes + r.w.result_stride));
        }
    ep_warp_meet();
#pragma unroll 1
    for (ep_u32 rank = ep_warp_lane(); rank < r.w.ranks; rank += 32) {
        EpRoute& route = desk.routes[rank];
        if (!route.through_ring) continue;
#pragma unroll 1
        for (ep_u32 rows = ep_bits(desk.votes[rank] & closed); rows > 0; --rows)
            ep_inlet_pop(r, ep_rings_of(r, a.rings, route.ring.track), route.ring, true);
    }
    ep_warp_meet();
    lead.next = batch.behind;
}

/* A planted fault: gives slots back that are still to be read. By the leader. */
EP_DEV void ep_plant_closed(const EpRank& r, const EpDesk& desk, const EpSumsDue& batch) {
#ifdef EP_TEST
    if (!ep_planted(r, EP_PLANT_CLOSED_EARLY)) return;
    for (ep_u32 rank = ep_warp_lane(); rank < r.w.ranks; rank += 32) {
        if (!desk.routes[rank].through_ring) continue;
        EpInlet ring = desk.routes[rank].ring;
        ring.ring.head += ep_bits(desk.votes[rank] & ep_held_before(batch.behind, batch.first));
        ep_inlet_return(r, ring);
    }
#endif
}

/* Waits until the oldest of so many parts has come: where a desk of eight, four or two is full, for no other. Comparisons, as a jump by a table costs more. */
EP_DEV void ep_await_oldest(ep_u32 in_flight) {
    if (in_flight >= 8) ep_fetch_wait<7>();
    else if (in_flight >= 4) ep_fetch_wait<3>();
    else if (in_flight >= 2) ep_fetch_wait<1>();
    else ep_fetch_wait<0>();
}

/* Sums a warp's tokens of a batch. While parts of one are added those of the next are on their way. */
template <int columns, class To>
EP_DEV void ep_sum_due(const EpRank& r, const EpCombineRingArgs& a, const EpSource* sources, const EpDesk& desk, const EpTeam& team,
                         const EpSumsDue& batch) {
    const EpLead<To>& lead = *(const EpLead<To>*)desk.lead;
    const ep_u32 bytes = (ep_u32)r.w.result_stride;
    ep_u32 left = batch.sums, turn = 0;         /* tokens that are not found yet, and how many of the batch's come before */
    ep_u32 found = 0, summed = 0;               /* own tokens */
    ep_u32 asked = 0, taken = 0;                /* parts */
    EpPart asks = ep_no_part(bytes), adds = asks;
    EpSums<columns> sums;
    EpUnit own[columns];
    EpAt slot = ep_nowhere();
    ep_sums_clear(sums);
    if (ep_planted(r, EP_PLANT_CLOSED_EARLY)) ep_be_slow();
    for (;;) {
        while (asked - taken < desk.depth) {
            if (asks.at >= bytes) {
                if (found - summed == EP_TOKENS_AHEAD) break;
                for (; left && turn % team.warps != team.member; ++turn) left &= left - 1;
                if (left == 0) break;
                const ep_u32 bit = ep_lowest_bit(left), below = (1u << bit) - 1;
                asks.of = ep_find_rows(r, a, sources, lead.tokens, desk, ep_found(desk, found), batch.first + bit,
                                       [&](ep_u32 rank) { return (desk.votes[rank] >> bit & 1) != 0; },
                                       [&](ep_u32 rank) { return ep_bits(desk.votes[rank] & below); });
                if (ep_warp_lane() == 0) desk.tokens[found % EP_TOKENS_AHEAD] = asks.of;
                ep_fetch_heads(r, desk, found, asks.of.count, ep_wants_weights(a, lead.to));
                asks.row = asks.at = 0;
                ++found;
                ++turn;
                left &= left - 1;
            }
            ep_fetch_part<columns>(desk, found - 1, asks, bytes, asked++);
            ep_next_part<columns>(asks);
        }
        if (asked == taken) return;
        ep_await_oldest(asked - taken);
        if (adds.at >= bytes) {
            ep_warp_meet();
            adds = EpPart{desk.tokens[summed % EP_TOKENS_AHEAD], 0, 0};
            const ep_u32 token = adds.of.token, before = ep_bits(batch.sums & ep_held_before(token, batch.first));
            slot = ep_sum_slot(r, lead.to, before);
            ep_head_sum(r, lead.to, slot, token, before);
            if (!ep_check_rows(r, ep_found(desk, summed), adds.of) && ep_warp_lane() == 0) ((EpLead<To>*)desk.lead)->right = false;
            if (ep_wants_weights(a, lead.to))
#pragma unroll 1
                for (ep_u32 k = ep_warp_lane(); k < r.w.topk; k += 32)
                    ep_put_weight(r, a, lead.to, slot, token, k, ep_add_weights(r, desk, summed, adds.of, k));
        }
        const ep_u32 at = adds.at + ep_warp_lane() * 16;
        const EpPart added = adds;
        ep_add_part<columns>(desk, added, taken++, sums, own, [&](EpSums<columns>& into) { ep_start_sum(a, lead.to, added.of.token, at, bytes, into); });
        ep_next_part<columns>(adds);
        if (adds.row != 0) continue;
#pragma unroll
        for (int i = 0; i < columns; ++i)
            if (at + i * 512 < bytes) ep_put_sum(r, a, lead.to, slot, added.of.token, at + i * 512, ep_sum_round(sums.of[i]));
        if (adds.at >= bytes) ++summed;
    }
}

/* Sums the tokens that the leader knows of, which lays that down before; their sums go to a `To`. By all warps of the team. */
template <int columns, class To>
EP_DEV void ep_sum_in_team(const EpRank& r, const EpCombineRingArgs& a, const EpSource* sources, const EpDesk& desk, const EpTeam& team, ep_u64 began) {
    for (;;) {
        if (ep_leads(team)) {
            EpLead<To> lead = ep_take_up<To>(desk);
            const EpSumsDue batch = ep_next_due(r, a, desk, lead, began);
            if (batch.sums) ep_plant_closed(r, desk, batch);
            if (ep_warp_lane() == 0) *(EpSumsDue*)desk.baton = batch;
            ep_lay_down(desk, lead);
        }
        ep_team_meet(team.number, team.warps);
        const EpSumsDue batch = *(const EpSumsDue*)desk.baton;
        if (batch.sums == 0) return;
        ep_sum_due<columns, To>(r, a, sources, desk, team, batch);
        ep_team_meet(team.number, team.warps);
        if (!ep_leads(team)) continue;
        EpLead<To> lead = ep_take_up<To>(desk);
        ep_close_due(r, a, desk, lead, batch);
        ep_lay_down(desk, lead);
    }
}
#endif
