//! Time: which event is next, and what it does.

use std::num::NonZeroU64;

use ep_core::{Nanos, Rank, layout};

use super::events::{Class, Event, Notice};
use super::links::Flight;
use super::ports::{Held, Slot};
use super::tickets::Progress;
use super::{NEVER, World};
use crate::violation::Violation;
use crate::wakers::Woken;
use crate::world::Step;

impl World {
    /// Lets things happen until a future has to be polled. All futures that were woken run before time goes on.
    ///
    /// # Errors
    /// What the run has found so far, or that nothing can happen any more.
    pub(crate) fn next(&mut self, woken: &Woken) -> Result<Step, Violation> {
        loop {
            if let Some(violation) = &self.verdict {
                return Err(violation.clone());
            }
            if let Some(rank) = woken.next() {
                return Ok(Step::Poll(rank));
            }
            if self.running == 0 {
                return Ok(Step::Finished);
            }
            match self.agenda.next_time() {
                Some(time) if time < self.no_deadline_before => self.happen(time)?,
                Some(_) => self.reach_deadline(),
                None if self.deadlines || self.meeting.first_deadline().is_some() => {
                    if self.no_deadline_before == NEVER {
                        return Err(Violation::Deadlock(self.report()));
                    }
                    self.reach_deadline();
                }
                None => return Err(Violation::Deadlock(self.report())),
            }
        }
    }

    fn reach_deadline(&mut self) {
        self.now = self.now.max(self.no_deadline_before);
        self.expire();
    }

    /// The next event happens, at `time`.
    fn happen(&mut self, time: Nanos) -> Result<(), Violation> {
        self.events += 1;
        if self.events > self.max_events {
            return Err(Violation::Livelock(self.report()));
        }
        self.now = time;
        if self.agenda.turn(time) {
            self.foresee();
        }
        match self.agenda.pop() {
            Some(Event::Resume(port)) => self.resume(port),
            Some(Event::Leave { from, to, class, get, lane, ticket, bytes }) => {
                self.sides[from.index()].side(class).due -= 1;
                let get_ticket = NonZeroU64::new(ticket).filter(|_| get);
                let left = self.leave((from, self.now), class, Flight { lane, to, get: get_ticket, bytes });
                if !get {
                    self.settle(from, lane, ticket, left);
                }
            }
            Some(Event::Reach(rank, class)) => self.reach(rank, class),
            Some(Event::Arrive(notice)) => self.arrived(notice),
            Some(Event::Raise(notice)) => self.raise(notice),
            Some(Event::Settled(rank)) => self.settled(rank),
            None => {}
        }
        Ok(())
    }

    /// A transfer is handed to the port of `rank` at `handed`, and leaves as soon as it can; returns when it has left.
    pub(super) fn leave(&mut self, (rank, handed): (Rank, Nanos), class: Class, flight: Flight) -> Nanos {
        let link = self.timing.model.link(class);
        let side = self.sides[rank.index()].side(class);
        let (begin, end) = side.out.pass(handed, flight.bytes, link.rate);
        let at = begin + link.latency;
        side.flying.push_back((at, flight));
        if side.flying.len() == 1 {
            self.agenda.enter(at, Event::Reach(rank, class));
        }
        end
    }

    /// It is known when a ticket of a rank's lane needs nothing more.
    pub(super) fn settle(&mut self, rank: Rank, lane: u32, ticket: u64, at: Nanos) {
        self.ranks[rank.index()].tickets.settle(ticket, at);
        self.notify_flushers(rank, lane);
    }

    /// The first byte of what left `rank` first reaches its target, and enters as soon as it can: from now on it is known when
    /// that will be.
    fn reach(&mut self, rank: Rank, class: Class) {
        let flying = &mut self.sides[rank.index()].side(class).flying;
        let Some((_, flight)) = flying.pop_front() else { return };
        if let Some(&(at, _)) = flying.front() {
            self.agenda.enter(at, Event::Reach(rank, class));
        }
        let rate = self.timing.model.link(class).rate;
        let (_, end) = self.sides[flight.to.index()].side(class).inn.pass(self.now, flight.bytes, rate);
        // What it travels towards posted it, or what it comes from.
        let poster = if flight.get.is_some() { flight.to } else { rank };
        if let Some(ticket) = flight.get {
            self.settle(poster, flight.lane, ticket.get(), end);
        } else {
            let lane = self.lanes.lane_mut(flight.lane);
            lane.reached = lane.reached.wrapping_add(1);
            lane.entered = end;
            if lane.held().is_some() {
                self.let_go(flight.lane);
            }
        }
        let state = &mut self.ranks[poster.index()];
        state.entered = state.entered.max(end);
        self.landed(poster);
    }

    /// A publish has come; it waits for puts of its lane that have not entered. No put that was posted after it has reached
    /// the peer before.
    fn arrived(&mut self, notice: Notice) {
        if notice.lane == Notice::NO_LANE {
            return self.raise(notice);
        }
        let lane = self.lanes.lane(notice.lane);
        if !lane.has_reached(notice.after) {
            self.hold_back(notice);
        } else if lane.entered <= self.now {
            self.raise(notice);
        } else {
            let at = lane.entered;
            self.agenda.enter(at, Event::Raise(notice));
        }
    }

    /// Keeps a publish until the puts that it follows have reached its peer.
    fn hold_back(&mut self, notice: Notice) {
        let number = self.held.add((notice, None));
        let lane = self.lanes.lane_mut(notice.lane);
        let before = lane.held();
        lane.set_held(Some([before.map_or(number, |[first, _]| first), number]));
        if let Some([_, last]) = before {
            self.held.get_mut(last).1 = Some(number);
        }
    }

    /// Lets the publishes go that waited for what has reached the peer of a lane: they are raised when that has entered.
    fn let_go(&mut self, number: u32) {
        while let Some([first, last]) = self.lanes.lane(number).held() {
            let (notice, next) = *self.held.get_mut(first);
            let lane = self.lanes.lane_mut(number);
            if !lane.has_reached(notice.after) {
                return;
            }
            lane.set_held(next.map(|next| [next, last]));
            let at = lane.entered;
            self.held.take(first);
            self.agenda.enter(at, Event::Raise(notice));
        }
    }

    fn raise(&mut self, notice: Notice) {
        let bits = self.cells.raise(notice.cell, notice.bits);
        let mut next = 0;
        while let Some((port, need)) = self.cells.waiter(notice.cell, next) {
            next += 1;
            let Slot { held, granted, generation, needs, .. } = &self.slots[port as usize];
            let enough = || layout::value_in(*generation, bits) >= needs[need as usize].need.at_least;
            if *held == Held::Needs && !granted && enough() {
                self.wake(port);
            }
        }
        self.landed(notice.from);
    }

    /// Wakes the ports that flush a lane of `rank`, where it is known when that is over.
    fn notify_flushers(&mut self, rank: Rank, number: u32) {
        for at in 0..self.ranks[rank.index()].flushing.len() {
            let port = self.ranks[rank.index()].flushing[at];
            if let Held::Flush { number: flushed, upto, .. } = self.slots[port as usize].held
                && flushed == number
                && matches!(self.progress(rank, number, upto), Progress::By(_))
            {
                self.wake(port);
            }
        }
    }
}
