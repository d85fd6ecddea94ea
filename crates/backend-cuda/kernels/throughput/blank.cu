/*
 * ep_blank_kernel: zeros behind the rows that a dispatch brought, and behind their scales, as far as there is room. Only the device knows how many came.
 *
 *   launch   any number of blocks of 256 threads, after the kernels that bring the rows on the same stream; nothing is waited for
 *   memory   rows and scales, each one behind the other, in device memory
 */
#include "ep_fail.h"

/* Zeros rows first .. end of `bytes` bytes. Whole units where rows are such, else words. By all threads of all blocks. */
EP_DEV void ep_blank(ep_u64 at, ep_u64 bytes, ep_u32 first, ep_u32 end) {
    if (first >= end) return;
    const ep_u64 begin = at + first * bytes, size = (end - first) * bytes, step = (ep_u64)ep_blocks() * ep_threads();
    const ep_u64 mine = (ep_u64)ep_block() * ep_threads() + ep_thread();
    if ((begin | size) % 16 == 0)
        for (ep_u64 i = mine * 16; i < size; i += step * 16) ep_st16((void*)(begin + i), ep_unit(0, 0, 0, 0));
    else
        for (ep_u64 i = mine * 4; i < size; i += step * 4) *(ep_u32*)(begin + i) = 0;
}

EP_KERNEL(256) ep_blank_kernel(EP_GIVEN(EpRank) r, EP_GIVEN(EpBlankArgs) a) {
    if (ep_closed(r)) return;
    const ep_u32 received = ((const ep_u32*)a.first_of)[r.w.ranks];
    ep_blank(a.x, r.w.scales_offset, received, a.rows);
    if (r.w.scales_stride > 0) ep_blank(a.scales, r.w.scales_stride, received, a.rows);
}
