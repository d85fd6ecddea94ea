//! The C headers are what the Rust code says: the committed files are current, and a C++ compiler computes the same
//! addresses as [`Layout`].

use std::env;
use std::fmt::Write;
use std::fs;

use ep_core::device::{LAYOUT_HEADER, header_of_shape, headers};
use ep_core::layout::{
    Alarm, Arrival, KernelRings, KernelWindow, Kind, LowKind, PIECES, generation_of, low_stamp, stamp, value_in,
};
use ep_core::plan::channel_tokens;
use ep_core::port::{Cell, Counter, LaneKind, Offset, Span};
use ep_core::{Layout, Node, Phase, Rank, Rings};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use zerocopy::IntoBytes;

use crate::common::cpp;
use crate::layout::region;

#[test]
fn the_committed_headers_are_current() {
    for (name, written) in headers() {
        let path = format!("{}/include/{name}", env!("CARGO_MANIFEST_DIR"));
        if env::var_os("EP_BLESS").is_some_and(|value| value == "1") {
            fs::write(&path, &written).expect("the header can be written");
        }
        let committed = fs::read_to_string(&path).unwrap_or_default();
        let renewed = "EP_BLESS=1 cargo test -p ep-core --test core c_header";
        assert!(committed == written, "{path} is stale: renew it with {renewed}");
    }
}

/// One layout and one value of every argument.
#[derive(Clone, Debug)]
struct Case {
    layout: Layout,
    rings: Rings,
    kind: Kind,
    generation: u16,
    op: u64,
    writer: u32,
    lane: usize,
    counter: Counter,
    channel: u32,
    node: u32,
    track: u16,
    slot: u32,
    staging_slot: u32,
    turn: u32,
    base: u64,
    rows: u32,
    row: u32,
    expert: u32,
    tokens: u32,
    count: u64,
    alarm: Alarm,
}

/// Cases over `layout`; the raw numbers are brought into the range of each argument.
fn cases() -> impl Strategy<Value = Case> {
    let raw = proptest::collection::vec(any::<u32>(), 16);
    let layouts = (crate::common::layouts(), any::<bool>());
    let layouts =
        layouts.prop_map(|(layout, kernels)| if kernels { layout.with_kernels().expect("room") } else { layout });
    let drawn = layouts.prop_flat_map(|layout| (crate::common::call_rings(&layout), Just(layout)));
    (drawn, raw).prop_map(|((rings, layout), raw)| {
        let below = |at: usize, limit: u32| raw[at] % limit;
        let rows = 1 + below(11, 5000);
        let channel = below(5, rings.channels);
        let node = below(8, layout.topology().nodes());
        let far = layout.topology().nodes() > 1 && raw[7] & 1 == 1;
        let track = if far { layout.far_track(channel) } else { layout.near_track(Node(node), channel) };
        let alarm = Alarm {
            serial: 1 + (raw[12] as u16) % Alarm::MAX_SERIAL,
            verdict: raw[13] & 1 == 1,
            op: Alarm::op_bits(u64::from(raw[1])),
            phase: [Phase::Bank, Phase::Rows, Phase::Recovery, Phase::Probe][below(14, 4) as usize],
            in_circle: raw[13] & 2 == 2,
            peer: Rank(below(15, 16384)),
        };
        Case {
            rings,
            kind: Kind::ALL[below(12, 4) as usize],
            generation: raw[0] as u16,
            op: u64::from(raw[1]),
            writer: below(2, layout.topology().ranks()),
            lane: below(3, LaneKind::count(layout.tracks()) as u32) as usize,
            counter: Counter::ALL[below(4, Counter::ALL.len() as u32) as usize],
            channel,
            node,
            track,
            slot: below(6, layout.geometry(&rings, track).slots),
            // Where rows are pulled there is none near.
            staging_slot: below(7, layout.staging_slots(&rings, track).max(1)),
            turn: raw[8],
            base: u64::from(raw[9]) & !63,
            rows,
            row: below(10, rows),
            expert: below(15, layout.shape().experts()),
            tokens: below(14, 1 << 26),
            count: u64::from(raw[13]) << 15 | u64::from(raw[12]),
            alarm,
            layout,
        }
    })
}

