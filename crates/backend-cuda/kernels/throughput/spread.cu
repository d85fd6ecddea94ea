/*
 * ep_spread_kernel: rows by expert. Each received row goes to the slots of its choices; the slots between two experts, and those behind the last
 * for which there is room, become zeros. How many rows came, only the device may know.
 *
 *   launch   any number of blocks of up to EP_SPREAD_WARPS warps, co-resident (cooperative), behind the kernels that bring the rows and their
 *            choices. It speaks to no other rank, unless it fails
 *   memory   u32 [1 + warps, local experts] (ep_slots.h); a row passes through registers, read once whatever its choices are
 *   waits    for blocks of lower index of this launch (ep_slots.h). A cached dispatch has its slots: then for nobody
 *   rules    received rows and choices were written before this launch: the stream orders them
 */
#include "ep_slots.h"

EP_POOL(ep_pool);

/* Units of 16 bytes that a lane has in flight. */
#define EP_SPREAD_HELD 7u

/* Turns all slots that are no choice's into zeros, one in `shares` of them: those behind each expert's choices up to the next expert's, and behind
   the last's as far as there is room. By a warp. */
EP_DEV void ep_spread_padding(const EpRank& r, const EpSpreadArgs& a, const EpShareOf& s, const ep_u32* first) {
    const ep_u32 lane = ep_warp_lane(), codes = (ep_u32)r.w.scales_offset, scales = (ep_u32)r.w.scales_stride;
    /* Turns until this warp has one. */
    ep_u32 turn = s.number;
    for (ep_u32 e = 0; e < r.w.local_experts && !ep_planted(r, EP_PLANT_PADDING_LEFT); ++e) {
        const ep_u32 choices = ((const ep_u32*)a.counts)[e];
        const ep_u32 room = ep_planted(r, EP_PLANT_ROOM_LEFT) ? ep_slots_taken(r, a, first) : a.room;
        const ep_u32 begin = first[e] + choices, end = e + 1 < r.w.local_experts ? first[e + 1] : room;
        const ep_u32 padding = begin < end && end <= a.room ? end - begin : 0;
        ep_u32 at = turn;
        for (; at < padding; at += s.shares) {
            const ep_u64 slot = begin + at;
            for (ep_u32 i = lane * 16; i < codes; i += 512) ep_st16((ep_u8*)a.out + slot * codes + i, ep_unit(0, 0, 0, 0));
            for (ep_u32 i = lane * 4; i < scales; i += 128) *(ep_u32*)((ep_u8*)a.out_scales + slot * scales + i) = 0;
        }
        turn = at - padding;
    }
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

extern "C" __global__ void __launch_bounds__(32 * EP_SPREAD_WARPS, 1) ep_spread_kernel(const __grid_constant__ EpRank r,
                                                                       const __grid_constant__ EpSpreadArgs a) {
    /* Together: a block that runs already may fail meanwhile. */
    if (ep_block_any(ep_closed(r))) return;
    const ep_u64 began = ep_now();
    const ep_u32 local = r.w.local_experts, topk = r.w.topk, lane = ep_warp_lane(), warps = ep_threads() / 32;
    ep_u32* first = a.tables ? (ep_u32*)a.tables + (ep_u64)ep_block() * (1 + warps) * local : (ep_u32*)(ep_u8*)ep_pool;
    ep_u32* next = first + (ep_u64)(1 + ep_warp()) * local;
    const ep_u32 came = ((const ep_u32*)a.first_of)[r.w.ranks], received = came < a.rows ? came : a.rows;
    const EpShareOf share = ep_share_of(received);
    if (a.topk_idx) {
        for (ep_u32 e = lane; e < local; e += 32) next[e] = 0;
        ep_warp_meet();
        ep_count_choices(r, a, share, next);
    }
    if (ep_warp() == 0) ep_first_slots(r, a, first);
    ep_block_meet();
    const ep_u32 taken = ep_slots_taken(r, a, first);
    if (taken > a.room) {
        if (ep_thread() == 0) ep_fail_mismatch(r, r.me, EP_FIELD_SLOTS, a.room, taken);
        return;
    }
    if (a.topk_idx) {
        if (a.out_first && ep_block() == 0 && ep_warp() == 0) ep_tell_slots(r, a, first);
        ep_clear_spare_slots(r, a, received);
        if (!ep_begin_shares(r, a, first, first + local, began)) return;
        if (!ep_place_share(r, a, share, first, next)) return;
        ep_warp_meet();
    }
    for (ep_u32 row = share.begin; row < share.end; ++row) {
        const ep_u32 slot = lane < topk ? ((const ep_u32*)a.slots)[(ep_u64)row * topk + lane] : EP_FULL;
        const ep_u32 off = ep_planted(r, EP_PLANT_SLOT_OFF_BY_ONE) && slot > 0 ? 1 : 0;
        ep_spread_row(r, a, row, slot - off);
    }
    ep_spread_padding(r, a, share, first);
}
