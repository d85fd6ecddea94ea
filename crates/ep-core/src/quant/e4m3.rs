//! The 8-bit format: 1 sign bit, 4 exponent bits biased by 7, 3 mantissa bits; no infinities (the "fn" variant).
//!
//! ```text
//! 0x00          0
//! 0x01 ..= 07   subnormal: code * 2^-9
//! 0x08 ..= 7e   normal: (1 + mantissa / 8) * 2^(exponent - 7), up to 448
//! 0x7f          NaN
//! | 0x80        the same, negative
//! ```

/// The largest value, code `0x7e`.
pub const MAX: f32 = 448.0;
/// The code that NaNs are given; `0xff` is a NaN too.
pub const NAN: u8 = 0x7f;

/// The smallest normal value.
const MIN_NORMAL: f32 = 1.0 / 64.0;
/// Bits of an f32 that are its exponent.
const EXPONENT: u32 = 0xff << 23;
/// Mantissa bits that an f32 has and a code has not.
const DROPPED: u32 = 20;
/// Exponent bias of f32 less that of E4M3.
const REBIAS: u32 = 127 - 7;

/// The code nearest to `value`, ties to the even code; beyond [`MAX`] that of `MAX`; for NaN [`NAN`].
///
/// An f32 addition does the rounding. Codes lie `2^(e - 3)` apart, where `e` is the value's exponent, at least -6. So do
/// the f32 numbers from `2^(e + 20)` to its double, in which the value's steps are then counted by the lowest bits.
#[inline(always)]
pub const fn encode(value: f32) -> u8 {
    let magnitude = value.abs();
    let clamped = if magnitude < MAX { magnitude } else { MAX };
    let exponent = if clamped > MIN_NORMAL { clamped } else { MIN_NORMAL }.to_bits() & EXPONENT;
    let ruler = exponent + (DROPPED << 23);
    let steps = (clamped + f32::from_bits(ruler)).to_bits() - ruler;
    // Of a normal value's steps, eight are those to its power of two.
    let code = steps + (exponent >> DROPPED) - (MIN_NORMAL.to_bits() >> DROPPED);
    let sign = value.to_bits() >> 24 & 0x80;
    if value.is_nan() { NAN } else { (code | sign) as u8 }
}

/// The value of `code`: exact.
#[inline(always)]
pub const fn decode(code: u8) -> f32 {
    let magnitude = (code & 0x7f) as u32;
    let normal = (magnitude << DROPPED) + (REBIAS << 23);
    let subnormal = (magnitude as f32 / 512.0).to_bits();
    let bits = if magnitude < 8 { subnormal } else { normal };
    let bits = if magnitude == NAN as u32 { f32::NAN.to_bits() } else { bits };
    f32::from_bits(bits | (code as u32 & 0x80) << 24)
}
