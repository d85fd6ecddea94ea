//! The control plane of a rank: agreement, and afterwards lanes to the other nodes that are connected anew, and windows that
//! those who were lost cannot reach.
//!
//! What was under way on lanes when an operation failed, and lanes that broke, must not reach into the next generation. So
//! the survivors, once they have agreed and none of them posts any more, end all connections and make new ones. A process that
//! was lost may live and still have its neighbours' windows: they go elsewhere.

use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;

use async_trait::async_trait;
use ep_bootstrap::{Member, Parts, Peers};
use ep_core::machine::{Agreement, Bootstrap, Proposal};
use ep_core::port::{LaneId, LaneKind, Scope};
use ep_core::transport::Lanes;
use ep_core::{Error, Failure, Fault, Nanos, Phase, Rank, RankSet};

use crate::seat::Seat;

/// Where ranks that are threads of this process leave what they give to the others after an agreement.
///
/// Exchanges are numbered. A rank that has everybody's part of one goes on to the next, while another may still be taking
/// parts of the first; to the one after that it can go only when all have begun the next. So each rank has two places.
#[derive(Debug)]
pub(crate) struct Table(Mutex<Vec<[Given; 2]>>);

/// What a rank gave, and for which exchange; none is number 0.
#[derive(Clone, Debug, Default)]
struct Given {
    exchange: u32,
    bytes: Vec<u8>,
}

impl Table {
    pub(crate) fn new(ranks: u32) -> Self {
        Self(Mutex::new((0..ranks).map(|_| Default::default()).collect()))
    }

    fn given(&self) -> MutexGuard<'_, Vec<[Given; 2]>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn give(&self, me: Rank, exchange: u32, bytes: Vec<u8>) {
        self.given()[me.index()][exchange as usize % 2] = Given { exchange, bytes };
    }

    /// What all ranks but those of `mask` gave for `exchange`, or a rank that has not yet.
    fn take(&self, exchange: u32, mask: &RankSet) -> Result<Parts, Rank> {
        let part = |(rank, given): (Rank, &[Given; 2])| {
            let given = &given[exchange as usize % 2];
            match given.exchange == exchange {
                _ if mask.contains(rank) => Ok(None),
                true => Ok(Some(given.bytes.clone())),
                false => Err(rank),
            }
        };
        (0..).map(Rank).zip(self.given().iter()).map(part).collect()
    }
}

/// The control plane, on the machine's clock.
#[derive(Debug)]
pub(crate) struct Meeting<L> {
    seat: Arc<Seat<L>>,
    /// Where ranks are threads.
    table: Option<Arc<Table>>,
    /// Ranks that cannot reach the windows of this node any more.
    fenced: Mutex<RankSet>,
}

impl<L: Lanes> Meeting<L> {
    pub(crate) const fn new(seat: Arc<Seat<L>>, table: Option<Arc<Table>>) -> Self {
        Self { seat, table, fenced: Mutex::new(RankSet::new()) }
    }

    /// Where ranks are processes: keeps those of `mask` from the windows of the others.
    fn fence(&self, mask: &RankSet, deadline: Nanos) -> Result<(), Error> {
        let (seat, Peers::Processes(member)) = (&self.seat, &self.seat.peers) else { return Ok(()) };
        let mut fenced = self.fenced.lock().unwrap_or_else(PoisonError::into_inner);
        if mask.iter().any(|rank| !fenced.contains(rank)) {
            let left = std::time::Duration::from_nanos((deadline - seat.now()).0);
            seat.node.fence(&seat.layout, mask, member, left)?;
            fenced.clone_from(mask);
        }
        Ok(())
    }

    /// Connects the lanes to the other nodes' ranks anew, but not to those of `mask`.
    async fn reconnect(&self, agreed: &Agreement, deadline: Nanos) -> Result<(), Error> {
        let Some(far) = &self.seat.far else { return Ok(()) };
        // What this rank said last, to those too who do not go on with it.
        self.seat.settle(Scope::All).await;
        let first = match &self.seat.peers {
            Peers::Threads(meeting) => 2 * meeting.last_agreement(self.seat.me),
            // Their exchanges have no number: the meeting place has their order.
            Peers::Processes(_) => 0,
        };
        let offer = far.lanes().offer()?;
        let offers = self.gather(first, agreed, offer, deadline).await?;
        far.lanes().connect(&offers)?;
        // Nobody posts before all are connected.
        self.gather(first + 1, agreed, Vec::new(), deadline).await.map(drop)
    }