/// Where a slot lies whose place is `slot` when slots are as far apart as the longest: between nodes those of a part are closer, parts are not.
fn closer(case: &Case, region: Span, slot: Span) -> u64 {
    let layout = &case.layout;
    if !layout.is_far(case.track) {
        return slot.offset.0;
    }
    let longest = Kind::ALL.map(|kind| layout.far_slot_bytes(kind)).into_iter().max().expect("kinds");
    let (part, at) = (region.len / u64::from(layout.topology().nodes()), slot.offset.0 - region.offset.0);
    region.offset.0 + at / part * part + at % part / longest * layout.far_slot_bytes(case.kind)
}

/// What Rust computes, in the order in which the C++ program prints.
fn expected(case: &Case) -> Vec<u64> {
    let Case { layout, rings, op, .. } = case;
    let (op, writer) = (*op, Rank(case.writer));
    let cell = Cell::new(writer, LaneKind::from_index(case.lane), case.counter);
    let block = layout.row().block(Offset(case.base), case.rows);
    let results = layout.row().results().block(Offset(case.base), case.rows);
    let bits = stamp(case.generation, case.count);
    let tokens = channel_tokens(case.tokens, rings.channels, case.channel);
    let alarm = case.alarm;
    let kind = [LowKind::Dispatch, LowKind::PerChoice, LowKind::PerRank][op as usize % 3];
    let few = (case.count % u64::from(layout.shape().max_tokens())) as u32;
    let arrival = Arrival { op, kind, rows: few };
    let (laid, returned) = (layout.outbox(rings, case.channel), layout.outbox_to(rings, writer, case.channel));
    let (nodes, of_node) = (layout.topology().nodes(), layout.topology().ranks_per_node());
    let beyond = (nodes > 1).then(|| Rank((writer.0 + of_node) % layout.topology().ranks()));
    let (laid_slot, returned_slot) = (case.turn % laid.slots(), case.turn % returned.slots());
    let mut all = vec![
        u64::from(laid.slots()),
        laid.codes(laid_slot).offset.0,
        laid.codes(laid_slot).len,
        laid.scales(laid_slot).offset.0,
        laid.scales(laid_slot).len,
        laid.head(laid_slot).offset.0,
        laid.head(laid_slot).len,
        u64::from(returned.slots()),
        returned.codes(returned_slot).offset.0,
        returned.codes(returned_slot).len,
        returned.head(returned_slot).offset.0,
        returned.head(returned_slot).len,
        layout.cell(cell, case.generation).0,
        layout.counts(op, writer).offset.0,
        layout.counts(op, writer).len,
        u64::from(layout.near_track(Node(case.node), case.channel)),
        u64::from(layout.far_track(case.channel)),
        u64::from(layout.is_far(case.track)),
        layout.note(op, writer).offset.0,
        layout.note(op, writer).len,
        layout.note_outbox(writer).offset.0,
        closer(case, region(layout, "far rings"), layout.ring_slot(writer, rings, case.track, case.slot)),
        layout.far_slot_bytes(case.kind),
        layout.row().slot_room(),
        layout.row().wire_bytes(),
        u64::from(layout.staging_slots(rings, case.track)),
        closer(case, region(layout, "far staging"), layout.staging_slot(writer, rings, case.track, case.staging_slot)),
        layout.pull_slot(layout.near_track(Node(case.node), case.channel), writer, case.turn).offset.0,
        layout.arena().offset.0,
        layout.arena().len,
        layout.window_bytes(),
        block.codes(case.row).offset.0,
        block.codes(case.row).len,
        block.scales(case.row).offset.0,
        block.scales(case.row).len,
        block.header(case.row).offset.0,
        block.header(case.row).len,
        block.span().len,
        layout.row().payload_stride(),
        layout.row().scales_bytes(),
        results.codes(case.row).offset.0,
        results.codes(case.row).len,
        results.header(case.row).offset.0,
        results.span().len,
        u64::from(layout.rank_of_expert(case.expert).0),
        u64::from(tokens.start),
        u64::from(tokens.end),
        bits,
        value_in(case.generation, bits),
        value_in(case.generation.wrapping_add(1), bits),
        u64::from(generation_of(bits)),
        layout.low_row(op, writer, few).offset.0,
        layout.low_result(op, writer, few, 1).offset.0,
        low_stamp(case.generation, op).into(),
        layout.low_part(op, writer).offset.0,
        layout.low_part(op, writer).len,
        layout.low_result(op, writer, 0, 0).len - layout.row().results().payload_stride(),
        layout.low_staging(case.staging_slot).offset.0,
        layout.piece_cell(case.generation, writer, case.count as u32 % PIECES).0,
        layout.low_cell(case.generation, op, writer, few).0,
        layout.low_head(op, writer, few).offset.0,
        layout.low_head(op, writer, 0).len,
        beyond.map_or(0, |peer| layout.low_far(writer, peer).offset.0),
        beyond.map_or(0, |peer| layout.low_far_heads(writer, peer).offset.0),
        layout.low_unit_head(op, writer).0,
        layout.low_unit_counts(op, writer).0,
        layout.low_unit_header(op, writer, few).0,
        layout.low_unit_row(op, writer, few).0,
        layout.low_unit_result(op, writer, few, 1).0,
        arrival.encode(layout.shape()),
        Arrival::due(op + 1, layout.shape()),
        arrival.op,
        arrival.kind as u64,
        arrival.rows.into(),
        alarm.encode(),
        u64::from(alarm.serial),
        u64::from(alarm.verdict),
        u64::from(alarm.op),
        alarm.phase as u64,
        u64::from(alarm.peer.0),
    ];
    for at in 0..4 {
        let (op_of, serial, verdict, in_circle) = (Alarm::op_bits(op + at), Alarm::MAX_SERIAL, true, true);
        let left = Alarm { serial, verdict, in_circle, op: op_of, ..alarm };
        let [mine, others] = [alarm.peer, Rank(alarm.peer.0 + 1)];
        let ends = [alarm.leaves(mine), alarm.ends(op + at, mine), left.ends(op + 2, mine), left.ends(op + 2, others)];
        all.push(left.encode());
        all.extend(ends.map(u64::from));
    }
    all
}

