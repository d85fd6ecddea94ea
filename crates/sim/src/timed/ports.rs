//! Open ports: their clocks, and how a role is held until its time has come.

use std::task::{Context, Poll, Waker};

use ep_core::machine::Opening;
use ep_core::port::{Cell, LaneId, Need, Role, Units, Work};
use ep_core::trace::Verb;
use ep_core::{Nanos, Rank};

use super::World;
use super::agenda::Agenda;
use super::events::Event;
use super::model::Model;
use super::verbs::{Ends, Target};
use crate::wakers::keep_waker;

/// What a port is held for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Held {
    /// Not held: the role runs, or waits for something that is no port.
    Not,
    /// For the world to come to its clock.
    Clock(Nanos),
    /// For one of its needs.
    Needs,
    /// For one of its payloads, or one of its needs.
    Units,
    /// For tickets of a lane, which has that number, up to one.
    Flush { lane: LaneId, number: u32, upto: u64 },
}

/// A need that is registered with its cell.
#[derive(Clone, Copy, Debug)]
pub(super) struct Watched {
    pub(super) need: Need,
    pub(super) number: u32,
}

/// One open port, or a place for one.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) rank: Rank,
    pub(super) role: Role,
    pub(super) op: u64,
    pub(super) generation: u16,
    pub(super) deadline: Nanos,
    /// How far its role has come; behind the world's time only while it waits.
    pub(super) clock: Nanos,
    /// Begun nanoseconds of copies and of sums.
    pub(super) rests: [u64; 2],
    pub(super) held: Held,
    pub(super) granted: bool,
    /// Whether its role looks at nothing for now.
    pub(super) only_posts: bool,
    pub(super) waker: Option<Waker>,
    /// Registered needs; from the last wait on, until others take their places.
    pub(super) needs: Vec<Watched>,
    /// The payloads of the last wait for units.
    pub(super) units: Vec<Units>,
    pub(super) since: Nanos,
    /// The lane it posted to last.
    pub(super) lane: Option<(LaneId, Ends)>,
    /// The rank and the cell that it published to last.
    pub(super) target: Option<(Rank, Cell, Target)>,
}

impl World {
    pub(crate) fn open(&mut self, rank: Rank, opening: Opening) -> u32 {
        let Opening { role, op, generation, deadline } = opening;
        let launch = self.timing.model.launch;
        let state = &mut self.ranks[rank];
        if op > state.launched {
            state.launched = op;
            state.main = state.main.max(self.now) + launch;
        }
        let clock = self.now_of(rank);
        let port = self.free.pop().unwrap_or(self.slots.len() as u32);
        let needs = self.slots.get_mut(port as usize).map(|slot| std::mem::take(&mut slot.needs)).unwrap_or_default();
        let slot = Slot {
            rank,
            role,
            op,
            generation,
            deadline,
            clock,
            rests: [0; 2],
            held: Held::Not,
            granted: false,
            only_posts: false,
            waker: None,
            needs,
            units: Vec::new(),
            since: clock,
            lane: None,
            target: None,
        };
        match self.slots.get_mut(port as usize) {
            Some(place) => *place = slot,
            None => self.slots.push(slot),
        }
        self.record(port, Verb::Open);
        port
    }

    /// Closes a port: the rank's main line goes on when its role has come to its end.
    pub(crate) fn close(&mut self, port: u32) {
        self.record(port, Verb::Close);
        self.release(port);
        while let Some(watched) = self.slots[port as usize].needs.pop() {
            let at = self.slots[port as usize].needs.len() as u32;
            self.cells.forget(watched.number, (port, at));
        }
        let slot = &mut self.slots[port as usize];
        slot.waker = None;
        let state = &mut self.ranks[slot.rank];
        state.main = state.main.max(slot.clock);
        self.free.push(port);
    }

    /// The time of the port's role.
    pub(crate) fn clock(&self, port: u32) -> Nanos {
        self.slots[port as usize].clock.max(self.now)
    }

    /// The port's role works.
    pub(crate) fn charge(&mut self, port: u32, work: Work) {
        let model = self.timing.model;
        let (bytes, rate, which) = match work {
            Work::Row { bytes } => (bytes, model.copy, 0),
            Work::Reduce { bytes } => (bytes, model.reduce, 1),
        };
        let bytes = self.timing.elision.counted(bytes);
        let begin = self.clock(port);
        let slot = &mut self.slots[port as usize];
        slot.clock = begin + model.row + rate.time(bytes, &mut slot.rests[which]);
    }

