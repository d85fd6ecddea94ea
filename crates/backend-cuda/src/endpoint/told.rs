//! What peers were told of: blocks that calls granted or offered, until it is known that the operation has ended well.
//!
//! A call that does not wait returns while its kernels run. Whoever gets its block next uses it behind them, on the same stream, so the block may
//! be given back and taken again at once: where an operation fails, the kernels behind it do nothing. But a peer that was stopped, is given up and
//! goes on may store into what the failed operation granted. So the endpoint remembers, beside the block, the event behind the call's kernels, and
//! lets go of it once the event has come and nothing was reported since. What is left at a failure is suspect ([`Arena::suspect`]).

use std::collections::VecDeque;
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Weak};
use std::time::Instant;

use ep_core::engine::{Arena, Held};
use ep_core::layout::Block;

use super::{CudaEndpoint, Event, LOOK};

/// A block that a graph grants or offers with each replay.
#[derive(Debug)]
struct OfGraph {
    block: Block,
    /// Lives as long as the graph, or somebody else who has the block.
    held: Weak<Held>,
    /// Found gone: then what the graph did has ended.
    is_gone: bool,
}

/// Blocks of operations that are not known to have ended well.
#[derive(Debug)]
pub(super) struct Told<E = Event> {
    /// Of calls, with what comes behind their kernels; in the order of the stream.
    calls: VecDeque<(Block, E)>,
    graphs: Vec<OfGraph>,
    /// When to look next: a call costs no question to the driver, a millisecond a few.
    look_at: Instant,
}

impl<E> Default for Told<E> {
    fn default() -> Self {
        Self { calls: VecDeque::new(), graphs: Vec::new(), look_at: Instant::now() }
    }
}

impl<E> Told<E> {
    /// Forgets what has ended. `has_come`: of the event of a call; `is_clean`, asked behind that: whether nothing has failed.
    fn settle(&mut self, has_come: impl Fn(&E) -> bool, is_clean: impl FnOnce() -> bool) {
        let ended = self.calls.partition_point(|(_, event)| has_come(event));
        self.graphs.iter_mut().for_each(|graph| graph.is_gone |= graph.held.strong_count() == 0);
        if ended == 0 && !self.graphs.iter().any(|graph| graph.is_gone) {
            return;
        }
        // What a graph reported came before it let go of its block.
        fence(Ordering::Acquire);
        if is_clean() {
            self.calls.drain(..ended);
            self.graphs.retain(|graph| !graph.is_gone);
        }
    }

    /// A peer may still touch all that is left.
    fn suspect(&mut self, arena: &Arena) {
        let graphs = self.graphs.drain(..).map(|graph| graph.block);
        self.calls.drain(..).map(|(block, _)| block).chain(graphs).for_each(|block| arena.suspect(&block));
    }
}

impl CudaEndpoint {
    /// A call has told peers of a block, and `event` comes behind its kernels.
    pub(super) fn tell(&mut self, block: Block, event: &Event) {
        // Of a call that has waited it is known how it ended.
        if !self.wait_for_kernels && block.span().len > 0 {
            self.told.calls.push_back((block, event.clone()));
            self.settle(Instant::now());
        }
    }

    /// A graph tells peers of a block whenever it runs.
    pub(super) fn pin(&mut self, held: &Arc<Held>) {
        self.told.graphs.push(OfGraph { block: held.block(), held: Arc::downgrade(held), is_gone: false });
        self.settle(Instant::now());
    }

    /// Forgets what has ended well, from time to time.
    pub(super) fn settle(&mut self, now: Instant) {
        if now >= self.told.look_at {
            self.told.look_at = now + LOOK;
            self.settle_now();
        }
    }

    fn settle_now(&mut self) {
        let device = &self.device;
        self.told.settle(|event| event.0.has_come().unwrap_or(false), || !device.has_failed());
    }

    /// An operation has failed, or a recovery begins, behind all that was enqueued: what is not known to have ended well is suspect.
    pub(super) fn suspect_told(&mut self) {
        self.settle_now();
        self.told.suspect(self.desk.arena());
    }

    /// The same where kernels have reported a failure that no call has told.
    pub(super) fn suspect_if_failed(&mut self) {
        if self.device.has_failed() {
            self.suspect_told();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use ep_core::engine::Desk;
    use ep_core::{Layout, Placement, Rank, Settings, Shape, Topology};

    use super::*;

    fn desk() -> Desk {
        let topology = Topology::new(1, 2).unwrap();
        let shape = Shape::builder().experts(2).topk(1).hidden(16).max_tokens(8).build().unwrap();
        let settings = Settings::builder(&shape, &topology).placement(Placement::Direct).build().unwrap();
        Desk::new(Layout::new(&shape, &topology, &settings).unwrap(), Rank(0))
    }

    /// Blocks of so many rows that were told of, whose events come at times 1, 2 and so on.
    fn told(desk: &Desk, rows: &[u32]) -> (Told<u64>, Vec<Block>) {
        let blocks: Vec<_> = rows.iter().map(|&rows| desk.arena().take(desk.layout().row(), rows).unwrap()).collect();
        let calls = blocks.iter().copied().zip(1..).collect();
        (Told { calls, ..Told::default() }, blocks)
    }

    #[test]
    fn what_has_ended_well_is_forgotten_and_what_failed_is_not() {
        let desk = desk();
        let (mut told, blocks) = told(&desk, &[1, 2, 3, 4]);
        let left = |told: &Told<u64>| told.calls.iter().map(|(block, _)| *block).collect::<Vec<_>>();
        told.settle(|_| false, || panic!("nothing has come"));
        told.settle(|&at| at <= 2, || true);
        assert_eq!(left(&told), blocks[2..]);
        told.settle(|_| true, || false);
        assert_eq!(left(&told), blocks[2..], "a failure was reported");
        blocks.iter().for_each(|block| desk.arena().give(block));
        told.suspect(desk.arena());
        assert!(told.calls.is_empty());
        desk.arena().recovered(true);
        let later = desk.arena().take(desk.layout().row(), 1).unwrap();
        assert_eq!(later.base(), blocks[0].base(), "the first two had ended well");
        let most = std::iter::from_fn(|| desk.arena().take(desk.layout().row(), 1));
        let meets = |block: &Block| {
            blocks[2..].iter().any(|told| (told.span().offset.0..told.span().end()).contains(&block.base().0))
        };
        assert!(!most.into_iter().any(|block| meets(&block)));
    }

    /// A graph that is gone by the time that its failure is told has told peers of its block, too.
    #[test]
    fn blocks_of_graphs_that_are_gone_stay_suspect_after_a_failure() {
        let desk = desk();
        for (clean, forgotten) in [(true, true), (false, false)] {
            let held = Arc::new(Held::new(desk.arena(), desk.arena().take(desk.layout().row(), 1).unwrap()));
            let mut told = Told::<u64>::default();
            told.graphs.push(OfGraph { block: held.block(), held: Arc::downgrade(&held), is_gone: false });
            told.settle(|_| true, || panic!("its graph lives"));
            drop(held);
            let asked = Cell::new(false);
            told.settle(|_| true, || asked.replace(true) || clean);
            assert!(asked.get());
            assert_eq!(told.graphs.is_empty(), forgotten);
        }
    }
}
