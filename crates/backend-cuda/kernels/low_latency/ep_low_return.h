/*
 * ep_low_return.h: the sending half of the low-latency combine: the results of a token go to its rank.
 */
#ifndef EP_LOW_RETURN_H
#define EP_LOW_RETURN_H
#include "ep_low_return_cells.h"
#include "ep_low_shares.h"
#ifndef EP_FAR_H
#include "ep_low_return_units.h"
#endif

/* Says to the ranks that are filled now how many results come, where any do. By all threads. */
EP_DEV void ep_low_tell_results(const EpRank& r, const EpLowCombineArgs& a, const ep_u32* owed, ep_u64 op, ep_u32 tag) {
    EP_SHORT for (ep_u32 peer = ep_low_served(); peer < r.w.ranks; peer += EP_LOW_THREADS) {
        /* Who stages results knows how many there are. */
        if (ep_low_states(r)[peer] != EP_PEER_NOW || owed[peer] == 0 || ep_is_beyond(r, peer)) continue;
#ifndef EP_FAR_H
        if (ep_low_as_units(a, ((const ep_u32*)a.records)[2 * r.w.ranks + peer])) {
            ep_low_put_head(r, op, a.kind, peer, owed[peer], 0, tag);
            continue;
        }
#endif
        ep_fence_sys();
        ep_low_arrive(r, op, a.kind, peer, owed[peer]);
    }
}

/* Puts the results of a share, if there is one. False where all shares are known to be taken; otherwise others may be left. `meanwhile` is
   done by warps that have put theirs. */
template <class F>
EP_DEV bool ep_low_return_share(const EpRank& r, const EpLowCombineArgs& a, EpLowBatch& s, ep_u32 share, ep_u64 op, ep_u32 tag, bool again,
                                ep_u64 early, ep_u64 began, F meanwhile) {
    const ep_u32* owed = (const ep_u32*)a.records + (a.kind == EP_LOW_PER_RANK ? 0 : r.w.ranks);
    ep_u32* states = ep_low_states(r);
    const bool is = share != EP_LOW_NO_SHARE;
    const ep_u32 taken = ep_low_look_at_shares(r);
    ep_low_open(r, op, again, states);
    int found = ep_low_look(r, op, owed, states, began, false, &early);
    /* The first rows are found before it is known whose banks are free. */
    EpRange slots = {0, 0};
    bool loaded = is, none = true, ready = true;
#ifndef EP_FAR_H
    EpShareOfRows units = {0, 0, 0, 0};
    if (is && ep_low_firsts(r, true)[r.w.ranks] > 0) units = ep_low_share_of_units(r, share);
    none = units.first == units.last;
    if (!none) ready = ep_low_load_ready_rows(r, a, s, op, units.first, units.last, true, began);
#endif
    if (is && ep_low_firsts(r, false)[r.w.ranks] > 0) slots = ep_low_share_of_slots(r, share);
    if (none && slots.begin < slots.end) ready = ep_low_load_ready_rows(r, a, s, op, slots.begin, slots.end, false, began);
    if (!ready) return false;
    bool rest = false;
    EP_SHORT for (; ep_low_next(r, op, owed, states, began, found); found = EP_FOUND_WAITING) {
        /* Mostly a meeting of the block says that this is all, and none is needed behind what is put. */
        rest = __syncthreads_or(ep_low_is_left(r, states) || taken == 0);
        if (share == a.roles.tells) ep_low_tell_results(r, a, owed, op, tag);
#ifndef EP_FAR_H
        if (!none) ep_low_return_units(r, a, s, units, op, tag, loaded, began);
        /* The batch is read by all until here. */
        if (!none && slots.begin < slots.end) __syncthreads();
#endif
        if (slots.begin < slots.end) ep_low_return_cells(r, a, s, slots, op, loaded && none, began);
        loaded = false;
        meanwhile();
        if (!rest) return false;
        __syncthreads();
        ep_low_finish(r, states);
    }
    return true;
}

/* Puts the results of this block's share, if it is `own`, as the first thread knows, and those of blocks that have not begun. Received rows have
   been counted. */
template <class F>
EP_DEV void ep_low_return_rows(const EpRank& r, const EpLowCombineArgs& a, EpLowBatch& s, ep_u64 op, ep_u32 tag, bool again, bool own, ep_u64 early,
                               ep_u64 began, F meanwhile) {
    ep_u32 share = __syncthreads_and(own) ? blockIdx.x : EP_LOW_NO_SHARE;
    EP_SHORT while (ep_low_return_share(r, a, s, share, op, tag, again, early, began, meanwhile)) {
        share = ep_low_take_another(r);
        if (share == EP_LOW_NO_SHARE) break;
    }
}
#endif
