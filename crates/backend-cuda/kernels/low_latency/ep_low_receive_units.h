/*
 * ep_low_receive_units.h: the receiving half of the low-latency dispatch where rows come as units (ep_low_send_units.h): each thread polls the units
 * that it needs, and copies what it has polled. Nothing else says that a row is there.
 *
 * A row's place is the number of rows that its expert gets from the sources before, which their counts tell, and its own number, which its header
 * tells. So a block looks at counts and at the headers of its own rows at once, and at those of no others.
 */
#ifndef EP_LOW_RECEIVE_UNITS_H
#define EP_LOW_RECEIVE_UNITS_H
#include "ep_low_early.h"
#include "ep_low_packed.h"
#include "ep_low_units.h"

/* Waits until source has said how many rows each expert gets, as far as unit `at` of that says; false after a fault. By one thread. */
EP_DEV bool ep_low_await_counts(const EpRank& r, const EpLowReceiver& s, ep_u64 op, ep_u32 source, ep_u32 at, ep_u64 began) {
    const ep_u8* unit = ep_low_own(r) + ep_low_unit_counts(r.w, op, source) + at * EP_UNIT_BYTES;
    ep_u32 data[3];
    const bool come = ep_poll_unit(unit, s.tag, data);
    if (!ep_low_await_unit(r, op, EP_LOW_DISPATCH, source, unit, s.tag, began, come, data)) return false;
#pragma unroll
    for (ep_u32 i = 0; i < 3; ++i) {
        const ep_u32 expert = 3 * at + i;
        if (expert >= r.w.local_experts) break;
        if (data[i] > r.w.max_tokens) {
            ep_low_mismatch(r, op, source, EP_LOW_FIELD_EXPERT_ROWS, r.w.max_tokens, data[i]);
            return false;
        }
        s.count[source * r.w.local_experts + expert] = data[i];
    }
    return true;
}

/* A row that a warp takes: its source, its position among that one's, and what a lane has of its header: lane 0 the row, the others a choice. */
struct EpLowItem {
    ep_u32 source;
    ep_u32 position;
    ep_u32 data[3];
    bool come;
};
EP_DEV const ep_u8* ep_low_item_header(const EpRank& r, ep_u64 op, const EpLowItem& item) {
    return ep_low_own(r) + ep_low_unit_header(r.w, op, item.source, item.position) + threadIdx.x % 32 * EP_UNIT_BYTES;
}
/* Looks at the header of a row, whether there is such a row or not; rows are numbered position by position. A token has at most 32 choices: the last
   one is looked at apart. */
EP_DEV EpLowItem ep_low_look_for(const EpRank& r, const EpLowReceiver& s, ep_u64 op, ep_u32 number) {
    EpLowItem item = {number % r.w.ranks, number / r.w.ranks, {0, 0, 0}, true};
    if (threadIdx.x % 32 <= r.w.topk && item.position < r.w.max_tokens && ep_low_takes_part(item.source))
        item.come = ep_poll_unit(ep_low_item_header(r, op, item), s.tag, item.data);
    return item;
}

/* The place of a choice of a row from source: of its row of `expert`, an own one, number `index` of that source's. */
EP_DEV ep_u32 ep_low_place(const EpRank& r, const EpLowDispatchArgs& a, const EpLowReceiver& s, ep_u32 source, ep_u32 expert, ep_u32 index) {
    ep_u32 place = (ep_low_packs(a) ? s.slot[expert] : expert * r.w.ranks * r.w.max_tokens) + index;
    if (ep_planted(r, EP_PLANT_SLOT_OFF_BY_ONE) && ep_low_packs(a) && place > 0) --place;
    EP_SHORT for (ep_u32 before = 0; before < source; ++before) place += s.count[before * r.w.local_experts + expert];
    return place;
}

/* Takes a row that there is: waits for its header, finds its places, and keeps what must be known of it if it is the block that `keeps` it. False
   after a fault. By a warp. */
