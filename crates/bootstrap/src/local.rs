//! Agreement among the ranks of one process.

use std::future::poll_fn;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::Poll;
use std::thread;
use std::time::Instant;

use ep_core::machine::{Agreement, Assembly, Proposal};
use ep_core::port::{LaneId, LaneKind};
use ep_core::{Error, Failure, Fault, Nanos, Phase, Rank, RankSet};

/// How ranks that are threads of one process agree on how to go on after a failure: a rendezvous of all ranks that nobody
/// gave up on, with the rules of a [`Member`](crate::Member)'s agreement and without its meeting place.
///
/// ```
/// use ep_bootstrap::LocalMeeting;
/// use ep_core::machine::Proposal;
/// use ep_core::{Nanos, Rank};
///
/// let meeting = LocalMeeting::new(3);
/// let without_2 = Proposal { mask: [Rank(2)].into_iter().collect(), generation: 1, op: 7 };
/// let agreed = std::thread::scope(|scope| {
///     let threads = [0, 1].map(|rank| {
///         let (meeting, proposal) = (&meeting, without_2.clone());
///         scope.spawn(move || {
///             futures_executor::block_on(meeting.agree(Rank(rank), proposal, Nanos::from_secs(10)))
///         })
///     });
///     threads.map(|thread| thread.join().expect("it ends with an answer"))
/// });
/// assert!(agreed.iter().all(|agreed| agreed.as_ref().is_ok_and(|agreed| agreed.generation == 2)));
/// ```
#[derive(Debug)]
pub struct LocalMeeting {
    state: Mutex<State>,
    /// In nanoseconds.
    clock: fn() -> u64,
}

/// Nanoseconds since this was asked first.
fn elapsed() -> u64 {
    static BEGAN: OnceLock<Instant> = OnceLock::new();
    BEGAN.get_or_init(Instant::now).elapsed().as_nanos() as u64
}

#[derive(Debug)]
struct State {
    /// What those proposed who have come and have no answer yet.
    proposals: Vec<Option<Proposal>>,
    answers: Vec<Option<Result<Agreement, Error>>>,
    /// Ranks that an agreement went on without.
    out: RankSet,
    /// Ranks that will not come any more.
    gone: RankSet,
    /// Agreements that were reached.
    agreements: u32,
    /// Which of them was the last for each rank; 0 before the first.
    last: Vec<u32>,
}

/// Takes a rank out of the meeting when its future is dropped.
struct Attendance<'a>(&'a LocalMeeting, Rank);

impl Drop for Attendance<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.proposals[self.1.index()] = None;
        state.answers[self.1.index()] = None;
    }
}

impl LocalMeeting {
    /// A meeting of `ranks` ranks.
    pub fn new(ranks: u32) -> Self {
        Self::by_clock(ranks, elapsed)
    }

    /// The same where time is what `clock` says, in nanoseconds.
    pub fn by_clock(ranks: u32, clock: fn() -> u64) -> Self {
        let ranks = ranks as usize;
        let (out, gone) = (RankSet::new(), RankSet::new());
        let (proposals, answers, last) = (vec![None; ranks], vec![None; ranks], vec![0; ranks]);
        let state = State { proposals, answers, out, gone, agreements: 0, last };
        Self { state: Mutex::new(state), clock }
    }

    /// Ranks that an agreement has gone on without.
    pub fn given_up(&self) -> RankSet {
        self.state().out.clone()
    }

    /// The number of the last agreement that rank `me` took part in, from 1 on: the same on all that took part. 0 before the first.
    ///
    /// A recovery that fails behind its agreement leaves the generation as it was: this number tells its attempts apart. A rank whose future was
    /// dropped before it heard of an agreement took part in it.
    ///
    /// # Panics
    /// When there is no rank `me`.
    pub fn last_agreement(&self, me: Rank) -> u32 {
        self.state().last[me.index()]
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Meets the others, at most for `allowed`. Asks again and again for the answer: the thread should let others run in
    /// between.
    ///
    /// # Errors
    /// [`Error::Excluded`] when another gave up on this rank; [`Error::Failed`] with [`Fault::Timeout`] when a rank has not
    /// come by the first deadline of any, with [`Fault::PeerGone`] when all that have not come have left.
    ///
    /// # Panics
    /// When there is no rank `me`.
    pub async fn agree(&self, me: Rank, proposal: Proposal, allowed: Nanos) -> Result<Agreement, Error> {
        let began = (self.clock)();
        self.state().arrive(me, proposal);
        let _attendance = Attendance(self, me);
        poll_fn(|context| {
            let waited = Nanos((self.clock)().saturating_sub(began));
            let mut state = self.state();
            if state.answers[me.index()].is_none() && waited >= allowed {
                // With the first whose time is up all learn who is missing: who has left would seem to be missing, too.
                let missing = state.assembly().missing().next().unwrap_or(me);
                let lane = LaneId { peer: missing, kind: LaneKind::Control };
                let phase = Phase::Recovery;
                state.give_up(Fault::Timeout { phase, peer: missing, lane, seen: 0, awaited: 1, waited }, missing);
            }
            match state.answers[me.index()].take() {
                Some(answer) => Poll::Ready(answer),
                None => {
                    context.waker().wake_by_ref();
                    Poll::Pending
                }
            }
        })
        .await
    }

    /// `rank` will not come any more: its thread has ended. Who waits for nobody else is told at once.
    ///
    /// # Panics
    /// When there is no such rank.
    pub fn leave(&self, rank: Rank) {
        let mut state = self.state();
        state.proposals[rank.index()] = None;
        state.gone.insert(rank);
        state.settle();
    }
}

impl State {
    /// Those who have come and have no answer yet.
    fn assembly(&self) -> Assembly {
        let come = self.proposals.iter().zip(0..).filter_map(|(one, rank)| Some((Rank(rank), one.as_ref()?)));
        Assembly::new(self.proposals.len() as u32, &self.out, come)
    }