/// The same in C++. The structs travel as the bytes of their Rust twins, as a backend passes them.
fn program(cases: &[Case]) -> String {
    let mut text = String::from(PROGRAM_HEAD);
    for case in cases {
        let list = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte},")).collect::<String>();
        let window = list(KernelWindow::from(&case.layout).as_bytes());
        let rings = list(KernelRings::new(&case.layout, case.kind, &case.rings).as_bytes());
        let Case {
            generation, op, writer, lane, channel, node, track, slot, staging_slot, turn, base, rows, row, ..
        } = case;
        let Case { expert, tokens, count, alarm, .. } = case;
        let counter = case.counter.slot();
        let Alarm { serial, verdict, phase, in_circle, peer, .. } = *alarm;
        let whom = peer.0 | u32::from(in_circle) << 15;
        writeln!(
            text,
            "{{{{{window}}},{{{rings}}},{generation}u,{op}ull,{writer}u,{lane}u,{counter}u,{channel}u,{node}u,{track}u,{slot}u,\
             {staging_slot}u,{turn}u,{base}ull,{rows}u,{row}u,{expert}u,{tokens}u,{count}ull,\
             {serial}u,{}u,{}u,{whom}u}},",
            u32::from(verdict),
            phase as u32,
        )
        .expect("writing to a string cannot fail");
    }
    text + PROGRAM_TAIL
}

