/*
 * ep_notes.h: what opens and ends an operation in every kernel that moves rows: notes, Done, the count of operations.
 */
#ifndef EP_NOTES_H
#define EP_NOTES_H
#include "ep_meet.h"
#include "ep_wait.h"

/* Of a launch that was enqueued before the host knew the counts: whether they say that it has no room. Then it does nothing, and the host enqueues another
   behind it. */
EP_DEV bool ep_stays(const EpRank& r, ep_u32 ahead) { return ahead != 0 && ep_local(r)->ahead == 0; }

EP_DEV ep_u32 ep_round_128(ep_u32 bytes) { return (bytes + 127) / 128 * 128; }

/* Tells every rank of the node where this rank's block lies (a grant or an offer; EP_NO_BASE: through the ring). By the first `threads` threads
   of one block, a thread a peer. `first` says of an offer what EP_OFFERS_... name. */
EP_DEV void ep_send_notes(const EpRank& r, ep_u64 base, ep_u32 rows, ep_u32 first, ep_u32 threads, ep_u64 began) {
    for (ep_u32 peer = ep_thread(); peer < r.w.ranks; peer += threads) {
        if (!ep_is_neighbour(r, peer)) continue;
        ep_open(r, peer);
        if (ep_is_beyond(r, peer)) continue; /* blocks are a node's own affair */
        if (!ep_wait_bank(r, peer, began)) continue;
        ep_put_message(ep_at(r, peer, ep_note(r.w, ep_op(r), r.me)), EpNote{ep_header(r, rows, first), base});
        ep_fence_sys();
        ep_publish(r, peer, EP_LANE_CONTROL, EP_COUNTER_NOTE, ep_op(r));
    }
}

/* Refuses a block that leaves the window of its owner (F8): a note is input. */
EP_DEV bool ep_check_block(const EpRank& r, ep_u32 peer, const EpNote& note, ep_u64 bytes) {
    if (ep_is_within(r.w, note.base, bytes)) return true;
    ep_fail_mismatch(r, peer, EP_FIELD_BLOCK, r.w.window_bytes, note.base + bytes);
    return false;
}

/* Says that everything that peers gave has been read. By all threads of the last block, which have read it. */
EP_DEV void ep_say_done(const EpRank& r) {
    const ep_u64 op = ep_op(r);
    ep_block_meet();
    for (ep_u32 peer = ep_thread(); peer < r.w.ranks; peer += ep_threads())
        if (ep_is_neighbour(r, peer)) {
            ep_fence_sys();
            ep_publish(r, peer, EP_LANE_CONTROL, EP_COUNTER_DONE, op);
        }
}

/* Counts the operation as ended, and its rows: tally is u64 [4, ranks], rows of dispatches sent and received, and of combines; then
   [local experts], choices received; then operations. By all threads of the last block; not after a failure. */
EP_DEV void ep_count_op(const EpRank& r) {
    const ep_u64 op = ep_op(r);
    ep_block_meet();
    if (ep_failed(r)) return;
    if (ep_thread() == 0) {
        EpLocal* local = ep_local(r);
        if (local->told != 0) {
            /* It has ended well: what was said explains nothing any more. */
            ep_tell(r, 0, op, EP_PHASE_ALARM, r.me);
            local->told = local->foremost = 0;
        }
        local->ops_done = op;
    }
    if (r.tally == 0) return;
    const ep_u32 ranks = r.w.ranks;
    const ep_u32* matrix = (const ep_u32*)((const EpPlan*)r.plan + 1);
    const bool back = r.kind == EP_KIND_COMBINE;
    ep_u64* tally = (ep_u64*)r.tally + (back ? 2 * ranks : 0);
#pragma unroll 1
    for (ep_u32 peer = ep_thread(); peer < ranks; peer += ep_threads()) {
        /* Rows of rings between nodes are counted where they are (ep_tally_far). Within a node a rank passes on what came along its rail. */
        if (ep_is_beyond(r, peer)) continue;
        ep_u64 there = 0, here = 0;
        for (ep_u32 rail = r.me % r.w.ranks_per_node; rail < ranks; rail += r.w.ranks_per_node) there += matrix[rail * ranks + peer];
        for (ep_u32 rail = peer % r.w.ranks_per_node; rail < ranks; rail += r.w.ranks_per_node) here += matrix[rail * ranks + r.me];
        tally[peer] += back ? here : there;
        tally[ranks + peer] += back ? there : here;
    }
    if (ep_thread() == 0) ((ep_u64*)r.tally)[4 * ranks + r.w.local_experts] += 1;
}
#endif
