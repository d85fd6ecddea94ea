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

/* Writes what goes with a token's row into its staging slot. By a warp. */
EP_DEV void ep_stage_head(const EpRank& r, const EpDispatchRingArgs& a, EpAt at, ep_u32 node, ep_u32 token) {
    const ep_u32 lane = ep_warp_lane();
    const ep_u32 masked = ep_planted(r, EP_PLANT_MASK_OF_ANOTHER_NODE) ? r.me - r.me % r.w.ranks_per_node : node;
    const ep_i32* of_node = (const ep_i32*)a.position + (ep_u64)token * r.w.ranks + masked;
    if (lane == 0) ep_put16(at, ep_row_header(r, token, 0));
    for (ep_u32 k = lane; k < r.w.topk; k += 32)
        ep_put_message(at + (sizeof(EpRowHeader) + k * sizeof(EpChoice)), ep_far_choice(r, a, token, k));
    ep_copy_scales(r, a, at + (r.w.header_bytes + r.w.scales_offset), token);
    for (ep_u32 word = lane; word < ep_mask_words(r); word += 32) {
        ep_u32 mask = 0;
        for (ep_u32 bit = 0; bit < 32 && word * 32 + bit < r.w.ranks_per_node; ++bit)
            if (of_node[word * 32 + bit] >= 0) mask |= 1u << bit;
        ep_put4(at + (r.w.wire_bytes + word * 4), mask);
    }
}

/* Writes a warp's rows of a batch: that of the i-th voted token, counted from `base`, into the i-th slot behind the ring's tail. */
EP_DEV void ep_stage_rows(const EpRank& r, const EpDispatchRingArgs& a, const EpRings& rings, const EpRole& role, const EpTeam& team, const EpSending& sending,
                          ep_u32 base, ep_u32 votes) {
    const ep_u32 node = role.peer - role.peer % r.w.ranks_per_node;
    const auto token = [&](ep_u32 i) { return base + ep_nth_bit(votes, i); };
    EpAt slot = ep_nowhere();
    ep_carry_rows(
        team, sending.rows, (ep_u32)r.w.scales_offset, [&](ep_u32 i) { return ep_codes_of(a, token(i)); },
        [&](ep_u32 i) {
            slot = ep_outlet_staging(r, rings, sending.ring, role.peer, role.track, i);
            ep_stage_head(r, a, slot, node, token(i));
        },
        [&](ep_u32, ep_u32 at, const ep_u8* piece, ep_u32 bytes) { ep_put_piece(slot + (r.w.header_bytes + at), piece, bytes); });
}

EP_DEV void ep_send_far(const EpRank& r, const EpDispatchRingArgs& a, const EpRole& role, const EpTeam& team, void* baton, ep_u64 began) {
    const ep_u32 lane = ep_warp_lane(), peer = role.peer, channel = role.channel;
    const EpRings rings = ep_rings_of(r, a.rings, role.track);
    const ep_u32 node = peer - peer % r.w.ranks_per_node;
    const ep_u32 begin = ep_channel_first(a.tokens, rings.channels, channel);
    const ep_u32 end = ep_channel_first(a.tokens, rings.channels, channel + 1);
    const bool leads = ep_leads(team);
    EpSending* says = (EpSending*)baton;
    EpOutlet ring;
    bool right = true;
    if (leads) right = ep_outlet_open(r, ring, peer, role.track, began) && ep_open_far(r, a, rings, ring, node, begin, end, began);
    for (ep_u32 base = begin; base < end; base += 32) {
        const ep_i32* positions = (const ep_i32*)a.position + (ep_u64)(base + lane) * r.w.ranks;
        const bool goes = base + lane < end && ep_goes_to_node(r, positions, node);
        for (ep_u32 votes = ep_warp_votes(goes); votes;) {
            if (leads) {
                EpAt first;
                if (right) right = ep_outlet_slot(r, rings, ring, began, &first);
                const ep_u32 rows = right ? ep_outlet_room(r, rings, ring, ep_bits(votes)) : 0;
                if (lane == 0) *says = EpSending{ring.ring, rows};
            }
            ep_team_meet(team.number, team.warps);
            const EpSending sending = *says;
            if (sending.rows == 0) return;
            ep_stage_rows(r, a, rings, role, team, sending, base, votes);
#pragma unroll 1
            for (ep_u32 i = 0; i < sending.rows; ++i) votes &= votes - 1;
            ep_team_meet(team.number, team.warps);
#pragma unroll 1
            for (ep_u32 i = 0; leads && i < sending.rows; ++i) ep_outlet_push(r, rings, ring);
        }
    }
    if (leads && right) ep_outlet_close(r, rings, ring);
}
#endif
