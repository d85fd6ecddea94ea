/*
 * ep_fold_kernel: sums of the results of rows by expert, before a combine.
 *
 *   launch   one block a vector core: each serves a share of the rows. It waits for nobody and speaks to nobody
 *   memory   UB: 148,160 bytes (ep_reduce.h), and 96
 *   takes    the address of an EpFoldArgs
 */
#include "ep_fold.h"

extern "C" __global__ __aicore__ void ep_fold_kernel(GM_ADDR args) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    TPipe pipe;
    TBuf<TPosition::VECCALC> common, role;
    pipe.InitBuffer(common, EP_COMMON_BYTES);
    pipe.InitBuffer(role, EP_REDUCE_BYTES);
    EpFoldArgs a;
    ep_load_struct(a, (ep_u64)args);
    EpCore c;
    if (!ep_begin(c, a.launch, common.Get<uint64_t>())) return;
    EpSumBuffers sums;
    ep_open_sum(sums, role.Get<uint8_t>());
    const ep_u32 cores = (ep_u32)GetBlockNum(), end = ep_channel_first(a.rows, cores, c.number + 1);
    for (ep_u32 row = ep_channel_first(a.rows, cores, c.number); row < end; ++row) ep_fold_row(c, a, sums, row);
    ep_close_sum(sums);
}
