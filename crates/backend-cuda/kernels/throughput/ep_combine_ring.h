/*
 * ep_combine_ring.h: rows of ranks that offered no block come back through rings; a token's rows may come either way.
 *
 *   roles    one warp each: returner of a source's rows on a channel (where this rank offered nothing, and has rows of that
 *            source); reducer of the tokens of a channel. All of them run at the same time
 *   memory   rings in the windows of the tokens' ranks; shared: for each reducer of the block the rings it empties and where rows lie
 *   rules    the reducer takes tokens in ascending order, as all returners do, and holds no row while it waits: no circle of waits
 */
#ifndef EP_COMBINE_RING_H
#define EP_COMBINE_RING_H
#include "ep_offers.h"
#include "ep_ring.h"
#include "ep_sum.h"

/* Columns of a row that a lane sums at a time, where warps have registers for them. */
enum { EP_COLUMNS = 8 };

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

EP_DEV void ep_give_back(const EpRank& r, const EpCombineRingArgs& a, const EpRole& role, ep_u64 began) {
    const ep_u32 lane = ep_warp_lane(), channels = a.rings.channels, source = role.peer, channel = role.channel;
    const ep_u32 first = ((const ep_u32*)a.combine.first_of)[source], rows = ((const ep_u32*)a.combine.first_of)[source + 1] - first;
    const ep_i32* tokens = (const ep_i32*)a.source_token + first;
    const ep_u32 batch = ((const ep_u32*)a.tokens_of)[source];
    const ep_u32 begin = ep_partition(tokens, rows, ep_channel_first(batch, channels, channel));
    const ep_u32 end = ep_partition(tokens, rows, ep_channel_first(batch, channels, channel + 1));
    const ep_u32 gate = ep_planted(r, EP_PLANT_WRONG_GATE) ? ep_wrong_gate(r, source) : ep_gate(r, source);
    EpOutlet ring;
    EpAt at;
    if (!ep_outlet_open(r, ring, gate, role.track, began) || !ep_outlet_slot(r, a.rings, ring, began, &at)) return;
    if (lane == 0) ep_put_message(at, ep_header(r, end - begin, begin));
    ep_outlet_push(r, a.rings, ring);
    for (ep_u32 position = begin; position < end; ++position) {
        if (!ep_outlet_slot(r, a.rings, ring, began, &at)) return;
        const ep_u32 row = first + position;
        if (lane == 0) ep_put16(at, ep_row_header(r, (ep_u32)tokens[position], position));
        for (ep_u32 k = lane; k < r.w.topk; k += 32) {
            EpChoice choice = {-1, 0.0f};
            if (a.combine.own_weights) choice.weight = ((const float*)a.combine.own_weights)[(ep_u64)row * r.w.topk + k];
            ep_put_message(at + (sizeof(EpRowHeader) + k * sizeof(EpChoice)), choice);
        }
        ep_copy_row(at + r.w.header_bytes, (const ep_u8*)a.combine.y + (ep_u64)row * a.combine.y_stride,
                    (ep_u32)r.w.result_stride);
        ep_outlet_push(r, a.rings, ring);
    }
    ep_outlet_close(r, a.rings, ring);
}

/* What a reducer knows of one rank. */
struct EpRoute {
    EpInlet ring;
    EpAt row;     /* where the current token's row lies; nowhere where it has none from this rank */
    EpAt weights; /* where its weights lie, weights_step bytes apart; or nowhere */
    ep_u32 weights_step;
    ep_u32 through_ring;
};
static_assert(sizeof(EpRoute) == EP_ROUTE_BYTES, "the host makes room for another EpRoute");

/* Whether rank, of this node, has rows of source, which it must give back: the same answer at both ends of a ring. */
EP_DEV bool ep_gives_back(const EpRank& r, const EpCombineRingArgs& a, ep_u32 source, ep_u32 rank) {
    return rank != ep_gate(r, source) && ep_takes_part(r, rank) && ((const ep_u32*)a.combine.matrix)[source * r.w.ranks + rank] > 0;
}

/* Tokens whose rows a warp brings together: those of the own rank (a reducer) or those of a rank of another node (a gatherer). */
struct EpTokens {
    ep_u32 source;           /* whose they are */
    ep_u32 step, first;      /* of a token, from one to the next; the rank that the first one is of */
    const ep_i32* positions; /* of its rows at each rank, -1 where it has none */
    EpSource own;            /* where the rows of the own rank are */
};

