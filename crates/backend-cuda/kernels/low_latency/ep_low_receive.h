/*
 * ep_low_receive.h: the receiving half of the low-latency dispatch: rows to their experts, and what is counted of them.
 */
#ifndef EP_LOW_RECEIVE_H
#define EP_LOW_RECEIVE_H
#ifdef EP_FAR_H
#include "ep_low_take_cells.h"
#else
#include "ep_low_take_units.h"
#endif

/* Waits until all sources have said what comes; false after a fault. */
EP_DEV bool ep_low_await_all(const EpRank& r, const EpLowReceiver& s, ep_u64 op, ep_u64 began) {
    bool there = ep_low_is_unmasked(r, op);
    EP_SHORT for (ep_u32 source = threadIdx.x; source < r.w.ranks; source += EP_LOW_THREADS) {
        ep_u32 rows = 0;
        if (ep_low_takes_part(source)) {
            there &= ep_low_await_count(r, s, op, source, began, &rows);
            if (there && rows > r.w.max_tokens) {
                ep_low_mismatch(r, op, source, EP_LOW_FIELD_ROWS, r.w.max_tokens, rows);
                there = false;
            }
        }
        s.rows[source] = rows;
    }
    if (!__syncthreads_and(there)) return false;
    if (threadIdx.x == 0) {
        ep_u32 sum = 0;
        EP_SHORT for (ep_u32 source = 0; source < r.w.ranks; ++source) {
            s.first[source] = sum;
            sum += s.rows[source];
        }
        s.first[r.w.ranks] = sum;
    }
    __syncthreads();
    return true;
}

/* The warps find the experts of their rows, mark them, and after a barrier take the rows' places there: the place of the lane's choice,
   -1 for a choice of another rank. By all threads of the block; `there`: the warp has a row that is as it must be. */
EP_DEV ep_i32 ep_low_place_rows(const EpRank& r, const EpLowReceiver& s, ep_u64 op, const EpLowRead& read, bool there) {
    const ep_u32 lane = threadIdx.x % 32, turn = threadIdx.x / 32, wide = r.w.ranks * r.w.max_tokens;
    const ep_u32 expert = (ep_u32)read.choice.expert - r.me * r.w.local_experts;
    bool here = there && expert < r.w.local_experts;
    if (here) atomicOr(s.bits + expert, 1u << turn);
    __syncthreads();
    ep_u32 place = 0;
    if (here) {
        place = s.count[expert] + __popc(s.bits[expert] & ((1u << turn) - 1));
        if (place >= wide) {
            ep_low_mismatch(r, op, read.source, EP_LOW_FIELD_EXPERT_ROWS, wide, place + 1);
            here = false;
        }
        place += expert * wide;
    }
    const ep_u32 votes = __ballot_sync(EP_FULL, here);
    if (here) s.to[turn * 32 + __popc(votes & ((1u << lane) - 1))] = place;
    if (lane == 0) {
        s.of[turn] = __popc(votes);
        s.source[turn] = read.source;
        s.from[turn] = ep_low_payload(r, op, read.source, read.token);
    }
    return here ? (ep_i32)place : -1;
}

/* Copies this block's share of the rows to their experts: finds their places while they are under way. */
EP_DEV void ep_low_spread(const EpRank& r, const EpLowDispatchArgs& a, const EpLowReceiver& s, ep_u64 op, ep_u32 blocks,
                          ep_u64 began) {
    const ep_u32 tid = threadIdx.x, warp = tid / 32, columns = ep_low_pieces(r);
    const EpShareOfRows share = ep_low_share(s.first[r.w.ranks], columns, blockIdx.x, blocks);
    EP_SHORT for (ep_u32 e = tid; e < r.w.local_experts; e += EP_LOW_THREADS) s.count[e] = s.bits[e] = 0;
    __syncthreads();
    EP_SHORT for (ep_u32 base = share.first; base < share.last; base += EP_LOW_WARPS) {
        const ep_u64 origin = (ep_u64)base * columns, after = origin + (ep_u64)EP_LOW_WARPS * columns;
        const ep_u32 begin = share.begin > origin ? (ep_u32)(share.begin - origin) : 0;
        const ep_u32 end = (ep_u32)((share.end < after ? share.end : after) - origin);
        const ep_u32 row = base + warp;
        EpLowRead read = {0, 0, 0, 0, 0, {-1, 0.0f}};
        bool there = row < share.last;
        /* What both loads bring is looked at when both are on their way. */
        if (there) read = ep_low_read_header(r, s, op, row, began, &there);
        bool counted = true;
        if (base == share.first)
            EP_SHORT for (ep_u32 before = tid; before < share.first && counted; before += EP_LOW_THREADS)
                counted = ep_low_each_expert(r, s, op, before, began, [&](ep_u32 e) { atomicAdd(s.count + e, 1u); });
        if (there && !ep_low_is_due(r, op, read)) {
            there = false;
            if (tid % 32 == 0) ep_low_refuse_row(r, op, read);
        }
        const bool waits = there && tid % 32 == 0;
        const ep_i32 place = ep_low_place_rows(r, s, op, read, there);
        if (waits) there = ep_low_await_payload(r, op, read, began);
        /* All rows of the batch are there, or come, or none is copied. */
        if (!__syncthreads_and(counted && (there || row >= share.last))) return;
        EpUnit own = ep_unit(0, 0, 0, 0);
        if (waits) own = ep_low_slot_header(r, s, warp);
        ep_low_copy(r, a, s, op, begin, end, began);
        /* The block with a row's beginning keeps it. */
        if (row < share.last && (ep_u64)row * columns >= share.begin) ep_low_keep_row(r, a, s, row, read, place);
        if (waits) ep_low_check_slot(r, op, own, read);
        if (base + EP_LOW_WARPS >= share.last) break;
        EP_SHORT for (ep_u32 e = tid; e < r.w.local_experts; e += EP_LOW_THREADS) {
            s.count[e] += __popc(s.bits[e]);
            s.bits[e] = 0;
        }
        __syncthreads();
    }
}

