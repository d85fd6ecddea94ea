/*
 * ep_positions_kernel: positions and counts of a batch, before its operation begins.
 *
 *   launch   one block a vector core, all resident (batch mode): each serves a share of the tokens. It speaks to no other rank
 *   memory   UB: 57,408 bytes (ep_positions.h), and 96
 *   takes    the address of an EpPositionsArgs
 */
#include "ep_positions.h"

extern "C" __global__ __aicore__ void ep_positions_kernel(GM_ADDR args) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    TPipe pipe;
    TBuf<TPosition::VECCALC> common, role;
    pipe.InitBuffer(common, EP_COMMON_BYTES);
    pipe.InitBuffer(role, EP_POSITIONS_BYTES);
    EpPositionsArgs a;
    ep_load_struct(a, (ep_u64)args);
    EpCore c;
    if (!ep_begin(c, a.launch, common.Get<uint64_t>())) return;
    EpPart s;
    ep_open_share(c, a, s, role.Get<uint8_t>());
    ep_count_share(c, a, s);
    bool there = ep_begin_rows(c, a, s);
    if (there) ep_place_share(c, a, s);
    if (there && c.number + 1 == (ep_u32)GetBlockNum()) there = ep_total(c, a, s);
    /* A core of this rank that does not come is nobody's fault but the device's: the launches behind this one find out. */
    if (!there) ep_store_word(c, EP_LOCAL(c, failed), 1, 4);
    ep_landed(c);
}
