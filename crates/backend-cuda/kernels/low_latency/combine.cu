/*
 * ep_low_latency::combine: low-latency combine. The experts' results go back into fixed slots of the tokens' ranks, which sum them.
 *
 *   launch   any number of blocks of 512 threads, which need not all run at a time (ep_low_shares.h); phases says which halves
 *   memory   the experts' rows and the records of the dispatch in memory of the own GPU: nothing is staged; slots and cells of the
 *            windows; shared: the rows of a batch
 *   send     the received rows are cut into as many shares as there are blocks. Per choice: each expert's row is copied to the token's slot
 *            of that choice. Per rank: the rows of a token are weighed and summed, choices ascending, and rounded. The cell of the token
 *            is raised when all that this rank has for it is there
 *   receive  the tokens are cut into as many shares as there are blocks, which wait for all that is owed to theirs, and sum it: per choice
 *            with the weights given here, per rank as it is, ranks ascending; f32, rounded once
 *   rules    ep_low.h. Slots are read after the acquire of their cell and a barrier, by loads that are coherent
 */
#include "ep_low_arrivals.h"
#include "ep_low_banks.h"
#include "ep_low_end.h"
#include "ep_low_far_results.h"
#include "ep_low_rows.h"
#include "ep_low_shares.h"
#include "ep_sum.h"

/* Results that a thread has in flight. */
#define EP_LOW_WIDTH 8u

/* The rows or tokens of a batch, one of each warp, and what they are summed from. */
struct EpLowBatch {
    EpAt place[EP_LOW_WARPS];            /* of the results of a token in its rank's window; nowhere where they do not go now */
    ep_u32 count[EP_LOW_WARPS];          /* parts */
    ep_u32 token[EP_LOW_WARPS];
    ep_u32 row[EP_LOW_WARPS * 32];       /* of each part: the expert's row; or the rank that it comes from */
    ep_u32 slot[EP_LOW_WARPS * 32];      /* where it lies in the own window: its slot in the bank */
    float weight[EP_LOW_WARPS * 32];
};

/* Brings what a launch begins with on its way. */
EP_DEV void ep_low_begin(const EpRank& r, const EpLowCombineArgs& a) {
    const ep_u32 tid = threadIdx.x, ranks = r.w.ranks;
    if (tid == 0) ep_prefetch((const void*)a.records);
    if (tid == 32) ep_prefetch((const void*)a.routed);
    if ((a.phases & EP_LOW_RECEIVE) == 0 || tid < 64 || tid >= 96) return;
    /* Choices and weights of the tokens that this block will sum. */
    const ep_u64 first = (ep_u64)a.tokens * blockIdx.x / gridDim.x * r.w.topk + (tid - 64) * 16;
    if (first >= (ep_u64)a.tokens * r.w.topk) return;
    ep_prefetch((const ep_i64*)a.topk_idx + first);
    if (a.kind == EP_LOW_PER_CHOICE) ep_prefetch((const float*)a.topk_weights + first);
}

/* After the windows' addresses, u64 [ranks]. Of each rank: what is to be done for it; results that are owed to it, or by it; received
   rows before its own, [ranks + 1]. */
EP_DEV ep_u32* ep_low_states(const EpRank& r) { return (ep_u32*)ep_low_pool(r); }
EP_DEV ep_u32* ep_low_owed(const EpRank& r) { return ep_low_states(r) + r.w.ranks; }
EP_DEV ep_u32* ep_low_firsts(const EpRank& r) { return ep_low_owed(r) + r.w.ranks; }

/* A warp reads the record of a received row. */
EP_DEV void ep_low_load_row(const EpRank& r, const EpLowCombineArgs& a, EpLowBatch& s, ep_u64 op, ep_u32 row) {
    const ep_u32 lane = threadIdx.x % 32, turn = threadIdx.x / 32, source = ep_low_source(ep_low_firsts(r), row);
    const EpLowRow* record = (const EpLowRow*)ep_low_record(r, a.records, source, row - ep_low_firsts(r)[source]);
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
    const bool now = ep_low_states(r)[source] == EP_PEER_NOW;
    s.place[turn] = !now                      ? ep_nowhere()
                    : ep_is_beyond(r, source) ? ep_low_staged_result(r, source, own.token)
                                              : ep_low_at(source, ep_low_result(r.w, op, r.me, own.token, 0));
}

