//! Whole rows.

use super::{GROUP, Scaling, e4m3};
use crate::error::Error;
use crate::{bf16, vectors};

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for u16 {}
    impl Sealed for [u8; 2] {}
}

/// What a row's elements may be stored as: `f32`; `u16`, the bits of a bf16; `[u8; 2]`, the same in little-endian bytes,
/// as rows lie in windows.
pub trait Number: Copy + sealed::Sealed {
    /// The element's value.
    fn widen(self) -> f32;

    /// `value`, rounded to nearest, ties to even.
    fn round(value: f32) -> Self;
}

impl Number for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }

    #[inline(always)]
    fn round(value: f32) -> Self {
        value
    }
}

impl Number for u16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        bf16::widen(self)
    }

    #[inline(always)]
    fn round(value: f32) -> Self {
        bf16::round(value)
    }
}

impl Number for [u8; 2] {
    #[inline(always)]
    fn widen(self) -> f32 {
        u16::from_le_bytes(self).widen()
    }

    #[inline(always)]
    fn round(value: f32) -> Self {
        u16::round(value).to_le_bytes()
    }
}

/// Quantises a row: `row` is `[hidden]`, `codes` `[hidden]`, `scales` `[groups]` of [`Scaling::scale_bytes`] each,
/// little-endian.
///
/// # Errors
/// [`Error::Invalid`] when `codes` or `scales` has another length; then neither is touched.
pub fn quantize<T: Number>(scaling: Scaling, row: &[T], codes: &mut [u8], scales: &mut [u8]) -> Result<(), Error> {
    check(scaling, row.len(), codes.len(), scales.len())?;
    let places = codes.chunks_mut(GROUP).zip(scales.chunks_exact_mut(scaling.scale_bytes()));
    vectors::for_each(
        row.chunks(GROUP).zip(places),
        #[inline(always)]
        |(group, (codes, stored))| {
            let factors = scaling.scale(amax(group));
            encode(group, factors.multiplier, codes);
            scaling.store(factors.scale, stored);
        },
    );
    Ok(())
}

/// Turns a row back: each element is `f32(code) * scale`, rounded once more where `T` is bf16. Lengths are those of
/// [`quantize`].
///
/// # Errors
/// [`Error::Invalid`] when `codes` or `scales` has another length than `row` needs; then `row` is not touched.
pub fn dequantize<T: Number>(scaling: Scaling, codes: &[u8], scales: &[u8], row: &mut [T]) -> Result<(), Error> {
    check(scaling, row.len(), codes.len(), scales.len())?;
    let stored = codes.chunks(GROUP).zip(scales.chunks_exact(scaling.scale_bytes()));
    vectors::for_each(
        row.chunks_mut(GROUP).zip(stored),
        #[inline(always)]
        |(group, (codes, scale))| {
            let scale = scaling.load(scale);
            for (x, &code) in group.iter_mut().zip(codes) {
                *x = T::round(e4m3::decode(code) * scale);
            }
        },
    );
    Ok(())
}

/// The largest magnitude of a group, NaNs left out: they compare false. 0 where nothing is left.
#[inline(always)]
fn amax<T: Number>(group: &[T]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    // A maximum for each of several lanes: in a single one, each step would wait for the last.
    let mut lanes = [0f32; 16];
    let (parts, rest) = group.as_chunks::<16>();
    for part in parts {
        lanes.iter_mut().zip(part).for_each(|(lane, x)| *lane = larger(*lane, x.widen().abs()));
    }
    rest.iter().map(|x| x.widen().abs()).chain(lanes).fold(0.0, larger)
}

/// The codes of a group.
#[inline(always)]
fn encode<T: Number>(group: &[T], multiplier: f32, codes: &mut [u8]) {
    for (code, x) in codes.iter_mut().zip(group) {
        *code = e4m3::encode(x.widen() * multiplier);
    }
}

fn check(scaling: Scaling, hidden: usize, codes: usize, scales: usize) -> Result<(), Error> {
    if codes != hidden {
        return Err(Error::invalid("codes", codes, format_args!("{hidden}, one for each element")));
    }
    let needed = hidden.div_ceil(GROUP) * scaling.scale_bytes();
    if scales != needed {
        return Err(Error::invalid("bytes of scales", scales, format_args!("{needed} for {hidden} elements")));
    }
    Ok(())
}
