//! Resets: a rank waits until nothing that it posted is on its way. Of what it posted to other partitions it learns by
//! asking there, a latency to and fro.

use std::task::{Context, Poll, Waker};

use ep_core::{Nanos, Rank};

use super::World;
use super::events::Event;
use super::mail::Matter;
use crate::wakers::keep_waker;

/// What a rank of another partition posted to this one.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Foreign {
    /// Puts that began to enter, and publishes that were raised.
    landed: u64,
    /// By when all that began to enter is there.
    entered: Nanos,
}

impl World {
    /// Over when nothing that the rank posted is on its way.
    pub(crate) fn poll_reset(&mut self, rank: Rank, context: &Context<'_>) -> Poll<()> {
        if self.ranks[rank].resetting.is_none() {
            self.inquire(rank);
        }
        if self.is_settled(rank) {
            self.ranks[rank].resetting = None;
            return Poll::Ready(());
        }
        keep_waker(&mut self.ranks[rank].resetting, context);
        self.expect_settled(rank);
        Poll::Pending
    }

    /// Asks the other partitions for what the rank posted to them.
    fn inquire(&mut self, rank: Rank) {
        let at = self.now_of(rank) + self.partitions.delay();
        let abroad = std::mem::take(&mut self.ranks[rank].abroad);
        for (partition, &posted) in abroad.iter().enumerate().filter(|&(_, &posted)| posted > 0) {
            let there = Rank(self.partitions.ranks(partition).start);
            self.mail(there, at, Matter::Inquiry { from: rank, posted });
            self.ranks[rank].unanswered += 1;
        }
        self.ranks[rank].abroad = abroad;
    }

    /// A rank of another partition asks when so many of its effects have come.
    pub(super) fn inquired(&mut self, from: Rank, posted: u64) {
        let Foreign { landed, entered } = self.foreign[from.index()];
        if landed < posted {
            self.inquiries.push((from, posted));
            return;
        }
        let at = entered.max(self.now) + self.partitions.delay();
        self.mail(from, at, Matter::Landed { to: from });
    }

    /// The answer has come.
    pub(super) fn told_landed(&mut self, rank: Rank) {
        let state = &mut self.ranks[rank];
        state.unanswered -= 1;
        if state.resetting.is_some() {
            self.expect_settled(rank);
        }
    }

    /// An effect of `rank` goes to a rank of another partition.
    pub(super) fn goes_abroad(&mut self, rank: Rank, to: Rank) {
        let abroad = &mut self.ranks[rank].abroad;
        if abroad.is_empty() {
            abroad.resize(self.partitions.count(), 0);
        }
        abroad[self.partitions.of(to)] += 1;
    }

    /// An effect that `rank` posted has arrived, or begins to enter and is there by `entered`.
    pub(super) fn landed(&mut self, rank: Rank, entered: Nanos) {
        if !self.ranks.has(rank) {
            let foreign = &mut self.foreign[rank.index()];
            foreign.landed += 1;
            foreign.entered = foreign.entered.max(entered);
            if !self.inquiries.is_empty() {
                let asked: Vec<_> = self.inquiries.extract_if(.., |(from, _)| *from == rank).collect();
                asked.into_iter().for_each(|(from, posted)| self.inquired(from, posted));
            }
            return;
        }
        let state = &mut self.ranks[rank];
        state.in_flight -= 1;
        state.entered = state.entered.max(entered);
        if state.resetting.is_some() {
            self.expect_settled(rank);
        }
    }

    /// All that began to enter from `rank` is there.
    pub(super) fn settled(&mut self, rank: Rank) {
        if self.is_settled(rank) {
            self.ranks[rank].resetting.iter().for_each(Waker::wake_by_ref);
        }
    }

    fn is_settled(&self, rank: Rank) -> bool {
        let state = &self.ranks[rank];
        state.in_flight == 0 && state.unanswered == 0 && state.entered <= self.now
    }

    /// Puts it on the agenda when all is there that a rank posted, if that is known.
    fn expect_settled(&mut self, rank: Rank) {
        let state = &self.ranks[rank];
        if state.in_flight == 0 && state.unanswered == 0 {
            let at = state.entered.max(self.now);
            self.agenda.enter(at, Event::Settled(rank));
        }
    }
}
