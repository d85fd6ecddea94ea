//! A core that waits for a rank which does all that it owes, and goes.

use ep_ascend::args::{Launch, Line, Plant};
use ep_ascend::twin::{Library, Machine, Reach};
use ep_core::device::{Local, RankView, Report, Status};
use ep_core::layout::KernelWindow;
use ep_core::{Layout, Rank, Settings, Shape, Topology};

use crate::FEW;

/// One core that waits for the counts of rank 1.
const WAITS: &str = "
#include \"ep_npu.h\"
extern \"C\" __global__ __aicore__ void waits(GM_ADDR args) {
    TPipe pipe;
    TBuf<TPosition::VECCALC> common;
    pipe.InitBuffer(common, EP_COMMON_BYTES);
    EpLaunch launch;
    ep_load_struct(launch, (ep_u64)args);
    EpCore c;
    if (!ep_begin(c, launch, common.Get<uint64_t>())) return;
    while (ep_peek(c, 1, EP_LANE_CONTROL, EP_COUNTER_COUNTS) < c.op)
        if (ep_vain(c, 1, EP_LANE_CONTROL, EP_PHASE_COUNTS, 0, c.op)) break;
    ep_landed(c);
}
";

/// The fault that shows here.
pub(crate) const PLANTED: Plant = Plant::GoneAtOnce;

/// What the core has said of its wait, where rank 1 goes after `turns` turns, with or without what it owed.
fn status(library: &Library, seed: u64, turns: u64, pays: bool, plant: u32) -> u32 {
    let topology = Topology::new(1, 2).expect("a topology");
    let shape = Shape::builder().experts(2).topk(1).hidden(16).max_tokens(4).build().expect("a shape");
    let settings = Settings::builder(&shape, &topology).low_latency(false).build().expect("settings");
    let layout = Layout::new(&shape, &topology, &settings).expect("a layout");
    let (w, mut machine) = (KernelWindow::from(&layout), Machine::new(library, seed, 1, 1).expect("a machine"));
    let window = machine.place(0, &vec![0u8; layout.window_bytes() as usize], Reach::Group).expect("a window");
    let mut local = vec![0u8; Local::bytes(2)];
    local[std::mem::offset_of!(Local, generation)] = 1;
    let mut place = |bytes: &[u8]| machine.place(0, bytes, Reach::Own).expect("memory");
    let r = RankView {
        w,
        windows: place(zerocopy::IntoBytes::as_bytes(&[window, window])),
        local: place(&local),
        report: place(zerocopy::IntoBytes::as_bytes(&[Report::default()])),
        first_op: 1,
        allowed: 1_000_000_000,
        generation: 1,
        ..RankView::default()
    };
    let lines = place(zerocopy::IntoBytes::as_bytes(&[Line::default()]));
    let launch = Launch { r, roles: FEW, nanos_per_tick: 20, plant, lines, ..Launch::default() };
    let args = machine.place(0, &[launch], Reach::ReadOnly).expect("memory");
    machine.launch(0, "waits", 1, args).expect("a kernel");
    let early = machine.run_until(turns, 0, 1).expect("no rule is broken");
    assert!(!early, "it waits");
    if pays {
        let cell = layout.cell(
            ep_core::port::Cell {
                writer: Rank(1),
                lane: ep_core::port::LaneKind::Control,
                counter: ep_core::port::Counter::Counts,
            },
            1,
        );
        machine.write(window + cell.0, &[ep_core::layout::stamp(1, 1)]).expect("a cell");
    }
    machine.write(r.local + Local::gone(Rank(1)) as u64, &[1u32]).expect("a word");
    machine.run(100_000_000).expect("no rule is broken");
    machine.read::<Line>(lines, 1).expect("a line")[0].status
}

/// Whenever it goes: what it did before is seen, and what it did not do is not waited for.
#[test]
fn a_rank_that_goes_is_missed_only_for_what_it_owes() {
    let mut sources = ep_ascend::sources().to_vec();
    sources.push(("waits.cpp", WAITS));
    let library =
        Library::build(&ep_ascend::headers(), &sources, &["EP_TEST"]).unwrap_or_else(|error| panic!("{error}"));
    let mut is_caught = false;
    for seed in 1..=60 {
        let turns = 300 + 7 * seed;
        assert_eq!(status(&library, seed, turns, true, 0), 0, "seed {seed}: it is missed");
        assert_eq!(status(&library, seed, turns, false, 0), Status::Gone as u32, "seed {seed}: it is waited for");
        is_caught |= status(&library, seed, turns, true, PLANTED as u32) == Status::Gone as u32;
    }
    assert!(is_caught, "{PLANTED:?} is not caught");
}
