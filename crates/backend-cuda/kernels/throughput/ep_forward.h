/*
 * ep_forward.h: what comes along the rail, to the ranks of this node that its masks name.
 *
 *   roles    a team each (ep_team.h): forwarder of what a rank of another node sends on a channel. Up to 32 rows go on from one meeting to the next; each of
 *            the team's warps lays whole rows, and finds by itself where they go: lane i looks at the batch's i-th row
 *   memory   shared: for each rank of the node an exit
 *   rules    a forwarder that waits has published all that is pending, and returned all credit
 */
#ifndef EP_FORWARD_H
#define EP_FORWARD_H
#include "ep_place_far.h"
#include "ep_team.h"

/* Where a forwarder's rows leave for one rank of its node. */
struct EpExit {
    EpProducer ring;
    ep_u32 track; /* of the ring */
    EpSpot first; /* where its first row of the source is placed; nowhere where the ring brings them */
    ep_u32 next;  /* the position of its next row */
    ep_u32 left;  /* rows that are still to come for it */
};
static_assert(sizeof(EpExit) <= EP_EXIT_BYTES, "the host makes room for another EpExit");

/* What the leader says: so many rows from the inlet's head on go on; none where there is no more, or something is wrong. */
struct EpForwarding {
    EpInlet inlet;
    ep_u32 rows;
};
static_assert(sizeof(EpForwarding) <= EP_BATON_BYTES, "the host makes room for another EpForwarding");

/* The ring of the exit to the rank `local`, as all lanes use it; and back. */
EP_DEV EpOutletWithin ep_exit_ring(const EpRank& r, const EpExit* exits, ep_u32 local) {
    return ep_outlet_within(exits[local].ring, r.me - r.me % r.w.ranks_per_node + local, exits[local].track);
}
EP_DEV void ep_exit_keep(EpExit& exit, const EpOutlet& ring) {
    ep_warp_meet();
    if (ep_warp_lane() == 0) exit.ring = ring.ring;
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
        EpOutletWithin ring = ep_exit_ring(r, exits, local);
        ep_outlet_publish(r, rings, ring);
        ep_exit_keep(exits[local], ring);
    }
}

/* A forwarder at work. All lanes hold the same values. */
struct EpForwarder {
    EpInlet inlet; /* the leader's alone is right, but for a batch */
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
    if (ep_warp_lane() == 0) f.exits[local].track = track;
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
    ep_poison(r, at, far.far_slot_bytes);
    ep_inlet_pop(r, far, f.inlet, lane == 0);
    for (ep_u32 local = 0; local < r.w.ranks_per_node; ++local)
        if (!ep_exit_open(r, a, f, local, track)) return EP_FULL;
    return h.rows;
}

/* Choice k of a row that came along the rail, as rank sees it. */
EP_DEV EpChoice ep_localized(const EpRank& r, const ep_u8* at, ep_u32 rank, ep_u32 k) {
    const volatile EpChoice* far = (const volatile EpChoice*)(at + sizeof(EpRowHeader)) + k;
    const EpChoice choice = {far->expert, far->weight};
    const ep_i64 expert = (ep_i64)choice.expert - (ep_i64)rank * r.w.local_experts;
    if (choice.expert < 0 || expert < 0 || expert >= (ep_i64)r.w.local_experts) return EpChoice{-1, 0.0f};
    return EpChoice{(ep_i32)expert, choice.weight};
}

/* Where a row is placed at a rank of the node, or at this one. */
EP_DEV EpSpot ep_forward_spot(const EpRank& r, const EpDispatchRingArgs& a, const EpForwarder& f, ep_u32 local, ep_u32 position) {
    ep_u32 place = position;
    if (ep_planted(r, EP_PLANT_FORWARDED_OFF_BY_ONE)) place = (position + 1) % ((const ep_u32*)a.matrix)[f.source * r.w.ranks + f.first + local];
    return ep_spot_after(r, f.exits[local].first, place);
}

