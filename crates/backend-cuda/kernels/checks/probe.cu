/*
 * ep_probe_kernel: executes scripts of verbs, so that the rules of the machine contract are tested with the very primitives that
 * the other kernels move rows with.
 *
 *   launch   a block of 256 threads for each script of the rank, co-resident with those of the other ranks (cooperative)
 *   memory   windows; the steps, what they saw and what reads copied in memory of the own GPU
 *   rules    a put is made of bulk stores where the architecture has them and the places permit, else of plain stores; a publish
 *            waits for their completion. A step that fails does not end the script
 */
#include "ep_bulk.h"
#include "ep_wait.h"

#define EP_PROBE_STAGE 4096u

EP_DEV bool ep_inside(const EpRank& r, ep_u64 at, ep_u64 len) {
    return at <= r.w.window_bytes && len <= r.w.window_bytes - at;
}

EP_DEV void ep_copy_bytes(ep_u8* to, EpAt from, ep_u64 len) {
    for (ep_u64 i = threadIdx.x; i < len; i += blockDim.x) *(volatile ep_u8*)(to + i) = ep_get1(from + i);
}
EP_DEV void ep_put_bytes(EpAt to, const ep_u8* from, ep_u64 len) {
    for (ep_u64 i = threadIdx.x; i < len; i += blockDim.x) ep_put1(to + i, *(const volatile ep_u8*)(from + i));
}

/* The own bytes to the peer, where `offset` of its window is. */
EP_DEV void ep_put(EpAt to, ep_u64 offset, const ep_u8* from, ep_u64 len, ep_u8* stage) {
    if ((offset | (ep_u64)from) % 16 != 0) {
        ep_put_bytes(to, from, len);
        return;
    }
    const ep_u64 whole = len / 16 * 16;
#if __CUDA_ARCH__ >= 900
    for (ep_u64 begin = 0; begin < whole; begin += EP_PROBE_STAGE) {
        const ep_u32 bytes = (ep_u32)(whole - begin < EP_PROBE_STAGE ? whole - begin : EP_PROBE_STAGE);
        /* The stage is free again when the thread that stores from it says so. */
        if (threadIdx.x == 0) ep_bulk_wait_read<0>();
        __syncthreads();
        for (ep_u32 at = threadIdx.x * 16; at < bytes; at += blockDim.x * 16)
            ep_st16(stage + at, ep_ld16_put(from + begin + at));
        ep_fence_bulk();
        __syncthreads();
        if (threadIdx.x == 0) {
            ep_put_bulk(to + begin, stage, bytes);
            ep_bulk_commit();
        }
    }
#else
    for (ep_u64 at = threadIdx.x * 16; at < whole; at += blockDim.x * 16) ep_put16(to + at, ep_ld16_put(from + at));
#endif
    ep_put_bytes(to + whole, from + whole, len - whole);
}

EP_DEV void ep_complete_puts() {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) ep_bulk_wait_all();
#endif
    __syncthreads();
}

EP_DEV EpSaw ep_wait_probe(const EpRank& r, const EpStep& step, ep_u64 deadline) {
    const ep_u64 since = ep_now();
    ep_verb(r, step.lane << 16 | step.peer, step.value);
    for (;;) {
        /* Looked at first: what was published before counts. */
        const bool gone = ep_is_gone(r, step.peer);
        const ep_u64 seen = ep_peek(r, step.peer, step.lane, EP_COUNTER_PROBE), now = ep_now();
        if (seen >= step.value) return EpSaw{EP_SAW_DONE, seen, now - since};
        if (gone) return EpSaw{EP_SAW_GONE, seen, now - since};
        if (now >= deadline || ep_crashed(r)) return EpSaw{EP_SAW_TIMEOUT, seen, now - since};
    }
}

/* A word of `len` bytes that begin there; what is beyond them is 0. */
EP_DEV ep_u32 ep_word_of(const ep_u8* from, ep_u64 len) {
    ep_u32 word = 0;
    for (ep_u32 i = 0; i < 4 && i < len; ++i) word |= (ep_u32) * (const volatile ep_u8*)(from + i) << 8 * i;
    return word;
}
EP_DEV ep_u64 ep_beyond_of(ep_u64 len, ep_u64 at) { return len > at ? len - at : 0; }

