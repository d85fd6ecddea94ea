/*
 * ep_combine_ring.h: rows of ranks that offered no block come back through rings; a token's rows may come either way.
 *
 *   roles    one warp each, between nodes a team of warps (ep_combine_team.h): returner of a source's rows on a channel (where this rank offered
 *            nothing, and has rows of that source); reducer of the tokens of a channel. All of them run at the same time
 *   memory   rings in the windows of the tokens' ranks; shared: a desk for each reducer (ep_combine_rows.h)
 *   rules    the reducer takes tokens in ascending order, as all returners do, and holds no row while it waits: no circle of waits
 */
#ifndef EP_COMBINE_RING_H
#define EP_COMBINE_RING_H
#include "ep_combine_rows.h"

/* The first of some ascending tokens that is not below token. */
EP_DEV ep_u32 ep_partition(const ep_i32* tokens, ep_u32 count, ep_u32 token) {
    ep_u32 low = 0;
    while (low < count) {
        const ep_u32 middle = (low + count) / 2;
        if ((ep_u32)tokens[middle] < token) low = middle + 1;
        else count = middle;
    }
    return low;
}

/* A planted fault: another rank of this node, where rows go back through one. */
EP_DEV ep_u32 ep_wrong_gate(const EpRank& r, ep_u32 source) {
    const ep_u32 width = r.w.ranks_per_node, first = r.me - r.me % width;
    ep_u32 gate = ep_gate(r, source);
    if (!ep_is_beyond(r, source) || width < 3) return gate;
    do gate = first + (gate + 1 - first) % width;
    while (gate == r.me);
    return gate;
}

/* Rows of a source on a channel that this rank gives back. */
struct EpGiven {
    ep_u32 first, begin, end; /* the source's first row; of its rows, those of the channel */
    const ep_i32* tokens;
};

EP_DEV EpGiven ep_given(const EpRank& r, const EpCombineRingArgs& a, const EpRole& role) {
    const ep_u32 channels = a.rings.channels, source = role.peer, channel = role.channel;
    EpGiven g;
    g.first = ((const ep_u32*)a.combine.first_of)[source];
    g.tokens = (const ep_i32*)a.source_token + g.first;
    const ep_u32 rows = ((const ep_u32*)a.combine.first_of)[source + 1] - g.first, batch = ((const ep_u32*)a.tokens_of)[source];
    g.begin = ep_partition(g.tokens, rows, ep_channel_first(batch, channels, channel));
    g.end = ep_partition(g.tokens, rows, ep_channel_first(batch, channels, channel + 1));
    return g;
}

EP_DEV bool ep_begin_giving(const EpRank& r, const EpCombineRingArgs& a, const EpRole& role, const EpGiven& g, EpOutlet& ring, ep_u64 began) {
    const ep_u32 gate = ep_planted(r, EP_PLANT_WRONG_GATE) ? ep_wrong_gate(r, role.peer) : ep_gate(r, role.peer);
    EpAt at;
    if (!ep_outlet_open(r, ring, gate, role.track, began) || !ep_outlet_slot(r, a.rings, ring, began, &at)) return false;
    if (ep_warp_lane() == 0) ep_put_message(at, ep_header(r, g.end - g.begin, g.begin));
    ep_outlet_push(r, a.rings, ring);
    return true;
}

/* Puts a row into a slot. */
EP_DEV void ep_give_row(const EpRank& r, const EpCombineRingArgs& a, const EpGiven& g, ep_u32 position, EpAt at) {
    const ep_u32 lane = ep_warp_lane(), row = g.first + position;
    if (lane == 0) ep_put16(at, ep_row_header(r, (ep_u32)g.tokens[position], position));
    for (ep_u32 k = lane; k < r.w.topk; k += 32) {
        EpChoice choice = {-1, 0.0f};
        if (a.combine.own_weights) choice.weight = ((const float*)a.combine.own_weights)[(ep_u64)row * r.w.topk + k];
        ep_put_message(at + (sizeof(EpRowHeader) + k * sizeof(EpChoice)), choice);
    }
    ep_copy_row(at + r.w.header_bytes, (const ep_u8*)a.combine.y + (ep_u64)row * a.combine.y_stride, (ep_u32)r.w.result_stride);
}

