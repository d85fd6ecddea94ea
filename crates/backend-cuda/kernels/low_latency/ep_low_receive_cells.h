/*
 * ep_low_receive_cells.h: the receiving half of the low-latency dispatch where there are several nodes: rows from slots to their experts
 * (ep_low_send_cells.h). Slots and headers are read after the acquire of their cell and a barrier, by loads that are coherent.
 */
#ifndef EP_LOW_RECEIVE_CELLS_H
#define EP_LOW_RECEIVE_CELLS_H
#include "ep_low_packed.h"

/* The header of a row. */
EP_DEV const ep_u8* ep_low_header(const EpRank& r, const EpLowReceiver& s, ep_u64 op, ep_u32 row, ep_u32* source) {
    *source = ep_low_source(s.first, row);
    return ep_low_own(r) + ep_low_head(r.w, op, *source, row - s.first[*source]);
}

/* Calls `each` with the indices of the local experts of a row with this header. */
template <class F> EP_DEV void ep_low_each_expert(const EpRank& r, const ep_u8* header, F each) {
    const ep_u32 low = r.me * r.w.local_experts, experts = r.w.local_experts;
    EP_SHORT for (ep_u32 base = 0; base < r.w.topk; base += 8) {
        /* Padding names no expert. */
        int4 two[4];
#pragma unroll
        for (ep_u32 i = 0; i < 4; ++i)
            two[i] = base + 2 * i < r.w.topk ? ep_ld16_put(header + sizeof(EpRowHeader) + (base + 2 * i) * sizeof(EpChoice))
                                             : make_int4(-1, 0, -1, 0);
#pragma unroll
        for (ep_u32 i = 0; i < 4; ++i) {
            if ((ep_u32)two[i].x - low < experts) each((ep_u32)two[i].x - low);
            if ((ep_u32)two[i].z - low < experts) each((ep_u32)two[i].z - low);
        }
    }
}

/* A choice in a header. */
EP_DEV EpChoice ep_low_choice(const ep_u8* at) {
    const ep_u64 both = ep_ld_relaxed_sys(at);
    return EpChoice{(ep_i32)both, ep_float_of((ep_u32)(both >> 32))};
}

/* Reads the header of a row, by a warp. */
EP_DEV EpLowRead ep_low_read_header(const EpRank& r, const EpLowReceiver& s, ep_u64 op, ep_u32 row) {
    const ep_u32 lane = threadIdx.x % 32;
    EpLowRead read;
    const ep_u8* header = ep_low_header(r, s, op, row, &read.source);
    read.choice = EpChoice{-1, 0.0f};
    if (lane < r.w.topk) read.choice = ep_low_choice(header + sizeof(EpRowHeader) + lane * sizeof(EpChoice));
    const int4 own = ep_ld16_put(header);
    read.least = row == s.first[read.source] ? 0 : (ep_u32)ep_ld16_put(header - r.w.header_bytes).y + 1;
    read.from = (ep_u32)own.x;
    read.token = (ep_u32)own.y;
    read.op = (ep_u32)own.w;
    return read;
}

