//! How the ranks meet outside of windows, be they threads or processes.

use std::sync::Arc;

use ep_bootstrap::{LocalMeeting, Member};
use ep_core::machine::{Agreement, Bootstrap as _, Proposal};
use ep_core::{Error, Nanos, Rank};

use crate::roll::Roll;

/// The other ranks, off the windows.
#[derive(Clone, Debug)]
pub(crate) enum Peers {
    /// Of this process.
    Threads(Arc<LocalMeeting>),
    /// Each of its own.
    Processes(Arc<Member>),
}

impl Peers {
    /// Meets the others, at most for `allowed`.
    pub(crate) async fn agree(&self, me: Rank, proposal: Proposal, allowed: Nanos) -> Result<Agreement, Error> {
        match self {
            Self::Threads(meeting) => meeting.agree(me, proposal, allowed).await,
            Self::Processes(member) => member.agree(proposal, member.now() + allowed).await,
        }
    }

    /// Notes on the roll who is gone, where that is not noted by those who go.
    pub(crate) fn look(&self, roll: &Roll) {
        if let Self::Processes(member) = self {
            member.lost().iter().for_each(|rank| roll.strike(rank));
        }
    }

    /// Tells the others that rank `me` ends, where nothing else does.
    pub(crate) fn leave(&self, me: Rank, roll: &Roll) {
        if let Self::Threads(meeting) = self {
            roll.strike(me);
            meeting.leave(me);
        }
    }
}
