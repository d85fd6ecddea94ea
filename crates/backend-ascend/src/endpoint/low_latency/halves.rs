//! The halves of an operation as launches: what is refused, what is tried again, and what becomes of an operation that was dropped.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ep_core::engine::low_latency::{Flight, Flights};
use ep_core::layout::{Kind, LowKind};
use ep_core::{Element, Endpoint as _, Error, Failure, Fault, Phase, Rank, RankSet};

use super::super::AscendEndpoint;
use super::super::rows::Held;
use crate::args::{Low, LowState};
use crate::rank::{Call, Half};

/// Low latency's part of an endpoint, for one generation.
#[derive(Debug)]
pub(in crate::endpoint) struct LowHalves {
    pub(super) flights: Flights<Arc<Work>>,
    /// The ranks that take no part, and those masked here.
    pub(super) mask: RankSet,
    /// Whom the last half named, if it failed.
    pub(in crate::endpoint) failed: Option<Rank>,
    /// Whether queues to other servers may still have to do what a half has posted.
    undrained: bool,
    /// `[ranks]`: the last word for which a rank was waited for once more.
    words: Vec<u64>,
}

impl LowHalves {
    pub(in crate::endpoint) fn new(ranks: u32, mask: &RankSet) -> Self {
        Self {
            flights: Flights::default(),
            mask: mask.clone(),
            failed: None,
            undrained: false,
            words: vec![0; ranks as usize],
        }
    }
}

/// What it takes to receive an operation that was sent, or to skip it.
#[derive(Debug)]
pub(super) struct Work {
    pub(super) kind: LowKind,
    /// What the sending half was given, but for its ranks.
    pub(super) args: Low,
    /// What these name.
    pub(super) memory: Vec<Held>,
    /// Whether its rows lie in memory of the caller's, who may take it back when he drops the operation.
    reads_lent: bool,
    /// What went wrong with whom while sending.
    troubles: Mutex<Vec<(Rank, LowState)>>,
}

impl Work {
    pub(super) const fn new(kind: LowKind, args: Low, memory: Vec<Held>, reads_lent: bool) -> Self {
        Self { kind, args, memory, reads_lent, troubles: Mutex::new(Vec::new()) }
    }

    fn troubles(&self) -> MutexGuard<'_, Vec<(Rank, LowState)>> {
        self.troubles.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes note of what became of the ranks that something was sent to.
    fn note(&self, to: &RankSet, states: &[u32]) {
        let mut troubles = self.troubles();
        for rank in to.iter() {
            let state = LowState::of(states[rank.index()]);
            troubles.retain(|(other, _)| *other != rank);
            if state != Some(LowState::Sent) {
                troubles.push((rank, state.unwrap_or(LowState::Late)));
            }
        }
    }

    /// The ranks outside of `mask` that are still to be sent something.
    fn late(&self, mask: &RankSet) -> RankSet {
        let is_late = |(rank, state): &&(Rank, LowState)| *state == LowState::Late && !mask.contains(*rank);
        self.troubles().iter().filter(is_late).map(|(rank, _)| *rank).collect()
    }

    /// The first rank outside of `mask` that could not be sent to, and why.
    fn fault(&self, mask: &RankSet) -> Option<Fault> {
        let troubles = self.troubles();
        let (peer, state) = *troubles.iter().find(|(rank, _)| !mask.contains(*rank))?;
        Some(match state {
            LowState::Masked => Fault::MaskedBy { peer },
            _ => Fault::PeerGone { peer, phase: Phase::Bank },
        })
    }
}

/// As kernels take ranks.
fn bits(ranks: &RankSet) -> u32 {
    ranks.iter().map(|rank| 1 << rank.0).sum()
}

impl AscendEndpoint {
    /// What launches of low latency have in common with others: nothing that moves there.
    pub(super) fn low_call(&self) -> Call {
        Call { kind: Kind::Dispatch, rings: self.layout().settings().rings(), alike: 0 }
    }

    /// Refuses to send when that cannot be.
    pub(super) fn check_low_send(&self) -> Result<(), Error> {
        self.desk.ready()?;
        self.layout().check_low_latency()?;
        if self.layout().settings().low_latency_units() {
            return Err(Error::unsupported("low latency as units", "lanes that carry units, which NPUs' do not"));
        }
        if self.layout().settings().low_latency_announced() {
            let allowed = "an announcement behind all rows, which NPUs' kernels make";
            return Err(Error::unsupported("low latency whose rows are announced", allowed));
        }
        self.low.flights.check_send(self.desk.shape()).map(drop)
    }

