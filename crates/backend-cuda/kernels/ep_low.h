/*
 * ep_low.h: what the kernels of low latency have in common: state, waits, faults, banks, arrivals, the end of a launch.
 *
 * The roles are those of ep_core::roles::low_latency. An operation has two halves, each a launch of its own, or both in one;
 * its number is read from EpLow, so that a captured launch may be replayed.
 *
 *   banks     rows for operation op may be put once the reader's Received is at least op - 2
 *   arrival   Even or Odd, by the parity of op: says how many rows come, ahead of them. In front of a dispatch's lie their headers (heads),
 *             in order, so that receivers find all places while the rows are under way
 *   rows      each has a cell of its own behind the reader's window, by bank, writer and token, raised to op when the row is there
 *   end       Received = op, published to all peers by the block that ends last
 *   F3        a block's stores, barrier, fence.acq_rel.sys, st
 *   F6        every wait ends by the deadline. A fault is reported once, every block runs to its end, and later launches do
 *             nothing until the host has heard of it. Nothing is said to the others, and nothing is poisoned
 *
 * In launches of low latency EpRank.windows has 0 for ranks that are masked here, EpRank.local is the EpLow, and EpRank.report
 * a report of their own.
 */
#ifndef EP_LOW_H
#define EP_LOW_H
#include "ep_pieces.h"

/* Code that runs once in a launch is as slow as it is long, as every line of it must be fetched. So loops of few turns are not unrolled,
   and what happens rarely is kept out of the way. */
#define EP_SHORT _Pragma("unroll 1")
#define EP_RARE __device__ __noinline__

/* Threads of a block; more would have too few registers. */
#define EP_LOW_THREADS 512u
#define EP_LOW_WARPS (EP_LOW_THREADS / 32)

/* Which halves a launch does. */
#define EP_LOW_SEND 1u
#define EP_LOW_RECEIVE 2u

/* In EpLow.arrived: something of this launch is to be settled at its end: it failed, a rank was skipped, or something was said. Who comes
   last then knows without looking at anything else. */
#define EP_LOW_TROUBLE 0x80000000u

/* EpReport.status, beside those of ep_verbs.h. */
#define EP_STATUS_MASKED 5u

/* EpReport.field of a mismatch. The host has their names in this order. */
#define EP_LOW_FIELD_OP 0u
#define EP_LOW_FIELD_KIND 1u
#define EP_LOW_FIELD_ARRIVAL 2u
#define EP_LOW_FIELD_ROW_OP 3u
#define EP_LOW_FIELD_ROW_SOURCE 4u
#define EP_LOW_FIELD_ROW_TOKEN 5u
#define EP_LOW_FIELD_LEAST_TOKEN 6u
#define EP_LOW_FIELD_TOKENS 7u
#define EP_LOW_FIELD_ROWS 8u
#define EP_LOW_FIELD_RESULTS 9u
#define EP_LOW_FIELD_EXPERT_ROWS 10u
#define EP_LOW_FIELD_GENERATION 11u
#define EP_LOW_FIELD_IN_FLIGHT 12u
#define EP_LOW_FIELD_LAST_OP 13u

/* Low latency of one rank, in its own device memory; zero at first, and in each generation. After it lie u32 skipped[ranks]: not 0
   where a block of this launch has not put its rows for a rank, for each bank u32 late[ranks]: not 0 where a rank is still to be sent
   rows, and u32 gone[ranks] as behind EpLocal. */
