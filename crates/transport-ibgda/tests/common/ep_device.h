/*
 * ep_device.h: the words of ep_words.h that the text of the verbs says, on a CPU.
 *
 * With LATE_STORES what is stored is not there for others before a fence for all of them: so a fence that is missing, or whose scope is the own
 * device, shows on any processor. A thread has stores of its own.
 */
#ifndef EP_DEVICE_H
#define EP_DEVICE_H
/* C's alone: they compile in no time. */
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#define EP_HD
#define EP_DEV static inline
#define EP_DEV_APART static
#define EP_KERNEL(threads) static void

struct EpUnit {
    int x, y, z, w;
};

#include "ep_words.h"

namespace late {

struct Store {
    uint64_t at, value;
    unsigned bytes;
};
inline thread_local Store stores[1 << 16];
inline thread_local unsigned count = 0;

/* What else happens at a point between two accesses: the adapter's own steps. */
inline thread_local void (*meanwhile)(void*) = nullptr;
inline thread_local void* of_meanwhile = nullptr;
inline void elsewhere() {
    if (meanwhile) meanwhile(of_meanwhile);
}

/* Whole words: an adapter reads them meanwhile. */
inline void land(const Store& one) {
    if (one.bytes == 4) __atomic_store_n((uint32_t*)one.at, (uint32_t)one.value, __ATOMIC_RELEASE);
    else __atomic_store_n((uint64_t*)one.at, one.value, __ATOMIC_RELEASE);
}
inline void store(void* at, uint64_t value, unsigned bytes) {
#ifdef LATE_STORES
    if (count == sizeof stores / sizeof *stores) __builtin_trap();
    stores[count++] = {(uint64_t)at, value, bytes};
#else
    land({(uint64_t)at, value, bytes});
#endif
}
inline void fence() {
    for (unsigned i = 0; i < count; ++i) land(stores[i]);
    count = 0;
}

} /* namespace late */

EP_DEV ep_u32 ep_ld_acquire4(const void* at) { return __atomic_load_n((const ep_u32*)at, __ATOMIC_ACQUIRE); }
EP_DEV void ep_st_relaxed4(ep_u32* at, ep_u32 v) {
    late::store(at, v, 4);
    late::elsewhere();
}
EP_DEV void ep_st_register(void* at, ep_u64 v) {
    late::elsewhere();
    __atomic_store_n((ep_u64*)at, v, __ATOMIC_RELEASE);
    late::elsewhere();
}
EP_DEV void ep_fence_sys() {
    late::fence();
    late::elsewhere();
}
EP_DEV void ep_fence_device() { late::elsewhere(); }
EP_DEV void ep_st16(void* at, EpUnit v) {
    uint64_t words[2];
    memcpy(words, &v, sizeof v);
    late::store(at, words[0], 8);
    late::store((ep_u8*)at + 8, words[1], 8);
}
EP_DEV EpUnit ep_unit(ep_i32 x, ep_i32 y, ep_i32 z, ep_i32 w) { return EpUnit{x, y, z, w}; }
EP_DEV ep_u64 ep_now() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (ep_u64)now.tv_sec * 1000000000u + (ep_u64)now.tv_nsec;
}
EP_DEV void ep_nap(ep_u32) { sched_yield(); }

#endif
