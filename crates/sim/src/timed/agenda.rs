//! What happens when: events by time, then by the order in which they were entered.
//!
//! Nearly all that is entered happens within a few latencies: such events lie on a wheel with one place for each nanosecond,
//! where entering and taking one costs the same however many there are. What happens later lies in a heap until the
//! wheel has come near.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use ep_core::{Nanos, Rank};

/// Which of a rank's two links.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Class {
    Near,
    Far,
}

/// Something that happens.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Event {
    /// A port has spent the time up to its own clock.
    Resume(u32),
    /// What a role posted happens: the number that [`super::posts::Slab`] gave it.
    Post(u32),
    /// The first transfer on its way from the rank begins to reach its target. Only the first one is on the agenda.
    Reach(Rank, Class),
}

/// Bits of the number of a port or post, or of a rank and class.
const NUMBER: u32 = 25;

impl Event {
    fn pack(self) -> u32 {
        let (kind, number) = match self {
            Self::Resume(port) => (0, port),
            Self::Post(post) => (1, post),
            Self::Reach(rank, class) => (2, rank.0 << 1 | class as u32),
        };
        kind << NUMBER | number
    }

    fn unpack(bits: u32) -> Self {
        let number = bits & ((1 << NUMBER) - 1);
        let (rank, class) = (Rank(number >> 1), if number & 1 == 0 { Class::Near } else { Class::Far });
        match bits >> NUMBER {
            0 => Self::Resume(number),
            1 => Self::Post(number),
            _ => Self::Reach(rank, class),
        }
    }
}

/// Nanoseconds that the wheel spans, from the last event on: more than any machine's latency and what roles may be ahead.
const SPAN: u64 = 1 << 13;
const WORDS: usize = SPAN as usize / 64;
/// No node.
const NONE: u32 = u32::MAX;

/// One event on the wheel, or a free place for one.
#[derive(Clone, Copy, Debug)]
struct Node {
    event: u32,
    next: u32,
}

/// The events of one nanosecond.
#[derive(Clone, Copy, Debug)]
struct Place {
    first: u32,
    last: u32,
}

/// All events to come.
#[derive(Debug)]
pub(super) struct Agenda {
    /// The time of the last event: nothing is entered before.
    now: u64,
    places: Box<[Place]>,
    /// Which places have events, and which of these words have any.
    taken: [u64; WORDS],
    words: [u64; WORDS.div_ceil(64)],
    nodes: Vec<Node>,
    free: u32,
    /// What lies beyond the wheel: time, sequence, event from the top.
    later: BinaryHeap<Reverse<u128>>,
    sequence: u64,
}

impl Default for Agenda {
    fn default() -> Self {
        Self {
            now: 0,
            places: vec![Place { first: NONE, last: NONE }; SPAN as usize].into_boxed_slice(),
            taken: [0; WORDS],
            words: [0; WORDS.div_ceil(64)],
            nodes: Vec::new(),
            free: NONE,
            later: BinaryHeap::new(),
            sequence: 0,
        }
    }
}

impl Agenda {
    /// Ports that may be open, and posts that may be under way, at a time.
    pub(super) const NUMBERS: usize = 1 << NUMBER;
    /// What is entered so much ahead, and a latency, lies on the wheel mostly.
    pub(super) const NEAR: Nanos = Nanos(SPAN / 2);

    pub(super) fn enter(&mut self, at: Nanos, event: Event) {
        debug_assert!(at.0 >= self.now, "{event:?} at {at}, which is past");
        let at = Nanos(at.0.max(self.now));
        if at.0 - self.now < SPAN {
            self.place(at.0, event.pack());
        } else {
            self.sequence += 1;
            let order = u128::from(self.sequence) << 32 & u128::from(u64::MAX);
            self.later.push(Reverse(u128::from(at.0) << 64 | order | u128::from(event.pack())));
        }
    }

    /// When the next event is.
    pub(super) fn next_time(&self) -> Option<Nanos> {
        let later = || self.later.peek().map(|&Reverse(entry)| (entry >> 64) as u64);
        self.next_taken().or_else(later).map(Nanos)
    }

