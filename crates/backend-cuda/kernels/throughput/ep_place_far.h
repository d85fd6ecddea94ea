/*
 * ep_place_far.h: rows that are placed within a node, of launches over several nodes. The far hop always goes through a ring; whoever then has a row for a rank
 * of its node, its sender or the forwarder, puts it to its final place where that rank granted a block.
 *
 *   roles    as those of rings: sender to a rank of the node; receiver of a source's rows, which waits until they are placed; keeper of the own
 *            rows. Each begins with the note of the rank that it serves. A team each (ep_team.h), whose warps place rows in turn; its leader alone has rings
 *   memory   blocks in the windows of the node's ranks: of a row codes, scales and header lie apart (ep_block_...)
 *   rules    F3: all lanes have met, and one has fenced, when Placed is published: once for each track, by the leader of those that placed the track's rows, behind their meeting.
 *            F8: a block that a note names is compared with the window. No circle of waits: placing waits for notes alone, which wait for nobody's rows
 */
#ifndef EP_PLACE_FAR_H
#define EP_PLACE_FAR_H
#include "ep_carry.h"

/* Where the parts of a row go: to a slot, or to a block. */
struct EpSpot {
    EpAt codes;
    EpAt scales;
    EpAt header;
};

EP_DEV EpSpot ep_spot_of_slot(const EpRank& r, EpAt slot) {
    const EpAt codes = slot + r.w.header_bytes;
    return EpSpot{codes, codes + r.w.scales_offset, slot};
}

/* That of the row `row` further on in a block. */
EP_DEV EpSpot ep_spot_after(const EpRank& r, const EpSpot& first, ep_u32 row) {
    return EpSpot{first.codes + (ep_u64)row * r.w.scales_offset, first.scales + (ep_u64)row * r.w.scales_stride,
                  first.header + (ep_u64)row * r.w.header_bytes};
}

/* That of a row that this rank keeps, in memory of the user's. */
EP_DEV EpSpot ep_spot_kept(const EpRank& r, const EpDispatchRingArgs& a, ep_u32 row) {
    return EpSpot{ep_here((ep_u64)ep_out_codes(r, a, row)), ep_here((ep_u64)ep_out_scales(r, a, row)), ep_nowhere()};
}

/* The first row of source at a rank. By a warp. */
EP_DEV ep_u32 ep_first_row(const EpRank& r, const EpDispatchRingArgs& a, ep_u32 source, ep_u32 rank) {
    ep_u32 sum = 0;
    for (ep_u32 before = ep_warp_lane(); before < source; before += 32) sum += ((const ep_u32*)a.matrix)[before * r.w.ranks + rank];
    for (ep_u32 step = 16; step > 0; step /= 2) sum += ep_warp_shuffle(sum, ep_warp_lane() ^ step);
    return sum;
}

/* Where source's first row goes at a rank of this node, whose note is waited for; nowhere where it granted nothing. False when no note comes. By a warp. */
EP_DEV bool ep_find_spot(const EpRank& r, const EpDispatchRingArgs& a, ep_u32 source, ep_u32 rank, ep_u64 began, EpSpot* spot) {
    *spot = EpSpot{ep_nowhere(), ep_nowhere(), ep_nowhere()};
    if (!a.notes) return true;
    EpNote note;
    note.base = a.base;
    note.opening.rows = a.base_rows;
    bool right = true;
    if (rank != r.me && ep_warp_lane() == 0)
        right = ep_take_note(r, rank, began, &note) && ep_check_block(r, rank, note, ep_block_bytes(r.w, note.opening.rows));
    const ep_u64 base = ep_warp_shuffle(note.base, 0);
    const ep_u32 rows = ep_warp_shuffle(note.opening.rows, 0);
    if (!ep_warp_shuffle(right, 0)) return false;
    const ep_u32 first = ep_first_row(r, a, source, rank);
    if (base == EP_NO_BASE) return true;
    *spot = EpSpot{ep_at(r, rank, ep_block_codes(r.w, base, rows, first)), ep_at(r, rank, ep_block_scales(r.w, base, rows, first)),
                   ep_at(r, rank, ep_block_header(r.w, base, first))};
    return true;
}

