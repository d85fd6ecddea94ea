/*
 * ep_dispatch_ring.h: rows for ranks that granted no block go through rings; a batch of any size through rings of any size.
 *
 *   roles    one warp each: sender to a rank of the node on a channel; receiver of a source on a channel (where this rank granted nothing), whose
 *            rows come from itself or, where it is of another node, through its gate here; keeper of the own rows of a channel. All of
 *            them run at the same time
 *   memory   rings in the receivers' windows; x and the received rows in memory of the own GPU
 */
#ifndef EP_DISPATCH_RING_H
#define EP_DISPATCH_RING_H
#include "ep_ring.h"

/* Choice k of a token as destination sees it. */
EP_DEV EpChoice ep_choice(const EpRank& r, const EpDispatchRingArgs& a, ep_u32 destination, ep_u32 token, ep_u32 k) {
    EpChoice choice = {-1, 0.0f};
    if (a.topk_idx == 0) return choice;
    const ep_u64 at = (ep_u64)token * r.w.topk + k;
    const ep_i64 expert = ((const ep_i64*)a.topk_idx)[at] - (ep_i64)destination * r.w.local_experts;
    if (expert >= 0 && expert < (ep_i64)r.w.local_experts) {
        choice.expert = (ep_i32)expert;
        choice.weight = a.topk_weights ? ((const float*)a.topk_weights)[at] : 1.0f;
    }
    return choice;
}

/* Codes and scales of a token's row. By a warp. */
template <class To>
EP_DEV void ep_copy_payload(const EpRank& r, const EpDispatchRingArgs& a, To codes, To scales, ep_u32 token) {
    ep_copy_row(codes, (const ep_u8*)a.x + (ep_u64)token * a.x_stride, (ep_u32)r.w.scales_offset);
    ep_copy_words(scales, (const ep_u8*)a.scales + (ep_u64)token * a.scales_token, a.scales_word, (ep_u32)r.w.scales_stride);
}

/* Where codes and scales of a received row go. */
EP_DEV ep_u8* ep_out_codes(const EpRank& r, const EpDispatchRingArgs& a, ep_u32 row) {
    return (ep_u8*)a.out + (ep_u64)row * r.w.scales_offset;
}
EP_DEV ep_u8* ep_out_scales(const EpRank& r, const EpDispatchRingArgs& a, ep_u32 row) {
    return (ep_u8*)a.out_scales + (ep_u64)row * r.w.scales_stride;
}

/* The first of this rank's rows for peer among the tokens begin .. end, and how many there are. By a warp. */
EP_DEV void ep_count_share(const EpRank& r, const ep_i32* positions, ep_u32 peer, ep_u32 begin, ep_u32 end, ep_u32* first,
                           ep_u32* rows) {
    *first = *rows = 0;
#pragma unroll 4
    for (ep_u32 base = begin; base < end; base += 32) {
        const ep_u32 token = base + ep_warp_lane();
        const ep_i32 position = token < end ? positions[(ep_u64)token * r.w.ranks + peer] : -1;
        const ep_u32 votes = ep_warp_votes(position >= 0);
        if (votes && *rows == 0) *first = (ep_u32)ep_warp_shuffle(position, ep_lowest_bit(votes));
        *rows += ep_bits(votes);
    }
}

EP_DEV void ep_send(const EpRank& r, const EpDispatchRingArgs& a, const EpRole& role, ep_u64 began) {
    const ep_u32 lane = ep_warp_lane(), peer = role.peer, channel = role.channel;
    const ep_i32* positions = (const ep_i32*)a.position;
    const ep_u32 begin = ep_channel_first(a.tokens, a.rings.channels, channel);
    const ep_u32 end = ep_channel_first(a.tokens, a.rings.channels, channel + 1);
    ep_u32 first, rows;
    ep_count_share(r, positions, peer, begin, end, &first, &rows);
    EpOutlet ring;
    EpAt at;
    if (!ep_outlet_open(r, ring, peer, role.track, began) || !ep_outlet_slot(r, a.rings, ring, began, &at)) return;
    if (lane == 0) ep_put_message(at, ep_header(r, rows, first));
    ep_outlet_push(r, a.rings, ring);
    for (ep_u32 base = begin; base < end; base += 32) {
        const ep_i32 mine = base + lane < end ? positions[(ep_u64)(base + lane) * r.w.ranks + peer] : -1;
        for (ep_u32 votes = ep_warp_votes(mine >= 0); votes; votes &= votes - 1) {
            const ep_u32 bit = ep_lowest_bit(votes), token = base + bit;
            const ep_i32 position = ep_warp_shuffle(mine, bit);
            if (!ep_outlet_slot(r, a.rings, ring, began, &at)) return;
            const ep_u32 named = (ep_u32)position + (ep_planted(r, EP_PLANT_POSITION_OFF_BY_ONE) ? 1 : 0);
            if (lane == 0) ep_put16(at, ep_row_header(r, token, named));
            for (ep_u32 k = lane; k < r.w.topk; k += 32)
                ep_put_message(at + (sizeof(EpRowHeader) + k * sizeof(EpChoice)), ep_choice(r, a, peer, token, k));
            ep_copy_payload(r, a, at + r.w.header_bytes, at + (r.w.header_bytes + r.w.scales_offset), token);
            ep_outlet_push(r, a.rings, ring);
        }
    }
    ep_outlet_close(r, a.rings, ring);
}

