/*
 * ep_low_end.h: the end of a launch of low latency: which block is last, and what it settles.
 */
#ifndef EP_LOW_END_H
#define EP_LOW_END_H
#include "ep_low_shares.h"
#include "ep_low_watch.h"

/* What ep_low_last_block says: not the last; the last; the last of a launch with EP_LOW_TROUBLE, in which a block has counted or not. */
#define EP_LOW_NOT_LAST 0u
#define EP_LOW_LAST 1u
#define EP_LOW_LAST_IN_TROUBLE 2u
#define EP_LOW_LAST_IN_TROUBLE_COUNTED 3u

/* Which block comes last. It knows that the others have done with what they read; what those wrote that have `counted`, or are `fenced`, it sees after a
   fence of the GPU; for what is written to the user's memory, the end of the launch is enough. Every thread of every block must call it. */
EP_DEV ep_u32 ep_low_last_block(const EpRank& r, bool counted, bool fenced) {
    __shared__ ep_u32 last;
    __syncthreads();
    if (threadIdx.x == 0) {
        if (counted || fenced) ep_fence_device();
        const ep_u32 mine = 1u + (counted ? EP_LOW_COUNTED : 0), all = atomicAdd(&ep_low_state(r)->arrived, mine) + mine;
        last = (all & ~(EP_LOW_TROUBLE | EP_LOW_COUNTED)) != gridDim.x ? EP_LOW_NOT_LAST
               : !(all & EP_LOW_TROUBLE) && !ep_crashed(r)             ? EP_LOW_LAST
               : all & EP_LOW_COUNTED                                  ? EP_LOW_LAST_IN_TROUBLE_COUNTED
                                                                       : EP_LOW_LAST_IN_TROUBLE;
    }
    __syncthreads();
    return last;
}

/* Says to peer that op was received. By one thread. */
EP_DEV void ep_low_tell_received(const EpRank& r, ep_u64 op, ep_u32 peer) {
    ep_fence_sys();
    ep_low_publish(r, peer, EP_LANE_LOW_DONE, EP_COUNTER_RECEIVED, op);
}

/* A planted fault: block 0 says so when it has received its own part, before all blocks have counted themselves. Those of the last rank come late: the
   others have filled the bank anew by then. By all threads, before and behind what is received. */
EP_DEV void ep_low_come_late(const EpRank& r) {
    if (!ep_planted(r, EP_PLANT_LOW_TOLD_EARLY) || blockIdx.x == 0) return;
    EP_SHORT for (ep_u32 i = 0; threadIdx.x == 0 && i < 64; ++i) ep_be_last(r);
    __syncthreads();
}
EP_DEV void ep_low_tell_early(const EpRank& r, ep_u64 op) {
    if (!ep_planted(r, EP_PLANT_LOW_TOLD_EARLY) || blockIdx.x != 0) return;
    EP_SHORT for (ep_u32 peer = ep_low_served(); peer < r.w.ranks; peer += EP_LOW_THREADS)
        if (peer != r.me && ep_low_takes_part(peer)) ep_low_tell_received(r, op, peer);
}

/* A rank was not sent all, because its bank was not free. */
EP_RARE void ep_low_fail_late(const EpRank& r, ep_u64 op, ep_u32 peer, ep_u64 began) {
    const bool gone = ep_low_is_gone(r, peer);
    const ep_u32 trouble = ep_low_far_trouble(r, peer);
    const ep_u32 status = gone ? EP_STATUS_GONE : trouble != 0 ? EP_STATUS_LANE : EP_STATUS_TIMEOUT;
    const ep_u32 culprit = gone ? peer : trouble != 0 ? ep_far_culprit(r, peer, trouble) : ep_low_culprit(r, peer);
    ep_low_fail(r, op, status, EP_PHASE_BANK, peer, culprit, EP_LANE_LOW_DONE, ep_peek(r, peer, EP_LANE_LOW_DONE, EP_COUNTER_RECEIVED), op - 2,
                ep_now() - began, trouble);
}

/* Settles what a launch in trouble leaves: who is late, and what was said. True when it has failed. By all threads of the last block. */
EP_RARE bool ep_low_settle(const EpRank& r, ep_u64 op, ep_u32 phases, bool rows, ep_u64 began) {
    EpLow* low = ep_low_state(r);
    ep_u32 *skipped = ep_low_skipped(r), *late = ep_low_late(r, op);
    ep_fence_device();
    bool is_late = false;
    if (rows)
        EP_SHORT for (ep_u32 peer = threadIdx.x; peer < r.w.ranks; peer += EP_LOW_THREADS) {
            const bool is = __ldcg(skipped + peer) != 0 && ep_takes_part(r, peer);
            late[peer] = is;
            skipped[peer] = 0;
            if (is && (phases & EP_LOW_RECEIVE)) ep_low_fail_late(r, op, peer, began);
            is_late |= is;
        }
    is_late = __syncthreads_or(is_late);
    const bool failed = ep_low_failed(r);
    __syncthreads();
    if (threadIdx.x == 0) {
        if (rows) low->late[op % 2] = is_late;
        if (ep_ld_relaxed(&low->said) && !failed) {
            ep_low_say(r, r.me);
            low->said = 0;
        }
        low->voice = 0;
        low->poster = 0;
        low->broken = failed;
        low->failed = 0;
    }
    return failed;
}

/* Clears what units come to in the bank of op: in the first operation of a stretch of tags, once it was read. Peers put there again when they have
   seen Received. By all threads of the last block. */
EP_RARE void ep_low_clear_units(const EpRank& r, ep_u64 op) {
    ep_u8* at = ep_low_own(r) + ep_low_unit_head(r.w, op, 0);
    EP_SHORT for (ep_u64 i = threadIdx.x * EP_UNIT_BYTES; i < r.w.ranks * r.w.low_unit_part_bytes; i += EP_LOW_THREADS * EP_UNIT_BYTES)
        ep_st16(at + i, ep_unit(0, 0, 0, 0));
    __syncthreads();
}

/* Ends a launch: what was sent and received counts, unless it failed. By all threads of the last block. `tried`: whether rows were
   to be put; `refused`: bad choices, so that nothing was. A rank that was not sent all fails the receiving half. True when the
   operation was received. */
EP_DEV bool ep_low_end(const EpRank& r, const EpLowNow& now, ep_u64 op, ep_u32 phases, bool tried, bool refused, bool trouble, ep_u64 began) {
    EpLow* low = ep_low_state(r);
    const bool rows = tried && !refused;
    const bool failed = trouble && ep_low_settle(r, op, phases, rows, began);
    const bool received = (phases & EP_LOW_RECEIVE) && !failed;
    if (received && ep_low_begins_era(now, op)) ep_low_clear_units(r, op);
    if (tried) {
        ep_low_free_shares(r);
        ep_low_count_anew(r);
    }
    /* The first threads count meanwhile. */
    EP_SHORT for (ep_u32 peer = ep_low_served(); peer < r.w.ranks; peer += EP_LOW_THREADS) {
        if (received && peer != r.me && ep_low_takes_part(peer)) ep_low_tell_received(r, op, peer);
        if (rows && !trouble) ep_low_late(r, op)[peer] = 0;
    }
    if (threadIdx.x == 0) {
        low->arrived = 0;
        if (rows && !trouble) low->late[op % 2] = 0;
        if ((phases & EP_LOW_SEND) && !refused) low->sent = op;
        if (received) low->received = op;
    }
    return received;
}
#endif
