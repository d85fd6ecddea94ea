/*
 * bell.h: what orders a bell, looked at step by step: the toy's own memory forgives a fence that is missing. The one warp of a block that listens hands
 * a bell to the others by a word in shared memory (EpHcaBlock.rings), which orders nothing by itself.
 *
 *   ring   by lane 0 of the first warp, which has fenced behind all looks at registers
 *   hear   by lane 0 of another, which fences before any lane of its warp looks at a record
 */
#ifndef BELL_H
#define BELL_H
#include "ep_device.h"

namespace bell {

/* Of a block: all its lanes take turns on one thread. */
struct Block {
    unsigned long looks, fenced;  /* looks at registers; of those, before the last fence */
    ep_u32 heard[32], unfenced[32]; /* of each warp: the ring that its first lane has seen, and whether it has not fenced since */
};
inline thread_local Block own = {};

/* In place of EpHcaBlock.rings. */
struct Ring {
    ep_u32 value;
    operator ep_u32() const {
        if (ep_warp() != 0 && ep_warp_lane() == 0 && own.heard[ep_warp()] != value) {
            own.heard[ep_warp()] = value;
            own.unfenced[ep_warp()] = 1;
        }
        return value;
    }
    void operator=(ep_u32 rings) {
        /* The first of a launch: all meet behind it. */
        if (rings == 1) own = {};
        if (own.fenced != own.looks) toy::broken("ring %u orders nothing: no fence behind the look at the register", rings);
        value = rings;
    }
};

inline ep_u64 look(const void* at) {
    if (ep_warp() == 0) ++own.looks;
    return ep_ld_acquire(at);
}
inline ep_u32 look4(const void* at) {
    if (own.unfenced[ep_warp()] != 0) toy::broken("warp %u looks at a record, and has not fenced behind ring %u", ep_warp(), own.heard[ep_warp()]);
    return ep_ld_acquire4(at);
}

} /* namespace bell */

static inline void ep_fence_block() {
    if (ep_warp_lane() == 0) bell::own.unfenced[ep_warp()] = 0;
    if (ep_thread() == 0) bell::own.fenced = bell::own.looks;
    __atomic_thread_fence(__ATOMIC_ACQ_REL);
}

#define ep_ld_acquire bell::look
#define ep_ld_acquire4 bell::look4
#endif
