/*
 * ep_low_reduce_units.h: the receiving half of the low-latency combine where results come as units (ep_low_return_units.h): each thread polls the units
 * that it sums, and nothing else says that a result is there. The first block looks at how many come: it is the one that says whom this rank waits for.
 */
#ifndef EP_LOW_REDUCE_UNITS_H
#define EP_LOW_REDUCE_UNITS_H
#include "ep_low_results.h"
#include "ep_low_units.h"
#include "ep_sum.h"

/* Waits until those that owe results have said how many come, each thread for its own; false after a fault. By the threads of one block. */
EP_DEV bool ep_low_await_heads(const EpRank& r, const EpLowCombineArgs& a, ep_u64 op, ep_u32 tag, ep_u64 began) {
    const ep_u32* owed = (const ep_u32*)a.routed + (a.kind == EP_LOW_PER_RANK ? 0 : r.w.ranks);
    bool there = true;
    EP_SHORT for (ep_u32 rank = ep_low_served(); rank < r.w.ranks && there; rank += EP_LOW_THREADS) {
        if (!ep_low_takes_part(rank) || owed[rank] == 0) continue;
        ep_u32 rows = 0, tokens;
        there = ep_low_await_count(r, op, a.kind, rank, tag, began, &rows, &tokens);
        if (!there || rows == owed[rank]) continue;
        ep_low_mismatch(r, op, rank, EP_LOW_FIELD_RESULTS, owed[rank], rows);
        there = false;
    }
    return there;
}

/* Sums a lane's unit of a token, number `unit`; nothing where `parts` is 0. False after a fault. */
EP_DEV bool ep_low_sum_unit(const EpRank& r, const EpLowBatch& s, ep_u64 op, ep_u32 kind, const ep_u8* bank, ep_u32 turn, ep_u32 unit,
                            ep_u32 parts, ep_u32 tag, ep_u64 began, EpSum& sum) {
    bool there = true;
    ep_sum_clear(sum);
    EP_SHORT for (ep_u32 base = 0; base < parts; base += EP_LOW_HELD) {
        ep_u32 data[EP_LOW_HELD][3];
        bool come[EP_LOW_HELD];
#pragma unroll
        for (ep_u32 i = 0; i < EP_LOW_HELD; ++i)
            come[i] = base + i >= parts || ep_poll_unit(bank + (ep_u64)(s.slot[turn * 32 + base + i] + unit) * EP_UNIT_BYTES, tag, data[i]);
#pragma unroll
        for (ep_u32 i = 0; i < EP_LOW_HELD; ++i) {
            if (base + i >= parts) continue;
            const ep_u32 part = turn * 32 + base + i;
            if (!come[i])
                there &= ep_low_await_unit(r, op, kind, s.row[part], bank + (ep_u64)(s.slot[part] + unit) * EP_UNIT_BYTES, tag, began, false, data[i]);
            ep_sum_add_scaled(sum, s.weight[part], ep_unit((int)data[i][0], (int)data[i][1], (int)data[i][2], 0));
        }
    }
    return there;
}

/* Waits for the results, and sums this block's share of the tokens, of which the first were found before if `found`, with a barrier behind that. */
EP_DEV void ep_low_reduce_units(const EpRank& r, const EpLowCombineArgs& a, EpLowBatch& s, const EpShareOfRows& share, bool found, ep_u64 op,
                                ep_u32 tag, ep_u64 began) {
    const ep_u32 lane = threadIdx.x % 32, pieces = ep_low_pieces_of(r.w.result_bytes), wide = 4 * pieces;
    const ep_u32 all = (ep_u32)ep_unit_count(r.w.result_bytes);
    const ep_u8* bank = ep_low_own(r) + ep_low_unit_result(r.w, op, 0, 0, 0);
    bool there = ep_low_is_unmasked(r, op);
    if (blockIdx.x == 0) there &= ep_low_await_heads(r, a, op, tag, began);
    EP_SHORT for (ep_u32 base = share.first; base < share.last; base += EP_LOW_WARPS) {
        if (!found || base != share.first) {
            ep_low_load_tokens(r, a, s, share.last, base, true);
            if (!__syncthreads_and(there)) return;
        }
        const EpRange units = ep_low_within(share, base, EP_LOW_WARPS, pieces, 4);
        /* A warp goes through this together: its lanes exchange words. */
        EP_SHORT for (ep_u32 first = units.begin + threadIdx.x - lane; first < units.end; first += EP_LOW_THREADS) {
            const ep_u32 item = first + lane, turn = item / wide, unit = item - turn * wide, at = unit / 4 * 48 + lane % 4 * 16;
            const bool is = item < units.end;
            EpSum sum;
            there &= ep_low_sum_unit(r, s, op, a.kind, bank, is ? turn : 0, unit, is && unit < all ? s.count[turn] : 0, tag, began, sum);
            const EpUnit own = ep_sum_round(sum);
            const ep_u32 words[3] = {(ep_u32)own.x, (ep_u32)own.y, (ep_u32)own.z};
            const EpUnit v = ep_low_join(words);
            if (is && lane % 4 < 3 && at < (ep_u32)r.w.result_stride) ep_st16((ep_u8*)a.out + s.token[turn] * a.out_stride + at, v);
        }
        if (base + EP_LOW_WARPS < share.last) __syncthreads();
    }
}
#endif
