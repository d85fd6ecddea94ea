/*
 * ep_combine_team.h: a role that sums, played by some warps of a block: its team. One warp's instructions bound a combine between nodes, so each has a part
 * of a row's columns. No sum knows of it: columns are added apart, and in the same order.
 *
 *   leader    the first warp. It alone does what is protocol: waits, opens and closes rings, finds rows, checks headers, sums weights; and columns, as
 *             the others do. It has the last share of columns, than which none is smaller
 *   meetings  one before each token at least, and one more when rows were late, between the sums of two: nothing is held in registers there. What the
 *             leader found before, all ask for behind it. Tokens summed before have been read and written by all: the leader gives their slots back and
 *             pushes their sums
 *   memory    shared: a desk (ep_combine_rows.h). Of its tokens one is given back, while EP_TEAM_TOKENS - 1 are found
 *   rules     F3, F9: what all warps have written, or read, comes before the meeting, and the leader's fence and publish behind it. F6: none but the
 *             leader waits for ranks, and it comes to the next meeting whatever happens
 */
#ifndef EP_COMBINE_TEAM_H
#define EP_COMBINE_TEAM_H
#include "ep_combine_ring.h"
#include "ep_team.h"

/* What the leader says of the next token: its rows are there; they are late, so all bring what they have to its end; there is none; the operation has failed. */
#define EP_TEAM_FOUND 0u
#define EP_TEAM_LATE 1u
#define EP_TEAM_END 2u
#define EP_TEAM_STOP 3u

/* Tokens that are found and not summed, at most. */
#define EP_TEAM_AHEAD (EP_TEAM_TOKENS - 1)

/* Which bytes of a row a warp sums: parts `step` bytes apart. Each has one at least, be it behind the row's end. */
struct EpTeamShare {
    ep_u32 first, step, end;
};

template <int columns> EP_DEV EpTeamShare ep_team_share(const EpTeam& team, ep_u32 bytes) {
    const ep_u32 first = (team.warps - 1 - team.member) * 512 * columns;
    return EpTeamShare{first, team.warps * 512 * columns, bytes > first ? bytes : first + 1};
}

/* A reducer's sums have a place in the user's memory, whenever they come. */
EP_DEV void ep_before_wait(const EpRank&, EpToUser&) {}
EP_DEV bool ep_has_room(const EpRank&, EpToUser&, ep_u32) { return true; }
EP_DEV bool ep_await_room(const EpRank&, EpToUser&, const EpDesk&, ep_u64) { return true; }
EP_DEV bool ep_begin_sum(const EpRank&, EpToUser&, ep_u32, ep_u32, EpAt*) { return true; }
EP_DEV void ep_end_sum(const EpRank&, EpToUser&) {}

