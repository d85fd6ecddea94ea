/*
 * ep_summing.h: sums of rows that a warp pulls by the bulk copy engine. Parts of tokens are on their way to its stages while the oldest is summed.
 *
 *   memory   shared: `stages` stages of the warp, an EpBatch and a barrier for each
 *   rules    F10: whoever pulls has seen that the rows are there, and fenced that for the copy engine (ep_fence_seen). F5: lanes have read a stage, a
 *            fence of the proxies, __syncwarp, then it is loaded again
 *
 * A warp calls everything here with all its lanes. Without a copy engine a batch is summed as soon as it is known.
 */
#ifndef EP_SUMMING_H
#define EP_SUMMING_H
#include "ep_near.h"
#include "ep_sum.h"
#if __CUDA_ARCH__ >= 900
#include "ep_bulk.h"
#endif

/* All rows of a part of a token, on their way to a stage. */
struct EpBatch {
    ep_u32 token;
    ep_u32 at;    /* bytes of a row before the part, */
    ep_u32 bytes; /* and of the part */
    ep_u32 rows;
};
static_assert(sizeof(EpBatch) == EP_BATCH_BYTES, "the host makes room for another EpBatch");

/* Of a warp's votes those of lanes below the own one. */
EP_DEV ep_u32 ep_votes_before(ep_u32 votes) { return votes & ((1u << ep_warp_lane()) - 1); }

/* A warp's stages. */
struct EpSumming {
    EpSumShape shape;
    ep_u8* data;
    EpBatch* batches;
    ep_u64* bars;
    ep_u32 out, parity, in_flight;
    ep_u32 units; /* summed */
};

/* Bytes of a stage, and of all of a warp's. */
EP_DEV ep_u32 ep_stage_bytes(const EpSumShape& shape) { return shape.rows * shape.part; }
EP_DEV ep_u32 ep_summing_bytes(const EpSumShape& shape) { return shape.stages * ep_stage_bytes(shape); }

EP_DEV EpSumming ep_summing(const EpSumShape& shape, ep_u8* data, EpBatch* batches, ep_u64* bars) {
    EpSumming s = {shape, data, batches, bars, 0, 0, 0, 0};
#if __CUDA_ARCH__ >= 900
    if (ep_warp_lane() == 0) {
        for (ep_u32 i = 0; i < shape.stages; ++i) ep_barrier_init(bars + i, 1);
        ep_barrier_init_done();
    }
    __syncwarp();
#endif
    return s;
}

/* Part `part` of a token, of which no row is on its way yet. */
EP_DEV EpBatch ep_batch(const EpRank& r, const EpSumming& s, ep_u32 token, ep_u32 part) {
    const ep_u32 at = part * s.shape.part, left = (ep_u32)r.w.result_stride - at;
    return {token, at, left < s.shape.part ? left : s.shape.part, 0};
}

/* Sums `units` times 16 bytes of a batch, 512 bytes apart, from byte `at` of the part on: each by itself is a chain of waits. `out`: where sums go. */
template <ep_u32 units, class Row>
EP_DEV void ep_sum_units(const EpRank& r, const EpCombineArgs& m, const EpBatch& batch, ep_u32 biases, ep_u8* out, ep_u32 at, Row row) {
    EpSum sums[units];
#pragma unroll
    for (ep_u32 u = 0; u < units; ++u) ep_sum_clear(sums[u]);
    /* A loop, so that who has no bias jumps over it. */
#pragma unroll 1
    for (ep_u32 i = 0; i < biases; ++i) {
        const ep_u8* bias = (const ep_u8*)m.bias[i] + (ep_u64)batch.token * (ep_u32)m.bias_stride + batch.at + at;
#pragma unroll
        for (ep_u32 u = 0; u < units; ++u) {
            if (i == 0) ep_sum_start(sums[u], ep_ld16(bias + u * 512));
            else ep_sum_add(sums[u], ep_ld16(bias + u * 512));
        }
    }
#pragma unroll 1
    for (ep_u32 i = 0; i < batch.rows; ++i) {
        EpUnit of[units];
#pragma unroll
        for (ep_u32 u = 0; u < units; ++u) of[u] = row(i, at + u * 512);
#pragma unroll
        for (ep_u32 u = 0; u < units; ++u) {
            ep_sum_add(sums[u], of[u]);
            if (ep_planted(r, EP_PLANT_ROUNDED_TOO_EARLY)) ep_sum_start(sums[u], ep_sum_round(sums[u]));
        }
    }
#pragma unroll
    for (ep_u32 u = 0; u < units; ++u) ep_st16(out + at + u * 512, ep_sum_round(sums[u]));
}