struct EpLow {
    ep_u64 sent;     /* operations that were sent */
    ep_u64 received; /* operations that were received */
    ep_u32 failed;   /* not 0: this launch has failed */
    ep_u32 broken;   /* not 0: an earlier one has, and the host has not heard of it yet */
    ep_u32 arrived;  /* blocks that have come to the end of the launch; and EP_LOW_TROUBLE */
    ep_u32 serial;   /* values of Waiting that were published */
    ep_u32 voice;    /* 1 + the rank that this one has said it waits for; 0 for none */
    ep_u32 said;     /* not 0: something was said and not taken back */
    ep_u32 late[2];  /* for each bank: whether there are ranks that were not sent all, because their banks were not free in time */
    ep_u32 generation; /* of the communicator; graphs of an earlier one must not run */
    ep_u32 reserved_word;
    ep_u64 reserved;
};
#ifdef EP_SIZE_LOW
static_assert(sizeof(EpLow) == EP_SIZE_LOW, "EpLow differs from the host's");
#endif

EP_DEV EpLow* ep_low_state(const EpRank& r) { return (EpLow*)r.local; }
EP_DEV ep_u32* ep_low_skipped(const EpRank& r) { return (ep_u32*)(ep_low_state(r) + 1); }
EP_DEV ep_u32* ep_low_late(const EpRank& r, ep_u64 op) {
    return ep_low_skipped(r) + (1 + (ep_u32)(op % 2)) * r.w.ranks;
}
EP_DEV void ep_low_trouble(const EpRank& r) {
    __threadfence();
    atomicOr(&ep_low_state(r)->arrived, EP_LOW_TROUBLE);
}
EP_DEV void ep_low_skip(const EpRank& r, ep_u32 peer) {
    atomicExch(ep_low_skipped(r) + peer, 1u);
    ep_low_trouble(r);
}
EP_DEV bool ep_low_is_gone(const EpRank& r, ep_u32 rank) { return ep_flag(ep_low_skipped(r) + 3 * r.w.ranks + rank); }

/* ---- windows and cells: the windows' addresses, u64 [ranks], lie where shared memory begins, as they are needed at every turn ---- */

extern __shared__ __align__(128) ep_u8 ep_pool[];

/* Brings the addresses. Threads that read those of others than they copied pass a barrier first. */
EP_DEV void ep_low_bring_windows(const EpRank& r) {
    EP_SHORT for (ep_u32 rank = threadIdx.x; rank < r.w.ranks; rank += EP_LOW_THREADS)
        ((ep_u64*)ep_pool)[rank] = ((const ep_u64*)r.windows)[rank];
}
EP_DEV ep_u8* ep_low_window(ep_u32 rank) { return (ep_u8*)((const ep_u64*)ep_pool)[rank]; }
EP_DEV bool ep_low_takes_part(ep_u32 rank) { return ((const ep_u64*)ep_pool)[rank] != 0; }
/* As ep_look and ep_peek. */
EP_DEV ep_u64 ep_low_value(const EpRank& r, ep_u64 cell) {
    return ep_value_in(r.generation, ep_ld_acquire(ep_low_window(r.me) + cell));
}
EP_DEV ep_u64 ep_low_peek(const EpRank& r, ep_u32 writer, ep_u32 lane, ep_u32 counter) {
    return ep_low_value(r, ep_cell(r.w, r.generation, writer, lane, counter));
}


/* Raises a cell at peer, after a fence of the caller's. */
EP_DEV void ep_low_publish(const EpRank& r, ep_u32 peer, ep_u32 lane, ep_u32 counter, ep_u64 value) {
    if (!ep_posts(r, peer, lane, value)) return;
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(ep_low_window(peer) +
                                                            ep_cell(r.w, r.generation, r.me, lane, counter)),
                 "l"(ep_stamp(r.generation, value)) : "memory");
}

/* ---- rows that are announced: memory behind the window, after the cells of ep_pieces.h ---- */

/* The cell of writer's row of token: a row of a dispatch, or all that it has for the token in a combine. */
EP_DEV ep_u64 ep_low_cell(const EpRank& r, ep_u64 op, ep_u32 writer, ep_u32 token) {
    const ep_u64 bank = r.generation % 2 * 2 + op % 2;
    return ep_behind_pieces(r) + ((bank * r.w.ranks + writer) * r.w.max_tokens + token) * EP_CELL_BYTES;
}

