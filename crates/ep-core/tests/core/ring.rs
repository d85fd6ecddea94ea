//! Cursors against a model of one ring: every interleaving of small ones, random interleavings of larger ones.
//!
//! The model has a producer, a consumer, slots that hold row numbers, and a tail and a head cell whose published values
//! arrive one by one, as late as the schedule likes. It panics when a slot is overwritten before it was read, or when
//! the wrong row is read.

use std::collections::{HashSet, VecDeque};

use ep_core::ring::{Consumer, Geometry, Overrun, Producer};
use proptest::prelude::*;
use proptest::sample::Index;

/// One side's program: rows to move with one geometry, then the next.
#[derive(Clone, Debug)]
struct Stretch {
    geometry: Geometry,
    rows: u64,
}

/// When the sides publish what is less than a chunk or credit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Manners {
    /// Before every wait.
    Polite,
    /// The producer at the end of every stretch, as it must; the consumer never.
    Impolite,
}

/// A cell and the values on their way to it.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
struct Wire {
    cell: u64,
    flying: VecDeque<u64>,
}

impl Wire {
    fn publish(&mut self, value: Option<u64>) {
        let latest = self.flying.back().copied().unwrap_or(self.cell);
        assert!(value.is_none_or(|value| value > latest), "a cell is published anew only when it rises");
        self.flying.extend(value);
    }
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Model {
    producer: Producer,
    consumer: Consumer,
    tail: Wire,
    head: Wire,
    slots: Vec<Option<u64>>,
    /// Stretch that each side works on.
    at: (usize, usize),
}

/// What may happen next.
#[derive(Clone, Copy, Debug)]
enum Step {
    Produce,
    Consume,
    TailArrives,
    HeadArrives,
    /// The producer looks at its head cell although it need not.
    ProducerLooks,
    /// The consumer looks at its tail cell although it need not.
    ConsumerLooks,
}

const STEPS: [Step; 6] =
    [Step::Produce, Step::Consume, Step::TailArrives, Step::HeadArrives, Step::ProducerLooks, Step::ConsumerLooks];

impl Model {
    fn new(stretches: &[Stretch]) -> Self {
        let geometry = stretches[0].geometry;
        let slots = stretches.iter().map(|stretch| stretch.geometry.slots).max().expect("a stretch");
        Self {
            producer: Producer::new(geometry),
            consumer: Consumer::new(geometry),
            tail: Wire::default(),
            head: Wire::default(),
            slots: vec![None; slots as usize],
            at: (0, 0),
        }
    }

    /// Does one step; false when it is not possible now.
    fn step(&mut self, step: Step, stretches: &[Stretch], manners: Manners) -> bool {
        match step {
            Step::Produce => self.produce(stretches, manners),
            Step::Consume => self.consume(stretches, manners),
            Step::TailArrives => self.tail.flying.pop_front().map(|tail| self.tail.cell = tail).is_some(),
            Step::HeadArrives => self.head.flying.pop_front().map(|head| self.head.cell = head).is_some(),
            Step::ProducerLooks => {
                let before = self.producer.clone();
                self.producer.saw_head(self.head.cell).expect("a right head");
                self.producer != before
            }
            // Between the last row of a geometry and the restart, the consumer must not look.
            Step::ConsumerLooks if self.consumed_stretch(stretches) => false,
            Step::ConsumerLooks => {
                let before = self.consumer.clone();
                self.consumer.saw_tail(self.tail.cell).expect("a right tail");
                self.consumer != before
            }
        }
    }

    fn produce(&mut self, stretches: &[Stretch], manners: Manners) -> bool {
        if self.producer.tail() == rows_until(stretches, self.at.0) {
            return self.end_stretch(stretches);
        }
        let Some(slot) = self.producer.slot() else {
            return self.await_head(self.producer.awaited_head(), manners);
        };
        let overwritten = self.slots[slot as usize].replace(self.producer.tail());
        assert_eq!(overwritten, None, "slot {slot} was filled before it was read");
        let due = self.producer.push();
        self.tail.publish(due);
        true
    }

