/*
 * ep_counts_kernel: the first launch of a dispatch whose counts are not known: every rank learns how many rows each sends to each.
 *
 *   launch   as ep_dispatch, which follows. One sender and one receiver have something to do, and the control core
 *   memory   UB: 67,072 bytes of the sender (ep_rows.h), 83,456 of the receiver (ep_counts.h), and 96 of every core
 *   takes    the address of an EpCountsArgs
 */
#include "ep_play.h"
#include "ep_counts.h"

struct EpCounting {
    typedef EpCountsArgs Args;
    static constexpr ep_u32 kEmptyBytes = EP_GATHER_BYTES;
    static EP_DEV void fill(EpCore& c, const Args& a, EpBuffers& b, ep_u32 channel, ep_u32 filler) {
        if (channel == 0 && filler == 0) ep_tell_counts(c, a, b);
    }
    static constexpr ep_u32 kPassBytes = 32;
    static EP_DEV void pass(EpCore&, const Args&, const EpBytes&, ep_u32) {}
    static EP_DEV void empty(EpCore& c, const Args& a, const EpBytes& ub, ep_u32 nth) {
        if (nth != 0) return;
        EpBuffers buffers;
        ep_open_buffers(c, buffers, ub);
        ep_gather_counts(c, a, buffers, ub);
        ep_close_buffers(c);
    }
};

extern "C" __global__ __aicore__ void ep_counts_kernel(GM_ADDR args) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    ep_play<EpCounting>(args);
}