const PROGRAM_HEAD: &str = r#"#include "ep_layout.h"
extern "C" int printf(const char*, ...);
struct Case {
    unsigned char window[sizeof(EpWindow)], rings[sizeof(EpRings)];
    ep_u32 generation; ep_u64 op; ep_u32 writer, lane, counter, channel, node, track, slot, staging_slot, turn;
    ep_u64 base; ep_u32 rows, row, expert, tokens; ep_u64 count; ep_u32 serial, verdict, phase, peer;
};
static const Case cases[] = {
"#;

const PROGRAM_TAIL: &str = r#"};
static void out(ep_u64 value) { printf("%llu\n", value); }
int main() {
    for (const Case& c : cases) {
        EpWindow w;
        EpRings r;
        __builtin_memcpy(&w, c.window, sizeof w);
        __builtin_memcpy(&r, c.rings, sizeof r);
        const EpOutbox laid = ep_outbox(w, r, c.channel), returned = ep_outbox_to(w, r, c.writer, c.channel);
        const ep_u32 laid_slot = c.turn % laid.slots, returned_slot = c.turn % returned.slots;
        out(laid.slots);
        out(ep_outbox_codes(laid, laid_slot));
        out(laid.codes_step);
        out(ep_outbox_scales(laid, laid_slot));
        out(laid.scales_step);
        out(ep_outbox_head(laid, laid_slot));
        out(laid.head_bytes);
        out(returned.slots);
        out(ep_outbox_codes(returned, returned_slot));
        out(returned.codes_step);
        out(ep_outbox_head(returned, returned_slot));
        out(returned.head_bytes + (returned.scales | returned.scales_step));
        out(ep_cell(w, c.generation, c.writer, c.lane, c.counter));
        out(ep_counts(w, c.op, c.writer));
        out(w.counts_bytes);
        out(ep_near_track(w, c.node, c.channel));
        out(ep_far_track(w, c.channel));
        out(ep_is_far(w, c.track));
        out(ep_note(w, c.op, c.writer));
        out(w.note_bytes);
        out(ep_note_outbox(w, c.writer));
        out(ep_ring_slot(w, r, c.writer, c.track, c.slot));
        out(r.far_slot_bytes);
        out(w.wire_bytes > w.result_wire_bytes ? w.wire_bytes : w.result_wire_bytes);
        out(w.wire_bytes);
        out(ep_staging_slots(w, r, c.track));
        out(ep_staging_slot(w, r, c.writer, c.track, c.staging_slot));
        out(ep_pull_slot(w, ep_near_track(w, c.node, c.channel), c.writer, c.turn));
        out(w.arena);
        out(w.arena_bytes);
        out(w.window_bytes);
        out(ep_block_codes(w, c.base, c.rows, c.row));
        out(w.scales_offset);
        out(ep_block_scales(w, c.base, c.rows, c.row));
        out(w.scales_stride);
        out(ep_block_header(w, c.base, c.row));
        out(w.header_bytes);
        out(ep_block_bytes(w, c.rows));
        out(w.payload_stride);
        out(w.scales_bytes);
        out(ep_results_payload(w, c.base, c.rows, c.row));
        out(w.result_stride);
        out(ep_results_header(w, c.base, c.row));
        out(ep_results_bytes(w, c.rows));
        out(ep_rank_of_expert(w, c.expert));
        out(ep_channel_first(c.tokens, r.channels, c.channel));
        out(ep_channel_first(c.tokens, r.channels, c.channel + 1));
        const ep_u64 bits = ep_stamp(c.generation, c.count);
        out(bits);
        out(ep_value_in(c.generation, bits));
        out(ep_value_in((c.generation + 1) % 65536, bits));
        out(ep_generation_of(bits));
        const ep_u32 kind = c.op % 3 == 0 ? EP_LOW_DISPATCH : c.op % 3 == 1 ? EP_LOW_PER_CHOICE : EP_LOW_PER_RANK;
        const ep_u32 few = (ep_u32)(c.count % w.max_tokens);
        out(ep_low_row(w, c.op, c.writer, few));
        out(ep_low_result(w, c.op, c.writer, few, 1));
        out(ep_low_stamp(c.generation, c.op));
        out(ep_low_part(w, c.op, c.writer));
        out(w.low_part_slots * w.low_result_bytes);
        out(w.low_result_header_bytes);
        out(ep_low_staging(w, c.staging_slot));
        out(ep_piece_cell(w, c.generation, c.writer, (ep_u32)(c.count % EP_PIECES)));
        out(ep_low_cell(w, c.generation, c.op, c.writer, few));
        out(ep_low_head(w, c.op, c.writer, few));
        out(w.header_bytes);
        const ep_u32 beyond = (c.writer + w.ranks_per_node) % w.ranks;
        out(w.nodes > 1 ? ep_low_far(w, c.writer, beyond) : 0);
        out(w.nodes > 1 ? ep_low_far_heads(w, c.writer, beyond) : 0);
        const ep_u64 arrival = ep_arrival(w, c.op, kind, few);
        out(ep_low_unit_head(w, c.op, c.writer));
        out(ep_low_unit_counts(w, c.op, c.writer));
        out(ep_low_unit_header(w, c.op, c.writer, few));
        out(ep_low_unit_row(w, c.op, c.writer, few));
        out(ep_low_unit_result(w, c.op, c.writer, few, 1));
        out(arrival);
        out(ep_arrival(w, c.op + 1, 0, 0));
        out(ep_arrival_op(w, arrival));
        out(ep_arrival_kind(w, arrival));
        out(ep_arrival_rows(w, arrival));
        const ep_u64 alarm = ep_alarm(c.serial, c.verdict, c.op, c.phase, c.peer);
        out(alarm);
        out(ep_alarm_serial(alarm));
        out(ep_alarm_verdict(alarm));
        out(ep_alarm_op(alarm));
        out(ep_alarm_phase(alarm));
        out(ep_alarm_peer(alarm));
        for (ep_u32 at = 0; at < 4; ++at) {
            const ep_u64 left = ep_alarm_of_leaving(c.op + at, c.phase, c.peer & 0x7fff);
            out(left);
            out(ep_alarm_leaves(alarm, c.peer & 0x7fff));
            out(ep_alarm_ends(alarm, c.op + at, c.peer & 0x7fff));
            out(ep_alarm_ends(left, c.op + 2, c.peer & 0x7fff));
            out(ep_alarm_ends(left, c.op + 2, (c.peer & 0x7fff) + 1));
        }
    }
}
"#;

#[test]
fn a_kernel_computes_the_addresses_of_the_layout() {
    let mut runner = TestRunner::deterministic();
    let draw = |_| cases().new_tree(&mut runner).expect("cases can be drawn").current();
    let cases: Vec<_> = (0..500).map(draw).collect();
    let Some(numbers) = cpp::printed(&program(&cases)) else { return };
    let per_case = expected(&cases[0]).len();
    assert_eq!(numbers.len(), cases.len() * per_case);
    for (case, numbers) in cases.iter().zip(numbers.chunks(per_case)) {
        assert_eq!(numbers, expected(case), "{case:?}");
    }
}

/// What a shape says is constant there, and what a kernel is given of that is not read. Rings and arena are what they are.
#[test]
fn a_kernel_of_one_shape_computes_the_same() {
    let mut runner = TestRunner::deterministic();
    let poison: String = KernelWindow::OF_SHAPE.iter().map(|field| format!(" w.{field}_given = 0x5a5a5a5a;")).collect();
    for _ in 0..4 {
        let case = cases().new_tree(&mut runner).expect("cases can be drawn").current();
        let mut headers = headers();
        let window = KernelWindow::from(&case.layout);
        headers
            .iter_mut()
            .filter(|(name, _)| *name == LAYOUT_HEADER)
            .for_each(|(_, text)| *text = header_of_shape(&window));
        let given = "__builtin_memcpy(&w, c.window, sizeof w);";
        let text = program(std::slice::from_ref(&case));
        let Some(numbers) = cpp::printed_with(&text.replace(given, &format!("{given}{poison}")), &headers) else {
            return;
        };
        assert_eq!(numbers, expected(&case), "{case:?}");
    }
}
