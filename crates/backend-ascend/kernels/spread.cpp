/*
 * ep_spread_kernel: the received rows of a dispatch by expert, behind its last row.
 *
 *   launch   one block a vector core, all resident (batch mode): each serves a share of the rows. It speaks to no other rank
 *   memory   UB: 124,416 bytes (ep_spread.h), and 96
 *   takes    the address of an EpSpreadArgs
 */
#include "ep_spread.h"

extern "C" __global__ __aicore__ void ep_spread_kernel(GM_ADDR args) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    TPipe pipe;
    TBuf<TPosition::VECCALC> common, role;
    pipe.InitBuffer(common, EP_COMMON_BYTES);
    pipe.InitBuffer(role, EP_SPREAD_BYTES);
    EpSpreadArgs a;
    ep_load_struct(a, (ep_u64)args);
    EpCore c;
    /* The dispatch has failed: the host hears of it. */
    if (!ep_begin(c, a.launch, common.Get<uint64_t>())) return;
    EpSpreader s;
    ep_open_spreader(c, a, s, role.Get<uint8_t>());
    ep_spread(c, a, s);
    ep_close_buffers(c);
    ep_landed(c);
    ep_store_word(c, a.ended + (ep_u64)c.number * 8, a.ticket << 8 | s.ended, 8);
}
