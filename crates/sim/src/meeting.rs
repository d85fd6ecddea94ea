//! The control plane: a rendezvous of all ranks that nobody gave up on.

use std::task::{Context, Poll, Waker};

use ep_core::machine::{Agreement, Assembly, Proposal};
use ep_core::port::{LaneId, LaneKind};
use ep_core::{Error, Failure, Fault, Nanos, Phase, Rank, RankSet};

use crate::violation::{Awaited, Waiting};
use crate::wakers::keep_waker;

/// A rank that has come, and what it is told in the end.
#[derive(Debug)]
struct Arrival {
    proposal: Proposal,
    deadline: Nanos,
    since: Nanos,
    waker: Option<Waker>,
    answer: Option<Result<Agreement, Error>>,
}

/// Who has come so far.
#[derive(Debug)]
pub(crate) struct Meeting {
    arrivals: Vec<Option<Arrival>>,
    /// Ranks that an agreement went on without.
    out: RankSet,
}

impl Meeting {
    pub(crate) fn new(ranks: u32) -> Self {
        Self { arrivals: (0..ranks).map(|_| None).collect(), out: RankSet::new() }
    }

    /// Ranks that have come and have no answer yet.
    fn present(&self) -> impl Iterator<Item = (Rank, &Arrival)> + Clone {
        let ranks = self.arrivals.iter().zip(0..).filter_map(|(arrival, rank)| Some((Rank(rank), arrival.as_ref()?)));
        ranks.filter(|(_, arrival)| arrival.answer.is_none())
    }

    /// Those who are present.
    fn assembly(&self) -> Assembly {
        let come = self.present().map(|(rank, arrival)| (rank, &arrival.proposal));
        Assembly::new(self.arrivals.len() as u32, &self.out, come)
    }

    fn answer(&mut self, rank: Rank, answer: Result<Agreement, Error>) {
        if let Some(arrival) = &mut self.arrivals[rank.index()] {
            arrival.answer = Some(answer);
            arrival.waker.iter().for_each(Waker::wake_by_ref);
        }
    }

    /// The first deadline of a rank that waits here.
    pub(crate) fn first_deadline(&self) -> Option<Nanos> {
        self.present().map(|(_, arrival)| arrival.deadline).min()
    }

    /// Those who wait here, for a report.
    pub(crate) fn waiting(&self) -> impl Iterator<Item = Waiting> + '_ {
        self.present().map(|(rank, arrival)| Waiting {
            rank,
            role: None,
            op: arrival.proposal.op,
            awaits: vec![Awaited::Agreement],
        })
    }

    /// A rank comes to agree with the others. Returns the members, when it was the last to come.
    pub(crate) fn arrive(
        &mut self,
        rank: Rank,
        proposal: Proposal,
        deadline: Nanos,
        since: Nanos,
    ) -> Option<Vec<Rank>> {
        let answer = self.out.contains(rank).then_some(Err(Error::Excluded { rank }));
        self.arrivals[rank.index()] = Some(Arrival { proposal, deadline, since, waker: None, answer });
        self.conclude()
    }

    /// The answer to a rank that came.
    pub(crate) fn poll_answer(&mut self, rank: Rank, context: &Context<'_>) -> Poll<Result<Agreement, Error>> {
        let Some(arrival) = &mut self.arrivals[rank.index()] else { return Poll::Pending };
        match arrival.answer.take() {
            Some(answer) => {
                self.arrivals[rank.index()] = None;
                Poll::Ready(answer)
            }
            None => {
                keep_waker(&mut arrival.waker, context);
                Poll::Pending
            }
        }
    }

    /// Takes all answers to ranks that came.
    pub(crate) fn answers(&mut self) -> Vec<(Rank, Result<Agreement, Error>)> {
        let answered = |(arrival, rank): (&mut Option<Arrival>, u32)| {
            let answer = arrival.as_mut()?.answer.take()?;
            *arrival = None;
            Some((Rank(rank), answer))
        };
        self.arrivals.iter_mut().zip(0..).filter_map(answered).collect()
    }

    /// A rank stops waiting for an answer.
    pub(crate) fn leave(&mut self, rank: Rank) {
        self.arrivals[rank.index()] = None;
    }

    /// Those whose deadline has passed are told who did not come.
    pub(crate) fn expire(&mut self, now: Nanos) {
        let late = |(rank, arrival): (Rank, &Arrival)| (arrival.deadline <= now).then_some(rank);
        let expired: Vec<Rank> = self.present().filter_map(late).collect();
        let missing = self.assembly().missing().next();
        for rank in expired {
            let Some(arrival) = &self.arrivals[rank.index()] else { continue };
            let peer = missing.unwrap_or(rank);
            let lane = LaneId { peer, kind: LaneKind::Control };
            let waited = now - arrival.since;
            let fault = Fault::Timeout { phase: Phase::Recovery, peer, lane, seen: 0, awaited: 1, waited };
            let failure = Failure { op: arrival.proposal.op, culprit: peer, reporter: rank, fault };
            self.answer(rank, Err(Error::Failed(failure)));
        }
    }

    /// Answers all when everybody has come, and says who the members are.
    fn conclude(&mut self) -> Option<Vec<Rank>> {
        let assembly = self.assembly();
        let come: Vec<Rank> = self.present().map(|(rank, _)| rank).collect();
        if come.is_empty() || assembly.missing().next().is_some() {
            return None;
        }
        self.out = assembly.mask().clone();
        for rank in come {
            self.answer(rank, assembly.answer(rank));
        }
        Some(assembly.members().collect())
    }
}
