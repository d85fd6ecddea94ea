/*
 * ep_hca_piece.h: how a warp of an adapter that multiprocessors play carries a piece of a write: by way of shared memory, as the bytes that registers hold are
 * too few. A piece is fetched into a half of the warp's room while the other half is stored to the peer.
 *
 *   units    16 bytes, where both ends are so even: by the bulk copy engine, which one lane asks, or by the lanes of a warp where a GPU has none
 *   words    what is no unit: by lanes, from one memory to the other
 *   rules    F5: a half is fetched into when what was stored from there has been read. What is stored counts behind ep_hca_await_stores and a fence
 */
#ifndef EP_HCA_PIECE_H
#define EP_HCA_PIECE_H
#include "ep_near.h"
#if __CUDA_ARCH__ >= 900
#include "ep_bulk.h"
#endif

/* A part of a stretch; of no bytes where there is none. */
struct EpHcaPiece {
    ep_u64 to, from;
    ep_u32 bytes, job;
};

/* A warp's room for two pieces; `fetched`: a barrier for each of them, whose parities are bits. */
struct EpHcaRoom {
    ep_u8* bytes;
    ep_u64* fetched;
    ep_u32 half_bytes, parities;
};

/* The bytes of a piece that are whole units, if its ends are even. */
EP_DEV ep_u32 ep_hca_units(const EpHcaPiece& p) { return (p.to | p.from) % 16 == 0 ? p.bytes / 16 * 16 : 0; }
EP_DEV ep_u8* ep_hca_half(const EpHcaRoom& room, ep_u32 half) { return room.bytes + half * room.half_bytes; }

/* Bytes without units, by a warp. Words of 8 bytes that are aligned at the target are stored at once. */
EP_DEV void ep_hca_copy_words(ep_u64 to, ep_u64 from, ep_u64 bytes) {
    const ep_u32 lane = ep_warp_lane();
    ep_u64 done = 0;
    if (to % 8 == 0 && from % 4 == 0) {
#pragma unroll 4
        for (ep_u64 at = 8 * lane; at + 8 <= bytes; at += 8 * 32) {
            const volatile ep_u32* words = (const volatile ep_u32*)(from + at);
            const ep_u64 low = words[0], high = words[1];
            *(volatile ep_u64*)(to + at) = high << 32 | low;
        }
        done = bytes / 8 * 8;
    }
    for (ep_u64 at = done + lane; at < bytes; at += 32) *(volatile ep_u8*)(to + at) = *(const volatile ep_u8*)(from + at);
}

#if __CUDA_ARCH__ >= 900

/* Before the first fetch. By a warp. */
EP_DEV void ep_hca_room_begins(const EpHcaRoom& room) {
    if (ep_warp_lane() == 0) {
        ep_barrier_init(room.fetched, 1);
        ep_barrier_init(room.fetched + 1, 1);
        ep_barrier_init_done();
    }
    ep_warp_meet();
}

/* Fetches the units of a piece. By a warp. */
EP_DEV void ep_hca_fetch(const EpHcaRoom& room, ep_u32 half, const EpHcaPiece& p) {
    const ep_u32 bytes = ep_hca_units(p);
    if (bytes == 0 || ep_warp_lane() != 0) return;
    ep_bulk_wait_read<0>();
    /* What the lane has seen announced is there for the engine, too. */
    ep_fence_seen();
    ep_bulk_expect(room.fetched + half, bytes);
    ep_get_bulk(ep_hca_half(room, half), ep_here(p.from), bytes, room.fetched + half);
}

/* Stores a piece whose units were fetched to the peer. By a warp. */
EP_DEV void ep_hca_store(EpHcaRoom& room, ep_u32 half, const EpHcaPiece& p) {
    const ep_u32 done = ep_hca_units(p);
    if (ep_warp_lane() == 0) {
        if (done != 0) {
            ep_barrier_wait(room.fetched + half, room.parities >> half & 1);
            ep_put_bulk(ep_here(p.to), ep_hca_half(room, half), done);
        }
        ep_bulk_commit();
    }
    if (done != 0) room.parities ^= 1u << half;
    if (done < p.bytes) ep_hca_copy_words(p.to + done, p.from + done, p.bytes - done);
}

/* Until units of all pieces that the warp has stored but the last so many are written. */
template <int kLast> EP_DEV void ep_hca_await_stores() {
    if (ep_warp_lane() == 0) ep_bulk_wait<kLast>();
}

#else

EP_DEV void ep_hca_room_begins(const EpHcaRoom&) {}

/* Fetches the units of a piece: a group of fetches, also where there are none. By a warp. */
EP_DEV void ep_hca_fetch(const EpHcaRoom& room, ep_u32 half, const EpHcaPiece& p) {
    ep_u8* to = ep_hca_half(room, half);
#pragma unroll 4
    for (ep_u32 at = 16 * ep_warp_lane(); at < ep_hca_units(p); at += 16 * 32) ep_fetch16(to + at, ep_here(p.from + at));
    ep_fetch_end();
}

/* Stores a piece to the peer of which the last group but one has the units, each by the lane that fetched it. By a warp. */
EP_DEV void ep_hca_store(EpHcaRoom& room, ep_u32 half, const EpHcaPiece& p) {
    const ep_u8* from = ep_hca_half(room, half);
    const ep_u32 done = ep_hca_units(p);
    ep_fetch_wait<1>();
#pragma unroll 4
    for (ep_u32 at = 16 * ep_warp_lane(); at < done; at += 16 * 32) ep_put16(ep_here(p.to + at), *(const EpUnit*)(from + at));
    if (done < p.bytes) ep_hca_copy_words(p.to + done, p.from + done, p.bytes - done);
}

template <int kLast> EP_DEV void ep_hca_await_stores() {}

#endif
#endif
