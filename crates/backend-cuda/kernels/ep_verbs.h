/*
 * ep_verbs.h: the device verbs of the machine contract within a node: put, publish, wait, peek; and how a kernel fails.
 *
 * Windows of a node's ranks are mapped into each other, so a put is a store and a cell is a 64-bit word of the reader's window.
 *
 *   F3 signal   all stores of the publishing threads, a barrier among them, then `st.release.sys` by one thread. Bulk stores
 *               (ep_bulk.h) are stores of another proxy: each issuing thread waits for their completion before the barrier.
 *   F4          one warp or block posts to a lane; one thread of it publishes.
 *   F6 bounded  ep_wait looks at the clock. When time is up, or a peer has given up, it reports once and returns false, and
 *               so does every later wait of this rank: all roles run to their end, no kernel ever traps.
 *   F10 get     loads of peer memory come after the acquire of ep_wait and never take the non-coherent path.
 */
#ifndef EP_VERBS_H
#define EP_VERBS_H

#define EP_HD __device__ __attribute__((always_inline))
/* NVRTC has no __builtin_offsetof; its front end folds this. */
#define __builtin_offsetof(type, field) ((unsigned long)__INTADDR__(&((type*)0)->field))
#include "ep_layout.h"

#define EP_DEV __device__ __forceinline__
#define EP_FULL 0xffffffffu

typedef unsigned char ep_u8;
typedef long long ep_i64;

/* What went wrong: EpReport.status. */
#define EP_STATUS_TIMEOUT 1u
#define EP_STATUS_MISMATCH 2u
#define EP_STATUS_ABORTED 3u
#define EP_STATUS_BAD_ROUTING 4u
#define EP_STATUS_GONE 6u

/* Which field differed: EpReport.field of a mismatch. The host has their names in this order. */
#define EP_FIELD_OP 0u
#define EP_FIELD_KIND 1u
#define EP_FIELD_SETTINGS 2u
#define EP_FIELD_ROWS_SENT 3u
#define EP_FIELD_ROW_OP 4u
#define EP_FIELD_ROW_SOURCE 5u
#define EP_FIELD_ROW_POSITION 6u
#define EP_FIELD_ROWS_2_31 7u
#define EP_FIELD_BLOCK 8u
#define EP_FIELD_HEAD 9u
#define EP_FIELD_TAIL 10u
#define EP_FIELD_ROW_TOKEN 11u
#define EP_FIELD_WORST_ROWS 12u
#define EP_FIELD_GENERATION 13u

/* Meetings of a grid: EpLocal.arrived. */
#define EP_MEETING_MOVED 0u
#define EP_MEETING_READ 1u

/* The first failure of a rank, in host memory that the device writes. `status` is written last. */
struct EpReport {
    ep_u32 status;
    ep_u32 phase;
    ep_u32 peer;
    ep_u32 lane;
    ep_u64 op;
    ep_u64 seen;
    ep_u64 awaited;
    ep_u64 waited;
    ep_u32 field;
    ep_u32 culprit;
};

/* What the kernels of one rank keep between launches, in its own device memory. Zero at first. After it lie u32 gone[ranks]: not 0
   for ranks of which the host knows that they do nothing any more. */
struct EpLocal {
    ep_u64 ops_done;   /* operations completed: the running one is ops_done + 1 */
    ep_u32 failed;     /* not 0: this rank has failed; every kernel ends at once */
    ep_u32 serial;     /* alarms published */
    ep_u32 arrived[4]; /* blocks that have come to a meeting of the grid; 0 again when all have */
    ep_u32 bad_token;  /* 1 + the first token whose choices are wrong; 0 for none */
    ep_u32 rings;      /* not 0 when a kernel that places or pulls left rows to the ring kernel that follows it */
    ep_u32 generation; /* of the communicator; graphs of an earlier one must not run */
    ep_u32 speaking;   /* not 0 while a thread publishes an alarm: cells must not fall */
    ep_u64 foremost;   /* of the waits that last long the one nearest to the cause, see ep_wait_key; 0 for none */
    ep_u64 told;       /* the last that the others were told of */
};