/* The headers of all results of a row, 16 bytes each. */
EP_DEV void ep_low_return_headers(const EpRank& r, const EpLowCombineArgs& a, const EpLowBatch& s, ep_u64 op, ep_u32 turn) {
    const ep_u32 results = a.kind == EP_LOW_PER_RANK ? 1 : s.count[turn];
    EP_SHORT for (ep_u32 i = 0; i < results; ++i)
        ep_put16(s.place[turn] + i * r.w.low_result_bytes,
                 make_int4((int)r.me, (int)s.token[turn], (int)i, (int)ep_low_stamp(r.generation, op)));
}

/* One unit of 16 bytes of all parts of a row. */
EP_DEV void ep_low_return_unit(const EpRank& r, const EpLowCombineArgs& a, const EpLowBatch& s, ep_u32 turn, ep_u32 at) {
    const ep_u32 parts = s.count[turn];
    const EpAt place = s.place[turn] + (r.w.low_result_header_bytes + at);
    const ep_u8* y = (const ep_u8*)a.y + at;
    EpSum sum;
    ep_sum_clear(sum);
    EP_SHORT for (ep_u32 base = 0; base < parts; base += 4) {
        int4 v[4];
#pragma unroll
        for (ep_u32 i = 0; i < 4; ++i)
            if (base + i < parts) v[i] = ep_ld16(y + s.row[turn * 32 + base + i] * a.y_stride);
#pragma unroll
        for (ep_u32 i = 0; i < 4; ++i) {
            if (base + i >= parts) continue;
            const ep_u32 part = turn * 32 + base + i;
            if (a.kind == EP_LOW_PER_RANK) ep_sum_add_scaled(sum, s.weight[part], v[i]);
            else ep_put16(place + (base + i) * r.w.low_result_bytes, v[i]);
        }
    }
    if (a.kind == EP_LOW_PER_RANK) ep_put16(place, ep_sum_round(sum));
}

/* The rows of a batch are where they go, or staged. By threads that serve ranks, each for a row. */
EP_DEV void ep_low_raise_batch(const EpRank& r, const EpLowCombineArgs& a, const EpLowBatch& s, ep_u64 op, ep_u32 base, ep_u32 batch,
                               bool early) {
    const ep_u32 turn = ep_low_served();
    if (turn >= batch || !ep_is_somewhere(s.place[turn])) return;
    const ep_u32 source = ep_low_source(ep_low_firsts(r), base + turn);
    if (!ep_is_beyond(r, source)) ep_low_raise(r, op, source, s.token[turn]);
    else if (!early) ep_low_staged_result_one(r, a, op, source);
}

/* Received rows before each rank's own, which are the same for all shares. A barrier comes before they are read. */
EP_DEV void ep_low_count_rows(const EpRank& r, const EpLowCombineArgs& a) {
    const ep_u32* rows = (const ep_u32*)a.records;
    EP_SHORT for (ep_u32 end = threadIdx.x; end <= r.w.ranks; end += EP_LOW_THREADS) {
        ep_u32 sum = 0;
        EP_SHORT for (ep_u32 rank = 0; rank < end; ++rank) sum += rows[rank];
        ep_low_firsts(r)[end] = sum;
    }
}

/* Puts the results of a share, if there is one. False where all shares are known to be taken; otherwise others may be left. `meanwhile` is
   done while the last of them are on their way. */
