/*
 * ep_low_shares.h: which block sends what, in launches whose blocks need not all run at a time.
 *
 * What a launch sends is cut into as many shares as there are blocks. A block takes its own; when it has sent that, it takes those of
 * blocks that have not begun. So no block waits for a peer before all shares were taken by running blocks, which wait for nothing of this
 * launch: one running block is enough for all ranks to go on. There are at most as many blocks as a block has threads.
 */
#ifndef EP_LOW_SHARES_H
#define EP_LOW_SHARES_H
#include "ep_low.h"

#define EP_LOW_NO_SHARE 0xffffffffu

EP_DEV ep_u32* ep_low_taken(const EpRank& r, ep_u32 share) { return (ep_u32*)ep_low_taken_at(r.local, r.w.ranks, share); }

/* Takes a share; false where somebody has. By one thread. */
EP_DEV bool ep_low_take(const EpRank& r, ep_u32 share) { return atomicExch(ep_low_taken(r, share), 1u) == 0; }

/* Not 0 unless this thread sees a share that nobody has taken. What is not looked at at once costs no time. */
EP_DEV ep_u32 ep_low_look_at_shares(const EpRank& r) {
    ep_u32 taken = 1;
    if (threadIdx.x < gridDim.x) taken = ep_ld_relaxed(ep_low_taken(r, threadIdx.x));
    return taken;
}

/* Takes a share of a block that has not begun, for the whole block; EP_LOW_NO_SHARE where all are taken. By all threads. */
EP_RARE ep_u32 ep_low_take_another(const EpRank& r) {
    __shared__ ep_u32 nearest, taken;
    if (ep_planted(r, EP_PLANT_LOW_SHARES_LEFT)) return EP_LOW_NO_SHARE;
    for (;;) {
        __syncthreads();
        if (threadIdx.x == 0) {
            nearest = EP_FULL;
            taken = EP_LOW_NO_SHARE;
        }
        __syncthreads();
        const ep_u32 turn = threadIdx.x < blockIdx.x ? threadIdx.x + gridDim.x - blockIdx.x : threadIdx.x - blockIdx.x;
        if (ep_low_look_at_shares(r) == 0) atomicMin(&nearest, turn);
        __syncthreads();
        if (nearest == EP_FULL) return EP_LOW_NO_SHARE;
        if (threadIdx.x == 0 && ep_low_take(r, (blockIdx.x + nearest) % gridDim.x)) taken = (blockIdx.x + nearest) % gridDim.x;
        __syncthreads();
        if (taken != EP_LOW_NO_SHARE) return taken;
    }
}

/* For the next launch. By all threads of the last block. */
EP_DEV void ep_low_free_shares(const EpRank& r) {
    EP_SHORT for (ep_u32 share = threadIdx.x; share < gridDim.x; share += EP_LOW_THREADS) *ep_low_taken(r, share) = 0;
}
#endif