/* The header of the row at position among those of source; r.w.header_bytes. The row lies in the slot of its token. */
EP_DEV ep_u64 ep_low_head(const EpRank& r, ep_u64 op, ep_u32 source, ep_u32 position) {
    const ep_u64 cells = 4ull * r.w.ranks * r.w.max_tokens * EP_CELL_BYTES;
    return ep_behind_pieces(r) + cells + ((op % 2 * r.w.ranks + source) * r.w.max_tokens + position) * r.w.header_bytes;
}

/* The row of token is at peer. By one thread, after a barrier behind all that it consists of. */
EP_DEV void ep_low_raise(const EpRank& r, ep_u64 op, ep_u32 peer, ep_u32 token) {
    ep_fence_sys();
    if (!ep_posts(r, peer, EP_LANE_LOW_ROWS, op)) return;
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(ep_low_window(peer) + ep_low_cell(r, op, r.me, token)),
                 "l"(ep_stamp(r.generation, op)) : "memory");
}

/* ---- faults ---- */

/* Reports a fault of op; the first of a launch counts. */
EP_RARE void ep_low_fail(const EpRank& r, ep_u64 op, ep_u32 status, ep_u32 phase, ep_u32 peer, ep_u32 culprit, ep_u32 lane,
                        ep_u64 seen, ep_u64 awaited, ep_u64 waited, ep_u32 field) {
    if (ep_crashed(r) || atomicCAS(&ep_low_state(r)->failed, 0u, 1u) != 0) return;
    ep_low_trouble(r);
    ep_report(r, op, status, phase, peer, culprit, lane, seen, awaited, waited, field);
}
EP_DEV void ep_low_mismatch(const EpRank& r, ep_u64 op, ep_u32 peer, ep_u32 field, ep_u64 mine, ep_u64 theirs) {
    ep_low_fail(r, op, EP_STATUS_MISMATCH, 0, peer, peer, 0, theirs, mine, 0, field);
}
EP_DEV bool ep_low_failed(const EpRank& r) {
    return ep_ld_relaxed(&ep_low_state(r)->failed) != 0 || ep_crashed(r);
}

/* Where low latency is when a launch begins; loaded at once. */
struct EpLowNow {
    ep_u64 sent;
    ep_u64 received;
    ep_u32 broken;
    ep_u32 late_even;
    ep_u32 late_odd;
    ep_u32 generation;
    EP_DEV bool late(ep_u64 op) const { return (op % 2 ? late_odd : late_even) != 0; }
};
EP_DEV EpLowNow ep_low_now(const EpRank& r) {
    const EpLow* low = ep_low_state(r);
    return EpLowNow{low->sent, low->received, low->broken, low->late[0], low->late[1], low->generation};
}

/* Whether a launch must end at once: an earlier one has failed, or it cannot go on from where low latency is. The host sees to that
   for its own calls, but what a graph replays may come at any time: after a recovery; with more or fewer operations in flight than
   `in_flight`, as when it was captured; when no number is left. By all threads, at the start. */
EP_DEV bool ep_low_closed(const EpRank& r, const EpLowNow& at, ep_u32 phases, ep_u32 in_flight) {
    if (at.broken) return true;
    const ep_u64 op = at.sent + 1, flying = at.sent - at.received;
    const bool stale = at.generation != r.generation, other = phases != 0 && flying != in_flight;
    const bool spent = (phases & EP_LOW_SEND) && ep_arrival(r.w, op + 1, 0, 0) > EP_MASKED;
    if (!stale && !other && !spent) return false;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        EpLow* low = ep_low_state(r);
        const ep_u32 field = stale ? EP_LOW_FIELD_GENERATION : other ? EP_LOW_FIELD_IN_FLIGHT : EP_LOW_FIELD_LAST_OP;
        const ep_u64 now = stale ? at.generation : other ? flying : op - 1;
        ep_low_mismatch(r, op, r.me, field, now, stale ? r.generation : other ? in_flight : op);
        low->failed = low->arrived = 0;
        low->broken = 1;
    }
    return true;
}

