//! The layout for kernels: writes `ep_layout.h`.
//!
//! Sizes, offsets and field types of the structs are taken from the Rust types, and constants from the Rust constants;
//! the address arithmetic of [`super::Layout`] is the only thing that stands here a second time, and a test compares
//! the two on random layouts.

use super::kernel::{KernelRings, KernelWindow};
use super::{
    CELL_BYTES, Choice, CountsHeader, Kind, LINE_BYTES, LowKind, MASKED, NO_BASE, Note, OpHeader, ROW_ALIGN, RowHeader,
    SLOT_ALIGN, Share, VALUE_BITS,
};
use crate::error::Phase;
use crate::port::{Counter, LaneKind};
use crate::quant::{GROUP, Scaling};
use crate::shape::Element;

/// The header `ep_layout.h`: constants, structs with checked sizes and offsets, and the address arithmetic of a
/// [`super::Layout`], for any C++14 compiler, with no system header.
pub fn c_header() -> String {
    let mut out = String::from(PROLOGUE);
    constants(&mut out);
    structs(&mut out);
    out.push_str(FUNCTIONS);
    out
}

/// A Rust field type and how C++ declares a field of it.
trait CType {
    fn declare(field: &str) -> String;
}

macro_rules! c_types {
    ($($rust:ty => $c:literal),* $(,)?) => {
        $(impl CType for $rust {
            fn declare(field: &str) -> String {
                format!("{} {field}", $c)
            }
        })*
    };
}

c_types!(u32 => "ep_u32", i32 => "ep_i32", u64 => "ep_u64", f32 => "ep_f32", OpHeader => "EpOpHeader");

impl<T: CType, const N: usize> CType for [T; N] {
    fn declare(field: &str) -> String {
        T::declare(&format!("{field}[{N}]"))
    }
}

/// The declaration of the field that `_get` reads.
fn declaration<S, T: CType>(field: &str, _get: fn(&S) -> &T) -> String {
    T::declare(field)
}

/// Appends a struct and assertions of its size and offsets.
macro_rules! c_struct {
    ($out:expr, $says:literal, $name:literal, $type:ident { $($field:ident),* $(,)? }) => {{
        let (mut fields, mut checks) = (String::new(), String::new());
        $(
            fields += &format!("    {};\n", declaration(stringify!($field), |s: &$type| &s.$field));
            checks += &format!(
                "static_assert(__builtin_offsetof({}, {}) == {}, \"layout\");\n",
                $name, stringify!($field), std::mem::offset_of!($type, $field),
            );
        )*
        // Completeness: this does not compile when a field is left out.
        let _ = |whole: $type| { let $type { $($field: _),* } = whole; };
        *$out += &format!(
            "\n/* {} */\nstruct {name} {{\n{fields}}};\nstatic_assert(sizeof({name}) == {}, \"layout\");\n{checks}",
            $says, size_of::<$type>(), name = $name,
        );
    }};
}

fn structs(out: &mut String) {
    c_struct!(
        out,
        "Opens every message and every ring of an operation.",
        "EpOpHeader",
        OpHeader { op, kind, rows, settings, first, reserved }
    );
    c_struct!(
        out,
        "Opens a counts message; ep_u32 rows[ranks] and ep_u32 tokens[experts] follow.",
        "EpCountsHeader",
        CountsHeader { opening, tokens, reserved }
    );
    c_struct!(out, "A grant of the receiver's arena, or an offer of rows to pull.", "EpNote", Note { opening, base });
    c_struct!(
        out,
        "Follows the header slot of a ring between nodes, once for each rank of the receiving node.",
        "EpShare",
        Share { first, rows }
    );
    c_struct!(
        out,
        "Opens a row; EpChoice[topk] follow.",
        "EpRowHeader",
        RowHeader { source_rank, source_token, position, op }
    );
    c_struct!(
        out,
        "One of a row's choices; expert is -1 where it is not the receiver's.",
        "EpChoice",
        Choice { expert, weight }
    );
    c_struct!(
        out,
        "How a window is cut: offsets, sizes and strides in bytes, parts in row slots.",
        "EpWindow",
        KernelWindow {
            cells,
            counts,
            notes,
            notes_outbox,
            near_rings,
            far_rings,
            near_staging,
            far_staging,
            pulls,
            low_rows,
            low_results,
            low_staging,
            arena,
            arena_bytes,
            window_bytes,
            counts_bytes,
            note_bytes,
            header_bytes,
            payload_bytes,
            payload_stride,
            scales_offset,
            scales_bytes,
            scales_stride,
            wire_bytes,
            result_bytes,
            result_stride,
            result_wire_bytes,
            slot_bytes,
            far_wire_bytes,
            far_slot_bytes,
            low_row_bytes,
            low_result_bytes,
            low_staging_bytes,
            low_result_header_bytes,
            near_part_slots,
            far_part_slots,
            near_staging_part_slots,
            far_staging_part_slots,
            nodes,
            ranks,
            ranks_per_node,
            experts,
            local_experts,
            topk,
            hidden,
            max_tokens,
            low_staging_slots,
            element,
            scale_groups,
            channels,
            pull_depth,
            tracks,
        }
    );
    c_struct!(
        out,
        "The rings of a call; all but channels in rows.",
        "EpRings",
        KernelRings { channels, slots, chunk, credit, far_slots, far_chunk, far_credit, reserved }
    );
}

