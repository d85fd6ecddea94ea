/*
 * ep_low_last_words_kernel: where there are several nodes, tells all ranks whom this one is about to give up. They may wait for it in low latency, in
 * which nobody tells verdicts; and it may leave with the node of whom it gives up, and be missed before that one is.
 *
 *   launch   one block of 32 threads, between operations, with the EpLocal of throughput mode: alarms of both modes are counted together
 */
#include "ep_fail.h"

extern "C" __global__ void __launch_bounds__(32) ep_low_last_words_kernel(const __grid_constant__ EpRank r,
                                                                          const __grid_constant__ EpOfPeerArgs a) {
    EpLocal* local = ep_local(r);
    if (threadIdx.x != 0 || local->serial >= EP_MAX_ALARM_SERIAL) return;
    local->serial += 1;
    for (ep_u32 other = 0; other < r.w.ranks; ++other)
        if (other != r.me && ep_takes_part(r, other))
            ep_publish(r, other, EP_LANE_WATCH, EP_COUNTER_ALARM, ep_alarm(local->serial, 1, local->ops_done + 1, EP_PHASE_ROWS, a.peer));
}