/* Counts all rows: what the user is told, and what the combine has to know of each source. */
EP_DEV void ep_low_count_all(const EpRank& r, const EpLowDispatchArgs& a, const EpLowReceiver& s, ep_u64 op, ep_u64 began) {
    const ep_u32 tid = threadIdx.x, ranks = r.w.ranks, local = r.w.local_experts;
    __syncthreads();
    EP_SHORT for (ep_u32 e = tid; e < ranks * local; e += EP_LOW_THREADS) s.count[e] = 0;
    __syncthreads();
    EP_SHORT for (ep_u32 row = tid; row < s.first[ranks]; row += EP_LOW_THREADS) {
        ep_u32* counts = s.count + ep_low_source(s.first, row) * local;
        if (!ep_low_each_expert(r, s, op, row, began, [&](ep_u32 e) { atomicAdd(counts + e, 1u); })) break;
    }
    __syncthreads();
    EP_SHORT for (ep_u32 e = tid; e < local; e += EP_LOW_THREADS) {
        ep_u32 sum = 0;
        EP_SHORT for (ep_u32 source = 0; source < ranks; ++source) {
            const ep_u32 rows = s.count[source * local + e];
            ((ep_i64*)a.segments)[(ep_u64)e * ranks + source] = (ep_i64)sum << 32 | rows;
            sum += rows;
        }
        ((ep_i32*)a.expert_counts)[e] = (ep_i32)sum;
    }
    /* A warp a source, and not those that are busy with experts. */
    EP_SHORT for (ep_u32 source = EP_LOW_WARPS - 1 - tid / 32; source < ranks; source += EP_LOW_WARPS) {
        ep_u32 sum = 0;
        EP_SHORT for (ep_u32 e = tid % 32; e < local; e += 32) sum += s.count[source * local + e];
        sum = __reduce_add_sync(EP_FULL, sum);
        if (tid % 32 != 0) continue;
        ((ep_u32*)a.records)[source] = s.rows[source];
        ((ep_u32*)a.records)[ranks + source] = sum;
    }
}

/* Adds what ep_low_count_all has found to what is counted for the user. By all threads of a block: of the one that found it, or, after a fence,
   of the last block, which takes back (`sign` -1) what a launch has counted that failed. */
EP_DEV void ep_low_tally(const EpRank& r, const EpLowDispatchArgs& a, ep_i32 sign) {
    const ep_u32 tid = threadIdx.x, ranks = r.w.ranks, local = r.w.local_experts;
    ep_u64* counters = (ep_u64*)a.counters;
    EP_SHORT for (ep_u32 e = tid; e < local; e += EP_LOW_THREADS) {
        const ep_i32 rows = sign * __ldcg((const ep_i32*)a.expert_counts + e);
        ep_low_add(counters + 4 * ranks + e, (ep_u64)(ep_i64)rows);
        if (a.stats != 0) atomicAdd((ep_i32*)a.stats + e, rows);
    }
    EP_SHORT for (ep_u32 source = tid; source < ranks; source += EP_LOW_THREADS)
        ep_low_add(counters + ranks + source, (ep_u64)((ep_i64)sign * __ldcg((const ep_u32*)a.records + source)));
    if (tid == 0) ep_low_add(counters + 4 * ranks + local, (ep_u64)(ep_i64)sign);
}
EP_RARE void ep_low_untally(const EpRank& r, const EpLowDispatchArgs& a) {
    ep_fence_device();
    ep_low_tally(r, a, -1);
}
#endif
