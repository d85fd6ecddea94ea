/*
 * ep_fail_kernel: the host has found out that this rank cannot go on; reports it and tells the others.
 *
 *   launch   one thread
 */
#include "ep_verbs.h"

struct EpFailArgs {
    ep_u32 field;
    ep_u32 reserved;
    ep_u64 mine;
    ep_u64 theirs;
};
EP_CHECK_ARGS(EpFailArgs);

extern "C" __global__ void __launch_bounds__(32) ep_fail_kernel(const __grid_constant__ EpRank r,
                                                               const __grid_constant__ EpFailArgs a) {
    if (threadIdx.x == 0) ep_fail_mismatch(r, r.me, a.field, a.mine, a.theirs);
}
