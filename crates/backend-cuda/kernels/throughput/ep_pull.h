/*
 * ep_pull.h: how reducers of a combine go through the parts of their tokens, and know which rows are there.
 *
 *   roles    every warp that pulls in each block takes a part of a token, then the one as many parts on as warps pull in all blocks
 *   memory   shared: how many of each rank's rows a warp knows to be there
 */
#ifndef EP_PULL_H
#define EP_PULL_H
#include "ep_offers.h"

/* How warps go from one part of a token to the next: parts of a row; tokens, and parts beside, from a warp's part to its next. The same
   for all: in shared memory, as registers are all needed. */
struct EpWalk {
    ep_u32 parts;
    ep_u32 tokens;
    ep_u32 rest;
};

/* Of `warps` in all, which sum `bytes` of each row at a time. */
EP_DEV EpWalk ep_walk(const EpRank& r, ep_u32 bytes, ep_u32 warps) {
    const ep_u32 parts = ((ep_u32)r.w.result_stride + bytes - 1) / bytes;
    return {parts, warps / parts, warps % parts};
}
EP_DEV void ep_walk_on(const EpWalk& walk, ep_u32* token, ep_u32* part) {
    *token += walk.tokens;
    *part += walk.rest;
    if (*part >= walk.parts) {
        *part -= walk.parts;
        ++*token;
    }
}

/* What a warp knows at first: rows that come in pieces may not be there. */
EP_DEV void ep_begin_there(const EpRank& r, const EpSource* sources, ep_u32* there) {
    for (ep_u32 rank = threadIdx.x % 32; rank < r.w.ranks; rank += 32) there[rank] = sources[rank].piece > 0 ? 0 : EP_FULL;
    __syncwarp();
}

/* Whether all rows are there, as far as a warp knows: of each rank so many, EP_FULL for all. By a warp. */
EP_DEV bool ep_all_there(const EpRank& r, const ep_u32* there) {
    bool all = true;
    for (ep_u32 rank = threadIdx.x % 32; rank < r.w.ranks; rank += 32) all &= there[rank] == EP_FULL;
    return __all_sync(EP_FULL, all);
}

/* Waits until the row at position of a rank's rows is there; false when that will not happen. By a warp. */
EP_DEV bool ep_await_position(const EpRank& r, const EpSource* sources, ep_u32* there, ep_u32 rank, ep_u32 position, ep_u64 began) {
    if (position < there[rank]) return true;
    const ep_u32 rows = ep_await_row(r, sources[rank], rank, position, began);
    if (rows == 0) return false;
    __syncwarp();
    if (threadIdx.x % 32 == 0) there[rank] = rows;
    __syncwarp();
    return true;
}

#if __CUDA_ARCH__ >= 900
#include "ep_pull_bulk.h"
#else
#include "ep_pull_loads.h"
#endif
#endif
