//! INT8 rows that the device makes of bf16 rows, byte for byte those of `ep_core::quant::int8`; and the faults that they show.

use ep_ascend::args::Plant;
use ep_ascend::twin::{Host, Machine};
use ep_ascend::{AscendEndpoint, Cluster};
use ep_core::layout::RowFormat;
use ep_core::reference::{self, World};
use ep_core::{Element, Endpoint as _, RankSet, Settings, Shape, Topology};

use crate::{FEW, library};

/// Seeds that are tried until one catches.
const SEEDS: u64 = 12;

fn shape(element: Element, hidden: u32) -> Shape {
    Shape::builder().experts(1).topk(1).hidden(hidden).max_tokens(4).element(element).build().expect("a shape")
}

/// Does something on the only rank; what the twin found wrong.
fn alone<T>(seed: u64, plant: u32, shape: Shape, user: impl AsyncFn(AscendEndpoint) -> T) -> Result<T, String> {
    let topology = Topology::new(1, 1).expect("a topology");
    let settings = Settings::builder(&shape, &topology).low_latency(false).build().expect("settings");
    let machine = Machine::new(library(), seed, 1, 1).expect("a machine");
    let session = Host::install(machine, "Ascend910B1").expect("the thread's only twin");
    let builder = Cluster::builder(topology, library().path()).settings(settings).roles(FEW).plant(plant);
    let ran = builder.build(&session.table(), shape).expect("a cluster").run(user).pop().expect("a rank");
    session.fault().map_or(Ok(ran), Err)
}

/// What is wrong with the INT8 rows that the device makes of these; nothing where all is as it must be.
fn found(seed: u64, plant: u32, hidden: u32, x: &[u16]) -> Option<String> {
    let shape = shape(Element::Int8, hidden);
    let bytes: Vec<u8> = x.iter().flat_map(|x| x.to_le_bytes()).collect();
    let rows = (x.len() / hidden as usize) as u32;
    let made = alone(seed, plant, shape, async |mut ep| {
        let x = ep.rows(&bytes, rows)?;
        let made = ep.quantize(&x).await?;
        ep.bytes(&made)
    });
    let made = match made {
        Ok(made) => made.unwrap_or_else(|error| panic!("{error}")),
        Err(fault) => return Some(fault),
    };
    let world = World::new(shape, Topology::new(1, 1).expect("a topology"), RankSet::new()).expect("a world");
    let expected = reference::quantize(&world, x);
    let (format, hidden) = (RowFormat::new(&shape), hidden as usize);
    let of_row = expected.codes.chunks(hidden).zip(expected.scales.chunks(4));
    for (row, (made, (codes, scale))) in made.chunks(format.payload_bytes() as usize).zip(of_row).enumerate() {
        if made[..hidden] != *codes || made[format.scales_offset() as usize..] != *scale {
            return Some(format!("oracle: row {row} of hidden {hidden}"));
        }
    }
    None
}

/// Rows of bits that begin somewhere and are mixed well; those of infinities and NaNs only where `wild`.
fn mixed(rows: u32, hidden: u32, wild: bool) -> Vec<u16> {
    let bits = |at: u32| (at.wrapping_mul(0x9e37_79b9) >> 13) as u16;
    let tame = |bits: u16| if bits & 0x7f80 == 0x7f80 && !wild { bits ^ 0x4000 } else { bits };
    // Most patterns are far from 1: in two rows of three the exponents are near that of 1.
    let near = |row: u32, bits: u16| if row.is_multiple_of(3) { bits } else { bits & 0x81ff | 0x3e00 };
    (0..rows).flat_map(|row| (0..hidden).map(move |at| near(row, tame(bits(row * hidden + at))))).collect()
}

