//! Open ports: how a role starts a verb, parks, and gets its turn.

use std::task::{Context, Poll, Waker};

use ep_core::machine::Opening;
use ep_core::port::{Cell, Need, Role, Units};
use ep_core::trace::Verb;
use ep_core::{Nanos, Rank, layout};

use super::World;
use super::suspend::SUSPENDED;
use crate::explore::race::Tracker;
use crate::violation::Violation;
use crate::wakers::keep_waker;

/// No place in a list of ready ports.
pub(super) const NONE: u32 = u32::MAX;

/// What a port is parked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Parked {
    /// Not parked: the role runs, or waits for something that is no port.
    Not,
    /// At the start of a verb, by the adversary.
    Turn,
    /// For one of the slot's needs.
    Needs,
    /// For one of the slot's payloads, or one of its needs.
    Units,
    /// For transfers of a lane up to a ticket.
    Flush { lane: u32, upto: u64 },
}

impl Parked {
    /// Whether it waits for something that others do, at most until the deadline.
    pub(super) const fn waits(self) -> bool {
        matches!(self, Self::Needs | Self::Units | Self::Flush { .. })
    }
}

/// One open port, or a place for one.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) rank: Rank,
    pub(super) role: Role,
    pub(super) op: u64,
    pub(super) generation: u16,
    pub(super) deadline: Nanos,
    /// Its actor in the race tracker.
    pub(super) actor: u32,
    pub(super) parked: Parked,
    /// Which list of ready ports it belongs to, while its rank is not suspended.
    pub(super) class: usize,
    pub(super) ready_at: u32,
    pub(super) granted: bool,
    pub(super) waker: Option<Waker>,
    pub(super) needs: Vec<Need>,
    pub(super) units: Vec<Units>,
    pub(super) since: Nanos,
}

impl World {
    pub(crate) fn open(&mut self, rank: Rank, opening: Opening) -> u32 {
        let Opening { role, op, generation, deadline } = opening;
        if self.ranks[rank.index()].ports.iter().any(|&port| self.slots[port as usize].role == role) {
            self.broken("one port a role", (rank, role), "opened a second port".into());
        }
        let starved = self.ranks[rank.index()].starved || self.adversary.starves(rank, Some(role));
        let actor = self.race.as_mut().map_or(0, |race| race.open(rank, role));
        let port = self.free.pop().unwrap_or(self.slots.len() as u32);
        let before = self.slots.get_mut(port as usize);
        let (needs, units) =
            before.map(|slot| (std::mem::take(&mut slot.needs), std::mem::take(&mut slot.units))).unwrap_or_default();
        let slot = Slot {
            rank,
            role,
            op,
            generation,
            deadline,
            actor,
            parked: Parked::Not,
            class: usize::from(starved),
            ready_at: NONE,
            granted: false,
            waker: None,
            needs,
            units,
            since: self.now,
        };
        match self.slots.get_mut(port as usize) {
            Some(place) => *place = slot,
            None => self.slots.push(slot),
        }
        self.ranks[rank.index()].ports.push(port);
        self.record(port, Verb::Open);
        port
    }

    pub(crate) fn close(&mut self, port: u32) {
        self.record(port, Verb::Close);
        self.unpark(port);
        let Slot { rank, actor, .. } = self.slots[port as usize];
        self.slots[port as usize].waker = None;
        self.ranks[rank.index()].ports.retain(|&open| open != port);
        if let Some(race) = &mut self.race {
            race.close(actor);
        }
        self.free.push(port);
    }

    /// Starts a verb: counts it, and may park the role before it does anything.
    pub(crate) fn begin(&mut self, port: u32, context: &Context<'_>) -> Poll<()> {
        self.unpark(port);
        let rank = self.slots[port as usize].rank;
        if self.verdict.is_some() || self.ranks[rank.index()].crashed || !self.count_event() {
            return Poll::Pending;
        }
        let state = &mut self.ranks[rank.index()];
        state.verbs += 1;
        if state.verbs > state.crash_after {
            self.crash(rank);
            return Poll::Pending;
        }
        if self.suspends(rank) {
            self.park(port, Parked::Turn, context);
            self.make_ready(port);
            return Poll::Pending;
        }
        if !self.adversary.preempts() {
            return Poll::Ready(());
        }
        self.park(port, Parked::Turn, context);
        self.make_ready(port);
        Poll::Pending
    }