EP_DEV void ep_give_back(const EpRank& r, const EpCombineRingArgs& a, const EpRole& role, ep_u64 began) {
    const EpGiven given = ep_given(r, a, role);
    EpOutlet ring;
    EpAt at;
    if (!ep_begin_giving(r, a, role, given, ring, began)) return;
    for (ep_u32 position = given.begin; position < given.end; ++position) {
        if (!ep_outlet_slot(r, a.rings, ring, began, &at)) return;
        ep_give_row(r, a, given, position, at);
        ep_outlet_push(r, a.rings, ring);
    }
    ep_outlet_close(r, a.rings, ring);
}

/* Whether rank, of this node, has rows of source, which it must give back: the same answer at both ends of a ring. */
EP_DEV bool ep_gives_back(const EpRank& r, const EpCombineRingArgs& a, ep_u32 source, ep_u32 rank) {
    return rank != ep_gate(r, source) && ep_takes_part(r, rank) && ((const ep_u32*)a.combine.matrix)[source * r.w.ranks + rank] > 0;
}

/* Whether a role gives rows back: this rank offered none, and has some. */
EP_DEV bool ep_returns(const EpRank& r, const EpCombineRingArgs& a, const EpRole& role) {
    return role.duty == EP_DUTY_RETURNER && a.combine.base == EP_NO_BASE && ep_takes_part(r, role.peer) && ep_gives_back(r, a, role.peer, r.me);
}

EP_DEV EpTokens ep_own_tokens(const EpRank& r, const EpCombineRingArgs& a, const EpSource* sources) {
    return EpTokens{r.me, r.w.ranks, 0, (const ep_i32*)a.combine.position, EP_FULL, sources[r.me]};
}

#ifdef EP_FAR_H
#include "ep_combine_due.h"
#else
/* Whether a ring brings rows of source's tokens from rank; and by which of its positions a token has one from there: how many, from the first. */
EP_DEV bool ep_is_brought(const EpRank& r, const EpCombineRingArgs& a, ep_u32 source, ep_u32 rank) {
    return ep_gives_back(r, a, source, rank);
}
EP_DEV ep_u32 ep_due_by(const EpRank&, const EpTokens&, ep_u32 rank, ep_u32* first) { return *first = rank, 1; }
/* Where the rows of rank lie that are pulled. */
EP_DEV EpSource ep_rows_of(const EpSource* sources, const EpTokens&, ep_u32 rank, bool) { return sources[rank]; }
#endif

/* Whether a token with these positions has a row from a rank. */
EP_DEV bool ep_is_due(const EpRoute& route, const ep_i32* positions) {
#pragma unroll 1
    for (ep_u32 i = 0; i < route.span; ++i)
        if (positions[route.first + i] >= 0) return true;
    return false;
}

/* The track by which rank's rows of source's tokens come. */
EP_DEV ep_u32 ep_track_from(const EpRank& r, ep_u32 source, ep_u32 rank, ep_u32 channel) {
    return ep_is_beyond(r, rank) ? ep_far_track(r.w, channel) : ep_own_track(r.w, source, channel);
}

/* Opens the rings that bring rows of source's tokens on a channel. Lanes serve ranks. */
EP_DEV bool ep_open_rings(const EpRank& r, const EpCombineRingArgs& a, const EpSource* sources, const EpTokens& t, EpRoute* routes,
                          ep_u32 channel, ep_u64 began) {
    const ep_u32 source = t.source;
    bool right = true;
#pragma unroll 1
    for (ep_u32 rank = ep_warp_lane(); rank < r.w.ranks; rank += 32) {
        EpRoute& route = routes[rank];
        route.ahead = 0;
        route.span = ep_due_by(r, t, rank, &route.first);
        route.through_ring = ep_is_brought(r, a, source, rank) && !ep_is_somewhere(sources[rank].payload);
        if (!route.through_ring) continue;
        ep_inlet_open(r, route.ring, rank, ep_track_from(r, source, rank, channel));
        const EpRings rings = ep_rings_of(r, a.rings, route.ring.track);
        ep_inlet_begin(r, route.ring);
        if (!ep_inlet_await(r, rings, route.ring, began)) { right = false; continue; }
        const EpOpHeader opening = ep_read_opening(ep_inlet_slot(r, rings, route.ring, 0));
        right &= ep_check_header(r, opening, rank);
#ifdef EP_FAR_H
        if (ep_is_beyond(r, rank)) ep_tally_far(r, 3, rank, opening.rows);
#endif
        ep_inlet_pop(r, rings, route.ring, true);
    }
    return ep_warp_all(right);
}