/// A row for each case of the definition: zeros, tiny ones, ties, negative ones, the largest behind the first piece, a NaN, an infinity.
fn odd(hidden: u32) -> Vec<u16> {
    let row = |fill: u16, at: u32, other: u16| (0..hidden).map(move |i| if i == at % hidden { other } else { fill });
    let last = hidden - 1;
    let cases = [(0, 0, 0), (0, 0, 0x8000), (0x3000, 0, 0x3380), (0x3f00, 1, 0x42fe), (0xbf80, last, 0xc040)];
    let bad = [(0x3f80, last, 0x7fc0), (0x3f80, 3, 0xff80), (0x3f80, last, 0x4100)];
    cases.into_iter().chain(bad).flat_map(|(fill, at, other)| row(fill, at, other)).collect()
}

#[test]
fn the_device_makes_the_rows_of_the_definition() {
    for (seed, hidden) in [1, 15, 16, 17, 33, 600, 8192, 8193].into_iter().enumerate() {
        let x = [mixed(if hidden > 600 { 1 } else { 7 }, hidden, false), odd(hidden), mixed(2, hidden, true)].concat();
        assert_eq!(found(seed as u64, 0, hidden, &x), None, "hidden {hidden}");
    }
    for seed in 0..SEEDS {
        assert_eq!(found(seed, 0, 40, &odd(40)), None, "seed {seed}");
    }
}

#[test]
fn every_bf16_value_has_the_code_of_the_definition() {
    // Beside each value lies one that is larger, except that nothing is larger than an infinity or a NaN.
    let all = (0..=u16::MAX).map(|bits| if bits & 0x7f80 == 0x7f80 { 0x4000 } else { bits });
    for scale in [0x3f80u16, 0x42fe, 0x7f00] {
        let x: Vec<u16> = [scale].into_iter().chain(all.clone().filter(|x| x & 0x7fff <= scale)).collect();
        assert_eq!(found(1, 0, x.len() as u32 / 4, &x[..x.len() / 4 * 4]), None, "{scale:#x}");
    }
}

#[test]
fn rows_that_are_not_to_be_quantised_are_refused() {
    let said = |element, rows: u32, bytes: usize| {
        let refused = alone(1, 0, shape(element, 16), async |mut ep| {
            let x = ep.rows(&vec![0; bytes], rows)?;
            ep.quantize(&x).await.map(|made| made.rows())
        });
        refused.expect("the twin finds nothing").map_err(|error| error.to_string())
    };
    let refused = said(Element::Bf16, 2, 64).unwrap_err();
    assert_eq!(refused, "element of rows to quantise is bf16, allowed: int8 with a scale a row");
    let refused = said(Element::Int8, 2, 40).unwrap_err();
    assert_eq!(refused, "row size of x is 20, allowed: 32 bytes for hidden 16");
    assert_eq!(said(Element::Int8, 0, 0), Ok(0));
}

/// A planted fault, and what must be said of it.
type Planted = (Plant, &'static [&'static str]);

pub(crate) const PLANTED: &[Planted] = &[
    (Plant::PieceFlag, &["order: "]),
    (Plant::PieceReused, &["order: "]),
    (Plant::LargestFlag, &["order: "]),
    (Plant::RestLeft, &["oracle: "]),
    (Plant::SignsKept, &["oracle: "]),
    (Plant::FirstPiece, &["oracle: "]),
    (Plant::TowardsZero, &["oracle: "]),
    (Plant::CodesFlag, &["order: "]),
    (Plant::CodesReused, &["order: "]),
    (Plant::NoNumbers, &["oracle: "]),
    (Plant::NoLeast, &["oracle: "]),
];

#[test]
fn each_fault_of_rows_of_int8_is_caught_by_what_it_breaks() {
    for (plant, said) in PLANTED {
        // Of a row of one piece, other waits imply that it was read and that its codes were stored.
        let is_long = matches!(plant, Plant::FirstPiece | Plant::PieceReused | Plant::CodesReused);
        let hidden = if is_long { 8200 } else { 40 };
        let caught = (1..=SEEDS).find_map(|seed| found(seed, *plant as u32, hidden, &odd(hidden)));
        let caught = caught.unwrap_or_else(|| panic!("{plant:?} is not caught in {SEEDS} seeds"));
        assert!(said.iter().any(|said| caught.starts_with(said)), "{plant:?} is caught as {caught}, expected {said:?}");
    }
}
