//! The machine contract: what a role may ask of the machine it runs on, and the rules F1 to F10.
//!
//! Each rank has one *window*, of the same size and layout on every rank: data bytes and *cells*, 64-bit counters.
//! A *lane* is a path from one rank to another that one role posts to. A role owns a [`Port`]: its view of the
//! machine for one operation.
//!
//! | rule | says |
//! |---|---|
//! | F1 exact | a put changes exactly the bytes named, and only after it was issued |
//! | F2 unordered | puts land in any pieces and any order; lanes are not ordered among themselves |
//! | F3 signal | who sees a published value sees all puts issued on that lane before; publishes of a lane are ordered |
//! | F4 counters | a cell belongs to one lane, is never lowered, and shares no 64-byte line with another writer's |
//! | F5 reuse | a put's source may be read until `flush(lane, its ticket)` returned |
//! | F6 bounded | every call ends: with its result, or at the deadline with a fault that names what was awaited |
//! | F7 isolation | a failed peer or lane fails only calls that involve it |
//! | F8 checked | length zero is a no-op; a range outside the window is refused and touches nothing |
//! | F9 credit | a read that finished before a publish is untouched by what the peer puts after seeing it |
//! | F10 get | a get sees all that its owner wrote before a publish that the getter has seen |
//!
//! Decorators wrap a port and keep the contract: [`Counted`] counts verbs and bytes, [`Traced`] records them,
//! [`Faulty`] injects faults.

mod counted;
mod faulty;
#[cfg(test)]
pub(crate) mod loopback;
mod traced;
mod verb;

pub use counted::{Counted, Counts, LaneCounts};
pub use faulty::{FaultPlan, Faulty, Trigger, Trouble};
pub use traced::{Traced, Tracer};
pub use verb::{LaneClass, VerbKind};

use std::fmt;
use std::ops::{Add, Sub};

use crate::error::{Fault, Phase};
use crate::topology::Rank;

/// A time or a duration in nanoseconds, on the clock of one rank.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Nanos(pub u64);

impl Nanos {
    /// `seconds` as nanoseconds.
    pub const fn from_secs(seconds: u64) -> Self {
        Self(seconds.saturating_mul(1_000_000_000))
    }

    /// `millis` milliseconds as nanoseconds.
    pub const fn from_millis(millis: u64) -> Self {
        Self(millis.saturating_mul(1_000_000))
    }
}

impl Add for Nanos {
    type Output = Self;

    fn add(self, more: Self) -> Self {
        Self(self.0.saturating_add(more.0))
    }
}

impl Sub for Nanos {
    type Output = Self;

    fn sub(self, less: Self) -> Self {
        Self(self.0.saturating_sub(less.0))
    }
}

impl fmt::Display for Nanos {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ns = self.0;
        match ns {
            0..1_000 => write!(f, "{ns} ns"),
            1_000..1_000_000 => write!(f, "{:.1} us", ns as f64 / 1e3),
            1_000_000..1_000_000_000 => write!(f, "{:.1} ms", ns as f64 / 1e6),
            _ => write!(f, "{:.2} s", ns as f64 / 1e9),
        }
    }
}

/// A place in a window, in bytes from its start. The same offset means the same thing on every rank.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Offset(pub u64);

impl Offset {
    /// `len` bytes from here.
    pub const fn span(self, len: u64) -> Span {
        Span { offset: self, len }
    }

    /// The place `bytes` further on.
    pub const fn plus(self, bytes: u64) -> Self {
        Self(self.0 + bytes)
    }
}

/// A range of bytes in a window.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Span {
    /// First byte.
    pub offset: Offset,
    /// Length in bytes.
    pub len: u64,
}

impl Span {
    /// One past the last byte, saturating.
    pub const fn end(self) -> u64 {
        self.offset.0.saturating_add(self.len)
    }

    /// Refuses a span that leaves a window of `window` bytes (rule F8). Length zero is always inside.
    ///
    /// # Errors
    /// [`Fault::OutOfRange`].
    pub const fn within(self, window: u64) -> Result<(), Fault> {
        if self.len == 0 || (self.end() <= window && self.offset.0 < window) {
            Ok(())
        } else {
            Err(Fault::out_of_range(self, window))
        }
    }
}

