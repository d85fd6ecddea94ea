//! Rows of codes and scales by definition: the value of the format that is nearest to each quotient.
//!
//! Written in f64 and independently of [`crate::quant`], so that each can be checked against the other. Every sum,
//! product and quotient of two f32 numbers that is formed in f64 and then rounded to f32 is the one that f32 arithmetic
//! gives: f64 has more than twice the bits.

use super::e4m3::{nearest, value};
use super::{World, int8, widen};
use crate::quant::Scaling;
use crate::shape::Element;

/// Rows as they travel: codes, and beside them scales as they are stored.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CodedRows {
    /// `[rows, hidden]`: E4M3 codes, or signed bytes.
    pub codes: Vec<u8>,
    /// `[rows, scales]`: f32, little-endian, or one byte each, as the element says.
    pub scales: Vec<u8>,
}

/// Elements of FP8 that share a scale.
const GROUP: usize = 128;

/// Quantises bf16 rows `[rows, hidden]` as the shape of `world` wants them to travel.
///
/// # Panics
/// When the shape's rows have no codes, or `x` is not whole rows.
pub fn quantize(world: &World, x: &[u16]) -> CodedRows {
    let hidden = world.shape.hidden() as usize;
    assert!(x.len().is_multiple_of(hidden), "rows are [rows, hidden]");
    let mut rows = CodedRows::default();
    rows.codes.reserve(x.len());
    for row in x.chunks_exact(hidden) {
        let row: Vec<f32> = row.iter().copied().map(widen).collect();
        match world.shape.element() {
            Element::Bf16 => panic!("rows of the shape are bf16: they have no codes"),
            Element::Fp8(scaling) => row.chunks(GROUP).for_each(|group| quantize_group(scaling, group, &mut rows)),
            Element::Int8 => {
                let (codes, scale) = int8::quantize(&row);
                rows.codes.extend(codes);
                rows.scales.extend(scale);
            }
        }
    }
    rows
}

/// Appends a group's codes and its scale.
fn quantize_group(scaling: Scaling, group: &[f32], rows: &mut CodedRows) {
    let (multiplier, scale) = factors(scaling, group);
    rows.codes.extend(group.iter().map(|&x| nearest((f64::from(x) * multiplier) as f32)));
    rows.scales.extend(stored(scaling, scale));
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

/// The elements of coded rows of the shape of `world`, `[rows, hidden]`: `f32(code) * scale`, rounded to f32.
///
/// # Panics
/// When the shape's rows have no codes, or codes and scales are not whole rows, equally many.
pub fn dequantize(world: &World, rows: &CodedRows) -> Vec<f32> {
    let hidden = world.shape.hidden() as usize;
    let (group, scale_bytes, value): (_, _, fn(u8) -> f64) = match world.shape.element() {
        Element::Bf16 => panic!("rows of the shape are bf16: they have no codes"),
        Element::Fp8(scaling) => (GROUP, scaling.scale_bytes(), value),
        Element::Int8 => (hidden, 4, int8::value),
    };
    assert!(rows.codes.len().is_multiple_of(hidden), "codes are [rows, hidden]");
    let groups = rows.codes.chunks_exact(hidden).flat_map(|row| row.chunks(group));
    let scales = rows.scales.chunks_exact(scale_bytes);
    assert_eq!(groups.clone().count(), scales.len(), "scales are [rows, scales]");
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

/// Bytes of the scales of a row.
pub(super) fn scales_bytes(world: &World) -> usize {
    match world.shape.element() {
        Element::Bf16 => panic!("rows of the shape are bf16: they have no scales"),
        Element::Fp8(scaling) => (world.shape.hidden() as usize).div_ceil(GROUP) * scaling.scale_bytes(),
        Element::Int8 => 4,
    }
}
