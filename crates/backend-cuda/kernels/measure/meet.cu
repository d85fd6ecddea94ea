/*
 * ep_meet_kernel: all ranks come together on their devices, so that a measurement starts everywhere at the same moment. Over several nodes each
 * waits for its neighbours: then the moments differ by as much as a signal takes between nodes.
 *
 *   launch   one block of 32 threads; uses the probe cells of the watch lanes. `number` rises from meeting to meeting
 *
 * All then wait `pause` nanoseconds, so that what follows on the stream is enqueued before it may begin: the host's time for
 * launches is not measured.
 */
#include "ep_wait.h"

extern "C" __global__ void __launch_bounds__(32, 1) ep_meet_kernel(const __grid_constant__ EpRank r,
                                                                  const __grid_constant__ EpMeetArgs a) {
    if (ep_failed(r)) return;
    const ep_u64 began = ep_now();
    for (ep_u32 peer = threadIdx.x; peer < r.w.ranks; peer += 32)
        if (ep_is_neighbour(r, peer)) ep_publish(r, peer, EP_LANE_WATCH, EP_COUNTER_PROBE, a.number);
    /* No wait of an operation, which would take what a faster rank begins meanwhile for another kind than its own. Who does not come is told by what
       follows. */
    for (ep_u32 peer = threadIdx.x; peer < r.w.ranks; peer += 32)
        while (ep_is_neighbour(r, peer) && ep_peek(r, peer, EP_LANE_WATCH, EP_COUNTER_PROBE) < a.number && ep_now() - began < r.allowed) {}
    __syncwarp();
    const ep_u64 met = ep_now();
    while (ep_now() - met < a.pause) {}
}