/* Where one goes in the ring into a rank of the node, behind `before` others. */
EP_DEV EpSpot ep_forward_slot(const EpRank& r, const EpDispatchRingArgs& a, const EpForwarder& f, ep_u32 local, ep_u32 before) {
    EpProducer ring = f.exits[local].ring;
    ring.tail += before + (ep_planted(r, EP_PLANT_WRONG_SLOT) ? 1 : 0);
    const ep_u64 slot = ep_ring_slot(r.w, a.rings, r.me, f.exits[local].track, ep_producer_slot(ring, a.rings));
    return ep_spot_of_slot(r, ep_at(r, f.first + local, slot));
}

/* Notes that the tokens begin .. end went to no rank of this node. */
EP_DEV void ep_forward_none(const EpRank& r, ep_i32* fanout, ep_u32 begin, ep_u32 end) {
    const ep_u64 last = (ep_u64)end * r.w.ranks_per_node;
    for (ep_u64 at = (ep_u64)begin * r.w.ranks_per_node + ep_warp_lane(); at < last; at += 32) fanout[at] = -1;
}

/* Of a batch's rows those that go to the rank `local` of the node, a bit each. `word`: of the row that a lane looks at, that of its mask with this rank. */
EP_DEV ep_u32 ep_votes_for(ep_u32 word, ep_u32 local) { return ep_warp_votes(word >> local % 32 & 1); }

/* The word of the mask of the row at `at` that has the rank `local`, which is the first of a word; 0 where a lane has no row. */
EP_DEV ep_u32 ep_mask_word(const EpRank& r, const ep_u8* at, ep_u32 local, bool has) {
    return has ? ((const volatile ep_u32*)(at + r.w.wire_bytes))[local / 32] : 0;
}

/* A bit for each of a batch's first rows. */
EP_DEV ep_u32 ep_first_rows(ep_u32 rows) { return rows == 32 ? EP_FULL : (1u << rows) - 1; }

/* For how many of `wanted` rows the ring into the rank `local` has room. Waits for that of the first one where it is the batch's first, politely. */
EP_DEV bool ep_exit_room(const EpRank& r, const EpDispatchRingArgs& a, EpForwarder& f, ep_u32 local, bool first, ep_u32 wanted, ep_u32* room) {
    EpOutletWithin ring = ep_exit_ring(r, f.exits, local);
    if (ring.ring.tail + wanted - ring.ring.head > a.rings.slots) ep_outlet_refresh(r, ring);
    ep_exit_keep(f.exits[local], ring);
    if (first && ep_producer_is_full(ring.ring, a.rings)) {
        ep_exits_publish(r, a.rings, f.exits);
        if (ep_warp_lane() == 0) ep_inlet_return(r, f.inlet);
        ring = ep_exit_ring(r, f.exits, local);
    }
    EpAt at;
    if (first && !ep_outlet_slot(r, a.rings, ring, f.began, &at)) return false;
    *room = (ep_u32)(a.rings.slots - (ring.ring.tail - ring.ring.head));
    ep_exit_keep(f.exits[local], ring);
    return true;
}

/* The first token that a lane's row may have, where each has one and knows its token; the first row's is `next` at least. */
EP_DEV ep_u32 ep_token_from(ep_u32 token, ep_u32 next) {
    const ep_u32 lane = ep_warp_lane(), before = ep_warp_shuffle(token, lane == 0 ? 0 : lane - 1);
    return lane == 0 ? next : before + 1;
}

/* How many of the next `rows` rows, up to 32, go on at once: those before the first for which some ring has no room. None where something is wrong. By the
   leader. */
