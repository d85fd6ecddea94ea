//! INT8 rows are what the definition says: bit for bit, over every bf16 value.

use ep_core::quant::int8::{self, dequantize};
use ep_core::quant::{MIN_AMAX, Number};
use ep_core::reference::{self, CodedRows, World, same_f32};
use ep_core::{Element, RankSet, Shape, Topology};
use proptest::prelude::*;

const INFINITY: u16 = 0x7f80;

fn world(hidden: usize) -> World {
    let shape = Shape::builder().experts(1).topk(1).hidden(hidden as u32).element(Element::Int8);
    let topology = Topology::new(1, 1).expect("a valid topology");
    World::new(shape.build().expect("a valid shape"), topology, RankSet::new()).expect("one rank has all experts")
}

/// Quantises rows of `hidden` elements one by one.
fn quantize<T: Number>(hidden: usize, x: &[T]) -> CodedRows {
    let rows = x.len() / hidden;
    let mut out = CodedRows { codes: vec![0; rows * hidden], scales: vec![0; rows * 4] };
    for ((row, codes), scale) in x.chunks(hidden).zip(out.codes.chunks_mut(hidden)).zip(out.scales.chunks_mut(4)) {
        Element::Int8.quantize(row, codes, scale).expect("lengths agree");
    }
    out
}

fn back<T: Number + Default>(hidden: usize, rows: &CodedRows) -> Vec<T> {
    let mut out = vec![T::default(); rows.codes.len()];
    for ((row, codes), scale) in out.chunks_mut(hidden).zip(rows.codes.chunks(hidden)).zip(rows.scales.chunks(4)) {
        dequantize(codes, scale, row).expect("lengths agree");
    }
    out
}

fn bf16(value: f32) -> u16 {
    u16::round(value)
}

fn codes(row: &[f32]) -> Vec<i8> {
    quantize(row.len(), row).codes.into_iter().map(|code| code as i8).collect()
}

#[test]
fn every_bf16_value_as_amax_gives_the_scale_of_the_definition() {
    let all: Vec<u16> = (0..=u16::MAX).collect();
    assert!(quantize(1, &all) == reference::quantize(&world(1), &all));
}

#[test]
fn every_bf16_value_as_an_element_gives_the_code_of_the_definition() {
    const HIDDEN: usize = 400;
    for amax in [1e-4, 0.3, 1.0, 3.0, 126.0, 128.0, 1e10].map(bf16).into_iter().chain([0x7f7f]) {
        let values: Vec<u16> = (0..=u16::MAX).filter(|bits| bits & 0x7fff <= amax).collect();
        let mut x: Vec<u16> = values.chunks(HIDDEN - 1).flat_map(|rest| [&[amax], rest].concat()).collect();
        x.resize(x.len().next_multiple_of(HIDDEN), 0);
        let (got, world) = (quantize(HIDDEN, &x), world(HIDDEN));
        assert!(got == reference::quantize(&world, &x), "amax {}", amax.widen());
        let expected = reference::dequantize(&world, &got);
        assert!(back::<f32>(HIDDEN, &got).iter().zip(expected).all(|(&a, b)| same_f32(a, b)), "{}", amax.widen());
    }
}

#[test]
fn ties_go_to_even_codes() {
    assert_eq!(codes(&[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5]), [127, 0, 2, 2, 0, -2, -2, 126]);
}

#[test]
fn the_largest_element_has_the_largest_code_whatever_its_size() {
    for bits in bf16(MIN_AMAX) + 1..INFINITY {
        let x = bits.widen();
        assert_eq!(codes(&[x, -x]), [127, -127], "{x:e}");
        let factors = int8::scale(x);
        assert!(factors.multiplier.is_normal() && factors.scale.is_normal(), "{x:e}");
    }
}

#[test]
fn rows_of_zeros_have_a_scale_and_come_back_as_zeros() {
    let got = quantize(3, &[0u16, 0x8000, 0]);
    assert_eq!(got.codes, [0; 3]);
    assert_eq!(f32::from_le_bytes(got.scales[..].try_into().unwrap()), 1.0 / (127.0 / MIN_AMAX));
    assert_eq!(back::<u16>(3, &got), [0; 3], "a zero loses its sign");
}

#[test]
fn a_row_with_what_is_no_number_comes_back_as_nan_and_others_as_they_are() {
    for bad in [INFINITY, INFINITY | 0x8000, 0x7fc0, 0xffc0, 0x7f81, 0xffff] {
        let mut x = vec![bf16(1.0); 600];
        x[299] = bad;
        let got = quantize(300, &x);
        assert!(got == reference::quantize(&world(300), &x), "{bad:#x}");
        assert_eq!(got.codes[..300], [0; 300]);
        let back: Vec<f32> = back(300, &got);
        assert!(back[..300].iter().all(|x| x.is_nan()) && back[300..].iter().all(|&x| x == 1.0), "{bad:#x}");
    }
}

#[test]
fn rows_of_other_lengths_and_bf16_are_refused_and_nothing_is_touched() {
    let (mut codes, mut scale) = ([7; 3], [7; 4]);
    let said = |element: Element, codes: &mut [u8], scale: &mut [u8]| {
        element.quantize(&[1.0f32; 3], codes, scale).unwrap_err().to_string()
    };
    let few = said(Element::Int8, &mut codes[1..], &mut scale);
    assert_eq!(few, "codes is 2, allowed: 3, one for each element");
    let few = said(Element::Int8, &mut codes, &mut scale[1..]);
    assert_eq!(few, "bytes of scales is 3, allowed: 4, one scale a row");
    let none = said(Element::Bf16, &mut codes, &mut scale);
    assert_eq!(none, "element to quantise to is bf16, allowed: fp8, int8");
    assert_eq!((codes, scale), ([7; 3], [7; 4]));
    assert!(dequantize(&codes, &scale, &mut [0f32; 2]).is_err());
}

proptest! {
    #![proptest_config(crate::common::config("int8"))]

    #[test]
    fn rows_of_any_length_follow_the_definition(x in proptest::collection::vec(any::<u16>(), 1..700), finite: bool) {
        let x: Vec<u16> = x.into_iter().map(|x| if finite && x & INFINITY == INFINITY { x ^ 0x100 } else { x }).collect();
        let (hidden, world) = (x.len(), world(x.len()));
        let got = quantize(hidden, &x);
        prop_assert_eq!(&got, &reference::quantize(&world, &x));
        let wide: Vec<f32> = x.iter().map(|x| x.widen()).collect();
        prop_assert_eq!(&got, &quantize(hidden, &wide), "f32 and bf16 of one value are one value");
        let bytes: Vec<[u8; 2]> = x.iter().map(|x| x.to_le_bytes()).collect();
        prop_assert_eq!(&got, &quantize(hidden, &bytes));
        for (back, exact) in back::<u16>(hidden, &got).iter().zip(reference::dequantize(&world, &got)) {
            prop_assert!(reference::same_bf16(*back, bf16(exact)));
        }
    }

    /// Half a step, and a few roundings.
    #[test]
    fn what_comes_back_is_within_half_a_step(x in proptest::collection::vec(-1e6f32..1e6, 1..300)) {
        let got = quantize(x.len(), &x);
        let step = f64::from(int8::scale(x.iter().fold(0.0, |amax, x| x.abs().max(amax))).scale);
        for (x, back) in x.iter().zip(back::<f32>(x.len(), &got)) {
            prop_assert!((f64::from(*x) - f64::from(back)).abs() <= step / 2.0 * (1.0 + 1e-4), "{} came back as {}", x, back);
        }
    }
}
