/*
 * ep_dispatch_far.h: a row crosses the network once to each node that needs it, along the rail, and is fanned out there.
 *
 *   roles    one warp each: far sender to another node's rank of this rail on a channel; forwarder of what such a rank sends on a channel
 *   memory   rings between nodes and within; shared: for each forwarder of the block its rings into the ranks of its node
 *   rules    no circle of waits: the far sender waits for the forwarder, the forwarder for receivers, and these for nobody. A forwarder
 *            that waits has published all that is pending. It reads a row in its slot, and returns the slot when all have it. Where a rank of its
 *            node granted a block it places the row there (ep_place_far.h), and waits for that rank no more
 */
#ifndef EP_DISPATCH_FAR_H
#define EP_DISPATCH_FAR_H
#include "ep_place_far.h"

/* Where a forwarder's rows leave for one rank of its node. */
struct EpExit {
    EpOutlet ring;
    EpSpot first; /* where its first row of the source is placed; nowhere where the ring brings them */
    ep_u32 next;  /* the position of its next row */
    ep_u32 left;  /* rows that are still to come for it */
};
static_assert(sizeof(EpExit) <= EP_EXIT_BYTES, "the host makes room for another EpExit");

/* Words of a row's mask: a bit for each rank of the node. */
EP_DEV ep_u32 ep_mask_words(const EpRank& r) { return (r.w.ranks_per_node + 31) / 32; }

/* Whether a token goes to any rank of the node that begins with rank `first`. */
EP_DEV bool ep_goes_to_node(const EpRank& r, const ep_i32* positions, ep_u32 first) {
    for (ep_u32 rank = first; rank < first + r.w.ranks_per_node; ++rank)
        if (positions[rank] >= 0) return true;
    return false;
}

/* ---- far sender ---- */

/* Opens the ring: how many rows come, and which of each rank's. */
EP_DEV bool ep_open_far(const EpRank& r, const EpDispatchRingArgs& a, const EpRings& rings, EpOutlet& ring, ep_u32 node, ep_u32 begin,
                        ep_u32 end, ep_u64 began) {
    const ep_u32 lane = ep_warp_lane();
    const ep_i32* positions = (const ep_i32*)a.position;
    ep_u32 tokens = 0;
    for (ep_u32 base = begin; base < end; base += 32) {
        const bool goes = base + lane < end && ep_goes_to_node(r, positions + (ep_u64)(base + lane) * r.w.ranks, node);
        tokens += ep_bits(ep_warp_votes(goes));
    }
    EpAt at;
    if (!ep_outlet_slot(r, rings, ring, began, &at)) return false;
    if (lane == 0) {
        ep_put_message(at, ep_header(r, tokens, 0));
        ep_tally_far(r, 0, node + r.me % r.w.ranks_per_node, tokens);
    }
    for (ep_u32 local = 0; local < r.w.ranks_per_node; ++local) {
        EpShare share;
        ep_count_share(r, positions, node + local, begin, end, &share.first, &share.rows);
        if (lane == 0) ep_put_message(at + (sizeof(EpOpHeader) + local * sizeof(EpShare)), share);
    }
    ep_outlet_push(r, rings, ring);
    return true;
}

/* Choice k of a token, whose expert counts over all ranks. */
EP_DEV EpChoice ep_far_choice(const EpRank& r, const EpDispatchRingArgs& a, ep_u32 token, ep_u32 k) {
    EpChoice choice = {-1, 0.0f};
    if (a.topk_idx == 0) return choice;
    const ep_u64 at = (ep_u64)token * r.w.topk + k;
    const ep_i64 expert = ((const ep_i64*)a.topk_idx)[at];
    if (expert < 0 || expert >= (ep_i64)r.w.experts) return choice;
    choice.expert = (ep_i32)expert;
    choice.weight = a.topk_weights ? ((const float*)a.topk_weights)[at] : 1.0f;
    return choice;
}