/* ---- the lookout: who waits for whom ---- */

/* The rank that `rank` has said it waits for; itself where it waits for nobody. */
EP_DEV ep_u32 ep_low_named(const EpRank& r, ep_u32 rank) {
    const ep_u64 said = ep_peek(r, rank, EP_LANE_WATCH, EP_COUNTER_WAITING);
    const ep_u32 named = (ep_u32)(said & 0xffff);
    return said == 0 || named >= r.w.ranks ? rank : named;
}

EP_RARE void ep_low_say(const EpRank& r, ep_u32 rank) {
    const ep_u64 serial = atomicAdd(&ep_low_state(r)->serial, 1u) + 1ull;
    EP_SHORT for (ep_u32 other = 0; other < r.w.ranks; ++other)
        if (other != r.me && ep_takes_part(r, other))
            ep_publish(r, other, EP_LANE_WATCH, EP_COUNTER_WAITING, serial << 16 | rank);
}

/* The end of the chain of those who wait for each other, which begins with `first`. */
EP_RARE ep_u32 ep_low_culprit(const EpRank& r, ep_u32 first) {
    ep_u32 last = first;
    EP_SHORT for (ep_u32 hops = 0; hops < r.w.ranks; ++hops) {
        const ep_u32 next = ep_low_named(r, last);
        if (next == last || next == r.me || !ep_takes_part(r, next)) break;
        ep_u32 before = first;
        EP_SHORT for (ep_u32 hop = 0; hop < hops && before != next; ++hop) before = ep_low_named(r, before);
        if (before == next) break;
        last = next;
    }
    return last;
}

/* The rare part of a wait for peer: says that this rank waits, when it has waited long or is waited for; true when time is up, peer
   is gone, or the launch has failed. */
EP_RARE bool ep_low_vain(const EpRank& r, ep_u32 peer, ep_u64 began) {
    EpLow* low = ep_low_state(r);
    if (ep_low_failed(r) || ep_low_is_gone(r, peer)) return true;
    const ep_u64 waited = ep_now() - began;
    if (waited < r.allowed / 2 || blockIdx.x != 0) return waited >= r.allowed;
    bool speak = waited >= r.allowed / 4 * 3;
    EP_SHORT for (ep_u32 other = 0; other < r.w.ranks && !speak; ++other)
        speak = other != r.me && ep_takes_part(r, other) && ep_low_named(r, other) == r.me;
    if (speak && atomicCAS(&low->voice, 0u, peer + 1) == 0) {
        atomicExch(&low->said, 1u);
        ep_low_trouble(r);
        ep_low_say(r, peer);
    }
    return waited >= r.allowed;
}

/* Peer has delivered. */
EP_DEV void ep_low_came(const EpRank& r, ep_u32 peer) {
    if (blockIdx.x == 0 && ep_ld_relaxed(&ep_low_state(r)->voice) == peer + 1) atomicCAS(&ep_low_state(r)->voice, peer + 1, 0u);
}

/* ---- sending ---- */

/* What a block has still to do for a rank: `state` of the functions below, in shared memory. */
#define EP_PEER_DONE 0u
#define EP_PEER_WAITED_FOR 1u
#define EP_PEER_NOW 2u

/* Threads serve ranks from the last thread on: the first are busy with rows. */
EP_DEV ep_u32 ep_low_served() { return EP_LOW_THREADS - 1 - threadIdx.x; }

EP_DEV void ep_low_open(const EpRank& r, ep_u64 op, bool again, ep_u32* state) {
    EP_SHORT for (ep_u32 peer = ep_low_served(); peer < r.w.ranks; peer += EP_LOW_THREADS)
        state[peer] = ep_low_takes_part(peer) && (!again || ep_low_late(r, op)[peer]) ? EP_PEER_WAITED_FOR : EP_PEER_DONE;
}

