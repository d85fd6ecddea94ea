/*
 * ep_copy.h: copies rows that lie anywhere into the block that they are offered in, and tells of each piece (ep_pieces.h).
 *
 *   roles    returners of every block: copiers, which wait for nobody. Pieces are taken in turn, the first of all ranks before the second
 *            of any, as peers pull in that order. A piece is cut into chunks, which go to the copiers of all blocks one after the other.
 *            The one with the task of the tail copies, too, but for that of the first block: it waits for the others' chunks, and raises
 *            the cells of pieces that are there.
 *            (A copier that did so would be late with its next chunk, and with it all that follows: fences of the system take long)
 *            Where the rows are sums that another launch makes there (fold.cu), it counts them, each for a chunk; there are no copiers, and this
 *            rank is told of its own rows, too
 *   memory   both ends in memory of the own GPU, where rows lie alike; the rows of the own rank are read where they are. How many
 *            rows there are is known to the device alone, so that a graph may replay it. shared: `stages` chunks a copier
 *   rules    F3: a chunk is written, fence, count; the teller sees the count, fence, cell. F5: a stage is loaded again when its chunk
 *            was written
 */
#ifndef EP_COPY_H
#define EP_COPY_H
#include "ep_offers.h"
#if __CUDA_ARCH__ >= 900
#include "ep_bulk.h"
#endif

/* A part of a piece. */
struct EpChunk {
    ep_u64 at; /* bytes from the first row on, at both ends */
    ep_u32 bytes;
    ep_u32 piece; /* of which rank's rows: rank * EP_PIECES + piece */
};
static_assert(sizeof(EpChunk) + sizeof(ep_u64) == EP_CHUNK_STATE_BYTES, "the host makes room for another EpChunk");

/* Where a piece's rows lie. */
struct EpExtent {
    ep_u64 at;
    ep_u64 bytes;
};

EP_DEV EpExtent ep_extent(const EpRank& r, const EpCombineArgs& a, ep_u32 peer, ep_u32 piece) {
    const ep_u32* first_of = (const ep_u32*)a.first_of;
    const ep_u32 begin = first_of[peer], rows = first_of[peer + 1] - begin, wide = ep_rows_of_piece(rows), first = piece * wide;
    const ep_u32 count = first >= rows ? 0 : rows - first < wide ? rows - first : wide;
    return {(ep_u64)(begin + first) * r.w.result_stride, count * r.w.result_stride};
}
EP_DEV ep_u32 ep_chunks(const EpExtent& e, ep_u32 chunk) { return (ep_u32)((e.bytes + chunk - 1) / chunk); }

/* The chunks of one copier, one after the other. */
struct EpChunks {
    EpExtent extent;
    ep_u32 next;   /* of the piece's chunks */
    ep_u32 chunks; /* of the piece */
    ep_u32 piece;
    ep_u32 turn;   /* ranks from the own one on */
};

/* Of copier `first` of all. */
EP_DEV EpChunks ep_chunks_of(ep_u32 first) { return {{0, 0}, first, 0, 0, 0}; }

/* The next chunk of one of `copiers` copiers; false when there is none. */
EP_DEV bool ep_next_chunk(const EpRank& r, const EpCombineArgs& a, EpChunks& c, ep_u32 copiers, EpChunk* out) {
    const ep_u32 ranks = r.w.ranks;
    while (c.next >= c.chunks) {
        c.next -= c.chunks;
        if (++c.turn == ranks) {
            c.turn = 1;
            ++c.piece;
        }
        if (c.piece == EP_PIECES) return false;
        const ep_u32 peer = r.me + c.turn < ranks ? r.me + c.turn : r.me + c.turn - ranks;
        c.extent = ep_extent(r, a, peer, c.piece);
        c.chunks = ep_chunks(c.extent, a.chunk);
        out->piece = peer * EP_PIECES + c.piece;
    }
    const ep_u64 at = (ep_u64)c.next * a.chunk, left = c.extent.bytes - at;
    out->at = c.extent.at + at;
    out->bytes = left < a.chunk ? (ep_u32)left : a.chunk;
    c.next += copiers;
    return true;
}

