//! Messages through a ring of slots: rows, then a signal. What a reader sees once it sees the signal is compared, byte for byte.

use std::sync::atomic::Ordering;

use soft_hca::{Link, Mood, Rule};

use crate::Pair;
use crate::poster::{Broken, Mutation, Poster, SIGNAL};
use crate::side::Side;

/// How a message is announced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Signal {
    /// A fetch-add into strict memory, on the rows' queue pair.
    FetchAdd,
    /// A write of 8 bytes into strict memory.
    StrictWrite,
    /// Wrong: nothing keeps it behind the rows.
    RelaxedWrite,
    /// Wrong where fetch-adds may pass writes.
    RelaxedFetchAdd,
    /// Wrong: queue pairs are not ordered among themselves.
    OtherQueue,
}

/// What traffic is like.
#[derive(Debug, Clone)]
pub(crate) struct Traffic {
    pub(crate) link: Link,
    pub(crate) mood: Mood,
    pub(crate) seed: u64,
    pub(crate) collapsed: bool,
    pub(crate) signal: Signal,
    pub(crate) mutation: Option<Mutation>,
    pub(crate) double_bell: bool,
    /// Two posters on the one queue, each of which counts for itself.
    pub(crate) two_posters: bool,
    /// The element at which the queue breaks, and with what.
    pub(crate) broken: Option<(u64, u8)>,
    pub(crate) messages: u64,
}

impl Traffic {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            link: if seed.is_multiple_of(2) { Link::Ethernet } else { Link::InfiniBand },
            mood: Mood::hostile(),
            seed,
            collapsed: !seed.is_multiple_of(3),
            signal: Signal::FetchAdd,
            mutation: None,
            double_bell: seed.is_multiple_of(5),
            two_posters: false,
            broken: None,
            messages: 24,
        }
    }
}

/// How it ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Outcome {
    Right,
    /// The reader saw a signal, and not what it signals.
    Wrong,
    /// Not all messages came.
    Stuck,
    /// A completion with a syndrome.
    Broken(u8),
    /// The cards complained of this first.
    Complained(Rule),
}

const SLOTS: u64 = 4;
const SLOT: usize = 2048;
/// Where the reader's counter lies: among the cells, or behind the rows.
const CELL: usize = 192;
const RELAXED_CELL: usize = 48 * 1024;

struct Draw(u64);

impl Draw {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % limit as u64) as usize
    }
}

fn byte(message: u64, place: usize) -> u8 {
    (message as u8).wrapping_mul(31).wrapping_add(place as u8).wrapping_add((place >> 8) as u8) | 1
}

fn slot(message: u64) -> usize {
    (message % SLOTS) as usize * SLOT
}

struct Run {
    pair: Pair,
    traffic: Traffic,
    draw: Draw,
    posters: Vec<Poster>,
    sent: u64,
    received: u64,
    /// Ends of the messages' rows and signals in their queues, by message.
    ends: Vec<u64>,
    unrung: bool,
    rounds: u32,
}

/// Runs it.
pub(crate) fn run(traffic: &Traffic) -> Outcome {
    Run::new(traffic).go()
}

impl Run {
    fn new(traffic: &Traffic) -> Self {
        let traffic = traffic.clone();
        let pair = Pair::new(traffic.link, traffic.mood.clone(), traffic.seed, 2, 5, 4, traffic.collapsed);
        if let Some((after, syndrome)) = traffic.broken {
            pair.a.card.break_element(pair.a.queues[0].number, after, syndrome);
        }
        let posters = (0..2)
            .map(|_| {
                let mut poster = Poster::new(traffic.mutation);
                poster.double_bell = traffic.double_bell && traffic.mutation.is_none();
                poster
            })
            .collect();
        let draw = Draw(traffic.seed.wrapping_mul(0x2545_f491_4f6c_dd1d) | 1);
        Self { pair, traffic, draw, posters, sent: 0, received: 0, ends: Vec::new(), unrung: false, rounds: 0 }
    }

