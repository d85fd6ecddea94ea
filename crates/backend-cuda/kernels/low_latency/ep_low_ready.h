/*
 * ep_low_ready.h: a low-latency combine that begins before all of its experts' results are there: a block waits for those that it is about to read.
 *
 *   counters  `ready` of an EpEarly, of the batch that the dispatch was; or words of 32 bits that the caller clears. One for each block of ready_rows rows
 *             of an expert, ready_blocks for each expert
 *   release   the kernel that makes results: stores, a barrier, fence.acq_rel.gpu, an add to the counter
 *   acquire   ld.acquire by a lane for each result of the batch, then a barrier
 *   compiled  with EP_LOW_READY where there are such results: others pay nothing for it
 *   F6        a wait ends by the deadline, with a fault that names what was awaited. Nobody else is to blame
 */
#ifndef EP_LOW_READY_H
#define EP_LOW_READY_H
#include "ep_low_results.h"

#ifdef EP_LOW_READY
/* Waits until a lane's result is ready, in row `row` of y; false when it will not be, after a fault. */
EP_RARE bool ep_low_await_result(const EpRank& r, const EpLowCombineArgs& a, ep_u64 op, ep_u32 row, ep_u64 began) {
    const ep_u32 wide = r.w.ranks * r.w.max_tokens, expert = row / wide, at = expert * a.ready_blocks + (row - expert * wide) / a.ready_rows;
    ep_u64 due = a.ready_due;
    if (a.ready_epoch != 0) {
        const ep_u32 epoch = ((const ep_u32*)a.records)[3 * r.w.ranks], now = (ep_u32)(*(const volatile ep_u64*)a.ready_epoch >> 32);
        /* A receiving half reads what its sending half has waited for. */
        if ((a.phases & EP_LOW_SEND) && now != epoch) {
            ep_low_mismatch(r, op, r.me, EP_LOW_FIELD_READY_EPOCH, epoch, now);
            return false;
        }
        due += (ep_u64)epoch << 32;
    }
    for (ep_u32 spin = 1;; ++spin) {
        const ep_u64 seen = a.ready_epoch != 0 ? ep_ld_acquire_gpu((const ep_u64*)a.ready + at) : ep_ld_acquire4((const ep_u32*)a.ready + at);
        if (seen >= due) return true;
        if (spin % EP_LOW_LONG == 0) {
            if (ep_low_failed(r)) return false;
            const ep_u64 waited = ep_now() - began;
            if (waited >= r.allowed) {
                ep_low_fail(r, op, EP_STATUS_TIMEOUT, EP_PHASE_RESULTS, r.me, r.me, EP_LANE_LOW_ROWS, (ep_u32)seen, (ep_u32)due, waited, 0);
                return false;
            }
        }
        ep_nap(50);
    }
}
#endif

/* As ep_low_load_rows, and waits until what these rows are made of is ready, where that is asked for; false when it will not be, after a fault. By all
   threads. */
EP_DEV bool ep_low_load_ready_rows(const EpRank& r, const EpLowCombineArgs& a, EpLowBatch& s, ep_u64 op, ep_u32 base, ep_u32 end, bool as_units,
                                   ep_u64 began) {
#ifndef EP_LOW_READY
    ep_low_load_rows(r, a, s, op, base, end, as_units);
    return true;
#else
    const ep_u32 batch = ep_low_load_rows(r, a, s, op, base, end, as_units);
    if (ep_planted(r, EP_PLANT_LOW_RESULTS_UNAWAITED)) return true;
    const ep_u32 turn = threadIdx.x / 32, lane = threadIdx.x % 32;
    __syncwarp();
    bool is = true;
    if (turn < batch && lane < s.count[turn]) is = ep_low_await_result(r, a, op, s.row[turn * 32 + lane], began);
    return __syncthreads_and(is);
#endif
}
#endif
