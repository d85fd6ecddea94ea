//! Barrier, all-gather and broadcast: one at a time, by all members.
//!
//! A collective that fails fails for all, and so does every later one until an agreement: ranks that went on would not
//! know which of the others have seen what.

use std::time::Instant;

use ep_core::{Rank, RankSet};
use serde_bytes::ByteBuf;

use super::Hall;
use crate::verdict::{Mismatch, Verdict};
use crate::wire::{Body, Collective, MAX_MESSAGE, Malformed, Reply};

/// What a message takes beside contributions: at most this much, and this much for each of them.
const OVERHEAD: usize = 16;

/// A rank that has come.
#[derive(Debug)]
struct Contribution {
    collective: Collective,
    bytes: ByteBuf,
    deadline: Instant,
}

/// The collective that is under way.
#[derive(Debug)]
pub(super) struct Round {
    come: Vec<Option<Contribution>>,
    /// Bytes that the answer takes so far.
    bytes: usize,
    broken: Option<Verdict>,
}

impl Round {
    pub(super) fn new(world: usize) -> Self {
        Self { come: (0..world).map(|_| None).collect(), bytes: OVERHEAD * (world + 1), broken: None }
    }

    pub(super) fn first_deadline(&self) -> Option<Instant> {
        self.come.iter().flatten().map(|contribution| contribution.deadline).min()
    }

    /// The first rank that has come, and what it called.
    fn first(&self) -> Option<(Rank, Collective)> {
        let come = self.come.iter().zip(0..);
        come.filter_map(|(contribution, rank)| Some((Rank(rank), contribution.as_ref()?.collective))).next()
    }

    /// Empties the round for the next collective.
    fn take(&mut self) -> Vec<Option<Contribution>> {
        let world = self.come.len();
        std::mem::replace(self, Self::new(world)).come
    }
}

impl Hall {
    pub(super) fn meet(
        &mut self,
        rank: Rank,
        collective: Collective,
        bytes: ByteBuf,
        deadline: Instant,
    ) -> Result<(), Malformed> {
        if self.round.come[rank.index()].is_some() {
            return Err(Malformed::OutOfPlace { what: "a collective before the last one ended" });
        }
        if let Some(verdict) = self.no_round(rank) {
            self.tell(rank, &Body::new(&Reply::NotMet(verdict)));
            return Ok(());
        }
        let first = self.round.first();
        self.round.bytes += bytes.len();
        self.round.come[rank.index()] = Some(Contribution { collective, bytes, deadline });
        match first {
            Some((other, called)) if called != collective => self.break_round(&Verdict::Mismatch(Mismatch {
                field: "collective".to_owned(),
                values: [called.to_string(), collective.to_string()],
                ranks: [other.0, rank.0],
            })),
            _ if self.round.bytes > MAX_MESSAGE => {
                let verdict = Verdict::TooLong { bytes: self.round.bytes as u64, limit: MAX_MESSAGE as u64 };
                self.break_round(&verdict);
            }
            _ => {
                self.round_lost();
                self.conclude_round();
            }
        }
        Ok(())
    }

    /// Why `rank` cannot take part in any collective now.
    fn no_round(&self, rank: Rank) -> Option<Verdict> {
        if self.out.contains(rank) {
            return Some(Verdict::Excluded { rank: rank.0 });
        }
        self.round.broken.clone()
    }

    /// Breaks the round if it waits for somebody who never comes. What a rank left behind counts: it came.
    pub(super) fn round_lost(&mut self) {
        let absent = |&rank: &Rank| self.round.come[rank.index()].is_none();
        let ranks: RankSet = self.members().filter(|&rank| self.gone.contains(rank)).filter(absent).collect();
        if self.round.first().is_some() && !ranks.is_empty() {
            self.break_round(&Verdict::Lost { ranks });
        }
    }

    fn conclude_round(&mut self) {
        let Some((_, collective)) = self.round.first() else { return };
        if self.members().any(|rank| self.round.come[rank.index()].is_none()) {
            return;
        }
        let come = self.round.take();
        let to: Vec<Rank> = self.members().collect();
        let parts = match collective {
            Collective::Barrier => Vec::new(),
            Collective::AllGather => come.into_iter().map(|part| part.map(|part| part.bytes)).collect(),
            Collective::Broadcast { root } => {
                vec![come.into_iter().nth(root as usize).flatten().map(|part| part.bytes)]
            }
        };
        let body = Body::new(&Reply::Met(parts));
        to.into_iter().for_each(|rank| self.tell(rank, &body));
    }

    /// Tells all who have come that it was in vain, and all who come later.
    fn break_round(&mut self, verdict: &Verdict) {
        self.end_round(verdict);
        self.round.broken = Some(verdict.clone());
    }

    fn end_round(&mut self, verdict: &Verdict) {
        let come = self.round.take();
        let body = Body::new(&Reply::NotMet(verdict.clone()));
        for (rank, _) in (0..).map(Rank).zip(come).filter(|(_, contribution)| contribution.is_some()) {
            self.tell(rank, &body);
        }
    }

    /// An agreement was reached: collectives begin anew.
    pub(super) fn renew_round(&mut self) {
        self.end_round(&Verdict::Interrupted);
    }

    pub(super) fn expire_round(&mut self, now: Instant) {
        if self.round.first_deadline().is_none_or(|deadline| deadline > now) {
            return;
        }
        let ranks = self.members().filter(|rank| self.round.come[rank.index()].is_none()).collect();
        self.break_round(&Verdict::Missing { ranks, turned_away: Vec::new() });
    }
}