template <class F>
EP_DEV bool ep_low_return_share(const EpRank& r, const EpLowCombineArgs& a, EpLowBatch& s, ep_u32 share, ep_u64 op, bool again, ep_u64 early,
                                ep_u64 began, F meanwhile) {
    const ep_u32 tid = threadIdx.x, warp = tid / 32, ranks = r.w.ranks, columns = (ep_u32)(r.w.result_stride / 16);
    const ep_u32* owed = (const ep_u32*)a.records + (a.kind == EP_LOW_PER_RANK ? 0 : ranks);
    ep_u32 *first = ep_low_firsts(r), *states = ep_low_states(r);
    ep_low_open(r, op, again, states);
    int found = ep_low_look(r, op, owed, states, began, false, &early);
    /* The first shares have a row more than the others, where these do not come out even. */
    const ep_u32 each = first[ranks] / gridDim.x, more = first[ranks] - each * gridDim.x;
    /* The header is a row's first unit, and no warp has units of two rows: so what it stores begins where a slot's lines do. */
    const ep_u32 wide = (columns + 32) / 32 * 32;
    const bool none = share == EP_LOW_NO_SHARE;
    const ep_u32 from = none ? 0 : share * each + (share < more ? share : more), to = none ? 0 : from + each + (share < more);
    const bool tells = share == a.roles.tells;
    EP_SHORT for (; ep_low_next(r, op, owed, states, began, found); found = EP_FOUND_WAITING) {
        if (tells && from == to) ep_low_announce(r, op, a.kind, owed, false, states);
        EP_SHORT for (ep_u32 base = from; base < to; base += EP_LOW_WARPS) {
            const ep_u32 batch = to - base < EP_LOW_WARPS ? to - base : EP_LOW_WARPS;
            if (warp < batch) ep_low_load_row(r, a, s, op, base + warp);
            __syncthreads();
            if (tells && base == from) ep_low_announce(r, op, a.kind, owed, false, states);
            if (ep_planted(r, EP_PLANT_LOW_RAISED_EARLY)) {
                ep_low_raise_batch(r, a, s, op, base, batch, true);
                ep_be_slow();
            }
            EP_SHORT for (ep_u32 unit = tid; unit < batch * wide; unit += EP_LOW_THREADS) {
                const ep_u32 turn = unit / wide, at = unit - turn * wide;
                if (!ep_is_somewhere(s.place[turn]) || at > columns) continue;
                if (at == 0) ep_low_return_headers(r, a, s, op, turn);
                else ep_low_return_unit(r, a, s, turn, (at - 1) * 16);
            }
            __syncthreads();
            ep_low_raise_batch(r, a, s, op, base, batch, false);
            /* The batch is read by all until here. */
            if (base + EP_LOW_WARPS < to) __syncthreads();
        }
        meanwhile();
        /* Mostly one meeting of the block says that there is no more to do. */
        const bool taken = ep_low_look_at_shares(r) != 0, left = ep_low_is_left(r, states);
        if (!__syncthreads_or(left || !taken)) return false;
        ep_low_finish(r, states);
    }
    return true;
}

/* Puts the results of this block's share, if it is `own`, as the first thread knows, and those of blocks that have not begun. */
template <class F>
EP_DEV void ep_low_return_rows(const EpRank& r, const EpLowCombineArgs& a, EpLowBatch& s, ep_u64 op, bool again, bool own, ep_u64 early,
                               ep_u64 began, F meanwhile) {
    ep_low_count_rows(r, a);
    ep_u32 share = __syncthreads_and(own) ? blockIdx.x : EP_LOW_NO_SHARE;
    EP_SHORT while (ep_low_return_share(r, a, s, share, op, again, early, began, meanwhile)) {
        share = ep_low_take_another(r);
        if (share == EP_LOW_NO_SHARE) break;
    }
}

/* Waits until those that owe results have said how many come, each thread for its own; false after a fault. */
EP_DEV bool ep_low_await_results(const EpRank& r, const EpLowCombineArgs& a, ep_u64 op, ep_u64 began) {
    bool there = ep_low_is_unmasked(r, op);
    const ep_u32* routed = (const ep_u32*)a.routed;
    EP_SHORT for (ep_u32 rank = ep_low_served(); rank < r.w.ranks; rank += EP_LOW_THREADS) {
        ep_u32 rows = 0;
        const ep_u32 owed = ep_low_takes_part(rank) ? routed[(a.kind == EP_LOW_PER_RANK ? 0 : r.w.ranks) + rank] : 0;
        if (owed > 0 && there) {
            const bool came = ep_low_await(r, op, a.kind, rank, began, &rows);
            if (came && rows != owed) ep_low_mismatch(r, op, rank, EP_LOW_FIELD_RESULTS, owed, rows);
            there &= came && rows == owed;
        }
        ep_low_owed(r)[rank] = owed;
    }
    return there;
}