/* Bytes of the own window as units to the peer. */
EP_DEV void ep_put_units(const EpRank& r, const EpStep& step) {
    const ep_u8* from = ep_own(r) + step.from;
    for (ep_u64 unit = threadIdx.x; unit < ep_unit_count(step.len); unit += blockDim.x) {
        ep_u32 data[3];
#pragma unroll
        for (ep_u32 i = 0; i < 3; ++i)
            data[i] = ep_word_of(from + unit * EP_UNIT_DATA + 4 * i, ep_beyond_of(step.len, unit * EP_UNIT_DATA + 4 * i));
        ep_put_unit(ep_at(r, step.peer, step.to) + unit * EP_UNIT_BYTES, data[0], data[1], data[2], ep_unit_tag(step.value));
    }
}
/* Waits for units in the own window and copies their data. By all threads; each sees to its own. */
EP_DEV EpSaw ep_await_units(const EpRank& r, const EpStep& step, ep_u64 deadline) {
    const ep_u64 since = ep_now();
    ep_u64 status = EP_SAW_DONE;
    for (ep_u64 unit = threadIdx.x; unit < ep_unit_count(step.len) && status == EP_SAW_DONE; unit += blockDim.x) {
        ep_u32 data[3];
        for (;;) {
            /* Looked at first: what came before counts. */
            const bool gone = ep_is_gone(r, step.peer);
            if (ep_poll_unit(ep_own(r) + step.from + unit * EP_UNIT_BYTES, ep_unit_tag(step.value), data)) break;
            if (gone) status = EP_SAW_GONE;
            else if (ep_now() >= deadline || ep_crashed(r)) status = EP_SAW_TIMEOUT;
            if (status != EP_SAW_DONE) break;
        }
        const ep_u64 at = unit * EP_UNIT_DATA;
#pragma unroll
        for (ep_u32 i = 0; i < EP_UNIT_DATA; ++i)
            if (status == EP_SAW_DONE && at + i < step.len) *(volatile ep_u8*)(step.out + at + i) = (ep_u8)(data[i / 4] >> 8 * (i % 4));
    }
    const bool late = __syncthreads_or(status == EP_SAW_TIMEOUT), gone = __syncthreads_or(status == EP_SAW_GONE);
    return EpSaw{(ep_u64)(late ? EP_SAW_TIMEOUT : gone ? EP_SAW_GONE : EP_SAW_DONE), 0, ep_now() - since};
}

#ifdef EP_FAR_H
/* A put to another node; what it saw is its ticket. By the thread that posts. */
EP_DEV EpSaw ep_put_beyond(const EpRank& r, const EpStep& step, ep_u64 deadline) {
    EpSaw saw = {EP_SAW_DONE, 0, 0};
    const EpFar lane = ep_far_lane(r, step.peer, step.lane);
    if (ep_far_put(lane, step.from, step.to, step.len, deadline, &saw.value) != EP_FAR_OK) saw.status = EP_SAW_TIMEOUT;
    return saw;
}
/* A flush of all that the steps before it have put on its lane. */
EP_DEV EpSaw ep_flush_beyond(const EpRank& r, const EpStep* step, const EpSaw* saw, ep_u32 before, ep_u64 deadline) {
    for (ep_u32 back = 1; back <= before; ++back) {
        const EpStep& put = *(step - back);
        if (put.verb != EP_VERB_PUT || put.peer != step->peer || put.lane != step->lane) continue;
        const ep_u32 status = ep_far_flush(ep_far_lane(r, put.peer, put.lane), (saw - back)->value, deadline);
        return EpSaw{status == EP_FAR_OK ? EP_SAW_DONE : EP_SAW_TIMEOUT, 0, 0};
    }
    return EpSaw{EP_SAW_DONE, 0, 0};
}
#else
EP_DEV EpSaw ep_put_beyond(const EpRank&, const EpStep&, ep_u64) { return EpSaw{EP_SAW_DONE, 0, 0}; }
EP_DEV EpSaw ep_flush_beyond(const EpRank&, const EpStep*, const EpSaw*, ep_u32, ep_u64) { return EpSaw{EP_SAW_DONE, 0, 0}; }
#endif

