/*
 * ep_low_mask_kernel: tells a rank that low latency goes on without it.
 *
 *   launch   one block of 32 threads, after everything that this rank has sent to that one
 */
#include "ep_low.h"

extern "C" __global__ void __launch_bounds__(32) ep_low_mask_kernel(const __grid_constant__ EpRank r,
                                                                    const __grid_constant__ EpOfPeerArgs a) {
    if (threadIdx.x != 0 || !ep_takes_part(r, a.peer)) return;
    if (ep_is_beyond(r, a.peer) && ep_planted(r, EP_PLANT_LOW_FAR_MASK_UNTOLD)) return;
    ep_fence_sys();
    ep_publish(r, a.peer, EP_LANE_LOW_ROWS, EP_COUNTER_EVEN, EP_MASKED);
    ep_publish(r, a.peer, EP_LANE_LOW_ROWS, EP_COUNTER_ODD, EP_MASKED);
    ep_publish(r, a.peer, EP_LANE_LOW_DONE, EP_COUNTER_RECEIVED, EP_MASKED);
}
