/*
 * ep_hca_kernel: an mlx5 adapter, played by a multiprocessor or two of a GPU: for tests of kernels that post to such adapters, on hosts that have
 * none. It reads queues where an adapter would, copies to the peer's GPU, and writes completions. What a command has made is in its tables.
 *
 *   warps     the first of each block listens: each lane to a doorbell register, now and then one to the host as well. Each of the others serves queue
 *             pairs of its own, and beside that copies pieces of what all have begun (ep_hca_copy.h)
 *   memory    shared: room for two pieces for each warp but the first, with a barrier for each
 *   bell      a register that holds another value. Then all records are read, as bells that share a register overwrite each other
 *   begin     of a queue pair: a batch of up to 32 elements, each read by a lane. What writes name is handed to all warps, and copied in no order. An element
 *             that waits for earlier ones (a fetch-add, an inline write) is the last of its batch. Several batches may be under way, also of one queue pair
 *   due       when the link has sent them, one batch after another for all queue pairs of the adapter, and a latency more. A signal alone goes between the
 *             packets of others, as with adapters that send for their queue pairs in turn
 *   finish    of the oldest batch, when it is due and all its pieces are copied. What waits is carried out, behind a fence of all lanes; then completions are
 *             written, the last word of each last
 *   errors    what was before is finished, then its completion says why; everything behind it is flushed
 *   end       when nothing has happened for some time, or the host says so. The next launch begins anew what was not finished: nobody was told of it
 */
#include "ep_device.h"
#include "ep_args.h"
#include "ep_hca_element.h"
#include "ep_hca_copy.h"

/* A batch ends with what reaches so many bytes, or with what waits behind that: others are to have their turn. */
#define EP_HCA_BYTES (1ull << 19)
/* So few bytes go between the packets of others. */
#define EP_HCA_SHORT 512ull
/* Pieces that the warp copies itself that begins the batch: others would hear of them too late to be of use. */
#define EP_HCA_ALONE 2u
/* Batches of a warp under way at most. */
#define EP_HCA_SLOTS 4u
/* Looks at registers for one at the host's word. */
#define EP_HCA_LOOKS 8u
/* Sweeps without need to look at queue pairs for one that does so all the same; and what must hold then. Programs that try this out look often, and whether
   it holds. */
#ifndef EP_HCA_SWEEPS
#define EP_HCA_SWEEPS 64u
#define EP_HCA_MUST(holds) (void)(holds)
#endif
#define EP_HCA_NEVER 0xffffffffffffffffull

struct EpHcaBlock {
    volatile ep_u32 rings;     /* how often a register had changed */
    volatile ep_u32 ends;      /* 1: when nothing is under way; 2: at once */
    volatile ep_u32 busy[32];  /* of each warp */
    ep_u64 fetched[32][2];     /* barriers of each warp's room */
};

/* A batch under way: of the first lanes of the warp that serves its queue pair, one each. */
struct EpHcaBatch {
    ep_u64 first, due;
    ep_u32 queue, begun;
    ep_u32 pieces;            /* that others copy */
    ep_u32 tell;              /* elements whose completion is asked for: a bit each */
    ep_u32 is_there, waits;   /* waits: the opcode of the last element, + 1, where it waits for all earlier ones */
    ep_u32 is_oldest;         /* of its queue pair */
};

/* What a warp that serves knows. */
struct EpHcaServer {
    EpHcaHands hands;
    EpHcaBatch mine;
    ep_u32 first, step;  /* the queue pairs that it serves */
    ep_u32 job, slots;   /* the jobs that it has: the first, and how many */
    ep_u32 turn;         /* the lane whose queue pair comes first */
    ep_u32 sweeps;       /* so far */
    bool has, acts;      /* elements that are not carried out; such that wait for more than a peer that does not answer */
    bool is_stale;       /* a look at the queue pairs may find more than the last one did */
};

