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

/// Mantissa bits that an f32 has and a code has not.
const DROPPED: u32 = 20;
/// Exponent bias of f32 less that of E4M3.
const REBIAS: u32 = 127 - 7;
/// Bits of 2^-6, the smallest normal value.
const MIN_NORMAL: u32 = (127 - 6) << 23;
/// 2^14: the numbers from here to its double are 2^-9 apart, like the subnormal codes.
const SUBNORMAL_RULER: f32 = 16384.0;

/// The code nearest to `value`, ties to the even code; beyond [`MAX`] that of `MAX`; for NaN [`NAN`].
#[inline]
pub const fn encode(value: f32) -> u8 {
    let magnitude = value.to_bits() & 0x7fff_ffff;
    let sign = value.to_bits() >> 24 & 0x80;
    let clamped = if magnitude < MAX.to_bits() { magnitude } else { MAX.to_bits() };
    // Half a code less one bit, plus one when the code is odd: carries exactly when nearest-even rounds up.
    let to_even = (1 << (DROPPED - 1)) - 1 + (clamped >> DROPPED & 1);
    let normal = (clamped.wrapping_add(to_even) >> DROPPED).wrapping_sub(REBIAS << 3);
    // The addition itself rounds to a multiple of 2^-9, ties to even; the low bits then count the multiples.
    let subnormal = (f32::from_bits(clamped) + SUBNORMAL_RULER).to_bits().wrapping_sub(SUBNORMAL_RULER.to_bits());
    let code = if clamped < MIN_NORMAL { subnormal } else { normal };
    if magnitude > f32::INFINITY.to_bits() { NAN } else { (code | sign) as u8 }
}

/// The value of `code`: exact.
#[inline]
pub const fn decode(code: u8) -> f32 {
    let magnitude = (code & 0x7f) as u32;
    let normal = (magnitude << DROPPED) + (REBIAS << 23);
    let subnormal = (magnitude as f32 / 512.0).to_bits();
    let bits = if magnitude < 8 { subnormal } else { normal };
    let bits = if magnitude == NAN as u32 { f32::NAN.to_bits() } else { bits };
    f32::from_bits(bits | (code as u32 & 0x80) << 24)
}
