//! The state of a run of the explore scheduler: windows, lanes, ports, time, and what was found.
//!
//! Nothing here decides who runs next; that is [`World::next`] in `schedule`, by the draws of the adversary.

mod deliver;
mod disturb;
mod port;
mod ports;
mod report;
mod schedule;
mod suspend;
mod units;
mod verbs;
mod waits;

use std::rc::Rc;

use ep_core::layout::Queues;
use ep_core::machine::Proposal;
use ep_core::port::{LaneId, Role};
use ep_core::trace::{Record, Verb};
use ep_core::{Layout, Nanos, Rank};

use self::disturb::LaneFault;
pub(crate) use self::port::Port;
use self::ports::Slot;
pub(crate) use self::schedule::{Step, Wakes};
use self::suspend::Suspension;
use crate::explore::adversary::Adversary;
use crate::explore::lane::Lanes;
use crate::explore::race::{Conflict, Tracker};
use crate::meeting::Meeting;
use crate::memory::{Memory, PageSize};
use crate::timed::Timing;
use crate::violation::{Broken, Race, Violation};
use ep_core::incident::Incident;

/// What a run is told.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    pub(crate) seed: u64,
    pub(crate) incidents: Vec<Incident>,
    pub(crate) race_tracking: bool,
    pub(crate) record: bool,
    pub(crate) deadlines: bool,
    pub(crate) max_events: u64,
    /// Which far lanes share a queue.
    pub(crate) far_lanes: Queues,
    /// Whether units land in halves.
    pub(crate) torn_units: bool,
    /// What the timed scheduler needs; none for explore.
    pub(crate) timed: Option<Timing>,
}

/// What a rank is to the scheduler.
#[derive(Clone, Debug)]
struct RankState {
    /// Verbs begun.
    verbs: u64,
    /// Verbs that it may do.
    crash_after: u64,
    /// Whether peers learn of its crash.
    noticed: bool,
    /// Whether it is to be suspended, is, or was.
    suspension: Suspension,
    /// Whether peers learn that its process has ended.
    exits: bool,
    starved: bool,
    crashed: bool,
    finished: bool,
    /// Its open ports.
    ports: Vec<u32>,
}

impl RankState {
    /// Whether peers know that it is gone.
    fn gone(&self) -> bool {
        self.crashed && self.noticed
    }
}

/// Everything that ranks share.
#[derive(Debug)]
pub(crate) struct World {
    layout: Rc<Layout>,
    seed: u64,
    max_events: u64,
    far_lanes: Queues,
    torn_units: bool,
    /// Whether time may pass although no fault has acted.
    deadlines: bool,
    now: Nanos,
    events: u64,
    windows: Vec<Memory>,
    lanes: Lanes,
    ranks: Vec<RankState>,
    /// Ranks whose future has not ended.
    running: u32,
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// Ports that could run: those of victims apart, and those of suspended ranks.
    ready: [Vec<u32>; 3],
    /// Ranks whose future was woken by something else than a port, likewise; kept to be used again.
    woken: [Vec<u32>; 3],
    adversary: Adversary,
    lane_faults: Vec<LaneFault>,
    /// Whether a fault has acted.
    disturbed: bool,
    /// The event at which the next zombie goes on.
    next_zombie: u64,
    /// A rank whose future is to be dropped.
    crashing: Option<Rank>,
    meeting: Meeting,
    race: Option<Box<Tracker>>,
    records: Option<Vec<Record>>,
    verdict: Option<Violation>,
}

