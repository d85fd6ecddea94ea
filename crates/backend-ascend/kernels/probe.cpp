/*
 * ep_probe_kernel: executes scripts of verbs, so that the rules of the machine contract are tested with the very primitives that the other
 * kernels move rows with. Only builds for tests have it.
 *
 *   launch   a block for each script of the rank, co-resident with those of the other ranks
 *   memory   windows; the steps, what they saw and what reads copied in memory of the own NPU. UB: EP_ROWS_BYTES and a queue's
 *   rules    within a server a put is copies through the UB, and a publish waits until they have landed; between servers both are elements of
 *            the queue to the peer, which one script of a rank may hold. A step that fails does not end the script. What steps saw is told at the
 *            end: to tell it waits for the copies before
 *   takes    the address of an EpProbeArgs
 */
#include "ep_roce.h"
#include "ep_rows.h"

/* The last put to a rank, if there was one: elements posted then. */
struct EpTicket {
    ep_u32 head;
    bool is;
};

struct EpProbe {
    EpBuffers b;
    EpBytes queue;
    ep_u64 deadline; /* nanoseconds since the launch began */
};

EP_DEV bool ep_inside(const EpWindow& w, ep_u64 at, ep_u64 len) { return at <= w.window_bytes && len <= w.window_bytes - at; }

/* Copies bytes of GM, piece by piece; the last may still be under way. */
EP_DEV void ep_probe_copy(EpCore& c, EpProbe& p, ep_u64 to, ep_u64 from, ep_u64 len) {
    for (ep_u64 at = 0; at < len; at += EP_PIECE_BYTES) {
        const ep_u32 bytes = ep_min(EP_PIECE_BYTES, len - at), i = ep_turn(c, p.b);
        ep_load(p.b.payload[i], from + at, bytes);
        ep_filled(c, i);
        ep_store(to + at, p.b.payload[i], bytes);
        ep_turn_over(c, p.b);
    }
}

EP_DEV void ep_probe_write(EpCore& c, EpProbe& p, ep_u64 to, ep_u64 len, ep_u32 fill) {
    for (ep_u64 at = 0; at < len; at += EP_PIECE_BYTES) {
        const ep_u32 bytes = ep_min(EP_PIECE_BYTES, len - at), i = ep_turn(c, p.b);
        Duplicate(p.b.payload[i].ReinterpretCast<int32_t>(), (int32_t)(fill * 0x01010101u), (int32_t)((bytes + 3) / 4));
        SetFlag<HardEvent::V_MTE3>((int32_t)i);
        WaitFlag<HardEvent::V_MTE3>((int32_t)i);
        ep_store(to + at, p.b.payload[i], bytes);
        ep_turn_over(c, p.b);
    }
    ep_landed(c);
}

/* Waits for room for an element in the queue to a rank of another server; whether there is. */
EP_DEV bool ep_probe_room(EpCore& c, const EpProbe& p, EpPoster& queue) {
    while (!ep_queue_has_room(c, queue, 1))
        if (queue.broken || ep_waited(c) >= p.deadline) return false;
    return true;
}

/* A verb on the queue to a rank of another server. What a put saw is the elements posted then. */
EP_DEV EpSaw ep_probe_far(EpCore& c, EpProbe& p, const EpStep& step, const EpTicket& put) {
    EpSaw saw = {EP_SAW_DONE, 0, 0};
    EpPoster queue;
    ep_queue_open(queue, c.launch.queues + (ep_u64)step.peer * sizeof(EpQueue), p.queue);
    const bool posts = step.verb == EP_VERB_PUBLISH || (step.verb == EP_VERB_PUT && step.len > 0);
    if (posts && !ep_probe_room(c, p, queue)) saw.status = EP_SAW_TIMEOUT;
    else if (step.verb == EP_VERB_PUBLISH)
        ep_queue_publish(c, queue, ep_window(c, step.peer) + ep_cell(c.launch.r.w, c.launch.r.generation, c.launch.r.me, step.lane, EP_COUNTER_PROBE),
                         ep_stamp(c.launch.r.generation, step.value));
    else if (posts) {
        ep_queue_element(c, queue, c.own + step.from, ep_window(c, step.peer) + step.to, (ep_u32)step.len);
        ep_queue_ring(c, queue);
    }
    while (step.verb == EP_VERB_FLUSH && put.is && (ep_i32)(queue.done - put.head) < 0 && saw.status == EP_SAW_DONE && !EP_PLANTED(c, PROBE_FLUSHED_EARLY)) {
        ep_queue_look(c, queue);
        if (queue.broken || ep_waited(c) >= p.deadline) saw.status = EP_SAW_TIMEOUT;
    }
    saw.value = queue.head;
    ep_queue_close(c, queue);
    return saw;
}

