/*
 * ep_low_return_kernel, ep_low_reduce_kernel: the halves of a low-latency combine.
 *
 *   launch   as those of a dispatch
 *   memory   UB: 161,280 bytes of a returner (ep_low_return.h), 94,240 of a reducer (ep_low_reduce.h), and 96 of every core
 *   takes    the address of an EpLowArgs
 */
#include "ep_low_play.h"
#include "ep_low_reduce.h"
#include "ep_low_return.h"

struct EpLowReturning {
    static constexpr ep_u32 kBytes = EP_LOW_RETURN_BYTES;
    static EP_DEV void work(EpCore& c, const EpLowArgs& a, const EpBytes& ub) { ep_low_return(c, a, ub); }
};
struct EpLowReducing {
    static constexpr ep_u32 kBytes = EP_LOW_REDUCE_BYTES;
    static EP_DEV void work(EpCore& c, const EpLowArgs& a, const EpBytes& ub) { ep_low_reduce(c, a, ub); }
};

extern "C" __global__ __aicore__ void ep_low_return_kernel(GM_ADDR args) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    ep_low_play<EpLowReturning>(args);
}
extern "C" __global__ __aicore__ void ep_low_reduce_kernel(GM_ADDR args) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    ep_low_play<EpLowReducing>(args);
}
