/*
 * ep_low_banks.h: the sending halves of low latency: which ranks may be put to, and what is said to them first.
 *
 * A rank whose bank is not free is waited for; the others are served meanwhile. Of a rank of another node the staging memory must be free, too.
 */
#ifndef EP_LOW_BANKS_H
#define EP_LOW_BANKS_H
#include "ep_low_watch.h"

/* What a block has still to do for a rank: `state` of the functions below, in shared memory. */
#define EP_PEER_DONE 0u
#define EP_PEER_WAITED_FOR 1u
#define EP_PEER_NOW 2u
#define EP_PEER_LONG_WAITED_FOR 3u

EP_DEV void ep_low_open(const EpRank& r, ep_u64 op, bool again, ep_u32* state) {
    EP_SHORT for (ep_u32 peer = ep_low_served(); peer < r.w.ranks; peer += EP_LOW_THREADS)
        state[peer] = ep_low_takes_part(peer) && (!again || ep_low_late(r, op)[peer]) ? EP_PEER_WAITED_FOR : EP_PEER_DONE;
}

/* What the served rank has received, as its cell says at the start of a launch. Loaded before anything is waited for, so it costs no time. */
EP_DEV ep_u64 ep_low_early(const EpRank& r, ep_u64 window) {
    const ep_u32 peer = ep_low_served();
    if (peer >= r.w.ranks) return 0;
    return ep_value_in(r.generation, ep_ld_acquire((const ep_u8*)window + ep_cell(r.w, r.generation, peer, EP_LANE_LOW_DONE, EP_COUNTER_RECEIVED)));
}

/* What ep_low_look has found. */
#define EP_FOUND_NOW 1
#define EP_FOUND_WAITING 2

/* Looks for ranks whose banks are free. Where `owed` is given, ranks that are owed nothing are not waited for. `early`: of ep_low_early, at the
   first look. */
EP_DEV int ep_low_look(const EpRank& r, ep_u64 op, const ep_u32* owed, ep_u32* state, ep_u64 began, bool gives_up, const ep_u64* early) {
    int found = 0;
    EP_SHORT for (ep_u32 peer = ep_low_served(); peer < r.w.ranks; peer += EP_LOW_THREADS) {
        if (state[peer] == EP_PEER_DONE) continue;
        /* Both loads are on their way before either is looked at. */
        const ep_u32 due = owed ? owed[peer] : 1;
        const ep_u64 received =
            early && peer == ep_low_served() ? *early : ep_low_peek(r, peer, EP_LANE_LOW_DONE, EP_COUNTER_RECEIVED);
        const ep_u64 seen = peer == r.me || due == 0 ? op : received;
        if (seen == EP_MASKED) {
            state[peer] = EP_PEER_DONE; /* the receiving half says so */
            ep_low_skip(r, peer);
        } else if (seen + 2 >= op && (due == 0 || ep_low_may_stage(r, op, peer))) {
            if (state[peer] == EP_PEER_LONG_WAITED_FOR) ep_low_came(r, peer);
            state[peer] = EP_PEER_NOW;
            found |= EP_FOUND_NOW;
        } else if (gives_up && ep_low_vain(r, peer, began) &&
                   ep_low_peek(r, peer, EP_LANE_LOW_DONE, EP_COUNTER_RECEIVED) == seen) {
            state[peer] = EP_PEER_DONE; /* it is late */
            ep_low_skip(r, peer);
        } else {
            if (gives_up) state[peer] = EP_PEER_LONG_WAITED_FOR;
            found |= EP_FOUND_WAITING;
        }
    }
    return found;
}

/* The rare part of ep_low_next: nothing is free yet. */
EP_RARE bool ep_low_next_later(const EpRank& r, ep_u64 op, const ep_u32* owed, ep_u32* state, ep_u64 began, int found) {
    for (ep_u32 spin = 1;; ++spin) {
        if (!__syncthreads_or(found & EP_FOUND_WAITING)) return false;
        ep_low_pause(spin);
        found = ep_low_look(r, op, owed, state, began, spin % EP_LOW_LONG == 0, nullptr);
        if (__syncthreads_or(found & EP_FOUND_NOW)) return true;
    }
}
/* Waits until there are ranks whose banks are free; false when nothing is left to do. `found` by a first look. By all threads. */
EP_DEV bool ep_low_next(const EpRank& r, ep_u64 op, const ep_u32* owed, ep_u32* state, ep_u64 began, int found) {
    return __syncthreads_or(found & EP_FOUND_NOW) || ep_low_next_later(r, op, owed, state, began, found);
}

/* Says to peer how many rows come. What announces them lies before them. By one thread, after a fence. */
EP_DEV void ep_low_arrive(const EpRank& r, ep_u64 op, ep_u32 kind, ep_u32 peer, ep_u32 rows) {
    ep_low_publish(r, peer, EP_LANE_LOW_ROWS, op % 2 ? EP_COUNTER_ODD : EP_COUNTER_EVEN,
                   ep_arrival(r.w, op, kind, rows + (ep_planted(r, EP_PLANT_LOW_COUNT_OFF_BY_ONE) ? 1 : 0)));
}

/* Whether a rank that this thread serves is still waited for. */
EP_DEV bool ep_low_is_left(const EpRank& r, const ep_u32* state) {
    bool left = false;
    EP_SHORT for (ep_u32 peer = ep_low_served(); peer < r.w.ranks; peer += EP_LOW_THREADS)
        left |= state[peer] != EP_PEER_DONE && state[peer] != EP_PEER_NOW;
    return left;
}

/* This block has put all that it has for the ranks that are filled now. By all threads, after a barrier behind their last look at
   `state`. */
EP_DEV void ep_low_finish(const EpRank& r, ep_u32* state) {
    EP_SHORT for (ep_u32 peer = ep_low_served(); peer < r.w.ranks; peer += EP_LOW_THREADS)
        if (state[peer] == EP_PEER_NOW) state[peer] = EP_PEER_DONE;
}
#endif