/// What a lane carries. Rows travel on *tracks*: one for each ring that a rank may fill at a peer, numbered by
/// [`crate::Layout::near_track`] and [`crate::Layout::far_track`]; on one node a track is a channel. Every kind has its own lane to every peer, because a lane has one posting role.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum LaneKind {
    /// Alarms of the watching role.
    Watch,
    /// Counts, notes and `done` of the control role.
    Control,
    /// Low latency: rows into the peer's slots, and their arrivals.
    LowRows,
    /// Low latency: what was received.
    LowDone,
    /// Rows of one track, and the tails of its ring.
    Data(u16),
    /// Credit of one track's ring, and gets.
    Credit(u16),
    /// From a rank to itself: what a role and the coordinator of a rail peer tell each other about the ring with that
    /// number ([`crate::Layout::mailbox`]), where lanes between nodes admit one poster ([`crate::machine::FarLanes`]).
    Mailbox(Mail, u16),
}

/// What a mailbox carries.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
pub enum Mail {
    /// To the coordinator, from the role that fills the ring: what lies in its staging memory.
    Staged = 0,
    /// From the coordinator, to that role: what has left the staging memory.
    Sent = 1,
    /// To the coordinator, from the role that empties the ring which the peer fills: the credit to return.
    Owed = 2,
}

impl LaneKind {
    /// Dense index: watch, control, the two of low latency, then data and credit of each track. Mailboxes have a numbering of
    /// their own.
    pub const fn index(self) -> usize {
        match self {
            Self::Watch => 0,
            Self::Control => 1,
            Self::LowRows => 2,
            Self::LowDone => 3,
            Self::Data(track) => 4 + 2 * track as usize,
            Self::Credit(track) => 5 + 2 * track as usize,
            Self::Mailbox(mail, ring) => 3 * ring as usize + mail as usize,
        }
    }

    /// Whether it leads from a rank to itself.
    pub const fn is_mailbox(self) -> bool {
        matches!(self, Self::Mailbox(..))
    }

    /// The kind with dense index `index`; no mailbox.
    pub const fn from_index(index: usize) -> Self {
        match index {
            0 => Self::Watch,
            1 => Self::Control,
            2 => Self::LowRows,
            3 => Self::LowDone,
            _ if index.is_multiple_of(2) => Self::Data(((index - 4) / 2) as u16),
            _ => Self::Credit(((index - 5) / 2) as u16),
        }
    }

    /// The counters that are published on lanes of this kind.
    pub const fn counters(self) -> &'static [Counter] {
        match self {
            Self::Watch => &[Counter::Alarm, Counter::Opening, Counter::Waiting, Counter::Probe],
            Self::Control => &[Counter::Counts, Counter::Note, Counter::Done, Counter::Probe],
            Self::LowRows => &[Counter::Even, Counter::Odd, Counter::Probe],
            Self::LowDone => &[Counter::Received, Counter::Probe],
            Self::Data(_) => &[Counter::Tail, Counter::Placed, Counter::Probe],
            Self::Credit(_) => &[Counter::Head, Counter::Probe],
            Self::Mailbox(Mail::Staged, _) => &[Counter::Tail, Counter::Done, Counter::Probe],
            Self::Mailbox(Mail::Sent, _) => &[Counter::Head, Counter::Probe],
            Self::Mailbox(Mail::Owed, _) => &[Counter::Head, Counter::Done, Counter::Probe],
        }
    }

    /// Lanes from one rank to one peer with `tracks` tracks.
    pub const fn count(tracks: u32) -> usize {
        4 + 2 * tracks as usize
    }

    /// Mailboxes of a rank, for `rings` rings between nodes.
    pub const fn mailboxes(rings: u32) -> usize {
        3 * rings as usize
    }
}

/// A path to `peer`, posted to by one role of this rank.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct LaneId {
    /// The rank at the other end.
    pub peer: Rank,
    /// What it carries.
    pub kind: LaneKind,
}

impl fmt::Display for LaneId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            LaneKind::Watch => write!(f, "the watch lane of rank {}", self.peer),
            LaneKind::Control => write!(f, "the control lane of rank {}", self.peer),
            LaneKind::LowRows => write!(f, "the low-latency lane of rank {}", self.peer),
            LaneKind::LowDone => write!(f, "the low-latency done lane of rank {}", self.peer),
            LaneKind::Data(c) => write!(f, "data lane {c} of rank {}", self.peer),
            LaneKind::Credit(c) => write!(f, "credit lane {c} of rank {}", self.peer),
            LaneKind::Mailbox(mail, ring) => {
                let what = match mail {
                    Mail::Staged => "staged rows",
                    Mail::Sent => "sent rows",
                    Mail::Owed => "owed credit",
                };
                write!(f, "the mailbox for {what} {ring} of rank {}", self.peer)
            }
        }
    }
}

