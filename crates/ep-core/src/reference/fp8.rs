//! FP8 rows by definition: the nearest value of the format, found by looking at all of them.
//!
//! Written in f64 and independently of [`crate::quant`], so that each can be checked against the other. Every sum,
//! product and quotient of two f32 numbers that is formed in f64 and then rounded to f32 is the one that f32 arithmetic
//! gives: f64 has more than twice the bits.

use super::{World, widen};
use crate::quant::Scaling;
use crate::shape::Element;

/// Rows as they travel: codes, and beside them scales as they are stored.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Fp8Rows {
    /// `[rows, hidden]`: E4M3 codes.
    pub codes: Vec<u8>,
    /// `[rows, groups]`: f32, little-endian, or one byte each, as the scaling says.
    pub scales: Vec<u8>,
}

/// Elements that share a scale.
const GROUP: usize = 128;

/// The value of an E4M3 code; NaN for `0x7f` and `0xff`.
pub fn e4m3_value(code: u8) -> f64 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7));
    let magnitude = match (exponent, code & 7) {
        (15, 7) => f64::NAN,
        (0, _) => mantissa / 8.0 * 2f64.powi(-6),
        _ => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

/// The E4M3 code whose value is nearest to `value`, of two the even one; `0x7f` for NaN, that of 448 beyond 448.
pub fn e4m3_nearest(value: f32) -> u8 {
    if value.is_nan() {
        return 0x7f;
    }
    let magnitude = f64::from(value).abs().min(448.0);
    let distance = |code: &u8| (e4m3_value(*code) - magnitude).abs();
    let nearer = |a: &u8, b: &u8| distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1)));
    let code = (0..0x7f).min_by(nearer).unwrap_or(0);
    if value.is_sign_negative() { code | 0x80 } else { code }
}

/// Quantises bf16 rows `[rows, hidden]` as the shape of `world` wants them to travel.
///
/// # Panics
/// When the shape's rows are not FP8, or `x` is not whole rows.
pub fn quantize(world: &World, x: &[u16]) -> Fp8Rows {
    let scaling = scaling_of(world);
    let hidden = world.shape.hidden() as usize;
    assert!(x.len().is_multiple_of(hidden), "rows are [rows, hidden]");
    let mut rows = Fp8Rows::default();
    for group in x.chunks_exact(hidden).flat_map(|row| row.chunks(GROUP)) {
        let group: Vec<f32> = group.iter().copied().map(widen).collect();
        let (multiplier, scale) = factors(scaling, &group);
        rows.codes.extend(group.iter().map(|&x| e4m3_nearest((f64::from(x) * multiplier) as f32)));
        rows.scales.extend(stored(scaling, scale));
    }
    rows
}

/// What a group's elements are multiplied by, and what its codes are.
fn factors(scaling: Scaling, group: &[f32]) -> (f64, f64) {
    let magnitudes = group.iter().filter(|x| !x.is_nan()).map(|x| f64::from(x.abs()));
    let amax = magnitudes.fold(f64::from(1e-4f32), f64::max);
    let inverse = f64::from((1.0 / 448.0) as f32);
    let least = f64::from((amax * inverse) as f32);
    match scaling {
        Scaling::Exact => (f64::from((448.0 / amax) as f32), least),
        _ if amax.is_infinite() => (0.0, f64::INFINITY),
        Scaling::PowerOfTwo | Scaling::Ue8m0 => {
            let power = (-126..=127).find(|&power| 2f64.powi(power) >= least).unwrap_or(127);
            (2f64.powi(-power), 2f64.powi(power))
        }
    }
}

/// The bytes of a scale.
fn stored(scaling: Scaling, scale: f64) -> Vec<u8> {
    match scaling {
        Scaling::Exact | Scaling::PowerOfTwo => (scale as f32).to_le_bytes().to_vec(),
        Scaling::Ue8m0 if scale.is_infinite() => vec![255],
        Scaling::Ue8m0 => vec![(scale.log2() + 127.0) as u8],
    }
}

/// The elements of FP8 rows of the shape of `world`, `[rows, hidden]`: `f32(code) * scale`, rounded to f32.
///
/// # Panics
/// When the shape's rows are not FP8, or codes and scales are not whole rows, equally many.
pub fn dequantize(world: &World, rows: &Fp8Rows) -> Vec<f32> {
    let scaling = scaling_of(world);
    let hidden = world.shape.hidden() as usize;
    assert!(rows.codes.len().is_multiple_of(hidden), "codes are [rows, hidden]");
    let groups = rows.codes.chunks_exact(hidden).flat_map(|row| row.chunks(GROUP));
    let scales = rows.scales.chunks_exact(scaling.scale_bytes());
    assert_eq!(groups.clone().count(), scales.len(), "scales are [rows, groups]");
    let value = |code, scale| (e4m3_value(code) * scale) as f32;
    groups
        .zip(scales.map(loaded))
        .flat_map(|(codes, scale)| codes.iter().map(move |&code| value(code, scale)))
        .collect()
}

/// The scale that bytes stand for. A UE8M0 byte is an exponent field: 0 and 255 are 0 and infinity.
fn loaded(bytes: &[u8]) -> f64 {
    match *bytes {
        [0] => 0.0,
        [255] => f64::INFINITY,
        [exponent] => 2f64.powi(i32::from(exponent) - 127),
        _ => f64::from(f32::from_le_bytes(bytes.try_into().expect("a scale is one byte or four"))),
    }
}

/// How the shape's rows are scaled.
pub(super) fn scaling_of(world: &World) -> Scaling {
    match world.shape.element() {
        Element::Fp8(scaling) => scaling,
        other => panic!("rows of the shape are {other}, not FP8"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_mean_what_the_format_says() {
        let known = [(0x00, 0.0), (0x01, 1.0 / 512.0), (0x07, 7.0 / 512.0), (0x08, 1.0 / 64.0), (0x38, 1.0)];
        for (code, value) in known.into_iter().chain([(0x7e, 448.0), (0xbc, -1.5), (0x77, 240.0), (0x78, 256.0)]) {
            assert_eq!(e4m3_value(code), value, "{code:#x}");
        }
        assert!(e4m3_value(0x80).is_sign_negative() && e4m3_value(0x7f).is_nan() && e4m3_value(0xff).is_nan());
    }

    #[test]
    fn of_two_equally_near_codes_the_even_one_is_chosen() {
        assert_eq!((e4m3_nearest(1.0625), e4m3_nearest(1.1875)), (0x38, 0x3a));
        assert_eq!((e4m3_nearest(1.0 / 1024.0), e4m3_nearest(-3.0 / 1024.0)), (0x00, 0x82));
    }
}
