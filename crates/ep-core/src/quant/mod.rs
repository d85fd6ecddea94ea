//! FP8 rows: E4M3 codes with one scale for every [`GROUP`] elements. [`int8`]: rows of signed bytes with one scale each.
//!
//! A row of `hidden` elements is cut into [`groups`]`(hidden)` groups of [`GROUP`] elements, the last of which may be
//! shorter. Each group is divided by a scale that brings its largest element to the edge of E4M3, and every quotient is
//! rounded to one byte. What travels is `hidden` codes and one scale a group; where they lie in a row's payload says
//! [`RowFormat`](crate::layout::RowFormat).
//!
//! # Arithmetic
//!
//! Canonical: each product, quotient and rounding is one f32 operation, to nearest, ties to even, fused with no other.
//! It is the formula of DeepEP's kernels (`low_latency_dispatch` with `use_fp8`; `round_scale` is
//! [`Scaling::PowerOfTwo`], `use_ue8m0` is [`Scaling::Ue8m0`]), so that codes and scales equal theirs where those are
//! compiled with IEEE division, CUDA's default. `448` is [`e4m3::MAX`], and `1 / 448` is the f32 nearest to it.
//!
//! ```text
//! amax        1e-4, or the largest |x| of the group where that is larger          MIN_AMAX
//!
//! Exact       multiplier = 448 / amax                  scale = amax * (1 / 448)
//!
//! PowerOfTwo  least    = amax * (1 / 448)
//!             exponent = least's exponent field, plus 1 unless its mantissa field is 0      ceil(log2), biased by 127
//!             scale    = 2^(exponent - 127)            multiplier = 2^(127 - exponent)
//!
//! Ue8m0       as PowerOfTwo, but what is stored of the scale is the byte `exponent`
//!
//! code        E4M3 nearest to x * multiplier           back: f32(code) * scale
//! ```
//!
//! Held against an NVIDIA H100, and equal in every bit: the code of each of the 2^32 f32 values
//! (`cvt.rn.satfinite.e4m3x2.f32`), and for each non-negative finite bf16 value as `amax` the multiplier, scale, exponent
//! and code that these formulas give in CUDA.
//!
//! DeepEP's test helper divides `amax / 448` for the scale instead; the two differ in the last bit of some scales, and
//! codes do not depend on it. Its scales of a row in UE8M0 are packs, four bytes in an `i32`: see [`pack_ue8m0`].
//!
//! # Inputs that are no numbers
//!
//! As CUDA's `fmaxf` and saturating conversion have it:
//!
//! - A NaN does not raise `amax`; its code is [`e4m3::NAN`] (`0x7f`, whatever its sign), and its neighbours are
//!   quantised as if it were absent.
//! - A product beyond 448 saturates, infinities included. Products of finite rows never need it: they exceed 448 by
//!   less than a rounding.
//! - An infinity makes `amax` infinite: `multiplier` is 0 and `scale` is infinite (exponent 255), so that the code of
//!   the infinity is NaN and the whole group comes back as NaN. (With `round_scale`, DeepEP's exponent arithmetic leaves
//!   its stated range here and the multiplier becomes negative; this crate does for all scalings what its exact one does.)
//!
//! # Speed
//!
//! Nothing here allocates, and the loops have no branches on values, so that compilers turn them into vector code, for several widths
//! of vectors of which the widest is taken that there is. One core of an AMD EPYC virtual machine (AVX-512) then took 2.6 us to
//! quantise a row of 7168 bf16 elements and 1.8 us to turn it back, 5.1 and 5.8 with SSE2 alone; `cargo bench -p moexpress-benches
//! --bench quant` measures it.
//!
//! ```
//! use ep_core::quant::{Scaling, dequantize, quantize};
//!
//! let row = [1.0f32, -0.3, 448.0];
//! let (mut codes, mut scales) = ([0; 3], [0; 4]);
//! quantize(Scaling::Exact, &row, &mut codes, &mut scales)?;
//! assert_eq!((codes, f32::from_le_bytes(scales)), ([0x38, 0xaa, 0x7e], 1.0));
//!
//! let mut back = [0f32; 3];
//! dequantize(Scaling::Exact, &codes, &scales, &mut back)?;
//! assert_eq!(back, [1.0, -0.3125, 448.0]);
//! # Ok::<(), ep_core::Error>(())
//! ```

pub mod e4m3;
pub mod int8;
mod rows;
mod scale;

pub use rows::{Number, dequantize, quantize};
pub use scale::{MIN_AMAX, Scale, Scaling, pack_ue8m0, unpack_ue8m0};

/// Elements that share a scale.
pub const GROUP: usize = 128;

/// Scales of a row of `hidden` elements.
pub const fn groups(hidden: u32) -> u32 {
    hidden.div_ceil(GROUP as u32)
}
