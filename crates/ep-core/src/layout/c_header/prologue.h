/*
 * ep_layout.h: how rows, messages and cells lie in a window, for kernels.
 *
 * Written by ep_core::layout::c_header(); do not edit. A test fails when this file is stale and says how to renew it.
 *
 * Needs a C++14 compiler (g++, clang++, NVRTC, bisheng) and no other header. Before including it, a device compiler that
 * marks device functions in its own way defines EP_HD to that mark. All offsets are bytes from the start of a window,
 * the same on every rank; all numbers in a window are little-endian.
 */
#ifndef EP_LAYOUT_H
#define EP_LAYOUT_H

#ifndef EP_HD
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define EP_HD __host__ __device__
#else
#define EP_HD
#endif
#endif

/* NVRTC has no __builtin_offsetof; its front end folds this. */
#if defined(__CUDACC_RTC__) && !defined(__builtin_offsetof)
#define __builtin_offsetof(type, field) ((unsigned long)__INTADDR__(&((type*)0)->field))
#endif

typedef int ep_i32;
typedef unsigned int ep_u32;
typedef unsigned long long ep_u64;
typedef float ep_f32;
static_assert(sizeof(ep_u32) == 4 && sizeof(ep_i32) == 4 && sizeof(ep_u64) == 8 && sizeof(ep_f32) == 4, "types");

