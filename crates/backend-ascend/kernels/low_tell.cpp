/*
 * ep_low_tell_kernel: between operations, tells ranks that low latency goes on without them; and, where a rank is about to be given up, tells its verdict
 * to the others, which may wait for this rank in low latency.
 *
 *   launch   as those of a dispatch; one core has something to do
 *   memory   UB: 96 bytes
 *   takes    the address of an EpLowTellArgs
 */
#include "ep_control.h"

extern "C" __global__ __aicore__ void ep_low_tell_kernel(GM_ADDR args) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    TPipe pipe;
    TBuf<TPosition::VECCALC> common;
    pipe.InitBuffer(common, EP_COMMON_BYTES);
    EpLowTellArgs a;
    ep_load_struct(a, (ep_u64)args);
    EpCore c;
    ep_begin(c, a.launch, common.Get<uint64_t>());
    if (c.number != c.launch.roles.senders) return;
    for (ep_u32 peer = 0; peer < c.launch.r.w.ranks; ++peer) {
        if ((a.masked >> peer & 1) == 0 || !ep_takes_part(c, peer)) continue;
        ep_publish(c, peer, EP_LANE_LOW_ROWS, EP_COUNTER_EVEN, EP_MASKED);
        ep_publish(c, peer, EP_LANE_LOW_ROWS, EP_COUNTER_ODD, EP_MASKED);
        ep_publish(c, peer, EP_LANE_LOW_DONE, EP_COUNTER_RECEIVED, EP_MASKED);
    }
    if (a.culprit == 0) return;
    EpControl k = {};
    k.serial = ep_fresh<uint32_t>(EP_LOCAL(c, serial));
    ep_tell(c, k, 1, c.op, EP_PHASE_ROWS, a.culprit - 1);
}