/* What ep_low_look has found. */
#define EP_FOUND_NOW 1
#define EP_FOUND_WAITING 2

/* Looks for ranks whose banks are free. Where `owed` is given, ranks that are owed nothing are not waited for. */
EP_DEV int ep_low_look(const EpRank& r, ep_u64 op, const ep_u32* owed, ep_u32* state, ep_u64 began, bool gives_up) {
    int found = 0;
    EP_SHORT for (ep_u32 peer = ep_low_served(); peer < r.w.ranks; peer += EP_LOW_THREADS) {
        if (state[peer] == EP_PEER_DONE) continue;
        const ep_u64 seen = peer == r.me || (owed && owed[peer] == 0)
                                ? op
                                : ep_low_peek(r, peer, EP_LANE_LOW_DONE, EP_COUNTER_RECEIVED);
        if (seen == EP_MASKED) {
            state[peer] = EP_PEER_DONE; /* the receiving half says so */
            ep_low_skip(r, peer);
        } else if (seen + 2 >= op) {
            state[peer] = EP_PEER_NOW;
            found |= EP_FOUND_NOW;
            ep_low_came(r, peer);
        } else if (gives_up && ep_low_vain(r, peer, began) &&
                   ep_low_peek(r, peer, EP_LANE_LOW_DONE, EP_COUNTER_RECEIVED) == seen) {
            state[peer] = EP_PEER_DONE; /* it is late */
            ep_low_skip(r, peer);
        } else {
            found |= EP_FOUND_WAITING;
        }
    }
    return found;
}

/* Waits until there are ranks whose banks are free; false when nothing is left to do. `found` by a first look. By all threads. */
EP_DEV bool ep_low_next(const EpRank& r, ep_u64 op, const ep_u32* owed, ep_u32* state, ep_u64 began, int found) {
    for (ep_u32 spin = 1;; ++spin) {
        if (__syncthreads_or(found & EP_FOUND_NOW)) return true;
        if (!__syncthreads_or(found & EP_FOUND_WAITING)) return false;
        found = ep_low_look(r, op, owed, state, began, spin % 64 == 0);
    }
}

/* Says to the ranks that are filled now how many rows come; where none do, only when `always`. What announces them lies before
   them: after a barrier. */
EP_DEV void ep_low_announce(const EpRank& r, ep_u64 op, ep_u32 kind, const ep_u32* rows, bool always, const ep_u32* state) {
    EP_SHORT for (ep_u32 peer = ep_low_served(); peer < r.w.ranks; peer += EP_LOW_THREADS) {
        if (state[peer] != EP_PEER_NOW || (!always && rows[peer] == 0)) continue;
        ep_fence_sys();
        ep_low_publish(r, peer, EP_LANE_LOW_ROWS, op % 2 ? EP_COUNTER_ODD : EP_COUNTER_EVEN,
                       ep_arrival(r.w, op, kind, rows[peer] + (ep_planted(r, EP_PLANT_LOW_COUNT_OFF_BY_ONE) ? 1 : 0)));
    }
}

/* This block has put all that it has for the ranks that are filled now. By all threads, after a barrier behind their last look at
   `state`. */
EP_DEV void ep_low_finish(const EpRank& r, ep_u32* state) {
    EP_SHORT for (ep_u32 peer = ep_low_served(); peer < r.w.ranks; peer += EP_LOW_THREADS)
        if (state[peer] == EP_PEER_NOW) state[peer] = EP_PEER_DONE;
}

/* ---- receiving ---- */

