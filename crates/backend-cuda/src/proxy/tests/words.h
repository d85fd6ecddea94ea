/*
 * words.h: the words of ep_words.h that far verbs say, on a thread of a CPU.
 */
#include <sched.h>
#include <time.h>

#define EP_HD
#define EP_DEV static inline
#define EP_DEV_APART static

struct EpUnit {
    int x, y, z, w;
};

#include "ep_words.h"

EP_DEV ep_u64 ep_ld_acquire(const void* at) { return __atomic_load_n((const ep_u64*)at, __ATOMIC_ACQUIRE); }
EP_DEV void ep_st_release(void* at, ep_u64 v) { __atomic_store_n((ep_u64*)at, v, __ATOMIC_RELEASE); }
EP_DEV void ep_st_relaxed2(void* at, ep_u64 first, ep_u64 second) {
    __atomic_store_n((ep_u64*)at, first, __ATOMIC_RELAXED);
    __atomic_store_n((ep_u64*)at + 1, second, __ATOMIC_RELAXED);
}
EP_DEV void ep_fence_sys() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
EP_DEV ep_u64 ep_now() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (ep_u64)now.tv_sec * 1000000000ull + (ep_u64)now.tv_nsec;
}
/* Short ones let others run; long ones are meant. */
EP_DEV void ep_nap(ep_u32 nanoseconds) {
    if (nanoseconds < 10000) {
        sched_yield();
        return;
    }
    const timespec length = {0, (long)nanoseconds};
    nanosleep(&length, nullptr);
}
