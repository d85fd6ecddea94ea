/*
 * ep_sum.h: the canonical arithmetic of a combine: bias first, then rows of ascending rank, in f32, rounded to bf16 once.
 */
#ifndef EP_SUM_H
#define EP_SUM_H
#include "ep_device.h"

/* Eight elements of a sum. */
struct EpSum {
    float v[8];
};

/* The sums of a lane's columns, 512 bytes apart: so many loads of a row are in flight. */
template <int columns> struct EpSums {
    EpSum of[columns];
};

EP_DEV float ep_low(int two) { return ep_float_of((ep_u32)two << 16); }
EP_DEV float ep_high(int two) { return ep_float_of((ep_u32)two & 0xffff0000u); }

EP_DEV void ep_sum_clear(EpSum& s) {
#pragma unroll
    for (int i = 0; i < 8; ++i) s.v[i] = 0.0f;
}
/* A row that is first: the sum takes its value, sign of zero included. */
EP_DEV void ep_sum_start(EpSum& s, const EpUnit& row) {
    s.v[0] = ep_low(row.x); s.v[1] = ep_high(row.x); s.v[2] = ep_low(row.y); s.v[3] = ep_high(row.y);
    s.v[4] = ep_low(row.z); s.v[5] = ep_high(row.z); s.v[6] = ep_low(row.w); s.v[7] = ep_high(row.w);
}
EP_DEV void ep_sum_add(EpSum& s, const EpUnit& row) {
    s.v[0] += ep_low(row.x); s.v[1] += ep_high(row.x); s.v[2] += ep_low(row.y); s.v[3] += ep_high(row.y);
    s.v[4] += ep_low(row.z); s.v[5] += ep_high(row.z); s.v[6] += ep_low(row.w); s.v[7] += ep_high(row.w);
}
EP_DEV void ep_sum_subtract(EpSum& s, const EpUnit& row) {
    s.v[0] -= ep_low(row.x); s.v[1] -= ep_high(row.x); s.v[2] -= ep_low(row.y); s.v[3] -= ep_high(row.y);
    s.v[4] -= ep_low(row.z); s.v[5] -= ep_high(row.z); s.v[6] -= ep_low(row.w); s.v[7] -= ep_high(row.w);
}
/* A row that changes no sum: negative zeros. */
EP_DEV EpUnit ep_sum_nothing() {
    const int two = (int)0x80008000u;
    return ep_unit(two, two, two, two);
}
/* Adds a row times a weight, each product and sum rounded once (fused). */
EP_DEV void ep_sum_add_scaled(EpSum& s, float weight, const EpUnit& row) {
    s.v[0] = ep_fma(weight, ep_low(row.x), s.v[0]); s.v[1] = ep_fma(weight, ep_high(row.x), s.v[1]);
    s.v[2] = ep_fma(weight, ep_low(row.y), s.v[2]); s.v[3] = ep_fma(weight, ep_high(row.y), s.v[3]);
    s.v[4] = ep_fma(weight, ep_low(row.z), s.v[4]); s.v[5] = ep_fma(weight, ep_high(row.z), s.v[5]);
    s.v[6] = ep_fma(weight, ep_low(row.w), s.v[6]); s.v[7] = ep_fma(weight, ep_high(row.w), s.v[7]);
}
EP_DEV EpUnit ep_sum_round(const EpSum& s) {
    return ep_unit(ep_bf16_two(s.v[0], s.v[1]), ep_bf16_two(s.v[2], s.v[3]), ep_bf16_two(s.v[4], s.v[5]),
                   ep_bf16_two(s.v[6], s.v[7]));
}
#endif