/* The warps find the results of the tokens from `base` on, as far as the share has them. Ranks that are masked add
   nothing; those that were masked at dispatch are none of the token's. */
EP_DEV void ep_low_load_tokens(const EpRank& r, const EpLowCombineArgs& a, EpLowBatch& s, const EpShareOfRows& share, ep_u32 base) {
    const ep_u32 lane = threadIdx.x % 32, turn = threadIdx.x / 32, topk = r.w.topk, token = base + turn;
    if (token >= share.last) return;
    const ep_u64 at = (ep_u64)token * topk + lane;
    const ep_i64 expert = lane < topk ? ((const ep_i64*)a.topk_idx)[at] : -1;
    ep_u32 rank = expert >= 0 ? ep_rank_of_expert(r.w, (ep_u32)expert) : EP_FULL;
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
        s.slot[turn * 32 + place] = rank * (ep_u32)r.w.low_part_slots + token * r.w.low_columns + column;
        s.weight[turn * 32 + place] = weight;
    }
    if (lane == 0) {
        s.count[turn] = __popc(all);
        s.token[turn] = token;
    }
}

/* The warps wait for the results of the tokens that they have found; false after a fault. */
EP_DEV bool ep_low_await_tokens(const EpRank& r, const EpLowBatch& s, const EpShareOfRows& share, ep_u32 base, ep_u64 op, ep_u64 began) {
    const ep_u32 tid = threadIdx.x, warp = tid / 32;
    __syncwarp();
    return base + warp >= share.last || tid % 32 >= s.count[warp] || ep_low_await_row(r, op, s.row[tid], s.token[warp], began);
}

/* Refuses a result that is not the one due; `own` is its header. */
EP_DEV void ep_low_check_result(const EpRank& r, ep_u64 op, int4 own, ep_u32 rank, ep_u32 token) {
    if ((ep_u32)own.w != ep_low_stamp(r.generation, op)) return ep_low_refuse_stamp(r, op, rank, (ep_u32)own.w);
    if ((ep_u32)own.x != rank) ep_low_mismatch(r, op, rank, EP_LOW_FIELD_ROW_SOURCE, rank, (ep_u32)own.x);
    else if ((ep_u32)own.y != token) ep_low_mismatch(r, op, rank, EP_LOW_FIELD_ROW_TOKEN, token, (ep_u32)own.y);
}

/* Waits for the results, and sums this block's share of the tokens, of which the first were found before if `found`. */
EP_DEV void ep_low_reduce(const EpRank& r, const EpLowCombineArgs& a, EpLowBatch& s, const EpShareOfRows& share, bool found, ep_u64 op,
                          ep_u64 began) {
    const ep_u32 tid = threadIdx.x, warp = tid / 32, columns = (ep_u32)(r.w.result_stride / 16);
    const ep_u8* slots = ep_low_own(r) + ep_low_part(r.w, op, 0);
    bool there = ep_low_await_results(r, a, op, began);
    EP_SHORT for (ep_u32 base = share.first; base < share.last || base == share.first; base += EP_LOW_WARPS) {
        if (!found || base != share.first) ep_low_load_tokens(r, a, s, share, base);
        there &= ep_low_await_tokens(r, s, share, base, op, began);
        if (!__syncthreads_and(there)) return;
        const ep_u64 origin = (ep_u64)base * columns, after = origin + (ep_u64)EP_LOW_WARPS * columns;
        const ep_u32 begin = share.begin > origin ? (ep_u32)(share.begin - origin) : 0;
        const ep_u32 end = (ep_u32)((share.end < after ? share.end : after) - origin);
        /* The block with a token's beginning looks at the headers of its results, a warp a token. */
        const bool keeps = base + warp < share.last && (ep_u64)(base + warp) * columns >= share.begin;
        const bool checks = keeps && tid % 32 < s.count[warp];
        int4 own = make_int4(0, 0, 0, 0);
        if (checks)
            own = ep_ld16_put(slots + s.slot[tid] * r.w.low_result_bytes);
        EP_SHORT for (ep_u32 unit = begin + tid; unit < end; unit += EP_LOW_THREADS) {
            const ep_u32 turn = unit / columns, at = (unit - turn * columns) * 16, parts = s.count[turn], token = s.token[turn];
            EpSum sum;
            ep_sum_clear(sum);
            EP_SHORT for (ep_u32 first = 0; first < parts; first += EP_LOW_WIDTH) {
                int4 v[EP_LOW_WIDTH];
#pragma unroll
                for (ep_u32 i = 0; i < EP_LOW_WIDTH; ++i)
                    if (first + i < parts)
                        v[i] = ep_ld16_put(slots + s.slot[turn * 32 + first + i] * r.w.low_result_bytes +
                                            r.w.low_result_header_bytes + at);
#pragma unroll
                for (ep_u32 i = 0; i < EP_LOW_WIDTH; ++i)
                    if (first + i < parts) ep_sum_add_scaled(sum, s.weight[turn * 32 + first + i], v[i]);
            }
            ep_st16((ep_u8*)a.out + token * a.out_stride + at, ep_sum_round(sum));
        }
        if (checks) ep_low_check_result(r, op, own, s.row[tid], s.token[warp]);
        __syncthreads();
    }
}

