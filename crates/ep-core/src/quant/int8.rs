//! INT8 rows: one signed byte an element, and one f32 scale a row.
//!
//! For machines without FP8, such as Ascend NPUs. Symmetric: codes are -127 to 127, and 0 is 0.
//!
//! ```text
//! amax        1e-4, or the largest |x| of the row where that is larger            MIN_AMAX
//! multiplier  127 / amax
//! scale       1 / multiplier
//! code        the integer nearest to x * multiplier, ties to even                 back: f32(code) * scale
//! ```
//!
//! Each quotient, product and rounding is one f32 operation, to nearest, ties to even, fused with no other. The formulas
//! are those of the dispatch kernels of sgl-kernel-npu (`QuantProcess`: `127 / max`, `Muls`, `Cast` to `int32_t` by
//! `CAST_RINT`, stored scale `1 / s`), so that codes and scales equal theirs for rows whose largest element is at least
//! `MIN_AMAX`. A row of zeros has an infinite scale there and a finite one here.
//!
//! A row with an infinity or a NaN has no scale, and bytes have no NaN: its codes are 0 and its scale is NaN, so that all
//! of it comes back as NaN and nothing is hidden. A zero loses its sign.
//!
//! ```
//! use ep_core::quant::int8::{dequantize, quantize};
//!
//! let row = [1.0f32, -0.3, 127.0];
//! let (mut codes, mut scale) = ([0; 3], [0; 4]);
//! quantize(&row, &mut codes, &mut scale)?;
//! assert_eq!((codes.map(|code| code as i8), f32::from_le_bytes(scale)), ([1, 0, 127], 1.0));
//!
//! let mut back = [0f32; 3];
//! dequantize(&codes, &scale, &mut back)?;
//! assert_eq!(back, [1.0, 0.0, 127.0]);
//! # Ok::<(), ep_core::Error>(())
//! ```

use super::{MIN_AMAX, Number, Scale};
use crate::error::Error;
use crate::vectors;

/// The largest code; the least is its negative.
pub const MAX: f32 = 127.0;
/// Bytes of a row's scale.
pub const SCALE_BYTES: usize = 4;

/// 1.5 * 2^23. From half of it to its double f32 numbers lie 1 apart, so that an f32 addition rounds what is added to an
/// integer, ties to even, which the lowest bits of the sum are then.
const RULER: f32 = 12_582_912.0;

/// Elements that are quantised in one loop.
const PART: usize = 128;

/// The factors of a row whose largest magnitude is `amax`, a finite number.
pub const fn scale(amax: f32) -> Scale {
    let multiplier = MAX / amax.max(MIN_AMAX);
    Scale { multiplier, scale: 1.0 / multiplier }
}

/// Quantises a row: `row` is `[hidden]`, `codes` `[hidden]`, each the bits of an `i8`, `scale` one f32, little-endian.
///
/// # Errors
/// [`Error::Invalid`] when `codes` or `scale` has another length; then neither is touched.
pub fn quantize<T: Number>(row: &[T], codes: &mut [u8], scale: &mut [u8]) -> Result<(), Error> {
    check(row.len(), codes.len(), scale.len())?;
    let amax = amax(row);
    if !amax.is_finite() {
        codes.fill(0);
        scale.copy_from_slice(&f32::NAN.to_le_bytes());
        return Ok(());
    }
    let factors = self::scale(amax);
    vectors::for_each(
        row.chunks(PART).zip(codes.chunks_mut(PART)),
        #[inline(always)]
        |(row, codes)| {
            for (code, x) in codes.iter_mut().zip(row) {
                *code = (x.widen() * factors.multiplier + RULER).to_bits() as u8;
            }
        },
    );
    scale.copy_from_slice(&factors.scale.to_le_bytes());
    Ok(())
}

/// Turns a row back: each element is `f32(code) * scale`, rounded once more where `T` is bf16. Lengths are those of
/// [`quantize`].
///
/// # Errors
/// [`Error::Invalid`] when `codes` or `scale` has another length than `row` needs; then `row` is not touched.
pub fn dequantize<T: Number>(codes: &[u8], scale: &[u8], row: &mut [T]) -> Result<(), Error> {
    check(row.len(), codes.len(), scale.len())?;
    let scale = scale.try_into().map_or(f32::NAN, f32::from_le_bytes);
    vectors::for_each(
        row.chunks_mut(PART).zip(codes.chunks(PART)),
        #[inline(always)]
        |(row, codes)| {
            for (x, &code) in row.iter_mut().zip(codes) {
                *x = T::round(f32::from(code.cast_signed()) * scale);
            }
        },
    );
    Ok(())
}

/// The largest magnitude of a row, by its bits: those of infinities and NaNs are larger than those of numbers.
fn amax<T: Number>(row: &[T]) -> f32 {
    let mut largest = 0;
    vectors::for_each(
        row.chunks(PART),
        #[inline(always)]
        |part| largest = part.iter().map(|x| x.widen().abs().to_bits()).fold(largest, u32::max),
    );
    f32::from_bits(largest)
}

fn check(hidden: usize, codes: usize, scale: usize) -> Result<(), Error> {
    if codes != hidden {
        return Err(Error::invalid("codes", codes, format_args!("{hidden}, one for each element")));
    }
    if scale != SCALE_BYTES {
        return Err(Error::invalid("bytes of scales", scale, format_args!("{SCALE_BYTES}, one scale a row")));
    }
    Ok(())
}
