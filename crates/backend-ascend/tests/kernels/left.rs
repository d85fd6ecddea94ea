//! A core that waits for a rank which does all that it owes, and goes.

use ep_ascend::Roles;
use ep_ascend::args::{Launch, Line, Plant};
use ep_ascend::twin::{Library, Machine, Reach};
use ep_core::device::{Local, RankView, Report, Status};
use ep_core::layout::{Alarm, KernelWindow, stamp};
use ep_core::port::{Cell, Counter, LaneKind};
use ep_core::{Layout, Phase, Rank, Settings, Shape, Topology};

use crate::FEW;

/// How a kernel begins, NAME: its memory, its launch, and the core that runs it.
const KERNEL: &str = "
#include \"ep_control.h\"
extern \"C\" __global__ __aicore__ void NAME(GM_ADDR args) {
    TPipe pipe;
    TBuf<TPosition::VECCALC> common;
    pipe.InitBuffer(common, EP_COMMON_BYTES);
    EpLaunch launch;
    ep_load_struct(launch, (ep_u64)args);
    EpCore c;
    if (!ep_begin(c, launch, common.Get<uint64_t>())) return;
";

/// One core that waits for the counts of rank 1.
const WAITS: &str = "
    while (ep_peek(c, 1, EP_LANE_CONTROL, EP_COUNTER_COUNTS) < c.op)
        if (ep_vain(c, 1, EP_LANE_CONTROL, EP_PHASE_COUNTS, 0, c.op)) break;
    ep_landed(c);
}
";

/// The fault that shows here.
pub(crate) const PLANTED: Plant = Plant::GoneAtOnce;

/// The same core, and a control core that looks at it when it has found out that rank 1 is gone.
const JUDGES: &str = "
    if (c.number == launch.roles.senders) {
        EpControl k = {};
        while (ep_fresh<uint32_t>(EP_LINE(c, 0, status)) == 0) ep_waited(c);
        ep_look_at_cores(c, k, false);
    } else {
        while (!ep_vain(c, 1, EP_LANE_CONTROL, EP_PHASE_COUNTS, 0, c.op)) {}
    }
    ep_landed(c);
}
";

/// One of three ranks on a machine of its own, whose windows are all the same memory.
struct Lonely {
    machine: Machine,
    layout: Layout,
    window: u64,
    launch: Launch,
}

impl Lonely {
    fn new(library: &Library, seed: u64, roles: Roles, plant: u32) -> Self {
        let topology = Topology::new(1, 3).expect("a topology");
        let shape = Shape::builder().experts(3).topk(1).hidden(16).max_tokens(4).build().expect("a shape");
        let settings = Settings::builder(&shape, &topology).low_latency(false).build().expect("settings");
        let layout = Layout::new(&shape, &topology, &settings).expect("a layout");
        let (w, mut machine) = (KernelWindow::from(&layout), Machine::new(library, seed, 1, 1).expect("a machine"));
        let window = machine.place(0, &vec![0u8; layout.window_bytes() as usize], Reach::Group).expect("a window");
        let mut local = vec![0u8; Local::bytes(3)];
        local[std::mem::offset_of!(Local, generation)] = 1;
        let mut place = |bytes: &[u8]| machine.place(0, bytes, Reach::Own).expect("memory");
        let r = RankView {
            w,
            windows: place(zerocopy::IntoBytes::as_bytes(&[window; 3])),
            local: place(&local),
            report: place(zerocopy::IntoBytes::as_bytes(&[Report::default()])),
            first_op: 1,
            allowed: 1_000_000_000,
            generation: 1,
            ..RankView::default()
        };
        let lines = place(zerocopy::IntoBytes::as_bytes(&vec![Line::default(); roles.cores() as usize][..]));
        let launch = Launch { r, roles, nanos_per_tick: 20, plant, lines, ..Launch::default() };
        Self { machine, layout, window, launch }
    }

    fn launch(&mut self, kernel: &str, cores: u32) {
        let args = self.machine.place(0, &[self.launch], Reach::ReadOnly).expect("memory");
        self.machine.launch(0, kernel, cores, args).expect("a kernel");
    }

    /// Rank 1 tells, and goes. What it tells comes first.
    fn goes(&mut self, told: Option<(LaneKind, Counter, u64)>) {
        if let Some((lane, counter, value)) = told {
            let cell = self.layout.cell(Cell { writer: Rank(1), lane, counter }, 1);
            self.machine.write(self.window + cell.0, &[stamp(1, value)]).expect("a cell");
        }
        self.machine.write(self.launch.r.local + Local::gone(Rank(1)) as u64, &[1u32]).expect("a word");
    }

    fn ends(&mut self) {
        self.machine.run(100_000_000).expect("no rule is broken");
    }
}

/// What the core has said of its wait, where rank 1 goes after `turns` turns, with or without what it owed.
fn status(library: &Library, seed: u64, turns: u64, pays: bool, plant: u32) -> u32 {
    let mut lonely = Lonely::new(library, seed, FEW, plant);
    lonely.launch("waits", 1);
    let early = lonely.machine.run_until(turns, 0, 1).expect("no rule is broken");
    assert!(!early, "it waits");
    lonely.goes(pays.then_some((LaneKind::Control, Counter::Counts, 1)));
    lonely.ends();
    lonely.machine.read::<Line>(lonely.launch.lines, 1).expect("a line")[0].status
}

fn with(name: &str, body: &str) -> Library {
    let text = KERNEL.replace("NAME", name) + body;
    let sources = [&ep_ascend::sources()[..], &[("kernel.cpp", &text)]].concat();
    Library::build(&ep_ascend::headers(), &sources, &["EP_TEST"]).unwrap_or_else(|error| panic!("{error}"))
}

/// Whenever it goes: what it did before is seen, and what it did not do is not waited for.
#[test]
fn a_rank_that_goes_is_missed_only_for_what_it_owes() {
    let library = with("waits", WAITS);
    let mut is_caught = false;
    for seed in 1..=60 {
        let turns = 300 + 7 * seed;
        assert_eq!(status(&library, seed, turns, true, 0), 0, "seed {seed}: it is missed");
        assert_eq!(status(&library, seed, turns, false, 0), Status::Gone as u32, "seed {seed}: it is waited for");
        is_caught |= status(&library, seed, turns, true, PLANTED as u32) == Status::Gone as u32;
    }
    assert!(is_caught, "{PLANTED:?} is not caught");
}

/// A core may find out that a rank is gone before the control core has heard why: whom that rank gave up is to blame, and not the rank.
#[test]
fn a_rank_that_says_why_it_goes_is_not_blamed() {
    let library = with("judges", JUDGES);
    let roles = Roles { senders: 1, coordinators: 1, forwarders: 0, forwarder_coordinators: 0, receivers: 0 };
    let verdict = Alarm { serial: 1, verdict: true, op: 1, phase: Phase::Rows, in_circle: false, peer: Rank(2) };
    let told = (LaneKind::Watch, Counter::Alarm, verdict.encode());
    for (told, status, culprit) in [(Some(told), Status::Aborted, 2), (None, Status::Gone, 1)] {
        for seed in 1..=10 {
            let mut lonely = Lonely::new(&library, seed, roles, 0);
            lonely.goes(told);
            lonely.launch("judges", 2);
            lonely.ends();
            let report = lonely.machine.read::<Report>(lonely.launch.r.report, 1).expect("a report")[0];
            assert_eq!((report.status, report.culprit), (status as u32, culprit), "seed {seed}: {report:?}");
        }
    }
}
