//! The machine contract: what a role may ask of the machine it runs on, and the rules F1 to F11.
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
//! | F11 units | a unit is seen whole or not at all, in any order, and announces nothing but its own 12 bytes; no tag repeats in its memory |
//!
//! **Units** are the one way in which data announces itself (F11). A payload travels as pieces of 12 bytes, each beside a 4-byte tag in
//! one store of 16 bytes. The reader polls the units until all of them bear the tag of the operation; no publish, no fence and no wait
//! for a cell is needed, and nothing is cleared. In detail:
//!
//! - Units of one put become visible in any order, and orders nothing else: neither other units nor puts of the lane. A publish
//!   on the lane announces the units before it, as it does puts (F3).
//! - As with a publish, a read that finished before a unit was put is untouched by what its reader puts after it saw the unit (F9).
//!   So a unit may be credit: the reads have their values before the store is issued.
//! - No tag repeats in its memory while old units may lie there: not in the next operation, nor in the next generation
//!   ([`Tag::of`]). Memory for units is zeroed once, holds nothing else, and no tag is 0.
//! - Units are a capability of near lanes ([`crate::machine::Capabilities::units`]).
//!
//! Decorators wrap a port and keep the contract ([`crate::machine::Decorate`]).

use crate::error::{Fault, Phase};
use crate::terms::Rank;
pub use crate::terms::{
    Cell, Counter, Duty, LaneId, LaneKind, Mail, Nanos, Offset, Role, Scope, Span, Tag, UNIT_BYTES, UNIT_DATA, Units,
    pack_unit, unit_bytes, unit_count, unpack_unit, unpack_units,
};

impl Span {
    /// Refuses a span that leaves a window of `window` bytes (rule F8). Length zero is always inside.
    ///
    /// # Errors
    /// [`Fault::OutOfRange`].
    #[inline]
    pub const fn within(self, window: u64) -> Result<(), Fault> {
        if self.len == 0 || (self.end() <= window && self.offset.0 < window) {
            Ok(())
        } else {
            Err(Fault::out_of_range(self, window))
        }
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

impl Need {
    /// What a wait of `me` ends with whose needs were not met in time: it names the first, with the value `seen` there. A wait
    /// for nothing names `me`.
    pub const fn unmet(first: Option<(Self, u64)>, me: Rank, waited: Nanos) -> Fault {
        let Some((Self { cell, at_least }, seen)) = first else {
            let lane = LaneId { peer: me, kind: LaneKind::Watch };
            return Fault::Timeout { phase: Phase::Probe, peer: me, lane, seen: 0, awaited: 0, waited };
        };
        let lane = LaneId { peer: cell.writer, kind: cell.lane };
        Fault::Timeout { phase: cell.counter.phase(), peer: cell.writer, lane, seen, awaited: at_least, waited }
    }

    /// What a wait ends with whose writer is gone.
    pub const fn gone(&self) -> Fault {
        Fault::PeerGone { peer: self.cell.writer, phase: self.cell.counter.phase() }
    }
}

impl Units {
    /// What a wait for these units ends with that did not all come in time: `seen` of them have.
    pub const fn unmet(&self, seen: u64, waited: Nanos) -> Fault {
        let LaneId { peer, kind } = self.lane;
        Fault::Timeout { phase: kind.phase(), peer, lane: self.lane, seen, awaited: unit_count(self.len), waited }
    }

    /// What a wait for these units ends with whose sender is gone.
    pub const fn gone(&self) -> Fault {
        Fault::PeerGone { peer: self.lane.peer, phase: self.lane.kind.phase() }
    }
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
    /// [`Fault::Timeout`] at the deadline and [`Fault::PeerGone`] or [`Fault::LaneBroken`] once an unmet need's writer is known
    /// to be gone or out of reach, both about the first unmet need that the fault concerns.
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

    /// Copies `from` of the own window as units of `tag` to `to` in the window of the lane's peer ([`unit_bytes`] bytes, at a
    /// multiple of [`UNIT_BYTES`]), where they announce themselves (F11). Otherwise as [`Port::put`]. Near reach only.
    ///
    /// # Errors
    /// As [`Port::put`], and [`Fault::NotOffered`] where the machine or lane has no units.
    async fn put_units(&mut self, lane: LaneId, _from: Span, _to: Offset, _tag: Tag) -> Result<Ticket, Fault> {
        Err(Fault::NotOffered { verb: "put of units", lane })
    }

    /// Looks at units in the own window: whether all of them have come. Then `into`, which is as long as the payload, holds
    /// their data; else nothing that means anything. Orders what it sees and nothing else (F11).
    ///
    /// # Errors
    /// [`Fault::OutOfRange`] (F8), and [`Fault::NotOffered`] where the machine has no units.
    fn poll_units(&self, units: &Units, _into: &mut [u8]) -> Result<bool, Fault> {
        Err(Fault::NotOffered { verb: "poll of units", lane: units.lane })
    }

    /// Waits until [`Port::poll_units`] would find one of the payloads of `units`, or until one of `or` is met. Returns the index
    /// of the first such payload, or of the first such need, counted behind all payloads.
    ///
    /// # Errors
    /// As [`Port::wait_any`], about the first of `units`, or of `or` where there are none that it concerns; and
    /// [`Fault::NotOffered`] where the machine has no units.
    async fn wait_units(&mut self, units: &[Units], or: &[Need]) -> Result<usize, Fault> {
        match units.first() {
            Some(units) => Err(Fault::NotOffered { verb: "wait for units", lane: units.lane }),
            None => self.wait_any(or).await,
        }
    }

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

    /// Says whether from now on the role only posts: it looks at nothing before it has said that it does again and posted
    /// once more. A hint, for machines that simulate time: such a role need not take turns with the others so often. It
    /// should be the only role of its rank that puts meanwhile: what others put may leave after what it puts later.
    fn only_posts(&mut self, _only: bool) {}
}