/// What a cell counts.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Counter {
    /// Watch lane: the writer's latest [`crate::layout::Alarm`].
    Alarm,
    /// Watch lane: the last operation that the writer has begun, and its kind ([`crate::layout::Kind::opening`]).
    Opening,
    /// Watch lane, low latency: whom the writer waits for: `serial << 16 | rank`, itself when it no longer waits.
    Waiting,
    /// Control lane: the last operation whose counts the writer has put.
    Counts,
    /// Control lane: the last operation whose note (grant or offer) the writer has put.
    Note,
    /// Control lane: the last operation of which the writer has read everything it was given.
    Done,
    /// Data lane: rows and header slots the writer has put into its ring, ever.
    Tail,
    /// Data lane: the last operation whose rows the writer has placed directly.
    Placed,
    /// Credit lane: rows and header slots the writer has consumed from the reader's ring, ever.
    Head,
    /// Low-latency lane: the writer's last [`crate::layout::Arrival`] in the bank of even operations.
    Even,
    /// Low-latency lane: the writer's last [`crate::layout::Arrival`] in the bank of odd operations.
    Odd,
    /// Low-latency done lane: the last low-latency operation of which the writer has read everything it was given.
    Received,
    /// Any lane: free for probes and tests.
    Probe,
}

impl Counter {
    /// Every counter.
    pub const ALL: [Self; 13] = [
        Self::Alarm,
        Self::Opening,
        Self::Waiting,
        Self::Counts,
        Self::Note,
        Self::Done,
        Self::Tail,
        Self::Placed,
        Self::Head,
        Self::Even,
        Self::Odd,
        Self::Received,
        Self::Probe,
    ];

    /// Its place in the 64-byte line of its lane, 0 to 7. Counters of different lanes may share a place.
    pub const fn slot(self) -> u64 {
        match self {
            Self::Alarm | Self::Counts | Self::Tail | Self::Head | Self::Even | Self::Received => 0,
            Self::Opening | Self::Note | Self::Placed | Self::Odd => 1,
            Self::Done | Self::Waiting => 2,
            Self::Probe => 7,
        }
    }

    /// The phase in which a role waits on this counter.
    pub const fn phase(self) -> Phase {
        match self {
            Self::Alarm | Self::Opening | Self::Waiting => Phase::Alarm,
            Self::Counts => Phase::Counts,
            Self::Note => Phase::Note,
            Self::Done | Self::Received => Phase::Bank,
            Self::Tail | Self::Placed | Self::Even | Self::Odd => Phase::Rows,
            Self::Head => Phase::Credit,
            Self::Probe => Phase::Probe,
        }
    }
}

/// A 64-bit counter in the reader's window, written through one lane of `writer`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Cell {
    /// The only rank that publishes to it.
    pub writer: Rank,
    /// The only lane, of the writer to the reader, that it is published on. Where all tracks between nodes share one lane
    /// ([`crate::machine::FarLanes::One`]), that one, and this is the lane that the track would have otherwise.
    pub lane: LaneKind,
    /// What it counts.
    pub counter: Counter,
}

impl Cell {
    /// The cell of `counter` on the lane `lane` of `writer`.
    pub const fn new(writer: Rank, lane: LaneKind, counter: Counter) -> Self {
        Self { writer, lane, counter }
    }
}

/// A wait for a cell of the own window to reach a value.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Need {
    /// The cell.
    pub cell: Cell,
    /// The least value that ends the wait.
    pub at_least: u64,
}

/// Names a put or get of one lane; tickets of a lane ascend.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Ticket(pub u64);

/// Work of a role that takes a core's time, for machines that model time.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Work {
    /// Copied `bytes` of one row between user memory and the window.
    Row {
        /// Payload and header bytes.
        bytes: u64,
    },
    /// Added `bytes` of one row into an accumulator.
    Reduce {
        /// Payload bytes.
        bytes: u64,
    },
}

/// A role's view of the machine during one operation (module documentation: the rules).
///
/// A port knows its role, the generation of its communicator and the operation's deadline. Values of cells are plain
/// counts here; the machine adds the generation ([`crate::layout::stamp`]). Verbs allocate nothing.
///
/// A call that fails leaves the operation unusable: every later call on any port of it may fail too.
#[allow(async_fn_in_trait)] // Ports stay on the thread that opened them: no Send bound is wanted.
pub trait Port {
    /// The time on this rank's clock.
    fn now(&self) -> Nanos;

    /// The value of a cell of the own window, with acquire ordering (F3).
    fn peek(&self, cell: Cell) -> u64;

