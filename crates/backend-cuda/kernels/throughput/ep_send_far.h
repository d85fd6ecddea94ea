/*
 * ep_send_far.h: a batch's rows for another node, into the ring to its rank on this rail: each row once, with a mask of that node's ranks.
 *
 *   roles    a team each (ep_team.h): far sender to such a rank on a channel. Its warps write whole rows, up to 32 from one meeting to the next
 *   memory   staging slots of the own window, which the leader puts a run at a time (ep_far_ring.h)
 */
#ifndef EP_SEND_FAR_H
#define EP_SEND_FAR_H
#include "ep_carry.h"

/* What the leader says: so many rows may be written behind the ring's tail; none where the operation has failed. */
struct EpSending {
    EpProducer ring;
    ep_u32 rows;
};
static_assert(sizeof(EpSending) <= EP_BATON_BYTES, "the host makes room for another EpSending");

/* Words of a row's mask: a bit for each rank of the node. */
EP_DEV ep_u32 ep_mask_words(const EpRank& r) { return (r.w.ranks_per_node + 31) / 32; }

/* Whether a token goes to any rank of the node that begins with rank `first`. */
EP_DEV bool ep_goes_to_node(const EpRank& r, const ep_i32* positions, ep_u32 first) {
    for (ep_u32 rank = first; rank < first + r.w.ranks_per_node; ++rank)
        if (positions[rank] >= 0) return true;
    return false;
}