    async fn gather(&self, exchange: u32, agreed: &Agreement, own: Vec<u8>, deadline: Nanos) -> Result<Parts, Error> {
        match (&self.seat.peers, &self.table) {
            (Peers::Processes(member), _) => {
                let left = deadline - self.seat.now();
                gather(member, &own, std::time::Duration::from_nanos(left.0))
            }
            (Peers::Threads(_), Some(table)) => self.gather_here(table, exchange, agreed, own, deadline).await,
            (Peers::Threads(_), None) => Err(Error::unsupported("an exchange among threads", "a table of theirs")),
        }
    }

    async fn gather_here(
        &self,
        table: &Table,
        exchange: u32,
        agreed: &Agreement,
        own: Vec<u8>,
        deadline: Nanos,
    ) -> Result<Parts, Error> {
        let seat = &self.seat;
        let began = seat.now();
        table.give(seat.me, exchange, own);
        let failed = |peer: Rank, fault| Failure { op: agreed.op, culprit: peer, reporter: seat.me, fault }.into();
        poll_fn(|context| {
            let missing = match table.take(exchange, &agreed.mask) {
                Ok(parts) => return Poll::Ready(Ok(parts)),
                Err(missing) => missing,
            };
            let (now, phase) = (seat.now(), Phase::Recovery);
            if seat.node.roll().is_gone(missing) {
                return Poll::Ready(Err(failed(missing, Fault::PeerGone { peer: missing, phase })));
            }
            if now >= deadline {
                let lane = LaneId { peer: missing, kind: LaneKind::Control };
                let waited = now - began;
                let fault = Fault::Timeout { phase, peer: missing, lane, seen: 0, awaited: 1, waited };
                return Poll::Ready(Err(failed(missing, fault)));
            }
            context.waker().wake_by_ref();
            Poll::Pending
        })
        .await
    }
}

/// What all processes give.
pub(crate) fn gather(member: &Member, own: &[u8], within: std::time::Duration) -> Result<Parts, Error> {
    member.all_gather(own, within).map_err(not_met)
}

#[async_trait(?Send)]
impl<L: Lanes> Bootstrap for Meeting<L> {
    async fn agree(&self, proposal: Proposal, deadline: Nanos) -> Result<Agreement, Error> {
        let seat = &self.seat;
        let agreed = seat.peers.agree(seat.me, proposal, deadline - seat.now()).await?;
        // Whoever came first has waited for the others: what follows has its own time, the same for all.
        let deadline = seat.now() + seat.layout.settings().deadline();
        self.reconnect(&agreed, deadline).await?;
        self.fence(&agreed.mask, deadline)?;
        Ok(agreed)
    }
}

/// The ranks did not come together.
pub(crate) fn not_met(error: ep_bootstrap::Error) -> Error {
    use ep_bootstrap::{Error as Met, Verdict};
    let remedy = match &error {
        Met::Refused { verdict: Verdict::Missing { .. } | Verdict::Lost { .. }, .. } => {
            "look at what the rank that is missing printed"
        }
        Met::Refused { verdict: Verdict::TooLong { .. }, .. } => {
            "take fewer ranks, channels or queues to other nodes: what all ranks say of theirs is too much for a message"
        }
        _ => "look at what the other ranks printed",
    };
    Error::broken("a meeting of all ranks", error, remedy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_an_exchange_ahead_does_not_hide_what_it_gave_before() {
        let table = Table::new(3);
        let out: RankSet = [Rank(2)].into_iter().collect();
        table.give(Rank(0), 4, vec![1]);
        assert_eq!(table.take(4, &out), Err(Rank(1)));
        table.give(Rank(1), 4, vec![2]);
        let all = Ok(vec![Some(vec![1]), Some(vec![2]), None]);
        assert_eq!(table.take(4, &out), all);
        table.give(Rank(0), 5, vec![]);
        assert_eq!(table.take(4, &out), all);
        assert_eq!(table.take(5, &out), Err(Rank(1)));
        assert_eq!(table.take(6, &out), Err(Rank(0)), "what was given for an earlier one does not count");
    }
}
