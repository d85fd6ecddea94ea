/*
 * ep_fold_kernel: before a combine of rows by expert, the results of each received row's choices are summed: from zero, choices ascending, in f32,
 * rounded to bf16 once. What the combine brings home are these sums, one a row; or what rounding them leaves.
 *
 *   launch   any number of blocks of 256 threads, before the kernels of a combine on the same stream; nothing is waited for. A warp serves a
 *            row at a time
 *   memory   results and sums in device memory; the sums in the window where the combine may offer them there
 */
#include "ep_fail.h"
#include "ep_sum.h"

/* Units of 16 bytes that a lane sums at once. */
#define EP_FOLD_HELD 4u

/* Sums the results of a row: each lane has the slot of a choice, or none of all. By a warp. */
EP_DEV void ep_fold_row(const EpRank& r, const EpFoldArgs& a, ep_u32 row, ep_u32 slot) {
    const ep_u32 bytes = (ep_u32)r.w.result_stride, topk = r.w.topk;
    const bool descending = ep_planted(r, EP_PLANT_FOLD_DESCENDING);
    for (ep_u32 base = 0; base < bytes; base += 512 * EP_FOLD_HELD) {
        const ep_u32 begin = base + ep_warp_lane() * 16;
        EpSum sum[EP_FOLD_HELD];
#pragma unroll
        for (ep_u32 i = 0; i < EP_FOLD_HELD; ++i) ep_sum_clear(sum[i]);
        for (ep_u32 k = 0; k < topk; ++k) {
            const ep_u32 at = ep_warp_shuffle(slot, descending ? topk - 1 - k : k);
            if (at >= a.room) continue;
            const ep_u8* from = (const ep_u8*)a.y + (ep_u64)at * a.y_stride + begin;
            EpUnit held[EP_FOLD_HELD];
#pragma unroll
            for (ep_u32 i = 0; i < EP_FOLD_HELD; ++i)
                if (begin + i * 512 < bytes) held[i] = ep_ld16(from + i * 512);
#pragma unroll
            for (ep_u32 i = 0; i < EP_FOLD_HELD; ++i)
                if (begin + i * 512 < bytes) {
                    ep_sum_add(sum[i], held[i]);
                    if (ep_planted(r, EP_PLANT_FOLD_ROUNDED_TOO_EARLY)) ep_sum_start(sum[i], ep_sum_round(sum[i]));
                }
        }
        ep_u8* to = (ep_u8*)a.out + (ep_u64)row * a.out_stride + begin;
#pragma unroll
        for (ep_u32 i = 0; i < EP_FOLD_HELD; ++i)
            if (begin + i * 512 < bytes) {
                if (a.remainder) ep_sum_subtract(sum[i], ep_sum_round(sum[i]));
                ep_st16(to + i * 512, ep_sum_round(sum[i]));
            }
    }
}

extern "C" __global__ void __launch_bounds__(256) ep_fold_kernel(const __grid_constant__ EpRank r,
                                                                const __grid_constant__ EpFoldArgs a) {
    if (ep_closed(r)) return;
    const ep_u32 topk = r.w.topk, lane = ep_warp_lane(), warps = ep_threads() / 32;
    const ep_u32 came = ((const ep_u32*)a.first_of)[r.w.ranks], received = came < a.rows ? came : a.rows;
    for (ep_u32 row = ep_block() * warps + ep_warp(); row < received; row += ep_blocks() * warps)
        ep_fold_row(r, a, row, lane < topk ? ((const ep_u32*)a.slots)[(ep_u64)row * topk + lane] : EP_FULL);
}