EP_DEV void ep_send_far(const EpRank& r, const EpDispatchRingArgs& a, const EpRole& role, ep_u64 began) {
    const ep_u32 lane = ep_warp_lane(), peer = role.peer, channel = role.channel;
    const EpRings rings = ep_rings_of(r, a.rings, role.track);
    const ep_u32 node = peer - peer % r.w.ranks_per_node;
    const ep_u32 begin = ep_channel_first(a.tokens, rings.channels, channel);
    const ep_u32 end = ep_channel_first(a.tokens, rings.channels, channel + 1);
    EpOutlet ring;
    if (!ep_outlet_open(r, ring, peer, role.track, began) || !ep_open_far(r, a, rings, ring, node, begin, end, began)) return;
    for (ep_u32 base = begin; base < end; base += 32) {
        const ep_i32* positions = (const ep_i32*)a.position + (ep_u64)(base + lane) * r.w.ranks;
        const bool goes = base + lane < end && ep_goes_to_node(r, positions, node);
        for (ep_u32 votes = ep_warp_votes(goes); votes; votes &= votes - 1) {
            const ep_u32 token = base + ep_lowest_bit(votes);
            const ep_i32* of_token = (const ep_i32*)a.position + (ep_u64)token * r.w.ranks;
            EpAt at;
            if (!ep_outlet_slot(r, rings, ring, began, &at)) return;
            if (lane == 0) ep_put16(at, ep_row_header(r, token, 0));
            for (ep_u32 k = lane; k < r.w.topk; k += 32)
                ep_put_message(at + (sizeof(EpRowHeader) + k * sizeof(EpChoice)), ep_far_choice(r, a, token, k));
            ep_copy_payload(r, a, at + r.w.header_bytes, at + (r.w.header_bytes + r.w.scales_offset), token);
            const ep_u32 masked = ep_planted(r, EP_PLANT_MASK_OF_ANOTHER_NODE) ? r.me - r.me % r.w.ranks_per_node : node;
            for (ep_u32 word = lane; word < ep_mask_words(r); word += 32) {
                ep_u32 mask = 0;
                for (ep_u32 bit = 0; bit < 32 && word * 32 + bit < r.w.ranks_per_node; ++bit)
                    if (of_token[masked + word * 32 + bit] >= 0) mask |= 1u << bit;
                ep_put4(at + (r.w.wire_bytes + word * 4), mask);
            }
            ep_outlet_push(r, rings, ring);
        }
    }
    ep_outlet_close(r, rings, ring);
}

/* ---- forwarder ---- */

/* The ring of an exit, as all lanes use it; and back. */
EP_DEV void ep_exit_keep(EpExit& exit, const EpOutlet& ring) {
    ep_warp_meet();
    if (ep_warp_lane() == 0) exit.ring = ring;
    ep_warp_meet();
}

/* Whether rows leave by the ring: neither for this rank, nor for one that granted a block. */
EP_DEV bool ep_exit_is_ring(const EpRank& r, const EpExit* exits, ep_u32 local) {
    return local != r.me % r.w.ranks_per_node && !ep_is_somewhere(exits[local].first.codes);
}

/* Publishes the tails of all exits: the forwarder is about to wait. */
EP_DEV void ep_exits_publish(const EpRank& r, const EpRings& rings, EpExit* exits) {
    if (ep_planted(r, EP_PLANT_IMPOLITE_WAITING)) return;
    for (ep_u32 local = 0; local < r.w.ranks_per_node; ++local) {
        if (!ep_exit_is_ring(r, exits, local)) continue;
        EpOutlet ring = exits[local].ring;
        ep_outlet_publish(r, rings, ring);
        ep_exit_keep(exits[local], ring);
    }
}

/* A forwarder at work. All lanes hold the same values. */
struct EpForwarder {
    EpInlet inlet;
    EpExit* exits; /* [ranks of the node] */
    ep_u32 source, first; /* whose rows they are; the first rank of this node */
    ep_u64 began;
};