/* Whether a row of a token has not come yet. Lanes serve ranks. */
EP_DEV bool ep_rows_are_late(const EpRank& r, const EpCombineRingArgs& a, const EpTokens& t, const EpDesk& desk, ep_u32 token) {
    bool late = false;
    ep_u64 tail;
#pragma unroll 1
    for (ep_u32 rank = ep_warp_lane(); rank < r.w.ranks; rank += 32) {
        EpRoute& route = desk.routes[rank];
        if (route.through_ring && ep_is_due(route, ep_held(t, desk, token)))
            late |= !ep_inlet_sees(r, ep_rings_of(r, a.rings, route.ring.track), route.ring, route.ahead, &tail);
    }
    return ep_warp_any(late);
}

/* Returns all credit: the warp is about to wait. */
EP_DEV void ep_routes_return(const EpRank& r, EpRoute* routes) {
    if (ep_planted(r, EP_PLANT_IMPOLITE_WAITING)) return;
#pragma unroll 1
    for (ep_u32 rank = ep_warp_lane(); rank < r.w.ranks; rank += 32)
        if (routes[rank].through_ring) ep_inlet_return(r, routes[rank].ring);
}

/* Waits for the rows of a token; polite: the warp has found no others. Lanes serve ranks. */
EP_DEV bool ep_await_due(const EpRank& r, const EpCombineRingArgs& a, const EpTokens& t, const EpDesk& desk, ep_u32 token, ep_u64 began) {
    ep_routes_return(r, desk.routes);
    bool right = true;
#pragma unroll 1
    for (ep_u32 rank = ep_warp_lane(); rank < r.w.ranks; rank += 32) {
        EpRoute& route = desk.routes[rank];
        if (!route.through_ring || !ep_is_due(route, ep_held(t, desk, token))) continue;
        const EpRings rings = ep_rings_of(r, a.rings, route.ring.track);
        right &= ep_inlet_look(r, rings, route.ring) || ep_inlet_await(r, rings, route.ring, began);
    }
    return ep_warp_all(right);
}

/* The row of a ring behind `ahead` others, which is there. Sums of other nodes have positions of their own. By one thread. */
EP_DEV void ep_find_in_ring(const EpRank& r, const EpCombineRingArgs& a, const EpRoute& route, ep_u32 ahead, EpFound& found) {
    ep_inlet_plant(r, route.ring);
    const EpAt slot = ep_here((ep_u64)ep_inlet_slot(r, ep_rings_of(r, a.rings, route.ring.track), route.ring, ahead));
    found.row = slot + r.w.header_bytes;
    found.head = slot;
    found.weights = slot + (sizeof(EpRowHeader) + 4);
    found.weights_step = sizeof(EpChoice);
}

/* A row that is pulled. By one thread. */
EP_DEV void ep_find_pulled(const EpSource& source, bool own, EpFound& found) {
    found.row = ep_source_row(source, (ep_i32)found.position);
    found.head = found.weights = ep_nowhere();
    found.weights_step = own ? 4 : sizeof(EpChoice);
    if (ep_is_somewhere(source.choices))
        found.weights = source.choices + ((ep_u64)found.position * source.choices_step + (own ? 0 : 4));
}

