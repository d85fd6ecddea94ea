/*
 * ep_copy.h: copies rows that lie anywhere into the block that they are offered in, and tells of each piece (ep_pieces.h).
 *
 *   roles    copiers, warps of every block; they wait for nobody. Pieces are taken in turn, the first of all ranks before the second
 *            of any, as peers pull in that order. A piece is cut into chunks, which go to the copiers of all blocks one after the other
 *   memory   both ends in memory of the own GPU, where rows lie alike; the rows of the own rank are read where they are. How many
 *            rows there are is known to the device alone, so that a graph may replay it. shared: `stages` chunks a copier
 *   rules    F3: the chunk is written, the copier counts it; who counts a piece's last chunk raises the piece's cell. F5: a stage is
 *            loaded again when its chunk was written
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

EP_DEV void ep_tell_piece(const EpRank& r, ep_u32 piece) {
    const ep_u32 peer = piece / EP_PIECES;
    if (ep_takes_part(r, peer)) ep_raise(r, peer, ep_piece_lane(r), ep_piece_cell(r, r.me, piece % EP_PIECES), ep_op(r));
}

/* A chunk is in the block. By the thread that knows it to be. */
EP_DEV void ep_count_chunk(const EpRank& r, const EpCombineArgs& a, const EpChunk& chunk) {
    const ep_u32 chunks = ep_chunks(ep_extent(r, a, chunk.piece / EP_PIECES, chunk.piece % EP_PIECES), a.chunk);
    ep_u32* copied = (ep_u32*)a.copied + chunk.piece;
    __threadfence();
    if (atomicAdd(copied, 1u) + 1 < chunks) return;
    *copied = 0;
    ep_fence_sys();
    ep_tell_piece(r, chunk.piece);
}

/* A planted fault: all pieces are told of before any is there. By one copier. */
EP_DEV void ep_tell_too_early(const EpRank& r) {
    for (ep_u32 piece = threadIdx.x % 32; piece < r.w.ranks * EP_PIECES; piece += 32)
        if (piece / EP_PIECES != r.me) ep_tell_piece(r, piece);
    __syncwarp();
}

#if __CUDA_ARCH__ >= 900

/* Bytes of shared memory that come before the stages. */
EP_DEV ep_u32 ep_copy_state(const EpCombineArgs& a) { return a.copiers * a.stages * (ep_u32)(sizeof(ep_u64) + sizeof(EpChunk)); }

EP_DEV void ep_load_chunk(const EpCombineArgs& a, const EpChunk& chunk, ep_u8* to, ep_u64* bar) {
    ep_bulk_expect(bar, chunk.bytes);
    ep_bulk_load(to, (const ep_u8*)a.y + chunk.at, chunk.bytes, bar);
}

/* Copier `index` of the block's. One thread does it all. */
EP_DEV void ep_copy_rows(const EpRank& r, const EpCombineArgs& a, ep_u8* shared, ep_u32 index) {
    if (threadIdx.x % 32 != 0) return;
    const ep_u32 stages = a.stages, copiers = gridDim.x * a.copiers;
    EpChunk* chunks = (EpChunk*)shared + index * stages;
    ep_u64* bars = (ep_u64*)(shared + a.copiers * stages * sizeof(EpChunk)) + index * stages;
    ep_u8* data = shared + ep_round_128(ep_copy_state(a)) + (ep_u64)index * stages * a.chunk;
    ep_u8* to = ep_own(r) + ep_results_payload(r.w, a.base, 0);
    for (ep_u32 s = 0; s < stages; ++s) ep_barrier_init(bars + s, 1);
    ep_barrier_init_done();
    EpChunks walk = ep_chunks_of(blockIdx.x * a.copiers + index);
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
    ep_u32 stage = 0, parity = 0, before = stages - 1;
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
        if (last.bytes > 0) ep_count_chunk(r, a, last);
        last = chunk;
        before = stage;
        if (++stage == stages) { stage = 0; parity ^= 1; }
    }
    ep_bulk_wait_all();
    if (last.bytes > 0) ep_count_chunk(r, a, last);
}

#else

/* Units of 16 bytes that a lane has in flight. */
#define EP_COPIED 6u

/* Without the bulk copy engine: through registers. */
EP_DEV void ep_copy_rows(const EpRank& r, const EpCombineArgs& a, ep_u8*, ep_u32 index) {
    const ep_u32 lane = threadIdx.x % 32, copiers = gridDim.x * a.copiers;
    ep_u8* to = ep_own(r) + ep_results_payload(r.w, a.base, 0);
    EpChunks walk = ep_chunks_of(blockIdx.x * a.copiers + index);
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
        if (lane == 0) ep_count_chunk(r, a, chunk);
        __syncwarp();
    }
}

#endif
#endif