/* Opens the way to a rank of the node. */
EP_DEV bool ep_exit_open(const EpRank& r, const EpDispatchRingArgs& a, EpForwarder& f, ep_u32 local, ep_u32 track) {
    const ep_u32 rank = f.first + local;
    EpSpot first;
    if (!ep_find_spot(r, a, f.source, rank, f.began, &first)) return false;
    if (ep_warp_lane() == 0) f.exits[local].first = first;
    ep_warp_meet();
    if (rank != r.me && !ep_exit_is_ring(r, f.exits, local)) ep_plant_placed(r, EP_PLANT_FORWARDED_EARLY, rank, track);
    if (!ep_exit_is_ring(r, f.exits, local)) return true;
    EpOutlet ring;
    EpAt to;
    if (!ep_outlet_open(r, ring, rank, track, f.began) || !ep_outlet_slot(r, a.rings, ring, f.began, &to)) return false;
    if (ep_warp_lane() == 0) ep_put_message(to, ep_header(r, f.exits[local].left, f.exits[local].next));
    ep_outlet_push(r, a.rings, ring);
    ep_exit_keep(f.exits[local], ring);
    return true;
}

/* Takes the slot that opens the ring, and opens the way to every rank of the node. Rows that come, EP_FULL where they do not. */
EP_DEV ep_u32 ep_forward_open(const EpRank& r, const EpDispatchRingArgs& a, const EpRings& far, EpForwarder& f, ep_u32 track) {
    const ep_u32 lane = ep_warp_lane(), source = f.source;
    if (!ep_inlet_next(r, far, f.inlet, f.began)) return EP_FULL;
    const ep_u8* at = ep_inlet_slot(r, far, f.inlet);
    const EpOpHeader h = ep_read_opening(at);
    bool right = lane != 0 || ep_check_header(r, h, source);
    for (ep_u32 local = lane; local < r.w.ranks_per_node; local += 32) {
        const volatile EpShare* share = (const volatile EpShare*)(at + sizeof(EpOpHeader)) + local;
        f.exits[local].next = share->first;
        f.exits[local].left = share->rows;
        const ep_u64 due = ((const ep_u32*)a.matrix)[source * r.w.ranks + f.first + local], last = (ep_u64)share->first + share->rows;
        if (last > due) {
            ep_fail_mismatch(r, source, EP_FIELD_ROWS_SENT, due, last);
            right = false;
        }
    }
    if (!ep_warp_all(right)) return EP_FULL;
    ep_warp_meet();
    ep_poison(r, at, (ep_u32)r.w.far_slot_bytes);
    ep_inlet_pop(r, far, f.inlet, lane == 0);
    for (ep_u32 local = 0; local < r.w.ranks_per_node; ++local)
        if (!ep_exit_open(r, a, f, local, track)) return EP_FULL;
    return h.rows;
}

/* Choice k of a row that came along the rail, as rank sees it. */
EP_DEV EpChoice ep_localized(const EpRank& r, const ep_u8* at, ep_u32 rank, ep_u32 k) {
    const volatile EpChoice* far = (const volatile EpChoice*)(at + sizeof(EpRowHeader)) + k;
    const ep_i64 expert = (ep_i64)far->expert - (ep_i64)rank * r.w.local_experts;
    if (far->expert < 0 || expert < 0 || expert >= (ep_i64)r.w.local_experts) return EpChoice{-1, 0.0f};
    return EpChoice{(ep_i32)expert, far->weight};
}

/* Takes a row of its own. */
EP_DEV void ep_forward_own(const EpRank& r, const EpDispatchRingArgs& a, const EpForwarder& f, const ep_u8* at, ep_u32 token, ep_u32 position) {
    const ep_u32 row = ((const ep_u32*)a.first_of)[f.source] + position;
    for (ep_u32 k = ep_warp_lane(); k < r.w.topk; k += 32) ep_keep(r, a, row, f.source, token, k, ep_localized(r, at, r.me, k));
    const ep_u8* payload = at + r.w.header_bytes;
    ep_copy_row(ep_out_codes(r, a, row), payload, (ep_u32)r.w.scales_offset);
    ep_copy_words(ep_out_scales(r, a, row), payload + r.w.scales_offset, 4, (ep_u32)r.w.scales_stride);
}