EP_DEV bool ep_low_take_row(const EpRank& r, const EpLowDispatchArgs& a, const EpLowReceiver& s, ep_u64 op, EpLowItem item, bool keeps,
                            ep_u64 began) {
    const ep_u32 lane = threadIdx.x % 32, turn = threadIdx.x / 32, source = item.source;
    bool there = ep_low_await_unit(r, op, EP_LOW_DISPATCH, source, ep_low_item_header(r, op, item), s.tag, began, item.come, item.data);
    /* Of 32 choices the last. */
    ep_u32 last[3] = {EP_FULL, 0, 0};
    if (r.w.topk == 32 && lane == 31 && there) {
        const ep_u8* at = ep_low_item_header(r, op, item) + EP_UNIT_BYTES;
        const bool come = ep_poll_unit(at, s.tag, last);
        there = ep_low_await_unit(r, op, EP_LOW_DISPATCH, source, at, s.tag, began, come, last);
    }
    if (!__all_sync(EP_FULL, there)) return false;
    EpLowRead read;
    read.source = source;
    read.from = __shfl_sync(EP_FULL, item.data[0], 0);
    read.token = __shfl_sync(EP_FULL, item.data[1], 0);
    read.op = __shfl_sync(EP_FULL, item.data[2], 0);
    read.least = 0;
    if (!ep_low_is_due(r, op, read)) {
        if (lane == 0) ep_low_refuse_row(r, op, read);
        return false;
    }
    /* A lane has the choice of the same number from the next one. */
#pragma unroll
    for (ep_u32 i = 0; i < 3; ++i) {
        const ep_u32 next = __shfl_sync(EP_FULL, item.data[i], (lane + 1) % 32);
        item.data[i] = lane == 31 ? last[i] : next;
    }
    read.choice = EpChoice{(ep_i32)item.data[0], ep_float_of(item.data[1])};
    const ep_u32 expert = item.data[0] - r.me * r.w.local_experts;
    bool here = lane < r.w.topk && expert < r.w.local_experts;
    if (here && item.data[2] >= s.count[source * r.w.local_experts + expert]) {
        ep_low_mismatch(r, op, source, EP_LOW_FIELD_EXPERT_ROWS, s.count[source * r.w.local_experts + expert], item.data[2] + 1);
        here = false;
    }
    here = ep_low_has_place(a, here);
    const ep_u32 place = !here                 ? 0
                         : ep_low_by_source(a) ? ep_low_place_by_source(s, source, item.position)
                                               : ep_low_place(r, a, s, source, expert, item.data[2]);
    const ep_u32 votes = __ballot_sync(EP_FULL, here);
    if (here) s.to[turn * 32 + __popc(votes & ((1u << lane) - 1))] = place;
    if (lane == 0) {
        s.of[turn] = __popc(votes);
        s.source[turn] = source;
        s.from[turn] = (ep_u64)ep_low_own(r) + ep_low_unit_row(r.w, op, source, read.token);
    }
    if (keeps) ep_low_keep_row(r, a, s, item.position, read, here ? (ep_i32)place : -1);
    return true;
}

/* Pieces of a row. */
EP_DEV ep_u32 ep_low_pieces(const EpRank& r) { return ep_low_pieces_of(r.w.payload_bytes); }

/* A unit of a row of the batch. */
EP_DEV const ep_u8* ep_low_unit(const EpLowReceiver& s, ep_u32 turn, ep_u32 unit) { return (const ep_u8*)s.from[turn] + unit * EP_UNIT_BYTES; }

