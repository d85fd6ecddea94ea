/*
 * ep_device.h: the words of ep_words.h on the toy: threads of a CPU (machine.h), and memory of the process.
 */
#ifndef EP_DEVICE_H
#define EP_DEVICE_H
#include "machine.h"

#define EP_HD
#define EP_DEV static inline
#define EP_DEV_APART [[gnu::noinline]] static
#define EP_KERNEL(threads) static void
#define EP_GIVEN(type) const type&
#define EP_SHARED(type, v)            \
    static const char v##_name = 0;   \
    type& v = *(type*)toy::Warp::own().block.shared(&v##_name, sizeof(type))
#define EP_POOL(v) static const ToyPool v

struct EpUnit {
    int x, y, z, w;
};

#include "ep_words.h"

/* The pool of the block that asks. */
struct ToyPool {
    operator ep_u8*() const { return toy::Warp::own().block.pool(); }
    template <class T> explicit operator T*() const { return (T*)toy::Warp::own().block.pool(); }
};

/* ---- who speaks, meetings ---- */

EP_DEV ep_u32 ep_warp_lane() { return toy::Warp::own().lane(); }
EP_DEV ep_u32 ep_warp() { return toy::Warp::own().number; }
EP_DEV ep_u32 ep_thread() { return ep_warp() * toy::kLanes + ep_warp_lane(); }
EP_DEV ep_u32 ep_threads() { return toy::Warp::own().block.warps * toy::kLanes; }
EP_DEV ep_u32 ep_block() { return toy::Warp::own().block.number; }
EP_DEV ep_u32 ep_blocks() { return toy::Warp::own().block.blocks; }

EP_DEV void ep_warp_meet() { toy::Warp::own().meet(toy::Word::meet); }
template <class T> EP_DEV T ep_warp_shuffle(T mine, ep_u32 lane) {
    static_assert(sizeof(T) <= 8, "a word");
    std::uint64_t says = 0;
    std::memcpy(&says, &mine, sizeof(T));
    if (lane >= toy::kLanes) toy::broken("ep_warp_shuffle from lane %u", lane);
    std::memcpy(&mine, toy::Warp::own().meet(toy::Word::shuffle, says) + lane, sizeof(T));
    return mine;
}
EP_DEV ep_u32 toy_votes(toy::Word word, ep_i32 mine) {
    const std::uint64_t* said = toy::Warp::own().meet(word, mine != 0);
    ep_u32 votes = 0;
    for (ep_u32 lane = 0; lane < toy::kLanes; ++lane) votes |= (ep_u32)said[lane] << lane;
    return votes;
}
EP_DEV bool ep_warp_all(ep_i32 mine) { return toy_votes(toy::Word::all, mine) == EP_FULL; }
EP_DEV bool ep_warp_any(ep_i32 mine) { return toy_votes(toy::Word::any, mine) != 0; }
EP_DEV ep_u32 ep_warp_votes(ep_i32 mine) { return toy_votes(toy::Word::votes, mine); }
EP_DEV void ep_team_meet(ep_u32 team, ep_u32 warps) {
    if (warps == 0 || team != ep_warp() / warps || team >= 8) toy::broken("warp %u meets team %u of %u warps", ep_warp(), team, warps);
    if (warps == 1) return ep_warp_meet();
    toy::Warp::own().meet(toy::Word::team_meet, 0, warps * toy::kLanes);
}
EP_DEV void ep_block_meet() { toy::Warp::own().meet(toy::Word::block_meet); }
EP_DEV bool ep_block_any(bool mine) { return toy::Warp::own().meet(toy::Word::block_any, mine)[0] != 0; }

/* ---- memory ---- */

/* Who looks at a word of others may be waiting for it. */
EP_DEV ep_u64 ep_ld_acquire(const void* at) {
    toy::Warp::own().wait();
    return __atomic_load_n((const ep_u64*)at, __ATOMIC_ACQUIRE);
}
EP_DEV void ep_st_release(void* at, ep_u64 v) {
    __atomic_store_n((ep_u64*)at, v, __ATOMIC_RELEASE);
    toy::Warp::own().tell();
}
EP_DEV ep_u32 ep_ld_acquire4(const void* at) { return __atomic_load_n((const ep_u32*)at, __ATOMIC_ACQUIRE); }
EP_DEV void ep_st_release4(void* at, ep_u32 v) { __atomic_store_n((ep_u32*)at, v, __ATOMIC_RELEASE); }
EP_DEV void ep_st_relaxed4(ep_u32* at, ep_u32 v) { __atomic_store_n(at, v, __ATOMIC_RELAXED); }
EP_DEV void ep_st_register(void* at, ep_u64 v) { __atomic_store_n((ep_u64*)at, v, __ATOMIC_RELAXED); }
EP_DEV ep_u32 ep_ld_relaxed(const ep_u32* at) { return __atomic_load_n(at, __ATOMIC_RELAXED); }
EP_DEV void ep_st_relaxed2(void* at, ep_u64 first, ep_u64 second) {
    __atomic_store_n((ep_u64*)at, first, __ATOMIC_RELAXED);
    __atomic_store_n((ep_u64*)at + 1, second, __ATOMIC_RELAXED);
}
EP_DEV void ep_fence_sys() {
    toy::Warp::own().fence();
    __atomic_thread_fence(__ATOMIC_ACQ_REL);
}
EP_DEV void ep_fence_device() { __atomic_thread_fence(__ATOMIC_ACQ_REL); }
EP_DEV ep_u32 ep_atomic_add(ep_u32* at, ep_u32 by) { return __atomic_fetch_add(at, by, __ATOMIC_RELAXED); }
EP_DEV ep_i32 ep_atomic_add(ep_i32* at, ep_i32 by) { return __atomic_fetch_add(at, by, __ATOMIC_RELAXED); }
EP_DEV ep_u32 ep_atomic_exchange(ep_u32* at, ep_u32 by) { return __atomic_exchange_n(at, by, __ATOMIC_RELAXED); }
template <class T> EP_DEV T toy_replace(T* at, T from, T by) {
    __atomic_compare_exchange_n(at, &from, by, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return from;
}
EP_DEV ep_u32 ep_atomic_replace(ep_u32* at, ep_u32 from, ep_u32 by) { return toy_replace(at, from, by); }
EP_DEV ep_u64 ep_atomic_replace(ep_u64* at, ep_u64 from, ep_u64 by) { return toy_replace(at, from, by); }
EP_DEV ep_u64 ep_atomic_max(ep_u64* at, ep_u64 with) {
    ep_u64 was = __atomic_load_n(at, __ATOMIC_RELAXED);
    while (was < with) {
        const ep_u64 seen = toy_replace(at, was, with);
        if (seen == was) break;
        was = seen;
    }
    return was;
}
EP_DEV EpUnit ep_ld16(const void* at) {
    EpUnit v;
    std::memcpy(&v, at, sizeof v);
    return v;
}
EP_DEV void ep_st16(void* at, EpUnit v) { std::memcpy(at, &v, sizeof v); }

/* ---- time, numbers ---- */

EP_DEV ep_u64 ep_now() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (ep_u64)now.tv_sec * 1000000000u + (ep_u64)now.tv_nsec;
}
EP_DEV void ep_nap(ep_u32) { toy::Warp::own().wait(); }

EP_DEV EpUnit ep_unit(ep_i32 x, ep_i32 y, ep_i32 z, ep_i32 w) { return EpUnit{x, y, z, w}; }
EP_DEV ep_u32 ep_lowest_bit(ep_u32 bits) { return (ep_u32)__builtin_ctz(bits); }
EP_DEV ep_u32 ep_bits(ep_u32 bits) { return (ep_u32)__builtin_popcount(bits); }
EP_DEV ep_u32 ep_bits_below(ep_u32 bits) { return bits == EP_FULL ? 32 : ep_lowest_bit(~bits); }
EP_DEV float ep_float_of(ep_u32 bits) {
    float v;
    std::memcpy(&v, &bits, sizeof v);
    return v;
}
EP_DEV float ep_fma(float a, float b, float c) { return std::fma(a, b, c); }
EP_DEV ep_u32 toy_bf16(float value) {
    ep_u32 bits;
    std::memcpy(&bits, &value, sizeof bits);
    if (value != value) return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
EP_DEV ep_i32 ep_bf16_two(float low, float high) { return (ep_i32)(toy_bf16(low) | toy_bf16(high) << 16); }

#endif