/* Waits until all sources have said what comes; false after a fault. */
EP_DEV bool ep_low_await_all(const EpRank& r, const EpLowReceiver& s, ep_u64 op, ep_u64 began) {
    bool there = ep_low_is_unmasked(r, op);
    EP_SHORT for (ep_u32 source = threadIdx.x; source < r.w.ranks; source += EP_LOW_THREADS) {
        ep_u32 rows = 0;
        if (ep_low_takes_part(source)) {
            there &= ep_low_await(r, op, EP_LOW_DISPATCH, source, began, &rows);
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

/* The first slot of an expert, where rows are packed. A call, as in ep_low_begin_packed: registers are all needed. */
EP_RARE ep_u32 ep_low_first_slot(const EpRank& r, ep_u32 expert) { return ep_low_receiver(r, 0).slot[expert]; }

/* The warps find the experts of their rows, mark them, and after a barrier take the rows' places there: the place of the lane's choice,
   -1 for a choice of another rank. By all threads of the block; `there`: the warp has a row that is as it must be. */
EP_DEV ep_i32 ep_low_place_rows(const EpRank& r, const EpLowDispatchArgs& a, const EpLowReceiver& s, ep_u64 op, ep_u32 row, const EpLowRead& read,
                                bool there) {
    const ep_u32 lane = threadIdx.x % 32, turn = threadIdx.x / 32, wide = r.w.ranks * r.w.max_tokens;
    const ep_u32 expert = (ep_u32)read.choice.expert - r.me * r.w.local_experts;
    bool here = there && expert < r.w.local_experts;
    if (here) atomicOr(s.bits + expert, 1u << turn);
    __syncthreads();
    ep_u32 place = 0;
    if (ep_low_by_source(a)) {
        here = ep_low_has_place(a, here);
        place = row;
    } else if (here) {
        place = s.count[expert] + __popc(s.bits[expert] & ((1u << turn) - 1));
        if (place >= wide) {
            ep_low_mismatch(r, op, read.source, EP_LOW_FIELD_EXPERT_ROWS, wide, place + 1);
            here = false;
        }
        place += ep_low_packs(a) ? ep_low_first_slot(r, expert) : expert * wide;
    }
    const ep_u32 votes = __ballot_sync(EP_FULL, here);
    if (here) s.to[turn * 32 + __popc(votes & ((1u << lane) - 1))] = place;
    if (lane == 0) {
        s.of[turn] = __popc(votes);
        s.from[turn] = (ep_u64)ep_low_own(r) + ep_low_row(r.w, op, read.source, read.token) + r.w.header_bytes;
    }
    return here ? (ep_i32)place : -1;
}

/* Units of 16 bytes that a thread has in flight. */
#define EP_LOW_HELD 4u

/* Copies units begin .. end of a batch to their experts. By all threads. */
EP_DEV void ep_low_copy(const EpRank& r, const EpLowDispatchArgs& a, const EpLowReceiver& s, ep_u32 columns, ep_u32 begin, ep_u32 end) {
    EP_SHORT for (ep_u32 first = begin + threadIdx.x; first < end; first += EP_LOW_HELD * EP_LOW_THREADS) {
        int4 v[EP_LOW_HELD];
#pragma unroll
        for (ep_u32 i = 0; i < EP_LOW_HELD; ++i) {
            const ep_u32 unit = first + i * EP_LOW_THREADS, turn = unit / columns;
            if (unit < end) v[i] = ep_ld16_put((const ep_u8*)s.from[turn] + (unit - turn * columns) * 16);
        }
#pragma unroll
        for (ep_u32 i = 0; i < EP_LOW_HELD; ++i) {
            const ep_u32 unit = first + i * EP_LOW_THREADS, turn = unit / columns;
            if (unit < end) ep_low_store(r, a, s, turn, (unit - turn * columns) * 16, v[i]);
        }
    }
}

/* Copies this block's share of the rows to their experts: finds their places while they are under way. */
EP_DEV void ep_low_spread(const EpRank& r, const EpLowDispatchArgs& a, const EpLowReceiver& s, ep_u64 op, ep_u32 blocks,
                          ep_u64 began) {
    const ep_u32 tid = threadIdx.x, warp = tid / 32, columns = (ep_u32)(r.w.payload_stride / 16);
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
        if (there) read = ep_low_read_header(r, s, op, row);
        if (base == share.first) {
            ep_u32 source;
            EP_SHORT for (ep_u32 before = tid; before < share.first; before += EP_LOW_THREADS)
                ep_low_each_expert(r, ep_low_header(r, s, op, before, &source), [&](ep_u32 e) { atomicAdd(s.count + e, 1u); });
        }
        if (there && !ep_low_is_due(r, op, read)) {
            there = false;
            if (tid % 32 == 0) ep_low_refuse_row(r, op, read);
        }
        const bool waits = there && tid % 32 == 0;
        const ep_i32 place = ep_low_place_rows(r, a, s, op, row, read, there);
        if (waits) there = ep_low_await_row(r, op, EP_LOW_DISPATCH, read.source, read.token, began);
        /* All rows of the batch are there, or none is copied. */
        if (!__syncthreads_and(there || row >= share.last)) return;
        int4 own = make_int4(0, 0, 0, 0);
        if (waits) own = ep_ld16_put((const ep_u8*)s.from[warp] - r.w.header_bytes);
        ep_low_copy(r, a, s, columns, begin, end);
        /* The block with a row's beginning keeps it. */
        if (row < share.last && (ep_u64)row * columns >= share.begin) ep_low_keep_row(r, a, s, row - s.first[read.source], read, place);
        if (waits) {
            const EpLowRead slot = {read.source, (ep_u32)own.y, read.token, (ep_u32)own.x, (ep_u32)own.w, read.choice};
            if (!ep_low_is_due(r, op, slot)) ep_low_refuse_row(r, op, slot);
        }
        if (base + EP_LOW_WARPS >= share.last) break;
        EP_SHORT for (ep_u32 e = tid; e < r.w.local_experts; e += EP_LOW_THREADS) {
            s.count[e] += __popc(s.bits[e]);
            s.bits[e] = 0;
        }
        __syncthreads();
    }
}

/* Where rows are packed: finds the first slot of each expert, from all headers, and fills the padding; false where there is no room for so many rows.
   By all threads of a block. */
EP_RARE bool ep_low_begin_packed(const EpRank& r, const EpLowDispatchArgs& a, ep_u64 op) {
    const EpLowReceiver s = ep_low_receiver(r, 0);
    EP_SHORT for (ep_u32 e = threadIdx.x; e < r.w.local_experts; e += EP_LOW_THREADS) s.total[e] = 0;
    __syncthreads();
    EP_SHORT for (ep_u32 row = threadIdx.x; row < s.first[r.w.ranks]; row += EP_LOW_THREADS) {
        ep_u32 source;
        ep_low_each_expert(r, ep_low_header(r, s, op, row, &source), [&](ep_u32 e) { atomicAdd(s.total + e, 1u); });
    }
    __syncthreads();
    if (!ep_low_find_slots(r, a, s, op)) return false;
    if (blockIdx.x < a.roles.moves) ep_low_fill_padding(r, a, s, a.roles.moves);
    return true;
}

/* Counts all rows. */
EP_DEV void ep_low_count_all(const EpRank& r, const EpLowDispatchArgs& a, const EpLowReceiver& s, ep_u64 op) {
    const ep_u32 tid = threadIdx.x, ranks = r.w.ranks, local = r.w.local_experts;
    __syncthreads();
    EP_SHORT for (ep_u32 e = tid; e < ranks * local; e += EP_LOW_THREADS) s.count[e] = 0;
    __syncthreads();
    EP_SHORT for (ep_u32 row = tid; row < s.first[ranks]; row += EP_LOW_THREADS) {
        ep_u32 source;
        ep_low_each_expert(r, ep_low_header(r, s, op, row, &source), [&](ep_u32 e) { atomicAdd(s.count + source * local + e, 1u); });
    }
    __syncthreads();
    ep_low_tell_counts(r, a, s);
}

/* Receives all rows. True for the block that has counted them. By all threads. */
EP_DEV bool ep_low_receive(const EpRank& r, const EpLowDispatchArgs& a, const EpLowReceiver& s, ep_u64 op, ep_u64 began) {
    const ep_u32 movers = a.roles.moves;
    if (!ep_low_await_all(r, s, op, began)) return false;
    ep_low_receive_early(r, op);
    if (ep_low_packs(a) && !ep_low_begin_packed(r, a, op)) return false;
    if (ep_low_by_source(a) && !ep_low_fits_by_source(r, a, s, op)) return false;
    if (blockIdx.x < movers && ep_low_tells_rows(a)) ep_low_fill_spare(r, a, s, movers);
    if (blockIdx.x < movers) ep_low_spread(r, a, s, op, movers, began);
    const bool counts = blockIdx.x == a.roles.counts;
    if (counts) ep_low_count_all(r, a, s, op);
    return counts;
}

#ifdef EP_TEST
/* What was read is overwritten. By a warp. */
EP_DEV void ep_low_forget(const EpRank& r, const EpLowReceiver&, ep_u64 op, ep_u32 source, ep_u32 position) {
    const ep_u8* header = ep_low_own(r) + ep_low_head(r.w, op, source, position);
    const ep_u32 token = (ep_u32)ep_ld16_put(header).y;
    __syncwarp();
    ep_poison(r, ep_low_own(r) + ep_low_row(r.w, op, source, token), (ep_u32)r.w.wire_bytes);
    ep_poison(r, header, (ep_u32)r.w.header_bytes);
}
#endif
#endif