/* A step, of which there are so many `before` it in its script; `saws` is where it tells what it saw. */
EP_DEV EpSaw ep_take_step(const EpRank& r, const EpStep& step, const EpSaw* saws, ep_u32 before, ep_u64 deadline, ep_u8* stage) {
    EpSaw saw = {EP_SAW_DONE, 0, 0};
    const bool beyond = ep_is_beyond(r, step.peer);
    const bool reads = step.verb == EP_VERB_READ || step.verb == EP_VERB_PUT || step.verb == EP_VERB_GET;
    const bool writes = step.verb == EP_VERB_WRITE || step.verb == EP_VERB_PUT || step.verb == EP_VERB_GET;
    const bool units = step.verb == EP_VERB_PUT_UNITS || step.verb == EP_VERB_UNITS;
    const ep_u64 room = ep_unit_count(step.len) * EP_UNIT_BYTES;
    if (reads && !ep_inside(r, step.from, step.len)) return EpSaw{EP_SAW_OUTSIDE_FROM, 0, 0};
    if (writes && !ep_inside(r, step.to, step.len)) return EpSaw{EP_SAW_OUTSIDE_TO, 0, 0};
    if (units && !ep_inside(r, step.from, step.verb == EP_VERB_UNITS ? room : step.len)) return EpSaw{EP_SAW_OUTSIDE_FROM, 0, 0};
    if (step.verb == EP_VERB_PUT_UNITS && !ep_inside(r, step.to, room)) return EpSaw{EP_SAW_OUTSIDE_TO, 0, 0};
    ep_u8* own = ep_own(r);
    switch (step.verb) {
        case EP_VERB_WRITE:
            for (ep_u64 i = threadIdx.x; i < step.len; i += blockDim.x)
                *(volatile ep_u8*)(own + step.to + i) = (ep_u8)step.fill;
            break;
        case EP_VERB_READ: ep_copy_bytes((ep_u8*)step.out, ep_at(r, r.me, step.from), step.len); break;
        case EP_VERB_PUT:
            if (!beyond) ep_put(ep_at(r, step.peer, step.to), step.to, own + step.from, step.len, stage);
            else if (threadIdx.x == 0) saw = ep_put_beyond(r, step, deadline);
            break;
        case EP_VERB_GET: ep_copy_bytes(own + step.to, ep_at(r, step.peer, step.from), step.len); break;
        case EP_VERB_PUBLISH:
            ep_complete_puts();
            if (threadIdx.x == 0) {
                ep_fence_sys();
                ep_publish(r, step.peer, step.lane, EP_COUNTER_PROBE, step.value);
            }
            break;
        case EP_VERB_WAIT:
            if (threadIdx.x == 0) saw = ep_wait_probe(r, step, deadline);
            break;
        case EP_VERB_PUT_UNITS: ep_put_units(r, step); break;
        case EP_VERB_UNITS: saw = ep_await_units(r, step, deadline); break;
        case EP_VERB_PEEK: saw.value = ep_peek(r, step.peer, step.lane, EP_COUNTER_PROBE); break;
        default:
            ep_complete_puts();
            if (beyond && threadIdx.x == 0) saw = ep_flush_beyond(r, &step, saws, before, deadline);
            break;
    }
    return saw;
}

extern "C" __global__ void __launch_bounds__(256, 1) ep_probe_kernel(const __grid_constant__ EpRank r,
                                                                     const __grid_constant__ EpProbeArgs a) {
    __shared__ __align__(128) ep_u8 stage[EP_PROBE_STAGE];
    const ep_u32* first_of = (const ep_u32*)a.first_of;
    const ep_u64 deadline = ep_now() + ((const ep_u64*)a.allowed)[blockIdx.x];
    for (ep_u32 at = first_of[blockIdx.x]; at < first_of[blockIdx.x + 1]; ++at) {
        const EpSaw* saws = (const EpSaw*)a.saw + at;
        const ep_u64 since = ep_now();
        EpSaw saw = ep_take_step(r, ((const EpStep*)a.steps)[at], saws, at - first_of[blockIdx.x], deadline, stage);
        /* What a verb takes that waits for nobody else. */
        if (saw.waited == 0) saw.waited = ep_now() - since;
        if (threadIdx.x == 0) ((EpSaw*)a.saw)[at] = saw;
        __syncthreads();
    }
    ep_complete_puts();
}