fn constants(out: &mut String) {
    let wide = [
        ("CELL_BYTES", CELL_BYTES),
        ("LINE_BYTES", LINE_BYTES),
        ("ROW_ALIGN", ROW_ALIGN),
        ("SLOT_ALIGN", SLOT_ALIGN),
        ("NO_BASE", NO_BASE),
        ("MASKED", MASKED),
    ];
    for (name, value) in wide {
        *out += &format!("#define EP_{name} {value}ull\n");
    }
    let mut small = vec![("VALUE_BITS", VALUE_BITS), ("MAX_ALARM_SERIAL", u32::from(super::Alarm::MAX_SERIAL))];
    small.push(("SCALE_GROUP", GROUP as u32));
    small.extend(Element::ALL.map(|element| (element_name(element), element.number())));
    small.extend(LOW_KINDS.map(|(name, kind)| (name, kind as u32)));
    small.extend(KINDS.map(|kind| (kind_name(kind), kind as u32)));
    small.extend(Counter::ALL.map(|counter| (counter_name(counter), counter.slot() as u32)));
    small.extend(PHASES.map(|phase| (phase_name(phase), phase as u32)));
    small.extend(
        [
            ("LANE_WATCH", LaneKind::Watch),
            ("LANE_CONTROL", LaneKind::Control),
            ("LANE_LOW_ROWS", LaneKind::LowRows),
            ("LANE_LOW_DONE", LaneKind::LowDone),
        ]
        .map(|(name, lane)| (name, lane.index() as u32)),
    );
    for (name, value) in small {
        *out += &format!("#define EP_{name} {value}u\n");
    }
}

const fn element_name(element: Element) -> &'static str {
    match element {
        Element::Bf16 => "ELEMENT_BF16",
        Element::Fp8(Scaling::Exact) => "ELEMENT_FP8",
        Element::Fp8(Scaling::PowerOfTwo) => "ELEMENT_FP8_POWER_OF_TWO",
        Element::Fp8(Scaling::Ue8m0) => "ELEMENT_FP8_UE8M0",
    }
}

const LOW_KINDS: [(&str, LowKind); 3] =
    [("LOW_DISPATCH", LowKind::Dispatch), ("LOW_PER_CHOICE", LowKind::PerChoice), ("LOW_PER_RANK", LowKind::PerRank)];

const KINDS: [Kind; 4] = [Kind::Dispatch, Kind::CachedDispatch, Kind::Combine, Kind::MembershipDispatch];

const fn kind_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Dispatch => "KIND_DISPATCH",
        Kind::CachedDispatch => "KIND_CACHED_DISPATCH",
        Kind::Combine => "KIND_COMBINE",
        Kind::MembershipDispatch => "KIND_MEMBERSHIP_DISPATCH",
    }
}

const fn counter_name(counter: Counter) -> &'static str {
    match counter {
        Counter::Alarm => "COUNTER_ALARM",
        Counter::Opening => "COUNTER_OPENING",
        Counter::Waiting => "COUNTER_WAITING",
        Counter::Counts => "COUNTER_COUNTS",
        Counter::Note => "COUNTER_NOTE",
        Counter::Done => "COUNTER_DONE",
        Counter::Tail => "COUNTER_TAIL",
        Counter::Placed => "COUNTER_PLACED",
        Counter::Head => "COUNTER_HEAD",
        Counter::Even => "COUNTER_EVEN",
        Counter::Odd => "COUNTER_ODD",
        Counter::Received => "COUNTER_RECEIVED",
        Counter::Probe => "COUNTER_PROBE",
    }
}

const PHASES: [Phase; 9] = [
    Phase::Bank,
    Phase::Counts,
    Phase::Note,
    Phase::Rows,
    Phase::Credit,
    Phase::Pulled,
    Phase::Alarm,
    Phase::Recovery,
    Phase::Probe,
];

const fn phase_name(phase: Phase) -> &'static str {
    match phase {
        Phase::Bank => "PHASE_BANK",
        Phase::Counts => "PHASE_COUNTS",
        Phase::Note => "PHASE_NOTE",
        Phase::Rows => "PHASE_ROWS",
        Phase::Credit => "PHASE_CREDIT",
        Phase::Pulled => "PHASE_PULLED",
        Phase::Alarm => "PHASE_ALARM",
        Phase::Recovery => "PHASE_RECOVERY",
        Phase::Probe => "PHASE_PROBE",
    }
}

const PROLOGUE: &str = include_str!("c_header/prologue.h");
const FUNCTIONS: &str = include_str!("c_header/functions.h");
