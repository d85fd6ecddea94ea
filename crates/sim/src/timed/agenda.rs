//! What happens when: events by time, then by the order in which they were entered.
//!
//! Nearly all that is entered happens within a few latencies. Such events lie on a wheel of *slices*, each a short stretch of
//! time whose events lie one behind the other as they were entered. When time comes to a slice, its events are chained by
//! their nanosecond; so all that happens next is known, and lies together in memory. What happens later lies in a heap until
//! the wheel has come near.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

use ep_core::Nanos;

use super::events::Event;

/// Nanoseconds of a slice.
const SLICE: u64 = 64;
/// Slices on the wheel: together more than any machine's latency and what roles may be ahead.
const SLICES: u64 = 128;
/// No event.
const NONE: u32 = u32::MAX;

/// One event of a slice.
#[derive(Clone, Copy, Debug)]
struct Node {
    event: Event,
    /// Nanoseconds from the beginning of the slice.
    after: u32,
    /// The next one of its nanosecond, once time has come to the slice.
    next: u32,
}

/// The events of one nanosecond.
#[derive(Clone, Copy, Debug)]
struct Chain {
    first: u32,
    last: u32,
}

const EMPTY: Chain = Chain { first: NONE, last: NONE };

/// What happens beyond the wheel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Later {
    time: u64,
    sequence: u64,
    event: Event,
}

impl Ord for Later {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.time, self.sequence).cmp(&(other.time, other.sequence))
    }
}

impl PartialOrd for Later {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// All events to come.
#[derive(Debug)]
pub(super) struct Agenda {
    /// The time of the last event: nothing is entered before. Its slice is the current one.
    now: u64,
    /// The events of each slice on the wheel.
    slices: Box<[Vec<Node>]>,
    /// A bit for each nanosecond of each slice: whether it has any; and one for each slice.
    taken: Box<[u64]>,
    any: u128,
    /// By nanosecond of the current slice.
    chains: [Chain; SLICE as usize],
    /// Memory of slices that are over.
    spare: Vec<Vec<Node>>,
    later: BinaryHeap<Reverse<Later>>,
    sequence: u64,
}

impl Default for Agenda {
    fn default() -> Self {
        Self {
            now: 0,
            slices: (0..SLICES).map(|_| Vec::new()).collect(),
            taken: vec![0; SLICES as usize].into_boxed_slice(),
            any: 0,
            chains: [EMPTY; SLICE as usize],
            spare: Vec::new(),
            later: BinaryHeap::new(),
            sequence: 0,
        }
    }
}

impl Agenda {
    /// What is entered so much ahead, and a latency, lies on the wheel mostly.
    pub(super) const NEAR: Nanos = Nanos(SLICE * SLICES / 2);

    pub(super) fn enter(&mut self, at: Nanos, event: Event) {
        debug_assert!(at.0 >= self.now, "{event:?} at {at}, which is past");
        let time = at.0.max(self.now);
        if self.is_near(time) {
            let number = self.place(time, event);
            if time / SLICE == self.now / SLICE {
                self.chain(time / SLICE, number);
            }
        } else {
            self.sequence += 1;
            self.later.push(Reverse(Later { time, sequence: self.sequence, event }));
        }
    }

    /// When the next event is.
    pub(super) fn next_time(&self) -> Option<Nanos> {
        if self.any == 0 {
            return self.later.peek().map(|Reverse(later)| Nanos(later.time));
        }
        let current = self.now / SLICE;
        let slice = current + u64::from(self.any.rotate_right((current % SLICES) as u32).trailing_zeros());
        Some(Nanos(slice * SLICE + u64::from(self.taken[place_of(slice)].trailing_zeros())))
    }

    /// Time comes to `time`, that of the next event. Whether a slice begins with it: then its events are known.
    pub(super) fn turn(&mut self, Nanos(time): Nanos) -> bool {
        debug_assert_eq!(self.next_time(), Some(Nanos(time)));
        let (before, slice) = (self.now / SLICE, time / SLICE);
        self.now = time;
        if slice == before {
            return false;
        }
        let mut over = std::mem::take(&mut self.slices[place_of(before)]);
        if over.capacity() > 0 {
            over.clear();
            self.spare.push(over);
        }
        // Before anything that is entered from now on, which comes after them.
        while let Some(Reverse(later)) = self.later.peek()
            && self.is_near(later.time)
        {
            let Some(Reverse(Later { time, event, .. })) = self.later.pop() else { break };
            self.place(time, event);
        }
        (0..self.slices[place_of(slice)].len() as u32).for_each(|number| self.chain(slice, number));
        true
    }

