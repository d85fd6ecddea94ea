/*
 * ep_pull_bulk.h: reducers of a combine pull rows by the bulk copy engine (ep_summing.h).
 *
 *   rules    F10: acquire of the notes, barrier, or of the piece's cell by the warp; a fence of the proxies in each lane, then gets. Copiers wait
 *            for nobody: a warp that has rows on their way may wait for them
 */
#ifndef EP_PULL_BULK_H
#define EP_PULL_BULK_H
#include "ep_summing.h"

/* Warps of a block at most. */
#define EP_PULL_WARPS EP_COMBINE_BULK_WARPS

/* What a block's reducers have in shared memory: stages, what lies in them, and barriers. */
EP_DEV ep_u32 ep_pull_bytes(const EpSumShape& shape, ep_u32 warps) {
    return ep_round_128(warps * (shape.stages * (ep_u32)(sizeof(EpBatch) + sizeof(ep_u64)) + ep_summing_bytes(shape)));
}

/* Bytes of a row that a warp sums at once. */
EP_DEV ep_u32 ep_part(const EpSumShape& shape) { return shape.part; }

/* Waits until the rows are there that lanes have at `position`, of ranks from `base` on; false when that will not happen. `all_there`: whether all
   are, as far as the warp knows. By a warp. */
EP_DEV bool ep_await_positions(const EpRank& r, const EpSource* sources, ep_u32* there, bool* all_there, ep_u32 base, ep_i32 position,
                               ep_u64 began) {
    const bool waits = position >= 0 && (ep_u32)position >= there[base + ep_warp_lane()];
    ep_u32 missing = __ballot_sync(EP_FULL, waits);
    if (missing == 0) return true;
    for (; missing; missing &= missing - 1) {
        const ep_u32 lane = __ffs(missing) - 1, due = (ep_u32)__shfl_sync(EP_FULL, position, lane);
        if (!ep_await_position(r, sources, there, base + lane, due, began)) return false;
    }
    ep_fence_seen();
    __syncwarp();
    *all_there = ep_all_there(r, there);
    return true;
}

/* Starts to pull all rows of a part of a token; false when they will not come. `next`: its positions among the first ranks' rows, by lanes; those
   of token `after` in their place. */
EP_DEV bool ep_pull_part(const EpRank& r, const EpCombineArgs& a, const EpSource* sources, EpSumming& summing, ep_u32* there, bool* all_there,
                         ep_u32 token, ep_u32 part, ep_u32 after, ep_i32* next, ep_u64 began) {
    const ep_u32 lane = ep_warp_lane(), ranks = r.w.ranks;
    EpBatch batch = ep_batch(r, summing, token, part);
    bool come = true;
    for (ep_u32 base = 0; base < ranks && come; base += 32) {
        ep_i32 position = *next;
        if (base > 0) position = base + lane < ranks ? ep_positions(r, a, token)[base + lane] : -1;
        else *next = after < a.tokens && lane < ranks ? ep_positions(r, a, after)[lane] : -1;
        if (!*all_there) come = ep_await_positions(r, sources, there, all_there, base, position, began);
        EpAt from = ep_nowhere();
        if (position >= 0) from = ep_source_row(sources[base + lane], position);
        ep_pull_rows(summing, batch, come && position >= 0, from);
    }
    /* If they do not come, too: nothing may be on its way to a block that has gone. */
    ep_pull_ends(r, a, summing, batch);
    return come;
}

/* Warp `warp` of `warps` that pull in each block. `memory`: ep_pull_bytes of them. */
EP_DEV void ep_sum_rows(const EpRank& r, const EpCombineArgs& a, const EpSumShape& shape, const EpSource* sources, const EpWalk& walk,
                        ep_u8* memory, ep_u32* there, ep_u32 warp, ep_u32 warps, ep_u64 began) {
    const ep_u32 lane = ep_warp_lane();
    ep_u8* data = memory + warp * ep_summing_bytes(shape);
    EpBatch* batches = (EpBatch*)(memory + warps * ep_summing_bytes(shape));
    ep_u64* bars = (ep_u64*)(batches + warps * shape.stages);
    EpSumming summing = ep_summing(shape, data, batches + warp * shape.stages, bars + warp * shape.stages);
    ep_begin_there(r, sources, there);
    /* Notes were seen by other threads; a barrier lies behind that. */
    ep_fence_seen();
    __syncwarp();
    ep_u32 part = ep_block() * warps + warp, token = part / walk.parts;
    part %= walk.parts;
    ep_i32 next = token < a.tokens && lane < r.w.ranks ? ep_positions(r, a, token)[lane] : -1;
    bool all_there = ep_all_there(r, there);
    while (token < a.tokens || summing.in_flight > 0) {
        if (token < a.tokens) {
            const ep_u32 of = token, pulled = part;
            ep_walk_on(walk, &token, &part);
            if (!ep_pull_part(r, a, sources, summing, there, &all_there, of, pulled, token, &next, began)) token = EP_FULL;
        }
        if (ep_sums_first(summing) || token >= a.tokens) ep_sum_oldest(r, a, summing);
    }
}
#endif