EP_DEV ep_u32 ep_rows_that_go(const EpRank& r, const EpDispatchRingArgs& a, const EpRings& far, EpForwarder& f, ep_u32 rows, ep_u32 next, ep_u32 end) {
    const ep_u32 lane = ep_warp_lane();
    const bool has = lane < rows;
    const ep_u8* at = ep_inlet_slot(r, far, f.inlet, has ? lane : 0);
    ep_u32 token = 0;
    bool right = true;
    if (has) right = ep_check_row(r, at, f.source, 0, &token);
    const ep_u32 from = ep_token_from(token, next);
    if (has && right && (token < from || token >= end)) {
        ep_fail_mismatch(r, f.source, EP_FIELD_ROW_TOKEN, from, token);
        right = false;
    }
    if (!ep_warp_all(right)) return 0;
    ep_u32 go = rows, word = 0;
    for (ep_u32 local = 0; local < r.w.ranks_per_node; ++local) {
        if (local % 32 == 0) word = ep_mask_word(r, at, local, has);
        ep_u32 votes = ep_votes_for(word, local);
        if (ep_bits(votes) > f.exits[local].left) {
            if (lane == 0) ep_fail_mismatch(r, f.source, EP_FIELD_ROWS_SENT, f.exits[local].left, ep_bits(votes));
            return 0;
        }
        if (votes == 0 || !ep_exit_is_ring(r, f.exits, local)) continue;
        ep_u32 room;
        if (!ep_exit_room(r, a, f, local, votes & 1, ep_bits(votes), &room)) return 0;
        for (ep_u32 i = 0; i < room && votes; ++i) votes &= votes - 1;
        if (votes && ep_lowest_bit(votes) < go) go = ep_lowest_bit(votes);
    }
    return go;
}

/* A batch's rows, as a warp forwards them. Lane i looks at the i-th. */
struct EpRailRows {
    const ep_u8* ring; /* the first slot */
    ep_u32 first, slots, slot_bytes;
    ep_u32 count, word;  /* how many, and of a lane's row the first word of its mask */
    ep_u32 out;          /* the source's first row at this rank */
};

EP_DEV const ep_u8* ep_rail_slot(const EpRailRows& rows, ep_u32 i) { return rows.ring + (rows.first + i) % rows.slots * (ep_u64)rows.slot_bytes; }

/* Which of the rows go to the rank `local` of the node, a bit each. By a warp. */
EP_DEV ep_u32 ep_votes_of(const EpRank& r, const EpRailRows& rows, ep_u32 local) {
    const ep_u32 lane = ep_warp_lane();
    ep_u32 word = rows.word;
    if (local >= 32) word = ep_mask_word(r, ep_rail_slot(rows, lane < rows.count ? lane : 0), local, lane < rows.count);
    return ep_votes_for(word, local);
}

/* Where a row goes at the rank `local` of the node, behind `before` others of its batch. */
EP_DEV EpSpot ep_goes_to(const EpRank& r, const EpDispatchRingArgs& a, const EpForwarder& f, const EpRailRows& rows, ep_u32 local, ep_u32 before) {
    const ep_u32 position = f.exits[local].next + before;
    if (ep_is_somewhere(f.exits[local].first.codes)) return ep_forward_spot(r, a, f, local, position);
    if (f.first + local != r.me) return ep_forward_slot(r, a, f, local, before);
    return ep_spot_kept(r, a, rows.out + position);
}

/* Says whose a row is that goes to the rank `local`, with its k-th choice: to the user, or where that rank finds it. */
EP_DEV void ep_head_forwarded(const EpRank& r, const EpDispatchRingArgs& a, const EpForwarder& f, const EpRailRows& rows, ep_u32 i, ep_u32 k, ep_u32 local,
                              ep_u32 before) {
    const ep_u8* at = ep_rail_slot(rows, i);
    const ep_u32 position = f.exits[local].next + before, token = k == 0 ? ((const volatile EpRowHeader*)at)->source_token : 0;
    const EpChoice choice = ep_localized(r, at, f.first + local, k);
    const EpAt to = ep_goes_to(r, a, f, rows, local, before).header;
    if (!ep_is_somewhere(to)) return ep_keep(r, a, rows.out + position, f.source, token, k, choice);
    if (k == 0) ep_put16(to, ep_unit((int)f.source, (int)token, (int)position, (int)(ep_u32)ep_op(r)));
    ep_put_message(to + (sizeof(EpRowHeader) + k * sizeof(EpChoice)), choice);
}

