//! What the meeting place knows and decides: who has come, what they called, who is gone. No socket, no clock.
//!
//! Guests are connections whose other side holds the secret; a guest that joined sits on the seat of its rank. All
//! seats taken, the meeting is open: members call collectives, one at a time, and agreements.

mod agreement;
mod collective;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::time::{Duration, Instant};

use ep_core::{Rank, RankSet};

use self::agreement::Meeting;
use self::collective::Round;
use crate::identity::Identity;
use crate::program::Program;
use crate::verdict::{Mismatch, Verdict};
use crate::wire::{Body, Malformed, Reply, Request};

/// The longest that anybody may wait. Keeps arithmetic on clocks from overflowing.
const LONGEST: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// How many reasons for turning a connection away are remembered, to be told where somebody is missing.
const REMEMBERED: usize = 8;

/// One connection, for as long as the meeting place lives.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(super) struct Guest(pub(super) usize);

/// What is to be done for a guest.
#[derive(Clone, Debug)]
pub(super) enum Action {
    /// Send this.
    Tell(Guest, Body),
    /// Close, once everything is sent.
    Dismiss(Guest),
}

/// What is demanded of all: what rank 0 says, or where no rank holds the place, who joins first.
#[derive(Clone, Debug)]
pub(super) struct Terms {
    /// Whose identity it is, once that is known.
    pub(super) said_by: Option<u32>,
    pub(super) world: u32,
    pub(super) program: Program,
    pub(super) identity: Identity,
}

#[derive(Debug)]
enum Stage {
    /// Ranks are still joining.
    Gathering,
    /// All have joined.
    Open,
    /// They never will.
    Failed(Verdict),
}

/// A rank that has joined.
#[derive(Clone, Copy, Debug)]
struct Seat {
    guest: Guest,
    /// Until when it waits for the others to join.
    deadline: Instant,
}

/// The state of a meeting.
#[derive(Debug)]
pub(super) struct Hall {
    terms: Terms,
    stage: Stage,
    seats: Vec<Option<Seat>>,
    ranks: HashMap<Guest, Rank>,
    /// Ranks whose connection closed.
    gone: RankSet,
    /// Ranks that an agreement went on without.
    out: RankSet,
    round: Round,
    meeting: Meeting,
    turned_away: Vec<String>,
    /// Processes that were told why they cannot join, since the meeting failed.
    refused: usize,
    actions: Vec<Action>,
}

impl Hall {
    pub(super) fn new(terms: Terms) -> Self {
        let world = terms.world as usize;
        Self {
            terms,
            stage: Stage::Gathering,
            seats: vec![None; world],
            ranks: HashMap::new(),
            gone: RankSet::new(),
            out: RankSet::new(),
            round: Round::new(world),
            meeting: Meeting::new(world),
            turned_away: Vec::new(),
            refused: 0,
            actions: Vec::new(),
        }
    }

    /// What has to be done now.
    pub(super) fn actions(&mut self) -> Vec<Action> {
        std::mem::take(&mut self.actions)
    }

    /// Whether `guest` has joined.
    pub(super) fn is_member(&self, guest: Guest) -> bool {
        self.ranks.contains_key(&guest)
    }

    /// A guest asks for something.
    pub(super) fn hear(&mut self, guest: Guest, request: Request, now: Instant) -> Result<(), Malformed> {
        let until = |within: u64| now + Duration::from_nanos(within).min(LONGEST);
        let rank = self.ranks.get(&guest).copied();
        match (request, rank) {
            (Request::Join { rank, world, program, identity, within }, None) => {
                let said = Terms { said_by: Some(rank), world, program, identity };
                self.join(guest, rank, said, until(within));
                Ok(())
            }
            (Request::Join { .. }, Some(_)) => Err(Malformed::OutOfPlace { what: "a second join" }),
            (_, None) => Err(Malformed::OutOfPlace { what: "a request before join" }),
            (_, Some(_)) if !matches!(self.stage, Stage::Open) => {
                Err(Malformed::OutOfPlace { what: "a request before all have joined" })
            }
            (Request::Meet { collective, bytes, within }, Some(rank)) => {
                self.meet(rank, collective, bytes, until(within))
            }
            (Request::Agree { call, mask, generation, op, within }, Some(rank)) => {
                let proposal = ep_core::machine::Proposal { mask, generation, op };
                self.arrive(rank, call, proposal, until(within))
            }
            (Request::Leave { call }, Some(rank)) => {
                self.leave(rank, call);
                Ok(())
            }
        }
    }

    fn join(&mut self, guest: Guest, rank: u32, said: Terms, deadline: Instant) {
        if let Some(verdict) = self.objection(rank, &said) {
            // Two ranks that differ can never meet, so all who wait are told. Only one of two processes that claim the
            // same rank is wrong, and the other may yet meet everybody.
            if matches!(verdict, Verdict::Mismatch(_)) {
                self.fail(&verdict);
            } else {
                self.turned_away(verdict.to_string());
            }
            self.refuse(guest, &verdict);
            return;
        }
        if self.terms.said_by.is_none() {
            self.terms = said;
        }
        self.seats[rank as usize] = Some(Seat { guest, deadline });
        self.ranks.insert(guest, Rank(rank));
        if self.seats.iter().all(Option::is_some) {
            self.stage = Stage::Open;
            self.tell_all(&Reply::Joined);
        }
    }

