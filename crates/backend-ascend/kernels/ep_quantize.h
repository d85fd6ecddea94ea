/*
 * ep_quantize.h: bf16 rows become rows of INT8, bit for bit those of ep_core::quant::int8. Every core, whatever its role, serves a contiguous
 * share of the rows.
 *
 *   row      first its largest magnitude: bits of bf16 without the sign are ordered as integers, infinities and NaNs above all numbers. Then its
 *            codes: x * (127 / largest) by f32, to int16_t by RINT; int16_t to half to int8_t are exact
 *   UB       a piece of a row: as it comes, a mask of signs, magnitudes (then integers), in f32, in half, its codes
 *   flags    V_MTE2 0: the piece was read. MTE3_V 0: the codes were stored
 */
#ifndef EP_QUANTIZE_H
#define EP_QUANTIZE_H
#include "ep_rows.h"

/* Elements of a piece: a power of two, and a multiple of EP_LARGEST. */
#define EP_QUANT_ELEMENTS 8192u
/* Magnitudes that the scalar unit compares: a block of the UB. */
#define EP_LARGEST 16u
#define EP_QUANT_BYTES (13 * EP_QUANT_ELEMENTS)
static_assert(EP_QUANT_BYTES + EP_COMMON_BYTES <= EP_UB_BYTES, "the buffers of cores that quantise");
/* The bits of an infinity; those of a NaN are more. */
#define EP_BF16_INFINITY 0x7f80
#define EP_F32_NAN 0x7fc00000u

struct EpQuantizer {
    EpBytes in, mask, whole, wide, narrow, codes;
};

EP_DEV void ep_open_quantizer(EpQuantizer& s, const EpBytes& ub) {
    s.in = ub;
    s.mask = ub[2 * EP_QUANT_ELEMENTS];
    s.whole = ub[4 * EP_QUANT_ELEMENTS];
    s.wide = ub[6 * EP_QUANT_ELEMENTS];
    s.narrow = ub[10 * EP_QUANT_ELEMENTS];
    s.codes = ub[12 * EP_QUANT_ELEMENTS];
    Duplicate(s.mask.ReinterpretCast<int16_t>(), (int16_t)0x7fff, (int32_t)EP_QUANT_ELEMENTS);
    PipeBarrier<PIPE_V>();
    SetFlag<HardEvent::V_MTE2>(0);
    SetFlag<HardEvent::MTE3_V>(0);
}
EP_DEV void ep_close_quantizer() {
    WaitFlag<HardEvent::V_MTE2>(0);
    WaitFlag<HardEvent::MTE3_V>(0);
    PipeBarrier<PIPE_ALL>();
}

/* Loads a piece of a row. The vector unit has read the one before. */
EP_DEV void ep_load_piece(const EpCore& c, const EpQuantizer& s, ep_u64 from, ep_u32 count) {
    if (!EP_PLANTED(c, PIECE_REUSED)) WaitFlag<HardEvent::V_MTE2>(0);
    ep_load(s.in, from, count * 2);
    if (EP_PLANTED(c, PIECE_FLAG)) return;
    SetFlag<HardEvent::MTE2_V>(0);
    WaitFlag<HardEvent::MTE2_V>(0);
}
EP_DEV void ep_piece_read(const EpCore& c) {
    if (!EP_PLANTED(c, PIECE_REUSED)) SetFlag<HardEvent::V_MTE2>(0);
}

/* The largest magnitude of a piece: halves are compared until a block is left. */
EP_DEV ep_u32 ep_largest_of_piece(const EpCore& c, const EpQuantizer& s, ep_u64 from, ep_u32 count) {
    LocalTensor<int16_t> whole = s.whole.ReinterpretCast<int16_t>(), in = s.in.ReinterpretCast<int16_t>();
    ep_load_piece(c, s, from, count);
    ep_u32 left = EP_LARGEST;
    while (left < count) left *= 2;
    if (!EP_PLANTED(c, REST_LEFT)) Duplicate(whole, (int16_t)0, (int32_t)left);
    PipeBarrier<PIPE_V>();
    And(whole, in, EP_PLANTED(c, SIGNS_KEPT) ? in : s.mask.ReinterpretCast<int16_t>(), (int32_t)count);
    ep_piece_read(c);
    PipeBarrier<PIPE_V>();
    for (left /= 2; left >= EP_LARGEST; left /= 2) {
        Max(whole, whole, whole[left], (int32_t)left);
        PipeBarrier<PIPE_V>();
    }
    if (!EP_PLANTED(c, LARGEST_FLAG)) {
        SetFlag<HardEvent::V_S>(0);
        WaitFlag<HardEvent::V_S>(0);
    }
    ep_u32 largest = 0;
    for (ep_u32 i = 0; i < EP_LARGEST; ++i) {
        const int16_t bits = whole.GetValue(i);
        if (bits > (int16_t)largest) largest = (ep_u32)bits;
    }
    return largest;
}