    pub(super) fn pop(&mut self) -> Option<Event> {
        let time = self.next_time()?;
        self.now = time.0;
        // Before anything that is entered from now on, which comes after them.
        while let Some(&Reverse(entry)) = self.later.peek()
            && (entry >> 64) as u64 - self.now < SPAN
        {
            self.later.pop();
            self.place((entry >> 64) as u64, entry as u32);
        }
        let at = (time.0 % SPAN) as usize;
        let number = self.places[at].first;
        let Node { event, next } = self.nodes[number as usize];
        self.nodes[number as usize].next = self.free;
        self.free = number;
        self.places[at].first = next;
        if next == NONE {
            self.taken[at / 64] &= !(1 << (at % 64));
            if self.taken[at / 64] == 0 {
                self.words[at / 4096] &= !(1 << (at / 64 % 64));
            }
        }
        Some(Event::unpack(event))
    }

    /// Puts an event behind the others of its nanosecond.
    fn place(&mut self, time: u64, event: u32) {
        let node = Node { event, next: NONE };
        let number = self.free;
        let number = if number == NONE {
            self.nodes.push(node);
            (self.nodes.len() - 1) as u32
        } else {
            self.free = std::mem::replace(&mut self.nodes[number as usize], node).next;
            number
        };
        let at = (time % SPAN) as usize;
        let place = &mut self.places[at];
        if place.first == NONE {
            *place = Place { first: number, last: number };
            self.taken[at / 64] |= 1 << (at % 64);
            self.words[at / 4096] |= 1 << (at / 64 % 64);
        } else {
            let last = std::mem::replace(&mut place.last, number);
            self.nodes[last as usize].next = number;
        }
    }

    /// The first time on the wheel that has events.
    fn next_taken(&self) -> Option<u64> {
        let start = (self.now % SPAN) as usize;
        let at = self.taken_from(start).or_else(|| self.taken_from(0))? as u64;
        Some(self.now + (at.wrapping_sub(start as u64) % SPAN))
    }

    /// The first place from `start` on that has events.
    fn taken_from(&self, start: usize) -> Option<usize> {
        let word = start / 64;
        let here = self.taken[word] & u64::MAX << (start % 64);
        if here != 0 {
            return Some(word * 64 + here.trailing_zeros() as usize);
        }
        // A shift by 64 leaves nothing of the last word of a group.
        let after = |word: usize| u64::MAX.checked_shl(word as u32 % 64 + 1).unwrap_or(0);
        let masks = std::iter::once(after(word)).chain(std::iter::repeat(u64::MAX));
        let groups = (word / 64..).zip(&self.words[word / 64..]).zip(masks);
        let (group, words) =
            groups.map(|((group, words), mask)| (group, words & mask)).find(|&(_, words)| words != 0)?;
        let word = group * 64 + words.trailing_zeros() as usize;
        Some(word * 64 + self.taken[word].trailing_zeros() as usize)
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
            (5, Event::Reach(Rank(3), Class::Near)),
            (5, Event::Post(2)),
            (6, Event::Reach(Rank(0), Class::Far)),
        ];
        events.iter().for_each(|&(at, event)| agenda.enter(Nanos(at), event));
        assert_eq!(agenda.next_time(), Some(Nanos(5)));
        let order: Vec<_> = std::iter::from_fn(|| agenda.pop()).collect();
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
                let span = [1, 64, 5000, SPAN, 3 * SPAN, 1 << 40][(draw >> 40) as usize % 6];
                let at = now + (draw >> 20) % span;
                agenda.enter(Nanos(at), Event::Post(number));
                heap.push(Reverse((at, number)));
                number += 1;
            }
            let Some(Reverse((time, first))) = heap.pop() else { continue };
            assert_eq!(agenda.next_time(), Some(Nanos(time)));
            assert_eq!(agenda.pop(), Some(Event::Post(first)));
            now = time;
        }
        assert!(number > 50_000);
        assert_eq!(agenda.pop().is_none(), heap.is_empty());
    }
}