/* What the user learns of a row, with its k-th choice. */
EP_DEV void ep_keep(const EpRank& r, const EpDispatchRingArgs& a, ep_u32 row, ep_u32 source, ep_u32 token, ep_u32 k,
                    EpChoice choice) {
    if (k == 0 && a.out_token) {
        ((ep_i32*)a.out_token)[row] = (ep_i32)token;
        ((ep_i32*)a.out_rank)[row] = (ep_i32)source;
    }
    if (a.out_idx && k < r.w.topk) {
        ((ep_i64*)a.out_idx)[(ep_u64)row * r.w.topk + k] = choice.expert;
        ((float*)a.out_weights)[(ep_u64)row * r.w.topk + k] = choice.weight;
    }
}

EP_DEV void ep_receive(const EpRank& r, const EpDispatchRingArgs& a, const EpRole& role, ep_u64 began) {
    const ep_u32 lane = ep_warp_lane(), source = role.peer, writer = ep_gate(r, source);
    const ep_u32* first_of = (const ep_u32*)a.first_of;
    const ep_u32 due = first_of[source + 1] - first_of[source];
    EpInlet ring;
    ep_inlet_open(r, ring, writer, role.track);
    if (lane == 0) ep_inlet_begin(r, ring);
    ep_u32 position = 0, last = 0;
    for (bool opened = false; !opened || position < last; ) {
        if (!ep_inlet_next(r, a.rings, ring, began)) return;
        if (lane == 0) ep_inlet_plant(r, ring);
        ep_warp_meet();
        const ep_u8* at = ep_inlet_slot(r, a.rings, ring);
        if (!opened) {
            bool right = true;
            if (lane == 0) {
                const EpOpHeader h = ep_read_opening(at);
                right = ep_check_header(r, h, writer);
                position = h.first;
                last = h.first + h.rows;
                if (right && (last > due || last < position)) {
                    ep_fail_mismatch(r, writer, EP_FIELD_ROWS_SENT, due, last);
                    right = false;
                }
            }
            position = ep_warp_shuffle(position, 0);
            last = ep_warp_shuffle(last, 0);
            if (!ep_warp_shuffle(right, 0)) return;
            opened = true;
        } else {
            ep_u32 token = 0;
            bool right = true;
            if (lane == 0) right = ep_check_row(r, at, source, position, &token);
            if (!ep_warp_shuffle(right, 0)) return;
            token = ep_warp_shuffle(token, 0);
            const ep_u32 row = first_of[source] + position;
            for (ep_u32 k = lane; k < r.w.topk; k += 32)
                ep_keep(r, a, row, source, token, k, ((const volatile EpChoice*)(at + sizeof(EpRowHeader)))[k].expert < 0
                        ? EpChoice{-1, 0.0f}
                        : EpChoice{((const volatile EpChoice*)(at + sizeof(EpRowHeader)))[k].expert,
                                   ((const volatile EpChoice*)(at + sizeof(EpRowHeader)))[k].weight});
            const ep_u8* payload = at + r.w.header_bytes;
            ep_copy_row(ep_out_codes(r, a, row), payload, (ep_u32)r.w.scales_offset);
            ep_copy_words(ep_out_scales(r, a, row), payload + r.w.scales_offset, 4, (ep_u32)r.w.scales_stride);
            ++position;
        }
        ep_warp_meet();
        ep_poison(r, at, (ep_u32)(r.w.header_bytes + r.w.payload_stride));
        ep_inlet_pop(r, a.rings, ring, lane == 0);
    }
    if (lane == 0) ep_inlet_close(r, ring);
}

/* The own rows of a channel. */
EP_DEV void ep_keep_own(const EpRank& r, const EpDispatchRingArgs& a, ep_u32 channel) {
    const ep_u32 lane = ep_warp_lane(), first = ((const ep_u32*)a.first_of)[r.me];
    const ep_u32 end = ep_channel_first(a.tokens, a.rings.channels, channel + 1);
    for (ep_u32 token = ep_channel_first(a.tokens, a.rings.channels, channel); token < end; ++token) {
        const ep_i32 position = ((const ep_i32*)a.position)[(ep_u64)token * r.w.ranks + r.me];
        if (position < 0) continue;
        const ep_u32 row = first + (ep_u32)position;
        for (ep_u32 k = lane; k < r.w.topk; k += 32) ep_keep(r, a, row, r.me, token, k, ep_choice(r, a, r.me, token, k));
        ep_copy_payload(r, a, ep_out_codes(r, a, row), ep_out_scales(r, a, row), token);
    }
}

/* Whether peer wants rows through the ring. Its note has come, if it sent any. */
EP_DEV bool ep_through_ring(const EpRank& r, const EpDispatchRingArgs& a, ep_u32 peer) {
    return !a.notes || ((const volatile EpNote*)(ep_own(r) + ep_note(r.w, ep_op(r), peer)))->base == EP_NO_BASE;
}

/* The roles of the rings of a node: that of warp `warp` of all that the launch has. */
EP_DEV void ep_play_ring_role(const EpRank& r, const EpDispatchRingArgs& a, ep_u32 warp, ep_u64 began) {
    if (warp >= a.role_count) return;
    const EpRole role = ((const EpRole*)a.roles)[warp];
    if (!ep_takes_part(r, role.peer)) return;
    if (role.duty == EP_DUTY_SENDER) {
        if (!ep_is_beyond(r, role.peer) && ep_through_ring(r, a, role.peer)) ep_send(r, a, role, began);
    } else if (role.duty == EP_DUTY_RECEIVER) {
        if (a.out) ep_receive(r, a, role, began);
    } else if (role.duty == EP_DUTY_COLLECTOR && a.out) {
        ep_keep_own(r, a, role.channel);
    }
}
#endif
