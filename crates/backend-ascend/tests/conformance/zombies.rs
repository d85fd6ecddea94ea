//! Ranks that are suspended.

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::task::Poll;

use ep_ascend::twin::Session;
use ep_core::{Rank, RankSet};

/// Ticks within which a rank goes on that the others have given up: some rounds of theirs take as many. Drawn of these.
const LATER: [u64; 3] = [1_000, 40_000, 400_000];

/// Ranks that are suspended with their processes, and go on when the others have given them up, or have nothing left to do.
pub(crate) struct Zombies<'a, F> {
    session: &'a Session,
    /// Whom the others have given up.
    given_up: F,
    /// Ticks within which they go on.
    later: u64,
    /// Ranks whose work has not ended.
    working: Cell<u32>,
    /// Those that will go on.
    awake: RefCell<RankSet>,
}

impl<'a, F: Fn() -> RankSet> Zombies<'a, F> {
    pub(crate) fn new(session: &'a Session, ranks: u32, seed: u64, given_up: F) -> Self {
        let later = LATER[(seed % LATER.len() as u64) as usize];
        Self { session, given_up, later, working: Cell::new(ranks), awake: RefCell::new(RankSet::new()) }
    }

    /// Does a rank's work, but not while the rank is suspended.
    pub(crate) async fn suspend<T>(&self, rank: Rank, work: impl Future<Output = T>) -> T {
        let mut work = Box::pin(work);
        let done = poll_fn(|context| {
            if self.session.is_suspended(rank.0) {
                self.look(rank);
                return Poll::Pending;
            }
            work.as_mut().poll(context)
        });
        let done = done.await;
        self.working.set(self.working.get() - 1);
        done
    }

    /// Whether it is time for a rank that is suspended to go on.
    fn look(&self, rank: Rank) {
        let within = if self.working.get() == 1 {
            0
        } else if !self.awake.borrow().contains(rank) && (self.given_up)().contains(rank) {
            self.later
        } else {
            return;
        };
        self.awake.borrow_mut().insert(rank);
        let goes_on = self.session.befall(|machine| {
            machine.go_on(rank.0, within).and_then(|()| machine.run_until(1, rank.0, u64::MAX).map(drop))
        });
        goes_on.expect("a rank that is suspended");
    }
}