    /// Why a process cannot join as `rank`.
    fn objection(&self, rank: u32, said: &Terms) -> Option<Verdict> {
        if let Stage::Failed(verdict) = &self.stage {
            return Some(verdict.clone());
        }
        let mine = &self.terms;
        let differs = |field: &str, values: [String; 2]| {
            let field = field.to_owned();
            Some(Verdict::Mismatch(Mismatch { field, values, ranks: [mine.said_by.unwrap_or(0), rank] }))
        };
        // A launcher that holds the place may be of another build than the ranks: they are compared with the first of them.
        if mine.said_by.is_some()
            && let Some((field, values)) = mine.program.differs(&said.program)
        {
            return differs(field, values);
        }
        if mine.world != said.world {
            return differs("world size", [mine.world.to_string(), said.world.to_string()]);
        }
        if rank >= mine.world {
            return Some(Verdict::OutOfRange { rank, world: mine.world });
        }
        if self.seats[rank as usize].is_some() || self.gone.contains(Rank(rank)) {
            return Some(Verdict::Duplicate { rank });
        }
        let first = mine.said_by?;
        mine.identity.differs(first, &said.identity, rank).map(Verdict::Mismatch)
    }

    /// Whether ranks that differ have ended the meeting, and not every process of it has come to hear that yet.
    pub(super) fn owes_verdict(&self) -> bool {
        matches!(self.stage, Stage::Failed(Verdict::Mismatch(_))) && self.refused < self.seats.len()
    }

    fn refuse(&mut self, guest: Guest, verdict: &Verdict) {
        self.refused += usize::from(matches!(self.stage, Stage::Failed(_)));
        self.actions.push(Action::Tell(guest, Body::new(&Reply::NotJoined(verdict.clone()))));
        self.actions.push(Action::Dismiss(guest));
    }

    /// The ranks will never all have joined. Does nothing once they have.
    fn fail(&mut self, verdict: &Verdict) {
        if !matches!(self.stage, Stage::Gathering) {
            return;
        }
        self.stage = Stage::Failed(verdict.clone());
        let guests: Vec<Guest> = self.seats.iter_mut().filter_map(Option::take).map(|seat| seat.guest).collect();
        for guest in guests {
            self.refuse(guest, verdict);
        }
    }

    /// A connection did not become a member. Told to those who wait for members, for it may have been one.
    pub(super) fn turned_away(&mut self, why: String) {
        if matches!(self.stage, Stage::Gathering) && !self.turned_away.contains(&why) {
            if self.turned_away.len() == REMEMBERED {
                self.turned_away.remove(0);
            }
            self.turned_away.push(why);
        }
    }

    /// A connection closed.
    pub(super) fn gone(&mut self, guest: Guest) {
        let Some(rank) = self.ranks.remove(&guest) else { return };
        self.seats[rank.index()] = None;
        self.gone.insert(rank);
        let ranks: RankSet = [rank].into_iter().collect();
        self.fail(&Verdict::Lost { ranks });
        if matches!(self.stage, Stage::Open) {
            self.tell_all(&Reply::Lost { rank: rank.0 });
            self.round_lost();
            self.meeting_lost(rank);
        }
    }

    /// The process of a rank has ended: if it has not joined, it never will.
    pub(super) fn ended(&mut self, rank: Rank) {
        if self.seats.get(rank.index()).is_some_and(Option::is_none) {
            let turned_away = std::mem::take(&mut self.turned_away);
            self.fail(&Verdict::Ended { ranks: [rank].into_iter().collect(), turned_away });
        }
    }

    /// The process that holds the meeting place ends.
    pub(super) fn host_leaves(&mut self) {
        match self.seats[0] {
            Some(seat) => self.gone(seat.guest),
            // It gives up before it could join itself: those who have are told what they would hear at the deadline.
            None => self.miss(),
        }
    }

    /// The next deadline of anybody who waits.
    pub(super) fn first_deadline(&self) -> Option<Instant> {
        let joining = matches!(self.stage, Stage::Gathering)
            .then(|| self.seats.iter().flatten().map(|seat| seat.deadline).min())
            .flatten();
        [joining, self.round.first_deadline(), self.meeting.first_deadline()].into_iter().flatten().min()
    }

    /// Ends the waits whose deadline has passed.
    pub(super) fn tick(&mut self, now: Instant) {
        let late = self.seats.iter().flatten().any(|seat| seat.deadline <= now);
        if late {
            self.miss();
        }
        self.expire_round(now);
        self.expire_meeting(now);
    }

    /// Those who have joined wait no longer for the others.
    fn miss(&mut self) {
        if matches!(self.stage, Stage::Gathering) {
            let ranks = self.seats.iter().zip(0..).filter(|(seat, _)| seat.is_none()).map(|(_, rank)| Rank(rank));
            let ranks = ranks.collect();
            let turned_away = std::mem::take(&mut self.turned_away);
            self.fail(&Verdict::Missing { ranks, turned_away });
        }
    }

    fn tell_all(&mut self, reply: &Reply) {
        let body = Body::new(reply);
        let guests = self.seats.iter().flatten().map(|seat| seat.guest);
        self.actions.extend(guests.map(|guest| Action::Tell(guest, body.clone())));
    }

    fn tell(&mut self, rank: Rank, body: &Body) {
        if let Some(seat) = self.seats[rank.index()] {
            self.actions.push(Action::Tell(seat.guest, body.clone()));
        }
    }

    /// Ranks that still take part: gone or not, but not given up.
    fn members(&self) -> impl Iterator<Item = Rank> + '_ {
        (0..self.terms.world).map(Rank).filter(|&rank| !self.out.contains(rank))
    }
}
