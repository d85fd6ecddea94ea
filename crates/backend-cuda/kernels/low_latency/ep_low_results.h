/*
 * ep_low_results.h: what the two halves of the low-latency combine have of results: which rows they are made of, where they go, and where they come.
 */
#ifndef EP_LOW_RESULTS_H
#define EP_LOW_RESULTS_H
#include "ep_low_banks.h"
#include "ep_low_far_results.h"
#include "ep_low_rows.h"

/* The rows or tokens of a batch, one of each warp, and what they are summed from. */
struct EpLowBatch {
    EpAt place[EP_LOW_WARPS];            /* of the results of a row in its rank's window, or of the staging memory for it */
    ep_u32 source[EP_LOW_WARPS];         /* that rank */
    ep_u32 count[EP_LOW_WARPS];          /* parts */
    ep_u32 token[EP_LOW_WARPS];
    ep_u32 row[EP_LOW_WARPS * 32];       /* of each part: the expert's row; or the rank that it comes from */
    ep_u32 slot[EP_LOW_WARPS * 32];      /* where it lies in the own window: its slot in the bank; of units, how many units from where the bank begins */
    float weight[EP_LOW_WARPS * 32];
};

/* After the windows' addresses, u64 [ranks]. Of each rank: what is to be done for it; received rows before its own, [ranks + 1], of those whose
   results go into slots, and of those whose results travel as units. */
EP_DEV ep_u32* ep_low_states(const EpRank& r) { return (ep_u32*)ep_low_pool(r); }
EP_DEV ep_u32* ep_low_firsts(const EpRank& r, bool as_units) { return ep_low_states(r) + r.w.ranks + (as_units ? r.w.ranks + 1 : 0); }

/* Whether the results for a rank, which sent so many tokens, travel as units: those of small batches do, whose time is not that of their bytes. */
#ifdef EP_FAR_H
EP_DEV bool ep_low_as_units(const EpLowCombineArgs&, ep_u32) { return false; }
#else
EP_DEV bool ep_low_as_units(const EpLowCombineArgs& a, ep_u32 tokens) { return tokens <= a.unit_tokens; }
#endif

/* ---- what is sent ---- */

/* Received rows before each rank's own, which are the same for all shares. A barrier comes before they are read. */
EP_DEV void ep_low_count_rows(const EpRank& r, const EpLowCombineArgs& a) {
    const ep_u32 *rows = (const ep_u32*)a.records, *tokens = rows + 2 * r.w.ranks;
    EP_SHORT for (ep_u32 end = threadIdx.x; end <= r.w.ranks; end += EP_LOW_THREADS) {
        ep_u32 units = 0, slots = 0;
        EP_SHORT for (ep_u32 rank = 0; rank < end; ++rank) {
            const ep_u32 more = rows[rank];
            if (ep_low_as_units(a, tokens[rank])) units += more;
            else slots += more;
        }
        ep_low_firsts(r, true)[end] = units;
        ep_low_firsts(r, false)[end] = slots;
    }
}

/* Whether the results of a row of the batch go now: their rank's bank is free. */
EP_DEV bool ep_low_goes(const EpRank& r, const EpLowBatch& s, ep_u32 turn) { return ep_low_states(r)[s.source[turn]] == EP_PEER_NOW; }

/* A warp reads the record of a received row: where its results go, and what they are made of. */
EP_DEV void ep_low_load_row(const EpRank& r, const EpLowCombineArgs& a, EpLowBatch& s, ep_u64 op, ep_u32 row, bool as_units) {
    const ep_u32* first = ep_low_firsts(r, as_units);
    const ep_u32 lane = threadIdx.x % 32, turn = threadIdx.x / 32, source = ep_low_source(first, row);
    const EpLowRow* record = (const EpLowRow*)ep_low_record(r, a.records, source, row - first[source]);
    EpLowPick pick = {-1, 0.0f};
    if (lane < r.w.topk) pick = ((const EpLowPick*)(record + 1))[lane];
    const EpLowRow own = *record;
    const ep_u32 votes = __ballot_sync(EP_FULL, pick.row >= 0), at = turn * 32 + __popc(votes & ((1u << lane) - 1));
    if (pick.row >= 0) {
        s.row[at] = (ep_u32)pick.row;
        s.weight[at] = pick.weight;
    }
    if (lane != 0) return;
    s.count[turn] = __popc(votes);
    s.token[turn] = own.token;
    s.source[turn] = source;
    s.place[turn] = ep_is_beyond(r, source) ? ep_low_staged_result(r, source, own.token)
                    : as_units              ? ep_low_at(source, ep_low_unit_result(r.w, op, r.me, own.token, 0))
                                            : ep_low_at(source, ep_low_result(r.w, op, r.me, own.token, 0));
}
/* The warps read the records of rows `base` .. `end`, as many as a batch has; how many. A barrier comes before they are read. */
EP_DEV ep_u32 ep_low_load_rows(const EpRank& r, const EpLowCombineArgs& a, EpLowBatch& s, ep_u64 op, ep_u32 base, ep_u32 end, bool as_units) {
    const ep_u32 batch = end - base < EP_LOW_WARPS ? end - base : EP_LOW_WARPS;
    if (threadIdx.x / 32 < batch) ep_low_load_row(r, a, s, op, base + threadIdx.x / 32, as_units);
    return batch;
}

