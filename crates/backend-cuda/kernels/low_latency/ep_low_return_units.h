/*
 * ep_low_return_units.h: how the results of a low-latency combine leave as units (F11), which announce themselves: each at the place of its token and
 * column, without a header. Where a share ends in the middle of a row does not matter to anybody: so all shares are of the same size.
 */
#ifndef EP_LOW_RETURN_UNITS_H
#define EP_LOW_RETURN_UNITS_H
#include "ep_low_ready.h"
#include "ep_low_units.h"
#include "ep_sum.h"

/* Puts a lane's unit of each result of a row, number `unit`; none where `parts` is 0. By a warp. */
EP_DEV void ep_low_return_piece(const EpRank& r, const EpLowCombineArgs& a, const EpLowBatch& s, ep_u32 turn, ep_u32 unit, ep_u32 parts, ep_u32 tag) {
    const ep_u32 lane = threadIdx.x % 32, at = unit / 4 * 48 + lane % 4 * 16, all = (ep_u32)ep_unit_count(r.w.result_bytes);
    const bool loads = lane % 4 < 3 && at < (ep_u32)r.w.result_stride, puts = parts > 0 && unit < all;
    const bool torn = ep_planted(r, EP_PLANT_LOW_RESULTS_TORN);
    const EpAt place = s.place[turn] + unit * EP_UNIT_BYTES;
    const ep_u8* y = (const ep_u8*)a.y + at;
    const ep_u32 most = __reduce_max_sync(EP_FULL, parts);
    EpSum sum;
    ep_sum_clear(sum);
    EP_SHORT for (ep_u32 base = 0; base < most; base += 4) {
        EpUnit v[4];
#pragma unroll
        for (ep_u32 i = 0; i < 4; ++i) {
            v[i] = ep_unit(0, 0, 0, 0);
            if (loads && base + i < parts) v[i] = ep_ld16(y + s.row[turn * 32 + base + i] * a.y_stride);
        }
#pragma unroll
        for (ep_u32 i = 0; i < 4; ++i) {
            if (base + i >= most) continue;
            const bool is = base + i < parts;
            if (a.kind == EP_LOW_PER_RANK) {
                if (is) ep_sum_add_scaled(sum, s.weight[turn * 32 + base + i], v[i]);
                continue;
            }
            const EpUnit own = ep_low_divide(v[i]);
            if (is && puts) ep_low_put_unit(place + (base + i) * all * EP_UNIT_BYTES, own.x, own.y, own.z, tag, torn);
        }
    }
    if (a.kind != EP_LOW_PER_RANK) return;
    const EpUnit own = ep_low_divide(ep_sum_round(sum));
    if (puts) ep_low_put_unit(place, own.x, own.y, own.z, tag, torn);
}

/* The rows of a share whose results travel as units, and what of them. */
EP_DEV EpShareOfRows ep_low_share_of_units(const EpRank& r, ep_u32 share) {
    return ep_low_share(ep_low_firsts(r, true)[r.w.ranks], ep_low_pieces_of(r.w.result_bytes), share, gridDim.x);
}

/* Puts the results of a share that travel as units, to the ranks that are free. `loaded`: its first batch. */
EP_DEV void ep_low_return_units(const EpRank& r, const EpLowCombineArgs& a, EpLowBatch& s, const EpShareOfRows& part, ep_u64 op, ep_u32 tag,
                                bool loaded, ep_u64 began) {
    const ep_u32 lane = threadIdx.x % 32, pieces = ep_low_pieces_of(r.w.result_bytes), wide = 4 * pieces;
    EP_SHORT for (ep_u32 base = part.first; base < part.last; base += EP_LOW_WARPS) {
        if (!loaded || base != part.first) {
            if (!ep_low_load_ready_rows(r, a, s, op, base, part.last, true, began)) return;
            __syncthreads();
        }
        const EpRange units = ep_low_within(part, base, EP_LOW_WARPS, pieces, 4);
        /* A warp goes through this together: its lanes exchange words. */
        EP_SHORT for (ep_u32 at = units.begin + threadIdx.x - lane; at < units.end; at += EP_LOW_THREADS) {
            const ep_u32 item = at + lane, turn = item / wide;
            const bool is = item < units.end && ep_low_goes(r, s, turn);
            ep_low_return_piece(r, a, s, is ? turn : 0, item - turn * wide, is ? s.count[turn] : 0, tag);
        }
        /* The batch is read by all until here. */
        if (base + EP_LOW_WARPS < part.last) __syncthreads();
    }
}
#endif