impl World {
    pub(crate) fn new(layout: &Rc<Layout>, config: &Config) -> Self {
        let topology = layout.topology();
        let cells_end = layout.zeroed().end();
        let mut world = Self {
            layout: Rc::clone(layout),
            seed: config.seed,
            max_events: config.max_events,
            far_lanes: config.far_lanes,
            torn_units: config.torn_units,
            deadlines: config.deadlines,
            now: Nanos(0),
            events: 0,
            windows: topology.all().map(|_| Memory::new(cells_end, PageSize::ROWS)).collect(),
            lanes: Lanes::new(layout),
            ranks: Vec::new(),
            running: topology.ranks(),
            slots: Vec::new(),
            free: Vec::new(),
            ready: Default::default(),
            woken: Default::default(),
            adversary: Adversary::new(config.seed, topology.ranks()),
            lane_faults: Vec::new(),
            disturbed: false,
            next_zombie: u64::MAX,
            crashing: None,
            meeting: Meeting::new(topology.ranks()),
            race: config.race_tracking.then(|| Box::new(Tracker::new(topology.ranks()))),
            records: config.record.then(Vec::new),
            verdict: None,
        };
        world.ranks = topology.all().map(|rank| world.fresh_rank(rank)).collect();
        config.incidents.iter().for_each(|fault| world.inject(fault));
        world
    }

    fn fresh_rank(&self, rank: Rank) -> RankState {
        RankState {
            verbs: 0,
            crash_after: u64::MAX,
            noticed: false,
            suspension: Suspension::None,
            exits: false,
            starved: self.adversary.starves(rank, None),
            crashed: false,
            finished: false,
            ports: Vec::new(),
        }
    }

    pub(crate) fn now(&self) -> Nanos {
        self.now
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

    /// The rank's future has ended.
    pub(crate) fn finish(&mut self, rank: Rank) {
        self.ranks[rank.index()].finished = true;
        self.running -= 1;
        if self.ranks[rank.index()].exits {
            self.exit(rank);
        }
    }

    /// The rank whose future is to be dropped, once.
    pub(crate) fn take_crashing(&mut self) -> Option<Rank> {
        self.crashing.take()
    }

    /// A rank comes to agree with the others.
    pub(crate) fn arrive(&mut self, rank: Rank, proposal: Proposal, deadline: Nanos) {
        let Some(members) = self.meeting.arrive(rank, proposal, deadline, self.now) else { return };
        self.let_go_on(&members);
        // What a crashed rank left in flight was settled when it crashed, so the members come after that too.
        let crashed = self.ranks.iter().zip(0..).filter(|(state, _)| state.crashed).map(|(_, rank)| Rank(rank));
        let met: Vec<Rank> = members.into_iter().chain(crashed).collect();
        let others: Vec<Rank> = self.layout.topology().all().filter(|rank| !met.contains(rank)).collect();
        if let Some(race) = &mut self.race {
            race.met(&met);
            for rank in others {
                race.gave_up(rank, self.lanes.of(rank), &met);
            }
        }
    }

    /// Where ranks meet.
    pub(crate) fn meeting(&mut self) -> &mut Meeting {
        &mut self.meeting
    }

    /// The number of the queue that takes what `from` posts on `lane`, which the layout has.
    fn queue(&mut self, from: Rank, lane: LaneId) -> u32 {
        let LaneId { peer, kind } = self.far_lanes.queue(&self.layout, from, lane);
        self.lanes.number(from, peer, kind)
    }

    fn record(&mut self, port: u32, verb: Verb) {
        if let Some(records) = &mut self.records {
            let Slot { rank, role, op, .. } = self.slots[port as usize];
            records.push(Record { at: Nanos(self.events), rank, role, op, verb });
        }
    }

    /// Ends the run; what was found first stands.
    fn end_with(&mut self, violation: Violation) {
        self.verdict.get_or_insert(violation);
    }

    fn broken(&mut self, rule: &'static str, (rank, role): (Rank, Role), what: String) {
        let seed = self.seed;
        self.end_with(Violation::Rule(Box::new(Broken { seed, rule, rank, role, what })));
    }

    fn check(&mut self, touched: Result<(), Conflict>) {
        let Err(Conflict { window, earlier, later }) = touched else { return };
        let first = later.span.offset.0;
        let regions = self.layout.regions();
        let region = regions.iter().find(|region| region.span.end() > first).map_or("window", |region| region.name);
        let (seed, events) = (self.seed, self.events);
        self.end_with(Violation::Race(Box::new(Race { seed, events, window, region, earlier, later })));
    }
}