/* ---- what is received ---- */

/* Where result number `at` of those that writer has for this rank's tokens lies, as EpLowBatch has it. */
EP_DEV ep_u32 ep_low_slot(const EpRank& r, ep_u32 writer, ep_u32 at, bool as_units) {
    if (!as_units) return writer * (ep_u32)r.w.low_part_slots + at;
    return writer * (ep_u32)(r.w.low_unit_part_bytes / EP_UNIT_BYTES) + at * (ep_u32)ep_unit_count(r.w.result_bytes);
}

/* The token of a batch that this warp serves: not the first by the first warps, which may be busy with what is sent, nor by the last, which serve ranks. */
EP_DEV ep_u32 ep_low_turn() { return (threadIdx.x / 32 + EP_LOW_WARPS / 2) % EP_LOW_WARPS; }
/* The warps find the results of the tokens from `base` on, as far as the share has them. Ranks that are masked add nothing;
   those that were masked at dispatch are none of the token's. */
EP_DEV void ep_low_load_tokens(const EpRank& r, const EpLowCombineArgs& a, EpLowBatch& s, ep_u32 last, ep_u32 base, bool as_units) {
    const ep_u32 lane = threadIdx.x % 32, turn = ep_low_turn(), topk = r.w.topk, token = base + turn;
    if (token >= last) return;
    const ep_u64 at = (ep_u64)token * topk + lane;
    const ep_i64 expert = lane < topk ? ((const ep_i64*)a.topk_idx)[at] : -1;
    /* They lie in memory that a caller may have written since: what is none was dropped. */
    ep_u32 rank = expert >= 0 && expert < (ep_i64)r.w.experts ? ep_rank_of_expert(r.w, (ep_u32)expert) : EP_FULL;
    if (rank != EP_FULL && ((const ep_u32*)a.routed)[rank] == 0) rank = EP_FULL;
    bool counts = rank != EP_FULL;
    ep_u32 column = 0;
    float weight = 1.0f;
    const ep_u32 same = __match_any_sync(EP_FULL, rank); /* choices of the same rank's experts */
    if (a.kind == EP_LOW_PER_RANK) {
        counts &= lane + 1 == __ffs((int)same);
    } else {
        if (counts) weight = ((const float*)a.topk_weights)[at];
        /* The rank's results lie in the order of its choices. A repeated choice has the result of the first that names its expert. */
        ep_u32 first = lane, firsts = EP_FULL;
        if (a.repeats != 0) {
            first = __ffs((int)__match_any_sync(EP_FULL, counts ? (ep_u32)expert : r.w.experts + lane)) - 1;
            firsts = __ballot_sync(EP_FULL, first == lane);
        }
        column = __popc(same & firsts & ((1u << first) - 1));
    }
    const bool adds = counts && ep_low_takes_part(rank);
    const ep_u32 all = __ballot_sync(EP_FULL, adds);
    ep_u32 place = __popc(all & ((1u << lane) - 1));
    if (a.kind == EP_LOW_PER_RANK) {
        place = 0;
        EP_SHORT for (ep_u32 k = 0; k < topk; ++k) {
            const ep_u32 other = __shfl_sync(EP_FULL, rank, k);
            if (all >> k & 1) place += other < rank;
        }
    }
    if (adds) {
        s.row[turn * 32 + place] = rank;
        s.slot[turn * 32 + place] = ep_low_slot(r, rank, token * r.w.low_columns + column, as_units);
        s.weight[turn * 32 + place] = weight;
    }
    if (lane == 0) {
        s.count[turn] = __popc(all);
        s.token[turn] = token;
    }
}
#endif