/* The codes of the piece before were stored. */
EP_DEV void ep_take_codes(const EpCore& c) {
    if (!EP_PLANTED(c, CODES_REUSED)) WaitFlag<HardEvent::MTE3_V>(0);
}
/* Stores the codes of a piece. */
EP_DEV void ep_store_codes(const EpCore& c, const EpQuantizer& s, ep_u64 to, ep_u32 count) {
    if (!EP_PLANTED(c, CODES_FLAG)) {
        SetFlag<HardEvent::V_MTE3>(0);
        WaitFlag<HardEvent::V_MTE3>(0);
    }
    ep_store(to, s.codes, count);
    if (!EP_PLANTED(c, CODES_REUSED)) SetFlag<HardEvent::MTE3_V>(0);
}

EP_DEV void ep_code_piece(const EpCore& c, const EpQuantizer& s, ep_u64 from, ep_u64 to, ep_u32 count, float multiplier) {
    LocalTensor<float> wide = s.wide.ReinterpretCast<float>();
    LocalTensor<int16_t> whole = s.whole.ReinterpretCast<int16_t>();
    ep_load_piece(c, s, from, count);
    Cast(wide, s.in.ReinterpretCast<bfloat16_t>(), RoundMode::CAST_NONE, count);
    ep_piece_read(c);
    PipeBarrier<PIPE_V>();
    Muls(wide, wide, multiplier, (int32_t)count);
    PipeBarrier<PIPE_V>();
    Cast(whole, wide, EP_PLANTED(c, TOWARDS_ZERO) ? RoundMode::CAST_TRUNC : RoundMode::CAST_RINT, count);
    PipeBarrier<PIPE_V>();
    Cast(s.narrow.ReinterpretCast<half>(), whole, RoundMode::CAST_RINT, count);
    PipeBarrier<PIPE_V>();
    ep_take_codes(c);
    Cast(s.codes.ReinterpretCast<int8_t>(), s.narrow.ReinterpretCast<half>(), RoundMode::CAST_RINT, count);
    PipeBarrier<PIPE_V>();
    ep_store_codes(c, s, to, count);
}

/* The codes of a row that has no scale. */
EP_DEV void ep_clear_piece(const EpCore& c, const EpQuantizer& s, ep_u64 to, ep_u32 count) {
    ep_take_codes(c);
    Duplicate(s.codes.ReinterpretCast<int16_t>(), (int16_t)0, (int32_t)((count + 1) / 2));
    PipeBarrier<PIPE_V>();
    ep_store_codes(c, s, to, count);
}

EP_DEV void ep_quantize_row(EpCore& c, const EpQuantizer& s, ep_u64 from, ep_u64 to) {
    const EpWindow& w = c.launch.r.w;
    ep_u32 bits = 0;
    for (ep_u32 at = 0; at < w.hidden; at += EP_QUANT_ELEMENTS) {
        if (at > 0 && EP_PLANTED(c, FIRST_PIECE)) break;
        const ep_u32 largest = ep_largest_of_piece(c, s, from + (ep_u64)at * 2, ep_min(w.hidden - at, EP_QUANT_ELEMENTS));
        if (largest > bits) bits = largest;
    }
    union {
        ep_u32 bits;
        float value;
    } amax = {bits << 16}, scale;
    const bool has_scale = bits < EP_BF16_INFINITY || EP_PLANTED(c, NO_NUMBERS);
    if (amax.value < 1e-4f && !EP_PLANTED(c, NO_LEAST)) amax.value = 1e-4f;
    const float multiplier = 127.0f / amax.value;
    for (ep_u32 at = 0; at < w.hidden; at += EP_QUANT_ELEMENTS) {
        const ep_u32 count = ep_min(w.hidden - at, EP_QUANT_ELEMENTS);
        if (has_scale) ep_code_piece(c, s, from + (ep_u64)at * 2, to + at, count, multiplier);
        else ep_clear_piece(c, s, to + at, count);
    }
    scale.value = 1.0f / multiplier;
    ep_store_word(c, to + w.scales_offset, has_scale ? scale.bits : EP_F32_NAN, 4);
}

#endif
