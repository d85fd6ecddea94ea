/*
 * ep_low_send_kernel, ep_low_receive_kernel: the halves of a low-latency dispatch. In front of the first goes ep_positions_kernel.
 *
 *   launch   one block a vector core, all resident (batch mode): a control core, over several servers those that post, and others alike
 *   memory   UB: 173,568 bytes of a sender (ep_low_send.h), 132,608 of a receiver (ep_low_receive.h), and 96 of every core
 *   takes    the address of an EpLowArgs
 */
#include "ep_low_play.h"
#include "ep_low_receive.h"
#include "ep_low_send.h"

struct EpLowSending {
    static constexpr ep_u32 kBytes = EP_LOW_SEND_BYTES;
    static EP_DEV void work(EpCore& c, const EpLowArgs& a, const EpBytes& ub) { ep_low_send(c, a, ub); }
};
struct EpLowReceiving {
    static constexpr ep_u32 kBytes = EP_LOW_RECEIVE_BYTES;
    static EP_DEV void work(EpCore& c, const EpLowArgs& a, const EpBytes& ub) { ep_low_receive(c, a, ub); }
};

extern "C" __global__ __aicore__ void ep_low_send_kernel(GM_ADDR args) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    ep_low_play<EpLowSending>(args);
}
extern "C" __global__ __aicore__ void ep_low_receive_kernel(GM_ADDR args) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    ep_low_play<EpLowReceiving>(args);
}
