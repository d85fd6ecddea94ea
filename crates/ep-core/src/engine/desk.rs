//! The front desk of an endpoint: what comes before and after rows move, on every machine.
//!
//! A [`Desk`] knows which rank the endpoint is and who takes part. It numbers operations, remembers the failure that poisoned the
//! communicator, marks handles, keeps the arena, and enters a new generation after a recovery. What it refuses, and in which words,
//! is in `checks`. A backend brings memory, and what moves rows: roles on a CPU ([`Engine`](super::Engine)), or launches of kernels.

use std::sync::Arc;

use super::mark::Mark;
use super::stats::Ways;
use crate::buffers::{Ages, Arena};
use crate::error::{Error, Failure, Fault};
use crate::layout::{Block, Layout};
use crate::machine::{Agreement, Proposal};
use crate::port::Offset;
use crate::settings::Settings;
use crate::shape::Shape;
use crate::topology::{Rank, RankSet, Topology};

/// The front desk of one rank's endpoint.
#[derive(Debug)]
pub struct Desk {
    pub(super) layout: Layout,
    pub(super) me: Rank,
    /// Shared with the handles that the endpoint gives out, so that it knows them again.
    pub(super) identity: Arc<()>,
    pub(super) mask: RankSet,
    pub(super) generation: u16,
    /// The first operation of this generation.
    pub(super) first_op: u64,
    /// The next operation.
    pub(super) op: u64,
    /// Set while an operation runs, so that one whose future is dropped is not forgotten.
    pub(super) poisoned: Option<Failure>,
    pub(super) arena: Arena,
    /// The block that the running operation grants, or granted, or one that failed or was dropped half-way.
    pub(super) granted: Option<Block>,
    /// Rows of throughput mode by the way they took.
    pub ways: Ways,
}

impl Desk {
    /// The desk of rank `me`, in generation 1.
    pub fn new(layout: Layout, me: Rank) -> Self {
        Self {
            arena: Arena::new(layout.arena()),
            layout,
            me,
            identity: Arc::default(),
            mask: RankSet::new(),
            generation: 1,
            first_op: 1,
            op: 1,
            poisoned: None,
            granted: None,
            ways: Ways::default(),
        }
    }

    /// Lets the arena [grow](Arena::growing) from `end` on. Before the first call.
    pub fn let_grow(&mut self, end: Offset, ages: &Arc<Ages>) {
        self.arena = Arena::growing(self.layout.arena(), end, ages);
    }

    /// The layout of every rank's window.
    pub const fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Sizes of the layer.
    pub const fn shape(&self) -> &Shape {
        self.layout.shape()
    }

    /// All ranks.
    pub const fn topology(&self) -> &Topology {
        self.layout.topology()
    }

    /// Settings of the communicator.
    pub const fn settings(&self) -> &Settings {
        self.layout.settings()
    }

    /// The rank that this endpoint is.
    pub const fn rank(&self) -> Rank {
        self.me
    }

    /// The ranks taken out of the communicator.
    pub const fn mask(&self) -> &RankSet {
        &self.mask
    }

    /// Generation of the communicator.
    pub const fn generation(&self) -> u16 {
        self.generation
    }

    /// The first operation of this generation.
    pub const fn first_op(&self) -> u64 {
        self.first_op
    }

    /// The next operation.
    pub const fn next_op(&self) -> u64 {
        self.op
    }

    /// The blocks of the own window that rows are placed in.
    pub const fn arena(&self) -> &Arena {
        &self.arena
    }

    /// The block that the running operation grants.
    pub const fn granted(&mut self) -> &mut Option<Block> {
        &mut self.granted
    }

    /// Of what this endpoint makes now.
    pub fn mark(&self) -> Mark {
        Mark::new(&self.identity, self.generation)
    }

    /// Refuses to start while poisoned.
    ///
    /// # Errors
    /// [`Error::Poisoned`].
    pub const fn ready(&self) -> Result<(), Error> {
        match self.poisoned {
            Some(by) => Err(Error::Poisoned { by }),
            None => Ok(()),
        }
    }

    /// What poisoned the communicator.
    pub const fn poisoned(&self) -> Option<&Failure> {
        self.poisoned.as_ref()
    }

    /// Poisons the communicator, or ends that.
    pub const fn set_poisoned(&mut self, by: Option<Failure>) {
        self.poisoned = by;
    }

    /// The failure of operation `op` as long as nothing is known of its end.
    pub const fn abandoned(&self, op: u64) -> Failure {
        Failure { op, culprit: self.me, reporter: self.me, fault: Fault::Abandoned }
    }

    /// Numbers and starts the next operation. The communicator is poisoned until it has ended.
    pub const fn start(&mut self) -> u64 {
        let op = self.op;
        self.op += 1;
        self.poisoned = Some(self.abandoned(op));
        op
    }

    /// The operation that was started last moved nothing: its number is free again.
    pub const fn take_back(&mut self) {
        self.op -= 1;
        self.poisoned = None;
    }

    /// Operation `op` was the last that has started: a machine that starts operations by itself says so.
    pub const fn has_started(&mut self, op: u64) {
        self.op = op + 1;
    }

    /// Takes note of how an operation ended.
    ///
    /// # Errors
    /// The failure.
    pub fn end<T>(&mut self, result: Result<T, Failure>) -> Result<T, Error> {
        self.poisoned = result.as_ref().err().copied();
        Ok(result?)
    }