    fn go(&mut self) -> Outcome {
        let outcome = self.exchange();
        if let Some(complaint) = self.pair.fabric.complaints().first() {
            return Outcome::Complained(complaint.rule);
        }
        outcome
    }

    fn exchange(&mut self) -> Outcome {
        for _ in 0..20_000 {
            self.rounds += 1;
            match self.draw.below(16) {
                0 | 1 => self.post(),
                2 => self.ring(),
                3 => self.release(),
                4 if !self.receive() => return Outcome::Wrong,
                5 => {
                    for which in 0..2 {
                        let queue = self.queue(which);
                        if let Err(Broken { syndrome }) = self.posters[which].poll(&self.pair.a.queues[queue]) {
                            return Outcome::Broken(syndrome);
                        }
                    }
                }
                _ => drop(self.pair.fabric.step()),
            }
            if self.received == self.traffic.messages {
                return self.end();
            }
        }
        Outcome::Stuck
    }

    /// What posters have put off is done.
    fn release(&mut self) {
        for which in 0..2 {
            let queue = self.queue(which);
            self.posters[which].release(&self.pair.a.queues[queue]);
        }
    }

    /// The queue of a poster.
    fn queue(&self, poster: usize) -> usize {
        if self.traffic.two_posters { 0 } else { poster }
    }

    fn end(&mut self) -> Outcome {
        self.release();
        let Self { pair, posters, .. } = self;
        match posters[0].drain(&pair.fabric, &pair.a.queues[0]) {
            Ok(true) => Outcome::Right,
            Ok(false) => Outcome::Stuck,
            Err(Broken { syndrome }) => Outcome::Broken(syndrome),
        }
    }

    /// Posts a message, if there is room for it at both ends and in the queue.
    fn post(&mut self) {
        let message = self.sent;
        let source_free = message < SLOTS || self.posters[0].done >= self.ends[(message - SLOTS) as usize];
        let source_free = source_free || self.traffic.signal == Signal::OtherQueue || self.traffic.two_posters;
        if message == self.traffic.messages || message - self.received >= SLOTS || !source_free {
            return;
        }
        let which = if self.traffic.two_posters { (message % 2) as usize } else { 0 };
        let room = self.posters[which].room(&self.pair.a.queues[0]);
        if room < 16 || self.posters[1].room(&self.pair.a.queues[1]) < 2 {
            return;
        }
        let (a, b) = (&self.pair.a, &self.pair.b);
        let (queue, base) = (&a.queues[0], slot(message));
        let poster = &mut self.posters[which];
        let bytes: Vec<u8> = (0..SLOT).map(|place| byte(message, place)).collect();
        a.rows.write(base, &bytes);
        let (local, remote) = (Side::keys(a.rows_mr).0, Side::keys(b.rows_mr).1);
        let mut at = 0;
        while at < SLOT {
            let left = SLOT - at;
            let len = if left < 600 { left } else { 1 + self.draw.below(599) };
            let to = (b.rows.addr(base + at), remote);
            if len <= 28 {
                poster.write_inline(queue, 0, to, &bytes[at..at + len]);
            } else {
                let first = 1 + self.draw.below(len - 1);
                let parts =
                    [(a.rows.addr(base + at), local, first), (a.rows.addr(base + at + first), local, len - first)];
                let parts =
                    if poster.room(queue).is_multiple_of(2) { &parts[..] } else { &[(parts[0].0, local, len)][..] };
                poster.write(queue, 0, to, parts);
            }
            at += len;
            if poster.room(queue) < 3 {
                // The rest of the slot in one.
                let to = (b.rows.addr(base + at), remote);
                if at < SLOT {
                    poster.write(queue, 0, to, &[(a.rows.addr(base + at), local, SLOT - at)]);
                }
                at = SLOT;
            }
        }
        self.signal(which, message);
        self.sent += 1;
        self.unrung = true;
        match self.traffic.mutation {
            Some(Mutation::BellBeforeElement | Mutation::ReadyOutOfOrder) => self.ring(),
            Some(Mutation::RecordBeforeElement) => {
                self.posters[0].record(&self.pair.a.queues[0], self.posters[0].next);
            }
            _ => {}
        }
    }

