//! FP8 rows are what the definition says: bit for bit, over every bf16 value and every code.

use ep_core::quant::{self, GROUP, Number, Scaling, dequantize, e4m3, pack_ue8m0, unpack_ue8m0};
use ep_core::reference::{self, CodedRows, World, same_f32};
use ep_core::{Element, RankSet, Shape, Topology};
use proptest::prelude::*;

const INFINITY: u16 = 0x7f80;
const MINUS_ONE: u16 = 0xbf80;

fn world(scaling: Scaling, hidden: usize) -> World {
    let shape = Shape::builder().experts(1).topk(1).hidden(hidden as u32).element(Element::Fp8(scaling));
    let topology = Topology::new(1, 1).expect("a valid topology");
    World::new(shape.build().expect("a valid shape"), topology, RankSet::new()).expect("one rank has all experts")
}

/// Quantises rows of `hidden` elements one by one.
fn quantize<T: Number>(scaling: Scaling, hidden: usize, x: &[T]) -> CodedRows {
    let row_scales = hidden.div_ceil(GROUP) * scaling.scale_bytes();
    let rows = x.len() / hidden;
    let mut out = CodedRows { codes: vec![0; rows * hidden], scales: vec![0; rows * row_scales] };
    let places = out.codes.chunks_mut(hidden).zip(out.scales.chunks_mut(row_scales));
    for (row, (codes, scales)) in x.chunks(hidden).zip(places) {
        quant::quantize(scaling, row, codes, scales).expect("lengths agree");
    }
    out
}

fn dequantize_all<T: Number + Default>(scaling: Scaling, hidden: usize, rows: &CodedRows) -> Vec<T> {
    let row_scales = hidden.div_ceil(GROUP) * scaling.scale_bytes();
    let mut out = vec![T::default(); rows.codes.len()];
    let stored = rows.codes.chunks(hidden).zip(rows.scales.chunks(row_scales));
    for (row, (codes, scales)) in out.chunks_mut(hidden).zip(stored) {
        dequantize(scaling, codes, scales, row).expect("lengths agree");
    }
    out
}

fn bf16(value: f32) -> u16 {
    u16::round(value)
}

/// The bits of every f32 that lies at, just below and just above the middle of two neighbouring codes, or at a code.
fn edges() -> impl Iterator<Item = f32> {
    let around = |middle: f64| {
        let bits = (middle as f32).to_bits();
        [bits.wrapping_sub(1), bits, bits + 1].map(f32::from_bits)
    };
    let value = reference::e4m3_value;
    (0..0x7e).flat_map(move |code| [value(code), (value(code) + value(code + 1)) / 2.0]).flat_map(around)
}

#[test]
fn every_code_has_its_value_and_is_the_nearest_to_it() {
    for code in 0..=255 {
        let value = e4m3::decode(code);
        assert!(same_f32(value, reference::e4m3_value(code) as f32), "{code:#x} is {value}");
        assert_eq!(e4m3::encode(value), if value.is_nan() { e4m3::NAN } else { code });
    }
}

#[test]
fn every_bf16_value_is_rounded_to_the_nearest_code() {
    let multipliers = [1.0f32, -1.0, 448.0, 1.0 / 448.0, 1.0 / 3.0, 1e-4, 4.48e6, 0.1, 1e30, 1e-30];
    for multiplier in multipliers {
        for bits in 0..=u16::MAX {
            let value = bits.widen() * multiplier;
            assert_eq!(e4m3::encode(value), reference::e4m3_nearest(value), "{value}");
        }
    }
}

#[test]
fn ties_go_to_even_codes_and_their_neighbours_to_the_nearer() {
    for value in edges().flat_map(|value| [value, -value]).chain([448.0, 464.0, 480.0, f32::MAX, f32::INFINITY]) {
        assert_eq!(e4m3::encode(value), reference::e4m3_nearest(value), "{value:e}");
    }
}

#[test]
fn codes_rise_with_the_value() {
    let mut last = 0;
    for bits in (0..=f32::INFINITY.to_bits()).step_by(4099) {
        let (plus, minus) = (e4m3::encode(f32::from_bits(bits)), e4m3::encode(-f32::from_bits(bits)));
        assert!(plus >= last && plus <= 0x7e && minus == plus | 0x80, "{:e}", f32::from_bits(bits));
        last = plus;
    }
    assert_eq!(last, 0x7e);
}