EP_DEV EpTokens ep_own_tokens(const EpRank& r, const EpCombineRingArgs& a, const EpSource* sources) {
    return EpTokens{r.me, r.w.ranks, 0, (const ep_i32*)a.combine.position, sources[r.me]};
}

#ifdef EP_FAR_H
#include "ep_combine_due.h"
#else
/* Whether a ring brings rows of source's tokens from rank; and whether one of a token is due from there. */
EP_DEV bool ep_is_brought(const EpRank& r, const EpCombineRingArgs& a, ep_u32 source, ep_u32 rank) {
    return ep_gives_back(r, a, source, rank);
}
EP_DEV bool ep_is_due(const EpRank&, const EpTokens& t, ep_u32 token, ep_u32 rank) {
    return t.positions[(ep_u64)token * t.step + rank] >= 0;
}
/* Where the rows of rank lie that are pulled. */
EP_DEV EpSource ep_rows_of(const EpSource* sources, const EpTokens&, ep_u32 rank, bool) { return sources[rank]; }
#endif

/* The track by which rank's rows of source's tokens come. */
EP_DEV ep_u32 ep_track_from(const EpRank& r, ep_u32 source, ep_u32 rank, ep_u32 channel) {
    return ep_is_beyond(r, rank) ? ep_far_track(r.w, channel) : ep_own_track(r.w, source, channel);
}

/* Opens the rings that bring rows of source's tokens on a channel. Lanes serve ranks. */
EP_DEV bool ep_open_rings(const EpRank& r, const EpCombineRingArgs& a, const EpSource* sources, EpRoute* routes, ep_u32 source,
                                ep_u32 channel, ep_u64 began) {
    bool right = true;
    for (ep_u32 rank = ep_warp_lane(); rank < r.w.ranks; rank += 32) {
        EpRoute& route = routes[rank];
        route.through_ring = ep_is_brought(r, a, source, rank) && !ep_is_somewhere(sources[rank].payload);
        if (!route.through_ring) continue;
        ep_inlet_open(r, route.ring, rank, ep_track_from(r, source, rank, channel));
        const EpRings rings = ep_rings_of(r, a.rings, route.ring.track);
        ep_inlet_begin(r, route.ring);
        if (!ep_inlet_await(r, rings, route.ring, began)) { right = false; continue; }
        const EpOpHeader opening = ep_read_opening(ep_inlet_slot(r, rings, route.ring));
        right &= ep_check_header(r, opening, rank);
#ifdef EP_FAR_H
        if (ep_is_beyond(r, rank)) ep_tally_far(r, 3, rank, opening.rows);
#endif
        ep_inlet_pop(r, rings, route.ring, true);
    }
    return ep_warp_all(right);
}

/* Whether a row of a token has not come yet. Lanes serve ranks. */
EP_DEV bool ep_rows_are_late(const EpRank& r, const EpCombineRingArgs& a, const EpTokens& t, EpRoute* routes, ep_u32 token) {
    bool late = false;
    for (ep_u32 rank = ep_warp_lane(); rank < r.w.ranks; rank += 32)
        if (routes[rank].through_ring && ep_is_due(r, t, token, rank))
            late |= !ep_inlet_look(r, ep_rings_of(r, a.rings, routes[rank].ring.track), routes[rank].ring);
    return ep_warp_any(late);
}

/* Returns all credit: the warp is about to wait. */
EP_DEV void ep_routes_return(const EpRank& r, EpRoute* routes) {
    if (ep_planted(r, EP_PLANT_IMPOLITE_WAITING)) return;
    for (ep_u32 rank = ep_warp_lane(); rank < r.w.ranks; rank += 32)
        if (routes[rank].through_ring) ep_inlet_return(r, routes[rank].ring);
}

/* The next row of a ring, which is due for a token. Sums of other nodes have positions of their own. By one thread. */
EP_DEV bool ep_find_row(const EpRank& r, const EpCombineRingArgs& a, EpRoute& route, ep_u32 rank, ep_u32 position, ep_u32 token,
                        ep_u64 began) {
    const EpRings rings = ep_rings_of(r, a.rings, route.ring.track);
    if (!ep_inlet_look(r, rings, route.ring) && !ep_inlet_await(r, rings, route.ring, began)) return false;
    ep_inlet_plant(r, route.ring);
    const ep_u8* at = ep_inlet_slot(r, rings, route.ring);
    ep_u32 whose;
    const ep_u32 named = ep_is_beyond(r, rank) ? (ep_u32)ep_ld16_put(at).z : position;
    if (!ep_check_row(r, at, rank, named, &whose)) return false;
    if (whose != token) {
        ep_fail_mismatch(r, rank, EP_FIELD_ROW_TOKEN, token, whose);
        return false;
    }
    route.row = ep_here((ep_u64)at + r.w.header_bytes);
    route.weights = ep_here((ep_u64)at + sizeof(EpRowHeader) + 4);
    route.weights_step = sizeof(EpChoice);
    return true;
}

