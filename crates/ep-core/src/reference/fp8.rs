//! FP8 rows by definition: the value of the format that is nearest to each quotient.
//!
//! Written in f64 and independently of [`crate::quant`], so that each can be checked against the other. Every sum,
//! product and quotient of two f32 numbers that is formed in f64 and then rounded to f32 is the one that f32 arithmetic
//! gives: f64 has more than twice the bits.

use super::e4m3::{nearest, value};
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

/// Quantises bf16 rows `[rows, hidden]` as the shape of `world` wants them to travel.
///
/// # Panics
/// When the shape's rows are not FP8, or `x` is not whole rows.
pub fn quantize(world: &World, x: &[u16]) -> Fp8Rows {
    let scaling = scaling_of(world);
    let hidden = world.shape.hidden() as usize;
    assert!(x.len().is_multiple_of(hidden), "rows are [rows, hidden]");
    let mut rows = Fp8Rows::default();
    rows.codes.reserve(x.len());
    for group in x.chunks_exact(hidden).flat_map(|row| row.chunks(GROUP)) {
        let group: Vec<f32> = group.iter().copied().map(widen).collect();
        let (multiplier, scale) = factors(scaling, &group);
        rows.codes.extend(group.iter().map(|&x| nearest((f64::from(x) * multiplier) as f32)));
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
    let mut elements = Vec::with_capacity(rows.codes.len());
    for (codes, scale) in groups.zip(scales.map(loaded)) {
        elements.extend(codes.iter().map(|&code| (value(code) * scale) as f32));
    }
    elements
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
