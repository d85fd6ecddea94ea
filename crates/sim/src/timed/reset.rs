//! Resets: a rank waits until nothing that it posted is on its way.

use std::task::{Context, Poll, Waker};

use ep_core::Rank;

use super::World;
use super::events::Event;
use crate::wakers::keep_waker;

impl World {
    /// Over when nothing that the rank posted is on its way.
    pub(crate) fn poll_reset(&mut self, rank: Rank, context: &Context<'_>) -> Poll<()> {
        if self.is_settled(rank) {
            self.ranks[rank.index()].resetting = None;
            return Poll::Ready(());
        }
        keep_waker(&mut self.ranks[rank.index()].resetting, context);
        self.expect_settled(rank);
        Poll::Pending
    }

    /// An effect that `rank` posted has arrived, or begins to enter.
    pub(super) fn landed(&mut self, rank: Rank) {
        let state = &mut self.ranks[rank.index()];
        state.in_flight -= 1;
        if state.resetting.is_some() {
            self.expect_settled(rank);
        }
    }

    /// All that began to enter from `rank` is there.
    pub(super) fn settled(&mut self, rank: Rank) {
        if self.is_settled(rank) {
            self.ranks[rank.index()].resetting.iter().for_each(Waker::wake_by_ref);
        }
    }

    fn is_settled(&self, rank: Rank) -> bool {
        let state = &self.ranks[rank.index()];
        state.in_flight == 0 && state.entered <= self.now
    }

    /// Puts it on the agenda when all is there that a rank posted, if that is known.
    fn expect_settled(&mut self, rank: Rank) {
        let state = &self.ranks[rank.index()];
        if state.in_flight == 0 {
            let at = state.entered.max(self.now);
            self.agenda.enter(at, Event::Settled(rank));
        }
    }
}
