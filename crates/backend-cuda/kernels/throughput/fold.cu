/*
 * ep_fold_kernel: before a combine of rows by expert, the results of each received row's choices are summed: from zero, choices ascending, in f32,
 * rounded to bf16 once. What the combine brings home are these sums, one a row; or what rounding them leaves.
 *
 *   launch   any number of blocks of 256 threads, before the kernels of a combine on the same stream; nothing is waited for. A warp serves a
 *            row at a time. Or beside ep_combine_kernel, which waits for the rows of each piece (ep_pieces.h)
 *   memory   results and sums in device memory; the sums in the window where the combine may offer them there
 */
#include "ep_pieces.h"
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

/* The slot of a choice of a row for each lane, or none of all. */
EP_DEV ep_u32 ep_slot_of(const EpRank& r, const EpFoldArgs& a, ep_u32 row) {
    const ep_u32 topk = r.w.topk, lane = ep_warp_lane();
    return lane < topk ? ((const ep_u32*)a.slots)[(ep_u64)row * topk + lane] : EP_FULL;
}

/* A row is summed. By a warp. */
EP_DEV void ep_count_folded(const EpFoldArgs& a, ep_u32 rank, ep_u32 piece) {
    ep_warp_meet();
    if (ep_warp_lane() == 0) {
        ep_fence_device();
        ep_atomic_add((ep_u32*)a.copied + rank * EP_PIECES + piece, 1u);
    }
}

/* Sums rows in the order in which peers pull them, the first piece of all ranks before the second of any, the own ones last; and counts them. By warp
   `number` of `warps`. */
EP_DEV void ep_fold_pieces(const EpRank& r, const EpFoldArgs& a, ep_u32 number, ep_u32 warps) {
    const ep_u32* first_of = (const ep_u32*)a.first_of;
    const bool early = ep_planted(r, EP_PLANT_FOLD_TOLD_EARLY);
    /* Rows until this warp has one. */
    ep_u32 turn = number;
    for (ep_u32 piece = 0; piece < EP_PIECES; ++piece)
        for (ep_u32 i = 1; i <= r.w.ranks; ++i) {
            const ep_u32 rank = (r.me + i) % r.w.ranks, rows = first_of[rank + 1] - first_of[rank], wide = ep_rows_of_piece(rows);
            const ep_u32 first = piece * wide, count = first >= rows ? 0 : rows - first < wide ? rows - first : wide;
            ep_u32 at = turn;
            for (; at < count; at += warps) {
                const ep_u32 row = first_of[rank] + first + at;
                if (early) ep_count_folded(a, rank, piece);
                if (early) ep_be_last(r);
                ep_fold_row(r, a, row, ep_slot_of(r, a, row));
                if (!early) ep_count_folded(a, rank, piece);
            }
            turn = at - count;
        }
}

EP_KERNEL(256) ep_fold_kernel(EP_GIVEN(EpRank) r, EP_GIVEN(EpFoldArgs) a) {
    if (ep_block_any(ep_closed(r))) return;
    const ep_u32 warps = ep_blocks() * (ep_threads() / 32), number = ep_block() * (ep_threads() / 32) + ep_warp();
    if (a.copied) return ep_fold_pieces(r, a, number, warps);
    const ep_u32 came = ((const ep_u32*)a.first_of)[r.w.ranks], received = came < a.rows ? came : a.rows;
    for (ep_u32 row = number; row < received; row += warps) ep_fold_row(r, a, row, ep_slot_of(r, a, row));
}
