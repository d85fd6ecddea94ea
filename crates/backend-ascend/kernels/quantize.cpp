/*
 * ep_quantize_kernel: INT8 rows of bf16 rows, as a dispatch takes them.
 *
 *   launch   one block a vector core: each serves a share of the rows. It waits for nobody and speaks to nobody
 *   memory   UB: 106,496 bytes (ep_quantize.h), and 96
 *   takes    the address of an EpQuantizeArgs
 */
#include "ep_quantize.h"

extern "C" __global__ __aicore__ void ep_quantize_kernel(GM_ADDR args) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    TPipe pipe;
    TBuf<TPosition::VECCALC> common, role;
    pipe.InitBuffer(common, EP_COMMON_BYTES);
    pipe.InitBuffer(role, EP_QUANT_BYTES);
    EpQuantizeArgs a;
    ep_load_struct(a, (ep_u64)args);
    EpCore c;
    if (!ep_begin(c, a.launch, common.Get<uint64_t>())) return;
    EpQuantizer s;
    ep_open_quantizer(s, role.Get<uint8_t>());
    const ep_u32 cores = (ep_u32)GetBlockNum(), end = ep_channel_first(a.rows, cores, c.number + 1);
    for (ep_u32 row = ep_channel_first(a.rows, cores, c.number); row < end; ++row)
        ep_quantize_row(c, s, a.x + row * a.x_stride, a.out + row * a.out_stride);
    ep_close_quantizer();
}
