/*
 * ep_positions_kernel: from the router's choices (or a membership) to positions and counts; nothing leaves the GPU.
 *
 *   launch   at most 64 blocks of 512 threads; a block serves a contiguous share of the tokens, a thread one token at a time
 *   memory   shared: rows of each warp for 32 ranks at a time; a histogram of the experts while these are at most 4096
 *   order    a block publishes the rows of its share, and then adds up those of the blocks before it: a block waits for blocks of
 *            lower index only, which were started before it, so any number of blocks makes progress and the wait is bounded.
 *            The last block to end lowers the flags for the next launch
 *
 * A row's position is its index among the rows from this rank to that destination, in token order (ep_core::plan).
 */
#include "ep_meet.h"
#include "ep_fail.h"

#define EP_POSITION_WARPS (EP_POSITION_THREADS / 32)
#define EP_HISTOGRAM 4096u

/* The ranks first .. first + 32 that a token goes to, as bits; counts and checks its choices where `count`. */
EP_DEV ep_u32 ep_members(const EpRank& r, const EpPositionsArgs& a, ep_u32 token, ep_u32 first, bool count, ep_u32* histogram) {
    ep_u32 members = 0;
    if (a.topk_idx == 0) {
        const ep_u8* in_rank = (const ep_u8*)a.in_rank + (ep_u64)token * r.w.ranks;
        for (ep_u32 rank = first; rank < r.w.ranks && rank < first + 32; ++rank)
            if (in_rank[rank] && ep_takes_part(r, rank)) members |= 1u << (rank - first);
        return members;
    }
    const ep_i64* choices = (const ep_i64*)a.topk_idx + (ep_u64)token * r.w.topk;
    bool bad = false;
    for (ep_u32 base = 0; base < r.w.topk; base += 8) {
        /* Eight at a time, loaded together; most routers choose no more. */
        ep_i64 experts[8];
#pragma unroll
        for (ep_u32 i = 0; i < 8; ++i) experts[i] = base + i < r.w.topk ? choices[base + i] : -1;
#pragma unroll
        for (ep_u32 i = 0; i < 8; ++i) {
            const ep_i64 expert = experts[i];
            if (expert == -1) continue;
            if (expert < 0 || expert >= (ep_i64)r.w.experts) { bad = true; continue; }
            const ep_u32 rank = ep_rank_of_expert(r.w, (ep_u32)expert);
            if (count && !a.repeats) {
#pragma unroll
                for (ep_u32 other = 0; other < i; ++other) bad |= experts[other] == expert;
                for (ep_u32 other = 0; other < base; ++other) bad |= choices[other] == expert;
            }
            if (!ep_takes_part(r, rank)) continue;
            if (rank - first < 32) members |= 1u << (rank - first);
            if (count) atomicAdd(histogram ? histogram + expert : (ep_u32*)a.choices + expert, 1u);
        }
    }
    if (bad && count) {
        const ep_u32 mine = token + 1;
        ep_u32 seen = ep_local(r)->bad_token;
        while (seen == 0 || mine < seen) {
            const ep_u32 before = atomicCAS(&ep_local(r)->bad_token, seen, mine);
            if (before == seen) break;
            seen = before;
        }
    }
    return members;
}