/* Copies pieces begin .. end of a batch to their experts, as they come; false after a fault. By all threads. */
EP_DEV bool ep_low_copy(const EpRank& r, const EpLowDispatchArgs& a, const EpLowReceiver& s, ep_u64 op, ep_u32 begin, ep_u32 end, ep_u64 began) {
    const ep_u32 wide = 4 * ep_low_pieces(r), units = (ep_u32)ep_unit_count(r.w.payload_bytes), lane = threadIdx.x % 32, quarter = lane % 4;
    bool there = true;
    /* A warp goes through this together: its lanes exchange words. */
    EP_SHORT for (ep_u32 first = 4 * begin + threadIdx.x - lane; first < 4 * end; first += EP_LOW_HELD * EP_LOW_THREADS) {
        ep_u32 data[EP_LOW_HELD][3];
        bool come[EP_LOW_HELD];
#pragma unroll
        for (ep_u32 i = 0; i < EP_LOW_HELD; ++i) {
            const ep_u32 item = first + i * EP_LOW_THREADS + lane, turn = item / wide, unit = item - turn * wide;
            data[i][0] = data[i][1] = data[i][2] = 0;
            come[i] = item >= 4 * end || unit >= units || s.of[turn] == 0 || ep_poll_unit(ep_low_unit(s, turn, unit), s.tag, data[i]);
        }
#pragma unroll
        for (ep_u32 i = 0; i < EP_LOW_HELD; ++i) {
            const ep_u32 item = first + i * EP_LOW_THREADS + lane, turn = item / wide, unit = item - turn * wide;
            if (first + i * EP_LOW_THREADS >= 4 * end) continue;
            const bool is = item < 4 * end;
            if (!come[i]) there &= ep_low_await_unit(r, op, EP_LOW_DISPATCH, s.source[turn], ep_low_unit(s, turn, unit), s.tag, began, false, data[i]);
            const EpUnit v = ep_low_join(data[i]);
            const ep_u32 at = unit / 4 * 48 + quarter * 16;
            if (is && quarter < 3 && at < (ep_u32)r.w.payload_stride) ep_low_store(r, a, s, turn, at, v);
        }
    }
    return there;
}

/* Waits until all sources have said what comes; false after a fault. By all threads. */
EP_DEV bool ep_low_await_all(const EpRank& r, const EpLowDispatchArgs& a, const EpLowReceiver& s, ep_u64 op, ep_u64 began) {
    const ep_u32 units = (ep_u32)ep_unit_count(4ull * r.w.local_experts);
    bool there = ep_low_is_unmasked(r, op);
    EP_SHORT for (ep_u32 item = threadIdx.x; item < r.w.ranks * (units + 1) && there; item += EP_LOW_THREADS) {
        const ep_u32 source = item / (units + 1), at = item - source * (units + 1);
        if (!ep_low_takes_part(source)) {
            if (at == units) s.rows[source] = 0;
            else EP_SHORT for (ep_u32 e = 3 * at; e < 3 * at + 3 && e < r.w.local_experts; ++e) s.count[source * r.w.local_experts + e] = 0;
        } else if (at < units) {
            there = ep_low_await_counts(r, s, op, source, at, began);
        } else {
            ep_u32 rows = 0, tokens = 0;
            there = ep_low_await_count(r, op, EP_LOW_DISPATCH, source, s.tag, began, &rows, &tokens);
            if (there && rows > r.w.max_tokens) {
                ep_low_mismatch(r, op, source, EP_LOW_FIELD_ROWS, r.w.max_tokens, rows);
                there = false;
            }
            s.rows[source] = rows;
            /* The combine sends it results accordingly. */
            if (blockIdx.x == a.roles.counts) ((ep_u32*)a.records)[2 * r.w.ranks + source] = tokens;
        }
    }
    return __syncthreads_and(there);
}

/* Blocks that share a row where there are more blocks than rows, by the size of the own batch. */
EP_DEV ep_u32 ep_low_sharing(const EpRank& r, const EpLowDispatchArgs& a, ep_u32 movers) {
    const ep_u32 rows = r.w.ranks * (a.tokens > 0 ? a.tokens : 1);
    return movers >= 4 * rows ? 4 : movers >= 2 * rows ? 2 : 1;
}

