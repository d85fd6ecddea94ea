//! What a rank's ports and its machine share.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Instant;

use ep_bootstrap::Peers;
use ep_core::port::{Cell, LaneId, Offset, Span, Ticket};
use ep_core::topology::Reach;
use ep_core::{Fault, Layout, Nanos, Rank, layout};

use crate::memory::Mapping;
use crate::node::Node;
use crate::pace;

/// Polls of unmet waits between two looks at the clock, where every rank has a core: a poll is cheaper than a look.
const POLLS: u32 = 32;
/// Time between two looks at who is gone.
const LOOK: Nanos = Nanos::from_millis(1);

/// A rank's place at its node. Counters here have one writer, the rank's thread, and are atomic for the compiler's sake.
#[derive(Debug)]
pub(crate) struct Seat {
    pub(crate) me: Rank,
    pub(crate) layout: Layout,
    pub(crate) node: Arc<Node>,
    pub(crate) peers: Peers,
    /// When the clock began.
    origin: Instant,
    /// Polls of unmet waits.
    polls: AtomicU32,
    /// When to look next at who is gone.
    look_at: AtomicU64,
    /// The last ticket given out: tickets of a lane ascend when those of all lanes do.
    tickets: AtomicU64,
}

impl Seat {
    pub(crate) fn new(me: Rank, layout: Layout, node: Arc<Node>, peers: Peers, origin: Instant) -> Self {
        let (polls, look_at, tickets) = (AtomicU32::new(0), AtomicU64::new(0), AtomicU64::new(0));
        Self { me, layout, node, peers, origin, polls, look_at, tickets }
    }

    pub(crate) fn now(&self) -> Nanos {
        Nanos(u64::try_from(self.origin.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }

    /// The own window.
    pub(crate) fn own(&self) -> &Mapping {
        self.node.window(self.me)
    }

    /// The window at the other end of a near lane, for a verb that this rank may do on it. Lanes between nodes are none of shared
    /// memory's: a transport for them belongs beside this.
    fn near(&self, verb: &'static str, lane: LaneId) -> Result<&Mapping, Fault> {
        let is_near =
            self.layout.has_lane(self.me, lane) && self.layout.topology().reach(self.me, lane.peer) != Reach::Far;
        if is_near { Ok(self.node.window(lane.peer)) } else { Err(Fault::NotOffered { verb, lane }) }
    }

    fn check_presence(&self, lane: LaneId) -> Result<(), Fault> {
        if self.node.roll().is_gone(lane.peer) {
            let phase = lane.kind.counters()[0].phase();
            return Err(Fault::PeerGone { peer: lane.peer, phase });
        }
        Ok(())
    }

    /// Copies into the peer's window: done on return, so that a flush has nothing to wait for (F5).
    pub(crate) fn put(&self, lane: LaneId, from: Span, to: Offset) -> Result<Ticket, Fault> {
        let peer = self.near("put", lane)?;
        self.transfer(lane, (self.own(), from), (peer, to))
    }

    /// Copies out of the peer's window.
    pub(crate) fn get(&self, lane: LaneId, from: Span, to: Offset) -> Result<Ticket, Fault> {
        let peer = self.near("get", lane)?;
        self.transfer(lane, (peer, from), (self.own(), to))
    }

    fn transfer(&self, lane: LaneId, source: (&Mapping, Span), sink: (&Mapping, Offset)) -> Result<Ticket, Fault> {
        let last = self.tickets.load(Ordering::Relaxed);
        if source.1.len == 0 {
            return Ok(Ticket(last));
        }
        let window = self.layout.window_bytes();
        source.1.within(window)?;
        sink.1.span(source.1.len).within(window)?;
        self.check_presence(lane)?;
        source.0.copy(source.1, sink.0, sink.1)?;
        self.tickets.store(last + 1, Ordering::Relaxed);
        Ok(Ticket(last + 1))
    }

    /// Raises a cell at the peer: a release store, after all that this rank did before (F3).
    pub(crate) fn publish(&self, lane: LaneId, cell: Cell, generation: u16, value: u64) -> Result<(), Fault> {
        let peer = self.near("publish", lane)?;
        let fits = cell.writer == self.me
            && cell.lane == lane.kind
            && value >> layout::VALUE_BITS == 0
            && self.layout.has_cell(cell);
        let place = if fits { peer.cell(self.layout.cell(cell, generation)) } else { None };
        let place = place.ok_or(Fault::NotOffered { verb: "publish", lane })?;
        self.check_presence(lane)?;
        let bits = layout::stamp(generation, value);
        // This rank is the cell's one writer (F4).
        debug_assert!(place.load(Ordering::Relaxed) <= bits, "{cell:?} of rank {} would fall", lane.peer);
        place.store(bits, Ordering::Release);
        Ok(())
    }

    /// A flush waits for nothing: puts and gets are done when they return.
    pub(crate) fn flush(&self, lane: LaneId) -> Result<(), Fault> {
        self.near("flush", lane).map(drop)
    }

    /// The value of a cell of the own window (acquire). One that the layout lacks is never published.
    pub(crate) fn peek(&self, cell: Cell, generation: u16) -> u64 {
        debug_assert!(self.layout.has_cell(cell), "{cell:?} is not in the layout");
        let place = self.own().cell(self.layout.cell(cell, generation));
        place.map_or(0, |place| layout::value_in(generation, place.load(Ordering::Acquire)))
    }

    /// Looks at the clock, for a wait that was not met: every so often only, or whenever `always`.
    pub(crate) fn glance(&self, always: bool) -> Option<Nanos> {
        let polls = self.polls.load(Ordering::Relaxed).wrapping_add(1);
        self.polls.store(polls, Ordering::Relaxed);
        if !always && !pace::is_crowded() && !polls.is_multiple_of(POLLS) {
            return None;
        }
        let now = self.now();
        if now.0 >= self.look_at.load(Ordering::Relaxed) {
            self.look_at.store((now + LOOK).0, Ordering::Relaxed);
            self.peers.lost().iter().for_each(|rank| self.node.roll().strike(rank));
        }
        Some(now)
    }
}