/* Finds the rows of a token, which are there. `is_due`: whether it has one from a rank; `ahead`: how many of the rank's ring come before. Lanes serve ranks. */
template <class Due, class Ahead>
EP_DEV EpTokenRows ep_find_rows(const EpRank& r, const EpCombineRingArgs& a, const EpSource* sources, const EpTokens& t, const EpDesk& desk,
                                EpFound* found, ep_u32 token, Due is_due, Ahead ahead) {
    const ep_i32* positions = ep_held(t, desk, token);
    const ep_u32 lane = ep_warp_lane(), first = r.me - r.me % r.w.ranks_per_node;
    /* Where the reducer brings together sums of nodes, that of the own one is made of the rows in the middle. */
    const bool apart = t.source == r.me && !ep_one_node(r) && !ep_planted(r, EP_PLANT_PARTIAL_NOT_ROUNDED);
    EpTokenRows rows{token, 0, 0, 0};
#pragma unroll 1
    for (ep_u32 base = 0; base < r.w.ranks; base += 32) {
        const ep_u32 rank = base + lane;
        const bool due = rank < r.w.ranks && is_due(rank);
        const ep_u32 votes = ep_warp_votes(due);
        if (due) {
            EpFound& f = found[rows.count + ep_bits(votes & ((1u << lane) - 1))];
            f.rank = rank;
            f.position = ep_is_beyond(r, rank) ? 0 : (ep_u32)positions[rank - t.first];
            if (desk.routes[rank].through_ring) ep_find_in_ring(r, a, desk.routes[rank], ahead(rank), f);
            else ep_find_pulled(ep_rows_of(sources, t, rank, rank == r.me), rank == r.me, f);
        }
        rows.count += ep_bits(votes);
        if (!apart) continue;
        rows.own += ep_bits(ep_warp_votes(due && !ep_is_beyond(r, rank)));
        rows.below += ep_bits(ep_warp_votes(due && rank < first));
    }
    /* One row is its own sum, but for the sign of a zero, which shows where a sum begins with a bias alone. */
    if (rows.own == 1 && a.combine.bias[0] == 0) rows.own = rows.below = 0;
    ep_warp_meet();
    return rows;
}

/* Holds the headers of a token's rows, which have come, against what is due. A lane looks at those that it fetched. */
EP_DEV bool ep_check_rows(const EpRank& r, const EpFound* found, const EpTokenRows& rows) {
    bool right = true;
#pragma unroll 1
    for (ep_u32 i = ep_warp_lane(); i < rows.count; i += 32) {
        const EpFound& f = found[i];
        if (!ep_is_somewhere(f.head)) continue;
        const EpUnit header = ep_ld16(&f.header);
        ep_u32 whose;
        if (!ep_check_row(r, header, f.rank, ep_is_beyond(r, f.rank) ? (ep_u32)header.z : f.position, &whose)) right = false;
        else if (whose != rows.token) {
            ep_fail_mismatch(r, f.rank, EP_FIELD_ROW_TOKEN, rows.token, whose);
            right = false;
        }
    }
    return ep_warp_all(right);
}

/* The rows of a token have been read: gives their slots back. */
EP_DEV void ep_routes_pop(const EpRank& r, const EpCombineRingArgs& a, const EpDesk& desk, const EpFound* found, ep_u32 rows) {
    ep_warp_meet();
    for (ep_u32 i = 0; i < rows; ++i)
        if (ep_is_somewhere(found[i].head)) {
            const EpInlet& ring = desk.routes[found[i].rank].ring;
            ep_poison(r, ep_inlet_slot(r, ep_rings_of(r, a.rings, ring.track), ring, 0), (ep_u32)(r.w.header_bytes + r.w.result_stride));
        }
#pragma unroll 1
    for (ep_u32 i = ep_warp_lane(); i < rows; i += 32)
        if (ep_is_somewhere(found[i].head)) {
            EpRoute& route = desk.routes[found[i].rank];
            --route.ahead;
            ep_inlet_pop(r, ep_rings_of(r, a.rings, route.ring.track), route.ring, true);
        }
    ep_warp_meet();
}