/* Receives all rows. True for the block that tells how many have come. By all threads. */
EP_DEV bool ep_low_receive(const EpRank& r, const EpLowDispatchArgs& a, const EpLowReceiver& s, ep_u64 op, ep_u64 began) {
    const ep_u32 warp = threadIdx.x / 32, movers = a.roles.moves;
    const ep_u32 sharing = ep_low_sharing(r, a, movers), groups = movers / sharing;
    const ep_u32 group = blockIdx.x / sharing, part = blockIdx.x - group * sharing, pieces = ep_low_pieces(r);
    const bool moves = blockIdx.x < movers && group < groups, tells = blockIdx.x == a.roles.counts;
    /* Counts and the first headers are on their way at once. */
    EpLowItem item = {0, 0, {0, 0, 0}, true};
    if (moves) item = ep_low_look_for(r, s, op, group + warp * groups);
    if (!ep_low_await_all(r, a, s, op, began)) return false;
    if (tells) ep_low_tell_counts(r, a, s);
    if (ep_low_packs(a) && !ep_low_find_slots_of_counts(r, a, s, op)) return false;
    if (ep_low_by_source(a) && !ep_low_fits_by_source(r, a, s, op)) return false;
    if (blockIdx.x < movers && ep_low_tells_rows(a)) ep_low_fill_spare(r, a, s, movers);
    if (blockIdx.x < movers && ep_low_packs(a)) ep_low_fill_padding(r, a, s, movers);
    if (tells && a.early != 0) ep_low_tell_expected(r, a, sharing);
    ep_u32 most = 0;
    EP_SHORT for (ep_u32 source = 0; source < r.w.ranks; ++source) most = s.rows[source] > most ? s.rows[source] : most;
    EP_SHORT for (ep_u32 first = group; moves && first < most * r.w.ranks; first += groups * EP_LOW_WARPS) {
        if (first != group) item = ep_low_look_for(r, s, op, first + warp * groups);
        const bool is = item.position < s.rows[item.source];
        if (threadIdx.x % 32 == 0) s.of[warp] = 0;
        __syncwarp();
        const bool there = !is || ep_low_take_row(r, a, s, op, item, part == 0, began);
        if (!__syncthreads_and(there)) return false;
        /* Warps' rows are in the order of their numbers, and the last ones may have none. */
        const ep_u32 rows = (most * r.w.ranks - first + groups - 1) / groups, batch = rows < EP_LOW_WARPS ? rows : EP_LOW_WARPS;
        const bool early = a.early != 0, planted = ep_planted(r, EP_PLANT_LOW_COUNTED_EARLY);
        if (early && planted) {
            ep_low_count_arrived(r, a, s.of, s.to);
            ep_be_last(r);
        }
        const bool copied = ep_low_copy(r, a, s, op, batch * pieces * part / sharing, batch * pieces * (part + 1) / sharing, began);
        if (!__syncthreads_and(copied)) return false;
        if (early && !planted) ep_low_count_arrived(r, a, s.of, s.to);
    }
    return tells;
}

#ifdef EP_TEST
/* What was read is overwritten, and has no tag. By a warp. */
EP_DEV void ep_low_forget(const EpRank& r, const EpLowReceiver& s, ep_u64 op, ep_u32 source, ep_u32 position) {
    if (!ep_test(r)->poison) return;
    ep_u32 data[3];
    const ep_u8* header = ep_low_own(r) + ep_low_unit_header(r.w, op, source, position);
    ep_poll_unit(header, s.tag, data);
    __syncwarp();
    const ep_u8* payload = ep_low_own(r) + ep_low_unit_row(r.w, op, source, data[1]);
    const EpUnit none = ep_unit(EP_POISON, EP_POISON, EP_POISON, 0);
    const ep_u32 units = (ep_u32)ep_unit_count(r.w.payload_bytes);
    EP_SHORT for (ep_u32 unit = threadIdx.x % 32; unit < units; unit += 32) ep_st16((void*)(payload + unit * EP_UNIT_BYTES), none);
    EP_SHORT for (ep_u32 unit = threadIdx.x % 32; unit <= r.w.topk; unit += 32) ep_st16((void*)(header + unit * EP_UNIT_BYTES), none);
}
#endif
#endif
