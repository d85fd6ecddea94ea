//! The timed scheduler: virtual time over the very same roles, deterministic to the nanosecond.
//!
//! The world has one time, which the agenda's events advance; each port has its own clock, which may be ahead of it: a
//! role that works ([`Port::charge`]) or posts runs its clock ahead. What it posts happens when the world has come there,
//! so that shared links serve all roles in the order of time. A role that waits is held until the world has come to its
//! clock, one that posts when it is ahead by more than the least latency. So a look that is no wait (`peek`) may miss
//! what arrived in the last such stretch. A role that has said that it only posts may be further ahead; what it puts takes its
//! place at the rank's port out at once, before what another role of the rank puts until the world has come there.
//!
//! Bytes are copied when a put or get is posted: no role that keeps the rules can tell, since it looks at them only after
//! a publish or flush. What travels is only the time. Everything between two ranks takes the same way and arrives in
//! the order of its posting, publishes behind the puts of their lane; but publishes, which are short, pass what other
//! lanes have queued at the ports. What breaks the rules is explore's to find.

mod agenda;
mod agreement;
mod cells;
mod crew;
mod elide;
mod events;
mod foresight;
mod lanes;
mod links;
mod locals;
mod mail;
mod model;
mod pairs;
mod partition;
mod port;
mod ports;
mod reset;
mod run;
mod schedule;
mod slab;
mod tickets;
mod units;
mod verbs;
mod waits;

use std::ops::Range;
use std::rc::Rc;
use std::task::Waker;

use ep_core::layout::Queues;
use ep_core::port::{Offset, Role};
use ep_core::trace::{Record, Verb};
use ep_core::{Fault, Layout, Nanos, Rank};
use rustc_hash::FxHashMap;

use self::agenda::Agenda;
use self::agreement::Attendance;
use self::cells::Cells;
pub(crate) use self::elide::{Elision, stand_in};
use self::events::Notice;
use self::lanes::Lanes;
use self::links::Sides;
use self::locals::Locals;
use self::mail::{Bag, Matter};
pub use self::model::{Link, Model, ModelBuilder, Rate};
pub(crate) use self::partition::Partitions;
pub(crate) use self::port::Port;
use self::ports::Slot;
use self::reset::Foreign;
pub(crate) use self::run::{run, run_on};
use self::slab::Slab;
use self::tickets::Tickets;
use crate::explore::Config;
use crate::meeting::Meeting;
use crate::memory::{Memory, PageSize};
use crate::violation::{Broken, Violation};

/// What a cluster is told about time.
#[derive(Clone, Debug)]
pub(crate) struct Timing {
    pub(crate) model: Model,
    pub(crate) elision: Elision,
}

/// A time that never comes.
const NEVER: Nanos = Nanos(u64::MAX);

/// One rank.
#[derive(Debug, Default)]
struct RankState {
    /// The clock of its main line: user code and what comes after closed ports.
    main: Nanos,
    /// The last operation that was launched.
    launched: u64,
    /// Effects that it posted within the partition and that are on their way: puts and gets until they begin to enter.
    in_flight: u64,
    /// By when all that began to enter is there.
    entered: Nanos,
    /// Effects that it posted to each other partition; none where it never did.
    abroad: Vec<u64>,
    /// Partitions that it asked whether they have come.
    unanswered: u32,
    /// Waits until nothing is on its way.
    resetting: Option<Waker>,
    tickets: Tickets,
    /// Its ports that are held in a flush.
    flushing: Vec<u32>,
    /// Its ports that are held for units.
    polling: Vec<u32>,
    /// The units that have come to it.
    come: units::Come,
}

/// Everything that the ranks of one partition share.
#[derive(Debug)]
pub(crate) struct World {
    layout: Rc<Layout>,
    timing: Timing,
    partitions: Partitions,
    /// Which one it is.
    partition: usize,
    seed: u64,
    max_events: u64,
    far_lanes: Queues,
    /// Whether time may jump to a deadline when nothing else happens.
    deadlines: bool,
    now: Nanos,
    events: u64,
    agenda: Agenda,
    /// Publishes that have come before a put that they follow, each with the next one of its lane.
    held: Slab<(Notice, Option<u32>)>,
    /// Puts of units on their way.
    units: Slab<units::Posted>,
    windows: Locals<Memory>,
    cells: Cells,
    lanes: Lanes,
    sides: Locals<Sides>,
    ranks: Locals<RankState>,
    /// Ranks whose future has not ended.
    running: u32,
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// No wait ends at a deadline before.
    no_deadline_before: Nanos,
    /// Where all ranks meet: in the first partition.
    meeting: Meeting,
    /// How often each rank came there.
    visits: Vec<u64>,
    attendances: Locals<Attendance>,
    /// What has come from each rank of other partitions.
    foreign: Vec<Foreign>,
    /// Which of them want to know when so many effects have come.
    inquiries: Vec<(Rank, u64)>,
    /// What is on the agenda by number.
    matters: FxHashMap<u32, Matter>,
    last_matter: u32,
    /// To each partition; they are another's while no stretch runs.
    bags: Vec<Bag>,
    records: Option<Vec<Record>>,
    verdict: Option<Violation>,
}