/* One rank as its kernels see it. */
struct EpRank {
    EpWindow w;
    ep_u64 windows;  /* address of an array [ranks]: where the windows lie, the own included; 0 for masked ranks */
    ep_u64 local;    /* address of the EpLocal */
    ep_u64 report;   /* device address of the EpReport */
    ep_u64 cursors;  /* address of an array [2, ranks, channels]: slots sent to, and taken from, each ring, ever */
    ep_u64 first_op; /* of this generation */
    ep_u64 settings; /* hash of shape and settings of the call: see ep_settings */
    ep_u64 allowed;  /* nanoseconds that the waits of a kernel may take */
    ep_u64 plan;     /* address of the EpPlan of the operation; 0 where it has none */
    ep_u64 tally;    /* address of what is counted: see ep_count_op; 0 where nothing is */
    ep_u32 me;
    ep_u32 generation;
    ep_u32 kind;
    ep_u32 replays; /* not 0 where the operation goes along the plan of an earlier one */
    ep_u64 test;    /* address of the EpTest in builds for tests; 0 in others */
};

/* The beginning of a handle's numbers; u32 matrix[ranks, ranks] follows: rows from source to destination. */
struct EpPlan {
    ep_u64 op; /* the dispatch that made it */
};

/* The host has the same structs: it says how large it takes them to be. */
#ifdef EP_SIZE_ARGS
#define EP_CHECK_ARGS(args) static_assert(sizeof(args) == EP_SIZE_ARGS, "the parameters differ from the host's")
static_assert(sizeof(EpRank) == EP_SIZE_RANK, "EpRank differs from the host's");
static_assert(sizeof(EpLocal) == EP_SIZE_LOCAL, "EpLocal differs from the host's");
static_assert(sizeof(EpReport) == EP_SIZE_REPORT, "EpReport differs from the host's");
#else
#define EP_CHECK_ARGS(args) static_assert(sizeof(args) > 0, "")
#endif

/* ---- plain access ---- */

EP_DEV ep_u64 ep_ld_acquire(const void* at) {
    ep_u64 v;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(at) : "memory");
    return v;
}
EP_DEV void ep_st_release(void* at, ep_u64 v) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(at), "l"(v) : "memory");
}
/* Within the own GPU. */
EP_DEV ep_u64 ep_ld_acquire_gpu(const void* at) {
    ep_u64 v;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(at) : "memory");
    return v;
}
EP_DEV void ep_st_release_gpu(void* at, ep_u64 v) {
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(at), "l"(v) : "memory");
}
EP_DEV ep_u32 ep_ld_relaxed(const ep_u32* at) {
    ep_u32 v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    return v;
}
EP_DEV ep_u64 ep_now() {
    ep_u64 t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}
EP_DEV void ep_fence_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

EP_DEV EpLocal* ep_local(const EpRank& r) { return (EpLocal*)r.local; }
EP_DEV ep_u8* ep_window(const EpRank& r, ep_u32 rank) { return (ep_u8*)((const ep_u64*)r.windows)[rank]; }
EP_DEV ep_u8* ep_own(const EpRank& r) { return ep_window(r, r.me); }
EP_DEV bool ep_takes_part(const EpRank& r, ep_u32 rank) { return ((const ep_u64*)r.windows)[rank] != 0; }
EP_DEV ep_u64 ep_op(const EpRank& r) { return ep_local(r)->ops_done + 1; }
/* What all ranks must agree on. The number of a replayed dispatch is read here: a graph makes a new one each time it runs. */
EP_DEV ep_u64 ep_settings(const EpRank& r) { return r.settings + (r.replays ? ((const EpPlan*)r.plan)->op : 0); }
EP_DEV bool ep_flag(const ep_u32* at) {
    ep_u32 v;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    return v != 0;
}
EP_DEV bool ep_is_gone(const EpRank& r, ep_u32 rank) { return ep_flag((const ep_u32*)(ep_local(r) + 1) + rank); }

#include "ep_test.h"

EP_DEV bool ep_failed(const EpRank& r) { return ep_ld_relaxed(&ep_local(r)->failed) != 0 || ep_crashed(r); }

/* ---- publish and peek ---- */

/* Raises the cell at this offset of peer's window, which belongs to lane. The caller has ordered everything that it announces before
   this (a barrier after the stores). */
