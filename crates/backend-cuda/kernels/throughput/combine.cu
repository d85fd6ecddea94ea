/*
 * ep_combine_kernel: every token's rows are pulled from the windows of the ranks that got it, and summed.
 *
 *   launch   any number of blocks, co-resident with those of the other ranks (cooperative); all have the roles of the table `block`,
 *            reducers first: they meet without the others
 *   memory   offered blocks in the peers' windows; own rows, bias and sums in memory of the own GPU. shared: where rows lie; what a
 *            reducer of rings needs; how many of each rank's rows are known to be there, for each warp; what copiers need (ep_copy.h)
 *   roles    block 0 offers; every block learns the peers' offers. Reducers pull: a lane sums EP_PULL_UNITS times 16 bytes of a token.
 *            Where the own rows are not in the window yet, returners copy them there (ep_copy.h). Where a rank with rows for this one
 *            offered nothing, nothing is pulled: one warp of each block takes the row of the block's number from the table of the rings'
 *            reducers (ep_combine_ring.h). The block that comes last publishes Done, and waits until all that pull from here are done. Where this rank itself offered nothing, or
 *            there are more channels than blocks, all that concerns rings is left to ep_combine_ring_kernel, which follows
 *   rules    F10: acquire of the notes, barrier, or of the piece's cell by the warp; then coherent loads. All rows of a token, up to
 *            EP_PULL_WIDTH of them, are in flight before the first is added. Copiers wait for nobody: pulling warps may wait for them
 *
 * Compiled for each EP_PULL_WIDTH.
 */
#include "ep_combine_ring.h"
#include "ep_copy.h"

#ifndef EP_PULL_WIDTH
#define EP_PULL_WIDTH 4
#endif
/* Of each row, for each lane, in flight at once: as many as fit into registers. */
#if EP_PULL_WIDTH > 4
#define EP_PULL_UNITS 1
#else
#define EP_PULL_UNITS 2
#endif
/* Bytes of a row that a warp sums at once. */
#define EP_PART (512u * EP_PULL_UNITS)

EP_POOL(ep_pool);

/* Whether all rows are there, as far as a warp knows: of each rank so many, EP_FULL for all. By a warp. */
EP_DEV bool ep_all_there(const EpRank& r, const ep_u32* there) {
    bool all = true;
    for (ep_u32 rank = threadIdx.x % 32; rank < r.w.ranks; rank += 32) all &= there[rank] == EP_FULL;
    return __all_sync(EP_FULL, all);
}

/* Where a token's rows lie among those of each rank; -1: it did not go there. */
EP_DEV const ep_i32* ep_positions(const EpRank& r, const EpCombineArgs& a, ep_u32 token) {
    return (const ep_i32*)a.position + (ep_u64)token * r.w.ranks;
}

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
        if (position < 0 || (ep_u32)position < there[rank]) continue;
        const ep_u32 rows = ep_await_row(r, sources[rank], rank, (ep_u32)position, began);
        if (rows == 0) return false;
        __syncwarp();
        if (threadIdx.x % 32 == 0) there[rank] = rows;
        __syncwarp();
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

/* How warps go from one part of a token to the next: parts of a row; tokens, and parts beside, from a warp's part to its next. The same
   for all: in shared memory, as registers are all needed. */
struct EpWalk {
    ep_u32 parts;
    ep_u32 tokens;
    ep_u32 rest;
};

/* Warp `warp` of `warps` that pull in each block. */
EP_DEV void ep_sum_rows(const EpRank& r, const EpCombineArgs& a, const EpSource* sources, const EpWalk& walk, ep_u32* there, ep_u32 warp,
                        ep_u32 warps, ep_u64 began) {
    const ep_u32 lane = threadIdx.x % 32;
    for (ep_u32 rank = lane; rank < r.w.ranks; rank += 32) there[rank] = sources[rank].piece > 0 ? 0 : EP_FULL;
    __syncwarp();
    bool all_there = ep_all_there(r, there);
    ep_u32 part = blockIdx.x * warps + warp, token = part / walk.parts;
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
            const ep_u32 at = part * EP_PART + lane * 16, summed = token;
            token += walk.tokens;
            part += walk.rest;
            if (part >= walk.parts) { part -= walk.parts; ++token; }
            ep_sum_part(r, a, sources, summed, at, token, positions);
        } while (token < a.tokens && (all_there || ep_is_there(r, a, there, token)));
    }
}

