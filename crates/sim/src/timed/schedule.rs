//! Time: which event is next, and what it does.

use std::num::NonZeroU64;

use ep_core::{Nanos, Rank, layout};

use super::crew::{Outlook, Stretch};
use super::events::{Class, Event, Notice};
use super::links::{Departure, Flight};
use super::ports::{Held, Slot};
use super::tickets::Progress;
use super::{NEVER, World};
use crate::violation::Violation;
use crate::wakers::Woken;

impl World {
    /// What is to come, for all to agree how far to go.
    pub(crate) fn outlook(&mut self, woken: &Woken) -> Outlook {
        // Before anything has happened, futures that were never polled.
        let polled = woken.any().then_some(self.now);
        let next = [polled, self.agenda.next_time(), self.next_departure()].into_iter().flatten().min();
        Outlook {
            next: next.unwrap_or(NEVER),
            deadline: self.no_deadline_before,
            deadlines: self.deadlines || self.meeting.first_deadline().is_some(),
            running: self.running,
            events: self.events,
        }
    }

    /// Lets things happen before `stretch.end` until a future has to be polled; none when time has come there. All futures
    /// that were woken run before time goes on.
    ///
    /// # Errors
    /// What the run has found so far.
    pub(crate) fn next(&mut self, woken: &Woken, stretch: &Stretch) -> Result<Option<Rank>, Violation> {
        loop {
            if let Some(violation) = &self.verdict {
                return Err(violation.clone());
            }
            if let Some(place) = woken.next() {
                return Ok(Some(self.ranks.rank(place.index())));
            }
            match self.agenda.next_time() {
                Some(time) if time < stretch.end.min(self.no_deadline_before) && !self.is_over() => {
                    self.happen(time)?
                }
                _ if stretch.expired.is_some_and(|now| self.no_deadline_before <= now) => self.reach_deadline(),
                _ => return Ok(None),
            }
        }
    }

