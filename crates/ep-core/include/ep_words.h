/*
 * ep_words.h: the words that the kernels' roles have of a device: their names, who says them, and what they order.
 *
 * A device marks EP_HD, defines EpUnit (16 bytes: four ep_i32 x, y, z, w) and the marks below, includes this, and defines
 * the words. Roles name nothing else of a device but these and the verbs (ep_verbs.h): so they are the same text on every
 * device. Today the roles of rings do, and what they include.
 *
 *   EP_DEV               a function of the device
 *   EP_DEV_APART         a function of the device that is called, not taken into its callers
 *   EP_KERNEL(threads)   a kernel, whose blocks have at most so many threads; before its name
 *   EP_GIVEN(type)       a parameter of a kernel, read where it lies
 *   EP_SHARED(type, v)   a variable that a block's threads share
 *   EP_POOL(v)           the block's shared memory of the launch, as ep_u8*; once a file
 *
 * A launch has blocks, a block has warps, a warp has 32 lanes, each a thread. All blocks of all ranks' launches make
 * progress, and so does every lane, whatever the others of its warp do: a lane may wait for another rank while they run.
 *
 * Where "all lanes" or "all threads" say a word, none may be missing, none may have ended, and none may say another one in
 * its place. What each did before is visible to each afterwards.
 */
#ifndef EP_WORDS_H
#define EP_WORDS_H
#include "ep_protocol.h"

#define EP_FULL 0xffffffffu

typedef unsigned char ep_u8;
typedef long long ep_i64;

/* ---- who speaks ---- */

/* The lane of its warp that a thread is; its number in the block; threads of the block. */
EP_DEV ep_u32 ep_warp_lane();
EP_DEV ep_u32 ep_thread();
EP_DEV ep_u32 ep_threads();
/* The block's number, and blocks of the launch. */
EP_DEV ep_u32 ep_block();
EP_DEV ep_u32 ep_blocks();

/* ---- meetings: of a warp by all lanes, of a team by all threads of its warps, of a block by all threads ---- */

EP_DEV void ep_warp_meet();
/* What the lane `lane` says. */
template <class T> EP_DEV T ep_warp_shuffle(T mine, ep_u32 lane);
/* Whether all lanes say so (not 0); whether any does; a bit for each that does. */
EP_DEV bool ep_warp_all(ep_i32 mine);
EP_DEV bool ep_warp_any(ep_i32 mine);
EP_DEV ep_u32 ep_warp_votes(ep_i32 mine);
/* The block's warps team * warps .. (team + 1) * warps; others may be elsewhere. There are no more than 8 teams in a block. */
EP_DEV void ep_team_meet(ep_u32 team, ep_u32 warps);
EP_DEV void ep_block_meet();
/* Whether any thread says so. */
EP_DEV bool ep_block_any(bool mine);

/* ---- memory: by any thread ---- */

/* Words that other ranks or the host write or read. */
EP_DEV ep_u64 ep_ld_acquire(const void* at);
EP_DEV void ep_st_release(void* at, ep_u64 v);
EP_DEV ep_u32 ep_ld_acquire4(const void* at);
EP_DEV void ep_st_release4(void* at, ep_u32 v);
/* A word that others read, in no order. */
EP_DEV void ep_st_relaxed4(ep_u32* at, ep_u32 v);
/* A register of another device, behind the bus: one access of eight bytes for each call of each thread, in the order of the thread's calls. A fence
 * between puts what came before it first. */
EP_DEV void ep_st_register(void* at, ep_u64 v);
/* A word of the own device, in no order. */
EP_DEV ep_u32 ep_ld_relaxed(const ep_u32* at);
/* Two words side by side, 16 bytes in all, that the host reads: each at once, in no order. */
EP_DEV void ep_st_relaxed2(void* at, ep_u64 first, ep_u64 second);
/* What the thread has done and seen comes before what it does next: for all ranks and the host; for the own device. */
EP_DEV void ep_fence_sys();
EP_DEV void ep_fence_device();
/* Words of the own device, each changed at once, in no order; what they were before. */
EP_DEV ep_u32 ep_atomic_add(ep_u32* at, ep_u32 by);
EP_DEV ep_i32 ep_atomic_add(ep_i32* at, ep_i32 by);
EP_DEV ep_u64 ep_atomic_max(ep_u64* at, ep_u64 with);
EP_DEV ep_u32 ep_atomic_exchange(ep_u32* at, ep_u32 by);
/* Changed where they are `from`. */
EP_DEV ep_u32 ep_atomic_replace(ep_u32* at, ep_u32 from, ep_u32 by);
EP_DEV ep_u64 ep_atomic_replace(ep_u64* at, ep_u64 from, ep_u64 by);
/* 16 bytes of the own memory. */
EP_DEV EpUnit ep_ld16(const void* at);
EP_DEV void ep_st16(void* at, EpUnit v);

/* ---- time: by any thread ---- */

/* Nanoseconds of a clock that only rises, the same one for all of a launch. */
EP_DEV ep_u64 ep_now();
/* Lets others run, for about so many nanoseconds. */
EP_DEV void ep_nap(ep_u32 nanoseconds);

/* ---- numbers: by any thread ---- */

EP_DEV EpUnit ep_unit(ep_i32 x, ep_i32 y, ep_i32 z, ep_i32 w);
/* The lowest bit that is set, of some that is; bits that are set; those below the lowest that is not, 32 of all. */
EP_DEV ep_u32 ep_lowest_bit(ep_u32 bits);
EP_DEV ep_u32 ep_bits(ep_u32 bits);
EP_DEV ep_u32 ep_bits_below(ep_u32 bits);
/* The f32 of these bits. */
EP_DEV float ep_float_of(ep_u32 bits);
/* a * b + c, rounded once. All other arithmetic rounds after every operation. */
EP_DEV float ep_fma(float a, float b, float c);
/* Two bf16, the one of `low` in the lower half: nearest, ties to even. */
EP_DEV ep_i32 ep_bf16_two(float low, float high);

#endif