/* Sums the weights that came back, ranks ascending. Those of the own rank lie without headers. By the first `threads` threads. */
EP_DEV void ep_sum_weights(const EpRank& r, const EpCombineArgs& a, const EpSource* sources, ep_u32 threads) {
    const ep_u32 ranks = r.w.ranks, topk = r.w.topk;
    const ep_u64 items = (ep_u64)a.tokens * topk, step = (ep_u64)gridDim.x * threads;
    for (ep_u64 item = (ep_u64)blockIdx.x * threads + threadIdx.x; item < items; item += step) {
        const ep_u32 token = (ep_u32)(item / topk), k = (ep_u32)(item % topk);
        float sum = 0.0f;
        for (ep_u32 rank = 0; rank < ranks; ++rank) {
            const ep_i32 position = ((const ep_i32*)a.position)[(ep_u64)token * ranks + rank];
            if (position >= 0) sum += ep_source_weight(sources[rank], position, k, rank == r.me);
        }
        ((float*)a.weights)[item] = sum;
    }
}

/* Offers, learns the offers and pulls. By the block's reducers. `pulled`, in shared memory: whether all rows can be pulled. */
EP_DEV void ep_pull(const EpRank& r, const EpCombineArgs& a, EpSource* sources, ep_u32* there, const EpBlockRole& role,
                    ep_u64 began, bool* pulled) {
    const ep_u32 threads = 32 * role.count;
    const ep_u32 offer = (a.offers_weights ? EP_OFFERS_WEIGHTS : 0) | (a.copiers > 0 ? EP_OFFERS_PIECES : 0);
    if (blockIdx.x == 0) ep_send_notes(r, a.base, a.base_rows, offer, threads, began);
    __shared__ EpWalk walk;
    if (threadIdx.x == 0) {
        const ep_u32 parts = ((ep_u32)r.w.result_stride + EP_PART - 1) / EP_PART, step = gridDim.x * role.count;
        walk = {parts, step / parts, step % parts};
    }
    const bool all = ep_all_of(ep_learn_sources(r, a, sources, threads, began), threads);
    if (threadIdx.x == 0) *pulled = all;
    ep_delay(r, EP_LANE_CONTROL, (ep_u64)blockIdx.x << 32 | role.index);
    if (ep_planted(r, EP_PLANT_NOT_WAITING_FOR_PULLS)) ep_be_last(r);
    if (all && !ep_failed(r)) {
        ep_sum_rows(r, a, sources, walk, there + role.index * r.w.ranks, role.index, role.count, began);
        if (a.weights) ep_sum_weights(r, a, sources, threads);
    }
}

extern "C" __global__ void __launch_bounds__(32 * EP_COMBINE_WARPS, 1) ep_combine_kernel(const __grid_constant__ EpRank r,
                                                                       const __grid_constant__ EpCombineOfferedArgs given) {
    __shared__ bool pulled;
    if (ep_block_any(ep_closed(r))) return;
    const ep_u64 began = ep_now();
    const EpCombineRingArgs& ring = given.ring;
    const EpCombineArgs& a = ring.combine;
    const EpBlockRole& role = given.block[ep_warp()];
    const ep_u32 pulling = ep_threads() / 32 - a.copiers, ranks = r.w.ranks;
    EpSource* sources = (EpSource*)ep_pool;
    EpRoute* routes = (EpRoute*)(sources + ranks);
    ep_u32* there = (ep_u32*)(routes + ranks); /* [pulling, ranks] */
    if (role.duty == EP_DUTY_REDUCER) {
        ep_pull(r, a, sources, there, role, began, &pulled);
    } else {
        ep_offer_rows(r, a, ep_pool + ep_round_128((ep_u32)((ep_u8*)(there + pulling * ranks) - ep_pool)), role, began);
    }
    __syncthreads();
    const bool all = pulled, leaves = a.base == EP_NO_BASE || ring.role_count > ep_blocks();
    const bool reduces = role.duty == EP_DUTY_REDUCER && role.index == 0 && ep_block() < ring.role_count;
    if (!all && !leaves && reduces && !ep_failed(r))
        ep_reduce<1>(r, ring, sources, routes, ((const EpRole*)ring.roles)[ep_block()].channel, began);
    if (!ep_last_block(r, EP_MEETING_MOVED) || ep_failed(r)) return;
    if (leaves) {
        const bool gives = a.base == EP_NO_BASE;
        if (threadIdx.x == 0) ep_local(r)->rings = !all ? 1 : gives ? 2 : 0;
        if (!all || gives) return;
    }
    ep_end_combine(r, a, began);
}