    /// Who takes no part where `given_up` do not: a node leaves as a whole. With those of before.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a rank that does not exist.
    pub fn lost_with(&self, given_up: &RankSet) -> Result<RankSet, Error> {
        let topology = self.topology();
        if let Some(rank) = given_up.iter().find(|rank| rank.0 >= topology.ranks()) {
            return Err(Error::invalid("rank of the mask", rank, format_args!("0 to {}", topology.ranks() - 1)));
        }
        let mut mask = self.mask.clone();
        match topology.nodes() {
            1 => mask.extend(given_up),
            _ => given_up.iter().for_each(|rank| mask.extend(&topology.ranks_of(topology.node_of(rank)).collect())),
        }
        Ok(mask)
    }

    /// What this rank proposes after a failure: to go on without those that it lost before, and without `given_up`, with all ranks of
    /// their nodes where there are several. A node that lost a rank has lost a rail, and what the others would send along it.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a rank that does not exist, or when no generation is left; [`Error::Excluded`] for this rank.
    pub fn propose(&self, given_up: &RankSet) -> Result<Proposal, Error> {
        let mask = self.lost_with(given_up)?;
        if mask.contains(self.me) {
            return Err(Error::Excluded { rank: self.me });
        }
        if self.generation == u16::MAX {
            let limit = format_args!("less than {} to recover", u16::MAX);
            return Err(Error::invalid("generation of the communicator", self.generation, limit));
        }
        Ok(Proposal { mask, generation: self.generation, op: self.op })
    }

    /// A rank that was given up may still write where the failed operation let it: that block is held back until all who were granted it
    /// have recovered, and for good once one of them is lost. Before the ranks agree.
    pub fn hold_granted(&mut self) {
        self.granted.take().into_iter().for_each(|block| self.arena.hold(block));
    }

    /// Enters the generation that the ranks have agreed on.
    pub fn enter(&mut self, agreement: Agreement) {
        let Agreement { mask, generation, op } = agreement;
        self.arena.recovered(mask.iter().any(|rank| !self.mask.contains(rank)));
        (self.mask, self.generation, self.first_op, self.op) = (mask, generation, op, op);
        self.poisoned = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::Placement;

    fn desk(nodes: u32, ranks: u32) -> Desk {
        let topology = Topology::new(nodes, ranks).unwrap();
        let shape = Shape::builder().experts(nodes * ranks).topk(1).hidden(16).max_tokens(8).build().unwrap();
        let settings = Settings::builder(&shape, &topology).placement(Placement::Direct).build().unwrap();
        Desk::new(Layout::new(&shape, &topology, &settings).unwrap(), Rank(0))
    }

    fn recover(desk: &mut Desk, given_up: &[Rank]) -> Result<(), Error> {
        let Proposal { mask, generation, op } = desk.propose(&given_up.iter().copied().collect())?;
        desk.hold_granted();
        desk.enter(Agreement { mask, generation: generation + 1, op });
        Ok(())
    }

    /// A rank that was given up may be alive and still write where it was allowed to, however often the others recover.
    #[test]
    fn what_a_lost_rank_was_granted_is_never_granted_again() {
        let mut desk = desk(1, 4);
        let format = *desk.layout().row();
        let granted = desk.arena().take(&format, 5).unwrap();
        *desk.granted() = Some(granted);
        recover(&mut desk, &[Rank(3)]).unwrap();
        recover(&mut desk, &[]).unwrap();
        assert_ne!(desk.arena().take(&format, 5).unwrap().base(), granted.base());
    }

    #[test]
    fn what_only_survivors_were_granted_returns() {
        let mut desk = desk(1, 4);
        let format = *desk.layout().row();
        let granted = desk.arena().take(&format, 5).unwrap();
        *desk.granted() = Some(granted);
        recover(&mut desk, &[]).unwrap();
        assert_eq!(desk.arena().take(&format, 5).unwrap().base(), granted.base());
    }

    #[test]
    fn a_rank_is_given_up_with_its_node() {
        let mask = |desk: &Desk| desk.mask().iter().map(|rank| rank.0).collect::<Vec<_>>();
        let mut several = desk(3, 2);
        recover(&mut several, &[Rank(3)]).unwrap();
        assert_eq!(mask(&several), [2, 3]);
        let mut one = desk(1, 4);
        recover(&mut one, &[Rank(3)]).unwrap();
        assert_eq!(mask(&one), [3]);
        assert!(matches!(several.propose(&[Rank(1)].into_iter().collect()), Err(Error::Excluded { rank: Rank(0) })));
        let said = one.propose(&[Rank(4)].into_iter().collect()).unwrap_err().to_string();
        assert_eq!(said, "rank of the mask is 4, allowed: 0 to 3");
    }

    #[test]
    fn generations_end_with_an_error() {
        let mut desk = desk(1, 2);
        desk.generation = u16::MAX - 1;
        recover(&mut desk, &[]).unwrap();
        let error = recover(&mut desk, &[]).unwrap_err();
        assert_eq!(error.to_string(), "generation of the communicator is 65535, allowed: less than 65535 to recover");
    }

    #[test]
    fn a_call_that_was_dropped_poisons_and_one_that_moved_nothing_does_not() {
        let mut desk = desk(1, 2);
        assert_eq!((desk.start(), desk.next_op()), (1, 2));
        assert!(matches!(desk.ready(), Err(Error::Poisoned { by }) if by.fault == Fault::Abandoned && by.op == 1));
        desk.take_back();
        assert!(desk.ready().is_ok());
        assert_eq!(desk.start(), 1);
        assert!(desk.end(Ok(())).is_ok() && desk.ready().is_ok());
        let failure = Failure { fault: Fault::StillOffered, ..desk.abandoned(2) };
        assert!(matches!(desk.end::<()>(Err(failure)), Err(Error::Failed(by)) if by == failure));
        assert!(matches!(desk.ready(), Err(Error::Poisoned { by }) if by == failure));
    }
}
