/*
 * ep_low_latency::dispatch: low-latency dispatch. Each token goes once to every rank that holds one of its experts, into a fixed
 * slot there; the receiver spreads it to its experts, or keeps each row once, by source.
 *
 *   launch   any number of blocks of 512 threads, which need not all run at a time; phases says which halves
 *   memory   memory for units of the windows (ep_layout.h); slots, headers and cells where there are several nodes; shared: one row as it travels;
 *            counts; the rows of a batch
 *   send     share b, of block b, are the rows of tokens b, b + blocks, ...: quantised once, and stored to the place of the token at each of its
 *            ranks with 16 bytes a thread. Whoever has a share that tells finds all rows' order, and sends the headers of its part of the tokens
 *            ahead; with the last of these shares go the counts (ep_low_shares.h)
 *   receive  rows are packed by expert, or all together, in order of source and token. A block finds the places of its own, waits for them and copies them. One
 *            tells the user how many there are instead. Consumers learn of rows as they come, where the caller says so (ep_low_early.h)
 *   roles    the shares that tell, the blocks that move and the one that counts are those of EpLowRoles
 *   travel   within one node as units, which announce themselves (ep_low_send_units.h, ep_low_receive_units.h); with several nodes in slots, which
 *            cells announce (ep_low_send_cells.h, ep_low_receive_cells.h)
 *   rules    ep_low.h
 */
#include "ep_low_end.h"
#ifdef EP_FAR_H
#include "ep_low_receive_cells.h"
#else
#include "ep_low_receive_units.h"
#endif
#include "ep_low_send.h"

namespace ep_low_latency {
/* Profilers, and those who look for kernels in their tables by such names, see it as ep_low_latency::dispatch. */
__global__ void __launch_bounds__(EP_LOW_THREADS, 1)
    dispatch(const __grid_constant__ EpRank r, const __grid_constant__ EpLowDispatchArgs a) {
    ep_wait_for_launches_before();
    const ep_u64 began = ep_now();
    /* Loads that wait for nothing come first. */
    const EpLowNow now = ep_low_now(r);
    const bool sends = a.phases & EP_LOW_SEND, receives = a.phases & EP_LOW_RECEIVE;
    EpLowAhead ahead;
    ep_u64 early = 0;
    bool own = true, looked = false, bad = false;
    if (sends) {
        if (threadIdx.x == 0) own = ep_low_take(r, blockIdx.x);
        ahead = ep_low_begin(r, a);
    }
    ep_low_bring_windows(r);
    /* While they are under way. */
    if (sends) {
        early = ep_low_early(r, a.window);
        looked = ep_low_looks_soon(r, a);
        if (looked) bad = ep_low_look_at(r, a, ep_low_sender(r, 0), 0, a.tokens, false, false, nullptr);
    }
    if (ep_low_closed(r, now, a.phases, a.in_flight) || ep_low_crashed(r)) {
        if (sends && threadIdx.x == 0 && own) *ep_low_taken(r, blockIdx.x) = 0;
#ifndef EP_FAR_H
        if (a.early != 0 && blockIdx.x == 0 && threadIdx.x == 0) ep_low_stop_early(a, sends);
#endif
        return;
    }
    const ep_u64 op = sends ? now.sent + 1 : now.received + 1;
    const bool tries = sends || now.late(op);
    if (tries && !sends) {
        if (threadIdx.x == 0) own = ep_low_take(r, blockIdx.x);
        early = ep_low_early(r, a.window);
    }
    const ep_u32 tag = ep_unit_tag(now.serials + op);
    bool refused = false, counted = false;
    if (tries) refused = ep_low_send_tokens(r, a, op, tag, !sends, own, looked, bad, ahead, early, began);
    /* Not before: between nodes every register counts. */
    const EpLowReceiver s = ep_low_receiver(r, tag);
    if (receives && !refused) {
        __syncthreads();
        counted = ep_low_receive(r, a, s, op, began);
    }
    ep_let_next_begin();
    const ep_u32 last = ep_low_last_block(r, counted, a.early != 0);
    /* Nobody waits for it. */
    if (counted) ep_low_tally(r, a, 1);
    if (last == EP_LOW_NOT_LAST) return;
#ifdef EP_TEST
    /* What a launch in trouble leaves may be received once more. */
    if (receives && !refused && last == EP_LOW_LAST)
        EP_SHORT for (ep_u32 item = threadIdx.x / 32; item < r.w.ranks * r.w.max_tokens; item += EP_LOW_WARPS)
            if (item / r.w.ranks < s.rows[item % r.w.ranks]) ep_low_forget(r, s, op, item % r.w.ranks, item / r.w.ranks);
    /* Before anybody is told that it may put there again. */
    __syncthreads();
#endif
    const bool received = ep_low_end(r, now, op, a.phases, tries, refused, last != EP_LOW_LAST, began);
    if (last == EP_LOW_LAST_IN_TROUBLE_COUNTED && !received) ep_low_untally(r, a);
#ifndef EP_FAR_H
    if (a.early == 0) return;
    if (!refused) ep_low_end_early(r, a, sends, receives, received);
    else if (threadIdx.x == 0) ep_low_stop_early(a, sends);
#endif
}
} // namespace ep_low_latency
