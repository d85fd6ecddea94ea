/*
 * ep_combine: a combine within a server and between servers: rows go back through rings, and each token's are summed where the token is.
 *
 *   launch   as ep_dispatch. The cores of senders are returners, those of receivers reducers, those of forwarders gatherers
 *   memory   UB: 67,072 bytes of a returner (ep_rows.h), 148,160 of a reducer or gatherer (ep_reduce.h), and 96 of every core
 *   takes    the address of an EpCombineArgs
 */
#include "ep_gather.h"
#include "ep_play.h"

/* Sums what goes back to a server on a channel. */
struct EpGathers {
    EpCore& c;
    const EpCombineArgs& a;
    EpSumBuffers& b;
    EP_DEV void operator()(ep_u32 node, ep_u32 channel) const { ep_gather_ring(c, a, b, node, channel); }
};

struct EpCombine {
    typedef EpCombineArgs Args;
    static constexpr ep_u32 kEmptyBytes = EP_REDUCE_BYTES;
    static EP_DEV void fill(EpCore& c, const Args& a, EpBuffers& b, ep_u32 channel, ep_u32) { ep_return_channel(c, a, b, channel); }
    static constexpr ep_u32 kPassBytes = EP_REDUCE_BYTES;
    static EP_DEV void pass(EpCore& c, const Args& a, const EpBytes& ub, ep_u32 nth) {
        EpSumBuffers buffers;
        ep_open_sum(buffers, ub);
        ep_each_far_ring(c, nth, c.launch.roles.forwarders, EpGathers{c, a, buffers});
        ep_close_sum(buffers);
    }
    static EP_DEV void empty(EpCore& c, const Args& a, const EpBytes& ub, ep_u32 nth) {
        EpSumBuffers buffers;
        ep_open_sum(buffers, ub);
        for (ep_u32 channel = nth; channel < c.launch.rings.channels && !c.failed; channel += c.launch.roles.receivers)
            ep_reduce_channel(c, a, buffers, channel);
        ep_close_sum(buffers);
    }
};

extern "C" __global__ __aicore__ void ep_combine(GM_ADDR args) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    ep_play<EpCombine>(args);
}
