/*
 * ep_slots_kernel: where rows by expert are to stand. Each choice of the rows that came gets a slot; the rows themselves are copied there by the
 * launch behind (spread.cu). How many rows came, only the device may know.
 *
 *   launch   any number of blocks of up to EP_SLOTS_WARPS warps, behind the kernels that bring the rows and their choices. It speaks to no
 *            other rank, unless it fails
 *   memory   u32 [2 + warps, local experts] (ep_slots.h)
 *   waits    for blocks of lower index of this launch, which were started before it: so blocks need not all run at once (ep_slots.h)
 *   rules    received choices, or the headers that they are unpacked from, were written before this launch: the stream orders them
 */
#include "ep_slots.h"

EP_POOL(ep_pool);

extern "C" __global__ void __launch_bounds__(32 * EP_SLOTS_WARPS, 1) ep_slots_kernel(const __grid_constant__ EpRank r,
                                                                     const __grid_constant__ EpSlotsArgs a) {
    /* Together: a block that runs already may fail meanwhile. */
    if (ep_block_any(ep_closed(r))) return;
    const ep_u64 began = ep_now();
    const ep_u32 local = r.w.local_experts, lane = ep_warp_lane(), warps = ep_threads() / 32;
    ep_u32* first = a.tables ? (ep_u32*)a.tables + (ep_u64)ep_block() * (2 + warps) * local : (ep_u32*)(ep_u8*)ep_pool;
    ep_u32* next = first + (ep_u64)(1 + ep_warp()) * local;
    const ep_u32 came = ((const ep_u32*)a.first_of)[r.w.ranks], received = came < a.rows ? came : a.rows;
    const EpShareOf share = ep_share_of(received);
    for (ep_u32 e = lane; e < local; e += 32) next[e] = 0;
    ep_warp_meet();
    ep_unpack_share(r, a, share);
    ep_count_choices(r, a, share, next);
    if (ep_warp() == 0) ep_first_slots(r, a, first);
    ep_block_meet();
    const ep_u32 taken = ep_slots_taken(r, a, first);
    if (taken > a.room) {
        if (ep_thread() == 0) ep_fail_mismatch(r, r.me, EP_FIELD_SLOTS, a.room, taken);
        return;
    }
    if (a.out_first && ep_block() == 0 && ep_warp() == 0) ep_tell_slots(r, a, first);
    ep_clear_spare_rows(r, a, received);
    ep_clear_weights(a);
    if (!ep_begin_shares(r, a, first, first + local, first + (ep_u64)(1 + warps) * local, began)) return;
    ep_place_share(r, a, share, first, next);
}
