/*
 * ep_meet.h: meetings of a block's threads, and of a launch's blocks.
 */
#ifndef EP_MEET_H
#define EP_MEET_H
#include "ep_rank.h"

/* True in every thread of the block that comes last. What all blocks did before is visible to that block. Every thread of
   every block must call it. */
EP_DEV bool ep_last_block(const EpRank& r, ep_u32 meeting) {
    bool last = false;
    ep_block_meet();
    if (ep_thread() == 0) {
        ep_fence_device();
        const ep_u32 before = ep_atomic_add(&ep_local(r)->arrived[meeting], 1u);
        last = before + 1 == ep_blocks();
        if (last) {
            ep_local(r)->arrived[meeting] = 0;
            ep_fence_device();
        }
    }
    return ep_block_any(last);
}

/* The same, and the rank has not failed: looked at together, as a thread that goes on may fail while another looks. */
EP_DEV bool ep_last_block_goes_on(const EpRank& r, ep_u32 meeting) { return ep_last_block(r, meeting) && !ep_block_any(ep_failed(r)); }

#endif
