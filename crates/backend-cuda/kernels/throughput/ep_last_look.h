/*
 * ep_last_look.h: the end of a launch that has pulled. Who was given up may have pulled what was written anew, and knows it by then (give_up.cu).
 */
#ifndef EP_LAST_LOOK_H
#define EP_LAST_LOOK_H
#include "ep_meet.h"
#include "ep_wait.h"

/* ep_last_block_goes_on, behind what a launch has pulled, which is within a node: no peer has said that it goes on without this rank. What was pulled
   from there may not be what lay there, else; so the rank fails. No system fence stands before the look: all that was pulled has come, or the blocks
   would not have met, and an alarm that lay in this rank's own window before is found by a load that begins afterwards. (A fence took 0.8 us.) */
EP_DEV bool ep_last_block_has_pulled(const EpRank& r, ep_u32 meeting) {
    if (!ep_last_block(r, meeting)) return false;
    for (ep_u32 peer = ep_thread(); peer < r.w.ranks; peer += ep_threads()) {
        if (peer == r.me || !ep_takes_part(r, peer)) continue;
        const ep_u64 alarm = ep_peek(r, peer, EP_LANE_WATCH, EP_COUNTER_ALARM);
        if (ep_alarm_ends(alarm, ep_op(r), r.me) && ep_alarm_peer(alarm) == r.me)
            ep_fail(r, EP_STATUS_ABORTED, EP_PHASE_ALARM, peer, r.me, EP_LANE_WATCH, 0, 0, 0, 0);
    }
    return !ep_block_any(ep_failed(r));
}

#endif
