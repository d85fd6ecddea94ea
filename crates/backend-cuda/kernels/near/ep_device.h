/*
 * ep_device.h: the words of ep_words.h on a GPU, and words of its own that not all devices have.
 */
#ifndef EP_DEVICE_H
#define EP_DEVICE_H

#define EP_HD __device__ __attribute__((always_inline))
#define EP_DEV __device__ __forceinline__
#define EP_DEV_APART __device__ __noinline__
#define EP_KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads, 1)
#define EP_GIVEN(type) const __grid_constant__ type
#define EP_SHARED(type, v) __shared__ type v
#define EP_POOL(v) extern __shared__ __align__(128) ep_u8 v[]

typedef int4 EpUnit;

#include "ep_words.h"

/* ---- who speaks, meetings ---- */

EP_DEV ep_u32 ep_warp_lane() { return threadIdx.x % 32; }
EP_DEV ep_u32 ep_thread() { return threadIdx.x; }
EP_DEV ep_u32 ep_threads() { return blockDim.x; }
EP_DEV ep_u32 ep_block() { return blockIdx.x; }
EP_DEV ep_u32 ep_blocks() { return gridDim.x; }

EP_DEV void ep_warp_meet() { __syncwarp(); }
template <class T> EP_DEV T ep_warp_shuffle(T mine, ep_u32 lane) { return __shfl_sync(EP_FULL, mine, lane); }
EP_DEV bool ep_warp_all(ep_i32 mine) { return __all_sync(EP_FULL, mine); }
EP_DEV bool ep_warp_any(ep_i32 mine) { return __any_sync(EP_FULL, mine); }
EP_DEV ep_u32 ep_warp_votes(ep_i32 mine) { return __ballot_sync(EP_FULL, mine); }
/* Of a block's sixteen barriers the first is the block's, the second that of ep_all_of. */
EP_DEV void ep_team_meet(ep_u32 team, ep_u32 warps) {
    /* Lanes come together first: what one of them has just written lies before the barrier of all. */
    __syncwarp();
    if (warps == 1) return;
    asm volatile("barrier.cta.sync %0, %1;" ::"r"(2 + team), "r"(32 * warps) : "memory");
}
EP_DEV void ep_block_meet() { __syncthreads(); }
EP_DEV bool ep_block_any(bool mine) { return __syncthreads_or(mine); }

/* ---- memory, fences ---- */

EP_DEV ep_u64 ep_ld_acquire(const void* at) {
    ep_u64 v;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(at) : "memory");
    return v;
}
EP_DEV void ep_st_release(void* at, ep_u64 v) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(at), "l"(v) : "memory");
}
EP_DEV ep_u32 ep_ld_acquire4(const void* at) {
    ep_u32 v;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    return v;
}
EP_DEV void ep_st_release4(void* at, ep_u32 v) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(v) : "memory");
}
EP_DEV void ep_st_relaxed4(ep_u32* at, ep_u32 v) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(at), "r"(v) : "memory");
}
/* Not merged with other threads' stores, as a store that is not `mmio` may be. */
EP_DEV void ep_st_register(void* at, ep_u64 v) {
    asm volatile("st.mmio.relaxed.sys.global.u64 [%0], %1;" ::"l"(at), "l"(v) : "memory");
}
EP_DEV ep_u32 ep_ld_relaxed(const ep_u32* at) {
    ep_u32 v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    return v;
}
EP_DEV void ep_st_relaxed2(void* at, ep_u64 first, ep_u64 second) {
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(at), "l"(first), "l"(second) : "memory");
}
EP_DEV void ep_fence_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
/* CUDA's own fences (`__threadfence`) put all threads' fences in one order besides: nothing here needs that. */
EP_DEV void ep_fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
EP_DEV void ep_fence_block() { asm volatile("fence.acq_rel.cta;" ::: "memory"); }