EP_DEV void ep_raise(const EpRank& r, ep_u32 peer, ep_u32 lane, ep_u64 cell, ep_u64 value) {
    if (!ep_posts(r, peer, lane, value)) return;
    ep_st_release(ep_window(r, peer) + cell, ep_stamp(r.generation, value));
}
EP_DEV void ep_publish(const EpRank& r, ep_u32 peer, ep_u32 lane, ep_u32 counter, ep_u64 value) {
    ep_raise(r, peer, lane, ep_cell(r.w, r.generation, r.me, lane, counter), value);
}
/* The value of the cell at this offset of the own window. */
EP_DEV ep_u64 ep_look(const EpRank& r, ep_u64 cell) { return ep_value_in(r.generation, ep_ld_acquire(ep_own(r) + cell)); }
EP_DEV ep_u64 ep_peek(const EpRank& r, ep_u32 writer, ep_u32 lane, ep_u32 counter) {
    return ep_look(r, ep_cell(r.w, r.generation, writer, lane, counter));
}

/* ---- failing ---- */

/* Writes a report: what went wrong in operation op. By the one thread that found it first. */
EP_DEV void ep_report(const EpRank& r, ep_u64 op, ep_u32 status, ep_u32 phase, ep_u32 peer, ep_u32 culprit, ep_u32 lane,
                      ep_u64 seen, ep_u64 awaited, ep_u64 waited, ep_u32 field) {
    EpReport* out = (EpReport*)r.report;
    out->phase = phase;
    out->peer = peer;
    out->lane = lane;
    out->op = op;
    out->seen = seen;
    out->awaited = awaited;
    out->waited = waited;
    out->field = field;
    out->culprit = culprit;
    ep_fence_sys();
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(&out->status), "r"(status) : "memory");
}

/* ---- suspicions (ep_core::roles::watch) ----
 *
 * At three quarters of the time allowed, or once another rank has, a rank that waits tells all what for: of its waits the one nearest
 * to the cause. In the last eighth the ranks give up in turn, lower ranks first. Who does names the rank that waits for nobody and
 * spreads that verdict, which all who hear it take over: so all name the same. */

/* Larger for waits nearer to the cause, of later operations. Never 0. */
EP_DEV ep_u64 ep_wait_key(ep_u64 op, ep_u32 phase, ep_u32 peer) { return op << 20 | (0xfffff - (phase << 16 | peer)); }
EP_DEV ep_u32 ep_key_phase(ep_u64 key) { return (0xfffff - (ep_u32)(key & 0xfffff)) >> 16; }
EP_DEV ep_u32 ep_key_peer(ep_u64 key) { return (0xfffff - (ep_u32)(key & 0xfffff)) & 0xffff; }

/* Publishes an alarm to all peers. By the thread that has set EpLocal.speaking. */
EP_DEV void ep_tell(const EpRank& r, ep_u32 verdict, ep_u64 op, ep_u32 phase, ep_u32 peer) {
    volatile ep_u32* last = &ep_local(r)->serial;
    /* The last serial is kept for a verdict. */
    if (*last >= EP_MAX_ALARM_SERIAL - (verdict ? 0 : 1)) return;
    const ep_u32 serial = *last + 1;
    *last = serial;
    for (ep_u32 other = 0; other < r.w.ranks; ++other)
        if (other != r.me && ep_takes_part(r, other))
            ep_publish(r, other, EP_LANE_WATCH, EP_COUNTER_ALARM, ep_alarm(serial, verdict, op, phase, peer));
}

/* This rank waits long: tells the others, unless they know. */
EP_DEV void ep_suspect(const EpRank& r, ep_u64 op, ep_u32 phase, ep_u32 peer) {
    EpLocal* local = ep_local(r);
    atomicMax(&local->foremost, ep_wait_key(op, phase, peer));
    const ep_u64 front = *(volatile ep_u64*)&local->foremost;
    volatile ep_u64* told = &local->told;
    if (front == 0 || front == *told || atomicCAS(&local->speaking, 0u, 1u) != 0) return;
    if (front != *told && !ep_failed(r)) {
        *told = front;
        ep_tell(r, 0, front >> 20, ep_key_phase(front), ep_key_peer(front));
    }
    __threadfence();
    atomicExch(&local->speaking, 0u);
}

