//! Waits and flushes: when they are over, and how they end.

use std::task::{Context, Poll};

use ep_core::port::{LaneId, Need, Ticket, Units, unit_count};
use ep_core::trace::Verb;
use ep_core::{Fault, Nanos, Rank, layout};

use super::World;
use super::ports::{Held, Slot};
use super::tickets::Progress;
use crate::violation::{Awaited, Report, Waiting};

impl World {
    /// Starts a wait at the port's clock.
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
        self.watch(port, needs);
        self.end_wait(port, context)
    }

    /// Polls a role that [`World::begin_wait`] held.
    pub(crate) fn resume_wait(&mut self, port: u32, context: &Context<'_>) -> Poll<Result<usize, Fault>> {
        if self.granted(port, context) { self.end_wait(port, context) } else { Poll::Pending }
    }

    /// Ends a wait if it is over, or holds the role.
    fn end_wait(&mut self, port: u32, context: &Context<'_>) -> Poll<Result<usize, Fault>> {
        let Slot { rank, generation, deadline, since, needs, .. } = &self.slots[port as usize];
        let value = |number: u32| layout::value_in(*generation, self.cells.bits(number));
        let met = needs.iter().position(|watched| value(watched.number) >= watched.need.at_least);
        let outcome = if let Some(index) = met {
            Ok(index)
        } else if self.now < *deadline {
            self.hold(port, Held::Needs, context);
            return Poll::Pending;
        } else {
            let first = needs.first().map(|watched| (watched.need, value(watched.number)));
            Err(Need::unmet(first, *rank, self.now - *since))
        };
        if outcome.is_ok() {
            self.slots[port as usize].clock = self.now + self.timing.model.poll;
        }
        self.record(port, Verb::Woke { index: outcome.ok() });
        Poll::Ready(outcome)
    }

    /// Flushes a lane. Once puts have been handed to the rank's port it is known when they have left, so that only the
    /// clock of the role moves; for that, and for gets, it waits.
    pub(crate) fn begin_flush(
        &mut self,
        port: u32,
        lane: LaneId,
        upto: Ticket,
        context: &Context<'_>,
    ) -> Poll<Result<(), Fault>> {
        self.release(port);
        let Slot { rank, .. } = self.slots[port as usize];
        if self.layout.has_lane(rank, lane) && self.ranks[rank].tickets.are_settled(upto.0) {
            self.record(port, Verb::Flushed { lane });
            return Poll::Ready(Ok(()));
        }
        let Some(ends) = self.ends(port, lane) else {
            return Poll::Ready(Err(Fault::NotOffered { verb: "flush", lane }));
        };
        self.slots[port as usize].since = self.clock(port);
        self.end_flush(port, (lane, ends.posted), upto.0, context)
    }

    /// Polls a role that [`World::begin_flush`] held.
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
        match self.ends(port, lane) {
            Some(ends) => self.end_flush(port, (lane, ends.posted), upto.0, context),
            None => Poll::Ready(Err(Fault::NotOffered { verb: "flush", lane })),
        }
    }

    /// Ends a flush if it is over, or holds the role.
    fn end_flush(
        &mut self,
        port: u32,
        (lane, number): (LaneId, u32),
        upto: u64,
        context: &Context<'_>,
    ) -> Poll<Result<(), Fault>> {
        let clock = self.clock(port);
        let Slot { rank, deadline, since, .. } = self.slots[port as usize];
        let phase = lane.kind.phase();
        let timeout = |seen, waited| Fault::Timeout { phase, peer: lane.peer, lane, seen, awaited: upto, waited };
        let outcome = match self.progress(rank, number, upto) {
            // A ticket that needs no wait is settled whatever the time.
            Progress::By(time) if time <= clock.max(deadline) => {
                self.slots[port as usize].clock = clock.max(time);
                Ok(())
            }
            Progress::By(_) => {
                self.slots[port as usize].clock = clock.max(deadline);
                Err(timeout(upto, clock.max(deadline) - since))
            }
            Progress::Awaits(seen) if self.now >= deadline => Err(timeout(seen, clock - since)),
            Progress::Awaits(_) => {
                self.ranks[rank].flushing.push(port);
                self.hold(port, Held::Flush { lane, number, upto }, context);
                return Poll::Pending;
            }
        };
        if outcome.is_ok() {
            self.record(port, Verb::Flushed { lane });
        }
        Poll::Ready(outcome)
    }

    /// How far a lane of `rank` is with its tickets up to one.
    pub(super) fn progress(&self, rank: Rank, number: u32, upto: u64) -> Progress {
        let lane = self.lanes.posted(number);
        let tickets = &self.ranks[rank].tickets;
        let of = |last: u64, get| if last == 0 { Progress::By(Nanos(0)) } else { tickets.progress(number, get, upto) };
        of(lane.put, false).and(of(lane.get, true))
    }

    /// Lets waits end whose deadline has come, and finds the next deadline.
    pub(super) fn expire(&mut self) {
        let mut next = self.meeting.first_deadline().filter(|&deadline| deadline > self.now);
        for port in 0..self.slots.len() as u32 {
            let Slot { held, granted, deadline, .. } = self.slots[port as usize];
            if granted || !matches!(held, Held::Needs | Held::Units | Held::Flush { .. }) {
                continue;
            }
            if deadline <= self.now {
                self.deadlines = true;
                self.wake(port);
            } else {
                next = Some(next.map_or(deadline, |next: Nanos| next.min(deadline)));
            }
        }
        self.meeting.expire(self.now);
        self.answer_all();
        self.no_deadline_before = next.unwrap_or(super::NEVER);
    }

    /// Who waits for what.
    pub(super) fn report(&self) -> Box<Report> {
        let held = self.slots.iter().filter(|slot| slot.held != Held::Not);
        let mut waiting: Vec<Waiting> = held.map(|slot| self.waiting(slot)).chain(self.meeting.waiting()).collect();
        waiting.sort_by_key(|waiting| (waiting.rank, waiting.role));
        let mut unfinished: Vec<_> = waiting.iter().map(|waiting| waiting.rank).collect();
        unfinished.dedup();
        Box::new(Report { seed: self.seed, events: self.events, time: self.now, unfinished, waiting })
    }

    fn waiting(&self, slot: &Slot) -> Waiting {
        let awaits = match slot.held {
            Held::Not | Held::Clock(_) => vec![Awaited::Turn],
            Held::Needs | Held::Units => {
                let units = |units: &Units| {
                    let seen = self.units_seen(slot.rank, units);
                    Awaited::Units { lane: units.lane, seen, awaited: unit_count(units.len) }
                };
                let payloads = if slot.held == Held::Units { slot.units.as_slice() } else { &[] };
                let cell = |number| layout::value_in(slot.generation, self.cells.bits(number));
                let awaited = |need: &Need, seen| Awaited::Cell { cell: need.cell, seen, awaited: need.at_least };
                let cells = slot.needs.iter().map(|watched| awaited(&watched.need, cell(watched.number)));
                payloads.iter().map(units).chain(cells).collect()
            }
            Held::Flush { lane, number, upto } => {
                let seen = match self.progress(slot.rank, number, upto) {
                    Progress::By(_) => upto,
                    Progress::Awaits(ticket) => ticket,
                };
                vec![Awaited::Flush { lane, seen, awaited: upto }]
            }
        };
        Waiting { rank: slot.rank, role: Some(slot.role), op: slot.op, awaits }
    }
}
