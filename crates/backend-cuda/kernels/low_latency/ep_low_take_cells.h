/*
 * ep_low_take_cells.h: how the rows of a low-latency dispatch are taken where they come into slots (ep_low_send_cells.h): slots and headers are read after
 * the acquire of their cell and a barrier, by loads that are coherent.
 */
#ifndef EP_LOW_TAKE_CELLS_H
#define EP_LOW_TAKE_CELLS_H
#include "ep_low_receiver.h"

/* Waits until source has said how many rows come; false after a fault. By one thread. */
EP_DEV bool ep_low_await_count(const EpRank& r, const EpLowReceiver&, ep_u64 op, ep_u32 source, ep_u64 began, ep_u32* rows) {
    return ep_low_await(r, op, EP_LOW_DISPATCH, source, began, rows);
}

/* The header of a row. */
EP_DEV const ep_u8* ep_low_header(const EpRank& r, const EpLowReceiver& s, ep_u64 op, ep_u32 row, ep_u32* source) {
    *source = ep_low_source(s.first, row);
    return ep_low_own(r) + ep_low_head(r.w, op, *source, row - s.first[*source]);
}

/* Calls `each` with the indices of the local experts of a row. By one thread. */
template <class F> EP_DEV bool ep_low_each_expert(const EpRank& r, const EpLowReceiver& s, ep_u64 op, ep_u32 row, ep_u64, F each) {
    const ep_u32 low = r.me * r.w.local_experts, experts = r.w.local_experts;
    ep_u32 source;
    const ep_u8* header = ep_low_header(r, s, op, row, &source);
    EP_SHORT for (ep_u32 base = 0; base < r.w.topk; base += 8) {
        /* Padding names no expert. */
        int4 two[4];
#pragma unroll
        for (ep_u32 i = 0; i < 4; ++i)
            two[i] = base + 2 * i < r.w.topk ? ep_ld16_put(header + sizeof(EpRowHeader) + (base + 2 * i) * sizeof(EpChoice))
                                             : make_int4(-1, 0, -1, 0);
#pragma unroll
        for (ep_u32 i = 0; i < 4; ++i) {
            if ((ep_u32)two[i].x - low < experts) each((ep_u32)two[i].x - low);
            if ((ep_u32)two[i].z - low < experts) each((ep_u32)two[i].z - low);
        }
    }
    return true;
}

/* A choice in a header. */
EP_DEV EpChoice ep_low_choice(const ep_u8* at) {
    const ep_u64 both = ep_ld_relaxed_sys(at);
    return EpChoice{(ep_i32)both, ep_float_of((ep_u32)(both >> 32))};
}

/* Reads the header of a row, by a warp. */
EP_DEV EpLowRead ep_low_read_header(const EpRank& r, const EpLowReceiver& s, ep_u64 op, ep_u32 row, ep_u64, bool* there) {
    *there = true;
    const ep_u32 lane = threadIdx.x % 32;
    EpLowRead read;
    const ep_u8* header = ep_low_header(r, s, op, row, &read.source);
    read.choice = EpChoice{-1, 0.0f};
    if (lane < r.w.topk) read.choice = ep_low_choice(header + sizeof(EpRowHeader) + lane * sizeof(EpChoice));
    const int4 own = ep_ld16_put(header);
    read.least = row == s.first[read.source] ? 0 : (ep_u32)ep_ld16_put(header - r.w.header_bytes).y + 1;
    read.from = (ep_u32)own.x;
    read.token = (ep_u32)own.y;
    read.op = (ep_u32)own.w;
    return read;
}

/* Where the payload of a row begins in the own window. */
EP_DEV ep_u64 ep_low_payload(const EpRank& r, ep_u64 op, ep_u32 source, ep_u32 token) {
    return (ep_u64)ep_low_own(r) + ep_low_row(r.w, op, source, token) + r.w.header_bytes;
}
/* Waits for a row; false after a fault. By one thread. */
EP_DEV bool ep_low_await_payload(const EpRank& r, ep_u64 op, const EpLowRead& row, ep_u64 began) { return ep_low_await_row(r, op, row.source, row.token, began); }
/* The header of a row of the batch as it lies in its slot, to be compared with the one that went ahead. */
EP_DEV EpUnit ep_low_slot_header(const EpRank& r, const EpLowReceiver& s, ep_u32 turn) { return ep_ld16_put((const ep_u8*)s.from[turn] - r.w.header_bytes); }
EP_DEV void ep_low_check_slot(const EpRank& r, ep_u64 op, EpUnit own, const EpLowRead& row) {
    const EpLowRead slot = {row.source, (ep_u32)own.y, row.token, (ep_u32)own.x, (ep_u32)own.w, row.choice};
    if (!ep_low_is_due(r, op, slot)) ep_low_refuse_row(r, op, slot);
}

/* What rows are shared by: 16 bytes. */
EP_DEV ep_u32 ep_low_pieces(const EpRank& r) { return (ep_u32)(r.w.payload_stride / 16); }

/* Units of 16 bytes that a thread has in flight. */
#define EP_LOW_HELD 4u

/* Copies pieces begin .. end of a batch to their experts. By all threads. */
EP_DEV bool ep_low_copy(const EpRank& r, const EpLowDispatchArgs& a, const EpLowReceiver& s, ep_u64, ep_u32 begin, ep_u32 end, ep_u64) {
    const ep_u32 columns = ep_low_pieces(r);
    EP_SHORT for (ep_u32 first = begin + threadIdx.x; first < end; first += EP_LOW_HELD * EP_LOW_THREADS) {
        int4 v[EP_LOW_HELD];
#pragma unroll
        for (ep_u32 i = 0; i < EP_LOW_HELD; ++i) {
            const ep_u32 unit = first + i * EP_LOW_THREADS, turn = unit / columns;
            if (unit < end) v[i] = ep_ld16_put((const ep_u8*)s.from[turn] + (unit - turn * columns) * 16);
        }
#pragma unroll
        for (ep_u32 i = 0; i < EP_LOW_HELD; ++i) {
            const ep_u32 unit = first + i * EP_LOW_THREADS, turn = unit / columns;
            if (unit < end) ep_low_store(r, a, s, turn, (unit - turn * columns) * 16, v[i]);
        }
    }
    return true;
}

#ifdef EP_TEST
/* What was read is overwritten. By a warp. */
EP_DEV void ep_low_forget(const EpRank& r, const EpLowReceiver& s, ep_u64 op, ep_u32 row) {
    ep_u32 source;
    const ep_u8* header = ep_low_header(r, s, op, row, &source);
    const ep_u32 token = (ep_u32)ep_ld16_put(header).y;
    __syncwarp();
    ep_poison(r, ep_low_own(r) + ep_low_row(r.w, op, source, token), (ep_u32)r.w.wire_bytes);
    ep_poison(r, header, (ep_u32)r.w.header_bytes);
}
#endif
#endif
