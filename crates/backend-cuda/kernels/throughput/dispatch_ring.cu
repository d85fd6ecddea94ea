/*
 * ep_dispatch_ring_kernel: a dispatch whose rows go through rings (ep_dispatch_ring.h; between nodes ep_dispatch_far.h, within them also to their places).
 *
 *   launch   enough warps for all roles, co-resident with those of the other ranks (cooperative)
 *   roles    those of the rings. The block that comes last ends the operation
 *   memory   shared, where there are several nodes: what forwarders need
 *
 * With direct placement on one node it follows ep_dispatch_kernel where that has too few warps for all roles; it ends at once where that left
 * nothing to do.
 */
#include "ep_dispatch_ring.h"
#ifdef EP_FAR_H
#include "ep_dispatch_far.h"

EP_POOL(ep_exits);

/* Opens the operation towards all neighbours: where blocks are granted, those of the node learn of this rank's. By a block. */
EP_DEV void ep_open_all(const EpRank& r, const EpDispatchRingArgs& a, ep_u64 began) {
    if (a.notes) return ep_send_notes(r, a.base, a.base_rows, 0, ep_threads(), began);
    for (ep_u32 peer = ep_thread(); peer < r.w.ranks; peer += ep_threads())
        if (ep_is_neighbour(r, peer)) ep_open(r, peer);
}
#endif

EP_KERNEL(32 * EP_RING_WARPS) ep_dispatch_ring_kernel(EP_GIVEN(EpRank) r, EP_GIVEN(EpDispatchRingArgs) a) {
    if (ep_block_any(ep_closed(r))) return;
#ifdef EP_FAR_H
    const ep_u64 began = ep_now();
    if (ep_block() == 0) ep_open_all(r, a, began);
    const ep_u32 in_block = ep_thread() / 32, warp = ep_block() * (ep_threads() / 32) + in_block;
    ep_play_far_role(r, a, warp, (EpExit*)ep_exits + in_block * r.w.ranks_per_node, began);
    ep_play_near_role(r, a, warp, began);
#else
    if (a.notes && ep_local(r)->rings == 0) return;
    const ep_u64 began = ep_now();
    if (ep_block() == 0)
        for (ep_u32 peer = ep_thread(); peer < r.w.ranks; peer += ep_threads())
            if (ep_is_neighbour(r, peer)) ep_open(r, peer);
    ep_play_ring_role(r, a, ep_block() * (ep_threads() / 32) + ep_thread() / 32, began);
#endif
    if (!ep_last_block_goes_on(r, EP_MEETING_MOVED)) return;
    ep_say_done(r);
    ep_count_op(r);
}