#[test]
fn every_bf16_value_as_amax_gives_the_scale_of_the_definition() {
    let all: Vec<u16> = (0..=u16::MAX).collect();
    for scaling in Scaling::ALL {
        let got = quantize(scaling, 1, &all);
        assert!(got == reference::quantize(&world(scaling, 1), &all), "{scaling:?}");
    }
}

#[test]
fn every_bf16_value_as_an_element_gives_the_code_of_the_definition() {
    // Beside each amax that the first element sets lie all values that are not larger, and all NaNs.
    for amax in [1e-4, 0.3, 1.0, 3.0, 447.0, 449.0, 1e10].map(bf16).into_iter().chain([0x7f7f, INFINITY]) {
        let fits = |&bits: &u16| bits & 0x7fff <= amax || bits & 0x7fff > INFINITY;
        let values: Vec<u16> = (0..=u16::MAX).filter(fits).collect();
        let mut x: Vec<u16> = values.chunks(GROUP - 1).flat_map(|rest| [&[amax], rest].concat()).collect();
        x.resize(x.len().next_multiple_of(GROUP), 0);
        for scaling in Scaling::ALL {
            let world = world(scaling, GROUP);
            let (got, expected) = (quantize(scaling, GROUP, &x), reference::quantize(&world, &x));
            assert!(got == expected, "{scaling:?}, amax {}", amax.widen());
            let (got, expected) = (dequantize_all::<f32>(scaling, GROUP, &got), reference::dequantize(&world, &got));
            assert!(got.iter().zip(expected).all(|(&a, b)| same_f32(a, b)), "{scaling:?}, amax {}", amax.widen());
        }
    }
}

#[test]
fn a_ue8m0_scale_is_the_exponent_of_the_power_of_two_scale() {
    let all: Vec<u16> = (0..=u16::MAX).collect();
    let (power, byte) = (quantize(Scaling::PowerOfTwo, 1, &all), quantize(Scaling::Ue8m0, 1, &all));
    assert!(power.codes == byte.codes);
    for (power, &byte) in power.scales.as_chunks().0.iter().zip(&byte.scales) {
        assert_eq!(f32::from_le_bytes(*power).to_bits(), u32::from(byte) << 23);
    }
    let exponents = byte.scales.iter().copied().filter(|&byte| byte != 255);
    assert_eq!((exponents.clone().min(), exponents.max()), (Some(127 - 22), Some(127 + 120)));
}

#[test]
fn power_of_two_scales_are_less_than_twice_the_exact_ones() {
    for bits in 0..INFINITY {
        let amax = bits.widen();
        let (exact, power) = (Scaling::Exact.scale(amax), Scaling::PowerOfTwo.scale(amax));
        assert!(exact.scale <= power.scale && power.scale < 2.0 * exact.scale, "{amax:e}");
        assert_eq!(power.multiplier * power.scale, 1.0);
    }
}

#[test]
fn nans_do_not_touch_their_neighbours() {
    for nan in [0x7fc0, 0xffc0, 0x7f81, 0xffff] {
        for scaling in Scaling::ALL {
            let got = quantize(scaling, 3, &[bf16(2.0), nan, MINUS_ONE]);
            let without = quantize(scaling, 3, &[bf16(2.0), 0, MINUS_ONE]);
            assert_eq!(got.codes, [without.codes[0], e4m3::NAN, without.codes[2]]);
            assert_eq!(got.scales, without.scales);
        }
    }
    assert_eq!(quantize(Scaling::Exact, 1, &[0x7fc0u16]).scales, quantize(Scaling::Exact, 1, &[0u16]).scales);
}

#[test]
fn a_group_with_an_infinity_comes_back_as_nan_and_others_as_they_are() {
    let mut row = vec![bf16(1.0); GROUP + 1];
    row[5] = INFINITY | 0x8000;
    for scaling in Scaling::ALL {
        let got = quantize(scaling, row.len(), &row);
        assert_eq!((got.codes[4], got.codes[5]), (0, e4m3::NAN));
        let back: Vec<f32> = dequantize_all(scaling, row.len(), &got);
        assert!(back[..GROUP].iter().all(|x| x.is_nan()), "{scaling:?}");
        assert_eq!(back[GROUP], 1.0);
    }
}

#[test]
fn zeros_keep_their_signs() {
    for scaling in Scaling::ALL {
        let back: Vec<u16> = dequantize_all(scaling, 2, &quantize(scaling, 2, &[0u16, 0x8000]));
        assert_eq!(back, [0, 0x8000]);
    }
}

