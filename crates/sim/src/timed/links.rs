//! Links: what is on its way.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

use ep_core::Nanos;

use super::NEVER;
use super::agenda::Class;
use super::model::{Link, Model, Rate};

/// One direction of a rank's connection to a link: passes one transfer after the other.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Gate {
    free: Nanos,
    /// The part of a nanosecond by which it is free later ([`Rate::time`]).
    rest: u64,
}

impl Gate {
    /// Passes `bytes` from `from` on, or as soon as it is free: when they begin and when they end.
    pub(super) fn pass(&mut self, from: Nanos, bytes: u64, rate: Rate) -> (Nanos, Nanos) {
        if self.free < from {
            *self = Self { free: from, rest: 0 };
        }
        let begin = self.free;
        self.free = begin + rate.time(bytes, &mut self.rest);
        (begin, self.free)
    }
}

/// Which verb a transfer belongs to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Flight {
    pub(super) lane: u32,
    /// Whether it travels from the lane's peer to its poster.
    pub(super) get: bool,
    pub(super) ticket: u64,
    /// As counted.
    pub(super) bytes: u64,
}

/// A transfer that has left: ordered by when its first byte reaches the target, then by when it left.
#[derive(Clone, Copy, Debug)]
struct Flying {
    at: Nanos,
    sequence: u64,
    flight: Flight,
}

impl Ord for Flying {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.at, self.sequence).cmp(&(other.at, other.sequence))
    }
}

impl PartialOrd for Flying {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Flying {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Flying {}

/// One rank's side of one link.
#[derive(Debug)]
pub(super) struct Side {
    pub(super) out: Gate,
    pub(super) inn: Gate,
    /// Transfers on their way here that have not been taken in.
    flying: BinaryHeap<Reverse<Flying>>,
    /// How many wait to know when something here enters. While nobody does, it is found out later, when somebody asks.
    pub(super) watchers: u32,
    /// When the agenda has the next transfer reach this side.
    pub(super) expected: Nanos,
}

impl Default for Side {
    fn default() -> Self {
        Self { out: Gate::default(), inn: Gate::default(), flying: BinaryHeap::new(), watchers: 0, expected: NEVER }
    }
}

impl Side {
    pub(super) fn fly(&mut self, at: Nanos, sequence: u64, flight: Flight) {
        self.flying.push(Reverse(Flying { at, sequence, flight }));
    }

    /// When the next transfer begins to reach this side.
    pub(super) fn next_reach(&self) -> Option<Nanos> {
        self.flying.peek().map(|Reverse(flying)| flying.at)
    }

    /// Lets the next transfer enter that began to reach this side before `until`: which, and when it is there.
    pub(super) fn take_in(&mut self, until: Nanos, rate: Rate) -> Option<(Flight, Nanos)> {
        let Flying { at, flight, .. } = self.flying.peek().filter(|Reverse(flying)| flying.at < until)?.0;
        self.flying.pop();
        let (_, end) = self.inn.pass(at, flight.bytes, rate);
        Some((flight, end))
    }
}

/// One rank's connections.
#[derive(Debug, Default)]
pub(super) struct Sides {
    near: Side,
    far: Side,
}

impl Sides {
    pub(super) const fn side(&mut self, class: Class) -> &mut Side {
        match class {
            Class::Near => &mut self.near,
            Class::Far => &mut self.far,
        }
    }
}

impl Model {
    pub(super) const fn link(&self, class: Class) -> Link {
        match class {
            Class::Near => self.near,
            Class::Far => self.far,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gate_passes_one_after_the_other() {
        let (mut gate, rate) = (Gate::default(), Rate(2_000_000_000));
        assert_eq!(gate.pass(Nanos(10), 100, rate), (Nanos(10), Nanos(60)));
        assert_eq!(gate.pass(Nanos(20), 3, rate), (Nanos(60), Nanos(61)));
        assert_eq!(gate.pass(Nanos(20), 3, rate), (Nanos(61), Nanos(63)), "half a nanosecond was left");
        assert_eq!(gate.pass(Nanos(100), 3, rate), (Nanos(100), Nanos(101)));
    }

    #[test]
    fn transfers_enter_in_the_order_in_which_they_reach() {
        let (mut side, rate) = (Side::default(), Rate(1_000_000_000));
        let flight = |lane| Flight { lane, get: false, ticket: 0, bytes: 10 };
        for (lane, at) in [(0, 30), (1, 20), (2, 20)] {
            side.fly(Nanos(at), lane, flight(lane as u32));
        }
        assert_eq!(side.next_reach(), Some(Nanos(20)));
        assert!(side.take_in(Nanos(20), rate).is_none(), "before, not at");
        let order: Vec<_> = std::iter::from_fn(|| side.take_in(Nanos(40), rate)).collect();
        let order: Vec<_> = order.iter().map(|(flight, end)| (flight.lane, end.0)).collect();
        assert_eq!(order, [(1, 30), (2, 40), (0, 50)]);
    }
}