namespace ep_low_latency {
/* Profilers, and those who look for kernels in their tables by such names, see it as ep_low_latency::combine. */
__global__ void __launch_bounds__(EP_LOW_THREADS, 1)
    combine(const __grid_constant__ EpRank r, const __grid_constant__ EpLowCombineArgs a) {
    const ep_u64 began = ep_now();
    /* Loads that wait for nothing come first. */
    const EpLowNow now = ep_low_now(r);
    const bool sends = a.phases & EP_LOW_SEND, receives = a.phases & EP_LOW_RECEIVE;
    bool own = true;
    if (sends && threadIdx.x == 0) own = ep_low_take(r, blockIdx.x);
    ep_low_begin(r, a);
    ep_low_bring_windows(r);
    const ep_u64 early = ep_low_early(r, a.window);
    if (ep_low_closed(r, now, a.phases, a.in_flight) || ep_low_crashed(r)) {
        if (sends && threadIdx.x == 0 && own) *ep_low_taken(r, blockIdx.x) = 0;
        return;
    }
    const ep_u64 op = sends ? now.sent + 1 : now.received + 1;
    const bool tries = sends || now.late(op);
    if (tries && !sends && threadIdx.x == 0) own = ep_low_take(r, blockIdx.x);
    __shared__ EpLowBatch sent, summed;
    const EpShareOfRows share = ep_low_share(a.tokens, (ep_u32)(r.w.result_stride / 16), blockIdx.x, gridDim.x);
    if (tries)
        ep_low_return_rows(r, a, sent, op, !sends, own, early, began, [&] {
            if (sends && receives) ep_low_load_tokens(r, a, summed, share, share.first);
        });
    if (receives) {
        __syncthreads();
        ep_low_reduce(r, a, summed, share, sends, op, began);
    }
    const ep_u32 last = ep_low_last_block(r, false);
    if (last == EP_LOW_NOT_LAST) return;
#ifdef EP_TEST
    if (receives && !ep_low_failed(r))
        EP_SHORT for (ep_u32 item = threadIdx.x / 32; item < a.tokens * r.w.ranks; item += EP_LOW_WARPS)
            ep_poison(r, ep_low_own(r) + ep_low_result(r.w, op, item % r.w.ranks, item / r.w.ranks, 0),
                      (ep_u32)(r.w.low_columns * r.w.low_result_bytes));
#endif
    const bool received = ep_low_end(r, now, op, a.phases, tries, false, last != EP_LOW_LAST, began);
    ep_u64* counters = (ep_u64*)a.counters + 2 * r.w.ranks;
    const ep_u32 part = a.kind == EP_LOW_PER_RANK ? 0 : r.w.ranks;
    EP_SHORT for (ep_u32 rank = threadIdx.x; rank < r.w.ranks; rank += EP_LOW_THREADS) {
        if (sends) ep_low_add(counters + rank, ((const ep_u32*)a.records)[part + rank]);
        if (received) ep_low_add(counters + r.w.ranks + rank, ep_low_owed(r)[rank]);
    }
    if (received && threadIdx.x == 0) ep_low_add(counters + 2 * r.w.ranks + r.w.local_experts, 1);
}
} // namespace ep_low_latency
