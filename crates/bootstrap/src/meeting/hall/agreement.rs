//! Agreement on how to go on after a failure: a rendezvous of all ranks that nobody gave up on.

use std::time::Instant;

use ep_core::machine::Proposal;
use ep_core::{Rank, RankSet};

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

    fn present(&self) -> impl Iterator<Item = (Rank, &Arrival)> {
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

    /// All ranks that those who are present gave up on.
    fn mask(&self) -> RankSet {
        let mut mask = self.out.clone();
        self.meeting.present().for_each(|(_, arrival)| mask.extend(&arrival.proposal.mask));
        mask
    }

    /// The ranks that have to come and have not.
    fn absent<'a>(&'a self, mask: &'a RankSet) -> impl Iterator<Item = Rank> + 'a {
        let come = |rank: Rank| self.meeting.arrivals[rank.index()].is_some();
        (0..self.terms.world).map(Rank).filter(move |&rank| !mask.contains(rank) && !come(rank))
    }

    /// Answers all when everybody has come, or when only those have not who never will: then nobody is left who could
    /// give up on them.
    fn conclude_meeting(&mut self) {
        let mask = self.mask();
        if self.meeting.first_deadline().is_none() || self.absent(&mask).any(|rank| !self.gone.contains(rank)) {
            return;
        }
        let gone = self.absent(&mask).next();
        let come = self.meeting.arrivals.iter_mut().map(Option::take).zip(0..);
        let come: Vec<(Rank, Arrival)> = come.filter_map(|(arrival, rank)| Some((Rank(rank), arrival?))).collect();
        if let Some(Rank(rank)) = gone {
            self.disagree(&come, &Discord::Gone { rank });
            return;
        }
        let (excluded, members): (Vec<_>, Vec<_>) = come.into_iter().partition(|(rank, _)| mask.contains(*rank));
        let generation = members.iter().map(|(_, arrival)| arrival.proposal.generation).max().unwrap_or(0);
        let op = members.iter().map(|(_, arrival)| arrival.proposal.op).max().unwrap_or(0);
        let Some(generation) = generation.checked_add(1) else {
            self.disagree(&members, &Discord::NoMoreGenerations);
            self.disagree(&excluded, &Discord::NoMoreGenerations);
            return;
        };
        self.disagree(&excluded, &Discord::Excluded);
        self.out = mask.clone();
        self.meeting.gave_up = RankSet::new();
        self.renew_round();
        for (rank, arrival) in members {
            let reply = Reply::Agreed { call: arrival.call, mask: mask.clone(), generation, op };
            self.tell(rank, &Body::new(&reply));
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
        let mask = self.mask();
        let never_came = self.absent(&mask).find(|&rank| !self.meeting.gave_up.contains(rank));
        let missing = never_came.or_else(|| self.absent(&mask).next());
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
