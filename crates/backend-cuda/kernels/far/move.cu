/*
 * ep_move_kernel: carries out what a network made of software was asked for: copies into a window, then cells of it, then a mark by which the host knows.
 * The driver takes as long to be asked for one copy as for a launch, so what many copies bring comes sooner by one launch of this.
 *
 *   launch   a few blocks, of EP_MOVE_THREADS each; of one stream each begins beside the one before it, and ends behind it
 *   memory   windows of GPUs of this host, at addresses that the host has looked up; the mark is in memory of the host
 *   rules    F3: all threads of a block meet, and its first one fences, before the block counts as done; the last block's first thread fences, too,
 *            and then stores the cells in their order, and the mark. F5: sources are read when the mark is there. F10: the staging memory that is read
 *            is written again soon, while a launch before may still run: by gets, never by the path that caches what nobody writes
 */
#include "ep_near.h"
#include "ep_args.h"

/* Units of 16 bytes that a thread has under way. */
#define EP_MOVE_UNITS 4u
#define EP_MOVE_PIECE (16ull * EP_MOVE_UNITS * EP_MOVE_THREADS)

/* Copies a piece, of whole aligned units. By a block. */
EP_DEV void ep_move_piece(ep_u64 from, ep_u64 to, ep_u64 bytes) {
    const ep_u64 first = 16ull * ep_thread();
    EpUnit held[EP_MOVE_UNITS];
#pragma unroll
    for (ep_u32 i = 0; i < EP_MOVE_UNITS; ++i) {
        const ep_u64 at = first + 16ull * EP_MOVE_THREADS * i;
        if (at < bytes) held[i] = ep_get16(ep_here(from + at));
    }
#pragma unroll
    for (ep_u32 i = 0; i < EP_MOVE_UNITS; ++i) {
        const ep_u64 at = first + 16ull * EP_MOVE_THREADS * i;
        if (at < bytes) ep_put16(ep_here(to + at), held[i]);
    }
}

/* Copies pieces of all that is to be moved, in turn with the other blocks. */
EP_DEV void ep_move_all(const EpMovesArgs& a) {
    const ep_u32 blocks = ep_blocks();
    ep_u32 before = 0;
    for (ep_u32 move = 0; move < a.moves; ++move) {
        const ep_u64 from = a.from[move], to = a.to[move], bytes = a.bytes[move];
        const ep_u32 pieces = (ep_u32)((bytes + EP_MOVE_PIECE - 1) / EP_MOVE_PIECE);
        for (ep_u32 piece = (ep_block() + blocks - before % blocks) % blocks; piece < pieces; piece += blocks) {
            const ep_u64 at = piece * EP_MOVE_PIECE, left = bytes - at;
            ep_move_piece(from + at, to + at, left < EP_MOVE_PIECE ? left : EP_MOVE_PIECE);
        }
        before += pieces;
    }
}

EP_KERNEL(EP_MOVE_THREADS) ep_move_kernel(EP_GIVEN(EpMovesArgs) a) {
    /* Copies of the next launch go beside these; its cells and its mark come behind. */
    ep_let_next_begin();
    ep_move_all(a);
    ep_block_meet();
    if (ep_thread() != 0) return;
    ep_wait_for_launches_before();
    ep_fence_sys();
    ep_u32* done = (ep_u32*)a.done;
    if (ep_atomic_add(done, 1u) + 1 != ep_blocks()) return;
    ep_fence_sys();
    *done = 0; /* For the next launch. */
    for (ep_u32 cell = 0; cell < a.cells; ++cell) ep_st_release((void*)a.at[cell], a.bits[cell]);
    if (a.mark_at) ep_st_release((void*)a.mark_at, a.mark);
}
