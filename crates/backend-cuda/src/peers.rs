//! How the ranks agree on how to go on after a failure, be they threads or processes.

use std::sync::Arc;

use ep_bootstrap::{LocalMeeting, Member};
use ep_core::machine::{Agreement, Bootstrap as _, Proposal};
use ep_core::{Error, Nanos, Rank};

/// The other ranks, off the devices.
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
}