/* Lays a row where rank finds it. */
EP_DEV void ep_lay_forwarded(const EpRank& r, const EpForwarder& f, const ep_u8* at, const EpSpot& to, ep_u32 rank, ep_u32 token, ep_u32 position) {
    const ep_u32 lane = ep_warp_lane();
    if (lane == 0) ep_put16(to.header, ep_unit((int)f.source, (int)token, (int)position, (int)(ep_u32)ep_op(r)));
    for (ep_u32 k = lane; k < r.w.topk; k += 32)
        ep_put_message(to.header + (sizeof(EpRowHeader) + k * sizeof(EpChoice)), ep_localized(r, at, rank, k));
    const ep_u8* payload = at + r.w.header_bytes;
    ep_copy_row(to.codes, payload, (ep_u32)r.w.scales_offset);
    ep_copy_words(to.scales, payload + r.w.scales_offset, 4, (ep_u32)r.w.scales_stride);
}

/* Places a row at a rank of the node, or at this one. */
EP_DEV void ep_forward_place(const EpRank& r, const EpDispatchRingArgs& a, const EpForwarder& f, const ep_u8* at, ep_u32 local, ep_u32 token,
                             ep_u32 position) {
    ep_u32 place = position;
    if (ep_planted(r, EP_PLANT_FORWARDED_OFF_BY_ONE)) place = (position + 1) % ((const ep_u32*)a.matrix)[f.source * r.w.ranks + f.first + local];
    ep_lay_forwarded(r, f, at, ep_spot_after(r, f.exits[local].first, place), f.first + local, token, position);
}

/* Hands a row to a rank of the node through its ring. */
EP_DEV bool ep_forward_to(const EpRank& r, const EpDispatchRingArgs& a, EpForwarder& f, const ep_u8* at, ep_u32 local, ep_u32 token,
                          ep_u32 position) {
    EpOutlet ring = f.exits[local].ring;
    if (ep_producer_is_full(ring.ring, a.rings)) {
        ep_exits_publish(r, a.rings, f.exits);
        if (ep_warp_lane() == 0) ep_inlet_return(r, f.inlet);
        ring = f.exits[local].ring;
    }
    EpAt to;
    if (!ep_outlet_slot(r, a.rings, ring, f.began, &to)) return false;
    ep_lay_forwarded(r, f, at, ep_spot_of_slot(r, to), f.first + local, token, position);
    ep_outlet_push(r, a.rings, ring);
    ep_exit_keep(f.exits[local], ring);
    return true;
}

/* Notes that the tokens begin .. end went to no rank of this node. */
EP_DEV void ep_forward_none(const EpRank& r, ep_i32* fanout, ep_u32 begin, ep_u32 end) {
    const ep_u64 last = (ep_u64)end * r.w.ranks_per_node;
    for (ep_u64 at = (ep_u64)begin * r.w.ranks_per_node + ep_warp_lane(); at < last; at += 32) fanout[at] = -1;
}

/* One row of the rail. Its token; EP_FULL where it is none. */
EP_DEV ep_u32 ep_forward_row(const EpRank& r, const EpDispatchRingArgs& a, EpForwarder& f, const ep_u8* at, ep_i32* fanout, ep_u32 from,
                             ep_u32 end) {
    const ep_u32 lane = ep_warp_lane();
    ep_u32 token = 0;
    bool right = true;
    if (lane == 0) {
        right = ep_check_row(r, at, f.source, 0, &token);
        if (right && (token < from || token >= end)) {
            ep_fail_mismatch(r, f.source, EP_FIELD_ROW_TOKEN, from, token);
            right = false;
        }
    }
    token = ep_warp_shuffle(token, 0);
    if (!ep_warp_shuffle(right, 0)) return EP_FULL;
    ep_forward_none(r, fanout, from, token);
    const volatile ep_u32* mask = (const volatile ep_u32*)(at + r.w.wire_bytes);
    for (ep_u32 local = 0; local < r.w.ranks_per_node; ++local) {
        const bool goes = mask[local / 32] >> local % 32 & 1;
        const ep_u32 position = f.exits[local].next, left = f.exits[local].left;
        ep_warp_meet();
        if (lane == 0) fanout[(ep_u64)token * r.w.ranks_per_node + local] = goes ? (ep_i32)position : -1;
        if (!goes) continue;
        if (left == 0) {
            if (lane == 0) ep_fail_mismatch(r, f.source, EP_FIELD_ROWS_SENT, 0, 1);
            return EP_FULL;
        }
        if (lane == 0) {
            f.exits[local].next = position + 1;
            f.exits[local].left = left - 1;
        }
        if (ep_is_somewhere(f.exits[local].first.codes)) ep_forward_place(r, a, f, at, local, token, position);
        else if (f.first + local == r.me) ep_forward_own(r, a, f, at, token, position);
        else if (!ep_forward_to(r, a, f, at, local, token, position)) return EP_FULL;
    }
    return token;
}

