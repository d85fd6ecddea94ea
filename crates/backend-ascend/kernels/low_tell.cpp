/*
 * ep_low_tell_kernel: between operations, tells ranks that low latency goes on without them; and, where a rank is about to be given up, tells its verdict
 * to the others, which may wait for this rank in low latency. Before the rank leaves, waits until what it has posted is there.
 *
 *   launch   as those of a dispatch; one core has something to do: it posts to all queues, too
 *   memory   UB: 160 bytes
 *   takes    the address of an EpLowTellArgs
 */
#include "ep_control.h"
#include "ep_roce.h"

/* What is told to a rank: values of its cells. */
struct EpLowTold {
    ep_u32 lane[4], counter[4], cells;
    ep_u64 value[4];
    EP_DEV void add(ep_u32 on, ep_u32 of, ep_u64 says) {
        lane[cells] = on;
        counter[cells] = of;
        value[cells++] = says;
    }
};

/* Posts it to a rank of another server, and waits until it is there, for a quarter of the time allowed: the host may close the queue next. */
EP_DEV void ep_low_tell_far(EpCore& c, ep_u32 peer, const EpLowTold& told, const EpBytes& ub) {
    const EpRank& r = c.launch.r;
    EpPoster queue;
    ep_queue_open(queue, c.launch.queues + (ep_u64)peer * sizeof(EpQueue), ub);
    const ep_u64 until = ep_waited(c) + r.allowed / 4;
    ep_u32 posted = 0;
    while ((posted < told.cells || queue.done != queue.head) && ep_waited(c) < until && !queue.broken &&
           ep_fresh<uint32_t>(ep_gone_at(r.local, peer)) == 0) {
        for (; posted < told.cells && ep_queue_has_room(c, queue, 1); ++posted)
            ep_queue_publish(c, queue, ep_window(c, peer) + ep_cell(r.w, r.generation, r.me, told.lane[posted], told.counter[posted]),
                             ep_stamp(r.generation, told.value[posted]));
        ep_queue_look(c, queue);
    }
    ep_queue_close(c, queue);
}

extern "C" __global__ __aicore__ void ep_low_tell_kernel(GM_ADDR args) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    TPipe pipe;
    TBuf<TPosition::VECCALC> common, queue;
    pipe.InitBuffer(common, EP_COMMON_BYTES);
    pipe.InitBuffer(queue, EP_QUEUE_UB_BYTES);
    EpLowTellArgs a;
    ep_load_struct(a, (ep_u64)args);
    EpCore c;
    ep_begin(c, a.launch, common.Get<uint64_t>());
    if (c.number != c.launch.roles.senders) return;
    const ep_u32 serial = ep_fresh<uint32_t>(EP_LOCAL(c, serial)) + 1;
    const bool blames = a.culprit != 0 && serial <= EP_MAX_ALARM_SERIAL;
    if (blames) ep_store_word(c, EP_LOCAL(c, serial), serial, 4);
    for (ep_u32 peer = 0; peer < c.launch.r.w.ranks; ++peer) {
        if (peer == c.launch.r.me || !ep_takes_part(c, peer)) continue;
        EpLowTold told = {};
        if ((a.masked >> peer & 1) != 0) {
            told.add(EP_LANE_LOW_ROWS, EP_COUNTER_EVEN, EP_MASKED);
            told.add(EP_LANE_LOW_ROWS, EP_COUNTER_ODD, EP_MASKED);
            told.add(EP_LANE_LOW_DONE, EP_COUNTER_RECEIVED, EP_MASKED);
        }
        if (blames) told.add(EP_LANE_WATCH, EP_COUNTER_ALARM, ep_alarm(serial, 1, c.op, EP_PHASE_ROWS, a.culprit - 1));
        const bool drains = a.drains != 0 && !ep_is_near(c, peer) && !EP_PLANTED(c, LOW_FAR_UNDRAINED);
        if (told.cells == 0 && !drains) continue;
        if (!ep_is_near(c, peer)) {
            if (!EP_PLANTED(c, LOW_FAR_MASK_UNTOLD)) ep_low_tell_far(c, peer, told, queue.Get<uint8_t>());
            continue;
        }
        for (ep_u32 i = 0; i < told.cells; ++i) ep_publish(c, peer, told.lane[i], told.counter[i], told.value[i]);
    }
}
