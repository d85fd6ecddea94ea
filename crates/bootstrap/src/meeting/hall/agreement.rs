//! Agreement on how to go on after a failure: a rendezvous of all ranks that nobody gave up on.

use std::time::Instant;

use ep_core::machine::{Agreement, Assembly, Proposal};
use ep_core::{Error, Rank, RankSet};

use super::Hall;
use crate::wire::{Body, Discord, Malformed, Reply};

/// A rank that has come.
#[derive(Debug)]
struct Arrival {
    call: u32,
    proposal: Proposal,
    deadline: Instant,
}

/// Who has come so far.
#[derive(Debug)]
pub(super) struct Meeting {
    arrivals: Vec<Option<Arrival>>,
    /// Ranks that came and waited in vain, until they come again. They are not whom the others miss.
    gave_up: RankSet,
}

impl Meeting {
    pub(super) fn new(world: usize) -> Self {
        Self { arrivals: (0..world).map(|_| None).collect(), gave_up: RankSet::new() }
    }

    fn present(&self) -> impl Iterator<Item = (Rank, &Arrival)> + Clone {
        let arrivals = self.arrivals.iter().zip(0..);
        arrivals.filter_map(|(arrival, rank)| Some((Rank(rank), arrival.as_ref()?)))
    }

    pub(super) fn first_deadline(&self) -> Option<Instant> {
        self.present().map(|(_, arrival)| arrival.deadline).min()
    }
}

impl Hall {
    pub(super) fn arrive(
        &mut self,
        rank: Rank,
        call: u32,
        proposal: Proposal,
        deadline: Instant,
    ) -> Result<(), Malformed> {
        if proposal.mask.iter().any(|rank| rank.0 >= self.terms.world) {
            return Err(Malformed::OutOfPlace { what: "a mask with ranks that do not exist" });
        }
        if self.meeting.arrivals[rank.index()].is_some() {
            return Err(Malformed::OutOfPlace { what: "a proposal before the last one was answered" });
        }
        if self.out.contains(rank) {
            self.tell(rank, &Body::new(&Reply::NotAgreed { call, why: Discord::Excluded }));
            return Ok(());
        }
        self.meeting.arrivals[rank.index()] = Some(Arrival { call, proposal, deadline });
        self.meeting.gave_up = self.meeting.gave_up.iter().filter(|&other| other != rank).collect();
        self.conclude_meeting();
        Ok(())
    }

    /// A rank no longer waits for the answer to `call`.
    pub(super) fn leave(&mut self, rank: Rank, call: u32) {
        let arrival = &mut self.meeting.arrivals[rank.index()];
        arrival.take_if(|arrival| arrival.call == call);
    }

    /// A rank is gone: it has not come, whatever it said.
    pub(super) fn meeting_lost(&mut self, rank: Rank) {
        self.meeting.arrivals[rank.index()] = None;
        self.conclude_meeting();
    }

    /// Those who are present.
    fn assembly(&self) -> Assembly {
        let come = self.meeting.present().map(|(rank, arrival)| (rank, &arrival.proposal));
        Assembly::new(self.terms.world, &self.out, come)
    }

    /// Answers all when everybody has come, or when only those have not who never will: then nobody is left who could
    /// give up on them.
    fn conclude_meeting(&mut self) {
        let assembly = self.assembly();
        if self.meeting.first_deadline().is_none() || assembly.missing().any(|rank| !self.gone.contains(rank)) {
            return;
        }
        let come = self.meeting.arrivals.iter_mut().map(Option::take).zip(0..);
        let come: Vec<(Rank, Arrival)> = come.filter_map(|(arrival, rank)| Some((Rank(rank), arrival?))).collect();
        if let Some(Rank(rank)) = assembly.missing().next() {
            self.disagree(&come, &Discord::Gone { rank });
            return;
        }
        let answers: Vec<_> = come.iter().map(|(rank, _)| assembly.answer(*rank)).collect();
        if answers.iter().any(|answer| matches!(answer, Err(Error::Unsupported { .. }))) {
            self.disagree(&come, &Discord::NoMoreGenerations);
            return;
        }
        self.out = assembly.mask().clone();
        self.meeting.gave_up = RankSet::new();
        for ((rank, arrival), answer) in come.iter().zip(&answers) {
            if answer.is_err() {
                let why = Discord::Excluded;
                self.tell(*rank, &Body::new(&Reply::NotAgreed { call: arrival.call, why }));
            }
        }
        self.renew_round();
        for ((rank, arrival), answer) in come.iter().zip(answers) {
            if let Ok(Agreement { mask, generation, op }) = answer {
                self.tell(*rank, &Body::new(&Reply::Agreed { call: arrival.call, mask, generation, op }));
            }
        }
    }

    fn disagree(&mut self, with: &[(Rank, Arrival)], why: &Discord) {
        for (rank, arrival) in with {
            self.tell(*rank, &Body::new(&Reply::NotAgreed { call: arrival.call, why: why.clone() }));
        }
    }

    /// Those whose deadline has passed are told who did not come.
    pub(super) fn expire_meeting(&mut self, now: Instant) {
        if self.meeting.first_deadline().is_none_or(|deadline| deadline > now) {
            return;
        }
        let assembly = self.assembly();
        let never_came = assembly.missing().find(|&rank| !self.meeting.gave_up.contains(rank));
        let missing = never_came.or_else(|| assembly.missing().next());
        for rank in (0..self.terms.world).map(Rank) {
            let arrival = &mut self.meeting.arrivals[rank.index()];
            if let Some(arrival) = arrival.take_if(|arrival| arrival.deadline <= now) {
                self.meeting.gave_up.insert(rank);
                let why = Discord::Missing { rank: missing.unwrap_or(rank).0 };
                self.tell(rank, &Body::new(&Reply::NotAgreed { call: arrival.call, why }));
            }
        }
    }
}
