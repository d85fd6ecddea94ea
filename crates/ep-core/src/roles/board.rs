//! What the roles of a rank wait for, and what the peers say that they wait for: the ground for a verdict.

use std::cell::{Cell, RefCell};

use crate::error::Phase;
use crate::port::Nanos;
use crate::topology::Rank;

/// A wait for a peer. Ordered by how near it is to the cause: earlier operations and phases first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Wait {
    pub(crate) op: u64,
    pub(crate) phase: Phase,
    pub(crate) peer: Rank,
}

/// One board for each operation of a rank, shared by its roles.
#[derive(Debug)]
pub(crate) struct Board {
    /// One seat for each open port: what it waits for now.
    seats: RefCell<Vec<Option<Wait>>>,
    /// What this rank last told the others that it waits for.
    reported: Cell<Option<Wait>>,
    /// `[ranks]`: what each peer last said it waits for.
    suspicions: RefCell<Vec<Option<Wait>>>,
    /// `[ranks]`: time waited for each peer.
    waited: RefCell<Vec<Nanos>>,
}

impl Board {
    pub(crate) fn new(ranks: usize) -> Self {
        Self {
            seats: RefCell::default(),
            reported: Cell::default(),
            suspicions: RefCell::new(vec![None; ranks]),
            waited: RefCell::new(vec![Nanos(0); ranks]),
        }
    }

    /// A seat for one port.
    pub(crate) fn sit(&self) -> usize {
        let mut seats = self.seats.borrow_mut();
        seats.push(None);
        seats.len() - 1
    }

    pub(crate) fn waits(&self, seat: usize, wait: Wait) {
        self.seats.borrow_mut()[seat] = Some(wait);
    }

    /// The wait of a seat ended well after `waited`.
    pub(crate) fn goes_on(&self, seat: usize, waited: Nanos) {
        if let Some(wait) = self.seats.borrow_mut()[seat].take() {
            let mut all = self.waited.borrow_mut();
            let sum = &mut all[wait.peer.index()];
            *sum = *sum + waited;
        }
    }

    /// What this rank waits for: of all its roles' waits the one nearest to the cause.
    pub(crate) fn foremost(&self) -> Option<Wait> {
        self.seats.borrow().iter().flatten().min().copied()
    }

    /// What this rank waits for, if the others have not been told yet; now they are.
    pub(crate) fn report(&self) -> Option<Wait> {
        let news = self.foremost().filter(|wait| self.reported.get() != Some(*wait));
        if news.is_some() {
            self.reported.set(news);
        }
        news
    }

    /// Whether this rank has told the others that it waits.
    pub(crate) fn has_reported(&self) -> bool {
        self.reported.get().is_some()
    }

    /// Whether anybody, this rank too, has said what it waits for.
    pub(crate) fn is_troubled(&self) -> bool {
        self.has_reported() || self.suspicions.borrow().iter().any(Option::is_some)
    }

    pub(crate) fn suspect(&self, reporter: Rank, wait: Wait) {
        self.suspicions.borrow_mut()[reporter.index()] = Some(wait);
    }

    pub(crate) fn forget(&self, reporter: Rank) {
        self.suspicions.borrow_mut()[reporter.index()] = None;
    }

    pub(crate) fn suspicions(&self) -> Vec<(Rank, Wait)> {
        let all = self.suspicions.borrow();
        (0u32..).map(Rank).zip(all.iter()).filter_map(|(rank, wait)| wait.map(|wait| (rank, wait))).collect()
    }

    pub(crate) fn waited(&self) -> Vec<Nanos> {
        self.waited.borrow().clone()
    }

    /// Whom to blame for a timeout of rank `me`, given everything that was said: by this rank too, whatever it waits for
    /// by now, so that all judge by the same.
    ///
    /// A rank that waits itself is explained by what it waits for; so the waits for ranks that wait for nobody come
    /// first, and of several, or of a cycle (a lane that lost what it carried), the one nearest to the cause. All ranks
    /// that have heard the same come to the same verdict.
    pub(crate) fn culprit(&self, me: Rank, timeout: Wait) -> Rank {
        let mut waits = self.suspicions();
        waits.retain(|&(reporter, _)| reporter != me);
        waits.push((me, self.reported.get().unwrap_or(timeout)));
        let explained = |peer: Rank| waits.iter().any(|&(reporter, _)| reporter == peer);
        let roots = waits.iter().filter(|(_, wait)| !explained(wait.peer)).map(|&(_, wait)| wait).min();
        roots.or_else(|| waits.iter().map(|&(_, wait)| wait).min()).map_or(timeout.peer, |wait| wait.peer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wait(op: u64, phase: Phase, peer: u32) -> Wait {
        Wait { op, phase, peer: Rank(peer) }
    }

    #[test]
    fn a_rank_that_waits_itself_is_not_the_culprit() {
        let board = Board::new(3);
        board.suspect(Rank(1), wait(4, Phase::Rows, 2));
        assert_eq!(board.culprit(Rank(0), wait(5, Phase::Counts, 1)), Rank(2));
    }

    #[test]
    fn both_ends_of_a_lost_lane_name_the_same_rank() {
        let (data, credit) = (wait(4, Phase::Rows, 0), wait(4, Phase::Credit, 1));
        let sender = Board::new(2);
        sender.suspect(Rank(1), data);
        let receiver = Board::new(2);
        receiver.suspect(Rank(0), credit);
        assert_eq!(sender.culprit(Rank(0), credit), Rank(0));
        assert_eq!(receiver.culprit(Rank(1), data), Rank(0));
        assert_eq!(Board::new(2).culprit(Rank(1), data), Rank(0));
    }
}