    /// The events of the slice that time has come to, as they were entered.
    pub(super) fn slice(&self) -> impl Iterator<Item = &Event> {
        self.slices[place_of(self.now / SLICE)].iter().map(|node| &node.event)
    }

    /// The next event of the time that has come.
    pub(super) fn pop(&mut self) -> Option<Event> {
        let (slice, after) = (place_of(self.now / SLICE), (self.now % SLICE) as usize);
        let Chain { first, .. } = self.chains[after];
        let Node { event, next, .. } = *self.slices[slice].get(first as usize)?;
        self.chains[after].first = next;
        if next == NONE {
            self.taken[slice] &= !(1 << after);
            self.any &= !(u128::from(self.taken[slice] == 0) << slice);
        }
        Some(event)
    }

    /// Whether a time lies on the wheel.
    const fn is_near(&self, time: u64) -> bool {
        time / SLICE - self.now / SLICE < SLICES
    }

    /// Puts an event behind the others of its slice, and returns its number there.
    fn place(&mut self, time: u64, event: Event) -> u32 {
        let (slice, after) = (time / SLICE, (time % SLICE) as u32);
        let nodes = &mut self.slices[place_of(slice)];
        if nodes.capacity() == 0
            && let Some(spare) = self.spare.pop()
        {
            *nodes = spare;
        }
        let number = nodes.len() as u32;
        nodes.push(Node { event, after, next: NONE });
        self.taken[place_of(slice)] |= 1 << after;
        self.any |= 1 << place_of(slice);
        number
    }

    /// Puts an event of the current slice behind the others of its nanosecond.
    fn chain(&mut self, slice: u64, number: u32) {
        let nodes = &mut self.slices[place_of(slice)];
        let chain = &mut self.chains[nodes[number as usize].after as usize];
        let last = std::mem::replace(&mut chain.last, number);
        match chain.first {
            NONE => chain.first = number,
            _ => nodes[last as usize].next = number,
        }
    }
}

/// Where a slice lies on the wheel.
const fn place_of(slice: u64) -> usize {
    (slice % SLICES) as usize
}

#[cfg(test)]
mod tests {
    use ep_core::Rank;

    use super::super::events::Class;
    use super::*;

    fn next(agenda: &mut Agenda) -> Option<Event> {
        let time = agenda.next_time()?;
        agenda.turn(time);
        agenda.pop()
    }

    #[test]
    fn events_come_by_time_and_then_as_entered() {
        let mut agenda = Agenda::default();
        let events = [
            (7, Event::Reach(Rank(16_383), Class::Far)),
            (5, Event::Resume(1 << 20)),
            (5, Event::Reach(Rank(3), Class::Near)),
            (5, Event::Resume(2)),
            (6, Event::Reach(Rank(0), Class::Far)),
        ];
        events.iter().for_each(|&(at, event)| agenda.enter(Nanos(at), event));
        assert_eq!(agenda.next_time(), Some(Nanos(5)));
        let order: Vec<_> = std::iter::from_fn(|| next(&mut agenda)).collect();
        assert_eq!(order, [1, 2, 3, 4, 0].map(|at: usize| events[at].1));
    }

    /// Times far and near, many alike, entered while others are taken: as a heap of time and sequence has them.
    #[test]
    fn the_wheel_keeps_the_order_of_a_heap() {
        let (mut agenda, mut heap) = (Agenda::default(), BinaryHeap::new());
        let (mut now, mut draw, mut number) = (0, 1u64, 0);
        for round in 0..60_000 {
            for _ in 0..if round < 40_000 { 1 + draw % 2 } else { 0 } {
                draw = draw.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let span = [1, SLICE, 5000, SLICE * SLICES, 3 * SLICE * SLICES, 1 << 40][(draw >> 40) as usize % 6];
                let at = now + (draw >> 20) % span;
                agenda.enter(Nanos(at), Event::Resume(number));
                heap.push(Reverse((at, number)));
                number += 1;
            }
            let Some(Reverse((time, first))) = heap.pop() else { continue };
            assert_eq!(agenda.next_time(), Some(Nanos(time)));
            assert_eq!(next(&mut agenda), Some(Event::Resume(first)));
            now = time;
        }
        assert!(number > 50_000);
        assert_eq!(next(&mut agenda).is_none(), heap.is_empty());
    }
}
