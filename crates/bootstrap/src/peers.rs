//! The other ranks, be they threads of this process or processes.

use std::sync::Arc;

use ep_core::machine::{Agreement, Bootstrap as _, Proposal};
use ep_core::{Error, Nanos, Rank, RankSet};

use crate::{LocalMeeting, Member};

/// How a rank of a backend meets the others outside of their windows.
#[derive(Clone, Debug)]
pub enum Peers {
    /// Of this process.
    Threads(Arc<LocalMeeting>),
    /// Each of its own.
    Processes(Arc<Member>),
}

impl Peers {
    /// Agrees with the others on how to go on after a failure, in at most `allowed`. `me`: the rank that asks.
    ///
    /// # Errors
    /// Those of [`Bootstrap::agree`](ep_core::machine::Bootstrap::agree).
    pub async fn agree(&self, me: Rank, proposal: Proposal, allowed: Nanos) -> Result<Agreement, Error> {
        match self {
            Self::Threads(meeting) => meeting.agree(me, proposal, allowed).await,
            Self::Processes(member) => member.agree(proposal, member.now() + allowed).await,
        }
    }

    /// Ranks whose processes are gone; of threads nobody learns it here.
    pub fn lost(&self) -> RankSet {
        match self {
            Self::Threads(_) => RankSet::new(),
            Self::Processes(member) => member.lost(),
        }
    }

    /// Rank `me` will not come any more. Of a process the others learn it when it ends.
    pub fn leave(&self, me: Rank) {
        if let Self::Threads(meeting) = self {
            meeting.leave(me);
        }
    }
}