    /// Refuses rows that NPUs cannot make.
    pub(super) fn check_low_rows(&self) -> Result<(), Error> {
        match self.shape().element() {
            Element::Bf16 | Element::Int8 => Ok(()),
            element => Err(Error::unsupported(
                format_args!("low-latency rows of {element} on NPUs"),
                "rows of bf16 or INT8: NPUs have no FP8",
            )),
        }
    }

    /// All ranks that take part here.
    fn low_ranks(&self) -> RankSet {
        self.topology().all().filter(|&rank| !self.low.mask.contains(rank)).collect()
    }

    /// Launches a half of operation `op` and waits for it. It may take what is left of `allowed` since `began`.
    async fn low_half(&mut self, op: u64, half: Half, work: &Work, args: Low, began: u64) -> Result<(), Error> {
        self.desk.set_poisoned(Some(self.desk.abandoned(op)));
        self.keep(work.memory.iter().cloned());
        let allowed = self.layout().settings().deadline().0;
        let left = allowed.saturating_sub((self.table().clock)().saturating_sub(began)).max(1);
        let (call, kind) = (self.low_call(), work.kind as u32);
        self.look_who_is_gone()?;
        self.launched();
        self.low.undrained = self.topology().nodes() > 1;
        // SAFETY: `work` keeps what its parameters name, and callers what is given besides, until the launch has ended; they have checked that
        // there is room for the batch and for all that may come. Of what this rank launched before, only positions may run.
        let ticket = unsafe { self.device.low_launch(&call, half, Low { op, kind, ..args }, left) }?;
        if let Err(error) = self.ended().await {
            self.desk.set_poisoned(error.failure().copied().or_else(|| self.desk.poisoned().copied()));
            return Err(error);
        }
        let me = self.desk.rank();
        match self.device.low_failure(ticket, me)? {
            None => {
                self.desk.set_poisoned(None);
                Ok(())
            }
            Some(Ok(error)) => {
                self.desk.set_poisoned(None);
                self.low.failed = error.failure().map(|failure| failure.culprit);
                Err(error)
            }
            // It did nothing, or its cores did not come.
            Some(Err(())) => Err(Error::Failed(self.not_come(op))),
        }
    }

    /// Sends the next operation, once everything is skipped that can be. `positions`: what is enqueued in front.
    pub(super) async fn low_send(
        &mut self,
        work: Work,
        positions: impl FnOnce(&mut Self) -> Result<(), Error>,
    ) -> Result<Result<Flight<Arc<Work>>, u32>, Error> {
        self.unused().await?;
        self.low_skip().await?;
        let (op, to) = (self.low.flights.sent() + 1, self.low_ranks());
        let began = (self.table().clock)();
        positions(self)?;
        let args = Low { to: bits(&to), ..work.args };
        let sent = self.low_half(op, Half::of(work.kind, false), &work, args, began).await;
        if work.kind == LowKind::Dispatch
            && let Some(token) = self.device.low_bad_token()?
        {
            self.desk.set_poisoned(None);
            return Ok(Err(token));
        }
        if let Err(error) = sent {
            // Not a peer's doing, or a verdict of throughput mode: what was sent is not known.
            self.desk.set_poisoned(Some(error.failure().copied().unwrap_or_else(|| self.desk.abandoned(op))));
            return Err(error);
        }
        work.note(&to, &self.device.low_state()?);
        self.low.failed = None;
        Ok(Ok(self.low.flights.send(self.desk.mark(), Arc::new(work))))
    }

    /// Receives an operation that was sent, which is the next in turn once everything is skipped that can be.
    pub(super) async fn low_take(
        &mut self,
        flight: &Flight<Arc<Work>>,
        args: Low,
        memory: Vec<Held>,
    ) -> Result<(), Error> {
        self.desk.ready()?;
        self.low.flights.check_receive(flight, &self.desk.mark())?;
        self.unused().await?;
        self.low_skip().await?;
        self.low_finish(flight.op(), flight.work(), args, memory).await
    }