    /// Polls a role that [`World::begin`] parked.
    pub(crate) fn resume(&mut self, port: u32, context: &Context<'_>) -> Poll<()> {
        if self.granted(port, context) { Poll::Ready(()) } else { Poll::Pending }
    }

    /// A verb ended, or its future was dropped half-way.
    pub(crate) fn end(&mut self, port: u32) {
        self.unpark(port);
    }

    /// The value of a cell as the port's generation sees it, acquired.
    pub(super) fn acquire(&mut self, port: u32, cell: Cell) -> u64 {
        let Slot { rank, generation, actor, .. } = self.slots[port as usize];
        let at = self.layout.cell(cell, generation).0;
        let value = layout::value_in(generation, self.windows[rank.index()].load(at));
        if let Some(race) = self.race.as_mut().filter(|_| value > 0) {
            race.saw(actor, at);
        }
        value
    }

    /// The value of a cell, for the scheduler's own eyes.
    pub(super) fn value(&self, rank: Rank, generation: u16, cell: Cell) -> u64 {
        let at = self.layout.cell(cell, generation).0;
        layout::value_in(generation, self.windows[rank.index()].load(at))
    }

    /// Lets a ready port run; returns its rank.
    pub(super) fn grant(&mut self, class: usize, index: usize) -> Rank {
        let port = self.ready[class][index];
        self.unready(port);
        let slot = &mut self.slots[port as usize];
        slot.granted = true;
        if let Some(waker) = &slot.waker {
            waker.wake_by_ref();
        }
        slot.rank
    }

    /// The actor that a port's accesses are tracked as; the main line of `rank` without a port.
    pub(super) fn actor(&self, rank: Rank, port: Option<u32>) -> u32 {
        port.map_or(Tracker::main(rank), |port| self.slots[port as usize].actor)
    }

    /// Counts an event; false when there were too many.
    pub(super) fn count_event(&mut self) -> bool {
        self.events += 1;
        if self.events > self.max_events {
            let report = self.report();
            self.end_with(Violation::Livelock(report));
        }
        self.verdict.is_none()
    }

    pub(super) fn park(&mut self, port: u32, parked: Parked, context: &Context<'_>) {
        let slot = &mut self.slots[port as usize];
        slot.parked = parked;
        slot.granted = false;
        keep_waker(&mut slot.waker, context);
    }

    /// Forgets what the port was parked for: a verb that was dropped half-way, or one that ends.
    pub(super) fn unpark(&mut self, port: u32) {
        self.unready(port);
        let slot = &mut self.slots[port as usize];
        slot.granted = false;
        if let Parked::Flush { lane, .. } = std::mem::replace(&mut slot.parked, Parked::Not) {
            let flusher = &mut self.lanes.lane_mut(lane).flusher;
            *flusher = flusher.filter(|&flushing| flushing != port);
        }
    }

    pub(super) fn granted(&mut self, port: u32, context: &Context<'_>) -> bool {
        let slot = &mut self.slots[port as usize];
        if slot.granted && self.verdict.is_none() {
            self.unpark(port);
            return true;
        }
        keep_waker(&mut slot.waker, context);
        false
    }

    pub(super) fn make_ready(&mut self, port: u32) {
        let slot = &mut self.slots[port as usize];
        if slot.ready_at == NONE && !slot.granted {
            let class = if self.ranks[slot.rank.index()].suspension.is_on() { SUSPENDED } else { slot.class };
            let list = &mut self.ready[class];
            slot.ready_at = list.len() as u32;
            list.push(port);
        }
    }

    pub(super) fn unready(&mut self, port: u32) {
        let slot = &mut self.slots[port as usize];
        let at = std::mem::replace(&mut slot.ready_at, NONE);
        if at == NONE {
            return;
        }
        let class = if self.ranks[slot.rank.index()].suspension.is_on() { SUSPENDED } else { slot.class };
        let list = &mut self.ready[class];
        list.swap_remove(at as usize);
        if let Some(&moved) = list.get(at as usize) {
            self.slots[moved as usize].ready_at = at;
        }
    }
}
