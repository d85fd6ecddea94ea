/*
 * ep_hca_kernel: an mlx5 adapter, played by a multiprocessor or two of a GPU: for tests of kernels that post to such adapters, on hosts that have
 * none. It reads queues where an adapter would, copies by stores to the peer's GPU, and writes completions. What a command has made is in its tables.
 *
 *   warps     the first of each block listens: each lane to a doorbell register, the first lane to the host as well. Of the others each serves queue
 *             pairs of its own; a lane looks whether one of them has something to do
 *   bell      a register that holds another value. Then all records are read, as bells that share a register overwrite each other
 *   begin     of a queue pair: up to 32 elements are read, and what writes name is copied at once, in no order. Behind an element that waits for
 *             earlier ones (a fetch-add, an inline write) none is begun
 *   due       when the link has sent them, one batch after another for all queue pairs of the adapter, and a latency more
 *   finish    what waits is carried out, behind a fence of all lanes; then completions are written, the last word of each last
 *   errors    what was before is finished, then its completion says why; everything behind it is flushed
 *   end       when nothing has happened for some time, or the host says so. What is under way is in the tables, and goes on with the next launch
 */
#include "ep_device.h"
#include "ep_args.h"
#include "ep_hca_element.h"

#define EP_HCA_BATCH 32u
#define EP_HCA_NEVER 0xffffffffffffffffull

struct EpHcaBlock {
    volatile ep_u32 rings;     /* how often a register had changed */
    volatile ep_u32 ends;      /* 1: when nothing is under way; 2: at once */
    volatile ep_u32 busy[32];  /* of each warp */
};

EP_DEV EpHcaQueue* ep_hca_queue(const EpHcaArgs& a, ep_u32 at) { return (EpHcaQueue*)a.queues + at; }
EP_DEV const EpHcaRegion* ep_hca_regions(const EpHcaArgs& a) { return (const EpHcaRegion*)a.regions; }
EP_DEV EpHcaState* ep_hca_state(const EpHcaArgs& a) { return (EpHcaState*)a.state; }

/* ---- copies ---- */

/* By a warp. Words of 8 bytes that are aligned at the target are stored at once. */
EP_DEV void ep_hca_copy(ep_u64 to, ep_u64 from, ep_u64 bytes) {
    const ep_u32 lane = ep_warp_lane();
    ep_u64 done = 0;
    if ((to | from) % 16 == 0) {
        const ep_u64 units = bytes / 16;
        ep_u64 at = lane;
        for (; at + 7 * 32 < units; at += 8 * 32) {
            EpUnit unit[8];
#pragma unroll
            for (ep_u32 i = 0; i < 8; ++i) unit[i] = ep_ld16_put((const void*)(from + 16 * (at + 32 * i)));
#pragma unroll
            for (ep_u32 i = 0; i < 8; ++i) ep_st16((void*)(to + 16 * (at + 32 * i)), unit[i]);
        }
        for (; at < units; at += 32) ep_st16((void*)(to + 16 * at), ep_ld16_put((const void*)(from + 16 * at)));
        done = 16 * units;
    }
    if (to % 8 == 0 && from % 4 == 0) {
        for (ep_u64 at = done + 8 * lane; at + 8 <= bytes; at += 8 * 32) {
            const volatile ep_u32* words = (const volatile ep_u32*)(from + at);
            const ep_u64 low = words[0], high = words[1];
            *(volatile ep_u64*)(to + at) = high << 32 | low;
        }
        done += (bytes - done) / 8 * 8;
    }
    for (ep_u64 at = done + lane; at < bytes; at += 32) *(volatile ep_u8*)(to + at) = *(const volatile ep_u8*)(from + at);
}

EP_DEV void ep_hca_copy_parts(const EpHcaElement& e) {
    ep_hca_copy(e.to, e.first.at, e.first.bytes);
    if (e.second.bytes > 0) ep_hca_copy(e.to + e.first.bytes, e.second.at, e.second.bytes);
}

/* ---- completions ---- */

/* By one lane: the completion of element `index`, the `number`-th of its queue. */
EP_DEV void ep_hca_complete(const EpHcaQueue& q, ep_u64 number, ep_u64 index, ep_u32 opcode, ep_u32 bytes, ep_u32 syndrome) {
    const ep_u64 at = q.completions + 64 * (number & ((1ull << q.log_completions) - 1));
    const ep_u32 owner = (ep_u32)(number >> q.log_completions & 1), how = syndrome == 0 ? 0 : 13;
    ep_st16((void*)(at + 32), ep_unit((ep_i32)ep_hca_big((ep_i32)q.user), 0, 0, (ep_i32)ep_hca_big((ep_i32)bytes)));
    ep_u32* words = (ep_u32*)(at + 48);
    ep_st_relaxed4(words + 1, ep_hca_big((ep_i32)syndrome));
    ep_st_relaxed4(words + 2, ep_hca_big((ep_i32)(opcode << 24 | q.number)));
    ep_st_release4(words + 3, ep_hca_big((ep_i32)((ep_u32)(index & 0xffff) << 16 | how << 4 | owner)));
}