/* Lays what goes with a warp's rows where they go. By a warp. */
EP_DEV void ep_forward_heads(const EpRank& r, const EpDispatchRingArgs& a, const EpForwarder& f, const EpRailRows& rows, const EpTeam& team) {
    for (ep_u32 local = 0; local < r.w.ranks_per_node; ++local) {
        const ep_u32 votes = ep_votes_of(r, rows, local);
        if (votes == 0) continue;
        const auto goes = [&](ep_u32 i) { return (votes >> i & 1) != 0; };
        const auto before = [&](ep_u32 i) { return ep_bits(votes & ep_first_rows(i)); };
        ep_each_item(team, rows.count, r.w.topk, [&](ep_u32 i, ep_u32 k) {
            if (goes(i)) ep_head_forwarded(r, a, f, rows, i, k, local, before(i));
        });
        ep_each_word(
            team, rows.count, (ep_u32)r.w.scales_stride / 4,
            [&](ep_u32 i, ep_u32 w) {
                return goes(i) ? ((const volatile ep_u32*)(ep_rail_slot(rows, i) + r.w.header_bytes + r.w.scales_offset))[w] : 0;
            },
            [&](ep_u32 i, ep_u32 w, ep_u32 word) {
                if (goes(i)) ep_put4(ep_goes_to(r, a, f, rows, local, before(i)).scales + w * 4, word);
            });
    }
}

/* Lays the rows that go on where they go, those of one warp of the team. */
EP_DEV void ep_forward_rows(const EpRank& r, const EpDispatchRingArgs& a, const EpRings& far, const EpForwarder& f, ep_u32 count, const EpTeam& team) {
    const ep_u32 lane = ep_warp_lane();
    EpRailRows rows = {ep_own(r) + ep_ring_slot(r.w, far, f.source, f.inlet.track, 0), ep_consumer_slot(f.inlet.ring, far), far.slots, far.far_slot_bytes,
                       count, 0, ((const ep_u32*)a.first_of)[f.source]};
    rows.word = ep_mask_word(r, ep_rail_slot(rows, lane < count ? lane : 0), 0, lane < count);
    ep_carry_rows(
        team, count, (ep_u32)r.w.scales_offset, [&](ep_u32 i) { return ep_rail_slot(rows, i) + r.w.header_bytes; },
        [&] { ep_forward_heads(r, a, f, rows, team); },
        [&](ep_u32 i, ep_u32 at, const ep_u8* piece, ep_u32 bytes) {
            for (ep_u32 local = 0; local < r.w.ranks_per_node; ++local) {
                const ep_u32 votes = ep_votes_of(r, rows, local);
                if (votes >> i & 1) ep_put_piece(ep_goes_to(r, a, f, rows, local, ep_bits(votes & ep_first_rows(i))).codes + at, piece, bytes);
            }
        });
}

/* Rows have been laid: notes where they went, pushes them, and gives their slots back. The token behind them. By the leader. */
EP_DEV ep_u32 ep_rows_went(const EpRank& r, const EpDispatchRingArgs& a, const EpRings& far, EpForwarder& f, ep_u32 rows, ep_u32 next, ep_i32* fanout) {
    const ep_u32 lane = ep_warp_lane();
    const bool has = lane < rows;
    const ep_u8* at = ep_inlet_slot(r, far, f.inlet, has ? lane : 0);
    const ep_u32 token = ((const volatile EpRowHeader*)at)->source_token;
    for (ep_u32 none = ep_token_from(token, next); has && none < token; ++none)
        for (ep_u32 local = 0; local < r.w.ranks_per_node; ++local) fanout[(ep_u64)none * r.w.ranks_per_node + local] = -1;
    const ep_u32 behind = ep_warp_shuffle(token, rows - 1) + 1;
    ep_u32 word = 0;
    for (ep_u32 local = 0; local < r.w.ranks_per_node; ++local) {
        if (local % 32 == 0) word = ep_mask_word(r, at, local, has);
        const ep_u32 votes = ep_votes_for(word, local), count = ep_bits(votes), position = f.exits[local].next;
        const bool goes = votes >> lane & 1;
        if (has) fanout[(ep_u64)token * r.w.ranks_per_node + local] = goes ? (ep_i32)(position + ep_bits(votes & ep_first_rows(lane))) : -1;
        if (ep_exit_is_ring(r, f.exits, local)) {
            EpOutletWithin ring = ep_exit_ring(r, f.exits, local);
#pragma unroll 1
            for (ep_u32 i = 0; i < count; ++i) ep_outlet_push(r, a.rings, ring);
            ep_exit_keep(f.exits[local], ring);
        }
        ep_warp_meet();
        if (lane == 0) {
            f.exits[local].next = position + count;
            f.exits[local].left -= count;
        }
        ep_warp_meet();
    }
#pragma unroll 1
    for (ep_u32 i = 0; i < rows; ++i) {
        ep_poison(r, ep_inlet_slot(r, far, f.inlet), far.far_slot_bytes);
        ep_inlet_pop(r, far, f.inlet, lane == 0);
    }
    return behind;
}

