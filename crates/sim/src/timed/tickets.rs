//! Tickets: when a put or get needs nothing of its poster's window any more.
//!
//! One rank's tickets are numbered across its lanes: they settle within a few latencies, mostly in order, so that a short
//! queue holds all that are open, and a lane need only know its last ones.

use std::collections::VecDeque;

use ep_core::Nanos;

use super::NEVER;

/// How far a lane is with its tickets up to one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Progress {
    /// Settled by then.
    By(Nanos),
    /// Waits for this ticket.
    Awaits(u64),
}

/// A ticket that may not be settled yet.
#[derive(Clone, Copy, Debug)]
struct Open {
    /// A put: when its source has left. A get: when it comes. [`NEVER`] while nobody knows: a put that was not handed to
    /// the rank's port, or a get that has not reached it.
    at: Nanos,
    /// Its number where it is posted to.
    lane: u32,
    get: bool,
}

/// All tickets of one rank.
#[derive(Debug, Default)]
pub(super) struct Tickets {
    /// The first so many are settled.
    settled: u64,
    /// The tickets after.
    open: VecDeque<Open>,
}

impl Tickets {
    /// Gives out a ticket at `now`. The first is 1.
    pub(super) fn issue(&mut self, now: Nanos, lane: u32, get: bool) -> u64 {
        while self.open.front().is_some_and(|open| open.at <= now) {
            self.open.pop_front();
            self.settled += 1;
        }
        self.open.push_back(Open { at: NEVER, lane, get });
        self.settled + self.open.len() as u64
    }

    /// A ticket needs nothing from `time` on; the lane it is of.
    pub(super) fn settle(&mut self, ticket: u64, time: Nanos) -> Option<u32> {
        let open = self.open.get_mut(ticket.checked_sub(self.settled + 1)? as usize)?;
        open.at = time;
        Some(open.lane)
    }

    /// Whether it is known that all tickets up to `upto` are settled, whatever their lanes.
    pub(super) const fn are_settled(&self, upto: u64) -> bool {
        upto <= self.settled
    }

    /// How far a lane is with its puts, or its gets, up to `upto`. They settle in order.
    pub(super) fn progress(&self, lane: u32, get: bool, upto: u64) -> Progress {
        let count = upto.saturating_sub(self.settled).min(self.open.len() as u64) as usize;
        let last = (0..count).rev().find(|&at| self.open[at].lane == lane && self.open[at].get == get);
        match last.map(|at| (at, self.open[at].at)) {
            None => Progress::By(Nanos(0)),
            Some((at, NEVER)) => Progress::Awaits(self.settled + 1 + at as u64),
            Some((_, time)) => Progress::By(time),
        }
    }
}

impl Progress {
    /// How far both are.
    pub(super) fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::By(one), Self::By(other)) => Self::By(one.max(other)),
            (Self::Awaits(one), Self::Awaits(other)) => Self::Awaits(one.min(other)),
            (Self::Awaits(ticket), Self::By(_)) | (Self::By(_), Self::Awaits(ticket)) => Self::Awaits(ticket),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lane_awaits_its_own_tickets_only() {
        let mut tickets = Tickets::default();
        let given: Vec<u64> = [(7, false), (8, false), (7, true), (7, false)]
            .iter()
            .map(|&(lane, get)| tickets.issue(Nanos(0), lane, get))
            .collect();
        assert_eq!(given, [1, 2, 3, 4]);
        tickets.settle(1, Nanos(10));
        tickets.settle(2, Nanos(20));
        assert_eq!(tickets.progress(7, false, 3), Progress::By(Nanos(10)), "the last put up to there");
        assert_eq!(tickets.progress(7, false, 9), Progress::Awaits(4));
        assert_eq!(tickets.progress(7, true, 9), Progress::Awaits(3));
        assert_eq!(tickets.progress(8, false, 9).and(tickets.progress(7, true, 4)), Progress::Awaits(3));
        assert_eq!(tickets.issue(Nanos(20), 9, false), 5);
        assert_eq!(tickets.progress(8, false, 9), Progress::By(Nanos(0)), "long settled");
        tickets.settle(4, Nanos(30));
        assert_eq!(tickets.progress(7, false, 4), Progress::By(Nanos(30)));
    }
}
