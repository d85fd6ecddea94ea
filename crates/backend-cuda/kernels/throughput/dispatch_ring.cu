/*
 * ep_dispatch_ring_kernel: a dispatch whose rows go through rings (ep_dispatch_ring.h).
 *
 *   launch   enough warps for all roles, co-resident with those of the other ranks (cooperative)
 *   roles    those of the rings. The block that comes last ends the operation
 *   memory   none of its own
 *
 * With direct placement it follows ep_dispatch_kernel where that has too few warps for all roles; it ends at once where that left
 * nothing to do.
 */
#include "ep_dispatch_ring.h"

EP_KERNEL(32 * EP_RING_WARPS) ep_dispatch_ring_kernel(EP_GIVEN(EpRank) r, EP_GIVEN(EpDispatchRingArgs) a) {
    if (ep_block_any(ep_closed(r))) return;
    if (a.notes && ep_local(r)->rings == 0) return;
    const ep_u64 began = ep_now();
    if (ep_block() == 0)
        for (ep_u32 peer = ep_thread(); peer < r.w.ranks; peer += ep_threads())
            if (peer != r.me && ep_takes_part(r, peer)) ep_open(r, peer);
    ep_play_ring_role(r, a, ep_block() * (ep_threads() / 32) + ep_thread() / 32, began);
    if (!ep_last_block(r, EP_MEETING_MOVED)) return;
    if (ep_failed(r)) return;
    ep_say_done(r);
    ep_count_op(r);
}