/* The wait has ended well: it explains nothing any more. */
EP_DEV void ep_unsuspect(const EpRank& r, ep_u64 op, ep_u32 phase, ep_u32 peer) {
    const ep_u64 key = ep_wait_key(op, phase, peer);
    if (*(volatile ep_u64*)&ep_local(r)->foremost == key) atomicCAS(&ep_local(r)->foremost, key, 0ull);
}

/* What rank has said that it waits for, ascending by how near that is to the cause; EP_NO_WAIT for nothing. */
#define EP_NO_WAIT 0xffffffffu
EP_DEV ep_u32 ep_wait_of(const EpRank& r, ep_u32 rank, ep_u64 op) {
    ep_u32 its_op, phase, peer;
    if (rank == r.me) {
        const ep_u64 told = *(volatile ep_u64*)&ep_local(r)->told;
        if (told == 0) return EP_NO_WAIT;
        its_op = (ep_u32)(told >> 20) % 4096;
        phase = ep_key_phase(told);
        peer = ep_key_peer(told);
    } else {
        const ep_u64 alarm = ep_takes_part(r, rank) ? ep_peek(r, rank, EP_LANE_WATCH, EP_COUNTER_ALARM) : 0;
        if (ep_alarm_serial(alarm) == 0 || ep_alarm_verdict(alarm)) return EP_NO_WAIT;
        its_op = ep_alarm_op(alarm);
        phase = ep_alarm_phase(alarm);
        peer = ep_alarm_peer(alarm);
    }
    if (peer == rank || peer >= r.w.ranks) return EP_NO_WAIT; /* taken back */
    /* Operations that are near have near numbers. */
    return ((its_op + 2048 + 4096 - (ep_u32)(op % 4096)) % 4096) << 20 | phase << 16 | peer;
}

/* Whom to blame when the time of a wait for writer is up. */
EP_DEV ep_u32 ep_culprit(const EpRank& r, ep_u64 op, ep_u32 writer) {
    ep_u32 root = EP_NO_WAIT, circle = EP_NO_WAIT;
    for (ep_u32 rank = 0; rank < r.w.ranks; ++rank) {
        const ep_u32 wait = ep_wait_of(r, rank, op);
        if (wait == EP_NO_WAIT) continue;
        ep_u32 next = wait;
        for (ep_u32 hops = 0; hops < r.w.ranks && next != EP_NO_WAIT && (next & 0xffff) != rank; ++hops)
            next = ep_wait_of(r, next & 0xffff, op);
        if (ep_wait_of(r, wait & 0xffff, op) == EP_NO_WAIT) root = wait < root ? wait : root;
        else if (next != EP_NO_WAIT && (next & 0xffff) == rank) circle = wait < circle ? wait : circle;
    }
    const ep_u32 cause = root != EP_NO_WAIT ? root : circle;
    return cause == EP_NO_WAIT ? writer : cause & 0xffff;
}

/* Reports a failure, once a rank, and tells all peers whom this rank has given up on. */
EP_DEV void ep_fail(const EpRank& r, ep_u32 status, ep_u32 phase, ep_u32 peer, ep_u32 culprit, ep_u32 lane, ep_u64 seen,
                    ep_u64 awaited, ep_u64 waited, ep_u32 field) {
    EpLocal* local = ep_local(r);
    if (ep_crashed(r)) return;
    if (atomicCAS(&local->failed, 0u, 1u) != 0) return;
    const ep_u64 op = local->ops_done + 1;
    ep_report(r, op, status, phase, peer, culprit, lane, seen, awaited, waited, field);
    if (status == EP_STATUS_BAD_ROUTING) return; /* nobody else is concerned: nothing has moved */
    while (atomicCAS(&local->speaking, 0u, 1u) != 0) __nanosleep(100);
    ep_tell(r, 1, op, phase, culprit);
    __threadfence();
    atomicExch(&local->speaking, 0u);
}

/* Whether a kernel must end at once: this rank has failed, or the launch is of a graph from before a recovery, whose stamps and
   places mean nothing now; that is reported, and nobody else is told. By all threads, at the start. */
