//! Open ports: how a role parks, and what makes it ready.

use std::task::{Context, Poll, Waker};

use ep_core::machine::Opening;
use ep_core::port::{Cell, LaneId, Need, Role, Ticket};
use ep_core::trace::Verb;
use ep_core::{Fault, Nanos, Phase, Rank, layout};

use super::{World, lane_phase};
use crate::race::Tracker;
use crate::violation::{Awaited, Report, Violation, Waiting};

const NONE: u32 = u32::MAX;

/// What a port is parked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Parked {
    /// Not parked: the role runs, or waits for something that is no port.
    Not,
    /// At the start of a verb, by the adversary.
    Turn,
    /// For one of the slot's needs.
    Needs,
    /// For transfers of a lane up to a ticket.
    Flush { lane: u32, upto: u64 },
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
    /// Which list of ready ports it belongs to.
    class: usize,
    ready_at: u32,
    granted: bool,
    waker: Option<Waker>,
    needs: Vec<Need>,
    since: Nanos,
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
        let needs = self.slots.get_mut(port as usize).map(|slot| std::mem::take(&mut slot.needs)).unwrap_or_default();
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

    /// Starts a wait.
    pub(crate) fn begin_wait(
        &mut self,
        port: u32,
        needs: &[Need],
        context: &Context<'_>,
    ) -> Poll<Result<usize, Fault>> {
        let Slot { rank, role, .. } = self.slots[port as usize];
        if let Some(need) = needs.iter().find(|need| !self.layout.has_cell(need.cell)) {
            self.broken("F8", (rank, role), format!("waits for {:?}, which is not in the layout", need.cell));
            return Poll::Pending;
        }
        if let Some(need) = needs.first() {
            self.record(port, Verb::Wait { cell: need.cell, at_least: need.at_least });
        }
        self.slots[port as usize].since = self.now;
        if let Some(outcome) = self.evaluate(port, needs) {
            return Poll::Ready(outcome);
        }
        self.slots[port as usize].needs.clear();
        self.slots[port as usize].needs.extend_from_slice(needs);
        self.park(port, Parked::Needs, context);
        Poll::Pending
    }

    /// Polls a role that [`World::begin_wait`] parked.
    pub(crate) fn resume_wait(
        &mut self,
        port: u32,
        needs: &[Need],
        context: &Context<'_>,
    ) -> Poll<Result<usize, Fault>> {
        if !self.granted(port, context) {
            return Poll::Pending;
        }
        let outcome = self.evaluate(port, needs);
        if outcome.is_none() {
            self.park(port, Parked::Needs, context);
        }
        outcome.map_or(Poll::Pending, Poll::Ready)
    }

    /// Starts a flush of a lane.
    pub(crate) fn begin_flush(
        &mut self,
        port: u32,
        lane: LaneId,
        upto: Ticket,
        context: &Context<'_>,
    ) -> Poll<Result<(), Fault>> {
        let rank = self.slots[port as usize].rank;
        if !self.lanes.has(lane.peer, lane.kind) {
            return Poll::Ready(Err(Fault::NotOffered { verb: "flush", lane }));
        }
        let number = self.lanes.number(rank, lane.peer, lane.kind);
        self.slots[port as usize].since = self.now;
        let parked = Parked::Flush { lane: number, upto: upto.0 };
        if let Some(outcome) = self.evaluate_flush(port, number, upto.0) {
            return Poll::Ready(outcome);
        }
        self.lanes.lane_mut(number).flusher = Some(port);
        self.park(port, parked, context);
        Poll::Pending
    }

    /// Polls a role that [`World::begin_flush`] parked.
    pub(crate) fn resume_flush(
        &mut self,
        port: u32,
        lane: LaneId,
        upto: Ticket,
        context: &Context<'_>,
    ) -> Poll<Result<(), Fault>> {
        if !self.granted(port, context) {
            return Poll::Pending;
        }
        let number = self.lanes.number(self.slots[port as usize].rank, lane.peer, lane.kind);
        let outcome = self.evaluate_flush(port, number, upto.0);
        if outcome.is_none() {
            self.lanes.lane_mut(number).flusher = Some(port);
            self.park(port, Parked::Flush { lane: number, upto: upto.0 }, context);
        }
        outcome.map_or(Poll::Pending, Poll::Ready)
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

    /// How a wait ends now, if it does.
    fn evaluate(&mut self, port: u32, needs: &[Need]) -> Option<Result<usize, Fault>> {
        let Slot { rank, generation, deadline, since, .. } = self.slots[port as usize];
        let met = needs.iter().position(|need| self.value(rank, generation, need.cell) >= need.at_least);
        let outcome = if let Some(index) = met {
            self.acquire(port, needs[index].cell);
            Ok(index)
        } else if let Some(need) = needs.iter().find(|need| self.ranks[need.cell.writer.index()].gone()) {
            Err(Fault::PeerGone { peer: need.cell.writer, phase: need.cell.counter.phase() })
        } else if self.now >= deadline {
            let waited = self.now - since;
            Err(needs.first().map_or(
                Fault::Timeout {
                    phase: Phase::Probe,
                    peer: rank,
                    lane: LaneId { peer: rank, kind: ep_core::port::LaneKind::Watch },
                    seen: 0,
                    awaited: 0,
                    waited,
                },
                |need| Fault::Timeout {
                    phase: need.cell.counter.phase(),
                    peer: need.cell.writer,
                    lane: LaneId { peer: need.cell.writer, kind: need.cell.lane },
                    seen: self.value(rank, generation, need.cell),
                    awaited: need.at_least,
                    waited,
                },
            ))
        } else {
            return None;
        };
        self.record(port, Verb::Woke { index: outcome.ok() });
        Some(outcome)
    }

    /// How a flush ends now, if it does.
    fn evaluate_flush(&mut self, port: u32, number: u32, upto: u64) -> Option<Result<(), Fault>> {
        let Slot { actor, deadline, since, .. } = self.slots[port as usize];
        let lane = self.lanes.lane(number);
        let (peer, kind) = (lane.to, lane.kind);
        let id = LaneId { peer, kind };
        let outcome = match lane.unsettled(upto) {
            None => {
                if let Some(race) = &mut self.race {
                    race.flushed(actor, number, upto.min(self.lanes.lane(number).issued));
                }
                Ok(())
            }
            Some(_) if self.ranks[peer.index()].gone() => Err(Fault::PeerGone { peer, phase: lane_phase(kind) }),
            Some(seen) if self.now >= deadline => {
                let waited = self.now - since;
                Err(Fault::Timeout { phase: lane_phase(kind), peer, lane: id, seen, awaited: upto, waited })
            }
            Some(_) => return None,
        };
        self.record(port, Verb::Flushed { lane: id });
        Some(outcome)
    }

    /// Makes every port of `rank` that waits for `cell`, or for anything that can no longer come, ready if its wait is over.
    pub(super) fn notify(&mut self, rank: Rank, cell: Cell, generation: u16) {
        for at in 0..self.ranks[rank.index()].ports.len() {
            let port = self.ranks[rank.index()].ports[at];
            let slot = &self.slots[port as usize];
            let met = slot.parked == Parked::Needs
                && slot.ready_at == NONE
                && slot.generation == generation
                && slot
                    .needs
                    .iter()
                    .any(|need| need.cell == cell && self.value(rank, generation, cell) >= need.at_least);
            if met {
                self.make_ready(port);
            }
        }
    }

    /// Makes the port that flushes a lane ready, if that is over.
    pub(super) fn notify_flusher(&mut self, number: u32) {
        let lane = self.lanes.lane(number);
        let Some(port) = lane.flusher else { return };
        let over = match self.slots[port as usize].parked {
            Parked::Flush { lane: flushed, upto } if flushed == number => lane.unsettled(upto).is_none(),
            _ => return,
        };
        if over {
            self.lanes.lane_mut(number).flusher = None;
            self.make_ready(port);
        }
    }

    /// Makes every waiting port ready for which `over` holds.
    pub(super) fn notify_where(&mut self, over: impl Fn(&Self, &Slot) -> bool) {
        for port in 0..self.slots.len() as u32 {
            let slot = &self.slots[port as usize];
            if matches!(slot.parked, Parked::Needs | Parked::Flush { .. }) && over(self, slot) {
                self.make_ready(port);
            }
        }
    }

    /// Whether a port waits for something that only `peer` can do.
    pub(super) fn concerns(&self, slot: &Slot, peer: Rank) -> bool {
        match slot.parked {
            Parked::Needs => slot.needs.iter().any(|need| need.cell.writer == peer),
            Parked::Flush { lane, .. } => self.lanes.lane(lane).to == peer,
            _ => false,
        }
    }

    /// The first deadline of a waiting port.
    pub(super) fn first_deadline(&self) -> Option<Nanos> {
        let waiting = self.slots.iter().filter(|slot| matches!(slot.parked, Parked::Needs | Parked::Flush { .. }));
        waiting.map(|slot| slot.deadline).min()
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

    /// Who waits for what.
    pub(super) fn report(&self) -> Box<Report> {
        let alive = self.ranks.iter().zip(self.layout.topology().all());
        let unfinished = alive.filter(|(state, _)| !state.finished && !state.crashed).map(|(_, rank)| rank).collect();
        let ports = self.ranks.iter().flat_map(|state| &state.ports).map(|&port| &self.slots[port as usize]);
        let roles = ports.filter(|slot| slot.parked != Parked::Not).map(|slot| self.waiting(slot));
        let mut waiting: Vec<Waiting> = roles.chain(self.meeting.waiting()).collect();
        waiting.sort_by_key(|waiting| (waiting.rank, waiting.role));
        Box::new(Report { seed: self.seed, events: self.events, time: self.now, unfinished, waiting })
    }

    fn waiting(&self, slot: &Slot) -> Waiting {
        let awaits = match slot.parked {
            Parked::Not | Parked::Turn => vec![Awaited::Turn],
            Parked::Needs => {
                let cell = |need: &Need| {
                    let seen = self.value(slot.rank, slot.generation, need.cell);
                    Awaited::Cell { cell: need.cell, seen, awaited: need.at_least }
                };
                slot.needs.iter().map(cell).collect()
            }
            Parked::Flush { lane, upto } => {
                let lane = self.lanes.lane(lane);
                let id = LaneId { peer: lane.to, kind: lane.kind };
                vec![Awaited::Flush { lane: id, seen: lane.unsettled(upto).unwrap_or(upto), awaited: upto }]
            }
        };
        Waiting { rank: slot.rank, role: Some(slot.role), op: slot.op, awaits }
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

    fn park(&mut self, port: u32, parked: Parked, context: &Context<'_>) {
        let slot = &mut self.slots[port as usize];
        slot.parked = parked;
        slot.granted = false;
        keep_waker(&mut slot.waker, context);
    }

    /// Forgets what the port was parked for: a verb that was dropped half-way, or one that ends.
    fn unpark(&mut self, port: u32) {
        self.unready(port);
        let slot = &mut self.slots[port as usize];
        slot.granted = false;
        if let Parked::Flush { lane, .. } = std::mem::replace(&mut slot.parked, Parked::Not) {
            let flusher = &mut self.lanes.lane_mut(lane).flusher;
            *flusher = flusher.filter(|&flushing| flushing != port);
        }
    }

    fn granted(&mut self, port: u32, context: &Context<'_>) -> bool {
        let slot = &mut self.slots[port as usize];
        if slot.granted && self.verdict.is_none() {
            self.unpark(port);
            return true;
        }
        keep_waker(&mut slot.waker, context);
        false
    }

    fn make_ready(&mut self, port: u32) {
        let slot = &mut self.slots[port as usize];
        if slot.ready_at == NONE && !slot.granted {
            let list = &mut self.ready[slot.class];
            slot.ready_at = list.len() as u32;
            list.push(port);
        }
    }

    fn unready(&mut self, port: u32) {
        let slot = &mut self.slots[port as usize];
        let at = std::mem::replace(&mut slot.ready_at, NONE);
        if at == NONE {
            return;
        }
        let list = &mut self.ready[slot.class];
        list.swap_remove(at as usize);
        if let Some(&moved) = list.get(at as usize) {
            self.slots[moved as usize].ready_at = at;
        }
    }
}

/// Remembers whom to wake, without cloning a waker that is already there.
pub(super) fn keep_waker(place: &mut Option<Waker>, context: &Context<'_>) {
    match place {
        Some(waker) => waker.clone_from(context.waker()),
        None => *place = Some(context.waker().clone()),
    }
}
