/*
 * ep_low_early.h: what a low-latency dispatch tells consumers of its rows while these come (EpEarly): how many rows of each block are there, and how many
 * there will be. Within one node.
 *
 *   blocks    the rows of an expert are cut into blocks of early_rows; a block has a counter in each array
 *   begin     the sending half moves `arrived` and `ready` to the next batch; consumers come behind it
 *   counts    as soon as counts are in, one block stores `expected`: by a release, behind what the user learns of counts
 *   rows      a block that has stored its part of some rows passes a barrier; one thread for each row makes fence.acq_rel.gpu and adds 1 to its block's
 *             `arrived`. Where several blocks share a row, each adds 1, and `expected` counts likewise
 *   consumer  ld.acquire.gpu of both by one thread, then a barrier
 *   end       a launch that fails says so in `stopped`, and takes back what it has counted: a receiving half may be repeated
 */
#ifndef EP_LOW_EARLY_H
#define EP_LOW_EARLY_H
#include "ep_low_receiver.h"

/* Counters of each array. */
EP_DEV ep_u32 ep_low_early_counters(const EpRank& r, const EpLowDispatchArgs& a) { return r.w.local_experts * a.early_blocks; }

/* Stores how many rows of each block will come, `shares` times each, and which batch it is for the combine. By all threads of the block that has told
   counts to the user. */
EP_RARE void ep_low_tell_expected(const EpRank& r, const EpLowDispatchArgs& a, ep_u32 shares) {
    const ep_u32 counters = ep_low_early_counters(r, a);
    const ep_u64 epoch = ((const EpEarly*)a.early)->epoch;
    if (threadIdx.x == 0) ((ep_u32*)a.records)[3 * r.w.ranks] = (ep_u32)(epoch >> 32);
    /* What was told is stored. */
    __syncthreads();
    EP_SHORT for (ep_u32 at = threadIdx.x; at < counters; at += EP_LOW_THREADS) {
        const ep_u32 expert = at / a.early_blocks, before = (at - expert * a.early_blocks) * a.early_rows;
        const ep_u32 all = (ep_u32)__ldcg((const ep_i32*)a.expert_counts + expert), left = all > before ? all - before : 0;
        const ep_u32 rows = left < a.early_rows ? left : a.early_rows;
        ep_st_release_gpu((void*)ep_early_expected_at(a.early, counters, at), epoch + rows * shares);
    }
}

/* Counts the rows of a batch, this block's part of which is stored. of, to: of EpLowReceiver. By all threads, after a barrier: a thread serves a row of an
   expert, and a warp those of the row that it has found. */
EP_RARE void ep_low_count_arrived(const EpRank& r, const EpLowDispatchArgs& a, const ep_u32* of, const ep_u32* to) {
    const ep_u32 turn = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane < of[turn]) {
        const ep_u32 wide = r.w.ranks * r.w.max_tokens, place = to[turn * 32 + lane], expert = place / wide;
        const ep_u32 at = expert * a.early_blocks + (place - expert * wide) / a.early_rows;
        ep_fence_device();
        ep_low_add((ep_u64*)ep_early_arrived_at(a.early, at), 1);
    }
    /* The warp's next row takes their place. */
    __syncwarp();
}

/* Begins the next batch where one was sent, and ends one that is `over`: it has come, or the launch has failed. By all threads of the last block, which
   has seen what the others counted. */
EP_RARE void ep_low_end_early(const EpRank& r, const EpLowDispatchArgs& a, bool sent, bool over, bool received) {
    const ep_u32 counters = ep_low_early_counters(r, a);
    EpEarly* early = (EpEarly*)a.early;
    const ep_u64 now = early->epoch, next = now + EP_EPOCH;
    __syncthreads();
    EP_SHORT for (ep_u32 at = threadIdx.x; at < counters; at += EP_LOW_THREADS) {
        ep_u64* arrived = (ep_u64*)ep_early_arrived_at(a.early, at);
        if (sent) *arrived = *(ep_u64*)ep_early_ready_at(a.early, counters, at) = next;
        else if (over && !received) *arrived = now;
    }
    if (threadIdx.x != 0) return;
    if (sent) early->epoch = next;
    if (over) *(volatile ep_u64*)&early->stopped = received ? 0 : now;
}

/* Says that no rows come: a launch does nothing, as an earlier one has failed, or its choices are refused. A half that `sends` begins a batch, whose
   counters nobody moves: consumers wait for them, and see that it is stopped. By one thread. */
EP_DEV void ep_low_stop_early(const EpLowDispatchArgs& a, bool sends) {
    EpEarly* early = (EpEarly*)a.early;
    const ep_u64 epoch = early->epoch + (sends ? EP_EPOCH : 0);
    *(volatile ep_u64*)&early->epoch = epoch;
    *(volatile ep_u64*)&early->stopped = epoch;
}
#endif