/* Says that all rows of a track are placed at peer. By a warp. */
EP_DEV void ep_say_placed(const EpRank& r, ep_u32 peer, ep_u32 track) {
    ep_warp_meet();
    if (ep_warp_lane() != 0) return;
    ep_fence_sys();
    ep_publish(r, peer, ep_lane_data(track), EP_COUNTER_PLACED, ep_op(r));
}

/* A planted fault: says so before, and leaves peer the time to believe it, until it begins the next operation, or for an eighth of what waits may take. Only
   the first rank of a node does it: where all did, all would be late, and none early. By a warp. */
EP_DEV void ep_plant_placed(const EpRank& r, ep_u32 plant, ep_u32 peer, ep_u32 track) {
#ifdef EP_TEST
    if (!ep_planted(r, plant) || r.me % r.w.ranks_per_node != 0) return;
    ep_say_placed(r, peer, track);
    const ep_u64 until = ep_now() + r.allowed / 8;
    while (ep_warp_lane() == 0 && ep_peek(r, peer, EP_LANE_WATCH, EP_COUNTER_OPENING) >> 3 <= ep_op(r) && ep_now() < until) ep_nap(1000);
    ep_warp_meet();
#endif
}

/* What a leader says of the rows that a rank of the node gets: where the first goes, and whether they are placed at all. */
struct EpPlacing {
    EpSpot first;
    ep_u32 placed;
};
static_assert(sizeof(EpPlacing) <= EP_BATON_BYTES, "the host makes room for another EpPlacing");

/* A rank's rows of a channel, which a team's warps carry in turn: for up to 32 tokens at a time, carry(team, base, position, votes): a bit for each token from `base`
   on that has a row there, and the position of the first of them; those of the others follow. The team's first member is the one whose turn it is. */
template <class Carry>
EP_DEV void ep_each_batch(const EpRank& r, const EpDispatchRingArgs& a, const EpTeam& team, ep_u32 channel, ep_u32 rank, const Carry& carry) {
    EpTeam turns = team;
    const ep_u32 end = ep_channel_first(a.tokens, a.rings.channels, channel + 1);
    for (ep_u32 base = ep_channel_first(a.tokens, a.rings.channels, channel); base < end; base += 32) {
        const ep_u32 token = base + ep_warp_lane();
        const ep_i32 position = token < end ? ((const ep_i32*)a.position)[(ep_u64)token * r.w.ranks + rank] : -1;
        const ep_u32 votes = ep_warp_votes(position >= 0);
        if (votes) carry(turns, base, (ep_u32)ep_warp_shuffle(position, ep_lowest_bit(votes)), votes);
        turns.member = (turns.member + team.warps - ep_bits(votes) % team.warps) % team.warps;
    }
}

/* Carries a batch of a rank's rows, the first of which has the position `first`: place(position) is a row's spot; keep(k, token, position) says whose it is, with
   its k-th choice. By a warp of a team. */
template <class Place, class Keep>
EP_DEV void ep_carry_own(const EpRank& r, const EpDispatchRingArgs& a, const EpTeam& team, ep_u32 base, ep_u32 first, ep_u32 votes, const Place& place,
                         const Keep& keep) {
    const ep_u32 rows = ep_bits(votes);
    const auto token = [&](ep_u32 i) { return base + ep_nth_bit(votes, i); };
    ep_carry_rows(
        team, rows, (ep_u32)r.w.scales_offset, [&](ep_u32 i) { return ep_codes_of(a, token(i)); },
        [&] {
            ep_each_item(team, rows, r.w.topk, [&](ep_u32 i, ep_u32 k) { keep(k, token(i), first + i); });
            ep_each_word(
                team, rows, (ep_u32)r.w.scales_stride / 4, [&](ep_u32 i, ep_u32 w) { return ep_scale_of(a, token(i), w); },
                [&](ep_u32 i, ep_u32 w, ep_u32 word) { ep_put4(place(first + i).scales + w * 4, word); });
        },
        [&](ep_u32 i, ep_u32 at, const ep_u8* piece, ep_u32 bytes) { ep_put_piece(place(first + i).codes + at, piece, bytes); });
}