/* All rows of the rail have gone on. By the leader. */
EP_DEV void ep_forward_close(const EpRank& r, const EpDispatchRingArgs& a, EpForwarder& f, ep_u32 track) {
    if (ep_warp_lane() == 0) ep_inlet_close(r, f.inlet);
    for (ep_u32 local = 0; local < r.w.ranks_per_node; ++local) {
        if (f.first + local == r.me) continue;
        if (!ep_exit_is_ring(r, f.exits, local)) {
            ep_say_placed(r, f.first + local, track);
            continue;
        }
        EpOutletWithin ring = ep_exit_ring(r, f.exits, local);
        ep_outlet_close(r, a.rings, ring);
    }
}

/* Waits for rows, politely; how many there are, up to `most`, none where none will come. By the leader. */
EP_DEV ep_u32 ep_rows_of_rail(const EpRank& r, const EpDispatchRingArgs& a, const EpRings& far, EpForwarder& f, ep_u32 most) {
    const ep_u32 lane = ep_warp_lane();
    const bool waits = lane == 0 && !ep_inlet_look(r, far, f.inlet);
    if (ep_warp_any(waits)) ep_exits_publish(r, a.rings, f.exits);
    if (!ep_inlet_next(r, far, f.inlet, f.began)) return 0;
    if (lane == 0) ep_inlet_plant(r, f.inlet);
    const ep_u64 there = ep_warp_shuffle(f.inlet.ring.tail - f.inlet.ring.head, 0);
    return there < most ? (ep_u32)there : most;
}

EP_DEV void ep_forward(const EpRank& r, const EpDispatchRingArgs& a, const EpRole& role, const EpTeam& team, EpExit* exits, void* baton, ep_u64 began) {
    const ep_u32 lane = ep_warp_lane(), source = role.peer, track = ep_far_track(r.w, role.channel);
    const EpRings far = ep_rings_of(r, a.rings, track);
    const bool leads = ep_leads(team);
    EpForwarding* says = (EpForwarding*)baton;
    EpForwarder f;
    f.exits = exits;
    f.source = source;
    f.first = r.me - r.me % r.w.ranks_per_node;
    f.began = began;
    ep_i32* fanout = ep_fanout_of(r, a.fanout, a.tokens_of, source);
    const ep_u32 tokens = ((const ep_u32*)a.tokens_of)[source];
    const ep_u32 end = ep_channel_first(tokens, a.rings.channels, role.channel + 1);
    ep_u32 next = ep_channel_first(tokens, a.rings.channels, role.channel), left = 0;
    bool right = true;
    if (leads) {
        ep_inlet_open(r, f.inlet, source, track);
        if (lane == 0) ep_inlet_begin(r, f.inlet);
        left = ep_forward_open(r, a, far, f, role.track);
        right = left != EP_FULL;
        if (right && lane == 0) ep_tally_far(r, 1, source, left);
    }
    for (;;) {
        if (leads) {
            ep_u32 rows = right && left > 0 ? ep_rows_of_rail(r, a, far, f, left < 32 ? left : 32) : 0;
            if (rows > 0) rows = ep_rows_that_go(r, a, far, f, rows, next, end);
            right = right && (left == 0 || rows > 0);
            if (lane == 0) *says = EpForwarding{f.inlet, rows};
        }
        ep_team_meet(team.number, team.warps);
        const EpForwarding going = *says;
        if (going.rows == 0) break;
        f.inlet = going.inlet; /* One copy in registers, not two. */
        ep_forward_rows(r, a, far, f, going.rows, team);
        ep_team_meet(team.number, team.warps);
        if (!leads) continue;
        next = ep_rows_went(r, a, far, f, going.rows, next, fanout);
        left -= going.rows;
    }
    if (!leads || !right) return;
    ep_forward_none(r, fanout, next, end);
    ep_forward_close(r, a, f, role.track);
}
#endif
