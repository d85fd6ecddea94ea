/*
 * ep_give_up_kernel: tells a rank of this node that this one goes on without it, in the generation that is left. It may be pulling what lies here, and
 * looks when it has pulled (ep_last_block_has_pulled): what is written here afterwards it does not use.
 *
 *   launch   one block of 32 threads, between operations, before anything is written in the next generation
 */
#include "ep_fail.h"

EP_KERNEL(32) ep_give_up_kernel(EP_GIVEN(EpRank) r, EP_GIVEN(EpOfPeerArgs) a) {
    if (ep_thread() != 0 || !ep_takes_part(r, a.peer)) return;
    const ep_u64 op = ep_local(r)->ops_done + 1;
    ep_publish(r, a.peer, EP_LANE_WATCH, EP_COUNTER_ALARM, ep_alarm_of_leaving(op, EP_PHASE_ALARM, a.peer));
    ep_fence_sys();
}