    /// Answers all when everybody has come, or when only those have not who never will: then nobody is left who could give
    /// up on them.
    fn settle(&mut self) {
        let assembly = self.assembly();
        match assembly.missing().next() {
            None => self.conclude(&assembly),
            Some(peer) if assembly.missing().all(|rank| self.gone.contains(rank)) => {
                self.give_up(Fault::PeerGone { peer, phase: Phase::Recovery }, peer);
            }
            Some(_) => {}
        }
    }

    fn arrive(&mut self, me: Rank, proposal: Proposal) {
        self.answers[me.index()] = None;
        if self.out.contains(me) {
            self.answers[me.index()] = Some(Err(Error::Excluded { rank: me }));
            return;
        }
        self.proposals[me.index()] = Some(proposal);
        self.settle();
    }

    /// Answers all who have come with `fault`, which `culprit` is to blame for.
    fn give_up(&mut self, fault: Fault, culprit: Rank) {
        for (at, proposal) in self.proposals.iter_mut().enumerate() {
            let Some(proposal) = proposal.take() else { continue };
            let failure = Failure { op: proposal.op, culprit, reporter: Rank(at as u32), fault };
            self.answers[at] = Some(Err(Error::Failed(failure)));
        }
    }

    /// Everybody has come: answers all.
    fn conclude(&mut self, assembly: &Assembly) {
        self.agreements += 1;
        for (rank, proposal) in (0..).map(Rank).zip(&mut self.proposals) {
            if proposal.take().is_some() {
                self.last[rank.index()] = self.agreements;
                self.answers[rank.index()] = Some(assembly.answer(rank));
            }
        }
        self.out = assembly.mask().clone();
    }
}

/// What the threads of ranks returned, ranks ascending.
///
/// # Errors
/// [`Error::Broken`] naming the ranks whose threads panicked.
pub fn joined<T>(ended: impl IntoIterator<Item = thread::Result<T>>) -> Result<Vec<T>, Error> {
    let (mut values, mut panicked) = (Vec::new(), Vec::new());
    for (rank, ended) in (0..).map(Rank).zip(ended) {
        match ended {
            Ok(value) => values.push(value),
            Err(_) => panicked.push(rank),
        }
    }
    if panicked.is_empty() {
        return Ok(values);
    }
    let names: Vec<_> = panicked.iter().map(Rank::to_string).collect();
    let what = format_args!("the code of rank {}", names.join(", "));
    Err(Error::broken(what, "its thread panicked", "the panic's message, on stderr, says why"))
}

#[cfg(test)]
mod tests {
    use futures_executor::block_on;

    use super::*;

    fn proposal(mask: &[u32], op: u64) -> Proposal {
        Proposal { mask: mask.iter().map(|&rank| Rank(rank)).collect(), generation: 1, op }
    }

    fn meet(proposals: &[(u32, Proposal)], ranks: u32, allowed: Nanos) -> Vec<Result<Agreement, Error>> {
        meet_in(&LocalMeeting::new(ranks), proposals, allowed)
    }

