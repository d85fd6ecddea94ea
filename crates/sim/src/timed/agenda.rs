//! What happens when: the heap of events, by time, then by the order in which they were entered.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use ep_core::{Nanos, Rank};

/// Which of a rank's two links.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Class {
    Near,
    Far,
}

/// Something that happens. Queues of links have only their first entry on the agenda, so that the heap stays small.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Event {
    /// A port has spent the time up to its own clock.
    Resume(u32),
    /// What a role posted happens: the number that [`super::posts::Posts`] gave it.
    Post(u32),
    /// The first transfer on its way from the rank begins to reach its target.
    Reach(Rank, Class),
    /// The first transfer that enters the rank has entered.
    Enter(Rank, Class),
}

/// Bits of the number of a port or post, or of a rank and class.
const NUMBER: u32 = 25;
const KIND: u32 = 2;

impl Event {
    fn pack(self) -> u128 {
        let link = |rank: Rank, class: Class| u128::from(rank.0) << 1 | class as u128;
        let (kind, number) = match self {
            Self::Resume(port) => (0, u128::from(port)),
            Self::Post(post) => (1, u128::from(post)),
            Self::Reach(rank, class) => (2, link(rank, class)),
            Self::Enter(rank, class) => (3, link(rank, class)),
        };
        kind << NUMBER | number
    }

    fn unpack(bits: u128) -> Self {
        let number = (bits & ((1 << NUMBER) - 1)) as u32;
        let rank = Rank(number >> 1);
        let class = if number & 1 == 0 { Class::Near } else { Class::Far };
        match bits >> NUMBER & ((1 << KIND) - 1) {
            0 => Self::Resume(number),
            1 => Self::Post(number),
            2 => Self::Reach(rank, class),
            _ => Self::Enter(rank, class),
        }
    }
}

/// All events to come. An entry is one number: time, sequence, event from the top.
#[derive(Debug, Default)]
pub(super) struct Agenda {
    heap: BinaryHeap<Reverse<u128>>,
    sequence: u64,
}

impl Agenda {
    /// Ports that may be open, and posts that may be under way, at a time.
    pub(super) const NUMBERS: usize = 1 << NUMBER;

    pub(super) fn enter(&mut self, at: Nanos, event: Event) {
        self.sequence += 1;
        let order = u128::from(self.sequence) << (NUMBER + KIND) & u128::from(u64::MAX);
        self.heap.push(Reverse(u128::from(at.0) << 64 | order | event.pack()));
    }

    /// When the next event is.
    pub(super) fn next_time(&self) -> Option<Nanos> {
        self.heap.peek().map(|&Reverse(entry)| Nanos((entry >> 64) as u64))
    }

    pub(super) fn pop(&mut self) -> Option<Event> {
        self.heap.pop().map(|Reverse(entry)| Event::unpack(entry & u128::from(u64::MAX)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_by_time_and_then_as_entered() {
        let mut agenda = Agenda::default();
        let events = [
            (7, Event::Reach(Rank(16_383), Class::Far)),
            (5, Event::Resume(1 << 20)),
            (5, Event::Enter(Rank(3), Class::Near)),
            (5, Event::Post(2)),
            (6, Event::Reach(Rank(0), Class::Far)),
        ];
        events.iter().for_each(|&(at, event)| agenda.enter(Nanos(at), event));
        assert_eq!(agenda.next_time(), Some(Nanos(5)));
        let order: Vec<_> = std::iter::from_fn(|| agenda.pop()).collect();
        assert_eq!(order, [1, 2, 3, 4, 0].map(|at: usize| events[at].1));
    }
}