EP_DEV EpHcaQueue* ep_hca_queue(const EpHcaArgs& a, ep_u32 at) { return (EpHcaQueue*)a.queues + at; }
EP_DEV const EpHcaRegion* ep_hca_regions(const EpHcaArgs& a) { return (const EpHcaRegion*)a.regions; }

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

/* ---- beginning a batch, by the warp that serves its queue pair ---- */

/* When the link has sent so many bytes that it was told of at `heard`, and they have arrived. By one lane. */
EP_DEV ep_u64 ep_hca_due(const EpHcaArgs& a, ep_u64 bytes, ep_u64 heard) {
    ep_u64* link = &ep_hca_state(a)->link;
    const ep_u64 takes = bytes * a.pace / 1000000;
    for (ep_u64 was = ep_ld_acquire(link);;) {
        const ep_u64 free = (was > heard ? was : heard) + takes, seen = ep_atomic_replace(link, was, free);
        if (seen == was) return (bytes <= EP_HCA_SHORT ? heard + takes : free) + a.latency;
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

/* The sum of what the lanes up to this one have. */
EP_DEV ep_u64 ep_hca_sum(ep_u64 mine) {
    const ep_u32 lane = ep_warp_lane();
#pragma unroll
    for (ep_u32 back = 1; back < 32; back *= 2) {
        const ep_u64 before = ep_warp_shuffle(mine, (lane - back) & 31);
        if (lane >= back) mine += before;
    }
    return mine;
}

EP_DEV ep_u32 ep_hca_first_of(ep_u32 votes, ep_u32 most) { return votes == 0 || ep_lowest_bit(votes) > most ? most : ep_lowest_bit(votes); }

/* What a batch of writes is. */
struct EpHcaCut {
    ep_u64 bytes;
    ep_u32 pieces, begun;
};

/* A stretch; `until`: pieces of it and of all before. */
EP_DEV void ep_hca_lay(EpHcaJob* job, ep_u32 at, ep_u64 to, const EpHcaPart& part, ep_u32 until) {
    job->to[at] = to;
    job->from[at] = part.at;
    job->sizes[at] = (ep_u64)until << 32 | part.bytes;
}

/* Of the first `most` elements, one a lane, those that a batch takes, as stretches of a job and their pieces. By a warp. */
EP_DEV EpHcaCut ep_hca_cut(const EpHcaArgs& a, EpHcaJob* job, const EpHcaElement& e, ep_u32 most) {
    const ep_u32 lane = ep_warp_lane();
    const bool waits = ep_hca_waits(e), is_in = lane < most;
    const ep_u64 bytes = is_in ? e.first.bytes + e.second.bytes : 0, bytes_to = ep_hca_sum(bytes);
    const ep_u32 first = waits || !is_in ? 0 : (ep_u32)((e.first.bytes + a.piece - 1) / a.piece);
    const ep_u32 second = waits || !is_in ? 0 : (ep_u32)((e.second.bytes + a.piece - 1) / a.piece);
    /* Stretches and pieces are summed together. */
    const ep_u32 stretches = (first != 0) + (second != 0);
    const ep_u64 both_to = ep_hca_sum((ep_u64)stretches << 32 | (first + second));
    const ep_u32 stretches_to = (ep_u32)(both_to >> 32), pieces_to = (ep_u32)both_to;
    const bool fits = stretches_to <= EP_HCA_BATCH && (waits || bytes_to - bytes < EP_HCA_BYTES);
    const ep_u32 begun = ep_hca_first_of(ep_warp_votes(is_in && !fits), most), last = begun == 0 ? 0 : begun - 1;
    const ep_u32 used = begun == 0 ? 0 : ep_warp_shuffle(stretches_to, last), pieces = begun == 0 ? 0 : ep_warp_shuffle(pieces_to, last);
    if (lane < begun) {
        ep_u32 at = stretches_to - stretches;
        const ep_u32 until = pieces_to - second;
        if (first != 0) ep_hca_lay(job, at++, e.to, e.first, until);
        if (second != 0) ep_hca_lay(job, at, e.to + e.first.bytes, e.second, pieces_to);
        job->told[lane] = (ep_u64)e.opcode << 32 | (ep_u32)bytes;
    }
    if (lane >= used) job->sizes[lane] = (ep_u64)pieces << 32;
    return EpHcaCut{begun == 0 ? 0 : ep_warp_shuffle(bytes_to, last), pieces, begun};
}

/* Begins a batch in a slot. Whether one was. */
EP_DEV bool ep_hca_begin(const EpHcaArgs& a, EpHcaServer& s, ep_u32 queue, ep_u32 slot) {
    EpHcaQueue* q = ep_hca_queue(a, queue);
    EpHcaJob* job = ep_hca_job(a, s.job + slot);
    const ep_u32 lane = ep_warp_lane();
    const ep_u64 first = q->begun, heard = q->heard;
    const ep_u32 all = q->produced - first < EP_HCA_BATCH ? (ep_u32)(q->produced - first) : EP_HCA_BATCH;
    EpHcaElement e = {};
    bool is_silent = false;
    if (lane < all) {
        e = ep_hca_read(*q, ep_hca_regions(a), first + lane);
        if (first + lane == q->planted) e.fault = q->planted_syndrome;
        is_silent = e.opcode != EP_HCA_NOP && q->answers == 0 && e.fault != EP_HCA_LOCAL_OPERATION;
    }
    const ep_u32 silent = ep_warp_votes(is_silent), failing = ep_warp_votes(is_silent || e.fault != 0);
    const ep_u32 before = ep_hca_first_of(failing, all);
    /* Behind one that waits there are no more. */
    const ep_u32 waiting = ep_warp_votes(lane < before && ep_hca_waits(e)), most = waiting != 0 ? ep_lowest_bit(waiting) + 1 : before;
    const EpHcaCut cut = ep_hca_cut(a, job, e, most);
    const ep_u32 begun = cut.begun;
    ep_u32 fault = 0;
    if (begun == before && before < all) {
        if ((silent >> before & 1) == 0) fault = ep_warp_shuffle(e.fault, before);
        else if (begun == 0 && !ep_hca_is_given_up(q)) return false;
        else if (begun == 0) fault = EP_HCA_RETRIES;
    }
    const bool has_last = begun > 0 && (waiting >> (begun - 1) & 1) != 0;
    if (has_last && lane == begun - 1) {
        job->last_to = e.to;
        job->last_at = e.first.at;
        job->last_bytes = e.first.bytes;
        job->last_add = e.add;
    }
    const ep_u32 tell = ep_warp_votes(lane < begun && (e.flags & EP_HCA_COMPLETE) != 0);
    const ep_u32 opcode = ep_warp_shuffle(e.opcode, begun == 0 ? 0 : begun - 1);
    const bool is_shared = cut.pieces > EP_HCA_ALONE;
    EpHcaPiece alone = {};
    if (is_shared) ep_hca_open(a, s.job + slot, cut.pieces);
    ep_warp_meet();
    if (!is_shared && cut.pieces > 0) alone = ep_hca_begin_alone(a, s.hands, s.job + slot);
    ep_u64 due = 0;
    if (lane == 0) {
        if (begun > 0) due = ep_hca_due(a, cut.bytes, heard);
        q->begun = first + begun;
        q->fault = fault;
        q->silent = 0;
    }
    due = ep_warp_shuffle(due, 0);
    /* What fails behind a batch under way is told when that has finished: nothing waits for it here. */
    if (lane == slot && (begun > 0 || q->retired == first)) s.mine = EpHcaBatch{first, due, queue, begun, is_shared ? cut.pieces : 0, tell, 1, has_last ? opcode + 1 : 0, q->retired == first};
    ep_warp_meet();
    if (!is_shared) ep_hca_carry_alone(a, s.hands, alone, cut.pieces);
    return true;
}

/* ---- finishing it ---- */

/* What has waited for all earlier ones. By a warp. */
EP_DEV void ep_hca_carry_out(const EpHcaJob* job, ep_u32 opcode) {
    const ep_u64 to = job->last_to, at = job->last_at;
    if (opcode != EP_HCA_FETCH_ADD) ep_hca_copy_words(to, at, job->last_bytes);
    else if (ep_warp_lane() == 0) *(volatile ep_u64*)at = ep_hca_add((ep_u64*)to, job->last_add);
    ep_fence_sys();
    ep_warp_meet();
}

/* All its pieces are copied, it is due, and it is the oldest of its queue pair. By a lane that has one. */
EP_DEV bool ep_hca_is_finished(const EpHcaArgs& a, const EpHcaServer& s) {
    const EpHcaBatch& mine = s.mine;
    if (mine.is_there == 0 || mine.is_oldest == 0 || !(ep_now() >= mine.due)) return false;
    return mine.pieces == 0 || ep_ld_acquire(&ep_hca_job(a, s.job + ep_warp_lane())->done) == mine.pieces;
}

EP_DEV void ep_hca_finish(const EpHcaArgs& a, EpHcaServer& s, ep_u32 slot) {
    const ep_u32 lane = ep_warp_lane();
    const ep_u32 begun = ep_warp_shuffle(s.mine.begun, slot), tell = ep_warp_shuffle(s.mine.tell, slot), waits = ep_warp_shuffle(s.mine.waits, slot);
    const ep_u32 queue = ep_warp_shuffle(s.mine.queue, slot);
    EpHcaQueue* q = ep_hca_queue(a, queue);
    const EpHcaJob* job = ep_hca_job(a, s.job + slot);
    /* What the warp itself has copied as well. */
    if (ep_warp_shuffle(s.mine.pieces, slot) == 0) ep_hca_await_stores<0>();
    ep_fence_sys();
    ep_warp_meet();
    const ep_u64 first = q->retired, written = q->written;
    if (waits != 0) ep_hca_carry_out(job, waits - 1);
    if ((tell >> lane & 1) != 0) {
        const ep_u64 number = written + ep_bits(tell & ((1u << lane) - 1)), told = job->told[lane];
        ep_hca_complete(*q, number, first + lane, (ep_u32)(told >> 32), (ep_u32)told, 0);
    }
    ep_warp_meet();
    if (lane == slot) s.mine.is_there = 0;
    if (s.mine.is_there != 0 && s.mine.queue == queue && s.mine.first == first + begun) s.mine.is_oldest = 1;
    if (lane == 0) {
        q->retired = first + begun;
        q->written = written + ep_bits(tell);
        if (q->fault != 0 && q->retired == q->begun) {
            const EpHcaElement failed = ep_hca_read(*q, ep_hca_regions(a), q->retired);
            ep_hca_complete(*q, q->written, q->retired, failed.opcode, 0, q->fault);
            q->retired += 1;
            q->written += 1;
            q->begun = q->retired;
            q->syndrome = q->fault;
        }
    }
    ep_warp_meet();
}

/* Of a broken queue pair everything is flushed. */
EP_DEV void ep_hca_flush(const EpHcaArgs& a, EpHcaQueue* q) {
    if (ep_warp_lane() == 0) {
        for (; q->retired < q->produced; ++q->retired, ++q->written) {
            const EpHcaElement e = ep_hca_read(*q, ep_hca_regions(a), q->retired);
            ep_hca_complete(*q, q->written, q->retired, e.opcode, 0, EP_HCA_FLUSHED);
        }
    }
    ep_warp_meet();
}

/* ---- queue pairs, by the warp that serves them ---- */

/* The producer index, by its record: 16 bits, of which what is behind is stale. */
EP_DEV void ep_hca_hear(EpHcaQueue* q) {
    const ep_u32 index = ep_hca_big((ep_i32)ep_ld_acquire4((const void*)(q->record + 4)));
    const ep_u32 ahead = (index - (ep_u32)q->produced) & 0xffff;
    if (index > 0xffff || ahead == 0 || ahead > 1u << q->log_elements) return;
    q->produced += ahead;
    q->heard = ep_now();
}

/* Looks at all queue pairs, and begins batches where there are slots. Whether it found something to do. What it finds is changed by the warp alone, and by
   time where a peer does not answer: so after one that found nothing the next finds nothing either, until a bell has rung or a batch has finished. */
EP_DEV bool ep_hca_look(const EpHcaArgs& a, EpHcaServer& s, bool rung) {
    bool finds = false;
    s.has = s.acts = false;
    for (ep_u32 base = s.first; base < a.queue_count; base += 32 * s.step) {
        const ep_u32 mine = base + s.step * ep_warp_lane();
        bool has = false, acts = false, is_ready = false;
        if (mine < a.queue_count) {
            EpHcaQueue* q = ep_hca_queue(a, mine);
            if (rung) ep_hca_hear(q);
            has = q->retired < q->produced;
            acts = has && q->silent == 0;
            is_ready = has && (q->syndrome != 0 || (q->fault == 0 && q->begun < q->produced));
        }
        s.has |= ep_warp_any(has);
        s.acts |= ep_warp_any(acts);
        for (ep_u32 left = ep_warp_votes(is_ready); left != 0;) {
            const ep_u32 above = left >> s.turn << s.turn, lane = ep_lowest_bit(above != 0 ? above : left), queue = base + s.step * lane;
            left &= ~(1u << lane);
            ep_warp_meet(); /* One lane has heard of it: a ballot does not order what the others read. */
            if (ep_hca_queue(a, queue)->syndrome != 0) {
                ep_hca_flush(a, ep_hca_queue(a, queue));
                finds = true;
                continue;
            }
            const ep_u32 slots = ep_warp_votes(ep_warp_lane() < s.slots && s.mine.is_there == 0);
            if (slots == 0) break;
            finds = true;
            if (ep_hca_begin(a, s, queue, ep_lowest_bit(slots))) s.turn = (lane + 1) & 31;
        }
    }
    return finds;
}

/* Finishes batches, and looks at queue pairs where there may be something to do. */
EP_DEV void ep_hca_sweep(const EpHcaArgs& a, EpHcaServer& s, bool rung) {
    const ep_u32 finished = ep_warp_votes(ep_hca_is_finished(a, s));
    for (ep_u32 left = finished; left != 0; left &= left - 1) ep_hca_finish(a, s, ep_lowest_bit(left));
    const bool is_needed = rung || finished != 0 || s.is_stale;
    if (!is_needed && ++s.sweeps % EP_HCA_SWEEPS != 0) return;
    const bool had = s.has, acted = s.acts;
    const bool finds = ep_hca_look(a, s, rung);
    s.is_stale = finds;
    EP_HCA_MUST(is_needed || (!finds && s.has == had && s.acts == acted));
}

/* ---- warps ---- */

/* What a launch before has begun is begun anew. By a warp. */
EP_DEV void ep_hca_begin_anew(const EpHcaArgs& a, const EpHcaServer& s) {
    const ep_u32 lane = ep_warp_lane();
    for (ep_u32 mine = s.first + s.step * lane; mine < a.queue_count; mine += 32 * s.step) {
        EpHcaQueue* q = ep_hca_queue(a, mine);
        q->begun = q->retired;
        q->heard = ep_now();
        q->fault = 0;
    }
    if (lane < s.slots) ep_hca_clear(a, s.job + lane);
    ep_fence_sys();
    ep_warp_meet();
}

EP_DEV void ep_hca_work(const EpHcaArgs& a, EpHcaBlock& block, ep_u8* pool) {
    const ep_u32 workers = ep_threads() / 32 - 1, all = ep_blocks() * workers, me = ep_block() * workers + ep_warp() - 1;
    const ep_u32 share = EP_HCA_JOBS / all, slots = share < EP_HCA_SLOTS ? share : EP_HCA_SLOTS;
    EpHcaServer s = {};
    s.hands.room = EpHcaRoom{pool + 2 * (ep_warp() - 1) * a.piece, block.fetched[ep_warp()], a.piece, 0};
    ep_hca_room_begins(s.hands.room);
    s.first = me, s.step = all, s.job = me * slots, s.slots = slots;
    s.hands.last = s.job;
    ep_hca_begin_anew(a, s);
    for (ep_u32 heard = 0;;) {
        const ep_u32 ends = ep_warp_shuffle((ep_u32)block.ends, 0), rings = ep_warp_shuffle((ep_u32)block.rings, 0);
        if (ends == 2) break;
        const bool rung = rings != heard;
        heard = rings;
        if (rung) {
            /* Behind what was rung for: lane 0 has heard it, and the others behind that. */
            ep_fence_block();
            ep_warp_meet();
        }
        if (rung || s.has) ep_hca_sweep(a, s, rung);
        const bool carries = ep_hca_carry(a, s.hands, true), acts = carries || s.acts;
        if (ends == 1 && !acts) break;
        if (ep_warp_lane() == 0) block.busy[ep_warp()] = acts;
        if (!acts) ep_nap(100);
    }
    /* What it has taken nobody else copies, and the other block may not have heard that it is to end. */
    while (ep_hca_carry(a, s.hands, false)) {}
    /* Nor does shared memory end before what the warp has copied alone was read from there. */
    ep_hca_await_stores<0>();
}

/* Listens until the launch is to end. */
EP_DEV void ep_hca_listen(const EpHcaArgs& a, EpHcaBlock& block) {
    EpHcaState* state = ep_hca_state(a);
    const ep_u32 lane = ep_warp_lane(), warps = ep_threads() / 32;
    const bool has = lane < a.register_count;
    ep_u64* seen = (ep_u64*)a.seen + ep_block() * a.register_count + lane;
    ep_u64 last = has ? *seen : 0;
    bool stirs = false;
    for (ep_u32 looks = 1;; ++looks) {
        const ep_u64 value = has ? ep_ld_acquire((const void*)((const ep_u64*)a.registers)[lane]) : 0;
        const bool rung = ep_warp_any(value != last);
        last = value;
        stirs |= rung;
        if (rung) {
            /* What any lane has seen in its register comes before the ring for whoever hears that: so he finds the record that was written before. */
            ep_warp_meet();
            if (lane == 0) {
                ep_fence_block();
                block.rings = block.rings + 1;
            }
        }
        /* Registers and the host's word are far: a bell is not to wait for that each time. */
        if (looks % EP_HCA_LOOKS != 0) continue;
        const ep_u32 halted = ep_warp_shuffle(lane == 0 ? ep_ld_acquire4((const void*)a.halt) : 0, 0);
        bool busy = lane > 0 && lane < warps && block.busy[lane] != 0;
        busy = ep_warp_any(busy);
        ep_u32 ends = 0;
        if (lane == 0) {
            const ep_u64 now = ep_now();
            if (stirs || busy) ep_atomic_max(&state->active, now);
            /* The first block says for all when it is over: the others could still hear what it does not. */
            const ep_u64 active = ep_ld_acquire(&state->active);
            if (ep_block() == 0 && now > active && now - active > a.idle) ep_st_release4(&state->over, 1);
            ends = halted != 0 ? 2 : ep_ld_acquire4(&state->over);
            if (ends != 0) block.ends = ends;
        }
        stirs = false;
        if (ep_warp_shuffle(ends, 0) != 0) break;
        ep_nap(50);
    }
    if (has) *seen = last;
}

EP_KERNEL(512) ep_hca_kernel(EP_GIVEN(EpHcaArgs) a) {
    EP_SHARED(EpHcaBlock, block);
    EP_POOL(pool);
    if (ep_thread() == 0) {
        /* Records are read once without a bell: one may have rung before this began. */
        block.rings = 1;
        block.ends = 0;
        ep_atomic_max(&ep_hca_state(a)->active, ep_now());
    }
    if (ep_thread() < 32) block.busy[ep_thread()] = 0;
    ep_block_meet();
    if (ep_warp() == 0) ep_hca_listen(a, block);
    else ep_hca_work(a, block, pool);
}
