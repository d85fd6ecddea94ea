/*
 * ep_offer_none_kernel: what ep_combine_kernel does where nothing can be pulled, between nodes: this rank offers no block, and all its rows go back
 * through rings.
 *
 *   launch   one block of a warp, before ep_combine_ring_kernel on the same stream. A thread waits, as long as the operation may take, until
 *            the bank of its peer's notes is free, and for nothing else
 */
#include "ep_combine_ring.h"

EP_KERNEL(32) ep_offer_none_kernel(EP_GIVEN(EpRank) r, EP_GIVEN(EpCombineRingArgs) a) {
    if (ep_block_any(ep_closed(r))) return;
    ep_send_notes(r, a.combine.base, 0, 0, ep_threads(), ep_now());
    if (ep_thread() == 0) ep_local(r)->rings = 1;
}
