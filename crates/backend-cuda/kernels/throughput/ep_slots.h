/*
 * ep_slots.h: where the choices of received rows stand by expert (ep_core::plan::Expansion), found by all warps of a launch. A warp serves
 * a share of the rows, side by side; a block those of its warps.
 *
 *   unpack   where rows were placed, their choices lie in headers: a warp unpacks those of its share
 *   first    the first slot of each local expert: a prefix sum of the choices that the ranks told each other, aligned
 *   count    choices of each expert in each share; a block tells the blocks behind it, each count in a word with the dispatch's number
 *   place    behind the choices of all shares before, in order of row and choice: a match among 32 choices at a time
 *   waits    for blocks of lower index, which were started before; not longer than the deadline
 *
 * Tables of local experts lie in shared memory, or in `tables` where they are too large for it.
 */
#ifndef EP_SLOTS_H
#define EP_SLOTS_H
#include "ep_unpack.h"

/* A warp's share. */
struct EpShareOf {
    ep_u32 begin, end; /* rows */
    ep_u32 number, shares;
};

EP_DEV EpShareOf ep_share_of(ep_u32 rows) {
    EpShareOf s;
    s.shares = ep_blocks() * (ep_threads() / 32);
    s.number = ep_block() * (ep_threads() / 32) + ep_warp();
    s.begin = ep_channel_first(rows, s.shares, s.number);
    s.end = ep_channel_first(rows, s.shares, s.number + 1);
    return s;
}

/* first[e]: the first slot of expert e. By a warp. */
EP_DEV void ep_first_slots(const EpRank& r, const EpSlotsArgs& a, ep_u32* first) {
    const ep_u32 lane = ep_warp_lane(), local = r.w.local_experts;
    ep_u32 before = 0;
    /* Counts are loaded ahead. */
#pragma unroll 4
    for (ep_u32 base = 0; base < local; base += 32) {
        const ep_u32 e = base + lane, choices = e < local ? ((const ep_u32*)a.counts)[e] : 0;
        const ep_u32 slots = (choices + a.alignment - 1) / a.alignment * a.alignment;
        ep_u32 upto = slots;
        for (ep_u32 by = 1; by < 32; by *= 2) {
            const ep_u32 other = __shfl_sync(EP_FULL, upto, lane - by);
            if (lane >= by) upto += other;
        }
        if (e < local) first[e] = before + upto - slots;
        before += __shfl_sync(EP_FULL, upto, 31);
    }
}

/* Slots that the choices take, up to the last expert's alignment. */
EP_DEV ep_u32 ep_slots_taken(const EpRank& r, const EpSlotsArgs& a, const ep_u32* first) {
    const ep_u32 last = r.w.local_experts - 1, choices = ((const ep_u32*)a.counts)[last];
    return first[last] + (choices + a.alignment - 1) / a.alignment * a.alignment;
}

/* Tells the user which slots are whose, where the host is not to know. By a warp. */
EP_DEV void ep_tell_slots(const EpRank& r, const EpSlotsArgs& a, const ep_u32* first) {
    const ep_u32 local = r.w.local_experts;
    for (ep_u32 e = ep_warp_lane(); e <= local; e += 32) {
        ((ep_u32*)a.out_first)[e] = e < local ? first[e] : ep_slots_taken(r, a, first);
        if (e < local) ((ep_u32*)a.out_counts)[e] = ((const ep_u32*)a.counts)[e];
    }
}

/* Unpacks the rows of a share, where they were placed. By a warp. */
EP_DEV void ep_unpack_share(const EpRank& r, const EpSlotsArgs& a, const EpShareOf& s) {
    if (a.unpack.base == EP_NO_BASE) return;
    ep_unpack_rows(r, a.unpack, s.begin, s.end, ep_warp_lane(), 32);
    ep_warp_meet();
}

/* Rows that did not come, but have room, stand nowhere. By all threads of all blocks. */
EP_DEV void ep_clear_spare_rows(const EpRank& r, const EpSlotsArgs& a, ep_u32 received) {
    const ep_u32 number = ep_block() * ep_threads() + ep_thread(), threads = ep_blocks() * ep_threads();
    if (a.unpack.base != EP_NO_BASE) ep_unpack_rows(r, a.unpack, received, a.rows, number, threads);
    if (ep_planted(r, EP_PLANT_SPARE_SLOTS_LEFT)) return;
    const ep_u64 end = (ep_u64)a.rows * r.w.topk;
    for (ep_u64 at = (ep_u64)received * r.w.topk + number; at < end; at += threads) ((ep_u32*)a.slots)[at] = EP_FULL;
}

