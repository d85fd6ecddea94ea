//! Time: which event is next, and what it does.

use ep_core::{Nanos, Rank, layout};

use super::World;
use super::agenda::{Class, Event};
use super::lanes::Progress;
use super::links::Flight;
use super::ports::{Held, Slot};
use super::posts::{Notice, Post};
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
                    if self.no_deadline_before == super::NEVER {
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
        match self.agenda.pop() {
            Some(Event::Resume(port)) => self.resume(port),
            Some(Event::Post(number)) => match self.posts.take(number) {
                Post::Leave { from, class, flight } => self.leave(from, class, flight),
                Post::Arrive(notice) => self.arrived(notice),
            },
            Some(Event::Reach(rank, class)) => self.reach(rank, class),
            Some(Event::Enter(rank, class)) => self.entered(rank, class),
            None => {}
        }
        Ok(())
    }

    /// A transfer is handed to the port of `rank`, and leaves as soon as it can.
    fn leave(&mut self, rank: Rank, class: Class, flight: Flight) {
        let link = self.timing.model.link(class);
        let side = self.sides[rank.index()].side(class);
        let (begin, end) = side.out.pass(self.now, flight.bytes, link.rate);
        let at = begin + link.latency;
        side.flying.push_back((at, flight));
        if side.flying.len() == 1 {
            self.agenda.enter(at, Event::Reach(rank, class));
        }
        if !flight.get {
            self.lanes.lane_mut(flight.lane).settle(flight.ticket, end);
            self.notify_flusher(flight.lane);
        }
    }

    /// The first byte of what left `rank` first reaches its target, and enters as soon as it can.
    fn reach(&mut self, rank: Rank, class: Class) {
        let flying = &mut self.sides[rank.index()].side(class).flying;
        let Some((_, flight)) = flying.pop_front() else { return };
        if let Some(&(at, _)) = flying.front() {
            self.agenda.enter(at, Event::Reach(rank, class));
        }
        let rate = self.timing.model.link(class).rate;
        let side = self.sides[flight.to.index()].side(class);
        let (_, end) = side.inn.pass(self.now, flight.bytes, rate);
        side.entering.push_back((end, flight));
        if side.entering.len() == 1 {
            self.agenda.enter(end, Event::Enter(flight.to, class));
        }
    }

    /// What entered `rank` first is there.
    fn entered(&mut self, rank: Rank, class: Class) {
        let entering = &mut self.sides[rank.index()].side(class).entering;
        let Some((_, flight)) = entering.pop_front() else { return };
        if let Some(&(at, _)) = entering.front() {
            self.agenda.enter(at, Event::Enter(rank, class));
        }
        let now = self.now;
        let lane = self.lanes.lane_mut(flight.lane);
        let poster = lane.from;
        if flight.get {
            lane.settle(flight.ticket, now);
            self.notify_flusher(flight.lane);
        } else {
            lane.arrived += 1;
            self.raise_held(flight.lane);
        }
        self.landed(poster);
    }

    /// A publish has come; it waits for puts of its lane that have not.
    fn arrived(&mut self, notice: Notice) {
        let lane = self.lanes.lane_mut(notice.lane);
        if notice.after > lane.arrived {
            lane.held.push_back(notice);
        } else {
            self.raise(notice);
        }
    }

    /// Raises the cells that waited for puts of a lane.
    fn raise_held(&mut self, number: u32) {
        loop {
            let lane = self.lanes.lane_mut(number);
            match lane.held.front() {
                Some(notice) if notice.after <= lane.arrived => {}
                _ => return,
            }
            if let Some(notice) = lane.held.pop_front() {
                self.raise(notice);
            }
        }
    }

    fn raise(&mut self, notice: Notice) {
        let cell = self.cells.cell_mut(notice.cell);
        cell.bits = cell.bits.max(notice.bits);
        let bits = cell.bits;
        for at in 0..cell.waiters.len() {
            let (port, need) = self.cells.cell(notice.cell).waiters[at];
            let Slot { held, granted, generation, needs, .. } = &self.slots[port as usize];
            let enough = || layout::value_in(*generation, bits) >= needs[need as usize].need.at_least;
            if *held == Held::Needs && !granted && enough() {
                self.wake(port);
            }
        }
        self.landed(self.lanes.lane(notice.lane).from);
    }

    /// Wakes the port that flushes a lane, if it is known when that is over.
    fn notify_flusher(&mut self, number: u32) {
        let lane = self.lanes.lane(number);
        let Some(port) = lane.flusher else { return };
        if let Held::Flush { upto, .. } = self.slots[port as usize].held
            && matches!(lane.progress(upto), Progress::By(_))
        {
            self.wake(port);
        }
    }
}
