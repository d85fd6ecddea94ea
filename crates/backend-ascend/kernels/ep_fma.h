/*
 * ep_fma.h: sums of weighted rows in f32, each step rounded once: acc = fma(weight, row, acc), as low latency's arithmetic has it.
 *
 * No document says how often Axpy and the like round, and no vector instruction promises once. So the product is split into two parts that are
 * exact (a weight's upper and lower half, 12 bits each, times the 8 bits of a bf16), all errors are kept, and their sum is rounded to odd before
 * the last addition: S. Boldo, G. Melquiond, Emulation of FMA and correctly rounded sums. Add, Sub, Muls and integers are enough.
 *
 * Beside it runs the plain sum, rounded twice a step. Where that is an infinity or no number, so is the result: errors of infinities are no numbers.
 * Products below 2^-100 may lose their last bits.
 *
 *   UB      two buffers for addends, eight for numbers in f32, a mask, a rounded sum
 *   flags   V_MTE2 0 and 1: the addend was used. MTE3_V 0: the rounded sum was stored
 */
#ifndef EP_FMA_H
#define EP_FMA_H
#include "ep_rows.h"

/* Elements of a piece. */
#define EP_FMA_ELEMENTS 2048u
#define EP_FMA_NARROW (EP_FMA_ELEMENTS * 2)
#define EP_FMA_WIDE (EP_FMA_ELEMENTS * 4)
#define EP_FMA_BYTES (3 * EP_FMA_NARROW + 10 * EP_FMA_WIDE)
#define EP_FMA_MAGNITUDE 0x7fffffff
#define EP_FMA_INFINITY 0x7f800000

typedef LocalTensor<float> EpFloats;

struct EpFma {
    EpBytes in[2], out;
    EpFloats row, sum, plain, h, l, u, s, t, v;
    EpBytes mask;
    ep_u32 turn;
};

EP_DEV LocalTensor<int32_t> ep_whole(const EpFloats& of) { return of.ReinterpretCast<int32_t>(); }
EP_DEV LocalTensor<uint16_t> ep_bits(const EpFloats& of) { return of.ReinterpretCast<uint16_t>(); }

EP_DEV void ep_open_fma(EpFma& b, const EpBytes& ub) {
    b.in[0] = ub;
    b.in[1] = ub[EP_FMA_NARROW];
    b.out = ub[2 * EP_FMA_NARROW];
    const EpBytes wide = ub[3 * EP_FMA_NARROW];
    EpFloats* const of[] = {&b.row, &b.sum, &b.plain, &b.h, &b.l, &b.u, &b.s, &b.t, &b.v};
    for (ep_u32 i = 0; i < 9; ++i) *of[i] = wide[i * EP_FMA_WIDE].ReinterpretCast<float>();
    b.mask = wide[9 * EP_FMA_WIDE];
    Duplicate(b.mask.ReinterpretCast<int32_t>(), (int32_t)EP_FMA_MAGNITUDE, (int32_t)EP_FMA_ELEMENTS);
    PipeBarrier<PIPE_V>();
    b.turn = 1;
    SetFlag<HardEvent::V_MTE2>(0);
    SetFlag<HardEvent::V_MTE2>(1);
    SetFlag<HardEvent::MTE3_V>(0);
}
EP_DEV void ep_close_fma() {
    WaitFlag<HardEvent::V_MTE2>(0);
    WaitFlag<HardEvent::V_MTE2>(1);
    WaitFlag<HardEvent::MTE3_V>(0);
    PipeBarrier<PIPE_ALL>();
}