/* Opens the ring: how many rows come, and which of each rank's. `first_run`: that of its rows. */
EP_DEV bool ep_open_far(const EpRank& r, const EpDispatchRingArgs& a, const EpRings& rings, EpOutlet& ring, ep_u32 node, ep_u32 begin,
                        ep_u32 end, ep_u64 began, ep_u32* first_run) {
    const ep_u32 lane = ep_warp_lane();
    const ep_i32* positions = (const ep_i32*)a.position;
    ep_u32 tokens = 0;
#pragma unroll 4
    for (ep_u32 base = begin; base < end; base += 32) {
        const bool goes = base + lane < end && ep_goes_to_node(r, positions + (ep_u64)(base + lane) * r.w.ranks, node);
        tokens += ep_bits(ep_warp_votes(goes));
    }
    *first_run = a.short_runs ? ep_first_run(tokens, rings.chunk) : 0;
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

/* A batch's rows, as a warp stages them: the i-th is that of the i-th token that voted, and goes into the i-th slot behind the ring's tail. */
struct EpStagedRows {
    ep_u32 base, votes; /* a bit for each token from `base` on */
    EpAt window;        /* the own one */
    ep_u64 staging;     /* in it: the ring's first slot */
    ep_u32 first, depth;
};

EP_DEV ep_u32 ep_staged_token(const EpStagedRows& rows, ep_u32 i) { return rows.base + ep_nth_bit(rows.votes, i); }
EP_DEV EpAt ep_staged_slot(const EpRings& rings, const EpStagedRows& rows, ep_u32 i) {
    return rows.window + (rows.staging + (rows.first + i) % rows.depth * (ep_u64)rings.far_slot_bytes);
}

/* A word of the mask of a token's row: a bit for each of the node's ranks that it goes to. */
EP_DEV ep_u32 ep_mask_of(const EpRank& r, const EpDispatchRingArgs& a, ep_u32 node, ep_u32 token, ep_u32 word) {
    const ep_u32 masked = ep_planted(r, EP_PLANT_MASK_OF_ANOTHER_NODE) ? r.me - r.me % r.w.ranks_per_node : node;
    const ep_i32* of_node = (const ep_i32*)a.position + (ep_u64)token * r.w.ranks + masked;
    ep_u32 mask = 0;
    for (ep_u32 bit = 0; bit < 32 && word * 32 + bit < r.w.ranks_per_node; ++bit)
        if (of_node[word * 32 + bit] >= 0) mask |= 1u << bit;
    return mask;
}

/* Writes what goes with a warp's rows. By a warp. */
EP_DEV void ep_stage_heads(const EpRank& r, const EpDispatchRingArgs& a, const EpRings& rings, const EpTeam& team, const EpStagedRows& rows, ep_u32 count, ep_u32 node) {
    ep_each_item(team, count, 1, [&](ep_u32 i, ep_u32) { ep_put16(ep_staged_slot(rings, rows, i), ep_row_header(r, ep_staged_token(rows, i), 0)); });
    ep_each_item(team, count, ep_mask_words(r), [&](ep_u32 i, ep_u32 word) {
        ep_put4(ep_staged_slot(rings, rows, i) + (r.w.wire_bytes + word * 4), ep_mask_of(r, a, node, ep_staged_token(rows, i), word));
    });
    ep_each_item(team, count, r.w.topk, [&](ep_u32 i, ep_u32 k) {
        ep_put_message(ep_staged_slot(rings, rows, i) + (sizeof(EpRowHeader) + k * sizeof(EpChoice)), ep_far_choice(r, a, ep_staged_token(rows, i), k));
    });
    ep_each_word(
        team, count, (ep_u32)r.w.scales_stride / 4, [&](ep_u32 i, ep_u32 w) { return ep_scale_of(a, ep_staged_token(rows, i), w); },
        [&](ep_u32 i, ep_u32 w, ep_u32 word) { ep_put4(ep_staged_slot(rings, rows, i) + (r.w.header_bytes + r.w.scales_offset + w * 4), word); });
}

/* Writes a warp's rows of a batch, `count` in all. */
EP_DEV void ep_stage_rows(const EpRank& r, const EpDispatchRingArgs& a, const EpRings& rings, const EpTeam& team, const EpStagedRows& rows, ep_u32 count,
                          ep_u32 node) {
    ep_carry_rows(
        team, count, (ep_u32)r.w.scales_offset, [&](ep_u32 i) { return ep_codes_of(a, ep_staged_token(rows, i)); },
        [&] { ep_stage_heads(r, a, rings, team, rows, count, node); },
        [&](ep_u32 i, ep_u32 at, const ep_u8* piece, ep_u32 bytes) {
            ep_put_piece(ep_staged_slot(rings, rows, i) + (r.w.header_bytes + at), piece, bytes);
        });
}

EP_DEV void ep_send_far(const EpRank& r, const EpDispatchRingArgs& a, const EpRole& role, const EpTeam& team, void* baton, ep_u64 began) {
    const ep_u32 lane = ep_warp_lane(), peer = role.peer, channel = role.channel;
    const EpRings rings = ep_rings_of(r, a.rings, role.track);
    const ep_u32 node = peer - peer % r.w.ranks_per_node;
    const ep_u32 begin = ep_channel_first(a.tokens, rings.channels, channel);
    const ep_u32 end = ep_channel_first(a.tokens, rings.channels, channel + 1);
    const bool leads = ep_leads(team);
    EpSending* says = (EpSending*)baton;
    EpStagedRows rows;
    rows.window = ep_at(r, r.me, 0);
    rows.staging = ep_staging_slot(r.w, rings, peer, role.track, 0);
    rows.depth = ep_staging_slots(r.w, rings, role.track);
    EpOutlet ring;
    bool right = true;
    ep_u32 first_run = 0, sent = 0;
    if (leads) right = ep_outlet_open(r, ring, peer, role.track, began) && ep_open_far(r, a, rings, ring, node, begin, end, began, &first_run);
    for (ep_u32 base = begin; base < end; base += 32) {
        const ep_i32* positions = (const ep_i32*)a.position + (ep_u64)(base + lane) * r.w.ranks;
        const bool goes = base + lane < end && ep_goes_to_node(r, positions, node);
        for (ep_u32 votes = ep_warp_votes(goes); votes;) {
            if (leads) {
                EpAt first;
                if (right) right = ep_outlet_slot(r, rings, ring, began, &first);
                const ep_u32 room = right ? ep_outlet_room(r, rings, ring, ep_within_run(first_run, sent, ep_bits(votes))) : 0;
                if (lane == 0) *says = EpSending{ring.ring, room};
            }
            ep_team_meet(team.number, team.warps);
            const EpSending sending = *says;
            if (sending.rows == 0) return;
            ring.ring = sending.ring; /* One copy in registers, not two. */
            rows.base = base;
            rows.votes = votes;
            rows.first = (ep_u32)(sending.ring.tail - sending.ring.origin);
            ep_stage_rows(r, a, rings, team, rows, sending.rows, node);
#pragma unroll 1
            for (ep_u32 i = 0; i < sending.rows; ++i) votes &= votes - 1;
            ep_team_meet(team.number, team.warps);
#pragma unroll 1
            for (ep_u32 i = 0; leads && i < sending.rows; ++i) ep_outlet_push(r, rings, ring);
            sent += sending.rows;
            if (leads && sent == first_run) ep_outlet_publish(r, rings, ring);
        }
    }
    if (leads && right) ep_outlet_close(r, rings, ring);
}
#endif