    /// Whether nobody waits for what happens here.
    const fn is_over(&self) -> bool {
        self.running == 0 && self.partitions.count() == 1
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
                self.sides[from].side(class).due -= 1;
                let get_ticket = NonZeroU64::new(ticket).filter(|_| get);
                let left = self.leave((from, self.now), class, Flight { lane, to, get: get_ticket, bytes });
                if !get {
                    self.settle(from, ticket, left);
                }
            }
            Some(Event::LeaveAbroad { from, lane, ticket, bytes }) => {
                self.sides[from].side(Class::Far).due -= 1;
                let left = self.leave_abroad((from, self.now), Departure { lane, bytes });
                self.settle(from, ticket, left);
            }
            Some(Event::Enter { from, to, lane, bytes }) => {
                let end = self.pass_in(to, Class::Far, bytes);
                self.entered(lane, end);
                self.landed(from, end);
            }
            Some(Event::Matter(number)) => self.happens(number),
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
        let side = self.sides[rank].side(class);
        let (begin, end) = side.out.pass(handed, flight.bytes, link.rate);
        let at = begin + link.latency;
        side.flying.push_back((at, flight));
        if side.flying.len() == 1 {
            self.agenda.enter(at, Event::Reach(rank, class));
        }
        end
    }

    /// A put to another partition is handed to the port of `rank` at `handed`; as [`World::leave`].
    pub(super) fn leave_abroad(&mut self, (rank, handed): (Rank, Nanos), departure: Departure) -> Nanos {
        let link = self.timing.model.link(Class::Far);
        let sides = &mut self.sides[rank];
        let (begin, end) = sides.side(Class::Far).out.pass(handed, departure.bytes, link.rate);
        sides.abroad().push_back((begin + link.latency, departure));
        end
    }

    /// It is known when a ticket of a rank needs nothing more.
    pub(super) fn settle(&mut self, rank: Rank, ticket: u64, at: Nanos) {
        if let Some(lane) = self.ranks[rank].tickets.settle(ticket, at) {
            self.notify_flushers(rank, lane);
        }
    }

    /// The first byte of what left `rank` first reaches its target, and enters as soon as it can: from now on it is known when
    /// that will be.
    fn reach(&mut self, rank: Rank, class: Class) {
        let flying = &mut self.sides[rank].side(class).flying;
        let Some((_, flight)) = flying.pop_front() else { return };
        if let Some(&(at, _)) = flying.front() {
            self.agenda.enter(at, Event::Reach(rank, class));
        }
        let end = self.pass_in(flight.to, class, flight.bytes);
        // What it travels towards posted it, or what it comes from.
        let poster = if flight.get.is_some() { flight.to } else { rank };
        match flight.get {
            Some(ticket) => self.settle(poster, ticket.get(), end),
            None => self.entered(flight.lane, end),
        }
        self.landed(poster, end);
    }

    /// What comes to a rank enters as soon as it can, from now on; returns when it is there.
    fn pass_in(&mut self, rank: Rank, class: Class, bytes: u64) -> Nanos {
        let rate = self.timing.model.link(class).rate;
        self.sides[rank].side(class).inn.pass(self.now, bytes, rate).1
    }

    /// A put of a lane has reached its peer, and is there by `end`.
    fn entered(&mut self, number: u32, end: Nanos) {
        let lane = self.lanes.reached_mut(number);
        lane.puts = lane.puts.wrapping_add(1);
        lane.entered = end;
        if lane.held().is_some() {
            self.let_go(number);
        }
    }

    /// A publish has come; it waits for puts of its lane that have not entered. No put that was posted after it has reached
    /// the peer before.
    fn arrived(&mut self, notice: Notice) {
        if notice.lane == Notice::NO_LANE {
            return self.raise(notice);
        }
        let lane = self.lanes.reached(notice.lane);
        if !lane.has(notice.after) {
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
        let lane = self.lanes.reached_mut(notice.lane);
        let before = lane.held();
        lane.set_held(Some([before.map_or(number, |[first, _]| first), number]));
        if let Some([_, last]) = before {
            self.held.get_mut(last).1 = Some(number);
        }
    }

    /// Lets the publishes go that waited for what has reached the peer of a lane: they are raised when that has entered.
    fn let_go(&mut self, number: u32) {
        while let Some([first, last]) = self.lanes.reached(number).held() {
            let (notice, next) = *self.held.get_mut(first);
            let lane = self.lanes.reached_mut(number);
            if !lane.has(notice.after) {
                return;
            }
            lane.set_held(next.map(|next| [next, last]));
            let at = lane.entered;
            self.held.take(first);
            self.agenda.enter(at, Event::Raise(notice));
        }
    }

    fn raise(&mut self, notice: Notice) {
        if notice.cell == Notice::UNITS {
            self.come(notice.bits as u32);
            return self.landed(notice.from, Nanos(0));
        }
        let bits = self.cells.raise(notice.cell, notice.bits);
        let mut next = 0;
        while let Some((port, need)) = self.cells.waiter(notice.cell, next) {
            next += 1;
            let Slot { held, granted, generation, needs, .. } = &self.slots[port as usize];
            let enough = || layout::value_in(*generation, bits) >= needs[need as usize].need.at_least;
            if matches!(held, Held::Needs | Held::Units) && !granted && enough() {
                self.wake(port);
            }
        }
        self.landed(notice.from, Nanos(0));
    }

    /// Wakes the ports that flush a lane of `rank`, where it is known when that is over.
    fn notify_flushers(&mut self, rank: Rank, number: u32) {
        for at in 0..self.ranks[rank].flushing.len() {
            let port = self.ranks[rank].flushing[at];
            if let Held::Flush { number: flushed, upto, .. } = self.slots[port as usize].held
                && flushed == number
                && matches!(self.progress(rank, number, upto), Progress::By(_))
            {
                self.wake(port);
            }
        }
    }
}