EP_DEV void ep_forward(const EpRank& r, const EpDispatchRingArgs& a, const EpRole& role, EpExit* exits, ep_u64 began) {
    const ep_u32 lane = ep_warp_lane(), source = role.peer, track = ep_far_track(r.w, role.channel);
    const EpRings far = ep_rings_of(r, a.rings, track);
    EpForwarder f;
    f.exits = exits;
    f.source = source;
    f.first = r.me - r.me % r.w.ranks_per_node;
    f.began = began;
    ep_inlet_open(r, f.inlet, source, track);
    if (lane == 0) ep_inlet_begin(r, f.inlet);
    const ep_u32 rows = ep_forward_open(r, a, far, f, role.track);
    if (rows == EP_FULL) return;
    if (lane == 0) ep_tally_far(r, 1, source, rows);
    ep_i32* fanout = ep_fanout_of(r, a.fanout, a.tokens_of, source);
    const ep_u32 tokens = ((const ep_u32*)a.tokens_of)[source];
    const ep_u32 end = ep_channel_first(tokens, a.rings.channels, role.channel + 1);
    ep_u32 next = ep_channel_first(tokens, a.rings.channels, role.channel);
    for (ep_u32 row = 0; row < rows; ++row) {
        const bool waits = lane == 0 && !ep_inlet_look(r, far, f.inlet);
        if (ep_warp_any(waits)) ep_exits_publish(r, a.rings, exits);
        if (!ep_inlet_next(r, far, f.inlet, began)) return;
        if (lane == 0) ep_inlet_plant(r, f.inlet);
        ep_warp_meet();
        const ep_u8* at = ep_inlet_slot(r, far, f.inlet);
        const ep_u32 token = ep_forward_row(r, a, f, at, fanout, next, end);
        if (token == EP_FULL) return;
        next = token + 1;
        ep_warp_meet();
        ep_poison(r, at, (ep_u32)r.w.far_slot_bytes);
        ep_inlet_pop(r, far, f.inlet, lane == 0);
    }
    ep_forward_none(r, fanout, next, end);
    if (lane == 0) ep_inlet_close(r, f.inlet);
    for (ep_u32 local = 0; local < r.w.ranks_per_node; ++local) {
        if (f.first + local == r.me) continue;
        if (!ep_exit_is_ring(r, exits, local)) {
            ep_say_placed(r, f.first + local, role.track);
            continue;
        }
        EpOutlet ring = exits[local].ring;
        ep_outlet_close(r, a.rings, ring);
    }
}

/* The roles of rings between nodes: that of warp `warp` of all that the launch has, if it has one. `exits` are the warp's. */
EP_DEV void ep_play_far_role(const EpRank& r, const EpDispatchRingArgs& a, ep_u32 warp, EpExit* exits, ep_u64 began) {
    if (warp >= a.role_count) return;
    const EpRole role = ((const EpRole*)a.roles)[warp];
    if (!ep_takes_part(r, role.peer)) return;
    if (role.duty == EP_DUTY_SENDER && ep_is_beyond(r, role.peer)) ep_send_far(r, a, role, began);
    if (role.duty == EP_DUTY_FORWARDER) ep_forward(r, a, role, exits, began);
}
#endif
