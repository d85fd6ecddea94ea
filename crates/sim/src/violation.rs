//! What a run can find.

use std::collections::BTreeSet;
use std::fmt;

use ep_core::port::{Cell, LaneId, Role, Span};
use ep_core::{Nanos, Rank};

/// A broken rule, an unordered access, or a run that does not end. The same seed finds it again.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Violation {
    /// Nothing can run and no fault explains it.
    #[error("deadlock: {0}")]
    Deadlock(Box<Report>),
    /// The run took more events than it was given.
    #[error("livelock: {0}")]
    Livelock(Box<Report>),
    /// Two accesses to the same bytes that nothing orders, right bytes or not.
    #[error("race: {0}")]
    Race(Box<Race>),
    /// A caller broke a rule of the contract.
    #[error("rule broken: {0}")]
    Rule(Box<Broken>),
}

impl Violation {
    /// The seed that finds it again.
    pub fn seed(&self) -> u64 {
        match self {
            Self::Deadlock(report) | Self::Livelock(report) => report.seed,
            Self::Race(race) => race.seed,
            Self::Rule(broken) => broken.seed,
        }
    }
}

/// Who waits for what when a run stands still.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Report {
    /// The seed of the run.
    pub seed: u64,
    /// Events up to here.
    pub events: u64,
    /// The virtual time.
    pub time: Nanos,
    /// Ranks that have not finished.
    pub unfinished: Vec<Rank>,
    /// Every waiting role, by rank.
    pub waiting: Vec<Waiting>,
}

impl Report {
    /// That of two parts of a cluster, ranks of the first one first.
    pub(crate) fn and(mut self, other: Self) -> Self {
        self.events += other.events;
        self.time = self.time.max(other.time);
        self.unfinished.extend(other.unfinished);
        self.waiting.extend(other.waiting);
        self
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "seed {}, {} events, time {}, unfinished ranks ", self.seed, self.events, self.time)?;
        let ranks: Vec<String> = self.unfinished.iter().map(ToString::to_string).collect();
        write!(f, "[{}]", ranks.join(", "))?;
        let awaited = self.waiting.iter().flat_map(|waiting| &waiting.awaits).filter_map(Awaited::bringer);
        let ended: BTreeSet<Rank> = awaited.filter(|rank| !self.unfinished.contains(rank)).collect();
        if !ended.is_empty() {
            let ranks: Vec<String> = ended.iter().map(ToString::to_string).collect();
            write!(f, ", which wait for ranks that have ended [{}]", ranks.join(", "))?;
        }
        self.waiting.iter().try_for_each(|waiting| write!(f, "\n  {waiting}"))
    }
}

/// One role that waits.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Waiting {
    /// Its rank.
    pub rank: Rank,
    /// The role; none for a rank that waits in its control plane.
    pub role: Option<Role>,
    /// The operation it works for.
    pub op: u64,
    /// What it waits for; several when any of them would do.
    pub awaits: Vec<Awaited>,
}

impl fmt::Display for Waiting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}", self.rank)?;
        match self.role {
            Some(role) => write!(f, ", {role}")?,
            None => f.write_str(", control plane")?,
        }
        write!(f, ", op {}:", self.op)?;
        self.awaits.iter().try_for_each(|awaited| write!(f, " {awaited};"))
    }
}

/// Something a role waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Awaited {
    /// A cell of the own window.
    Cell {
        /// The cell.
        cell: Cell,
        /// Its value.
        seen: u64,
        /// The value that would end the wait.
        awaited: u64,
    },
    /// Units.
    Units {
        /// The lane by which they come, of the rank that puts them.
        lane: LaneId,
        /// How many have come.
        seen: u64,
        /// How many there must be.
        awaited: u64,
    },
    /// Transfers of a lane.
    Flush {
        /// The lane.
        lane: LaneId,
        /// The first ticket that is still in flight.
        seen: u64,
        /// The last ticket that must not be.
        awaited: u64,
    },
    /// The scheduler: the role could run, but the run ended.
    Turn,
    /// The other ranks, to agree on how to go on.
    Agreement,
}

impl Awaited {
    /// The rank that would bring it.
    fn bringer(&self) -> Option<Rank> {
        match self {
            Self::Cell { cell, .. } => Some(cell.writer),
            Self::Units { lane, .. } => Some(lane.peer),
            _ => None,
        }
    }
}

impl fmt::Display for Awaited {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cell { cell: Cell { writer, lane, counter }, seen, awaited } => {
                write!(f, "{counter:?} of rank {writer} ({lane:?}) is {seen}, awaits {awaited}")
            }
            Self::Units { lane: LaneId { peer, kind }, seen, awaited } => {
                write!(f, "units of rank {peer} ({kind:?}), {seen} of {awaited} have come")
            }
            Self::Flush { lane, seen, awaited } => {
                write!(f, "flush of {lane} up to ticket {awaited}, {seen} is in flight")
            }
            Self::Turn => f.write_str("its turn"),
            Self::Agreement => f.write_str("the other ranks' proposals"),
        }
    }
}

/// How bytes were touched.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AccessKind {
    /// Read by the role itself.
    Read,
    /// Written by the role itself.
    Write,
    /// Source of a put.
    PutSource,
    /// Destination of a put.
    PutDestination,
    /// Source of a get.
    GetSource,
    /// Destination of a get.
    GetDestination,
    /// Destination of a put of units.
    UnitsDestination,
    /// Polled for units.
    Poll,
}

impl AccessKind {
    /// Whether it changes the bytes.
    pub const fn writes(self) -> bool {
        matches!(self, Self::Write | Self::PutDestination | Self::GetDestination | Self::UnitsDestination)
    }
}

impl fmt::Display for AccessKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::PutSource => "read by a put",
            Self::PutDestination => "write by a put",
            Self::GetSource => "read by a get",
            Self::GetDestination => "write by a get",
            Self::UnitsDestination => "write by a put of units",
            Self::Poll => "poll",
        })
    }
}

/// One access to a range of a window.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Access {
    /// The rank that did it or posted it.
    pub rank: Rank,
    /// Its role; none for the rank's main line.
    pub role: Option<Role>,
    /// How.
    pub kind: AccessKind,
    /// Which bytes.
    pub span: Span,
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of bytes {}..{} by rank {}, ", self.kind, self.span.offset.0, self.span.end(), self.rank)?;
        match self.role {
            Some(role) => role.fmt(f),
            None => f.write_str("main line"),
        }
    }
}

/// Two accesses that nothing orders.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Race {
    /// The seed of the run.
    pub seed: u64,
    /// Events up to the later access.
    pub events: u64,
    /// The rank whose window it is.
    pub window: Rank,
    /// The region of the window that the later access begins in.
    pub region: &'static str,
    /// The access that came first.
    pub earlier: Access,
    /// The access that is not ordered after it.
    pub later: Access,
}

impl fmt::Display for Race {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seed, events, window, region, earlier, later } = self;
        write!(
            f,
            "seed {seed}, event {events}, window of rank {window}, {region}: {later}\n  is not ordered after {earlier}"
        )
    }
}

/// A rule that a caller broke.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Broken {
    /// The seed of the run.
    pub seed: u64,
    /// The rule: `F4` and so on, or `one port a role`.
    pub rule: &'static str,
    /// Who broke it.
    pub rank: Rank,
    /// Its role.
    pub role: Role,
    /// What happened.
    pub what: String,
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seed, rule, rank, role, what } = self;
        write!(f, "{rule}, seed {seed}: rank {rank}, {role}: {what}")
    }
}