EP_DEV bool ep_closed(const EpRank& r) {
    EpLocal* local = ep_local(r);
    const ep_u32 generation = local->generation;
    const bool failed = ep_failed(r);
    if (generation == r.generation) return failed;
    if (blockIdx.x == 0 && threadIdx.x == 0 && atomicCAS(&local->failed, 0u, 1u) == 0)
        ep_report(r, local->ops_done + 1, EP_STATUS_MISMATCH, 0, r.me, r.me, 0, r.generation, local->generation, 0,
                  EP_FIELD_GENERATION);
    return true;
}

EP_DEV void ep_fail_mismatch(const EpRank& r, ep_u32 peer, ep_u32 field, ep_u64 mine, ep_u64 theirs) {
    ep_fail(r, EP_STATUS_MISMATCH, 0, peer, peer, 0, theirs, mine, 0, field);
}

/* The rare part of a wait for a cell: has anybody given up, does the peer do something else, is it gone, is time up? */
__device__ __noinline__ bool ep_wait_is_vain(const EpRank& r, ep_u32 writer, ep_u32 lane, ep_u64 cell, ep_u32 phase, ep_u64 seen,
                            ep_u64 awaited, ep_u64 began) {
    if (ep_failed(r)) return true;
    const ep_u64 op = ep_op(r);
    /* Looked at first: who is gone may have delivered before, or have said why it goes. */
    const bool gone = ep_is_gone(r, writer);
    if (gone && ep_look(r, cell) >= awaited) return false;
    const ep_u64 waited = ep_now() - began;
    const ep_u64 turn = r.allowed / 8 * 7 + r.allowed / 8 / r.w.ranks * r.me;
    bool asked = waited >= r.allowed / 4 * 3;
    ep_u32 status = gone ? EP_STATUS_GONE : waited < turn ? 0 : EP_STATUS_TIMEOUT, peer = writer, culprit = writer, field = 0;
    for (ep_u32 other = 0; other < r.w.ranks; ++other) {
        if (other == r.me || !ep_takes_part(r, other)) continue;
        const ep_u64 alarm = ep_peek(r, other, EP_LANE_WATCH, EP_COUNTER_ALARM);
        /* Of any operation: who fails in the one before delivers nothing in this one. */
        if (ep_alarm_serial(alarm) != 0 && ep_alarm_verdict(alarm)) {
            status = EP_STATUS_ABORTED;
            peer = other;
            culprit = ep_alarm_peer(alarm);
        } else {
            const ep_u32 wait = ep_wait_of(r, other, op);
            asked |= wait != EP_NO_WAIT && wait >> 20 == 2048;
        }
    }
    const ep_u64 opening = ep_peek(r, writer, EP_LANE_WATCH, EP_COUNTER_OPENING);
    if (opening >> 3 == op && (opening & 7) != r.kind) {
        status = EP_STATUS_MISMATCH;
        field = EP_FIELD_KIND;
        awaited = r.kind;
        seen = opening & 7;
    }
    if (status == 0) {
        if (asked) ep_suspect(r, op, phase, writer);
        return false;
    }
    if (status == EP_STATUS_TIMEOUT) culprit = ep_culprit(r, op, writer);
    ep_fail(r, status, phase, peer, culprit, lane, seen, awaited, waited, field);
    return true;
}

/* Waits until the cell of writer has reached at_least; false when that will not happen. `began`: ep_now() at the kernel's
   start. What was put before the publish is visible to the calling thread, and after a barrier to those that join it. */
EP_DEV bool ep_wait(const EpRank& r, ep_u32 writer, ep_u32 lane, ep_u32 counter, ep_u64 at_least, ep_u32 phase,
                    ep_u64 began) {
    if (!ep_verb(r, lane << 16 | counter << 12 | writer, at_least)) return false;
    const ep_u64 cell = ep_cell(r.w, r.generation, writer, lane, counter);
    for (ep_u32 spin = 1;; ++spin) {
        const ep_u64 seen = ep_look(r, cell);
        if (seen >= at_least) {
            if (spin > 64) ep_unsuspect(r, ep_op(r), phase, writer);
            return true;
        }
        if (spin % 64 == 0 && ep_wait_is_vain(r, writer, lane, cell, phase, seen, at_least, began)) return false;
    }
}

