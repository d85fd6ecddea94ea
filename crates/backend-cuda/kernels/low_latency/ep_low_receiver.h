/*
 * ep_low_receiver.h: what the receiving half of the low-latency dispatch has of its rows, however these come: their places, and what becomes of them.
 */
#ifndef EP_LOW_RECEIVER_H
#define EP_LOW_RECEIVER_H
#include "ep_low_arrivals.h"
#include "ep_low_rows.h"

/* Shared memory of the receiving half. */
struct EpLowReceiver {
    ep_u64* from;  /* [EP_LOW_WARPS]: where the rows of a batch lie */
    ep_u32* rows;  /* [ranks]: rows of each source */
    ep_u32* first; /* [ranks + 1]: and before it */
    ep_u32* count; /* [local experts]: rows before the batch; of the block that counts all: [ranks, local experts] */
    ep_u32* bits;  /* [local experts]: rows of the batch that go there */
    ep_u32* total; /* [local experts]: rows that come; where rows are packed */
    ep_u32* slot;  /* [local experts + 1]: the first slot of each; last, behind all; likewise */
    ep_u32* of;    /* [EP_LOW_WARPS]: experts of each row of the batch */
    ep_u32* to;    /* [EP_LOW_WARPS, 32]: and their rows */
    /* Where rows come as units: */
    ep_u32* source; /* [EP_LOW_WARPS]: the rank that each row of the batch is of */
    ep_u32 tag;     /* of the operation */
};
EP_DEV EpLowReceiver ep_low_receiver(const EpRank& r, ep_u32 tag) {
    EpLowReceiver s;
    s.tag = tag;
    s.from = (ep_u64*)ep_low_pool(r);
    s.of = (ep_u32*)(s.from + EP_LOW_WARPS);
    s.to = s.of + EP_LOW_WARPS;
    s.source = s.to + EP_LOW_WARPS * 32;
    s.rows = s.source + EP_LOW_WARPS;
    s.first = s.rows + r.w.ranks;
    s.count = s.first + r.w.ranks + 1;
    s.bits = s.count + r.w.local_experts;
    const ep_u32 all = r.w.ranks * r.w.local_experts, two = 2 * r.w.local_experts;
    s.total = s.count + (all > two ? all : two);
    s.slot = s.total + r.w.local_experts;
    return s;
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

/* Whether it is told of each received row what it is; whether a row lies once, in order of sources, and not for each of its experts; and whether
   those of an expert lie side by side (ep_low_packed.h). */
EP_DEV bool ep_low_tells_rows(const EpLowDispatchArgs& a) { return a.first_of != 0; }
EP_DEV bool ep_low_packs(const EpLowDispatchArgs& a) { return a.alignment != 0; }
EP_DEV bool ep_low_by_source(const EpLowDispatchArgs& a) { return ep_low_tells_rows(a) && !ep_low_packs(a); }

/* The number of row `position` of source among all that come, and its only place, where rows lie by source: rows[ranks] is known. */
EP_DEV ep_u32 ep_low_place_by_source(const EpLowReceiver& s, ep_u32 source, ep_u32 position) {
    EP_SHORT for (ep_u32 before = 0; before < source; ++before) position += s.rows[before];
    return position;
}

/* By source: whether no more rows come than may, where rows[ranks] is known; tells if not. By all threads. */
EP_DEV bool ep_low_fits_by_source(const EpRank& r, const EpLowDispatchArgs& a, const EpLowReceiver& s, ep_u64 op) {
    const ep_u32 rows = ep_low_place_by_source(s, r.w.ranks, 0);
    if (rows <= a.room) return true;
    if (threadIdx.x == 0) ep_low_mismatch(r, op, r.me, EP_LOW_FIELD_ROWS_IN_ALL, a.room, rows);
    return false;
}

/* Which of the lanes with a choice of an own expert have a place for the row: by source the first alone. By a warp. */
EP_DEV bool ep_low_has_place(const EpLowDispatchArgs& a, bool here) {
    const ep_u32 votes = __ballot_sync(EP_FULL, here);
    return here && (!ep_low_by_source(a) || threadIdx.x % 32 + 1 == __ffs((int)votes));
}

EP_DEV void ep_low_tell_choice(const EpLowDispatchArgs& a, ep_u64 at, ep_i64 expert, float weight) {
    ((ep_i64*)a.out_idx)[at] = expert;
    if (a.out_idx_too != 0) ((ep_i64*)a.out_idx_too)[at] = expert;
    ((float*)a.out_weights)[at] = weight;
}

/* Tells the user of row `row` of all that come. By a warp, whose lanes have the choices, and, where rows are packed, their slots. */
EP_DEV void ep_low_tell_row(const EpRank& r, const EpLowDispatchArgs& a, ep_u32 row, const EpLowRead& read, ep_i32 slot) {
    const ep_u32 lane = threadIdx.x % 32, expert = (ep_u32)read.choice.expert - r.me * r.w.local_experts;
    const bool here = expert < r.w.local_experts;
    if (lane == 0) {
        ((ep_i32*)a.source_rank)[row] = (ep_i32)read.source;
        ((ep_i32*)a.source_token)[row] = (ep_i32)read.token;
    }
    if (lane >= r.w.topk) return;
    const ep_u64 at = (ep_u64)row * r.w.topk + lane;
    ep_low_tell_choice(a, at, here ? (ep_i64)expert : -1, here ? read.choice.weight : 0.0f);
    if (!ep_low_packs(a)) return;
    ((ep_i32*)a.slots)[at] = slot;
    if (slot >= 0) ((float*)a.slot_weights)[slot] = read.choice.weight;
}

/* Keeps what the combine and the user must know of a row. By a warp. */
EP_DEV void ep_low_keep_row(const EpRank& r, const EpLowDispatchArgs& a, const EpLowReceiver& s, ep_u32 position, const EpLowRead& read,
                            ep_i32 place) {
    const ep_u32 lane = threadIdx.x % 32;
    const bool tells = ep_low_tells_rows(a);
    EpLowRow* record = (EpLowRow*)ep_low_record(r, a.records, read.source, position);
    if (lane == 0) *record = EpLowRow{read.token, 0};
    /* By source the row's result comes back as it is, and packed those of its choices are summed as they are. */
    if (lane < r.w.topk) ((EpLowPick*)(record + 1))[lane] = EpLowPick{place, tells ? 1.0f : read.choice.weight};
    if (!tells && place >= 0) ((ep_i32*)a.source_token)[place] = (ep_i32)read.token;
    if (tells) ep_low_tell_row(r, a, ep_low_place_by_source(s, read.source, position), read, place);
}

/* Where it is told of received rows: tells how many of each rank come, and of what lies behind all of them that it has no choices; by source it
   becomes zeros. Rows may still be under way. By all threads of all blocks that move rows. */
EP_DEV void ep_low_fill_spare(const EpRank& r, const EpLowDispatchArgs& a, const EpLowReceiver& s, ep_u32 blocks) {
    const ep_u32 all = ep_low_place_by_source(s, r.w.ranks, 0), room = r.w.ranks * r.w.max_tokens, step = blocks * EP_LOW_THREADS;
    const ep_u32 thread = blockIdx.x * EP_LOW_THREADS + threadIdx.x;
    if (thread <= r.w.ranks) ((ep_i32*)a.first_of)[thread] = (ep_i32)ep_low_place_by_source(s, thread, 0);
    EP_SHORT for (ep_u32 choice = all * r.w.topk + thread; choice < room * r.w.topk; choice += step) {
        ep_low_tell_choice(a, choice, -1, 0.0f);
        if (ep_low_packs(a)) ((ep_i32*)a.slots)[choice] = -1;
    }
    if (ep_low_packs(a)) return;
    const ep_u32 columns = (ep_u32)((a.scales != 0 ? r.w.scales_offset : r.w.payload_stride) / 16);
    EP_SHORT for (ep_u32 unit = thread; unit < (room - all) * columns; unit += step)
        ep_st16((ep_u8*)a.out + (all + unit / columns) * a.out_stride + unit % columns * 16, make_int4(0, 0, 0, 0));
    if (a.scales != 0) {
        const ep_u32 words = ((ep_u32)r.w.scales_bytes + 3) / 4;
        EP_SHORT for (ep_u32 word = thread; word < (room - all) * words; word += step)
            *(int*)((ep_u8*)a.scales + (all + word / words) * a.scales_row + word % words * a.scales_word) = 0;
    }
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

/* Tells the user how many rows each expert has got, and keeps what the combine has to know of each source: from rows[ranks] and
   count[ranks, local experts]. */
EP_DEV void ep_low_tell_counts(const EpRank& r, const EpLowDispatchArgs& a, const EpLowReceiver& s) {
    const ep_u32 tid = threadIdx.x, ranks = r.w.ranks, local = r.w.local_experts;
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

/* Adds what ep_low_tell_counts has told to what is counted for the user. By all threads of a block: of the one that found it, or, after a fence,
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