/* Finds the rows of a token; waits for those that come through rings. Lanes serve ranks. */
EP_DEV bool ep_find_rows(const EpRank& r, const EpCombineRingArgs& a, const EpSource* sources, const EpTokens& t, EpRoute* routes,
                         ep_u32 token, ep_u64 began) {
    if (ep_rows_are_late(r, a, t, routes, token)) ep_routes_return(r, routes);
    bool right = true;
    for (ep_u32 rank = ep_warp_lane(); rank < r.w.ranks; rank += 32) {
        EpRoute& route = routes[rank];
        route.row = route.weights = ep_nowhere();
        if (!ep_is_due(r, t, token, rank)) continue;
        const ep_i32 position = ep_is_beyond(r, rank) ? 0 : t.positions[(ep_u64)token * t.step + rank - t.first];
        if (!route.through_ring) {
            const bool own = rank == r.me;
            const EpSource source = ep_rows_of(sources, t, rank, own);
            route.row = ep_source_row(source, position);
            if (ep_is_somewhere(source.choices))
                route.weights = source.choices + ((ep_u64)position * source.choices_step + (own ? 0 : 4));
            route.weights_step = own ? 4 : sizeof(EpChoice);
            continue;
        }
        right &= ep_find_row(r, a, route, rank, (ep_u32)position, token, began);
    }
    const bool all = ep_warp_all(right);
    ep_warp_meet();
    return all;
}

/* The rows of a token have been read: gives their slots back. */
EP_DEV void ep_routes_pop(const EpRank& r, const EpCombineRingArgs& a, EpRoute* routes) {
    ep_warp_meet();
    for (ep_u32 rank = 0; rank < r.w.ranks; ++rank)
        if (routes[rank].through_ring && ep_is_somewhere(routes[rank].row)) {
            const EpRings rings = ep_rings_of(r, a.rings, routes[rank].ring.track);
            ep_poison(r, ep_inlet_slot(r, rings, routes[rank].ring), (ep_u32)(r.w.header_bytes + r.w.result_stride));
        }
    for (ep_u32 rank = ep_warp_lane(); rank < r.w.ranks; rank += 32)
        if (routes[rank].through_ring && ep_is_somewhere(routes[rank].row))
            ep_inlet_pop(r, ep_rings_of(r, a.rings, routes[rank].ring.track), routes[rank].ring, true);
}

EP_DEV void ep_routes_close(const EpRank& r, EpRoute* routes) {
    for (ep_u32 rank = ep_warp_lane(); rank < r.w.ranks; rank += 32)
        if (routes[rank].through_ring) ep_inlet_close(r, routes[rank].ring);
}

/* A lane's columns of a row from byte `at` on; those beyond the row are garbage that nobody stores. */
template <int columns> EP_DEV void ep_get_columns(EpAt row, ep_u32 at, ep_u64 bytes, EpUnit (&held)[columns]) {
#pragma unroll
    for (int i = 0; i < columns; ++i) held[i] = at + i * 512 < bytes ? ep_get16(row + (at + i * 512)) : ep_sum_nothing();
}
template <int columns> EP_DEV void ep_sums_clear(EpSums<columns>& sums) {
#pragma unroll
    for (int i = 0; i < columns; ++i) ep_sum_clear(sums.of[i]);
}
template <int columns> EP_DEV void ep_sums_add(EpSums<columns>& sums, const EpUnit (&held)[columns]) {
#pragma unroll
    for (int i = 0; i < columns; ++i) ep_sum_add(sums.of[i], held[i]);
}

/* Adds rows of the ranks first .. end, ascending; whether there were any. */
template <int columns>
EP_DEV bool ep_add_rows(const EpRank& r, const EpRoute* routes, ep_u32 first, ep_u32 end, ep_u32 at, EpSums<columns>& sums) {
    bool any = false;
    for (ep_u32 rank = first; rank < end; ++rank)
        if (ep_is_somewhere(routes[rank].row)) {
            EpUnit held[columns];
            ep_get_columns(routes[rank].row, at, r.w.result_stride, held);
            ep_sums_add(sums, held);
            any = true;
        }
    return any;
}