EP_DEV EpSaw ep_probe_wait(EpCore& c, const EpProbe& p, const EpStep& step) {
    const ep_u64 since = ep_waited(c);
    for (;;) {
        /* Looked at first: what was published before counts. */
        const bool gone = !EP_PLANTED(c, PROBE_GONE_UNHEARD) && ep_fresh<uint32_t>(ep_gone_at(c.launch.r.local, step.peer)) != 0;
        const ep_u64 seen = ep_peek(c, step.peer, step.lane, EP_COUNTER_PROBE), now = ep_waited(c);
        if (seen >= step.value) return EpSaw{EP_SAW_DONE, seen, now - since};
        if (gone) return EpSaw{EP_SAW_GONE, seen, now - since};
        if (now >= p.deadline) return EpSaw{EP_SAW_TIMEOUT, seen, now - since};
    }
}

/* `put`: the script's last one to the step's peer. */
EP_DEV EpSaw ep_probe_step(EpCore& c, EpProbe& p, const EpStep& step, const EpTicket& put) {
    const EpWindow& w = c.launch.r.w;
    EpSaw saw = {EP_SAW_DONE, 0, 0};
    const bool reads = step.verb == EP_VERB_READ || step.verb == EP_VERB_PUT, writes = step.verb == EP_VERB_WRITE || step.verb == EP_VERB_PUT;
    if (reads && !ep_inside(w, step.from, step.len)) return EpSaw{EP_SAW_OUTSIDE_FROM, 0, 0};
    if (writes && !ep_inside(w, step.to, step.len) && !EP_PLANTED(c, PROBE_UNCHECKED)) return EpSaw{EP_SAW_OUTSIDE_TO, 0, 0};
    const bool moves = step.verb == EP_VERB_PUT || step.verb == EP_VERB_PUBLISH || step.verb == EP_VERB_FLUSH;
    if (moves && !ep_is_near(c, step.peer)) return ep_probe_far(c, p, step, put);
    switch (step.verb) {
        case EP_VERB_WRITE: ep_probe_write(c, p, c.own + step.to, step.len, step.fill); break;
        case EP_VERB_READ:
            ep_probe_copy(c, p, step.out, c.own + step.from, step.len);
            ep_landed(c);
            break;
        case EP_VERB_PUT:
            ep_probe_copy(c, p, ep_window(c, step.peer) + step.to, c.own + step.from, step.len - (EP_PLANTED(c, PROBE_PUT_SHORT) ? 1 : 0));
            break;
        case EP_VERB_PUBLISH:
            if (!EP_PLANTED(c, PROBE_PUBLISHED_EARLY)) ep_landed(c);
            ep_publish(c, step.peer, step.lane, EP_COUNTER_PROBE, step.value);
            break;
        case EP_VERB_WAIT: saw = ep_probe_wait(c, p, step); break;
        case EP_VERB_PEEK: saw.value = ep_peek(c, step.peer, step.lane, EP_COUNTER_PROBE); break;
        default: ep_landed(c); break;
    }
    return saw;
}

EP_DEV void ep_probe_tell(EpCore& c, ep_u64 at, const EpSaw& saw) {
    ep_store_word(c, at + __builtin_offsetof(EpSaw, value), saw.value, 8);
    ep_store_word(c, at + __builtin_offsetof(EpSaw, waited), saw.waited, 8);
    ep_store_word(c, at + __builtin_offsetof(EpSaw, status), saw.status, 8);
}

extern "C" __global__ __aicore__ void ep_probe_kernel(GM_ADDR args) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    TPipe pipe;
    TBuf<TPosition::VECCALC> common, rows, queue;
    pipe.InitBuffer(common, EP_COMMON_BYTES);
    pipe.InitBuffer(rows, EP_ROWS_BYTES);
    pipe.InitBuffer(queue, EP_QUEUE_UB_BYTES);
    EpProbeArgs a;
    ep_load_struct(a, (ep_u64)args);
    EpCore c;
    if (!ep_begin(c, a.launch, common.Get<uint64_t>())) return;
    EpProbe p;
    ep_open_buffers(c, p.b, rows.Get<uint8_t>());
    p.queue = queue.Get<uint8_t>();
    p.deadline = ep_at<uint64_t>(a.allowed, c.number);
    const ep_u32 first = ep_at<uint32_t>(a.first_of, c.number), last = ep_at<uint32_t>(a.first_of, c.number + 1);
    EpTicket puts[EP_RANKS] = {};
    EpSaw saws[EP_PROBE_STEPS];
    for (ep_u32 at = first; at < last; ++at) {
        EpStep step;
        ep_load_struct(step, a.steps + (ep_u64)at * sizeof(EpStep));
        const EpSaw saw = ep_probe_step(c, p, step, puts[step.peer]);
        if (step.verb == EP_VERB_PUT && saw.status == EP_SAW_DONE) puts[step.peer] = EpTicket{(ep_u32)saw.value, true};
        saws[at - first] = saw;
    }
    ep_landed(c);
    for (ep_u32 at = first; at < last; ++at) ep_probe_tell(c, a.saw + (ep_u64)at * sizeof(EpSaw), saws[at - first]);
    ep_close_buffers(c);
}
