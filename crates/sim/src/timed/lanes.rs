//! Lanes: which of their tickets are settled, and which publishes wait for puts.

use std::collections::VecDeque;

use ep_core::port::{LaneId, LaneKind};
use ep_core::{Nanos, Rank};
use rustc_hash::FxHashMap;

use super::agenda::Class;
use super::posts::Notice;

/// When a ticket needs nothing of its poster's window any more.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Settled {
    /// A put: when its source has left. A get: when it came.
    At(Nanos),
    /// Nobody knows yet: a put that was not handed to the rank's port, or a get that has not come.
    Open,
}

/// How far a lane is with its tickets up to one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Progress {
    /// Settled by then.
    By(Nanos),
    /// Waits for this ticket.
    Awaits(u64),
}

/// One lane.
#[derive(Debug)]
pub(super) struct Lane {
    pub(super) from: Rank,
    pub(super) to: Rank,
    pub(super) kind: LaneKind,
    pub(super) class: Class,
    /// Tickets that are known to be settled, the first so many.
    settled: u64,
    /// The tickets after.
    open: VecDeque<Settled>,
    /// Puts posted, and puts arrived: they arrive in order.
    pub(super) puts: u64,
    pub(super) arrived: u64,
    /// Publishes that have come before a put that they follow.
    pub(super) held: VecDeque<Notice>,
    /// The port that flushes it.
    pub(super) flusher: Option<u32>,
    /// Cells that it publishes to: where they lie in the peer's window, and their numbers.
    pub(super) cells: Vec<(u64, u32)>,
}

impl Lane {
    /// The last ticket given out.
    pub(super) fn issued(&self) -> u64 {
        self.settled + self.open.len() as u64
    }

    /// Gives out a ticket at `now`.
    pub(super) fn issue(&mut self, now: Nanos) -> u64 {
        while let Some(&Settled::At(time)) = self.open.front()
            && time <= now
        {
            self.open.pop_front();
            self.settled += 1;
        }
        self.open.push_back(Settled::Open);
        self.issued()
    }

    /// A ticket needs nothing from `time` on.
    pub(super) fn settle(&mut self, ticket: u64, time: Nanos) {
        if let Some(at) = ticket.checked_sub(self.settled + 1)
            && let Some(open) = self.open.get_mut(at as usize)
        {
            *open = Settled::At(time);
        }
    }

    /// How far the tickets up to `upto` are.
    pub(super) fn progress(&self, upto: u64) -> Progress {
        // Puts are settled in order, and gets are.
        if self.puts == 0 || self.puts == self.issued() {
            let last = upto.min(self.issued());
            return match last.checked_sub(self.settled + 1).map(|at| self.open[at as usize]) {
                None => Progress::By(Nanos(0)),
                Some(Settled::At(time)) => Progress::By(time),
                Some(Settled::Open) => Progress::Awaits(last),
            };
        }
        let mut by = Nanos(0);
        let count = upto.saturating_sub(self.settled) as usize;
        for (open, ticket) in self.open.iter().take(count).zip(self.settled + 1..) {
            match open {
                Settled::At(time) => by = by.max(*time),
                Settled::Open => return Progress::Awaits(ticket),
            }
        }
        Progress::By(by)
    }
}

/// All lanes, made when they are first posted to.
#[derive(Debug, Default)]
pub(super) struct Lanes {
    numbers: FxHashMap<(Rank, LaneId), u32>,
    lanes: Vec<Lane>,
}

impl Lanes {
    /// The number of a lane that the layout has.
    pub(super) fn number(&mut self, from: Rank, id: LaneId, class: Class) -> u32 {
        *self.numbers.entry((from, id)).or_insert_with(|| {
            self.lanes.push(Lane {
                from,
                to: id.peer,
                kind: id.kind,
                class,
                settled: 0,
                open: VecDeque::new(),
                puts: 0,
                arrived: 0,
                held: VecDeque::new(),
                flusher: None,
                cells: Vec::new(),
            });
            (self.lanes.len() - 1) as u32
        })
    }

    pub(super) fn lane(&self, number: u32) -> &Lane {
        &self.lanes[number as usize]
    }

    pub(super) fn lane_mut(&mut self, number: u32) -> &mut Lane {
        &mut self.lanes[number as usize]
    }
}
