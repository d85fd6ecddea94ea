//! The layout for kernels: writes `ep_layout.h`.
//!
//! Sizes, offsets and field types of the structs are taken from the Rust types, and constants from the Rust constants;
//! the address arithmetic of [`super::Layout`] is the only thing that stands here a second time, and a test compares
//! the two on random layouts.

use std::fmt::Debug;

use super::{
    Alarm, CELL_BYTES, Choice, CountsHeader, KernelRings, KernelWindow, Kind, LINE_BYTES, LowKind, MASKED, NO_BASE,
    Note, OPEN_ROOM, OpHeader, PIECES, ROW_ALIGN, RowHeader, SLOT_ALIGN, Share, UnitChoice, UnitRow, VALUE_BITS,
};
use crate::declare::{CStruct, number};
use crate::error::Phase;
use crate::quant::{GROUP, Scaling};
use crate::shape::Element;
use crate::terms::{Counter, Duty, LaneKind, Tag, UNIT_BYTES, UNIT_DATA};

/// The header `ep_layout.h`: constants, structs with checked sizes and offsets, and the address arithmetic of a
/// [`super::Layout`], for any C++14 compiler, with no system header. With a `window`, [what its shape
/// says](KernelWindow::OF_SHAPE) is constant: for layouts of that shape alone, and C++17.
pub fn c_header(window: Option<&KernelWindow>) -> String {
    let mut out = String::from(PROLOGUE);
    constants(&mut out);
    structs(&mut out, window);
    out.push_str(FUNCTIONS);
    out
}

fn structs(out: &mut String, window: Option<&KernelWindow>) {
    out.extend([
        OpHeader::declaration(),
        CountsHeader::declaration(),
        Note::declaration(),
        Share::declaration(),
        RowHeader::declaration(),
        Choice::declaration(),
        UnitRow::declaration(),
        UnitChoice::declaration(),
        window.map_or_else(KernelWindow::declaration, |window| window.fixed(&KernelWindow::OF_SHAPE)),
        KernelRings::declaration(),
    ]);
}

fn constants(out: &mut String) {
    let wide = [
        ("CELL_BYTES", CELL_BYTES),
        ("LINE_BYTES", LINE_BYTES),
        ("ROW_ALIGN", ROW_ALIGN),
        ("SLOT_ALIGN", SLOT_ALIGN),
        ("NO_BASE", NO_BASE),
        ("OPEN_ROOM", u64::from(OPEN_ROOM)),
        ("MASKED", MASKED),
        ("UNIT_BYTES", UNIT_BYTES),
        ("UNIT_DATA", UNIT_DATA),
        ("UNIT_TAGS", Tag::COUNT),
        ("UNIT_ERA", Tag::ERA),
    ];
    for (name, value) in wide {
        *out += &format!("#define EP_{name} {value}ull\n");
    }
    let small = [
        ("VALUE_BITS", VALUE_BITS),
        ("MAX_ALARM_SERIAL", u32::from(Alarm::MAX_SERIAL)),
        ("SCALE_GROUP", GROUP as u32),
        ("PIECES", PIECES),
        ("LANE_WATCH", LaneKind::Watch.index() as u32),
        ("LANE_CONTROL", LaneKind::Control.index() as u32),
        ("LANE_LOW_ROWS", LaneKind::LowRows.index() as u32),
        ("LANE_LOW_DONE", LaneKind::LowDone.index() as u32),
    ];
    for (name, value) in small {
        *out += &format!("#define EP_{name} {value}u\n");
    }
    for element in Element::ALL {
        *out += &format!("#define EP_ELEMENT_{} {}u\n", element_name(element), element.number());
    }
    named(out, "EP_LOW", &LowKind::ALL, |kind| kind as u32);
    named(out, "EP_KIND", &Kind::ALL, |kind| kind as u32);
    named(out, "EP_COUNTER", &Counter::ALL, |counter| counter.slot() as u32);
    named(out, "EP_DUTY", &Duty::ALL, Duty::number);
    named(out, "EP_PHASE", &Phase::ALL, |phase| phase as u32);
}

/// A `#define` for each of `all`, under the name that it has in Rust.
fn named<T: Copy + Debug>(out: &mut String, prefix: &str, all: &[T], value: fn(T) -> u32) {
    out.extend(all.iter().map(|&one| number(prefix, &format!("{one:?}"), value(one), "")));
}

const fn element_name(element: Element) -> &'static str {
    match element {
        Element::Bf16 => "BF16",
        Element::Fp8(Scaling::Exact) => "FP8",
        Element::Fp8(Scaling::PowerOfTwo) => "FP8_POWER_OF_TWO",
        Element::Fp8(Scaling::Ue8m0) => "FP8_UE8M0",
        Element::Int8 => "INT8",
    }
}

const PROLOGUE: &str = include_str!("c_header/prologue.h");
const FUNCTIONS: &str = include_str!("c_header/functions.h");
