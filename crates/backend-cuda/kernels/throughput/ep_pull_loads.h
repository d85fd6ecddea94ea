/*
 * ep_pull_loads.h: reducers of a combine pull rows into registers, where there is no bulk copy engine (ep_pull_bulk.h).
 *
 *   rules    F10: acquire of the notes, barrier, or of the piece's cell by the warp; then coherent loads. All rows of a token, up to
 *            EP_PULL_WIDTH of them, are in flight before the first is added
 *
 * Compiled for each EP_PULL_WIDTH.
 */
#ifndef EP_PULL_LOADS_H
#define EP_PULL_LOADS_H
#include "ep_sum.h"

#ifndef EP_PULL_WIDTH
#define EP_PULL_WIDTH 4
#endif
/* Warps of a block at most. */
#define EP_PULL_WARPS EP_COMBINE_WARPS

/* Of each row, for each lane, in flight at once: as many as fit into registers. */
#if EP_PULL_WIDTH > 4
#define EP_PULL_UNITS 1
#else
#define EP_PULL_UNITS 2
#endif
/* Bytes of a row that a warp sums at once. */
EP_DEV ep_u32 ep_part(const EpSumShape&) { return 512u * EP_PULL_UNITS; }

/* Rows go through registers alone. */
EP_DEV ep_u32 ep_pull_bytes(const EpSumShape&, ep_u32) { return 0; }

/* Whether a token's rows are there. */
EP_DEV bool ep_is_there(const EpRank& r, const EpCombineArgs& a, const ep_u32* there, ep_u32 token) {
    const ep_i32* positions = ep_positions(r, a, token);
    bool all = true;
    for (ep_u32 rank = 0; rank < r.w.ranks; ++rank) all &= positions[rank] < 0 || (ep_u32)positions[rank] < there[rank];
    return all;
}

/* Waits until they are; false when that will not happen. By a warp. */
EP_DEV bool ep_await_token(const EpRank& r, const EpCombineArgs& a, const EpSource* sources, ep_u32* there, ep_u32 token, ep_u64 began) {
    for (ep_u32 rank = 0; rank < r.w.ranks; ++rank) {
        const ep_i32 position = ep_positions(r, a, token)[rank];
        if (position >= 0 && !ep_await_position(r, sources, there, rank, (ep_u32)position, began)) return false;
    }
    return true;
}

/* Where rows of a token lie among those of ranks from `first` on, as many as are pulled at once; -1 for none. */
struct EpPositions {
    ep_i32 of[EP_PULL_WIDTH];
};
EP_DEV void ep_load_positions(const EpRank& r, const EpCombineArgs& a, ep_u32 token, ep_u32 first, EpPositions& p) {
    const ep_i32* positions = ep_positions(r, a, token) + first;
#pragma unroll
    for (ep_u32 i = 0; i < EP_PULL_WIDTH; ++i) p.of[i] = first + i < r.w.ranks ? positions[i] : -1;
}

/* Sums a part of a token, from byte `at` of its rows on. `p`: its positions among the first ranks' rows; those of `next` after it, of a
   token that there is. By a warp. */
EP_DEV void ep_sum_part(const EpRank& r, const EpCombineArgs& a, const EpSource* sources, ep_u32 token, ep_u32 at, ep_u32 next,
                        EpPositions& p) {
    const ep_u32 ranks = r.w.ranks, row_bytes = (ep_u32)r.w.result_stride;
    /* Of several units one after the other: the kernels that take several have no more ranks than they are wide. */
    EpSum sum;
    for (ep_u32 first = 0; first < (EP_PULL_WIDTH < 8 ? 1 : ranks); first += EP_PULL_WIDTH) {
        if (first > 0) ep_load_positions(r, a, token, first, p);
        /* All addresses before the first row is asked for: a load queues behind the rows that are under way, of all warps. */
        EpAt from[EP_PULL_WIDTH];
        bool there[EP_PULL_WIDTH];
#pragma unroll
        for (ep_u32 i = 0; i < EP_PULL_WIDTH; ++i) {
            there[i] = p.of[i] >= 0;
            from[i] = ep_source_row(sources[first + i < ranks ? first + i : ranks - 1], p.of[i]) + at;
        }
        int4 rows[EP_PULL_UNITS][EP_PULL_WIDTH];
#pragma unroll
        for (ep_u32 i = 0; i < EP_PULL_WIDTH; ++i)
#pragma unroll
            for (ep_u32 u = 0; u < EP_PULL_UNITS; ++u) {
                rows[u][i] = ep_sum_nothing();
                if (there[i] && at + u * 512 < row_bytes) rows[u][i] = ep_get16(from[i] + u * 512);
            }
        if (first + EP_PULL_WIDTH >= ranks && next < a.tokens) ep_load_positions(r, a, next, 0, p);
#pragma unroll
        for (ep_u32 u = 0; u < EP_PULL_UNITS; ++u) {
            if (at + u * 512 >= row_bytes) continue;
            if (first == 0) {
                const ep_u64 place = (ep_u64)token * (ep_u32)a.bias_stride + at + u * 512;
                ep_sum_clear(sum);
                if (a.bias[0]) ep_sum_start(sum, ep_ld16((const ep_u8*)a.bias[0] + place));
                if (a.bias[1]) ep_sum_add(sum, ep_ld16((const ep_u8*)a.bias[1] + place));
            }
#pragma unroll
            for (ep_u32 i = 0; i < EP_PULL_WIDTH; ++i) {
                ep_sum_add(sum, rows[u][i]);
                if (ep_planted(r, EP_PLANT_ROUNDED_TOO_EARLY)) ep_sum_start(sum, ep_sum_round(sum));
            }
            if (first + EP_PULL_WIDTH >= ranks)
                ep_st16((ep_u8*)a.out + (ep_u64)token * (ep_u32)a.out_stride + at + u * 512, ep_sum_round(sum));
        }
    }
}

/* Warp `warp` of `warps` that pull in each block. */
EP_DEV void ep_sum_rows(const EpRank& r, const EpCombineArgs& a, const EpSumShape& shape, const EpSource* sources, const EpWalk& walk, ep_u8*,
                        ep_u32* there, ep_u32 warp, ep_u32 warps, ep_u64 began) {
    ep_begin_there(r, sources, there);
    bool all_there = ep_all_there(r, there);
    ep_u32 part = ep_block() * warps + warp, token = part / walk.parts;
    part %= walk.parts;
    EpPositions positions;
    if (token < a.tokens) ep_load_positions(r, a, token, 0, positions);
    while (token < a.tokens) {
        if (!all_there) {
            if (!ep_await_token(r, a, sources, there, token, began)) return;
            all_there = ep_all_there(r, there);
        }
        /* Nothing is called in here: that would cost registers. */
        do {
            const ep_u32 at = part * ep_part(shape) + ep_warp_lane() * 16, summed = token;
            ep_walk_on(walk, &token, &part);
            ep_sum_part(r, a, sources, summed, at, token, positions);
        } while (token < a.tokens && (all_there || ep_is_there(r, a, there, token)));
    }
}
#endif