/* The rare part of a wait for what source brings: true when the wait is over because nothing will come, which is reported. */
EP_RARE bool ep_low_over(const EpRank& r, ep_u64 op, ep_u32 source, ep_u64 cell, ep_u64 due, ep_u64 began) {
    const ep_u32 counter = op % 2 ? EP_COUNTER_ODD : EP_COUNTER_EVEN;
    const bool masked = ep_peek(r, source, EP_LANE_LOW_ROWS, counter) == EP_MASKED;
    if (!masked && !ep_low_vain(r, source, began)) return false;
    const bool gone = ep_low_is_gone(r, source);
    /* Who is gone, or has masked this rank, may have delivered before. */
    const ep_u64 seen = ep_look(r, cell);
    if (seen >= due) return false;
    if (ep_low_failed(r)) return true;
    const ep_u32 status = masked ? EP_STATUS_MASKED : gone ? EP_STATUS_GONE : EP_STATUS_TIMEOUT;
    const ep_u32 culprit = masked || gone ? source : ep_low_culprit(r, source);
    ep_low_fail(r, op, status, EP_PHASE_ROWS, source, culprit, EP_LANE_LOW_ROWS, seen, due, ep_now() - began, 0);
    return true;
}

/* Waits until this cell, of source, has reached `due`; 0 when it will not, after a fault. By one thread. */
EP_DEV ep_u64 ep_low_await_cell(const EpRank& r, ep_u64 op, ep_u32 source, ep_u64 cell, ep_u64 due, ep_u64 began) {
    for (ep_u32 spin = 1;; ++spin) {
        const ep_u64 seen = ep_low_value(r, cell);
        if (seen >= due) {
            ep_low_came(r, source);
            return seen;
        }
        if (spin % 64 == 0 && ep_low_over(r, op, source, cell, due, began)) return 0;
    }
}

/* Says what is wrong with an arrival. */
EP_RARE void ep_low_refuse_arrival(const EpRank& r, ep_u64 op, ep_u32 kind, ep_u32 source, ep_u64 seen) {
    const ep_u64 due = ep_arrival(r.w, op, 0, 0), its_op = ep_arrival_op(r.w, seen);
    const ep_u32 its_kind = ep_arrival_kind(r.w, seen);
    if (seen == EP_MASKED)
        ep_low_fail(r, op, EP_STATUS_MASKED, EP_PHASE_ROWS, source, source, EP_LANE_LOW_ROWS, seen, due, 0, 0);
    else if (its_op != op)
        ep_low_mismatch(r, op, source, EP_LOW_FIELD_OP, op, its_op);
    else if (its_kind != kind && its_kind <= EP_LOW_PER_RANK)
        ep_low_mismatch(r, op, source, EP_LOW_FIELD_KIND, kind, its_kind);
    else
        ep_low_mismatch(r, op, source, EP_LOW_FIELD_ARRIVAL, due, seen);
}

/* Waits until source has said how many rows come; false after a fault. By one thread. */
EP_DEV bool ep_low_await(const EpRank& r, ep_u64 op, ep_u32 kind, ep_u32 source, ep_u64 began, ep_u32* rows) {
    const ep_u64 due = ep_arrival(r.w, op, 0, 0);
    ep_verb(r, EP_LANE_LOW_ROWS << 16 | source, due);
    const ep_u64 cell =
        ep_cell(r.w, r.generation, source, EP_LANE_LOW_ROWS, op % 2 ? EP_COUNTER_ODD : EP_COUNTER_EVEN);
    const ep_u64 seen = ep_low_await_cell(r, op, source, cell, due, began);
    if (seen == 0) return false;
    const ep_u64 over = seen - ep_arrival(r.w, op, kind, 0);
    *rows = (ep_u32)over;
    if (over <= ep_low_limit(r.w)) return true;
    ep_low_refuse_arrival(r, op, kind, source, seen);
    return false;
}

/* Waits until writer's row of token is there; false after a fault. By one thread. */
EP_DEV bool ep_low_await_row(const EpRank& r, ep_u64 op, ep_u32 writer, ep_u32 token, ep_u64 began) {
    return ep_low_await_cell(r, op, writer, ep_low_cell(r, op, writer, token), op, began) != 0;
}

