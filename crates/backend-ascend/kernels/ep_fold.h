/*
 * ep_fold.h: before a combine of rows by expert, the results of each received row's choices are summed: from zero, choices ascending, in f32,
 * rounded to bf16 once. What the combine brings home are these sums, one a row.
 *
 *   UB      that of sums (ep_reduce.h)
 *   waits   for nobody: a core serves a contiguous share of the rows
 */
#ifndef EP_FOLD_H
#define EP_FOLD_H
#include "ep_reduce.h"

EP_DEV void ep_fold_row(const EpCore& c, const EpFoldArgs& a, EpSumBuffers& b, ep_u32 row) {
    const EpWindow& w = c.launch.r.w;
    for (ep_u64 at = 0; at < w.result_bytes; at += EP_SUM_BYTES) {
        const ep_u32 bytes = ep_min(w.result_bytes - at, EP_SUM_BYTES);
        ep_clear(c, b.sum, bytes);
        for (ep_u32 k = 0; k < w.topk; ++k) {
            const ep_u32 choice = EP_PLANTED(c, FOLD_DESCENDING) ? w.topk - 1 - k : k;
            const ep_i32 slot = ep_at<int32_t>(a.slots, (ep_u64)row * w.topk + choice);
            if (slot >= 0) ep_add(c, b, b.sum, a.y + (ep_u32)slot * a.y_stride + at, bytes, false);
        }
        ep_store_sum(c, b, a.out + row * a.out_stride + at, bytes);
    }
}

#endif