/* ---- a queue pair, by the warp that serves it ---- */

/* When the link has sent so many bytes, and they have arrived. By one lane. */
EP_DEV ep_u64 ep_hca_due(const EpHcaArgs& a, ep_u64 bytes) {
    ep_u64* link = &ep_hca_state(a)->link;
    const ep_u64 takes = bytes * a.pace / 1000, now = ep_now();
    for (ep_u64 was = ep_ld_acquire(link);;) {
        const ep_u64 free = (was > now ? was : now) + takes, seen = ep_atomic_replace(link, was, free);
        if (seen == was) return free + a.latency;
        was = seen;
    }
}

EP_DEV bool ep_hca_waits(const EpHcaElement& e) { return e.opcode == EP_HCA_FETCH_ADD || e.is_inline != 0; }

/* The peer does not answer. By a warp; whether it is given up. */
EP_DEV bool ep_hca_is_given_up(EpHcaQueue* q) {
    const ep_u64 now = ep_warp_shuffle(ep_now(), 0), since = q->silent == 0 ? now : q->silent;
    ep_warp_meet();
    if (ep_warp_lane() == 0) q->silent = since;
    ep_warp_meet();
    return q->patience != EP_HCA_NEVER && now - since >= q->patience;
}

EP_DEV void ep_hca_begin(const EpHcaArgs& a, EpHcaQueue* q) {
    const ep_u64 first = q->retired;
    const ep_u32 most = q->produced - first < EP_HCA_BATCH ? (ep_u32)(q->produced - first) : EP_HCA_BATCH;
    ep_u32 begun = 0, fault = 0;
    ep_u64 bytes = 0;
    for (bool waits = false; begun < most && fault == 0 && !waits;) {
        EpHcaElement e = ep_hca_read(*q, ep_hca_regions(a), first + begun);
        if (first + begun == q->planted) e.fault = q->planted_syndrome;
        const bool is_silent = e.opcode != EP_HCA_NOP && q->answers == 0 && e.fault != EP_HCA_LOCAL_OPERATION;
        if (is_silent && begun > 0) break;
        if (is_silent && !ep_hca_is_given_up(q)) return;
        fault = is_silent ? EP_HCA_RETRIES : e.fault;
        if (fault != 0) break;
        waits = ep_hca_waits(e);
        if (!waits) ep_hca_copy_parts(e);
        bytes += e.first.bytes + e.second.bytes;
        begun += 1;
    }
    ep_warp_meet();
    if (ep_warp_lane() == 0) {
        q->begun = begun;
        q->fault = fault;
        q->silent = 0;
        q->due = begun == 0 ? 0 : ep_hca_due(a, bytes);
        q->is_under_way = 1;
    }
    ep_warp_meet();
}

/* What has waited for all earlier ones. By a warp. */
EP_DEV void ep_hca_carry_out(const EpHcaElement& e) {
    if (e.is_inline != 0) ep_hca_copy_parts(e);
    if (e.opcode == EP_HCA_FETCH_ADD && ep_warp_lane() == 0)
        *(volatile ep_u64*)e.first.at = atomicAdd_system((unsigned long long*)e.to, (unsigned long long)e.add);
    ep_fence_sys();
    ep_warp_meet();
}

EP_DEV void ep_hca_finish(const EpHcaArgs& a, EpHcaQueue* q) {
    const ep_u32 lane = ep_warp_lane(), begun = q->begun;
    const ep_u64 first = q->retired, written = q->written;
    ep_fence_sys();
    ep_warp_meet();
    if (begun > 0) {
        const EpHcaElement last = ep_hca_read(*q, ep_hca_regions(a), first + begun - 1);
        if (ep_hca_waits(last)) ep_hca_carry_out(last);
    }
    EpHcaElement mine = {};
    if (lane < begun) mine = ep_hca_read(*q, ep_hca_regions(a), first + lane);
    const ep_u32 tell = ep_warp_votes(lane < begun && (mine.flags & EP_HCA_COMPLETE) != 0);
    if ((tell >> lane & 1) != 0) {
        const ep_u64 number = written + ep_bits(tell & ((1u << lane) - 1));
        ep_hca_complete(*q, number, first + lane, mine.opcode, (ep_u32)(mine.first.bytes + mine.second.bytes), 0);
    }
    ep_warp_meet();
    if (lane == 0) {
        q->retired = first + begun;
        q->written = written + ep_bits(tell);
        q->is_under_way = 0;
        if (q->fault != 0) {
            const EpHcaElement failed = ep_hca_read(*q, ep_hca_regions(a), q->retired);
            ep_hca_complete(*q, q->written, q->retired, failed.opcode, 0, q->fault);
            q->retired += 1;
            q->written += 1;
            q->syndrome = q->fault;
        }
    }
    ep_warp_meet();
}

/* Of a broken queue pair everything is flushed. */
EP_DEV void ep_hca_flush(const EpHcaArgs& a, EpHcaQueue* q) {
    if (ep_warp_lane() == 0)
        for (; q->retired < q->produced; ++q->retired, ++q->written) {
            const EpHcaElement e = ep_hca_read(*q, ep_hca_regions(a), q->retired);
            ep_hca_complete(*q, q->written, q->retired, e.opcode, 0, EP_HCA_FLUSHED);
        }
    ep_warp_meet();
}