/* Whether peer has masked this rank, which fails the receiving half. Only one block looks. */
EP_DEV bool ep_low_masked_by(const EpRank& r, ep_u32 peer) {
    if (blockIdx.x != 0 || peer == r.me || !ep_low_takes_part(peer)) return false;
    /* Nothing is read that was written before it: no acquire, for which later loads would wait. */
    ep_u64 bits;
    const ep_u64 cell = ep_cell(r.w, r.generation, peer, EP_LANE_LOW_DONE, EP_COUNTER_RECEIVED);
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(bits) : "l"(ep_low_window(r.me) + cell) : "memory");
    return ep_value_in(r.generation, bits) == EP_MASKED;
}
EP_DEV void ep_low_fail_masked(const EpRank& r, ep_u64 op, ep_u32 peer) {
    ep_low_fail(r, op, EP_STATUS_MASKED, EP_PHASE_BANK, peer, peer, EP_LANE_LOW_DONE, EP_MASKED, 0, 0, 0);
}

/* ---- rows and columns ---- */

/* The share of a block in `rows` rows of `columns` units of 16 bytes: units begin .. end, which lie in rows first .. last. */
struct EpShareOfRows {
    ep_u64 begin;
    ep_u64 end;
    ep_u32 first;
    ep_u32 last;
};
EP_DEV EpShareOfRows ep_low_share(ep_u32 rows, ep_u32 columns, ep_u32 block, ep_u32 blocks) {
    EpShareOfRows share;
    const ep_u64 all = (ep_u64)rows * columns;
    if (all * blocks < 1ull << 32) { /* short divisions */
        const ep_u32 begin = (ep_u32)all * block / blocks, end = (ep_u32)all * (block + 1) / blocks;
        share.begin = begin;
        share.end = end;
        share.first = begin / columns;
        share.last = (end + columns - 1) / columns;
        return share;
    }
    share.begin = all * block / blocks;
    share.end = all * (block + 1) / blocks;
    share.first = (ep_u32)(share.begin / columns);
    share.last = (ep_u32)((share.end + columns - 1) / columns);
    return share;
}

/* The source of row `row` of those that are counted in first[ranks + 1]. */
EP_DEV ep_u32 ep_low_source(const ep_u32* first, ep_u32 row) {
    ep_u32 source = 0;
    while (first[source + 1] <= row) ++source;
    return source;
}

/* What the receiver of a dispatch keeps for the combine, of the row at `position` of source: an EpLowRow and EpLowPick[topk].
   In front of all rows: u32 rows[ranks], picks[ranks], the rows and choices that came from each rank. */
struct EpLowRow {
    ep_u32 token;
    ep_u32 column; /* this rank's number among the token's ranks */
};
struct EpLowPick {
    ep_i32 row; /* in [local experts, ranks * max_tokens]; -1 for a choice of another rank */
    float weight;
};
EP_DEV ep_u64 ep_low_record(const EpRank& r, ep_u64 records, ep_u32 source, ep_u32 position) {
    const ep_u64 at = (ep_u64)source * r.w.max_tokens + position;
    return records + 8ull * r.w.ranks + at * (sizeof(EpLowRow) + r.w.topk * sizeof(EpLowPick));
}

/* ---- the end of a launch ---- */

/* What ep_low_last_block says: not the last; the last; the last of a launch with EP_LOW_TROUBLE. */
#define EP_LOW_NOT_LAST 0u
#define EP_LOW_LAST 1u
#define EP_LOW_LAST_IN_TROUBLE 2u

/* Which block comes last. It knows that the others have done with what they read; what those wrote that `tell` it sees after a fence
   of the GPU; for what is written to the user's memory, the end of the launch is enough. Every thread of every block must call it. */
