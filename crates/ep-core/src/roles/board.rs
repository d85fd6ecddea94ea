//! What the roles of a rank wait for, and what the peers say that they wait for: the ground for a verdict.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

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

/// Seats that every board has.
const FIRST: usize = 2;

/// One board for each operation of a rank, shared by its roles.
#[derive(Debug)]
pub(crate) struct Board {
    /// One seat for each open port: what it waits for now. The first ones here: of many small operations there is no other.
    first: [Cell<Option<Wait>>; FIRST],
    more: RefCell<Vec<Option<Wait>>>,
    seats: Cell<usize>,
    /// What this rank last told the others that it waits for.
    reported: Cell<Option<Wait>>,
    /// What peers last said that they wait for.
    suspicions: RefCell<BTreeMap<Rank, Wait>>,
    /// `[ranks]`: time waited for each peer.
    waited: RefCell<Vec<Nanos>>,
}

impl Board {
    pub(crate) fn new(ranks: usize) -> Self {
        Self {
            first: Default::default(),
            more: RefCell::default(),
            seats: Cell::default(),
            reported: Cell::default(),
            suspicions: RefCell::default(),
            waited: RefCell::new(vec![Nanos(0); ranks]),
        }
    }

    /// A seat for one port.
    pub(crate) fn sit(&self) -> usize {
        let seat = self.seats.get();
        self.seats.set(seat + 1);
        if seat >= FIRST {
            self.more.borrow_mut().push(None);
        }
        seat
    }

    pub(crate) fn waits(&self, seat: usize, wait: Wait) {
        self.replace(seat, Some(wait));
    }

    fn replace(&self, seat: usize, wait: Option<Wait>) -> Option<Wait> {
        match self.first.get(seat) {
            Some(place) => place.replace(wait),
            None => std::mem::replace(&mut self.more.borrow_mut()[seat - FIRST], wait),
        }
    }

    /// The wait of a seat ended well after `waited`.
    pub(crate) fn goes_on(&self, seat: usize, waited: Nanos) {
        let before = self.replace(seat, None);
        // Whoever only let the others catch up has waited for nobody.
        if let Some(wait) = before.filter(|_| waited > Nanos(0)) {
            let mut all = self.waited.borrow_mut();
            let sum = &mut all[wait.peer.index()];
            *sum = *sum + waited;
        }
    }

    /// What this rank waits for: of all its roles' waits the one nearest to the cause.
    pub(crate) fn foremost(&self) -> Option<Wait> {
        let first = self.first.iter().filter_map(Cell::get);
        first.chain(self.more.borrow().iter().flatten().copied()).min()
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
        self.has_reported() || !self.suspicions.borrow().is_empty()
    }

    pub(crate) fn suspect(&self, reporter: Rank, wait: Wait) {
        self.suspicions.borrow_mut().insert(reporter, wait);
    }

    pub(crate) fn forget(&self, reporter: Rank) {
        self.suspicions.borrow_mut().remove(&reporter);
    }

    pub(crate) fn suspicions(&self) -> Vec<(Rank, Wait)> {
        self.suspicions.borrow().iter().map(|(&rank, &wait)| (rank, wait)).collect()
    }

    pub(crate) fn waited(&self) -> Vec<Nanos> {
        self.waited.borrow().clone()
    }

    /// Whom to blame for a timeout of rank `me`, given everything that was said: by this rank too, whatever it waits for
    /// by now, so that all judge by the same. `hears` tells whose suspicions come to this rank.
    ///
    /// A rank that waits itself is explained by what it waits for; so the waits for ranks that wait for nobody come
    /// first. Next the waits in a circle (a lane that lost what it carried), and those for ranks that this one does not
    /// hear, which may wait as well. Of several, the one nearest to the cause. All ranks that have heard the same come
    /// to the same verdict.
    pub(crate) fn culprit(&self, me: Rank, hears: impl Fn(Rank) -> bool, timeout: Wait) -> Rank {
        let mut waits = self.suspicions();
        waits.retain(|&(reporter, _)| reporter != me);
        waits.push((me, self.reported.get().unwrap_or(timeout)));
        let next = |rank: Rank| waits.iter().find(|&&(reporter, _)| reporter == rank).map(|&(_, wait)| wait.peer);
        let roots = || waits.iter().filter(|(_, wait)| next(wait.peer).is_none()).map(|&(_, wait)| wait);
        let circle = |reporter: Rank| {
            let chain = std::iter::successors(next(reporter), |&rank| next(rank));
            chain.take(waits.len()).any(|rank| rank == reporter)
        };
        let circles = waits.iter().filter(|&&(reporter, _)| circle(reporter)).map(|&(_, wait)| wait);
        let heard = roots().filter(|wait| hears(wait.peer)).min();
        heard.or_else(|| roots().chain(circles).min()).map_or(timeout.peer, |wait| wait.peer)
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
        assert_eq!(board.culprit(Rank(0), |_| true, wait(5, Phase::Counts, 1)), Rank(2));
    }

    #[test]
    fn both_ends_of_a_lost_lane_name_the_same_rank() {
        let (data, credit) = (wait(4, Phase::Rows, 0), wait(4, Phase::Credit, 1));
        let sender = Board::new(2);
        sender.suspect(Rank(1), data);
        let receiver = Board::new(2);
        receiver.suspect(Rank(0), credit);
        assert_eq!(sender.culprit(Rank(0), |_| true, credit), Rank(0));
        assert_eq!(receiver.culprit(Rank(1), |_| true, data), Rank(0));
        assert_eq!(Board::new(2).culprit(Rank(1), |_| true, data), Rank(0));
    }

    /// Ranks 0 and 1 are one node, 2 and 3 the other: rank 0 does not hear rank 3.
    #[test]
    fn a_rank_that_cannot_be_heard_is_not_taken_for_one_that_waits_for_nobody() {
        let hears = |rank: Rank| rank != Rank(3);
        let board = Board::new(4);
        board.suspect(Rank(1), wait(5, Phase::Rows, 3));
        board.suspect(Rank(2), wait(4, Phase::Rows, 0));
        assert_eq!(board.culprit(Rank(0), hears, wait(5, Phase::Rows, 2)), Rank(0), "the lane from 0 to 2 lost rows");
        board.suspect(Rank(2), wait(4, Phase::Rows, 3));
        assert_eq!(board.culprit(Rank(0), hears, wait(5, Phase::Rows, 2)), Rank(3), "nobody has heard rank 3");
    }
}