/* The sum of their weights of choice k. */
EP_DEV float ep_add_weights(const EpRoute* routes, ep_u32 first, ep_u32 end, ep_u32 k) {
    float sum = 0.0f;
#pragma unroll 1
    for (ep_u32 rank = first; rank < end; ++rank)
        if (ep_is_somewhere(routes[rank].row) && ep_is_somewhere(routes[rank].weights))
            sum += ep_float_of(ep_get4(routes[rank].weights + k * routes[rank].weights_step));
    return sum;
}

/* Adds all that a token has: its rows, or where there are several nodes the own node's sum, rounded as the others were, and theirs. */
template <int columns>
EP_DEV void ep_add_nodes(const EpRank& r, const EpRoute* routes, ep_u32 at, EpSums<columns>& sums) {
    const ep_u32 width = r.w.ranks_per_node, own = r.me / width;
    if (ep_one_node(r)) {
        ep_add_rows(r, routes, 0, r.w.ranks, at, sums);
        return;
    }
    for (ep_u32 node = 0; node < r.w.nodes; ++node) {
        const ep_u32 first = node * width, end = first + width;
        if (node != own || ep_planted(r, EP_PLANT_PARTIAL_NOT_ROUNDED)) {
            ep_add_rows(r, routes, first, end, at, sums);
            continue;
        }
        EpSums<columns> partial;
        ep_sums_clear(partial);
        if (!ep_add_rows(r, routes, first, end, at, partial)) continue;
#pragma unroll
        for (int i = 0; i < columns; ++i) ep_sum_add(sums.of[i], ep_sum_round(partial.of[i]));
    }
}
EP_DEV float ep_add_node_weights(const EpRank& r, const EpRoute* routes, ep_u32 k) {
    if (ep_one_node(r)) return ep_add_weights(routes, 0, r.w.ranks, k);
    float sum = 0.0f;
    for (ep_u32 node = 0; node < r.w.nodes; ++node)
        sum += ep_add_weights(routes, node * r.w.ranks_per_node, (node + 1) * r.w.ranks_per_node, k);
    return sum;
}

/* `columns`: of a row, that a lane sums at a time. */
template <int columns>
EP_DEV void ep_reduce(const EpRank& r, const EpCombineRingArgs& a, const EpSource* sources, EpRoute* routes, ep_u32 channel,
                      ep_u64 began) {
    const ep_u32 lane = ep_warp_lane(), ranks = r.w.ranks;
    const EpCombineArgs& c = a.combine;
    /* Where some rows come through rings, pulled ones are taken when all pieces are there. */
    for (ep_u32 rank = 0; rank < ranks; ++rank)
        if (sources[rank].rows > 0 && sources[rank].piece > 0)
            if (ep_await_row(r, sources[rank], rank, sources[rank].rows - 1, began) == 0) return;
    const EpTokens tokens = ep_own_tokens(r, a, sources);
    if (!ep_open_rings(r, a, sources, routes, r.me, channel, began)) return;
    const ep_u32 end = ep_channel_first(c.tokens, a.rings.channels, channel + 1);
    for (ep_u32 token = ep_channel_first(c.tokens, a.rings.channels, channel); token < end; ++token) {
        if (!ep_find_rows(r, a, sources, tokens, routes, token, began)) return;
        for (ep_u32 at = lane * 16; at < r.w.result_stride; at += 512 * columns) {
            EpSums<columns> sums;
            ep_sums_clear(sums);
#pragma unroll
            for (int i = 0; i < columns; ++i) {
                const ep_u32 to = at + i * 512;
                if (to >= r.w.result_stride) continue;
                if (c.bias[0]) ep_sum_start(sums.of[i], ep_ld16((const ep_u8*)c.bias[0] + token * c.bias_stride + to));
                if (c.bias[1]) ep_sum_add(sums.of[i], ep_ld16((const ep_u8*)c.bias[1] + token * c.bias_stride + to));
            }
            ep_add_nodes(r, routes, at, sums);
#pragma unroll
            for (int i = 0; i < columns; ++i) {
                const ep_u32 to = at + i * 512;
                if (to < r.w.result_stride) ep_st16((ep_u8*)c.out + token * c.out_stride + to, ep_sum_round(sums.of[i]));
            }
        }
        if (c.weights)
            for (ep_u32 k = lane; k < r.w.topk; k += 32)
                ((float*)c.weights)[(ep_u64)token * r.w.topk + k] = ep_add_node_weights(r, routes, k);
        ep_routes_pop(r, a, routes);
    }
    ep_routes_close(r, routes);
}

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
