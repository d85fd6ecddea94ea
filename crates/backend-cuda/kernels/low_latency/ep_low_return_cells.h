/*
 * ep_low_return_cells.h: how the results of a low-latency combine leave where they go into slots, with a header each: the cell of a token is raised when
 * all that this rank has for it is there. Those for ranks of other nodes are staged (ep_low_far_results.h).
 */
#ifndef EP_LOW_RETURN_CELLS_H
#define EP_LOW_RETURN_CELLS_H
#include "ep_low_ready.h"
#include "ep_sum.h"

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
EP_DEV void ep_low_raise_batch(const EpRank& r, const EpLowCombineArgs& a, const EpLowBatch& s, ep_u64 op, ep_u32 batch, bool early) {
    const ep_u32 turn = ep_low_served();
    if (turn >= batch || !ep_low_goes(r, s, turn)) return;
    const ep_u32 source = s.source[turn];
    if (!ep_is_beyond(r, source)) ep_low_raise(r, op, source, s.token[turn]);
    else if (!early) ep_low_staged_result_one(r, a, op, source);
}

/* The rows of a share whose results go into slots. The first shares have a row more than the others, where these do not come out even. */
EP_DEV EpRange ep_low_share_of_slots(const EpRank& r, ep_u32 share) {
    const ep_u32 all = ep_low_firsts(r, false)[r.w.ranks], each = all / gridDim.x, more = all - each * gridDim.x;
    EpRange rows;
    rows.begin = share * each + (share < more ? share : more);
    rows.end = rows.begin + each + (share < more);
    return rows;
}

/* Puts the results of a share that go into slots, to the ranks that are free. `loaded`: its first batch. */
EP_DEV void ep_low_return_cells(const EpRank& r, const EpLowCombineArgs& a, EpLowBatch& s, const EpRange& rows, ep_u64 op, bool loaded, ep_u64 began) {
    const ep_u32 columns = (ep_u32)(r.w.result_stride / 16);
    /* The header is a row's first unit, and no warp has units of two rows: so what it stores begins where a slot's lines do. */
    const ep_u32 wide = (columns + 32) / 32 * 32;
    EP_SHORT for (ep_u32 base = rows.begin; base < rows.end; base += EP_LOW_WARPS) {
        const ep_u32 batch = rows.end - base < EP_LOW_WARPS ? rows.end - base : EP_LOW_WARPS;
        if (!loaded || base != rows.begin) {
            if (!ep_low_load_ready_rows(r, a, s, op, base, rows.end, false, began)) return;
            __syncthreads();
        }
        if (ep_planted(r, EP_PLANT_LOW_RAISED_EARLY)) {
            ep_low_raise_batch(r, a, s, op, batch, true);
            ep_be_slow();
        }
        EP_SHORT for (ep_u32 unit = threadIdx.x; unit < batch * wide; unit += EP_LOW_THREADS) {
            const ep_u32 turn = unit / wide, at = unit - turn * wide;
            if (!ep_low_goes(r, s, turn) || at > columns) continue;
            if (at == 0) ep_low_return_headers(r, a, s, op, turn);
            else ep_low_return_unit(r, a, s, turn, (at - 1) * 16);
        }
        __syncthreads();
        ep_low_raise_batch(r, a, s, op, batch, false);
        /* The batch is read by all until here. */
        if (base + EP_LOW_WARPS < rows.end) __syncthreads();
    }
}
#endif