EP_DEV void ep_tell_piece(const EpRank& r, ep_u32 peer, ep_u32 piece) {
    ep_raise(r, peer, ep_piece_lane(r), ep_piece_cell(r.w, r.generation, r.me, piece), ep_op(r));
}

/* Tells of pieces as they are there, until all are; a lane for each piece. Ends early only when the rank has failed, or has no time
   left: then not all blocks may be at work. By a warp. */
EP_DEV void ep_tell_pieces(const EpRank& r, const EpCombineArgs& a, ep_u64 began) {
    const ep_u32 piece = threadIdx.x % 32, ranks = r.w.ranks;
    ep_u32 left = 0;
    for (ep_u32 peer = 0; peer < ranks; ++peer) left += (a.folds || peer != r.me) && ep_extent(r, a, peer, piece).bytes > 0;
    while (__any_sync(EP_FULL, left > 0)) {
        for (ep_u32 first = 0; first < ranks; first += 32) {
            ep_u32 there = 0; /* bits: ranks from first on whose piece is */
            for (ep_u32 i = 0; i < 32 && first + i < ranks; ++i) {
                ep_u32* copied = (ep_u32*)a.copied + (first + i) * EP_PIECES + piece;
                const ep_u32 chunks = first + i == r.me && !a.folds ? 0 : ep_chunks(ep_extent(r, a, first + i, piece), a.chunk);
                /* 0 again once it was told of. */
                if (chunks == 0 || ep_ld_relaxed(copied) != chunks) continue;
                *copied = 0;
                there |= 1u << i;
            }
            if (there) ep_fence_sys();
            for (; there; there &= there - 1) {
                const ep_u32 peer = first + __ffs(there) - 1;
                if (ep_takes_part(r, peer)) ep_tell_piece(r, peer, piece);
                --left;
            }
        }
        if (__any_sync(EP_FULL, ep_failed(r) || ep_now() - began > r.allowed)) return;
    }
}

/* Chunks are in the block. By the thread that knows them to be; `pieces` says of which. */
EP_DEV void ep_count_chunks(const EpCombineArgs& a, const ep_u32* pieces, ep_u32 count) {
    ep_fence_device();
    for (ep_u32 i = 0; i < count; ++i) atomicAdd((ep_u32*)a.copied + pieces[i], 1u);
}

/* A planted fault: all pieces are told of before any is there. By the teller. */
EP_DEV void ep_tell_too_early(const EpRank& r) {
    for (ep_u32 peer = 0; peer < r.w.ranks; ++peer)
        if (peer != r.me && ep_takes_part(r, peer)) ep_tell_piece(r, peer, threadIdx.x % 32);
    __syncwarp();
}

#if __CUDA_ARCH__ >= 900

/* Bytes of shared memory that come before the stages. */
EP_DEV ep_u32 ep_copy_state(const EpCombineArgs& a) {
    return a.copiers * (a.stages * (ep_u32)(sizeof(ep_u64) + sizeof(EpChunk)) + EP_COUNTED * 4);
}

EP_DEV void ep_load_chunk(const EpCombineArgs& a, const EpChunk& chunk, ep_u8* to, ep_u64* bar) {
    ep_bulk_expect(bar, chunk.bytes);
    ep_bulk_load(to, (const ep_u8*)a.y + chunk.at, chunk.bytes, bar);
}