EP_DEV ep_u32 ep_atomic_add(ep_u32* at, ep_u32 by) { return atomicAdd(at, by); }
EP_DEV ep_i32 ep_atomic_add(ep_i32* at, ep_i32 by) { return atomicAdd(at, by); }
EP_DEV ep_u64 ep_atomic_max(ep_u64* at, ep_u64 with) { return atomicMax(at, with); }
EP_DEV ep_u32 ep_atomic_exchange(ep_u32* at, ep_u32 by) { return atomicExch(at, by); }
EP_DEV ep_u32 ep_atomic_replace(ep_u32* at, ep_u32 from, ep_u32 by) { return atomicCAS(at, from, by); }
EP_DEV ep_u64 ep_atomic_replace(ep_u64* at, ep_u64 from, ep_u64 by) { return atomicCAS(at, from, by); }

EP_DEV EpUnit ep_ld16(const void* at) { return *(const EpUnit*)at; }
EP_DEV void ep_st16(void* at, EpUnit v) { *(EpUnit*)at = v; }

/* ---- time, numbers ---- */

EP_DEV ep_u64 ep_now() {
    ep_u64 t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}
EP_DEV void ep_nap(ep_u32 nanoseconds) { __nanosleep(nanoseconds); }

EP_DEV EpUnit ep_unit(ep_i32 x, ep_i32 y, ep_i32 z, ep_i32 w) { return make_int4(x, y, z, w); }
EP_DEV ep_u32 ep_lowest_bit(ep_u32 bits) { return __ffs(bits) - 1; }
EP_DEV ep_u32 ep_bits(ep_u32 bits) { return __popc(bits); }
EP_DEV ep_u32 ep_bits_below(ep_u32 bits) { return __clz(__brev(~bits)); }
EP_DEV float ep_float_of(ep_u32 bits) { return __uint_as_float(bits); }
EP_DEV float ep_fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
EP_DEV ep_i32 ep_bf16_two(float low, float high) {
    ep_i32 two;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
    return two;
}

/* ---- of a GPU alone ---- */

/* The number of the warp in its block: of the row that it takes of a table of roles. */
EP_DEV ep_u32 ep_warp() { return threadIdx.x / 32; }

/* Whether all of the first `threads` threads of the block say so; only these call it, all of them. Others may be elsewhere. */
EP_DEV bool ep_all_of(bool mine, ep_u32 threads) {
    ep_u32 all;
    asm volatile("{ .reg .pred p, q; setp.ne.u32 p, %1, 0; barrier.cta.red.and.pred q, 1, %2, p; selp.u32 %0, 1, 0, q; }"
                 : "=r"(all) : "r"((ep_u32)mine), "r"(threads) : "memory");
    return all != 0;
}
/* Waits until the launches before this one in its stream have ended, and what they wrote is here. A launch that says so may begin while they end. */
EP_DEV void ep_wait_for_launches_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
/* The next launch of the stream may begin once all blocks have said so, or ended. It waits for this one's end where it reads what this one writes. */
EP_DEV void ep_let_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
/* Within the own GPU. */
EP_DEV ep_u64 ep_ld_acquire_gpu(const void* at) {
    ep_u64 v;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(at) : "memory");
    return v;
}
EP_DEV void ep_st_release_gpu(void* at, ep_u64 v) {
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(at), "l"(v) : "memory");
}
/* A word of others, in no order. */
EP_DEV ep_u64 ep_ld_relaxed_sys(const void* at) {
    ep_u64 v;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(at) : "memory");
    return v;
}
/* Brings a line into the first cache, where it stays for as long as there is room. */
EP_DEV void ep_prefetch(const void* at) { asm volatile("prefetch.global.L1 [%0];" ::"l"(at)); }
/* 16 bytes that no kernel writes meanwhile, read once. */
EP_DEV EpUnit ep_ld16_once(const void* at) {
    EpUnit v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.s32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
    return v;
}

#endif