EP_DEV void ep_hca_serve(const EpHcaArgs& a, EpHcaQueue* q) {
    if (q->is_under_way != 0) ep_hca_finish(a, q);
    else if (q->syndrome != 0) ep_hca_flush(a, q);
    else ep_hca_begin(a, q);
}

/* The producer index, by its record: 16 bits, of which what is behind is stale. */
EP_DEV void ep_hca_hear(EpHcaQueue* q) {
    const ep_u32 index = ep_hca_big((ep_i32)ep_ld_acquire4((const void*)(q->record + 4)));
    const ep_u32 ahead = (index - (ep_u32)q->produced) & 0xffff;
    if (index <= 0xffff && ahead <= 1u << q->log_elements) q->produced += ahead;
}

/* By a warp: looks at all its queue pairs, and serves those that have something to do. Whether one has, or soon will. */
EP_DEV bool ep_hca_sweep(const EpHcaArgs& a, ep_u32 first, ep_u32 step, bool rung) {
    bool busy = false;
    for (ep_u32 base = first; base < a.queue_count; base += 32 * step) {
        const ep_u32 mine = base + step * ep_warp_lane();
        bool has = false, is_ready = false;
        if (mine < a.queue_count) {
            EpHcaQueue* q = ep_hca_queue(a, mine);
            if (rung) ep_hca_hear(q);
            has = q->is_under_way != 0 || q->retired < q->produced;
            is_ready = has && (q->is_under_way == 0 || ep_now() >= q->due);
            has &= q->silent == 0;
        }
        busy |= ep_warp_any(has);
        for (ep_u32 left = ep_warp_votes(is_ready); left != 0; left &= left - 1)
            ep_hca_serve(a, ep_hca_queue(a, base + step * ep_lowest_bit(left)));
    }
    return busy;
}

/* ---- warps ---- */

EP_DEV void ep_hca_work(const EpHcaArgs& a, EpHcaBlock& block) {
    const ep_u32 workers = ep_threads() / 32 - 1, first = ep_block() * workers + ep_warp() - 1;
    for (ep_u32 heard = 0;;) {
        const ep_u32 ends = ep_warp_shuffle((ep_u32)block.ends, 0), rings = ep_warp_shuffle((ep_u32)block.rings, 0);
        if (ends == 2) return;
        /* Behind what was rung for. */
        ep_fence_sys();
        const bool busy = ep_hca_sweep(a, first, ep_blocks() * workers, rings != heard);
        heard = rings;
        if (ends == 1 && !busy) return;
        if (ep_warp_lane() == 0) block.busy[ep_warp()] = busy;
        if (!busy) ep_nap(200);
    }
}

/* Listens until the launch is to end. */
EP_DEV void ep_hca_listen(const EpHcaArgs& a, EpHcaBlock& block) {
    EpHcaState* state = ep_hca_state(a);
    const ep_u32 lane = ep_warp_lane(), warps = ep_threads() / 32;
    const bool has = lane < a.register_count;
    ep_u64* seen = (ep_u64*)a.seen + ep_block() * a.register_count + lane;
    ep_u64 last = has ? *seen : 0;
    for (;;) {
        const ep_u64 value = has ? ep_ld_acquire((const void*)((const ep_u64*)a.registers)[lane]) : 0;
        const bool rung = ep_warp_any(value != last);
        last = value;
        const ep_u32 halted = ep_warp_shuffle(lane == 0 ? ep_ld_acquire4((const void*)a.halt) : 0, 0);
        bool busy = lane > 0 && lane < warps && block.busy[lane] != 0;
        busy = ep_warp_any(busy);
        ep_u32 ends = 0;
        if (lane == 0) {
            const ep_u64 now = ep_now();
            if (rung) block.rings = block.rings + 1;
            if (rung || busy) ep_atomic_max(&state->active, now);
            /* The first block says for all when it is over: the others could still hear what it does not. */
            const ep_u64 active = ep_ld_acquire(&state->active);
            if (ep_block() == 0 && now > active && now - active > a.idle) ep_st_release4(&state->over, 1);
            ends = halted != 0 ? 2 : ep_ld_acquire4(&state->over);
            if (ends != 0) block.ends = ends;
        }
        if (ep_warp_shuffle(ends, 0) != 0) break;
        ep_nap(50);
    }
    if (has) *seen = last;
}

EP_KERNEL(512) ep_hca_kernel(EP_GIVEN(EpHcaArgs) a) {
    EP_SHARED(EpHcaBlock, block);
    if (ep_thread() == 0) {
        /* Records are read once without a bell: one may have rung before this began. */
        block.rings = 1;
        block.ends = 0;
        ep_atomic_max(&ep_hca_state(a)->active, ep_now());
    }
    if (ep_thread() < 32) block.busy[ep_thread()] = 0;
    ep_block_meet();
    if (ep_warp() == 0) ep_hca_listen(a, block);
    else ep_hca_work(a, block);
}
