//! What the roles of a rank wait for, and what the peers say that they wait for: the ground for a verdict.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

use crate::blame;
pub(crate) use crate::blame::Wait;
use crate::port::Nanos;
use crate::topology::Rank;

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
    /// What peers last said that they wait for, as throughput mode says it.
    suspicions: RefCell<BTreeMap<Rank, Wait>>,
    /// The same of those who have said it as low latency does.
    words: RefCell<BTreeMap<Rank, Wait>>,
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
            words: RefCell::default(),
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
        self.least(|_| true)
    }

    /// The wait nearest to the cause, of those that `counts` is true of.
    fn least(&self, counts: impl Fn(&Wait) -> bool) -> Option<Wait> {
        let more = self.more.borrow();
        self.first.iter().filter_map(Cell::get).chain(more.iter().flatten().copied()).filter(counts).min()
    }

    /// What this rank, `me`, waits for, if the others have not been told yet; now they are.
    ///
    /// A wait for a peer that waits itself is explained by that: so it comes behind all others. (Over several nodes two ranks may each
    /// wait for rows that the other is to pass on, and both for a third.) With `relays`, where not everybody hears everybody, such a
    /// wait is told as what it comes from.
    pub(crate) fn report(&self, me: Rank, relays: bool) -> Option<Wait> {
        let said = self.suspicions();
        let unexplained = self.least(|wait| said.iter().all(|&(rank, _)| rank != wait.peer));
        let foremost = unexplained.or_else(|| self.foremost());
        let told = foremost.map(|wait| if relays { blame::origin(&said, me, wait) } else { wait });
        let news = told.filter(|wait| self.reported.get() != Some(*wait));
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
        self.has_reported() || !self.suspicions().is_empty()
    }

    pub(crate) fn suspect(&self, reporter: Rank, wait: Wait) {
        self.suspicions.borrow_mut().insert(reporter, wait);
    }

    pub(crate) fn forget(&self, reporter: Rank) {
        self.suspicions.borrow_mut().remove(&reporter);
    }

    /// Notes for whom `rank` says that it waits; none: it goes on.
    pub(crate) fn hear_word(&self, rank: Rank, wait: Option<Wait>) {
        let mut words = self.words.borrow_mut();
        match wait {
            Some(wait) => words.insert(rank, wait),
            None => words.remove(&rank),
        };
    }

    /// What each peer says that it waits for. What it says in this mode is the more exact.
    pub(crate) fn suspicions(&self) -> Vec<(Rank, Wait)> {
        let mut said = self.words.borrow().clone();
        said.extend(self.suspicions.borrow().iter().map(|(&rank, &wait)| (rank, wait)));
        said.into_iter().collect()
    }

    pub(crate) fn waited(&self) -> Vec<Nanos> {
        self.waited.borrow().clone()
    }

    /// Whom to blame for a timeout of rank `me`, given everything that was said: by this rank too, whatever it waits for
    /// by now, so that all judge by the same. `hears(rank, peer)` tells whether the suspicions of `peer` come to `rank`, or to this one.
    pub(crate) fn culprit(&self, me: Rank, hears: impl Fn(Rank, Rank) -> bool, timeout: Wait) -> Rank {
        let mut waits = self.suspicions();
        waits.retain(|&(reporter, _)| reporter != me);
        waits.push((me, self.reported.get().unwrap_or(timeout)));
        blame::culprit(&waits, hears, timeout)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Phase;

    fn wait(op: u64, phase: Phase, peer: u32) -> Wait {
        Wait::new(op, phase, Rank(peer))
    }

    #[test]
    fn a_rank_that_waits_itself_is_not_the_culprit() {
        let board = Board::new(3);
        board.suspect(Rank(1), wait(4, Phase::Rows, 2));
        assert_eq!(board.culprit(Rank(0), |_, _| true, wait(5, Phase::Counts, 1)), Rank(2));
    }

    #[test]
    fn both_ends_of_a_lost_lane_name_the_same_rank() {
        let (data, credit) = (wait(4, Phase::Rows, 0), wait(4, Phase::Credit, 1));
        let sender = Board::new(2);
        sender.suspect(Rank(1), data);
        let receiver = Board::new(2);
        receiver.suspect(Rank(0), credit);
        assert_eq!(sender.culprit(Rank(0), |_, _| true, credit), Rank(0));
        assert_eq!(receiver.culprit(Rank(1), |_, _| true, data), Rank(0));
        assert_eq!(Board::new(2).culprit(Rank(1), |_, _| true, data), Rank(0));
    }

    /// Ranks 0 and 1 pass on to each other what ranks 2 and 3 of the other node send; rank 2 is stuck, and rank 3 waits for it.
    #[test]
    fn a_wait_for_a_rank_that_waits_itself_is_told_last() {
        let board = Board::new(4);
        let (near, far) = (wait(4, Phase::Rows, 1), wait(4, Phase::Rows, 2));
        for wait in [near, far] {
            let seat = board.sit();
            board.waits(seat, wait);
        }
        assert_eq!(
            (board.report(Rank(0), true), board.report(Rank(0), true)),
            (Some(near), None),
            "nobody has said anything"
        );
        board.suspect(Rank(1), wait(4, Phase::Rows, 0));
        assert_eq!((board.report(Rank(0), true), board.report(Rank(0), true)), (Some(far), None));
        board.suspect(Rank(1), wait(4, Phase::Rows, 3));
        assert_eq!(board.culprit(Rank(0), |_, peer| peer != Rank(3), far), Rank(2));
        board.suspect(Rank(2), wait(4, Phase::Rows, 0));
        assert_eq!(
            board.report(Rank(0), true),
            Some(wait(4, Phase::Rows, 3)),
            "all wait: what the first wait comes from"
        );
    }

    /// Ranks 2 and 3 are a node of their own: rank 0, which hears rank 1, does not hear rank 3.
    #[test]
    fn what_a_wait_comes_from_is_relayed_to_those_who_do_not_hear_it() {
        let board = Board::new(4);
        let near = wait(4, Phase::Credit, 3);
        board.waits(board.sit(), near);
        let far = wait(4, Phase::Rows, 1);
        board.suspect(Rank(3), far);
        assert_eq!(board.report(Rank(2), false), Some(near));
        assert_eq!(board.report(Rank(2), true), Some(far));
        for circle in [2, 3] {
            board.suspect(Rank(1), wait(4, Phase::Rows, circle));
            let told = Wait { in_circle: true, ..near };
            assert_eq!(board.report(Rank(2), true), (circle == 2).then_some(told), "a circle explains nothing");
        }
    }

    /// Two nodes of five; rank 9 is suspended. Ranks 0 to 3 wait for each other, as each passes on rows that do not come. Rank 0 does not
    /// hear rank 9, but ranks 4 and 5 would have heard it.
    #[test]
    fn a_silence_that_its_neighbours_vouch_for_is_nearer_to_the_cause_than_a_circle() {
        let topology = crate::Topology::new(2, 5).unwrap();
        let hears = |rank, peer| [Rank(0), rank].into_iter().any(|rank| topology.are_neighbours(rank, peer));
        let board = Board::new(10);
        for (rank, peer) in [(1, 2), (2, 1), (3, 1), (4, 9), (5, 9)] {
            board.suspect(Rank(rank), wait(1, Phase::Rows, peer));
        }
        let timeout = wait(1, Phase::Rows, 1);
        assert_eq!(board.culprit(Rank(0), hears, timeout), Rank(9));
        board.forget(Rank(4));
        board.suspect(Rank(5), wait(1, Phase::Rows, 4));
        board.suspect(Rank(3), wait(1, Phase::Rows, 9));
        assert_eq!(board.culprit(Rank(0), hears, timeout), Rank(4), "rank 3 says so by hearsay");
    }

    /// Rank 3 waits for rank 4, and that one for ranks 1 and 2, which wait for each other.
    #[test]
    fn a_wait_that_leads_into_a_circle_is_not_of_it() {
        let board = Board::new(5);
        for (rank, phase, peer) in [(1, Phase::Rows, 2), (2, Phase::Rows, 1), (3, Phase::Bank, 4), (4, Phase::Rows, 1)]
        {
            board.suspect(Rank(rank), wait(1, phase, peer));
        }
        assert_eq!(board.culprit(Rank(0), |_, _| true, wait(1, Phase::Rows, 3)), Rank(1));
    }

    /// Three nodes of five; rank 14 is suspended, as ranks 4 and 9 say. Rank 5 waits for rank 7, and that leads back to rank 5. Rank 0 does not hear
    /// rank 7, and rank 5 would have heard it.
    #[test]
    fn what_is_known_to_lead_in_a_circle_is_no_word_of_a_silence() {
        let topology = crate::Topology::new(3, 5).unwrap();
        let hears = |rank, peer| [Rank(0), rank].into_iter().any(|rank| topology.are_neighbours(rank, peer));
        let board = Board::new(15);
        let circle = Wait { in_circle: true, ..wait(1, Phase::Counts, 7) };
        board.suspect(Rank(4), wait(1, Phase::Rows, 14));
        board.suspect(Rank(5), circle);
        let timeout = wait(1, Phase::Rows, 4);
        assert_eq!(board.culprit(Rank(0), hears, timeout), Rank(14));
        board.suspect(Rank(5), Wait { in_circle: false, ..circle });
        assert_eq!(board.culprit(Rank(0), hears, timeout), Rank(7), "the nearer one of two silences");
        board.forget(Rank(4));
        board.suspect(Rank(5), circle);
        assert_eq!(board.culprit(Rank(0), hears, wait(1, Phase::Rows, 5)), Rank(7), "there is nothing else");
    }

    #[test]
    fn who_waits_in_low_latency_is_not_the_culprit() {
        let board = Board::new(3);
        let waits = wait(4, Phase::Rows, 2);
        board.hear_word(Rank(1), Some(waits));
        let timeout = wait(5, Phase::Counts, 1);
        assert_eq!(board.culprit(Rank(0), |_, _| true, timeout), Rank(2));
        assert!(board.is_troubled());
        board.hear_word(Rank(1), None);
        assert_eq!(board.culprit(Rank(0), |_, _| true, timeout), Rank(1), "it goes on");
    }

    /// Ranks 0 and 1 are one node, 2 and 3 the other: rank 0 does not hear rank 3.
    #[test]
    fn a_rank_that_cannot_be_heard_is_not_taken_for_one_that_waits_for_nobody() {
        let hears = |_, peer: Rank| peer != Rank(3);
        let board = Board::new(4);
        board.suspect(Rank(1), wait(5, Phase::Rows, 3));
        board.suspect(Rank(2), wait(4, Phase::Rows, 0));
        assert_eq!(board.culprit(Rank(0), hears, wait(5, Phase::Rows, 2)), Rank(0), "the lane from 0 to 2 lost rows");
        board.suspect(Rank(2), wait(4, Phase::Rows, 3));
        assert_eq!(board.culprit(Rank(0), hears, wait(5, Phase::Rows, 2)), Rank(3), "nobody has heard rank 3");
    }
}