/* Instructions that depend on the one before. */
EP_DEV void ep_plus(const EpFloats& to, const EpFloats& a, const EpFloats& b, ep_u32 n) {
    Add(to, a, b, (int32_t)n);
    PipeBarrier<PIPE_V>();
}
EP_DEV void ep_minus(const EpFloats& to, const EpFloats& a, const EpFloats& b, ep_u32 n) {
    Sub(to, a, b, (int32_t)n);
    PipeBarrier<PIPE_V>();
}
EP_DEV void ep_times(const EpFloats& to, const EpFloats& a, float by, ep_u32 n) {
    Muls(to, a, by, (int32_t)n);
    PipeBarrier<PIPE_V>();
}
EP_DEV void ep_shift(const EpFloats& to, const EpFloats& a, ep_u32 n) {
    ShiftRight(to.ReinterpretCast<uint32_t>(), a.ReinterpretCast<uint32_t>(), (uint32_t)31, (int32_t)n);
    PipeBarrier<PIPE_V>();
}

/* A sum begins as zero. */
EP_DEV void ep_fma_clear(const EpFma& b, ep_u32 n) {
    Duplicate(b.sum, 0.0f, (int32_t)n);
    Duplicate(b.plain, 0.0f, (int32_t)n);
    PipeBarrier<PIPE_V>();
}

/* Loads a piece of a row, as f32 in b.row. */
EP_DEV void ep_fma_load(const EpCore& c, EpFma& b, ep_u64 from, ep_u32 n) {
    const ep_u32 i = b.turn ^= 1;
    if (!EP_PLANTED(c, LOW_ADDEND_REUSED)) WaitFlag<HardEvent::V_MTE2>((int32_t)i);
    ep_load(b.in[i], from, n * 2);
    if (!EP_PLANTED(c, LOW_ADDEND_FLAG)) {
        SetFlag<HardEvent::MTE2_V>((int32_t)i);
        WaitFlag<HardEvent::MTE2_V>((int32_t)i);
    }
    Cast(b.row, b.in[i].ReinterpretCast<bfloat16_t>(), RoundMode::CAST_NONE, n);
    if (!EP_PLANTED(c, LOW_ADDEND_REUSED)) SetFlag<HardEvent::V_MTE2>((int32_t)i);
    if (!EP_PLANTED(c, LOW_STEP_BARRIER)) PipeBarrier<PIPE_V>();
}

/* u becomes u + s rounded to odd, where s is what u + s lost by rounding to u: the last bit is 1 where something is lost, and u is what the sum is
   towards zero. */
EP_DEV void ep_fma_to_odd(const EpFma& b, ep_u32 n) {
    And(ep_bits(b.t), ep_bits(b.s), b.mask.ReinterpretCast<uint16_t>(), (int32_t)(2 * n));
    PipeBarrier<PIPE_V>();
    Muls(ep_whole(b.t), ep_whole(b.t), (int32_t)-1, (int32_t)n);
    PipeBarrier<PIPE_V>();
    ep_shift(b.t, b.t, n); /* 1 where something is lost */
    ep_shift(b.h, b.u, n);
    ep_shift(b.l, b.s, n);
    Sub(ep_whole(b.h), ep_whole(b.h), ep_whole(b.l), (int32_t)n);
    PipeBarrier<PIPE_V>();
    Mul(ep_whole(b.h), ep_whole(b.h), ep_whole(b.h), (int32_t)n);
    PipeBarrier<PIPE_V>();
    Mul(ep_whole(b.h), ep_whole(b.h), ep_whole(b.t), (int32_t)n); /* 1 where it was rounded away from zero */
    PipeBarrier<PIPE_V>();
    Sub(ep_whole(b.u), ep_whole(b.u), ep_whole(b.h), (int32_t)n);
    PipeBarrier<PIPE_V>();
    Or(ep_bits(b.u), ep_bits(b.u), ep_bits(b.t), (int32_t)(2 * n));
    PipeBarrier<PIPE_V>();
}