    /// Skips the oldest operations, as far as they were dropped. What fails here may be tried again, like a receiving half.
    async fn low_skip(&mut self) -> Result<(), Error> {
        while let Some((op, work)) = self.low.flights.dropped() {
            if work.reads_lent && !work.late(&self.low.mask).is_empty() {
                // A rank that is owed rows will not get them, and nobody knows them any more.
                let failure = self.desk.abandoned(op);
                self.desk.set_poisoned(Some(failure));
                return Err(Error::Failed(failure));
            }
            let args = Low { out: 0, receives: 1, ..work.args };
            self.low_finish(op, &work, args, Vec::new()).await?;
        }
        Ok(())
    }

    /// Delivers what could not be sent before, and receives. A rank that was waited for in vain, but has said something since, is alive, and late
    /// because of others: it is waited for once more.
    async fn low_finish(&mut self, op: u64, work: &Work, args: Low, memory: Vec<Held>) -> Result<(), Error> {
        loop {
            let ended = self.low_try(op, work, args, &memory).await;
            let Err(Error::Failed(failure)) = ended else {
                if ended.is_ok() {
                    self.low.flights.receive();
                    self.low.failed = None;
                    self.stats.operations += 1;
                }
                return ended;
            };
            if let Fault::Timeout { .. } = failure.fault {
                let word = self.device.low_word(failure.culprit, self.desk.generation())?;
                let before = std::mem::replace(&mut self.low.words[failure.culprit.index()], word);
                if word > before {
                    continue;
                }
            }
            let failure = self.last_words(failure)?;
            self.low.failed = Some(failure.culprit);
            tracing::warn!(%failure, "low-latency operation failed");
            return Err(failure.into());
        }
    }

    /// What a failure is about, when it is that a peer is gone, or goes on without this rank: the verdict about another rank that a peer
    /// has told, if one has. It may have said why before.
    fn last_words(&self, failure: Failure) -> Result<Failure, Error> {
        if failure.fault.gone().is_none() && !matches!(failure.fault, Fault::MaskedBy { .. }) {
            return Ok(failure);
        }
        for reporter in self.low_ranks().iter() {
            let said = self.device.low_verdict(reporter, self.desk.generation())?;
            if let Some(culprit) = said.filter(|&culprit| culprit != self.desk.rank()) {
                return Ok(Failure { culprit, reporter, fault: Fault::Aborted { reporter, culprit }, ..failure });
            }
        }
        Ok(failure)
    }

    async fn low_try(&mut self, op: u64, work: &Work, args: Low, memory: &[Held]) -> Result<(), Error> {
        let began = (self.table().clock)();
        let late = work.late(&self.low.mask);
        if !late.is_empty() {
            let again = Low { to: bits(&late), judges: 1, ..work.args };
            let sent = self.low_half(op, Half::of(work.kind, false), work, again, began).await;
            work.note(&late, &self.device.low_state()?);
            sent?;
        }
        if let Some(fault) = work.fault(&self.low.mask) {
            let (me, culprit) = (self.desk.rank(), fault.peer().unwrap_or(self.desk.rank()));
            return Err(Failure { op, culprit, reporter: me, fault }.into());
        }
        let args = Low { receives: 1, judges: 1, ..args };
        self.keep(memory.iter().cloned());
        self.low_half(op, Half::of(work.kind, true), work, args, began).await
    }

    /// Tells `masked` that low latency goes on without them, and the others whom this rank blames.
    pub(in crate::endpoint) async fn low_tell(&mut self, masked: &RankSet, culprit: Option<Rank>) -> Result<(), Error> {
        self.ended().await?;
        self.launched();
        // SAFETY: the struct names nothing but what the device keeps. What this rank launched before has ended.
        unsafe { self.device.low_tell(&self.low_call(), masked, culprit, false) }?;
        self.ended().await
    }

    /// Lets a launch wait for what halves have posted to other servers: who leaves, or closes its queues, before it is there would be missed. What this
    /// rank launched before has ended.
    pub(in crate::endpoint) fn low_drain(&mut self) -> Result<(), Error> {
        if !std::mem::take(&mut self.low.undrained) {
            return Ok(());
        }
        self.launched();
        // SAFETY: as of `low_tell`.
        unsafe { self.device.low_tell(&self.low_call(), &RankSet::new(), None, true) }
    }

    /// Counts the rows that this rank exchanged with each other rank.
    pub(super) fn count_low(&mut self, row_bytes: u64, rows: impl Fn(Rank) -> (u64, u64)) {
        for (rank, peer) in (0..).map(Rank).zip(&mut self.stats.peers) {
            let (sent, received) = rows(rank);
            peer.count(sent, received, row_bytes);
        }
    }
}