    fn signal(&mut self, which: usize, message: u64) {
        let (a, b) = (&self.pair.a, &self.pair.b);
        let (cells, rows) = (Side::keys(b.cells_mr).1, Side::keys(b.rows_mr).1);
        let back = (a.cells.addr(8), Side::keys(a.cells_mr).0);
        let count = (message + 1).to_ne_bytes();
        let poster = &mut self.posters[which];
        match self.traffic.signal {
            Signal::FetchAdd => poster.fetch_add(&a.queues[0], SIGNAL, (b.cells.addr(CELL), cells), 1, back),
            Signal::RelaxedFetchAdd => {
                poster.fetch_add(&a.queues[0], SIGNAL, (b.rows.addr(RELAXED_CELL), rows), 1, back);
            }
            Signal::StrictWrite => poster.write_inline(&a.queues[0], SIGNAL, (b.cells.addr(CELL), cells), &count),
            Signal::RelaxedWrite => {
                poster.write_inline(&a.queues[0], SIGNAL, (b.rows.addr(RELAXED_CELL), rows), &count)
            }
            Signal::OtherQueue => {
                poster.element(&a.queues[0], 0, SIGNAL, &[]);
                self.posters[1].fetch_add(&a.queues[1], SIGNAL, (b.cells.addr(CELL), cells), 1, back);
            }
        }
        self.ends.push(self.posters[which].next);
    }

    fn ring(&mut self) {
        if !std::mem::take(&mut self.unrung) {
            return;
        }
        let queue = &self.pair.a.queues[0];
        for poster in &mut self.posters[..if self.traffic.two_posters { 2 } else { 1 }] {
            if self.traffic.mutation == Some(Mutation::RecordBeforeElement) {
                poster.release(queue);
            }
            poster.ring(queue);
        }
        if self.traffic.signal == Signal::OtherQueue {
            self.posters[1].ring(&self.pair.a.queues[1]);
        }
    }

    /// Reads what is announced. False: something else lies there.
    fn receive(&mut self) -> bool {
        if self.traffic.mutation == Some(Mutation::SourceReused) && self.sent > 0 {
            self.pair.a.rows.write(slot(self.sent - 1) + 700, &[0; 64]);
        }
        let b = &self.pair.b;
        let announced = match self.traffic.signal {
            Signal::RelaxedWrite | Signal::RelaxedFetchAdd => b.rows.double(RELAXED_CELL),
            _ => b.cells.double(CELL),
        };
        while self.received < announced.load(Ordering::Acquire) {
            let bytes = b.rows.read(slot(self.received), SLOT);
            if bytes.iter().enumerate().any(|(place, &seen)| seen != byte(self.received, place)) {
                return false;
            }
            self.received += 1;
        }
        true
    }
}

/// `SOFT_HCA_SEEDS` of them, 200 if not given.
#[test]
fn a_right_driver_passes_on_all_seeds() {
    let seeds = std::env::var("SOFT_HCA_SEEDS").map_or(200, |seeds| seeds.parse().expect("a number"));
    for seed in 0..seeds {
        let signal = if seed % 4 == 3 { Signal::StrictWrite } else { Signal::FetchAdd };
        let traffic = Traffic { signal, ..Traffic::new(seed) };
        assert_eq!(run(&traffic), Outcome::Right, "seed {seed}");
    }
}

#[test]
fn a_seed_replays() {
    for seed in 0..10 {
        let traffic = Traffic::new(seed);
        let [first, second] = [(); 2].map(|()| {
            let mut run = Run::new(&traffic);
            (run.go(), run.rounds, run.pair.a.card.counts())
        });
        assert_eq!(first, second, "seed {seed}");
    }
}
