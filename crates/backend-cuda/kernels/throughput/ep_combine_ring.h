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

EP_DEV void ep_give_back(const EpRank& r, const EpCombineRingArgs& a, const EpRole& role, ep_u64 began) {
    const ep_u32 lane = ep_warp_lane(), channels = a.rings.channels, source = role.peer, channel = role.channel;
    const ep_u32 first = ((const ep_u32*)a.combine.first_of)[source], rows = ((const ep_u32*)a.combine.first_of)[source + 1] - first;
    const ep_i32* tokens = (const ep_i32*)a.source_token + first;
    const ep_u32 batch = ((const ep_u32*)a.tokens_of)[source];
    const ep_u32 begin = ep_partition(tokens, rows, ep_channel_first(batch, channels, channel));
    const ep_u32 end = ep_partition(tokens, rows, ep_channel_first(batch, channels, channel + 1));
    EpOutlet ring;
    EpAt at;
    if (!ep_outlet_open(r, ring, source, role.track, began) || !ep_outlet_slot(r, a.rings, ring, began, &at)) return;
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
    ep_outlet_close(r, ring);
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

/* Whether rank has rows of source, which it must give back: the same answer at both ends of a ring. */
EP_DEV bool ep_gives_back(const EpRank& r, const EpCombineRingArgs& a, ep_u32 source, ep_u32 rank) {
    return rank != source && ep_takes_part(r, rank) && ((const ep_u32*)a.combine.matrix)[source * r.w.ranks + rank] > 0;
}

/* Opens the rings of a channel. Lanes serve ranks. Not inlined: it would take registers from what is done for each token. */
EP_DEV_APART bool ep_open_rings(const EpRank& r, const EpCombineRingArgs& a, const EpSource* sources, EpRoute* routes,
                                ep_u32 channel, ep_u64 began) {
    bool right = true;
    for (ep_u32 rank = ep_warp_lane(); rank < r.w.ranks; rank += 32) {
        EpRoute& route = routes[rank];
        route.through_ring = ep_gives_back(r, a, r.me, rank) && !ep_is_somewhere(sources[rank].payload);
        if (!route.through_ring) continue;
        ep_inlet_open(r, route.ring, rank, ep_own_track(r.w, r.me, channel));
        ep_inlet_begin(r, route.ring);
        if (!ep_inlet_await(r, a.rings, route.ring, began)) { right = false; continue; }
        right &= ep_check_header(r, ep_read_opening(ep_inlet_slot(r, a.rings, route.ring)), rank);
        ep_inlet_pop(r, a.rings, route.ring, true);
    }
    return ep_warp_all(right);
}

/* Finds the rows of a token; waits for those that come through rings. Lanes serve ranks. */
EP_DEV bool ep_find_rows(const EpRank& r, const EpCombineRingArgs& a, const EpSource* sources, EpRoute* routes, ep_u32 token,
                         ep_u64 began) {
    const ep_u32 lane = ep_warp_lane(), ranks = r.w.ranks;
    const ep_i32* positions = (const ep_i32*)a.combine.position + (ep_u64)token * ranks;
    bool waits = false;
    for (ep_u32 rank = lane; rank < ranks; rank += 32)
        if (positions[rank] >= 0 && routes[rank].through_ring) waits |= !ep_inlet_look(r, a.rings, routes[rank].ring);
    if (ep_warp_any(waits))
        for (ep_u32 rank = lane; rank < ranks; rank += 32)
            if (routes[rank].through_ring && !ep_planted(r, EP_PLANT_IMPOLITE_WAITING)) ep_inlet_return(r, routes[rank].ring);
    bool right = true;
    for (ep_u32 rank = lane; rank < ranks; rank += 32) {
        EpRoute& route = routes[rank];
        const ep_i32 position = positions[rank];
        route.row = route.weights = ep_nowhere();
        if (position < 0) continue;
        if (!route.through_ring) {
            route.row = ep_source_row(sources[rank], position);
            const bool own = rank == r.me;
            if (ep_is_somewhere(sources[rank].choices))
                route.weights = sources[rank].choices + ((ep_u64)position * sources[rank].choices_step + (own ? 0 : 4));
            route.weights_step = own ? 4 : sizeof(EpChoice);
            continue;
        }
        if (!ep_inlet_look(r, a.rings, route.ring) && !ep_inlet_await(r, a.rings, route.ring, began)) {
            right = false;
            continue;
        }
        const ep_u8* at = ep_inlet_slot(r, a.rings, route.ring);
        ep_u32 whose;
        if (!ep_check_row(r, at, rank, (ep_u32)position, &whose)) right = false;
        else if (whose != token) { ep_fail_mismatch(r, rank, EP_FIELD_ROW_TOKEN, token, whose); right = false; }
        route.row = ep_here((ep_u64)at + r.w.header_bytes);
        route.weights = ep_here((ep_u64)at + sizeof(EpRowHeader) + 4);
        route.weights_step = sizeof(EpChoice);
    }
    const bool all = ep_warp_all(right);
    ep_warp_meet();
    return all;
}

EP_DEV void ep_reduce(const EpRank& r, const EpCombineRingArgs& a, const EpSource* sources, EpRoute* routes, ep_u32 channel,
                      ep_u64 began) {
    const ep_u32 lane = ep_warp_lane(), ranks = r.w.ranks;
    const EpCombineArgs& c = a.combine;
    /* Where some rows come through rings, pulled ones are taken when all pieces are there. */
    for (ep_u32 rank = 0; rank < ranks; ++rank)
        if (sources[rank].rows > 0 && sources[rank].piece > 0)
            if (ep_await_row(r, sources[rank], rank, sources[rank].rows - 1, began) == 0) return;
    if (!ep_open_rings(r, a, sources, routes, channel, began)) return;
    const ep_u32 end = ep_channel_first(c.tokens, a.rings.channels, channel + 1);
    for (ep_u32 token = ep_channel_first(c.tokens, a.rings.channels, channel); token < end; ++token) {
        if (!ep_find_rows(r, a, sources, routes, token, began)) return;
        for (ep_u32 at = lane * 16; at < r.w.result_stride; at += 512) {
            EpSum sum;
            ep_sum_clear(sum);
            if (c.bias[0]) ep_sum_start(sum, ep_ld16((const ep_u8*)c.bias[0] + token * c.bias_stride + at));
            if (c.bias[1]) ep_sum_add(sum, ep_ld16((const ep_u8*)c.bias[1] + token * c.bias_stride + at));
            for (ep_u32 rank = 0; rank < ranks; ++rank)
                if (ep_is_somewhere(routes[rank].row)) ep_sum_add(sum, ep_get16(routes[rank].row + at));
            ep_st16((ep_u8*)c.out + token * c.out_stride + at, ep_sum_round(sum));
        }
        if (c.weights)
            for (ep_u32 k = lane; k < r.w.topk; k += 32) {
                float sum = 0.0f;
#pragma unroll 1
                for (ep_u32 rank = 0; rank < ranks; ++rank)
                    if (ep_is_somewhere(routes[rank].row) && ep_is_somewhere(routes[rank].weights))
                        sum += ep_float_of(ep_get4(routes[rank].weights + k * routes[rank].weights_step));
                ((float*)c.weights)[(ep_u64)token * r.w.topk + k] = sum;
            }
        ep_warp_meet();
        for (ep_u32 rank = 0; rank < ranks; ++rank)
            if (routes[rank].through_ring && ep_is_somewhere(routes[rank].row))
                ep_poison(r, ep_inlet_slot(r, a.rings, routes[rank].ring), (ep_u32)(r.w.header_bytes + r.w.result_stride));
        for (ep_u32 rank = lane; rank < ranks; rank += 32)
            if (routes[rank].through_ring && ep_is_somewhere(routes[rank].row)) ep_inlet_pop(r, a.rings, routes[rank].ring, true);
    }
    for (ep_u32 rank = lane; rank < ranks; rank += 32)
        if (routes[rank].through_ring) ep_inlet_close(r, routes[rank].ring);
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
