//! Agreement as the protocol asks for it: a future, answered by a thread that waits.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use async_trait::async_trait;
use ep_core::machine::{Agreement, Bootstrap, Proposal};
use ep_core::port::{LaneId, LaneKind};
use ep_core::{Failure, Fault, Nanos, Phase, Rank};
use futures_channel::oneshot;

use super::Member;
use super::link::{Inbox, Link, Wait};
use crate::error::{Call, Error};
use crate::wire::{Discord, Reply, Request};

/// Tells calls of a process apart, so that a late answer to one is not taken for that to another.
static CALLS: AtomicU32 = AtomicU32::new(0);

/// A caller that waits. Dropped, it leaves.
struct Waiting {
    link: Arc<Link>,
    call: u32,
    answered: bool,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.link.forget(self.call);
        if !self.answered {
            // If it cannot be sent the connection is gone, and so is this caller.
            let wait = Wait::new(Call::Agree, Duration::ZERO);
            let _ = self.link.send(&Request::Leave { call: self.call }, &wait);
        }
    }
}

/// What a caller finds in the inbox.
enum Found {
    Reply(Reply),
    /// Its place is gone: it left.
    Left,
}

fn find(inbox: &mut Inbox, call: u32) -> Option<Found> {
    match inbox.agreed.iter_mut().find(|(waiting, _)| *waiting == call) {
        Some((_, reply)) => reply.take().map(Found::Reply),
        None => Some(Found::Left),
    }
}

#[async_trait(?Send)]
impl Bootstrap for Member {
    async fn agree(&self, proposal: Proposal, deadline: Nanos) -> Result<Agreement, ep_core::Error> {
        if let Some(rank) = proposal.mask.iter().find(|rank| rank.0 >= self.world) {
            let limit = format_args!("below the world size, {}", self.world);
            return Err(ep_core::Error::invalid("rank of the mask", rank, limit));
        }
        let op = proposal.op;
        let since = self.now();
        let wait = Wait::new(Call::Agree, Duration::from_nanos((deadline - since).0));
        let call = CALLS.fetch_add(1, Ordering::Relaxed);
        let Proposal { mask, generation, op: _ } = proposal;
        let reply = self.ask(Request::Agree { call, mask, generation, op, within: wait.left() }, call, wait).await;
        let waited = self.now() - since;
        let failed = |culprit: Rank, fault: Fault| {
            Err(ep_core::Error::Failed(Failure { op, culprit, reporter: self.rank, fault }))
        };
        let timeout = |peer: Rank| {
            let lane = LaneId { peer, kind: LaneKind::Control };
            failed(peer, Fault::Timeout { phase: Phase::Recovery, peer, lane, seen: 0, awaited: 1, waited })
        };
        let gone = |peer: Rank| failed(peer, Fault::PeerGone { peer, phase: Phase::Recovery });
        match reply {
            Ok(Reply::Agreed { mask, generation, op, .. }) => Ok(Agreement { mask, generation, op }),
            Ok(Reply::NotAgreed { why: Discord::Excluded, .. }) => Err(ep_core::Error::Excluded { rank: self.rank }),
            Ok(Reply::NotAgreed { why: Discord::Missing { rank }, .. }) => timeout(Rank(rank)),
            Ok(Reply::NotAgreed { why: Discord::Gone { rank }, .. }) => gone(Rank(rank)),
            Ok(Reply::NotAgreed { why: Discord::NoMoreGenerations, .. }) => {
                Err(ep_core::Error::unsupported("a generation after 65535", "a new communicator"))
            }
            other => match (self.link().host(), other) {
                (Some(host), Err(Error::Silent { .. })) => timeout(host),
                (Some(host), _) => gone(host),
                (None, _) => {
                    Err(ep_core::Error::broken("an agreement", "the meeting place is gone", "start the job anew"))
                }
            },
        }
    }
}

impl Member {
    async fn ask(&self, request: Request, call: u32, wait: Wait) -> Result<Reply, Error> {
        let link = Arc::clone(self.link());
        link.expect(call);
        let mut waiting = Waiting { link: Arc::clone(&link), call, answered: false };
        link.send(&request, &wait)?;
        let (answer, answered) = oneshot::channel();
        let lost = |why: String| Error::Gone { call: wait.call, address: self.address.clone(), why };
        let thread = thread::Builder::new().name("agreement".to_owned());
        thread
            .spawn(move || {
                // Nobody listens when the caller left.
                let _ = answer.send(link.answer(&wait, |inbox| find(inbox, call)));
            })
            .map_err(|error| lost(error.to_string()))?;
        let found = answered.await.map_err(|_| lost("the thread that waited for it ended".to_owned()))??;
        waiting.answered = true;
        match found {
            Found::Reply(reply) => Ok(reply),
            Found::Left => Err(lost("the caller left".to_owned())),
        }
    }
}