    /// Publishes the rest, waits for an empty ring where the geometry changes, and begins the next stretch.
    fn end_stretch(&mut self, stretches: &[Stretch]) -> bool {
        if let Some(tail) = self.producer.pending() {
            self.tail.publish(Some(tail));
            return true;
        }
        let Some(next) = stretches.get(self.at.0 + 1) else { return false };
        if next.geometry != self.producer.geometry() {
            if !self.producer.is_empty() {
                return self.await_head(self.producer.tail(), Manners::Polite);
            }
            self.producer.restart(next.geometry);
            assert!(self.producer.slot().is_none_or(|slot| slot == 0), "slots are counted from the restart");
        }
        self.at.0 += 1;
        true
    }

    fn await_head(&mut self, awaited: u64, manners: Manners) -> bool {
        let pending = (manners == Manners::Polite).then(|| self.producer.pending()).flatten();
        self.tail.publish(pending);
        let arrived = self.head.cell >= awaited;
        if arrived {
            self.producer.saw_head(self.head.cell).expect("a right head");
        }
        arrived || pending.is_some()
    }

    fn consume(&mut self, stretches: &[Stretch], manners: Manners) -> bool {
        if self.consumed_stretch(stretches) {
            let next = stretches[self.at.1 + 1].geometry;
            if next != self.consumer.geometry() {
                let pending = self.consumer.pending();
                self.head.publish(pending);
                self.consumer.restart(next);
            }
            self.at.1 += 1;
            return true;
        }
        let Some(slot) = self.consumer.slot() else { return self.await_tail(manners) };
        let row = self.slots[slot as usize].take();
        assert_eq!(row, Some(self.consumer.head()), "slot {slot}");
        let due = self.consumer.pop();
        self.head.publish(due);
        true
    }

    /// Whether the consumer has read its stretch and another follows.
    fn consumed_stretch(&self, stretches: &[Stretch]) -> bool {
        self.consumer.head() == rows_until(stretches, self.at.1) && self.at.1 + 1 < stretches.len()
    }

