/*
 * cuda_words.h: words of CUDA that kernels say beside those of ep_words.h, on the twin: what GPUs of compute capability 8.0
 * have. Before everything else that a kernel includes.
 */
#ifndef TWIN_CUDA_WORDS_H
#define TWIN_CUDA_WORDS_H
#include "ep_device.h"

#undef EP_KERNEL
#define EP_KERNEL(threads) static void
#define __global__ inline
#define __device__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))
/* A block is a thread. */
#define __shared__ static thread_local

typedef EpUnit int4;
struct alignas(8) uint2 {
    unsigned x, y;
};
static inline int4 make_int4(int x, int y, int z, int w) { return EpUnit{x, y, z, w}; }

/* ---- who speaks ---- */

#define threadIdx (toy::Index{ep_thread()})
#define blockIdx (toy::Index{ep_block()})
#define blockDim (toy::Index{ep_threads()})
#define gridDim (toy::Index{ep_blocks()})
namespace toy {
struct Index {
    unsigned x;
};
inline void full(unsigned mask) {
    if (mask != EP_FULL) broken("a meeting of lanes %x", mask);
}
}

static inline void __syncwarp() { ep_warp_meet(); }
static inline bool __all_sync(unsigned mask, int mine) { return toy::full(mask), ep_warp_all(mine); }
static inline bool __any_sync(unsigned mask, int mine) { return toy::full(mask), ep_warp_any(mine); }
static inline unsigned __ballot_sync(unsigned mask, int mine) { return toy::full(mask), ep_warp_votes(mine); }
template <class T> static inline T __shfl_sync(unsigned mask, T mine, unsigned lane) {
    return toy::full(mask), ep_warp_shuffle(mine, lane % 32);
}
/* The first lanes get what they have. */
template <class T> static inline T __shfl_up_sync(unsigned mask, T mine, unsigned back) {
    const unsigned lane = ep_warp_lane();
    return toy::full(mask), ep_warp_shuffle(mine, lane >= back ? lane - back : lane);
}
template <class T> static inline T __shfl_xor_sync(unsigned mask, T mine, unsigned with) {
    return toy::full(mask), ep_warp_shuffle(mine, ep_warp_lane() ^ with);
}
template <class T, class F> static inline T toy_fold(T mine, F with) {
    const std::uint64_t* said = toy::Warp::own().meet(toy::Word::shuffle, mine);
    T all = (T)said[0];
    for (unsigned lane = 1; lane < toy::kLanes; ++lane) all = with(all, (T)said[lane]);
    return all;
}
template <class T> static inline T __reduce_min_sync(unsigned mask, T mine) {
    return toy::full(mask), toy_fold(mine, [](T a, T b) { return a < b ? a : b; });
}
template <class T> static inline T __reduce_max_sync(unsigned mask, T mine) {
    return toy::full(mask), toy_fold(mine, [](T a, T b) { return a > b ? a : b; });
}
template <class T> static inline T __reduce_add_sync(unsigned mask, T mine) {
    return toy::full(mask), toy_fold(mine, [](T a, T b) { return a + b; });
}
template <class T> static inline unsigned __match_any_sync(unsigned mask, T mine) {
    toy::full(mask);
    const std::uint64_t* said = toy::Warp::own().meet(toy::Word::shuffle, (std::uint64_t)mine);
    unsigned same = 0;
    for (unsigned lane = 0; lane < toy::kLanes; ++lane) same |= (unsigned)(said[lane] == (std::uint64_t)mine) << lane;
    return same;
}
static inline void __syncthreads() { ep_block_meet(); }
static inline int __syncthreads_or(int mine) { return ep_block_any(mine != 0); }
static inline int __syncthreads_and(int mine) { return !ep_block_any(mine == 0); }

/* Whether all of the first `threads` threads of the block say so; only these call it. */
EP_DEV bool ep_all_of(bool mine, ep_u32 threads) {
    return toy::Warp::own().meet(toy::Word::all_of, !mine, threads)[0] == 0;
}

/* Launches of a stream come one after the other. */
EP_DEV void ep_wait_for_launches_before() {}
EP_DEV void ep_let_next_begin() {}

/* ---- memory ---- */

EP_DEV void ep_fence_block() { __atomic_thread_fence(__ATOMIC_ACQ_REL); }
EP_DEV ep_u64 ep_ld_acquire_gpu(const void* at) { return ep_ld_acquire(at); }
EP_DEV void ep_st_release_gpu(void* at, ep_u64 v) { ep_st_release(at, v); }
EP_DEV ep_u64 ep_ld_relaxed_sys(const void* at) {
    toy::Warp::own().wait();
    return __atomic_load_n((const ep_u64*)at, __ATOMIC_RELAXED);
}
EP_DEV void ep_prefetch(const void*) {}
EP_DEV EpUnit ep_ld16_once(const void* at) { return ep_ld16(at); }
template <class T> static inline T __ldcg(const T* at) { return *(const volatile T*)at; }
template <class T, class V> static inline T atomicAdd(T* at, V by) { return __atomic_fetch_add(at, (T)by, __ATOMIC_RELAXED); }
template <class T, class V> static inline T atomicAdd_system(T* at, V by) { return __atomic_fetch_add(at, (T)by, __ATOMIC_ACQ_REL); }
template <class T, class V> static inline T atomicOr(T* at, V by) { return __atomic_fetch_or(at, (T)by, __ATOMIC_RELAXED); }
template <class T, class V> static inline T atomicExch(T* at, V by) { return __atomic_exchange_n(at, (T)by, __ATOMIC_RELAXED); }
template <class T, class V, class W> static inline T atomicCAS(T* at, V from, W by) { return toy_replace(at, (T)from, (T)by); }
template <class T, class V> static inline T atomicMin(T* at, V with) {
    T was = __atomic_load_n(at, __ATOMIC_RELAXED);
    while ((T)with < was) {
        const T seen = toy_replace(at, was, (T)with);
        if (seen == was) break;
        was = seen;
    }
    return was;
}

/* ---- numbers ---- */

static inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
static inline int __ffs(int bits) { return __builtin_ffs(bits); }
static inline float __uint_as_float(unsigned bits) { return ep_float_of(bits); }
static inline unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}
static inline int __float_as_int(float value) { return (int)__float_as_uint(value); }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
using std::max;
using std::min;

/* What follows may have functions in classes. */
#undef EP_DEV
#define EP_DEV inline

#endif