/* Slots have no weights until their rows bring some. By all threads of all blocks. */
EP_DEV void ep_clear_weights(const EpSlotsArgs& a) {
    if (a.out_weights == 0) return;
    for (ep_u64 at = (ep_u64)ep_block() * ep_threads() + ep_thread(); at < a.room; at += (ep_u64)ep_blocks() * ep_threads())
        ((float*)a.out_weights)[at] = 0.0f;
}

/* The source of a row. */
EP_DEV ep_u32 ep_source_of(const EpRank& r, const EpSlotsArgs& a, ep_u32 row) {
    ep_u32 source = 0;
    while (source + 1 < r.w.ranks && ((const ep_u32*)a.first_of)[source + 1] <= row) ++source;
    return source;
}

/* Counts the choices of a share by expert: counts is zero. By a warp. */
EP_DEV void ep_count_choices(const EpRank& r, const EpSlotsArgs& a, const EpShareOf& s, ep_u32* counts) {
    const ep_u64 end = (ep_u64)s.end * r.w.topk;
    for (ep_u64 at = (ep_u64)s.begin * r.w.topk + ep_warp_lane(); at < end; at += 32) {
        const ep_i64 expert = ((const ep_i64*)a.topk_idx)[at];
        if (expert >= 0 && expert < (ep_i64)r.w.local_experts) {
            atomicAdd(counts + expert, 1u);
        } else if (expert != -1) {
            const ep_u32 source = ep_source_of(r, a, (ep_u32)(at / r.w.topk));
            ep_fail_mismatch(r, source, EP_FIELD_LOCAL_EXPERT, r.w.local_experts, (ep_u64)expert + 1);
        }
    }
}

/* What a block has told of an expert: `word`, or what it tells later. */
EP_DEV ep_u32 ep_take_share(const EpRank& r, const ep_u64* at, ep_u64 word, ep_u32 number, ep_u64 began) {
    for (ep_u32 spin = 1;; ++spin, word = ep_ld_relaxed_sys(at)) {
        if ((ep_u32)(word >> 32) == number || ep_planted(r, EP_PLANT_SHARE_EARLY)) return (ep_u32)word;
        if (spin % 64 != 0) continue;
        const ep_u64 waited = ep_now() - began;
        if (ep_failed(r)) return 0;
        if (waited > r.allowed) {
            /* A block of this rank is nobody's fault but the device's. */
            ep_fail(r, EP_STATUS_GONE, EP_PHASE_ROWS, r.me, r.me, 0, word, (ep_u64)number << 32, waited, 0);
            return 0;
        }
    }
}

/* Words that a thread asks for at a time. */
#define EP_ASKED 8u

/* Adds to before[e] the choices of each expert in the shares of the blocks before this one. By all threads: several serve an expert, each some of the
   blocks. */
EP_DEV void ep_add_shares(const EpRank& r, const EpSlotsArgs& a, ep_u32 number, ep_u64 began, ep_u32* before) {
    const ep_u64* told = (const ep_u64*)a.told;
    const ep_u32 local = r.w.local_experts, wide = local < ep_threads() ? local : ep_threads();
    const ep_u32 groups = ep_threads() / wide, group = ep_thread() / wide;
    for (ep_u32 e = ep_thread() % wide; group < groups && e < local; e += wide) {
        ep_u32 sum = 0;
        for (ep_u32 block = group; block < ep_block(); block += EP_ASKED * groups) {
            ep_u64 words[EP_ASKED];
#pragma unroll
            for (ep_u32 i = 0; i < EP_ASKED; ++i) {
                const ep_u32 one = block + i * groups;
                words[i] = one < ep_block() ? ep_ld_relaxed_sys(told + (ep_u64)one * local + e) : 0;
            }
#pragma unroll
            for (ep_u32 i = 0; i < EP_ASKED; ++i) {
                const ep_u32 one = block + i * groups;
                if (one < ep_block()) sum += ep_take_share(r, told + (ep_u64)one * local + e, words[i], number, began);
            }
        }
        if (sum > 0) atomicAdd(before + e, sum);
    }
}

/* Tables [warps, local], which count the choices of each warp's share, say afterwards where these begin; before [local] is for the work. By all threads;
   false where this rank has failed. */