    /// Waits until one of `needs` is met and returns the index of the first that is.
    ///
    /// # Errors
    /// [`Fault::Timeout`] at the deadline and [`Fault::PeerGone`] once an unmet need's writer is known to be gone,
    /// both about the first unmet need that the fault concerns.
    async fn wait_any(&mut self, needs: &[Need]) -> Result<usize, Fault>;

    /// Copies `from` of the own window to `to` in the window of the lane's peer. Accepted on return, not arrived;
    /// the source must not change before [`Port::flush`] (F5).
    ///
    /// # Errors
    /// [`Fault::OutOfRange`] (F8), [`Fault::PeerGone`], or [`Fault::Timeout`] when the lane stays full.
    async fn put(&mut self, lane: LaneId, from: Span, to: Offset) -> Result<Ticket, Fault>;

    /// Copies `from` of the peer's window to `to` in the own; there after [`Port::flush`]. Near reach only.
    ///
    /// # Errors
    /// As [`Port::put`], and [`Fault::NotOffered`] where the machine or lane has no gets.
    async fn get(&mut self, lane: LaneId, from: Span, to: Offset) -> Result<Ticket, Fault>;

    /// Raises a cell in the window of the lane's peer, after all earlier puts of the lane (F3). The cell must belong to
    /// this rank and lane.
    ///
    /// # Errors
    /// [`Fault::PeerGone`], or [`Fault::Timeout`] when the lane stays full.
    async fn publish(&mut self, lane: LaneId, cell: Cell, value: u64) -> Result<(), Fault>;

    /// Waits until the sources of all puts up to `upto` may be overwritten and the bytes of all gets are there.
    ///
    /// # Errors
    /// [`Fault::Timeout`], [`Fault::PeerGone`].
    async fn flush(&mut self, lane: LaneId, upto: Ticket) -> Result<(), Fault>;

    /// Copies `from` of the own window into `into`; `into` is as long as `from`.
    ///
    /// # Errors
    /// [`Fault::OutOfRange`] (F8).
    fn read(&self, from: Offset, into: &mut [u8]) -> Result<(), Fault>;

    /// Copies `bytes` into the own window.
    ///
    /// # Errors
    /// [`Fault::OutOfRange`] (F8).
    fn write(&mut self, to: Offset, bytes: &[u8]) -> Result<(), Fault>;

    /// Accounts for a core's own time; free where time is real.
    fn charge(&self, work: Work);
}

/// What a role does, for traces, errors and logs.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Duty {
    /// Exchanges counts, notes and `done`.
    Control,
    /// Watches and raises alarms.
    Watch,
    /// Dispatch: sends rows to `peer` through a ring.
    Sender,
    /// Dispatch: takes rows of `peer` from a ring.
    Receiver,
    /// Dispatch: takes rows that came along the rail and fans them out within the node.
    Forwarder,
    /// Dispatch: places rows at `peer` directly.
    Placer,
    /// Dispatch: takes in what `peer` placed directly.
    Collector,
    /// Combine: returns rows to `peer` through a ring.
    Returner,
    /// Combine: sums the rows of its node that belong to another one, and sends the sums along the rail.
    Gatherer,
    /// Combine: sums the rows that come back.
    Reducer,
    /// Posts to `peer`, a rank of another node, what the other roles hand over, where its lane admits one poster.
    Coordinator,
    /// Runs a script of a test.
    Probe,
}

impl Duty {
    /// Lower-case name, as traces and logs print it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Control => "control",
            Self::Watch => "watch",
            Self::Sender => "sender",
            Self::Receiver => "receiver",
            Self::Forwarder => "forwarder",
            Self::Placer => "placer",
            Self::Collector => "collector",
            Self::Returner => "returner",
            Self::Gatherer => "gatherer",
            Self::Reducer => "reducer",
            Self::Coordinator => "coordinator",
            Self::Probe => "probe",
        }
    }
}

/// Names one role of one rank: at most one of each runs at a time.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Role {
    /// What it does.
    pub duty: Duty,
    /// The peer it serves, where it serves one.
    pub peer: Option<Rank>,
    /// The track it serves; 0 where there is only one.
    pub track: u16,
}

impl Role {
    /// A role that serves all peers.
    pub const fn new(duty: Duty) -> Self {
        Self { duty, peer: None, track: 0 }
    }

    /// A role that serves `peer` on `track`.
    pub const fn serving(duty: Duty, peer: Rank, track: u16) -> Self {
        Self { duty, peer: Some(peer), track }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.duty.name())?;
        if let Some(peer) = self.peer {
            write!(f, " of rank {peer}")?;
        }
        write!(f, ", track {}", self.track)
    }
}
