/*
 * ep_low_receive.h: the receiving half of the low-latency dispatch: rows from slots to their experts, and what is counted of them.
 */
#ifndef EP_LOW_RECEIVE_H
#define EP_LOW_RECEIVE_H
#include "ep_low_arrivals.h"
#include "ep_low_rows.h"

/* Shared memory of the receiving half. */
struct EpLowReceiver {
    ep_u64* from;  /* [EP_LOW_WARPS]: where the rows of a batch lie */
    ep_u32* rows;  /* [ranks]: rows of each source */
    ep_u32* first; /* [ranks + 1]: and before it */
    ep_u32* count; /* [local experts]: rows before the batch; of the block that counts all: [ranks, local experts] */
    ep_u32* bits;  /* [local experts]: rows of the batch that go there */
    ep_u32* of;    /* [EP_LOW_WARPS]: experts of each row of the batch */
    ep_u32* to;    /* [EP_LOW_WARPS, 32]: and their rows */
};
EP_DEV EpLowReceiver ep_low_receiver(const EpRank& r) {
    EpLowReceiver s;
    s.from = (ep_u64*)ep_low_pool(r);
    s.of = (ep_u32*)(s.from + EP_LOW_WARPS);
    s.to = s.of + EP_LOW_WARPS;
    s.rows = s.to + EP_LOW_WARPS * 32;
    s.first = s.rows + r.w.ranks;
    s.count = s.first + r.w.ranks + 1;
    s.bits = s.count + r.w.local_experts;
    return s;
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

/* The header of a row. */
EP_DEV const ep_u8* ep_low_header(const EpRank& r, const EpLowReceiver& s, ep_u64 op, ep_u32 row, ep_u32* source) {
    *source = ep_low_source(s.first, row);
    return ep_low_own(r) + ep_low_head(r.w, op, *source, row - s.first[*source]);
}

/* What a warp reads of a row's header. */
struct EpLowRead {
    ep_u32 source;
    ep_u32 token;
    ep_u32 least; /* the least token that it may be of */
    ep_u32 from;  /* the source that it says it is of */
    ep_u32 op;
    EpChoice choice;
};

/* Whether a row is the one due: of this operation, its source, and a token from `least` on. */
EP_DEV bool ep_low_is_due(const EpRank& r, ep_u64 op, const EpLowRead& row) {
    return row.op == ep_low_stamp(r.generation, op) && row.from == row.source && row.token >= row.least && row.token < r.w.max_tokens;
}
/* Says why it is not. */
EP_RARE void ep_low_refuse_row(const EpRank& r, ep_u64 op, EpLowRead row) {
    ep_u32 field = EP_LOW_FIELD_TOKENS, mine = r.w.max_tokens, theirs = row.token;
    if (row.op != ep_low_stamp(r.generation, op)) return ep_low_refuse_stamp(r, op, row.source, row.op);
    if (row.from != row.source) {
        field = EP_LOW_FIELD_ROW_SOURCE;
        mine = row.source;
        theirs = row.from;
    } else if (row.token < row.least) {
        field = EP_LOW_FIELD_LEAST_TOKEN;
        mine = row.least;
    }
    ep_low_mismatch(r, op, row.source, field, mine, theirs);
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
        s.from[turn] = (ep_u64)ep_low_own(r) + ep_low_row(r.w, op, read.source, read.token) + r.w.header_bytes;
    }
    return here ? (ep_i32)place : -1;
}

/* Keeps what the combine and the user must know of a row. By a warp. */
EP_DEV void ep_low_keep_row(const EpRank& r, const EpLowDispatchArgs& a, const EpLowReceiver& s, ep_u32 row, const EpLowRead& read,
                            ep_i32 place) {
    const ep_u32 lane = threadIdx.x % 32;
    EpLowRow* record = (EpLowRow*)ep_low_record(r, a.records, read.source, row - s.first[read.source]);
    if (lane == 0) *record = EpLowRow{read.token, 0};
    if (lane < r.w.topk) ((EpLowPick*)(record + 1))[lane] = EpLowPick{place, read.choice.weight};
    if (place >= 0) ((ep_i32*)a.source_token)[place] = (ep_i32)read.token;
}

/* Stores 16 bytes of the scales of a row of the batch, from byte `at` of them on, to each of its experts. */
EP_DEV void ep_low_store_scales(const EpRank& r, const EpLowDispatchArgs& a, const EpLowReceiver& s, ep_u32 turn, ep_u32 at, int4 v) {
    const ep_u32 experts = s.of[turn], wide = r.w.ranks * r.w.max_tokens, first = at / 4;
    const ep_u32 words = ((ep_u32)r.w.scales_bytes + 3) / 4;
    EP_SHORT for (ep_u32 i = 0; i < experts; ++i) {
        const ep_u32 place = s.to[turn * 32 + i];
        ep_u8* to = (ep_u8*)a.scales + place / wide * a.scales_expert + place % wide * a.scales_row + first * a.scales_word;
        *(int*)to = v.x;
        if (first + 1 < words) *(int*)(to + a.scales_word) = v.y;
        if (first + 2 < words) *(int*)(to + 2 * a.scales_word) = v.z;
        if (first + 3 < words) *(int*)(to + 3 * a.scales_word) = v.w;
    }
}

/* Stores 16 bytes of a row of the batch to each of its experts. */
EP_DEV void ep_low_store(const EpRank& r, const EpLowDispatchArgs& a, const EpLowReceiver& s, ep_u32 turn, ep_u32 at, int4 v) {
    if (a.scales != 0 && at >= (ep_u32)r.w.scales_offset) {
        ep_low_store_scales(r, a, s, turn, at - (ep_u32)r.w.scales_offset, v);
        return;
    }
    const ep_u32 experts = s.of[turn];
    EP_SHORT for (ep_u32 i = 0; i < experts; ++i) ep_st16((ep_u8*)a.out + s.to[turn * 32 + i] * a.out_stride + at, v);
}

/* Units of 16 bytes that a thread has in flight. */
#define EP_LOW_HELD 4u

/* Copies units begin .. end of a batch to their experts. */
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
        const ep_i32 place = ep_low_place_rows(r, s, op, read, there);
        if (waits) there = ep_low_await_row(r, op, read.source, read.token, began);
        /* All rows of the batch are there, or none is copied. */
        if (!__syncthreads_and(there || row >= share.last)) return;
        int4 own = make_int4(0, 0, 0, 0);
        if (waits) own = ep_ld16_put((const ep_u8*)s.from[warp] - r.w.header_bytes);
        ep_low_copy(r, a, s, columns, begin, end);
        /* The block with a row's beginning keeps it. */
        if (row < share.last && (ep_u64)row * columns >= share.begin) ep_low_keep_row(r, a, s, row, read, place);
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

/* Counts all rows: what the user is told, and what the combine has to know of each source. */
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
