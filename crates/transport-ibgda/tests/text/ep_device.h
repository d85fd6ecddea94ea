/*
 * ep_device.h: the words of ep_words.h that the text of the verbs says, on a CPU.
 */
#ifndef EP_DEVICE_H
#define EP_DEVICE_H
#include <chrono>
#include <cstring>
#include <thread>

#define EP_HD
#define EP_DEV static inline
#define EP_DEV_APART static
#define EP_KERNEL(threads) static void

struct EpUnit {
    int x, y, z, w;
};

#include "ep_words.h"

EP_DEV ep_u32 ep_ld_acquire4(const void* at) { return __atomic_load_n((const ep_u32*)at, __ATOMIC_ACQUIRE); }
EP_DEV void ep_st_relaxed4(ep_u32* at, ep_u32 v) { __atomic_store_n(at, v, __ATOMIC_RELAXED); }
EP_DEV void ep_st_register(void* at, ep_u64 v) { __atomic_store_n((ep_u64*)at, v, __ATOMIC_RELAXED); }
EP_DEV void ep_fence_sys() { __atomic_thread_fence(__ATOMIC_ACQ_REL); }
EP_DEV void ep_st16(void* at, EpUnit v) { std::memcpy(at, &v, sizeof v); }
EP_DEV EpUnit ep_unit(ep_i32 x, ep_i32 y, ep_i32 z, ep_i32 w) { return EpUnit{x, y, z, w}; }
EP_DEV ep_u64 ep_now() { return (ep_u64)std::chrono::steady_clock::now().time_since_epoch().count(); }
EP_DEV void ep_nap(ep_u32) { std::this_thread::yield(); }

#endif