/* Places the own rows of a channel at peer, or at this rank. By a team. */
EP_DEV void ep_place(const EpRank& r, const EpDispatchRingArgs& a, const EpRole& role, const EpTeam& team, const EpSpot& first) {
    const ep_u32 peer = role.peer;
    ep_each_batch(r, a, team, role.channel, peer, [&](const EpTeam& turns, ep_u32 base, ep_u32 position, ep_u32 votes) {
        const auto place = [&](ep_u32 position) { return ep_spot_after(r, first, position); };
        ep_carry_own(r, a, turns, base, position, votes, place, [&](ep_u32 k, ep_u32 token, ep_u32 position) {
            const EpAt header = place(position).header;
            if (k == 0) ep_put16(header, ep_row_header(r, token, position));
            ep_put_message(header + (sizeof(EpRowHeader) + k * sizeof(EpChoice)), ep_choice(r, a, peer, token, k));
        });
    });
    if (peer == r.me) return;
    ep_team_meet(team.number, team.warps);
    if (ep_leads(team)) ep_say_placed(r, peer, role.track);
}

/* Keeps the own rows of a channel. By a team. */
EP_DEV void ep_keep_own_in_team(const EpRank& r, const EpDispatchRingArgs& a, ep_u32 channel, const EpTeam& team) {
    const ep_u32 first = ((const ep_u32*)a.first_of)[r.me];
    ep_each_batch(r, a, team, channel, r.me, [&](const EpTeam& turns, ep_u32 base, ep_u32 position, ep_u32 votes) {
        const auto place = [&](ep_u32 position) { return ep_spot_kept(r, a, first + position); };
        ep_carry_own(r, a, turns, base, position, votes, place, [&](ep_u32 k, ep_u32 token, ep_u32 position) {
            ep_keep(r, a, first + position, r.me, token, k, ep_choice(r, a, r.me, token, k));
        });
    });
}

/* Rows of this rank for one of its node, or for itself where it granted a block: to their places, or into the ring, by the leader alone. */
EP_DEV void ep_give(const EpRank& r, const EpDispatchRingArgs& a, const EpRole& role, const EpTeam& team, void* baton, ep_u64 began) {
    EpPlacing* says = (EpPlacing*)baton;
    bool right = true;
    if (ep_leads(team)) {
        EpSpot first;
        right = ep_find_spot(r, a, r.me, role.peer, began, &first);
        const bool placed = right && ep_is_somewhere(first.codes);
        if (placed && role.peer != r.me) ep_plant_placed(r, EP_PLANT_PLACED_EARLY, role.peer, role.track);
        if (ep_warp_lane() == 0) *says = EpPlacing{first, placed};
    }
    ep_team_meet(team.number, team.warps);
    const EpPlacing placing = *says;
    if (placing.placed) ep_place(r, a, role, team, placing.first);
    else if (ep_leads(team) && right) ep_send(r, a, role, began);
}

/* The roles of a node's rows, by rings and to blocks: the `number`-th of all that the launch has. Rings are their leader's. */
EP_DEV void ep_play_near_role(const EpRank& r, const EpDispatchRingArgs& a, ep_u32 number, const EpTeam& team, void* baton, ep_u64 began) {
    if (number >= a.role_count) return;
    const EpRole role = ((const EpRole*)a.roles)[number];
    if (!ep_takes_part(r, role.peer)) return;
    const bool grants = a.notes && a.base != EP_NO_BASE;
    const bool sends = role.duty == EP_DUTY_SENDER && !ep_is_beyond(r, role.peer);
    if (sends || (role.duty == EP_DUTY_COLLECTOR && grants)) {
        ep_give(r, a, role, team, baton, began);
    } else if (role.duty == EP_DUTY_COLLECTOR) {
        ep_keep_own_in_team(r, a, role.channel, team);
    } else if (role.duty == EP_DUTY_RECEIVER && ep_leads(team)) {
        if (!grants) ep_receive(r, a, role, began);
        else if (ep_warp_lane() == 0)
            ep_wait(r, ep_gate(r, role.peer), ep_lane_data(role.track), EP_COUNTER_PLACED, ep_op(r), EP_PHASE_ROWS, began);
    }
}
#endif