/* sum = fma(weight, row, sum). */
EP_DEV void ep_fma_step(const EpCore& c, const EpFma& b, float weight, ep_u32 n) {
    union {
        ep_u32 bits;
        float value;
    } upper;
    if (EP_PLANTED(c, LOW_ROUNDED_TWICE)) {
        ep_times(b.t, b.row, weight, n);
        return ep_plus(b.sum, b.sum, b.t, n);
    }
    upper.value = weight;
    upper.bits &= 0xfffff000u;
    ep_times(b.h, b.row, upper.value, n);
    ep_times(b.l, b.row, weight - upper.value, n);
    /* u + l is the product. */
    ep_plus(b.u, b.h, b.l, n);
    ep_minus(b.t, b.u, b.h, n);
    ep_minus(b.l, b.l, b.t, n);
    /* s + h is sum + l. */
    ep_plus(b.s, b.sum, b.l, n);
    ep_minus(b.t, b.s, b.sum, n);
    ep_minus(b.h, b.s, b.t, n);
    ep_minus(b.l, b.l, b.t, n);
    ep_minus(b.h, b.sum, b.h, n);
    ep_plus(b.h, b.h, b.l, n);
    /* v + l is u + s. */
    ep_plus(b.v, b.u, b.s, n);
    ep_minus(b.t, b.v, b.u, n);
    ep_minus(b.l, b.v, b.t, n);
    ep_minus(b.s, b.s, b.t, n);
    ep_minus(b.l, b.u, b.l, n);
    ep_plus(b.l, b.l, b.s, n);
    /* u + s is h + l: all that v lacks. */
    ep_plus(b.u, b.h, b.l, n);
    ep_minus(b.t, b.u, b.h, n);
    ep_minus(b.s, b.u, b.t, n);
    ep_minus(b.l, b.l, b.t, n);
    ep_minus(b.s, b.h, b.s, n);
    ep_plus(b.s, b.s, b.l, n);
    if (!EP_PLANTED(c, LOW_NOT_ODD)) ep_fma_to_odd(b, n);
    ep_plus(b.sum, b.v, b.u, n);
    ep_times(b.t, b.row, weight, n);
    ep_plus(b.plain, b.plain, b.t, n);
}

/* sum = sum + row. */
EP_DEV void ep_fma_add(const EpFma& b, ep_u32 n) { ep_plus(b.sum, b.sum, b.row, n); }

/* Where the plain sum is no finite number, it is the sum. */
EP_DEV void ep_fma_settle(const EpCore& c, const EpFma& b, ep_u32 n) {
    if (EP_PLANTED(c, LOW_INFINITIES_LOST)) return;
    const int32_t twice = (int32_t)(2 * n);
    And(ep_bits(b.t), ep_bits(b.plain), b.mask.ReinterpretCast<uint16_t>(), twice);
    PipeBarrier<PIPE_V>();
    Adds(ep_whole(b.t), ep_whole(b.t), (int32_t)-EP_FMA_INFINITY, (int32_t)n);
    PipeBarrier<PIPE_V>();
    ShiftRight(ep_whole(b.t), ep_whole(b.t), (int32_t)31, (int32_t)n); /* all ones where it is finite */
    PipeBarrier<PIPE_V>();
    And(ep_bits(b.h), ep_bits(b.sum), ep_bits(b.t), twice);
    Not(ep_bits(b.l), ep_bits(b.t), twice);
    PipeBarrier<PIPE_V>();
    And(ep_bits(b.l), ep_bits(b.l), ep_bits(b.plain), twice);
    PipeBarrier<PIPE_V>();
    Or(ep_bits(b.sum), ep_bits(b.h), ep_bits(b.l), twice);
    PipeBarrier<PIPE_V>();
}

/* Rounds the sum and stores it. */
EP_DEV void ep_fma_store(const EpCore& c, const EpFma& b, ep_u64 to, ep_u32 n) {
    WaitFlag<HardEvent::MTE3_V>(0);
    Cast(b.out.ReinterpretCast<bfloat16_t>(), b.sum, RoundMode::CAST_RINT, n);
    PipeBarrier<PIPE_V>();
    if (!EP_PLANTED(c, LOW_SUM_FLAG)) {
        SetFlag<HardEvent::V_MTE3>(0);
        WaitFlag<HardEvent::V_MTE3>(0);
    }
    ep_store(to, b.out, n * 2);
    SetFlag<HardEvent::MTE3_V>(0);
}

#endif
