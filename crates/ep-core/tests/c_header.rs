//! The C header is what the Rust layout says: the committed file is current, and a C++ compiler computes the same
//! addresses as [`Layout`].

use std::env;
use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::process::Command;

use ep_core::layout::{Alarm, Arrival, KernelRings, KernelWindow, LowKind, c_header, generation_of, stamp, value_in};
use ep_core::plan::channel_tokens;
use ep_core::port::{Cell, Counter, LaneKind, Offset};
use ep_core::{Layout, Node, Phase, Rank, Rings};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use zerocopy::IntoBytes;

mod common;

const COMMITTED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/include/ep_layout.h");

#[test]
fn the_committed_header_is_current() {
    let written = c_header();
    if env::var_os("EP_BLESS").is_some_and(|value| value == "1") {
        fs::write(COMMITTED, &written).expect("the header can be written");
    }
    let committed = fs::read_to_string(COMMITTED).unwrap_or_default();
    assert!(
        committed == written,
        "{COMMITTED} is stale: renew it with EP_BLESS=1 cargo test -p ep-core --test c_header"
    );
}

/// One layout and one value of every argument.
#[derive(Clone, Debug)]
struct Case {
    layout: Layout,
    rings: Rings,
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
    let drawn = common::layouts().prop_flat_map(|layout| (common::call_rings(&layout), Just(layout)));
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
            peer: Rank(below(15, 16384)),
        };
        Case {
            rings,
            generation: raw[0] as u16,
            op: u64::from(raw[1]),
            writer: below(2, layout.topology().ranks()),
            lane: below(3, LaneKind::count(layout.tracks()) as u32) as usize,
            counter: Counter::ALL[below(4, Counter::ALL.len() as u32) as usize],
            channel,
            node,
            track,
            slot: below(6, layout.geometry(&rings, track).slots),
            staging_slot: below(7, layout.staging_slots(&rings, track)),
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
    let arrival = Arrival { op, kind, rows: case.count as u32 % 64 };
    vec![
        layout.cell(cell, case.generation).0,
        layout.counts(op, writer).offset.0,
        layout.counts(op, writer).len,
        u64::from(layout.near_track(Node(case.node), case.channel)),
        u64::from(layout.far_track(case.channel)),
        u64::from(layout.is_far(case.track)),
        layout.note(op, writer).offset.0,
        layout.note(op, writer).len,
        layout.note_outbox(writer).offset.0,
        layout.ring_slot(writer, rings, case.track, case.slot).offset.0,
        layout.ring_slot(writer, rings, case.track, case.slot).len,
        layout.row().wire_bytes(),
        u64::from(layout.staging_slots(rings, case.track)),
        layout.staging_slot(writer, rings, case.track, case.staging_slot).offset.0,
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
        layout.low_row(op, writer, case.count as u32 % 64).offset.0,
        layout.low_result(op, case.count as u32 % 64, 0).offset.0,
        layout.low_result(op, 0, 0).len - layout.row().results().payload_stride(),
        layout.low_staging(case.staging_slot).offset.0,
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
    ]
}

