/*
 * ep_quant.h: FP8 rows, bit for bit those of ep_core::quant: E4M3 codes, a scale for each EP_SCALE_GROUP elements.
 */
#ifndef EP_QUANT_H
#define EP_QUANT_H
#include "ep_device.h"

/* The largest E4M3 value, and the least amax that a scale is made for. */
#define EP_E4M3_MAX 448.0f
#define EP_MIN_AMAX 1e-4f

struct EpScale {
    float multiplier;
    ep_u32 stored; /* bits of an f32, or a biased exponent */
};

EP_DEV EpScale ep_scale(ep_u32 element, float largest) {
    const float amax = fmaxf(largest, EP_MIN_AMAX), least = __fmul_rn(amax, 1.0f / EP_E4M3_MAX);
    EpScale s;
    if (element == EP_ELEMENT_FP8) {
        s.multiplier = __fdiv_rn(EP_E4M3_MAX, amax);
        s.stored = __float_as_uint(least);
        return s;
    }
    const ep_u32 bits = __float_as_uint(least), exponent = (bits >> 23) + ((bits & 0x7fffffu) != 0);
    s.multiplier = __uint_as_float((exponent < 254 ? 254 - exponent : 0) << 23);
    s.stored = element == EP_ELEMENT_FP8_UE8M0 ? exponent : exponent << 23;
    return s;
}

/* Two codes, that of `low` in the lower byte. Nearest, ties to even; saturating; 0x7f for NaN. */
#if __CUDA_ARCH__ >= 890
EP_DEV ep_u32 ep_encode_two(float low, float high) {
    unsigned short two;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(two) : "f"(high), "f"(low));
    return two;
}
#else
/* The addition rounds: beside a power of two 20 exponents above the value, its steps are counted by the lowest bits. */
EP_DEV ep_u32 ep_encode_one(float value) {
    const float clamped = fminf(fabsf(value), EP_E4M3_MAX);
    const ep_u32 exponent = __float_as_uint(fmaxf(clamped, 1.0f / 64.0f)) & 0x7f800000u, ruler = exponent + (20u << 23);
    const ep_u32 steps = __float_as_uint(__fadd_rn(clamped, __uint_as_float(ruler))) - ruler;
    const ep_u32 code = steps + (exponent >> 20) - (__float_as_uint(1.0f / 64.0f) >> 20);
    return value != value ? 0x7fu : (code | (__float_as_uint(value) >> 24 & 0x80u));
}
EP_DEV ep_u32 ep_encode_two(float low, float high) { return ep_encode_one(low) | ep_encode_one(high) << 8; }
#endif
#endif