#[test]
fn packs_hold_four_scales_the_first_lowest() {
    let mut packs = [-1; 2];
    pack_ue8m0(&[1, 2, 3, 4, 0xff], &mut packs).unwrap();
    assert_eq!(packs, [0x0403_0201, 0xff]);
    let mut scales = [0; 5];
    unpack_ue8m0(&packs, &mut scales).unwrap();
    assert_eq!(scales, [1, 2, 3, 4, 0xff]);
    let error = pack_ue8m0(&[0; 56], &mut packs).unwrap_err().to_string();
    assert_eq!(error, "packs is 2, allowed: 14 for 56 scales");
}

#[test]
fn rows_of_other_lengths_are_refused_and_not_touched() {
    let (mut codes, mut scales) = ([7; 129], [7; 8]);
    let row = [1.0f32; 129];
    let error = quant::quantize(Scaling::Exact, &row, &mut codes[1..], &mut scales).unwrap_err().to_string();
    assert_eq!(error, "codes is 128, allowed: 129, one for each element");
    let error = quant::quantize(Scaling::Ue8m0, &row, &mut codes, &mut scales).unwrap_err().to_string();
    assert_eq!(error, "bytes of scales is 8, allowed: 2 for 129 elements");
    assert_eq!((codes, scales), ([7; 129], [7; 8]));
    assert!(dequantize(Scaling::Exact, &codes, &scales[1..], &mut [0f32; 129]).is_err());
}

#[test]
fn a_row_of_no_elements_has_no_scales() {
    quant::quantize::<f32>(Scaling::Exact, &[], &mut [], &mut []).unwrap();
}

proptest! {
    #![proptest_config(crate::common::config("quant"))]

    #[test]
    fn any_f32_is_rounded_to_the_nearest_code(bits: u32) {
        let value = f32::from_bits(bits);
        prop_assert_eq!(e4m3::encode(value), reference::e4m3_nearest(value));
        // Most patterns are far from 1: once more in the range of codes.
        let value = f32::from_bits(bits % (20 << 23) + (115 << 23));
        prop_assert_eq!(e4m3::encode(value), reference::e4m3_nearest(value));
    }

    #[test]
    fn rows_of_any_length_follow_the_definition(
        x in proptest::collection::vec(any::<u16>(), 1..700),
        scaling in proptest::sample::select(&Scaling::ALL[..]),
    ) {
        let (hidden, world) = (x.len(), world(scaling, x.len()));
        let got = quantize(scaling, hidden, &x);
        prop_assert_eq!(&got, &reference::quantize(&world, &x));
        let wide: Vec<f32> = x.iter().map(|x| x.widen()).collect();
        prop_assert_eq!(&got, &quantize(scaling, hidden, &wide), "f32 and bf16 of one value are one value");
        let bytes: Vec<[u8; 2]> = x.iter().map(|x| x.to_le_bytes()).collect();
        prop_assert_eq!(&got, &quantize(scaling, hidden, &bytes));
        let back: Vec<u16> = dequantize_all(scaling, hidden, &got);
        for (back, exact) in back.iter().zip(reference::dequantize(&world, &got)) {
            prop_assert!(reference::same_bf16(*back, bf16(exact)));
        }
    }

    /// Half a step of a code is at most 1/16 of a normal value, or 2^-10 below the normal values; the f32 operations
    /// add a few parts in 2^24.
    #[test]
    fn what_comes_back_is_within_half_a_code(
        x in proptest::collection::vec(-1e6f32..1e6, 1..300),
        scaling in proptest::sample::select(&Scaling::ALL[..]),
    ) {
        let back: Vec<f32> = dequantize_all(scaling, x.len(), &quantize(scaling, x.len(), &x));
        for (group, back) in x.chunks(GROUP).zip(back.chunks(GROUP)) {
            let scale = scaling.scale(group.iter().fold(0.0, |amax, x| x.abs().max(amax))).scale;
            for (x, back) in group.iter().zip(back) {
                let bound = (x.abs() / 16.0).max(scale / 1024.0) * (1.0 + 1e-5);
                prop_assert!((x - back).abs() <= bound, "{} came back as {}", x, back);
            }
        }
    }

    #[test]
    fn larger_elements_of_a_group_have_larger_codes(
        mut x in proptest::collection::vec(-500f32..500.0, 1..=128),
        scaling in proptest::sample::select(&Scaling::ALL[..]),
    ) {
        x.sort_unstable_by(f32::total_cmp);
        let back: Vec<f32> = dequantize_all(scaling, x.len(), &quantize(scaling, x.len(), &x));
        prop_assert!(back.is_sorted());
    }
}