EP_DEV bool ep_begin_shares(const EpRank& r, const EpSlotsArgs& a, const ep_u32* first, ep_u32* tables, ep_u32* before, ep_u64 began) {
    const ep_u32 local = r.w.local_experts, warps = ep_threads() / 32;
    const ep_u32 number = (ep_u32)((const EpPlan*)r.plan)->op;
    if (ep_planted(r, EP_PLANT_SHARE_EARLY) && ep_block() == 0) ep_be_slow();
    ep_block_meet();
    for (ep_u32 e = ep_thread(); e < local; e += ep_threads()) {
        ep_u32 sum = 0;
        for (ep_u32 warp = 0; warp < warps; ++warp) {
            const ep_u32 choices = tables[(ep_u64)warp * local + e];
            tables[(ep_u64)warp * local + e] = sum;
            sum += choices;
        }
        before[e] = first[e];
        /* The word says all: who sees its number sees the count. */
        *(volatile ep_u64*)((ep_u64*)a.told + (ep_u64)ep_block() * local + e) = (ep_u64)number << 32 | sum;
    }
    ep_block_meet();
    ep_add_shares(r, a, number, began, before);
    const bool failed = ep_block_any(ep_failed(r));
    ep_u32* own = tables + (ep_u64)ep_warp() * local;
    for (ep_u32 e = ep_warp_lane(); e < local; e += 32) own[e] += before[e];
    ep_warp_meet();
    return !failed;
}

/* The first slots of a source. By a warp. */
EP_DEV void ep_store_offsets(const EpRank& r, const EpSlotsArgs& a, ep_u32 source, const ep_u32* next) {
    const ep_u32 local = r.w.local_experts;
    for (ep_u32 e = ep_warp_lane(); e < local; e += 32) ((ep_u32*)a.offsets)[(ep_u64)source * local + e] = next[e];
}

/* Gives a tile of up to 32 choices their slots. False for a lane whose expert has more choices than the ranks told each other: there is no room
   for them. By a warp. */
EP_DEV bool ep_place_choices(const EpRank& r, const EpSlotsArgs& a, ep_u64 at, ep_u64 end, const ep_u32* first, ep_u32* next) {
    const ep_u32 lane = ep_warp_lane();
    const bool mine = at + lane < end;
    const ep_i64 expert = mine ? ((const ep_i64*)a.topk_idx)[at + lane] : -1;
    const ep_u32 e = expert < 0 ? EP_FULL : (ep_u32)expert;
    const ep_u32 same = __match_any_sync(EP_FULL, e), before = __popc(same & ((1u << lane) - 1));
    ep_u32 slot = EP_FULL;
    bool fits = true;
    if (e != EP_FULL) {
        slot = next[e] + before;
        fits = slot < first[e] + ((const ep_u32*)a.counts)[e];
    }
    ep_warp_meet();
    if (e != EP_FULL && before == 0) next[e] += __popc(same);
    ep_warp_meet();
    if (mine) ((ep_u32*)a.slots)[at + lane] = fits ? slot : EP_FULL;
    return fits;
}

/* Finds the slots of a share's choices, and the first ones of the sources that begin in it: next says where the share's choices begin. By a warp;
   false where there are others than the ranks told each other. */
EP_DEV bool ep_place_share(const EpRank& r, const EpSlotsArgs& a, const EpShareOf& s, const ep_u32* first, ep_u32* next) {
    const ep_u32* first_of = (const ep_u32*)a.first_of;
    const ep_u32 topk = r.w.topk, ranks = r.w.ranks;
    const bool last = s.number + 1 == s.shares;
    const ep_u64 end = (ep_u64)s.end * topk;
    ep_u64 at = (ep_u64)s.begin * topk;
    ep_u32 source = 0;
    bool fits = true;
    while (source < ranks && first_of[source] < s.begin) ++source;
    for (;;) {
        for (; source < ranks && (ep_u64)first_of[source] * topk == at && (at < end || last); ++source)
            ep_store_offsets(r, a, source, next);
        if (at == end) break;
        const ep_u64 behind = source < ranks ? (ep_u64)first_of[source] * topk : end, stop = behind < end ? behind : end;
        for (; at < stop; at += 32) fits &= ep_place_choices(r, a, at, stop, first, next);
        at = stop;
    }
    ep_u32 wrong = EP_FULL;
    if (last)
        for (ep_u32 e = ep_warp_lane(); e < r.w.local_experts; e += 32)
            if (next[e] != first[e] + ((const ep_u32*)a.counts)[e]) wrong = e;
    if (wrong != EP_FULL) ep_fail_mismatch(r, r.me, EP_FIELD_CHOICES, ((const ep_u32*)a.counts)[wrong], next[wrong] - first[wrong]);
    return ep_warp_all(fits && wrong == EP_FULL);
}

#endif