EP_DEV void ep_routes_close(const EpRank& r, EpRoute* routes) {
#pragma unroll 1
    for (ep_u32 rank = ep_warp_lane(); rank < r.w.ranks; rank += 32)
        if (routes[rank].through_ring) ep_inlet_close(r, routes[rank].ring);
}

/* Where a reducer's sums go: to the user, who may give a bias. */
struct EpToUser {
    ep_u32 none; /* an empty struct in another one is copied byte by byte, through local memory */
};

EP_DEV ep_u32 ep_next_token(EpTokens& t, const EpDesk& desk, const EpToUser&, ep_u32 token, ep_u32 end) {
    ep_hold(t, desk, token, end);
    return token;
}
EP_DEV bool ep_wants_weights(const EpCombineRingArgs& a, const EpToUser&) { return a.combine.weights != 0; }
EP_DEV void ep_put_weight(const EpRank& r, const EpCombineRingArgs& a, const EpToUser&, EpAt, ep_u32 token, ep_u32 k, float weight) {
    ((float*)a.combine.weights)[(ep_u64)token * r.w.topk + k] = weight;
}
template <int columns>
EP_DEV void ep_start_sum(const EpCombineRingArgs& a, const EpToUser&, ep_u32 token, ep_u32 at, ep_u32 bytes, EpSums<columns>& sums) {
    const EpCombineArgs& c = a.combine;
    if (c.bias[0] == 0) return;
#pragma unroll
    for (int i = 0; i < columns; ++i) {
        const ep_u32 to = at + i * 512;
        if (to >= bytes) continue;
        ep_sum_start(sums.of[i], ep_ld16((const ep_u8*)c.bias[0] + token * c.bias_stride + to));
        if (c.bias[1]) ep_sum_add(sums.of[i], ep_ld16((const ep_u8*)c.bias[1] + token * c.bias_stride + to));
    }
}
EP_DEV void ep_put_sum(const EpRank&, const EpCombineRingArgs& a, const EpToUser&, EpAt, ep_u32 token, ep_u32 at, const EpUnit& sum) {
    ep_st16((ep_u8*)a.combine.out + token * a.combine.out_stride + at, sum);
}

/* Before a reducer sums: its rings are open. */
EP_DEV bool ep_begin_reduce(const EpRank& r, const EpCombineRingArgs& a, const EpSource* sources, const EpTokens& t, const EpDesk& desk, ep_u32 channel,
                            ep_u64 began) {
    /* Where some rows come through rings, pulled ones are taken when all pieces are there. */
    for (ep_u32 rank = 0; rank < r.w.ranks; ++rank)
        if (sources[rank].rows > 0 && sources[rank].piece > 0)
            if (ep_await_row(r, sources[rank], rank, sources[rank].rows - 1, began) == 0) return false;
    return ep_open_rings(r, a, sources, t, desk.routes, channel, began);
}

#ifndef EP_FAR_H
/* Sums tokens begin .. end, ascending. While rows of one are added those of the next are found and on their way. What is found is held
   in no wait for others: when rows are late, the warp adds all it has before it waits. */