/* Sums the rows of a batch that is there; `row(i, at)` gives 16 bytes of the i-th, from byte `at` of the part on. */
template <class Row> EP_DEV void ep_sum_batch(const EpRank& r, const EpCombineArgs& m, const EpBatch& batch, Row row) {
    ep_u8* out = (ep_u8*)m.out + (ep_u64)batch.token * (ep_u32)m.out_stride + batch.at;
    const ep_u32 biases = (m.bias[0] != 0) + (m.bias[1] != 0);
    ep_u32 at = ep_warp_lane() * 16;
    for (; at + 3 * 512 < batch.bytes; at += 4 * 512) ep_sum_units<4>(r, m, batch, biases, out, at, row);
    for (; at + 512 < batch.bytes; at += 2 * 512) ep_sum_units<2>(r, m, batch, biases, out, at, row);
    for (; at < batch.bytes; at += 512) ep_sum_units<1>(r, m, batch, biases, out, at, row);
}

#if __CUDA_ARCH__ >= 900

/* Sums the oldest batch. There is one. */
EP_DEV void ep_sum_oldest(const EpRank& r, const EpCombineArgs& m, EpSumming& s) {
    ep_barrier_wait(s.bars + s.out, s.parity);
    const ep_u8* from = s.data + s.out * ep_stage_bytes(s.shape);
    ep_sum_batch(r, m, s.batches[s.out], [&](ep_u32 i, ep_u32 at) { return ep_ld16(from + i * s.shape.part + at); });
    ep_fence_bulk();
    __syncwarp();
    if (++s.out == s.shape.stages) {
        s.out = 0;
        s.parity ^= 1;
    }
    --s.in_flight;
    ++s.units;
}

/* The stage that is free. */
EP_DEV ep_u32 ep_free_stage(const EpSumming& s) {
    const ep_u32 stage = s.out + s.in_flight;
    return stage < s.shape.stages ? stage : stage - s.shape.stages;
}

/* Starts to pull the next rows of a batch: each lane with `has` has one. A stage is free. */
EP_DEV void ep_pull_rows(EpSumming& s, EpBatch& batch, bool has, EpAt from) {
    const ep_u32 votes = __ballot_sync(EP_FULL, has), stage = ep_free_stage(s), index = batch.rows + __popc(ep_votes_before(votes));
    if (has) ep_get_bulk(s.data + stage * ep_stage_bytes(s.shape) + index * s.shape.part, from + batch.at, batch.bytes, s.bars + stage);
    batch.rows += __popc(votes);
}

/* All its rows are on their way. The barrier may count bytes before they are expected: it waits for this arrival. */
EP_DEV void ep_pull_ends(const EpRank&, const EpCombineArgs&, EpSumming& s, const EpBatch& batch) {
    const ep_u32 stage = ep_free_stage(s);
    if (ep_warp_lane() == 0) {
        s.batches[stage] = batch;
        ep_bulk_expect(s.bars + stage, batch.bytes * batch.rows);
    }
    __syncwarp();
    ++s.in_flight;
}

#else

EP_DEV void ep_sum_oldest(const EpRank&, const EpCombineArgs&, EpSumming&) {}

/* Without the bulk copy engine: sums at the end, at once. */
EP_DEV void ep_pull_rows(EpSumming& s, EpBatch& batch, bool has, EpAt from) {
    const ep_u32 votes = __ballot_sync(EP_FULL, has);
    if (has) ((EpAt*)s.data)[batch.rows + __popc(ep_votes_before(votes))] = from;
    batch.rows += __popc(votes);
}
EP_DEV void ep_pull_ends(const EpRank& r, const EpCombineArgs& m, EpSumming& s, const EpBatch& batch) {
    const EpAt* rows = (const EpAt*)s.data;
    __syncwarp();
    ep_sum_batch(r, m, batch, [&](ep_u32 i, ep_u32 at) { return ep_get16(rows[i] + (batch.at + at)); });
    __syncwarp();
    ++s.units;
}

#endif

/* Whether no stage is free. */
EP_DEV bool ep_sums_first(const EpSumming& s) { return s.in_flight == s.shape.stages; }

/* Sums all that is on its way. */
EP_DEV void ep_sum_rest(const EpRank& r, const EpCombineArgs& m, EpSumming& s) {
    while (s.in_flight > 0) ep_sum_oldest(r, m, s);
    __syncwarp();
}
#endif