/// The same in C++. The structs travel as the bytes of their Rust twins, as a backend passes them.
fn program(cases: &[Case]) -> String {
    let mut text = String::from(PROGRAM_HEAD);
    for case in cases {
        let list = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte},")).collect::<String>();
        let window = list(KernelWindow::from(&case.layout).as_bytes());
        let rings = list(KernelRings::from(&case.rings).as_bytes());
        let Case {
            generation, op, writer, lane, channel, node, track, slot, staging_slot, turn, base, rows, row, ..
        } = case;
        let Case { expert, tokens, count, alarm, .. } = case;
        let counter = case.counter.slot();
        let Alarm { serial, verdict, phase, peer, .. } = *alarm;
        writeln!(
            text,
            "{{{{{window}}},{{{rings}}},{generation}u,{op}ull,{writer}u,{lane}u,{counter}u,{channel}u,{node}u,{track}u,{slot}u,\
             {staging_slot}u,{turn}u,{base}ull,{rows}u,{row}u,{expert}u,{tokens}u,{count}ull,\
             {serial}u,{}u,{}u,{peer}u}},",
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
        out(ep_is_far(w, c.track) ? w.far_wire_bytes
                                  : w.wire_bytes > w.result_wire_bytes ? w.wire_bytes : w.result_wire_bytes);
        out(w.wire_bytes);
        out(ep_staging_slots(w, r, c.track));
        out(ep_staging_slot(w, r, c.writer, c.track, c.staging_slot));
        out(ep_pull_slot(w, ep_near_track(w, c.node, c.channel), c.writer, c.turn));
        out(w.arena);
        out(w.arena_bytes);
        out(w.window_bytes);
        out(ep_block_codes(w, c.base, c.row));
        out(w.scales_offset);
        out(ep_block_scales(w, c.base, c.rows, c.row));
        out(w.scales_stride);
        out(ep_block_header(w, c.base, c.rows, c.row));
        out(w.header_bytes);
        out(ep_block_bytes(w, c.rows));
        out(w.payload_stride);
        out(w.scales_bytes);
        out(ep_results_payload(w, c.base, c.row));
        out(w.result_stride);
        out(ep_results_header(w, c.base, c.rows, c.row));
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
        const ep_u32 few = (ep_u32)(c.count % 64);
        out(ep_low_row(w, c.op, c.writer, few));
        out(ep_low_result(w, c.op, few, 0));
        out(w.low_result_header_bytes);
        out(ep_low_staging(w, c.staging_slot));
        const ep_u64 arrival = ep_arrival(w, c.op, kind, few);
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
    }
}
"#;

/// The first C++ compiler that runs: `$CXX`, or what systems usually have.
fn compiler() -> Option<String> {
    let named = env::var("CXX").ok();
    let usual = ["g++", "clang++", "c++"].map(String::from);
    named.into_iter().chain(usual).find(|name| Command::new(name).arg("--version").output().is_ok())
}

/// Compiles and runs the program, and returns the numbers it printed.
fn printed(compiler: &str, folder: &Path, cases: &[Case]) -> Vec<u64> {
    let (source, binary) = (folder.join("addresses.cpp"), folder.join("addresses"));
    fs::write(folder.join("ep_layout.h"), c_header()).expect("the header can be written");
    fs::write(&source, program(cases)).expect("the program can be written");
    let flags = ["-std=c++17", "-Wall", "-Wextra", "-Wpedantic", "-Wno-long-long", "-Werror", "-nostdinc", "-o"];
    let compiled = Command::new(compiler).args(flags).arg(&binary).arg(&source).output().expect("the compiler runs");
    assert!(compiled.status.success(), "{compiler}: {}", String::from_utf8_lossy(&compiled.stderr));
    let run = Command::new(&binary).output().expect("the program runs");
    assert!(run.status.success(), "the program failed: {}", run.status);
    let text = String::from_utf8(run.stdout).expect("numbers are text");
    text.lines().map(|line| line.parse().expect("a number a line")).collect()
}

#[test]
fn a_kernel_computes_the_addresses_of_the_layout() {
    let Some(compiler) = compiler() else {
        assert!(env::var_os("CI").is_none(), "no C++ compiler: install g++ or clang++, or set CXX");
        eprintln!("NOT RUN: a_kernel_computes_the_addresses_of_the_layout needs a C++ compiler (g++, clang++ or $CXX)");
        return;
    };
    let mut runner = TestRunner::deterministic();
    let draw = |_| cases().new_tree(&mut runner).expect("cases can be drawn").current();
    let cases: Vec<_> = (0..500).map(draw).collect();
    let folder = tempfile::tempdir().expect("a temporary folder");
    let numbers = printed(&compiler, folder.path(), &cases);
    let per_case = expected(&cases[0]).len();
    assert_eq!(numbers.len(), cases.len() * per_case);
    for (case, numbers) in cases.iter().zip(numbers.chunks(per_case)) {
        assert_eq!(numbers, expected(case), "{case:?}");
    }
}
