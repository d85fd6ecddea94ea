/*
 * ep_low_packed.h: the receiving half of the low-latency dispatch where rows are packed: those of an expert lie side by side, the first at a multiple
 * of the alignment. Where an expert's begin follows from how many each expert gets: all of that must be known before the first row has a place.
 */
#ifndef EP_LOW_PACKED_H
#define EP_LOW_PACKED_H
#include "ep_low_receiver.h"

/* Finds the first slot of each expert, where total[local experts] is known; false where there is no room for so many, which is told. By all threads
   of a block, in front of whom lies a barrier. */
EP_DEV bool ep_low_find_slots(const EpRank& r, const EpLowDispatchArgs& a, const EpLowReceiver& s, ep_u64 op) {
    const ep_u32 lane = threadIdx.x % 32, local = r.w.local_experts;
    if (threadIdx.x < 32) {
        ep_u32 before = 0;
        EP_SHORT for (ep_u32 base = 0; base < local; base += 32) {
            const ep_u32 e = base + lane, rows = e < local ? s.total[e] : 0;
            const ep_u32 slots = (rows + a.alignment - 1) / a.alignment * a.alignment;
            ep_u32 upto = slots;
            EP_SHORT for (ep_u32 by = 1; by < 32; by *= 2) {
                const ep_u32 other = __shfl_sync(EP_FULL, upto, lane - by);
                if (lane >= by) upto += other;
            }
            if (e < local) s.slot[e] = before + upto - slots;
            before += __shfl_sync(EP_FULL, upto, 31);
        }
        if (lane == 0) s.slot[local] = before;
    }
    __syncthreads();
    if (s.slot[local] <= a.room) return true;
    if (threadIdx.x == 0) ep_low_mismatch(r, op, r.me, EP_LOW_FIELD_SLOTS, a.room, s.slot[local]);
    return false;
}

/* The same, from count[ranks, local experts]. */
EP_DEV bool ep_low_find_slots_of_counts(const EpRank& r, const EpLowDispatchArgs& a, const EpLowReceiver& s, ep_u64 op) {
    const ep_u32 local = r.w.local_experts;
    EP_SHORT for (ep_u32 e = threadIdx.x; e < local; e += EP_LOW_THREADS) {
        ep_u32 sum = 0;
        EP_SHORT for (ep_u32 source = 0; source < r.w.ranks; ++source) sum += s.count[source * local + e];
        s.total[e] = sum;
    }
    __syncthreads();
    return ep_low_find_slots(r, a, s, op);
}

/* Turns all slots that are no choice's into zeros: behind the rows of each expert, and behind the last as far as there is room. By warp `number` of
   `warps`. */
EP_RARE void ep_low_zero_padding(const EpRank& r, const EpLowDispatchArgs& a, const ep_u32* slot, const ep_u32* total, ep_u32 number, ep_u32 warps) {
    const ep_u32 lane = threadIdx.x % 32, local = r.w.local_experts;
    const ep_u32 bytes = (ep_u32)(a.scales != 0 ? r.w.scales_offset : r.w.payload_stride), words = ((ep_u32)r.w.scales_bytes + 3) / 4;
    /* Turns until this warp has one. */
    ep_u32 turn = number;
    EP_SHORT for (ep_u32 e = 0; e < local && !ep_planted(r, EP_PLANT_PADDING_LEFT); ++e) {
        const ep_u32 begin = slot[e] + total[e], end = e + 1 < local ? slot[e + 1] : a.room, padding = end - begin;
        ep_u32 at = turn;
        EP_SHORT for (; at < padding; at += warps) {
            const ep_u64 of = begin + at;
            EP_SHORT for (ep_u32 byte = lane * 16; byte < bytes; byte += 512)
                ep_st16((ep_u8*)a.out + of * a.out_stride + byte, make_int4(0, 0, 0, 0));
            if (a.scales == 0) continue;
            EP_SHORT for (ep_u32 word = lane; word < words; word += 32)
                *(int*)((ep_u8*)a.scales + of * a.scales_row + word * a.scales_word) = 0;
        }
        turn = at - padding;
    }
}

/* Tells which slots are whose. Those that are no choice's have a weight of 0, and become zeros where they shall. Rows may still be under way. By all
   threads of all blocks that move rows. */
EP_DEV void ep_low_fill_padding(const EpRank& r, const EpLowDispatchArgs& a, const EpLowReceiver& s, ep_u32 blocks) {
    const ep_u32 local = r.w.local_experts, threads = blocks * EP_LOW_THREADS;
    const ep_u32 thread = blockIdx.x * EP_LOW_THREADS + threadIdx.x;
    float* weights = (float*)a.slot_weights;
    EP_SHORT for (ep_u32 e = thread; e <= local; e += threads) ((ep_u32*)a.first_slots)[e] = s.slot[e];
    EP_SHORT for (ep_u32 e = thread / 32; e < local; e += threads / 32)
        EP_SHORT for (ep_u32 slot = s.slot[e] + s.total[e] + threadIdx.x % 32; slot < s.slot[e + 1]; slot += 32) weights[slot] = 0.0f;
    EP_SHORT for (ep_u32 slot = s.slot[local] + thread; slot < a.room; slot += threads) weights[slot] = 0.0f;
    if (a.zeros) ep_low_zero_padding(r, a, s.slot, s.total, thread / 32, threads / 32);
}
#endif