EP_DEV ep_u32 ep_low_last_block(const EpRank& r, bool tells) {
    __shared__ ep_u32 last;
    __syncthreads();
    if (threadIdx.x == 0) {
        if (tells) __threadfence();
        const ep_u32 before = atomicAdd(&ep_low_state(r)->arrived, 1u);
        last = (before & ~EP_LOW_TROUBLE) + 1 != gridDim.x                 ? EP_LOW_NOT_LAST
               : (before & EP_LOW_TROUBLE) || ep_crashed(r) ? EP_LOW_LAST_IN_TROUBLE
                                                                           : EP_LOW_LAST;
    }
    __syncthreads();
    return last;
}

/* A rank was not sent all, because its bank was not free. */
EP_RARE void ep_low_fail_late(const EpRank& r, ep_u64 op, ep_u32 peer, ep_u64 began) {
    const bool gone = ep_low_is_gone(r, peer);
    ep_low_fail(r, op, gone ? EP_STATUS_GONE : EP_STATUS_TIMEOUT, EP_PHASE_BANK, peer, gone ? peer : ep_low_culprit(r, peer),
                EP_LANE_LOW_DONE, ep_peek(r, peer, EP_LANE_LOW_DONE, EP_COUNTER_RECEIVED), op - 2, ep_now() - began, 0);
}

/* Settles what a launch in trouble leaves: who is late, and what was said. True when it has failed. By all threads of the last block. */
EP_RARE bool ep_low_settle(const EpRank& r, ep_u64 op, ep_u32 phases, bool rows, ep_u64 began) {
    EpLow* low = ep_low_state(r);
    ep_u32 *skipped = ep_low_skipped(r), *late = ep_low_late(r, op);
    __threadfence();
    bool is_late = false;
    if (rows)
        EP_SHORT for (ep_u32 peer = threadIdx.x; peer < r.w.ranks; peer += EP_LOW_THREADS) {
            const bool is = __ldcg(skipped + peer) != 0 && ep_takes_part(r, peer);
            late[peer] = is;
            skipped[peer] = 0;
            if (is && (phases & EP_LOW_RECEIVE)) ep_low_fail_late(r, op, peer, began);
            is_late |= is;
        }
    is_late = __syncthreads_or(is_late);
    const bool failed = ep_low_failed(r);
    __syncthreads();
    if (threadIdx.x == 0) {
        if (rows) low->late[op % 2] = is_late;
        if (ep_ld_relaxed(&low->said) && !failed) {
            ep_low_say(r, r.me);
            low->said = 0;
        }
        low->voice = 0;
        low->broken = failed;
        low->failed = 0;
    }
    return failed;
}

/* Ends a launch: what was sent and received counts, unless it failed. By all threads of the last block. `tried`: whether rows were
   to be put; `refused`: bad choices, so that nothing was. A rank that was not sent all fails the receiving half. True when the
   operation was received. */
EP_DEV bool ep_low_end(const EpRank& r, ep_u64 op, ep_u32 phases, bool tried, bool refused, bool trouble, ep_u64 began) {
    EpLow* low = ep_low_state(r);
    const bool rows = tried && !refused;
    const bool failed = trouble && ep_low_settle(r, op, phases, rows, began);
    const bool received = (phases & EP_LOW_RECEIVE) && !failed;
    EP_SHORT for (ep_u32 peer = threadIdx.x; peer < r.w.ranks; peer += EP_LOW_THREADS) {
        if (received && peer != r.me && ep_low_takes_part(peer)) {
            ep_fence_sys();
            ep_low_publish(r, peer, EP_LANE_LOW_DONE, EP_COUNTER_RECEIVED, op);
        }
        if (rows && !trouble) ep_low_late(r, op)[peer] = 0;
    }
    if (threadIdx.x == 0) {
        low->arrived = 0;
        if (rows && !trouble) low->late[op % 2] = 0;
        if ((phases & EP_LOW_SEND) && !refused) low->sent = op;
        if (received) low->received = op;
    }
    /* From here on what other blocks wrote may be read. */
    __threadfence();
    return received;
}
#endif
