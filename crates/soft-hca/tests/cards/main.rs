//! The card, driven by a poster of its own that was written from the byte layouts alone.

mod commands;
mod delivery;
mod failures;
mod library;
mod message;
mod mutations;
mod poster;
mod side;
mod threads;
mod traffic;

use soft_hca::{Fabric, Link, Mood};

use side::Side;

/// Two cards, connected by queues of `1 << log_depth` units.
pub(crate) struct Pair {
    pub(crate) fabric: Fabric,
    pub(crate) a: Side,
    pub(crate) b: Side,
}

impl Pair {
    pub(crate) fn new(
        link: Link,
        mood: Mood,
        seed: u64,
        queues: usize,
        log_depth: u32,
        log_cq: u32,
        collapsed: bool,
    ) -> Self {
        Self::with(link, mood, seed, (queues, log_depth, log_cq), collapsed, 0)
    }

    /// With doorbell pages of a kind: 1 is one page for all.
    pub(crate) fn with(
        link: Link,
        mood: Mood,
        seed: u64,
        (queues, log_depth, log_cq): (usize, u32, u32),
        collapsed: bool,
        pages: u32,
    ) -> Self {
        let fabric = Fabric::builder(2, link).mood(mood).seed(seed).stepped();
        let mut sides = [0, 1].map(|card| Side::open(fabric.card(card), link));
        for side in &mut sides {
            side.pages = pages;
            for _ in 0..queues {
                side.add_queue(log_depth, log_cq, collapsed);
            }
        }
        let [a, b] = sides;
        for queue in 0..queues {
            a.connect(queue, &b);
            b.connect(queue, &a);
        }
        Self { fabric, a, b }
    }

    /// Everything is given back, and nobody complained.
    pub(crate) fn close(self) {
        let Self { fabric, a, b } = self;
        assert_eq!(fabric.complaints(), []);
        a.close();
        b.close();
        assert_eq!(fabric.complaints(), []);
    }
}