template <int columns>
EP_DEV bool ep_sum_tokens(const EpRank& r, const EpCombineRingArgs& a, const EpSource* sources, EpTokens& t, const EpDesk& desk, ep_u32 begin,
                          ep_u32 end, ep_u64 began) {
    const ep_u32 bytes = (ep_u32)r.w.result_stride;
    ep_u32 next = begin, found = 0, summed = 0; /* tokens */
    ep_u32 asked = 0, taken = 0;          /* parts */
    EpPart asks = ep_no_part(bytes), adds = asks;
    EpSums<columns> sums;
    EpUnit own[columns];
    const EpToUser to{};
    bool late = false;
    for (;;) {
        while (asked - taken < desk.depth) {
            if (asks.at >= bytes) {
                if (found - summed == EP_TOKENS_AHEAD || (late && found != summed)) break;
                next = ep_next_token(t, desk, to, next, end);
                if (next >= end) break;
                late = ep_rows_are_late(r, a, t, desk, next);
                if (late) {
                    if (found != summed) break;
                    if (!ep_await_due(r, a, t, desk, next, began)) return false;
                    /* All begins anew, so that nothing is kept in registers over the wait. */
                    found = summed = asked = taken = 0;
                    asks = adds = ep_no_part(bytes);
                    ep_sums_clear(sums);
                    continue;
                }
                asks.of = ep_find_rows(r, a, sources, t, desk, ep_found(desk, found), next,
                                       [&](ep_u32 rank) { return ep_is_due(desk.routes[rank], ep_held(t, desk, next)); },
                                       [&](ep_u32 rank) { return desk.routes[rank].ahead++; });
                if (ep_warp_lane() == 0) desk.tokens[found % EP_TOKENS_AHEAD] = asks.of;
                ep_fetch_heads(r, desk, found, asks.of.count, ep_wants_weights(a, to));
                asks.row = asks.at = 0;
                late = false;
                ++found;
                ++next;
            }
            ep_fetch_part<columns>(desk, found - 1, asks, bytes, asked++);
            ep_next_part<columns>(asks);
        }
        if (asked == taken) return true;
        ep_await_part(asked - taken);
        if (adds.at >= bytes) {
            ep_warp_meet();
            adds.of = desk.tokens[summed % EP_TOKENS_AHEAD];
            if (ep_one_node(r)) adds.of.own = adds.of.below = 0;
            adds.row = adds.at = 0;
            ep_sums_clear(sums);
            if (!ep_check_rows(r, ep_found(desk, summed), adds.of)) return false;
            if (ep_wants_weights(a, to))
#pragma unroll 1
                for (ep_u32 k = ep_warp_lane(); k < r.w.topk; k += 32)
                    ep_put_weight(r, a, to, ep_nowhere(), adds.of.token, k, ep_add_weights(r, desk, summed, adds.of, k));
        }
        const ep_u32 at = adds.at + ep_warp_lane() * 16;
        const EpPart added = adds;
        ep_add_part<columns>(desk, added, taken++, sums, own, [&](EpSums<columns>& into) { ep_start_sum(a, to, added.of.token, at, bytes, into); });
        ep_next_part<columns>(adds);
        if (adds.row != 0) continue;
#pragma unroll
        for (int i = 0; i < columns; ++i)
            if (at + i * 512 < bytes) ep_put_sum(r, a, to, ep_nowhere(), added.of.token, at + i * 512, ep_sum_round(sums.of[i]));
        if (adds.at < bytes) continue;
        ep_routes_pop(r, a, desk, ep_found(desk, summed), adds.of.count);
        ++summed;
    }
}

/* `columns`: of a row, that a lane sums at a time. */
template <int columns>
EP_DEV void ep_reduce(const EpRank& r, const EpCombineRingArgs& a, const EpSource* sources, const EpDesk& desk, ep_u32 channel, ep_u64 began) {
    EpTokens tokens = ep_own_tokens(r, a, sources);
    if (!ep_begin_reduce(r, a, sources, tokens, desk, channel, began)) return;
    const ep_u32 count = a.combine.tokens, channels = a.rings.channels;
    if (ep_sum_tokens<columns>(r, a, sources, tokens, desk, ep_channel_first(count, channels, channel), ep_channel_first(count, channels, channel + 1), began))
        ep_routes_close(r, desk.routes);
    ep_fetch_wait<0>();
}
#endif

/* Ends a combine whose rows have all been read: says so, and waits until all that pull from here are done. By the last block. */
EP_DEV void ep_end_combine(const EpRank& r, const EpCombineArgs& a, ep_u64 began) {
    ep_say_done(r);
    for (ep_u32 peer = ep_thread(); a.base != EP_NO_BASE && peer < r.w.ranks; peer += ep_threads())
        if (peer != r.me && ep_takes_part(r, peer) && ((const ep_u32*)a.matrix)[peer * r.w.ranks + r.me] > 0)
            if (!ep_planted(r, EP_PLANT_NOT_WAITING_FOR_PULLS))
                ep_wait(r, peer, EP_LANE_CONTROL, EP_COUNTER_DONE, ep_op(r), EP_PHASE_PULLED, began);
    ep_count_op(r);
}
#endif