/* What a leader knows, in shared memory between its turns: beside sums it has no room in registers. */
template <class To> struct EpLead {
    EpTokens tokens;
    To to;
    ep_u32 next, end;      /* tokens: not found yet, up to the last one */
    ep_u32 closed;         /* of those that were found, given back */
    ep_u32 right;          /* whether nothing has failed */
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

/* Waits for the rows of the next token, and for room for its sum; all that was found is given back. By the leader. */
template <class To> EP_DEV bool ep_await_token(const EpRank& r, const EpCombineRingArgs& a, const EpDesk& desk, EpLead<To>& lead, ep_u64 began) {
    lead.closed = 0;
    lead.next = ep_next_token(lead.tokens, desk, lead.to, lead.next, lead.end);
    if (lead.next >= lead.end) return true;
    if (ep_rows_are_late(r, a, lead.tokens, desk, lead.next)) {
        ep_before_wait(r, lead.to);
        if (!ep_await_due(r, a, lead.tokens, desk, lead.next, began)) return false;
    }
    return ep_await_room(r, lead.to, desk, began);
}

/* Finds the n-th token and says so to the team; or why there is none. By the leader. */
template <class To>
EP_DEV void ep_say_next(const EpRank& r, const EpCombineRingArgs& a, const EpSource* sources, const EpDesk& desk, EpLead<To>& lead, ep_u32 n) {
    EpAt slot = ep_nowhere();
    ep_u32 says = EP_TEAM_STOP;
    if (lead.right) {
        const ep_u32 ahead = n - lead.closed;
        lead.next = ep_next_token(lead.tokens, desk, lead.to, lead.next, lead.end);
        if (lead.next >= lead.end) says = EP_TEAM_END;
        else if (ep_rows_are_late(r, a, lead.tokens, desk, lead.next) || !ep_has_room(r, lead.to, ahead)) says = EP_TEAM_LATE;
        else {
            const EpTokenRows rows = ep_find_rows(r, a, sources, lead.tokens, desk, ep_found(desk, n), lead.next);
            if (ep_warp_lane() == 0) desk.tokens[n % EP_TEAM_TOKENS] = rows;
            lead.right = ep_begin_sum(r, lead.to, lead.next, ahead, &slot);
            if (lead.right) says = EP_TEAM_FOUND;
            ++lead.next;
        }
    }
    if (ep_warp_lane() == 0) desk.words[n % EP_TEAM_TOKENS] = EpTeamWord{slot, says, 0};
}

/* All warps have read the rows of tokens up to `summed`, and have written their sums. By the leader. */
template <class To>
EP_DEV void ep_close_tokens(const EpRank& r, const EpCombineRingArgs& a, const EpDesk& desk, EpLead<To>& lead, ep_u32 summed) {
    if (!lead.right) return;
#pragma unroll 1
    for (; lead.closed < summed; ++lead.closed) {
        ep_end_sum(r, lead.to);
        ep_routes_pop(r, a, desk, ep_found(desk, lead.closed), desk.tokens[lead.closed % EP_TEAM_TOKENS].count);
    }
}

/* Waits until the oldest of so many parts has come, and for no other. */
EP_DEV void ep_await_oldest(ep_u32 in_flight) {
    switch (in_flight) {
    case 8: return ep_fetch_wait<7>();
    case 7: return ep_fetch_wait<6>();
    case 6: return ep_fetch_wait<5>();
    case 5: return ep_fetch_wait<4>();
    case 4: return ep_fetch_wait<3>();
    case 3: return ep_fetch_wait<2>();
    case 2: return ep_fetch_wait<1>();
    default: return ep_fetch_wait<0>();
    }
}

/* Sums the tokens that the leader knows of, which lays that down before; their sums go to a `To`. While parts of one are added those of the next are on
   their way. When rows are late, all are summed and given back that were found, before the leader waits. By all warps of the team. */
template <int columns, class To>
EP_DEV void ep_sum_in_team(const EpRank& r, const EpCombineRingArgs& a, const EpSource* sources, const EpDesk& desk, const EpTeam& team, ep_u64 began) {
    const ep_u32 bytes = (ep_u32)r.w.result_stride;
    const EpTeamShare share = ep_team_share<columns>(team, bytes);
    const bool leads = ep_leads(team);
    for (;;) {
        if (leads) {
            EpLead<To> lead = ep_take_up<To>(desk);
            if (lead.right) lead.right = ep_await_token(r, a, desk, lead, began);
            ep_lay_down(desk, lead);
        }
        ep_u32 found = 0, asking = 0, summed = 0; /* tokens */
        ep_u32 asked = 0, taken = 0;              /* parts */
        ep_u32 says = EP_TEAM_FOUND;
        EpPart asks = ep_no_part(share.end);
        for (;;) {
            do {
                const bool open = says == EP_TEAM_FOUND;
                if (leads) {
                    EpLead<To> lead = ep_take_up<To>(desk);
                    if (ep_planted(r, EP_PLANT_CLOSED_EARLY)) ep_close_tokens(r, a, desk, lead, summed);
                    if (open) ep_say_next(r, a, sources, desk, lead, found);
                    ep_lay_down(desk, lead);
                }
                ep_team_meet(team.number, team.warps);
                if (open) says = desk.words[found % EP_TEAM_TOKENS].says;
                if (says == EP_TEAM_STOP) return;
                if (open && says == EP_TEAM_FOUND) ++found;
            } while (says == EP_TEAM_FOUND && found - summed < EP_TEAM_AHEAD);
            if (leads) {
                EpLead<To> lead = ep_take_up<To>(desk);
                ep_close_tokens(r, a, desk, lead, summed);
                ep_lay_down(desk, lead);
            }
            if (summed == found) break;

            const To to{}; /* Where sums go, in general. */
            EpPart adds{desk.tokens[summed % EP_TEAM_TOKENS], 0, share.first};
            const EpAt slot = desk.words[summed % EP_TEAM_TOKENS].slot;
            EpSums<columns> sums;
            EpUnit own[columns];
            ep_sums_clear(sums);
            bool first = leads;
            if (ep_planted(r, EP_PLANT_CLOSED_EARLY) && !leads) ep_be_slow();
            do {
                while (asked - taken < desk.depth) {
                    if (asks.at >= share.end) {
                        if (asking == found) break;
                        asks = EpPart{desk.tokens[asking % EP_TEAM_TOKENS], 0, share.first};
                        if (leads) ep_fetch_heads(r, desk, asking, asks.of.count, ep_wants_weights(a, to));
                        ++asking;
                    }
                    ep_fetch_part<columns>(desk, asking - 1, asks, bytes, asked++);
                    ep_next_part<columns>(asks, share.step);
                }
                ep_await_oldest(asked - taken);
                if (first) {
                    ep_warp_meet();
                    if (!ep_check_rows(r, ep_found(desk, summed), adds.of) && ep_warp_lane() == 0) ((EpLead<To>*)desk.lead)->right = false;
                    if (ep_wants_weights(a, to))
#pragma unroll 1
                        for (ep_u32 k = ep_warp_lane(); k < r.w.topk; k += 32)
                            ep_put_weight(r, a, to, slot, adds.of.token, k, ep_add_weights(r, desk, summed, adds.of, k));
                    first = false;
                }
                const ep_u32 at = adds.at + ep_warp_lane() * 16;
                const EpPart added = adds;
                ep_add_part<columns>(desk, added, taken++, sums, own, [&](EpSums<columns>& into) { ep_start_sum(a, to, added.of.token, at, bytes, into); });
                ep_next_part<columns>(adds, share.step);
                if (adds.row != 0) continue;
#pragma unroll
                for (int i = 0; i < columns; ++i)
                    if (at + i * 512 < bytes) ep_put_sum(r, a, to, slot, added.of.token, at + i * 512, ep_sum_round(sums.of[i]));
            } while (adds.at < share.end);
            ++summed;
        }
        if (says == EP_TEAM_END) return;
        /* All have read that rows are late before the leader says something else in that place. */
        ep_team_meet(team.number, team.warps);
    }
}
#endif