    fn meet_in(meeting: &LocalMeeting, proposals: &[(u32, Proposal)], allowed: Nanos) -> Vec<Result<Agreement, Error>> {
        thread::scope(|scope| {
            let threads: Vec<_> = proposals
                .iter()
                .map(|(rank, proposal)| {
                    scope.spawn(move || block_on(meeting.agree(Rank(*rank), proposal.clone(), allowed)))
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn survivors_agree_on_the_union_and_the_highest() {
        let answers = meet(&[(0, proposal(&[2], 7)), (1, proposal(&[], 9))], 3, Nanos::from_secs(10));
        for answer in answers {
            let Agreement { mask, generation, op } = answer.unwrap();
            assert_eq!((mask.iter().collect::<Vec<_>>(), generation, op), (vec![Rank(2)], 2, 9));
        }
    }

    #[test]
    fn who_does_not_come_is_named() {
        // Rank 0 has come before rank 1's time begins, however slow the machine is.
        let meeting = LocalMeeting::new(3);
        let mut first = Box::pin(meeting.agree(Rank(0), proposal(&[], 1), Nanos::from_secs(600)));
        assert!(poll_once(&mut first).is_pending());
        let second = block_on(meeting.agree(Rank(1), proposal(&[], 1), Nanos::from_millis(30)));
        for answer in [block_on(first), second] {
            let Err(Error::Failed(failure)) = answer else { panic!("{answer:?}") };
            assert_eq!(failure.culprit, Rank(2));
        }
    }

    #[test]
    fn who_was_given_up_is_told() {
        let answers = meet(&[(0, proposal(&[1], 1)), (1, proposal(&[], 1))], 2, Nanos::from_secs(60));
        assert!(answers[0].is_ok());
        assert!(matches!(answers[1], Err(Error::Excluded { rank: Rank(1) })));
    }

    #[test]
    fn who_left_is_named_at_once_and_can_be_given_up() {
        let meeting = LocalMeeting::new(3);
        meeting.leave(Rank(2));
        for answer in meet_in(&meeting, &[(0, proposal(&[], 1)), (1, proposal(&[], 1))], Nanos::from_secs(60)) {
            let Err(Error::Failed(failure)) = answer else { panic!("{answer:?}") };
            assert_eq!(failure.fault, Fault::PeerGone { peer: Rank(2), phase: Phase::Recovery });
        }
        let answers = meet_in(&meeting, &[(0, proposal(&[2], 1)), (1, proposal(&[], 1))], Nanos::from_secs(60));
        assert!(answers.iter().all(Result::is_ok), "{answers:?}");
    }

    #[test]
    fn who_stops_waiting_has_not_come() {
        let meeting = LocalMeeting::new(2);
        let mut dropped = Box::pin(meeting.agree(Rank(0), proposal(&[], 1), Nanos::from_secs(60)));
        assert!(poll_once(&mut dropped).is_pending());
        drop(dropped);
        let answers = meet_in(&meeting, &[(1, proposal(&[], 1))], Nanos::from_millis(30));
        assert_eq!(answers[0].as_ref().unwrap_err().failure().map(|failure| failure.culprit), Some(Rank(0)));
    }

    #[test]
    fn ranks_know_which_agreement_they_took_part_in_last() {
        let meeting = LocalMeeting::new(3);
        let number = |rank| meeting.last_agreement(Rank(rank));
        assert_eq!([0, 1, 2].map(number), [0; 3]);
        // Rank 0's future is dropped when all have agreed and it has not heard of it.
        let mut unheard = Box::pin(meeting.agree(Rank(0), proposal(&[], 1), Nanos::from_secs(60)));
        assert!(poll_once(&mut unheard).is_pending());
        let others = [(1, proposal(&[], 1)), (2, proposal(&[], 1))];
        assert!(meet_in(&meeting, &others, Nanos::from_secs(60)).iter().all(Result::is_ok));
        drop(unheard);
        assert_eq!([0, 1, 2].map(number), [1; 3]);
        // Nobody has agreed when somebody is missing.
        assert!(block_on(meeting.agree(Rank(1), proposal(&[], 1), Nanos(0))).is_err());
        assert_eq!(number(1), 1);
        let without_2 = [(0, proposal(&[2], 1)), (1, proposal(&[], 1))];
        assert!(meet_in(&meeting, &without_2, Nanos::from_secs(60)).iter().all(Result::is_ok));
        assert_eq!([0, 1, 2].map(number), [2, 2, 1]);
    }

    fn poll_once<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
        std::pin::Pin::new(future).poll(&mut std::task::Context::from_waker(std::task::Waker::noop()))
    }

    #[test]
    fn ranks_that_panicked_are_named() {
        let ended = |panics: &[usize]| {
            let threads = [0, 1, 2].map(|rank| {
                let panics = panics.contains(&rank);
                thread::spawn(move || if panics { std::panic::resume_unwind(Box::new(())) } else { rank })
            });
            joined(threads.map(thread::JoinHandle::join)).map_err(|error| error.to_string())
        };
        assert_eq!(ended(&[]), Ok(vec![0, 1, 2]));
        let said = "the code of rank 0, 2 failed: its thread panicked; the panic's message, on stderr, says why";
        assert_eq!(ended(&[0, 2]), Err(said.to_owned()));
    }
}