    fn await_tail(&mut self, manners: Manners) -> bool {
        let pending = (manners == Manners::Polite).then(|| self.consumer.pending()).flatten();
        self.head.publish(pending);
        let arrived = self.tail.cell >= self.consumer.awaited_tail();
        if arrived {
            self.consumer.saw_tail(self.tail.cell).expect("a right tail");
        }
        arrived || pending.is_some()
    }
}

/// Rows of the stretches up to and with `last`.
fn rows_until(stretches: &[Stretch], last: usize) -> u64 {
    stretches[..=last].iter().map(|stretch| stretch.rows).sum()
}

/// Goes through every interleaving; whether one of them ends before all rows arrived.
fn can_hang(stretches: &[Stretch], manners: Manners) -> bool {
    let rows = rows_until(stretches, stretches.len() - 1);
    let start = Model::new(stretches);
    let mut seen = HashSet::from([start.clone()]);
    let mut open = vec![start];
    let mut hangs = false;
    while let Some(model) = open.pop() {
        let mut stuck = true;
        for step in STEPS {
            let mut next = model.clone();
            if next.step(step, stretches, manners) {
                stuck = false;
                if seen.insert(next.clone()) {
                    open.push(next);
                }
            }
        }
        hangs |= stuck && model.consumer.head() < rows;
    }
    hangs
}

/// Every geometry of at most so many slots.
fn geometries(most: u32) -> impl Iterator<Item = Geometry> {
    let cuts = |slots| (1..=slots).flat_map(move |chunk| (1..=slots).map(move |credit| (slots, chunk, credit)));
    (1..=most).flat_map(cuts).map(|(slots, chunk, credit)| Geometry { slots, chunk, credit })
}

const fn divisor(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { divisor(b, a % b) }
}

#[test]
fn polite_rings_neither_hang_nor_overrun_in_any_interleaving() {
    for geometry in geometries(5) {
        let stretches = [Stretch { geometry, rows: 11 }];
        assert!(!can_hang(&stretches, Manners::Polite), "{geometry:?}");
    }
}

#[test]
fn polite_rings_survive_every_change_of_geometry() {
    for before in geometries(3) {
        for after in geometries(3).filter(|&after| after != before) {
            let stretches = [Stretch { geometry: before, rows: 4 }, Stretch { geometry: after, rows: 4 }];
            assert!(!can_hang(&stretches, Manners::Polite), "{before:?} to {after:?}");
        }
    }
}

#[test]
fn impolite_rings_that_publish_whole_chunks_hang_below_chunk_plus_credit_less_their_divisor() {
    for geometry @ Geometry { slots, chunk, credit } in geometries(5) {
        let hangs = can_hang(&[Stretch { geometry, rows: 18 }], Manners::Impolite);
        assert_eq!(hangs, slots < chunk + credit - divisor(chunk, credit), "{geometry:?}");
    }
}

#[test]
fn impolite_rings_hang_below_chunk_plus_credit_less_one_after_some_operation() {
    for geometry @ Geometry { slots, chunk, credit } in geometries(5) {
        let hangs = (1..=4).any(|rows| {
            let stretches = [Stretch { geometry, rows }, Stretch { geometry, rows: 18 }];
            can_hang(&stretches, Manners::Impolite)
        });
        assert_eq!(hangs, slots < chunk + credit - 1, "{geometry:?}");
    }
}

#[test]
fn counters_that_no_correct_peer_publishes_are_refused() {
    let geometry = Geometry { slots: 4, chunk: 2, credit: 2 };
    let mut producer = Producer::new(geometry);
    producer.push();
    assert_eq!(producer.saw_head(2), Err(Overrun { seen: 2, limit: 1 }));
    assert_eq!(producer.saw_head(1), Ok(()));
    let mut consumer = Consumer::new(geometry);
    assert_eq!(consumer.saw_tail(5), Err(Overrun { seen: 5, limit: 4 }));
    assert_eq!(consumer.saw_tail(4), Ok(()));
}

#[test]
fn old_news_changes_nothing() {
    let geometry = Geometry { slots: 4, chunk: 2, credit: 2 };
    let mut producer = Producer::new(geometry);
    let tails: Vec<_> = (0..4).map(|_| producer.push()).collect();
    assert_eq!(tails, [None, Some(2), None, Some(4)]);
    producer.saw_head(3).unwrap();
    let before = producer.clone();
    producer.saw_head(1).unwrap();
    assert_eq!(producer, before);
    let mut consumer = Consumer::new(geometry);
    consumer.saw_tail(3).unwrap();
    let before = consumer.clone();
    consumer.saw_tail(1).unwrap();
    assert_eq!(consumer, before);
}

fn stretches() -> impl Strategy<Value = Vec<Stretch>> {
    let stretch = (crate::common::rings(1, 40), 0u64..200);
    let stretch = stretch.prop_map(|(rings, rows)| Stretch { geometry: rings.near, rows });
    proptest::collection::vec(stretch, 1..5)
}

proptest! {
    #![proptest_config(crate::common::config("ring"))]

    #[test]
    fn all_rows_arrive_in_order_whatever_the_schedule(
        stretches in stretches(), schedule in proptest::collection::vec(any::<Index>(), 64),
    ) {
        let rows = rows_until(&stretches, stretches.len() - 1);
        let mut model = Model::new(&stretches);
        let mut turns = schedule.iter().cycle().zip(0usize..);
        while model.consumer.head() < rows {
            let (choice, turn) = turns.next().expect("an endless schedule");
            // The turn makes the cycle aperiodic, so that no schedule starves a step for ever.
            let first = choice.index(STEPS.len()) + turn / schedule.len();
            let mut order = (first..first + STEPS.len()).map(|at| STEPS[at % STEPS.len()]);
            prop_assert!(order.any(|step| model.step(step, &stretches, Manners::Polite)), "hangs: {:?}", model);
        }
    }

    #[test]
    fn publishing_is_as_rare_as_the_geometry_says(rings in crate::common::rings(1, 40), rows in 1u64..300) {
        let geometry = rings.near;
        let (mut producer, mut consumer) = (Producer::new(geometry), Consumer::new(geometry));
        let (mut tails, mut heads) = (0, 0);
        for row in 1..=rows {
            tails += u64::from(producer.push().is_some());
            consumer.saw_tail(row).unwrap();
            heads += u64::from(consumer.pop().is_some());
            producer.saw_head(row).unwrap();
        }
        prop_assert_eq!((tails, heads), (rows / u64::from(geometry.chunk), rows / u64::from(geometry.credit)));
        prop_assert_eq!(producer.pending().is_some(), !rows.is_multiple_of(u64::from(geometry.chunk)));
        prop_assert_eq!(consumer.pending().is_some(), !rows.is_multiple_of(u64::from(geometry.credit)));
        prop_assert_eq!((producer.pending(), consumer.pending()), (None, None));
    }
}