    /// The port's role looks at nothing for now, or does again.
    pub(crate) fn only_posts(&mut self, port: u32, only: bool) {
        self.slots[port as usize].only_posts = only;
    }

    /// Begins a verb that posts: the role may be ahead of the world by as long as the fastest effect travels, or further while
    /// it looks at nothing: what it posts happens in its turn.
    pub(crate) fn poll_post(&mut self, port: u32, context: &Context<'_>) -> Poll<()> {
        let Model { near, far, .. } = self.timing.model;
        let ahead = near.latency.min(far.latency);
        let ahead = if self.slots[port as usize].only_posts { ahead.max(Agenda::NEAR) } else { ahead };
        self.poll_turn(port, ahead, context)
    }

    /// Begins a verb that sees: holds the role until the world has come to its clock.
    pub(crate) fn poll_look(&mut self, port: u32, context: &Context<'_>) -> Poll<()> {
        self.poll_turn(port, Nanos(0), context)
    }

    fn poll_turn(&mut self, port: u32, ahead: Nanos, context: &Context<'_>) -> Poll<()> {
        let now = self.now;
        let slot = &mut self.slots[port as usize];
        if slot.clock <= now + ahead && self.verdict.is_none() {
            slot.clock = slot.clock.max(now);
            self.release(port);
            return Poll::Ready(());
        }
        let held = Held::Clock(slot.clock);
        if slot.held != held {
            slot.held = held;
            self.agenda.enter(slot.clock, Event::Resume(port));
        }
        keep_waker(&mut slot.waker, context);
        Poll::Pending
    }

    /// The world has come to a time that a port may have been held for.
    pub(super) fn resume(&mut self, port: u32) {
        if self.slots[port as usize].held == Held::Clock(self.now) {
            self.wake(port);
        }
    }

    pub(super) fn hold(&mut self, port: u32, held: Held, context: &Context<'_>) {
        let slot = &mut self.slots[port as usize];
        slot.held = held;
        slot.granted = false;
        keep_waker(&mut slot.waker, context);
        self.no_deadline_before = self.no_deadline_before.min(slot.deadline);
    }

    /// Forgets what the port was held for.
    pub(super) fn release(&mut self, port: u32) {
        let slot = &mut self.slots[port as usize];
        slot.granted = false;
        match std::mem::replace(&mut slot.held, Held::Not) {
            Held::Flush { .. } => self.ranks[slot.rank].flushing.retain(|&flushing| flushing != port),
            Held::Units => self.ranks[slot.rank].polling.retain(|&polling| polling != port),
            Held::Not | Held::Clock(_) | Held::Needs => {}
        }
    }

    /// Whether what the port is held for may have come; if so it is held no more, and its clock is the world's.
    pub(super) fn granted(&mut self, port: u32, context: &Context<'_>) -> bool {
        let slot = &mut self.slots[port as usize];
        if slot.granted && self.verdict.is_none() {
            slot.clock = slot.clock.max(self.now);
            self.release(port);
            return true;
        }
        keep_waker(&mut slot.waker, context);
        false
    }

    pub(super) fn wake(&mut self, port: u32) {
        let slot = &mut self.slots[port as usize];
        slot.granted = true;
        if let Some(waker) = &slot.waker {
            waker.wake_by_ref();
        }
    }

    /// Registers the needs of a port's next wait. Most waits are for the same cells as the wait before.
    pub(super) fn watch(&mut self, port: u32, needs: &[Need]) {
        let Slot { rank, generation, .. } = self.slots[port as usize];
        for (at, &need) in (0u32..).zip(needs) {
            let before = self.slots[port as usize].needs.get(at as usize).copied();
            if let Some(before) = before.filter(|before| before.need.cell == need.cell) {
                self.slots[port as usize].needs[at as usize] = Watched { need, ..before };
                continue;
            }
            let number = self.cell_number(rank, need.cell, generation);
            let watched = Watched { need, number };
            match before {
                Some(before) => {
                    self.cells.forget(before.number, (port, at));
                    self.slots[port as usize].needs[at as usize] = watched;
                }
                None => self.slots[port as usize].needs.push(watched),
            }
            self.cells.await_by(number, (port, at));
        }
        while self.slots[port as usize].needs.len() > needs.len() {
            let Some(before) = self.slots[port as usize].needs.pop() else { break };
            let at = self.slots[port as usize].needs.len() as u32;
            self.cells.forget(before.number, (port, at));
        }
    }

    /// The number of a cell in a rank's window.
    pub(super) fn cell_number(&mut self, rank: Rank, cell: Cell, generation: u16) -> u32 {
        self.cells.number(&self.layout, rank, cell, generation)
    }
}