impl World {
    /// The world of one partition.
    pub(crate) fn new(
        layout: &Rc<Layout>,
        config: &Config,
        timing: &Timing,
        (partitions, partition): (Partitions, usize),
    ) -> Self {
        let all = layout.topology().ranks();
        let ranks = partitions.ranks(partition);
        let pages = if timing.elision.is_on() { PageSize::HEADERS } else { PageSize::ROWS };
        let cells_end = layout.zeroed().end();
        let foreign = if partitions.count() > 1 { all as usize } else { 0 };
        Self {
            layout: Rc::clone(layout),
            timing: timing.clone(),
            partitions,
            partition,
            seed: config.seed,
            max_events: config.max_events,
            far_lanes: config.far_lanes,
            deadlines: config.deadlines,
            now: Nanos(0),
            events: 0,
            agenda: Agenda::default(),
            held: Slab::default(),
            units: Slab::default(),
            windows: Locals::new(ranks.clone(), |_| Memory::new(cells_end, pages)),
            cells: Cells::new(&ranks, all),
            lanes: Lanes::new(&ranks, all),
            sides: Locals::new(ranks.clone(), |_| Sides::default()),
            ranks: Locals::new(ranks.clone(), |_| RankState::default()),
            running: ranks.len() as u32,
            slots: Vec::new(),
            free: Vec::new(),
            no_deadline_before: NEVER,
            meeting: Meeting::new(if partition == 0 { all } else { 0 }),
            visits: vec![0; if partition == 0 { all as usize } else { 0 }],
            attendances: Locals::new(ranks, |_| Attendance::default()),
            foreign: vec![Foreign::default(); foreign],
            inquiries: Vec::new(),
            matters: FxHashMap::default(),
            last_matter: 0,
            bags: Vec::new(),
            records: config.record.then(Vec::new),
            verdict: None,
        }
    }

    /// Its ranks.
    pub(crate) fn its_ranks(&self) -> Range<u32> {
        self.partitions.ranks(self.partition)
    }

    /// The time on a rank's main line.
    pub(crate) fn now_of(&self, rank: Rank) -> Nanos {
        self.now.max(self.ranks[rank].main)
    }

    /// The time at which the last of its ranks ended.
    pub(crate) fn end(&self) -> Nanos {
        self.ranks.iter().map(|rank| rank.main).fold(Nanos(0), Nanos::max)
    }

    pub(crate) fn events(&self) -> u64 {
        self.events
    }

    pub(crate) fn take_records(&mut self) -> Vec<Record> {
        self.records.take().unwrap_or_default()
    }

    /// What the run has found so far.
    pub(crate) fn verdict(&self) -> Option<&Violation> {
        self.verdict.as_ref()
    }

    /// Bytes of memory that stand behind all windows.
    pub(crate) fn resident(&self) -> u64 {
        self.windows.iter().map(Memory::resident).sum()
    }

    /// A rank's future has ended.
    pub(crate) fn finish(&mut self, rank: Rank) {
        self.ranks[rank].main = self.now_of(rank);
        self.running -= 1;
    }

    /// The main line of a rank computes for a while.
    pub(crate) fn spend(&mut self, rank: Rank, time: Nanos) {
        self.ranks[rank].main = self.now_of(rank) + time;
    }

    /// Copies out of a rank's window.
    pub(crate) fn read(&mut self, rank: Rank, from: Offset, into: &mut [u8]) -> Result<(), Fault> {
        from.span(into.len() as u64).within(self.layout.window_bytes())?;
        self.windows[rank].read(from.0, into);
        Ok(())
    }

    /// Copies into a rank's window.
    pub(crate) fn write(&mut self, rank: Rank, to: Offset, bytes: &[u8]) -> Result<(), Fault> {
        to.span(bytes.len() as u64).within(self.layout.window_bytes())?;
        self.windows[rank].write(to.0, bytes);
        Ok(())
    }

    /// Records a verb at the port's own time.
    fn record(&mut self, port: u32, verb: Verb) {
        if let Some(records) = &mut self.records {
            let Slot { rank, role, op, clock, .. } = self.slots[port as usize];
            records.push(Record { at: clock.max(self.now), rank, role, op, verb });
        }
    }

    /// Ends the run; what was found first stands.
    fn broken(&mut self, rule: &'static str, (rank, role): (Rank, Role), what: String) {
        let seed = self.seed;
        let violation = Violation::Rule(Box::new(Broken { seed, rule, rank, role, what }));
        self.verdict.get_or_insert(violation);
    }
}
