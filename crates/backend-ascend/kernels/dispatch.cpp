/*
 * ep_dispatch: a dispatch within a server and between servers; rows go through rings, a batch of any size through rings of any size.
 *
 *   launch   one block a vector core, all resident (batch mode). Roles by number (ep_play.h)
 *   memory   UB: 67,072 bytes of the role and 96 of every core (ep_rows.h)
 *   takes    the address of an EpDispatchArgs
 */
#include "ep_forward.h"
#include "ep_play.h"
#include "ep_receive.h"
#include "ep_send.h"

/* Passes on what comes from a server on a channel. */
struct EpForwards {
    EpCore& c;
    const EpDispatchArgs& a;
    EpBuffers& b;
    EP_DEV void operator()(ep_u32 node, ep_u32 channel) const { ep_forward_ring(c, a, b, node, channel); }
};

struct EpDispatch {
    typedef EpDispatchArgs Args;
    static constexpr ep_u32 kEmptyBytes = EP_ROWS_BYTES;
    static EP_DEV void fill(EpCore& c, const Args& a, EpBuffers& b, ep_u32 channel, ep_u32 filler) {
        ep_send_channel(c, a, b, channel, filler);
    }
    static constexpr ep_u32 kPassBytes = EP_ROWS_BYTES;
    static EP_DEV void pass(EpCore& c, const Args& a, const EpBytes& ub, ep_u32 nth) {
        EpBuffers buffers;
        ep_open_buffers(c, buffers, ub);
        ep_each_far_ring(c, nth, c.launch.roles.forwarders, EpForwards{c, a, buffers});
        ep_close_buffers(c);
    }
    static EP_DEV void empty(EpCore& c, const Args& a, const EpBytes& ub, ep_u32 nth) {
        EpBuffers buffers;
        ep_open_buffers(c, buffers, ub);
        for (ep_u32 channel = nth; channel < c.launch.rings.channels && !c.failed; channel += c.launch.roles.receivers)
            ep_receive_channel(c, a, buffers, channel);
        ep_close_buffers(c);
    }
};

extern "C" __global__ __aicore__ void ep_dispatch(GM_ADDR args) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    ep_play<EpDispatch>(args);
}
