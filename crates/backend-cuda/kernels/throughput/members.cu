/*
 * ep_members_kernel: which ranks and experts a batch goes to, for whoever asks before there is a communicator.
 *
 *   launch   any number of blocks of 512 threads; a thread serves one token at a time; nobody is waited for
 *   memory   shared: the block's share of the numbers while these are at most 4096
 *
 * Choices that no expert has count nowhere: a dispatch of them refuses them.
 */
#include "ep_rank.h"

#define EP_MEMBERS_SHARED 4096u

/* The ranks first .. first + 32 that a token goes to, as bits; counts its choices in `chosen` where that is given. */
EP_DEV ep_u32 ep_members_of(const EpMembersArgs& a, ep_u32 token, ep_u32 first, ep_u32* chosen) {
    const ep_i64* choices = (const ep_i64*)a.topk_idx + (ep_u64)token * a.topk;
    const ep_u32 local = a.experts / a.ranks;
    ep_u32 members = 0;
    for (ep_u32 base = 0; base < a.topk; base += 8) {
        /* Eight at a time, loaded together; most routers choose no more. */
        ep_i64 experts[8];
#pragma unroll
        for (ep_u32 i = 0; i < 8; ++i) experts[i] = base + i < a.topk ? choices[base + i] : -1;
#pragma unroll
        for (ep_u32 i = 0; i < 8; ++i) {
            if (experts[i] < 0 || experts[i] >= (ep_i64)a.experts) continue;
            const ep_u32 expert = (ep_u32)experts[i], rank = expert / local;
            if (rank - first < 32) members |= 1u << (rank - first);
            if (chosen) atomicAdd(chosen + expert, 1u);
        }
    }
    return members;
}

extern "C" __global__ void __launch_bounds__(EP_MEMBERS_THREADS)
    ep_members_kernel(const __grid_constant__ EpMembersArgs a) {
    __shared__ ep_u32 share[EP_MEMBERS_SHARED];
    const ep_u32 tid = threadIdx.x, lane = tid % 32, all = a.ranks + a.experts;
    const bool small = all <= EP_MEMBERS_SHARED;
    ep_u32* numbers = small ? share : (ep_u32*)a.numbers;
    if (small) {
        for (ep_u32 i = tid; i < all; i += EP_MEMBERS_THREADS) share[i] = 0;
        __syncthreads();
    }
    for (ep_u64 base = (ep_u64)blockIdx.x * EP_MEMBERS_THREADS; base < a.tokens; base += (ep_u64)gridDim.x * EP_MEMBERS_THREADS) {
        const bool is_one = base + tid < a.tokens;
        const ep_u32 token = (ep_u32)(base + tid);
        for (ep_u32 first = 0; first < a.ranks; first += 32) {
            const ep_u32 members = is_one ? ep_members_of(a, token, first, first == 0 ? numbers + a.ranks : nullptr) : 0;
            for (ep_u32 k = 0; k < 32 && first + k < a.ranks; ++k) {
                const ep_u32 votes = __ballot_sync(EP_FULL, members >> k & 1);
                if (lane == 0 && votes) atomicAdd(numbers + first + k, __popc(votes));
                if (is_one) ((ep_u8*)a.in_rank)[(ep_u64)token * a.ranks + first + k] = members >> k & 1;
            }
        }
    }
    if (!small) return;
    __syncthreads();
    for (ep_u32 i = tid; i < all; i += EP_MEMBERS_THREADS)
        if (share[i]) atomicAdd((ep_u32*)a.numbers + i, share[i]);
}