extern "C" __global__ void __launch_bounds__(EP_POSITION_THREADS, 1) ep_positions_kernel(const __grid_constant__ EpRank r,
                                                                                const __grid_constant__ EpPositionsArgs a) {
    __shared__ ep_u32 histogram[EP_HISTOGRAM];
    __shared__ ep_u32 of_warp[EP_POSITION_WARPS][32];
    __shared__ ep_u32 carried[32];
    if (ep_closed(r)) return;
    const ep_u32 tid = threadIdx.x, lane = tid % 32, warp = tid / 32, block = blockIdx.x;
    const ep_u32 begin = ep_channel_first(a.tokens, gridDim.x, block), end = ep_channel_first(a.tokens, gridDim.x, block + 1);
    const bool small = r.w.experts <= EP_HISTOGRAM && a.topk_idx != 0;
    if (small) {
        for (ep_u32 e = tid; e < r.w.experts; e += EP_POSITION_THREADS) histogram[e] = 0;
    }
    __syncthreads();
    for (ep_u32 first = 0; first < r.w.ranks; first += 32) {
        /* Rows of this block to each of the 32 ranks. */
        ep_u32 kept = 0;
        if (tid < 32) carried[tid] = 0;
        __syncthreads();
        for (ep_u32 base = begin; base < end; base += EP_POSITION_THREADS) {
            const ep_u32 token = base + tid;
            const ep_u32 members = token < end ? ep_members(r, a, token, first, first == 0, small ? histogram : nullptr) : 0;
            if (base == begin) kept = members;
            for (ep_u32 k = 0; k < 32 && first + k < r.w.ranks; ++k) {
                const ep_u32 votes = __ballot_sync(EP_FULL, members >> k & 1);
                if (lane == 0 && votes) atomicAdd(&carried[k], __popc(votes));
            }
        }
        __syncthreads();
        ep_u32* partial = (ep_u32*)a.partial;
        ep_u64* flags = (ep_u64*)a.flags;
        if (tid < 32 && first + tid < r.w.ranks) partial[block * r.w.ranks + first + tid] = carried[tid];
        __syncthreads();
        const ep_u64 stamp = first / 32 + 1;
        if (tid == 0) ep_st_release_gpu(flags + block, stamp);
        /* Rows of the blocks before. Each lane of warp 0 serves one rank. */
        if (warp == 0) {
            for (ep_u32 before = lane; before < block; before += 32)
                while (ep_ld_acquire_gpu(flags + before) < stamp) {}
            __syncwarp();
            ep_u32 sum = 0;
            if (first + lane < r.w.ranks)
                for (ep_u32 before = 0; before < block; ++before) sum += __ldcg(partial + before * r.w.ranks + first + lane);
            if (block + 1 == gridDim.x && first + lane < r.w.ranks)
                ((ep_u32*)a.rows)[first + lane] = sum + carried[lane];
            __syncwarp();
            carried[lane] = sum;
        }
        __syncthreads();
        /* Positions. */
        ep_i32* position = (ep_i32*)a.position;
        for (ep_u32 base = begin; base < end; base += EP_POSITION_THREADS) {
            const ep_u32 token = base + tid;
            const ep_u32 members =
                base == begin ? kept : token < end ? ep_members(r, a, token, first, false, nullptr) : 0;
            for (ep_u32 k = 0; k < 32 && first + k < r.w.ranks; ++k) {
                const ep_u32 votes = __ballot_sync(EP_FULL, members >> k & 1);
                if (lane == k) of_warp[warp][k] = __popc(votes);
            }
            __syncthreads();
            if (warp == 0) {
                ep_u32 sum = carried[lane];
                for (ep_u32 other = 0; other < EP_POSITION_WARPS; ++other) {
                    const ep_u32 rows = of_warp[other][lane];
                    of_warp[other][lane] = sum;
                    sum += rows;
                }
                carried[lane] = sum;
            }
            __syncthreads();
            for (ep_u32 k = 0; k < 32 && first + k < r.w.ranks; ++k) {
                const ep_u32 votes = __ballot_sync(EP_FULL, members >> k & 1);
                if (token < end)
                    position[(ep_u64)token * r.w.ranks + first + k] =
                        members >> k & 1 ? (ep_i32)(of_warp[warp][k] + __popc(votes & ((1u << lane) - 1))) : -1;
            }
            __syncthreads();
        }
    }
    if (small)
        for (ep_u32 e = tid; e < r.w.experts; e += EP_POSITION_THREADS)
            if (histogram[e]) atomicAdd((ep_u32*)a.choices + e, histogram[e]);
    if (ep_last_block(r, EP_MEETING_READ))
        for (ep_u32 block = tid; block < gridDim.x; block += EP_POSITION_THREADS) ((ep_u64*)a.flags)[block] = 0;
}
