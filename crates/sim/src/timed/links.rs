//! Links: what is on its way, in the order in which it left.

use std::collections::VecDeque;
use std::num::NonZeroU64;

use ep_core::port::LaneId;
use ep_core::{Nanos, Rank};

use super::events::Class;
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

/// A transfer on its way. Small, since a rank of a large cluster has hundreds of them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Flight {
    /// Of a put, where it leads to; of a get, where it was posted to.
    pub(super) lane: u32,
    pub(super) to: Rank,
    /// The ticket of a get, which travels from the lane's peer to its poster.
    pub(super) get: Option<NonZeroU64>,
    /// As counted.
    pub(super) bytes: u64,
}

/// A put to another partition.
#[derive(Clone, Copy, Debug)]
pub(super) struct Departure {
    pub(super) lane: LaneId,
    /// As counted.
    pub(super) bytes: u64,
}

/// One rank's side of one link.
#[derive(Debug, Default)]
pub(super) struct Side {
    pub(super) out: Gate,
    pub(super) inn: Gate,
    /// Transfers on the agenda that are yet to be handed to the port out.
    pub(super) due: u32,
    /// Transfers that have left, by when their first byte reaches the target.
    pub(super) flying: VecDeque<(Nanos, Flight)>,
}

/// One rank's connections.
#[derive(Debug, Default)]
pub(super) struct Sides {
    near: Side,
    far: Side,
    /// Puts to other partitions that were not mailed yet, by when their first byte reaches the target.
    abroad: VecDeque<(Nanos, Departure)>,
}

impl Sides {
    pub(super) const fn side(&mut self, class: Class) -> &mut Side {
        match class {
            Class::Near => &mut self.near,
            Class::Far => &mut self.far,
        }
    }

    /// Puts to other partitions that were not mailed yet.
    pub(super) const fn abroad(&mut self) -> &mut VecDeque<(Nanos, Departure)> {
        &mut self.abroad
    }

    /// The first transfer on its way.
    pub(super) fn flying(&self, class: Class) -> Option<&(Nanos, Flight)> {
        match class {
            Class::Near => self.near.flying.front(),
            Class::Far => self.far.flying.front(),
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
    fn two_flights_are_a_cache_line() {
        assert_eq!(size_of::<(Nanos, Flight)>(), 32);
    }

    #[test]
    fn a_gate_passes_one_after_the_other() {
        let (mut gate, rate) = (Gate::default(), Rate(2_000_000_000));
        assert_eq!(gate.pass(Nanos(10), 100, rate), (Nanos(10), Nanos(60)));
        assert_eq!(gate.pass(Nanos(20), 3, rate), (Nanos(60), Nanos(61)));
        assert_eq!(gate.pass(Nanos(20), 3, rate), (Nanos(61), Nanos(63)), "half a nanosecond was left");
        assert_eq!(gate.pass(Nanos(100), 3, rate), (Nanos(100), Nanos(101)));
    }
}
