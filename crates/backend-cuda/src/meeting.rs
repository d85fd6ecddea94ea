//! How the ranks of one process agree on how to go on after a failure.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use ep_core::machine::{Agreement, Proposal};
use ep_core::port::{LaneId, LaneKind};
use ep_core::{Error, Failure, Fault, Nanos, Phase, Rank, RankSet};

/// A rendezvous of all ranks that nobody gave up on.
#[derive(Debug)]
pub(crate) struct Meeting {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// What those proposed who have come and have no answer yet.
    proposals: Vec<Option<Proposal>>,
    answers: Vec<Option<Result<Agreement, Error>>>,
    /// Ranks that an agreement went on without.
    out: RankSet,
}

impl Meeting {
    pub(crate) fn new(ranks: u32) -> Self {
        let ranks = ranks as usize;
        let state = State { proposals: vec![None; ranks], answers: vec![None; ranks], out: RankSet::new() };
        Self { state: Mutex::new(state) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Meets the others, at most for `allowed`.
    pub(crate) async fn agree(&self, me: Rank, proposal: Proposal, allowed: Nanos) -> Result<Agreement, Error> {
        let began = Instant::now();
        self.state().arrive(me, proposal);
        super::endpoint::poll::until(|| {
            let mut state = self.state();
            if let Some(answer) = state.answers[me.index()].take() {
                return Some(answer);
            }
            let waited = Nanos(began.elapsed().as_nanos() as u64);
            if waited < allowed {
                return None;
            }
            // With the first whose time is up all learn who is missing: who has left would seem to be missing, too.
            let missing = state.missing().unwrap_or(me);
            state.give_up(missing, waited);
            state.answers[me.index()].take()
        })
        .await
    }
}

impl State {
    fn mask(&self) -> RankSet {
        let mut mask = self.out.clone();
        self.proposals.iter().flatten().for_each(|proposal| mask.extend(&proposal.mask));
        mask
    }

    /// The first rank that has to come and has not.
    fn missing(&self) -> Option<Rank> {
        let mask = self.mask();
        let come = |rank: &Rank| self.proposals[rank.index()].is_some();
        (0..self.proposals.len() as u32).map(Rank).find(|rank| !mask.contains(*rank) && !come(rank))
    }

    fn arrive(&mut self, me: Rank, proposal: Proposal) {
        self.answers[me.index()] = None;
        if self.out.contains(me) {
            self.answers[me.index()] = Some(Err(Error::Excluded { rank: me }));
            return;
        }
        self.proposals[me.index()] = Some(proposal);
        if self.missing().is_none() {
            self.conclude();
        }
    }

    /// Answers all who have come that `peer` has not.
    fn give_up(&mut self, peer: Rank, waited: Nanos) {
        for (at, proposal) in self.proposals.iter_mut().enumerate() {
            let Some(proposal) = proposal.take() else { continue };
            let lane = LaneId { peer, kind: LaneKind::Control };
            let fault = Fault::Timeout { phase: Phase::Recovery, peer, lane, seen: 0, awaited: 1, waited };
            let failure = Failure { op: proposal.op, culprit: peer, reporter: Rank(at as u32), fault };
            self.answers[at] = Some(Err(Error::Failed(failure)));
        }
    }

    /// Everybody has come: answers all.
    fn conclude(&mut self) {
        let mask = self.mask();
        let takes_part = |at: &usize| !mask.contains(Rank(*at as u32));
        let members: Vec<usize> =
            (0..self.proposals.len()).filter(|at| self.proposals[*at].is_some() && takes_part(at)).collect();
        let (generation, op) = members
            .iter()
            .filter_map(|at| self.proposals[*at].as_ref())
            .fold((0, 0), |(generation, op), proposal| (proposal.generation.max(generation), proposal.op.max(op)));
        for (at, proposal) in self.proposals.iter_mut().enumerate() {
            if proposal.take().is_some() {
                let excluded = Err(Error::Excluded { rank: Rank(at as u32) });
                let agreed = || Ok(Agreement { mask: mask.clone(), generation: generation + 1, op });
                self.answers[at] = Some(if members.contains(&at) { agreed() } else { excluded });
            }
        }
        self.out = mask;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn proposal(mask: &[u32], op: u64) -> Proposal {
        Proposal { mask: mask.iter().map(|&rank| Rank(rank)).collect(), generation: 1, op }
    }

    fn meet(proposals: &[(u32, Proposal)], ranks: u32, allowed: Nanos) -> Vec<Result<Agreement, Error>> {
        let meeting = Meeting::new(ranks);
        std::thread::scope(|scope| {
            let threads: Vec<_> = proposals
                .iter()
                .map(|(rank, proposal)| {
                    let meeting = &meeting;
                    scope.spawn(move || {
                        crate::endpoint::poll::finish(meeting.agree(Rank(*rank), proposal.clone(), allowed))
                    })
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
        let answers = meet(&[(0, proposal(&[], 1)), (1, proposal(&[], 1))], 3, Nanos::from_millis(30));
        for answer in answers {
            let Err(Error::Failed(failure)) = answer else { panic!("{answer:?}") };
            assert_eq!(failure.culprit, Rank(2));
        }
    }

    #[test]
    fn who_was_given_up_is_told() {
        let answers = meet(&[(0, proposal(&[1], 1)), (1, proposal(&[], 1))], 2, Nanos::from_millis(200));
        assert!(answers[0].is_ok());
        assert!(matches!(answers[1], Err(Error::Excluded { rank: Rank(1) })));
    }
}