/* Copier `index` of the block's, `first` of all `copiers`. One thread does it all. */
EP_DEV void ep_copy_rows(const EpRank& r, const EpCombineArgs& a, ep_u8* shared, ep_u32 index, ep_u32 first, ep_u32 copiers) {
    if (threadIdx.x % 32 != 0) return;
    const ep_u32 stages = a.stages;
    EpChunk* chunks = (EpChunk*)shared + index * stages;
    ep_u64* bars = (ep_u64*)((EpChunk*)shared + a.copiers * stages) + index * stages;
    ep_u32* written = (ep_u32*)((ep_u64*)((EpChunk*)shared + a.copiers * stages) + a.copiers * stages) + index * EP_COUNTED;
    ep_u8* data = shared + ep_round_128(ep_copy_state(a)) + (ep_u64)index * stages * a.chunk;
    ep_u8* to = ep_own(r) + ep_results_payload(r.w, a.base, a.base_rows, 0);
    for (ep_u32 s = 0; s < stages; ++s) ep_barrier_init(bars + s, 1);
    ep_barrier_init_done();
    EpChunks walk = ep_chunks_of(first);
    EpChunk next = {0, 0, 0};
    bool more = true;
    ep_u32 loaded = 0;
    for (ep_u32 s = 0; s + 1 < stages && more; ++s) {
        more = ep_next_chunk(r, a, walk, copiers, &next);
        if (!more) break;
        chunks[s] = next;
        ep_load_chunk(a, next, data + s * a.chunk, bars + s);
        ++loaded;
    }
    ep_u32 stage = 0, parity = 0, before = stages - 1, uncounted = 0;
    EpChunk last = {0, 0, 0};
    while (loaded > 0) {
        const EpChunk chunk = chunks[stage];
        ep_barrier_wait(bars + stage, parity);
        ep_bulk_store(to + chunk.at, data + stage * a.chunk, chunk.bytes);
        ep_bulk_commit();
        --loaded;
        /* The chunk of one turn ago is written. */
        ep_bulk_wait<1>();
        if (more) more = ep_next_chunk(r, a, walk, copiers, &next);
        if (more) {
            chunks[before] = next;
            ep_load_chunk(a, next, data + before * a.chunk, bars + before);
            ++loaded;
        }
        if (last.bytes > 0) {
            written[uncounted++] = last.piece;
            if (uncounted == EP_COUNTED || last.piece % EP_PIECES < 2) {
                ep_count_chunks(a, written, uncounted);
                uncounted = 0;
            }
        }
        last = chunk;
        before = stage;
        if (++stage == stages) { stage = 0; parity ^= 1; }
    }
    ep_bulk_wait_all();
    if (last.bytes > 0) written[uncounted++] = last.piece;
    ep_count_chunks(a, written, uncounted);
}

#else

/* Units of 16 bytes that a lane has in flight. */
#define EP_COPIED 6u

/* Without the bulk copy engine: through registers. */
EP_DEV void ep_copy_rows(const EpRank& r, const EpCombineArgs& a, ep_u8*, ep_u32, ep_u32 first, ep_u32 copiers) {
    const ep_u32 lane = threadIdx.x % 32;
    ep_u8* to = ep_own(r) + ep_results_payload(r.w, a.base, a.base_rows, 0);
    EpChunks walk = ep_chunks_of(first);
    EpChunk chunk = {0, 0, 0};
    while (ep_next_chunk(r, a, walk, copiers, &chunk)) {
        for (ep_u32 begin = lane * 16; begin < chunk.bytes; begin += 512 * EP_COPIED) {
            int4 held[EP_COPIED];
#pragma unroll
            for (ep_u32 i = 0; i < EP_COPIED; ++i)
                if (begin + i * 512 < chunk.bytes) held[i] = ep_ld16_once((const ep_u8*)a.y + chunk.at + begin + i * 512);
#pragma unroll
            for (ep_u32 i = 0; i < EP_COPIED; ++i)
                if (begin + i * 512 < chunk.bytes) ep_st16(to + chunk.at + begin + i * 512, held[i]);
        }
        __syncwarp();
        if (lane == 0) ep_count_chunks(a, &chunk.piece, 1);
        __syncwarp();
    }
}

#endif

/* Copies, or tells of what others copy. */
EP_DEV void ep_offer_rows(const EpRank& r, const EpCombineArgs& a, ep_u8* shared, const EpBlockRole& role, ep_u64 began) {
    const bool tells = role.task == EP_TASK_TAIL && ep_block() == 0;
    /* Among the block's copiers: the one with the tail first. */
    const ep_u32 index = role.task == EP_TASK_TAIL ? 0 : role.index + 1;
    if (ep_planted(r, EP_PLANT_OFFERED_EARLY)) {
        if (tells) ep_tell_too_early(r);
        ep_be_slow();
    }
    if (tells) ep_tell_pieces(r, a, began);
    else if (!a.folds) ep_copy_rows(r, a, shared, index, ep_block() * a.copiers + index - 1, ep_blocks() * a.copiers - 1);
}
#endif