/* ---- messages ---- */

EP_DEV EpOpHeader ep_header(const EpRank& r, ep_u32 rows, ep_u32 first) {
    EpOpHeader h;
    h.op = ep_op(r);
    h.kind = r.kind;
    h.rows = rows;
    h.settings = ep_settings(r);
    h.first = first;
    h.reserved = 0;
    return h;
}

/* Refuses a message of another operation. */
EP_DEV bool ep_check_header(const EpRank& r, const EpOpHeader& h, ep_u32 peer) {
    const ep_u64 op = ep_op(r);
    if (h.op != op) { ep_fail_mismatch(r, peer, EP_FIELD_OP, op, h.op); return false; }
    if (h.kind != r.kind) { ep_fail_mismatch(r, peer, EP_FIELD_KIND, r.kind, h.kind); return false; }
    const ep_u64 settings = ep_settings(r);
    if (h.settings != settings) { ep_fail_mismatch(r, peer, EP_FIELD_SETTINGS, settings, h.settings); return false; }
    return true;
}

/* The note of peer, by one thread; false when it does not come. */
EP_DEV bool ep_take_note(const EpRank& r, ep_u32 peer, ep_u64 began, EpNote* into) {
    if (!ep_wait(r, peer, EP_LANE_CONTROL, EP_COUNTER_NOTE, ep_op(r), EP_PHASE_NOTE, began)) return false;
    *into = *(const EpNote*)(ep_own(r) + ep_note(r.w, ep_op(r), peer));
    return ep_check_header(r, into->opening, peer);
}

/* Tells all peers number and kind of the operation that begins. By one thread for each rank. */
EP_DEV void ep_open(const EpRank& r, ep_u32 peer) {
    ep_publish(r, peer, EP_LANE_WATCH, EP_COUNTER_OPENING, ep_op(r) << 3 | r.kind);
}

/* Waits until peer is done with the operation before last: the bank of this one may be written. */
EP_DEV bool ep_wait_bank(const EpRank& r, ep_u32 peer, ep_u64 began) {
    const ep_u64 op = ep_op(r);
    if (op < r.first_op + 2) return true;
    return ep_wait(r, peer, EP_LANE_CONTROL, EP_COUNTER_DONE, op - 2, EP_PHASE_BANK, began);
}

/* ---- meetings of a grid ---- */

/* Whether all of the first `threads` threads of the block say so; only these call it, all of them. Others may be elsewhere. */
EP_DEV bool ep_all_of(bool mine, ep_u32 threads) {
    ep_u32 all;
    asm volatile("{ .reg .pred p, q; setp.ne.u32 p, %1, 0; barrier.cta.red.and.pred q, 1, %2, p; selp.u32 %0, 1, 0, q; }"
                 : "=r"(all) : "r"((ep_u32)mine), "r"(threads) : "memory");
    return all != 0;
}

/* True in every thread of the block that comes last. What all blocks did before is visible to that block. Every thread of
   every block must call it. */
EP_DEV bool ep_last_block(const EpRank& r, ep_u32 meeting) {
    __shared__ ep_u32 last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        const ep_u32 before = atomicAdd(&ep_local(r)->arrived[meeting], 1u);
        last = before + 1 == gridDim.x;
        if (last) {
            ep_local(r)->arrived[meeting] = 0;
            __threadfence();
        }
    }
    __syncthreads();
    return last != 0;
}

/* 16 bytes. */
EP_DEV int4 ep_ld16(const void* at) { return *(const int4*)at; }
EP_DEV void ep_st16(void* at, int4 v) { *(int4*)at = v; }
/* Brings a line into the first cache, where it stays for as long as there is room. */
EP_DEV void ep_prefetch(const void* at) { asm volatile("prefetch.global.L1 [%0];" ::"l"(at)); }
/* 16 bytes that no kernel writes meanwhile, read once. */
EP_DEV int4 ep_ld16_once(const void* at) {
    int4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.s32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
    return v;
}
/* 16 bytes of a peer that are read once; coherent. */
EP_DEV int4 ep_ld16_peer(const void* at) {
    int4 v;
    asm volatile("ld.relaxed.sys.global.L1::no_allocate.v4.s32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
    return v;
}

#endif
