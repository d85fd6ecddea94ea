/*
 * ep_spread_kernel: rows by expert. Each received row goes to the slots of its choices (slots.cu), with their weights; where it shall, all other slots become zeros: those
 * behind the rows of each expert, and those behind the last as far as there is room. How many rows came, only the device may know.
 *
 *   launch   any number of blocks of 256 threads, behind the kernels that bring the rows and their slots; nothing is waited for. It moves memory
 *            of this GPU alone, so it takes all multiprocessors, whatever the kernels that use links take. A warp serves a row at a time.
 *            Where the rows come in lots, a launch copies those of some, while the next ones come
 *   memory   a row passes through registers, read once whatever its choices are
 */
#include "ep_fail.h"

/* Units of 16 bytes that a lane has in flight. */
#define EP_SPREAD_HELD 7u

/* Turns a slot into zeros. By a warp. */
EP_DEV void ep_spread_nothing(const EpRank& r, const EpSpreadArgs& a, ep_u64 slot) {
    const ep_u32 lane = ep_warp_lane(), codes = (ep_u32)r.w.scales_offset, scales = (ep_u32)r.w.scales_stride;
    for (ep_u32 i = lane * 16; i < codes; i += 512) ep_st16((ep_u8*)a.out + slot * codes + i, ep_unit(0, 0, 0, 0));
    for (ep_u32 i = lane * 4; i < scales; i += 128) *(ep_u32*)((ep_u8*)a.out_scales + slot * scales + i) = 0;
}

/* Turns all slots that are no choice's into zeros, one in `warps` of them: those behind each expert's rows up to the next expert's, and behind the
   last's as far as there is room. An expert's first slot is that of its first source. By warp `number` of `warps`. */
EP_DEV void ep_spread_padding(const EpRank& r, const EpSpreadArgs& a, ep_u32 number, ep_u32 warps) {
    const ep_u32* first = (const ep_u32*)a.offsets;
    const ep_u32* counts = (const ep_u32*)a.counts;
    const ep_u32 last = r.w.local_experts - 1;
    const ep_u32 room = ep_planted(r, EP_PLANT_ROOM_LEFT) ? first[last] + counts[last] : a.room;
    /* Turns until this warp has one. */
    ep_u32 turn = number;
    for (ep_u32 e = 0; e <= last && !ep_planted(r, EP_PLANT_PADDING_LEFT); ++e) {
        const ep_u32 begin = first[e] + counts[e], end = e < last ? first[e + 1] : room;
        const ep_u32 padding = begin < end && end <= a.room ? end - begin : 0;
        ep_u32 at = turn;
        for (; at < padding; at += warps) ep_spread_nothing(r, a, begin + at);
        turn = at - padding;
    }
}

/* Whether a row is of the launch's lots: its token lies in them, of the batch of its source. */
EP_DEV bool ep_is_of_lots(const EpRank& r, const EpSpreadArgs& a, ep_u32 row) {
    if (a.lot == 0 && a.end_lot == a.lots) return true;
    if (ep_planted(r, EP_PLANT_LOT_EARLY)) return a.lot == 0;
    /* The user holds these, too: whatever became of them, nothing is read beyond. */
    const ep_u32 token = ((const ep_u32*)a.source_token)[row], source = ((const ep_u32*)a.source_rank)[row];
    const ep_u32 tokens = source < r.w.ranks ? ((const ep_u32*)a.tokens_of)[source] : 0;
    return token >= ep_channel_first(tokens, a.lots, a.lot) && token < ep_channel_first(tokens, a.lots, a.end_lot);
}

/* Copies a row to slots: each lane has that of a choice, or none of all. By a warp. */
EP_DEV void ep_spread_row(const EpRank& r, const EpSpreadArgs& a, ep_u32 row, ep_u32 slot) {
    const ep_u32 lane = ep_warp_lane(), codes = (ep_u32)r.w.scales_offset, scales = (ep_u32)r.w.scales_stride;
    const ep_u32 picks = ep_warp_votes(slot < a.room);
    const ep_u8* from = (const ep_u8*)a.x + (ep_u64)row * codes;
    for (ep_u32 base = 0; base < codes; base += 512 * EP_SPREAD_HELD) {
        const ep_u32 begin = base + lane * 16;
        EpUnit held[EP_SPREAD_HELD];
#pragma unroll
        for (ep_u32 i = 0; i < EP_SPREAD_HELD; ++i)
            if (begin + i * 512 < codes) held[i] = ep_ld16(from + begin + i * 512);
        for (ep_u32 left = picks; left; left &= left - 1) {
            const ep_u32 at = ep_warp_shuffle(slot, ep_lowest_bit(left));
            ep_u8* to = (ep_u8*)a.out + (ep_u64)at * codes + begin;
#pragma unroll
            for (ep_u32 i = 0; i < EP_SPREAD_HELD; ++i)
                if (begin + i * 512 < codes) ep_st16(to + i * 512, held[i]);
        }
    }
    for (ep_u32 base = 0; base < scales; base += 128) {
        const ep_u32 begin = base + lane * 4;
        ep_u32 word = 0;
        if (begin < scales) word = *(const ep_u32*)((const ep_u8*)a.scales + (ep_u64)row * scales + begin);
        for (ep_u32 left = picks; left; left &= left - 1) {
            const ep_u32 at = ep_warp_shuffle(slot, ep_lowest_bit(left));
            if (begin < scales) *(ep_u32*)((ep_u8*)a.out_scales + (ep_u64)at * scales + begin) = word;
        }
    }
}

EP_KERNEL(256) ep_spread_kernel(EP_GIVEN(EpRank) r, EP_GIVEN(EpSpreadArgs) a) {
    if (ep_block_any(ep_closed(r))) return;
    const ep_u32 topk = r.w.topk, lane = ep_warp_lane();
    const ep_u32 warps = ep_blocks() * (ep_threads() / 32), number = ep_block() * (ep_threads() / 32) + ep_warp();
    const ep_u32 came = ((const ep_u32*)a.first_of)[r.w.ranks], received = came < a.rows ? came : a.rows;
    for (ep_u32 row = number; row < received; row += warps) {
        if (!ep_is_of_lots(r, a, row)) continue;
        const ep_u32 slot = lane < topk ? ((const ep_u32*)a.slots)[(ep_u64)row * topk + lane] : EP_FULL;
        if (a.out_weights && slot < a.room) ((float*)a.out_weights)[slot] = ((const float*)a.weights)[(ep_u64)row * topk + lane];
        const ep_u32 off = ep_planted(r, EP_PLANT_SLOT_OFF_BY_ONE) && slot > 0 ? 1 : 0;
        ep_spread_row(r, a, row, slot - off);
    }
    if (a.zeros) ep_spread_padding(r, a, number, warps);
}
