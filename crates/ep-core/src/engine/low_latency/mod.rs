//! Low-latency dispatch and combine: fixed slots in two banks, sending and receiving apart.

mod endpoint;
mod handle;

use std::cell::RefCell;
use std::mem::take;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;

use futures_util::future::{Either, select};

pub use endpoint::{LowCombined, LowLatency, LowReceived, LowRouting, LowRoutingOf};
pub use handle::{Combining, Dispatching, LowHandle};

use super::{Engine, HostRows, Ready};
use crate::error::{Error, Failure, Fault};
use crate::layout::{Arrival, Layout, LowKind};
use crate::machine::Machine;
use crate::plan::{Plan, TopK};
use crate::port::Nanos;
use crate::roles::Board;
use crate::roles::low_latency::{
    Asked, Call, Faults, Intake, Outbox, Results, Tokens, Voice, culprit, deliver, lookout, receive_tokens,
    reduce_results, return_results, send_tokens,
};
use crate::topology::{Rank, RankSet};
use handle::{Inner, Routed, Sent};

/// Low latency's part of an engine, for one generation.
#[derive(Debug)]
pub(super) struct Low {
    /// The next operation, counted from 1.
    op: u64,
    /// The last operation that was received.
    received: u64,
    /// The ranks that take no part, and those masked here.
    mask: RankSet,
    /// The other ranks, ascending.
    peers: Vec<Rank>,
    outbox: Outbox,
    voice: Voice,
    /// Whom the last half named, if it failed.
    pub(super) failed: Option<Rank>,
}

/// Operations that may be sent and not received.
const BANKS: u64 = 2;

impl Low {
    pub(super) fn new(layout: &Layout, me: Rank, mask: &RankSet) -> Self {
        let mut low = Self {
            op: 1,
            received: 0,
            mask: mask.clone(),
            peers: Vec::new(),
            outbox: Outbox::new(layout),
            voice: Voice::default(),
            failed: None,
        };
        low.peers = layout.topology().all().filter(|&rank| rank != me && !mask.contains(rank)).collect();
        low
    }
}

impl<M: Machine> Engine<M> {
    /// Refuses to send when that cannot be.
    fn check_send(&self) -> Result<(), Error> {
        self.ready()?;
        self.layout.check_low_latency()?;
        let Low { op, received, .. } = self.low;
        if op - received > BANKS {
            return Err(Error::TooManyInFlight { op });
        }
        let last = Arrival::last_op(self.shape());
        if op > last {
            return Err(Error::invalid("low-latency operation", op, format_args!("at most {last}; rejoin to go on")));
        }
        Ok(())
    }

    /// Refuses to receive what is not the next in turn.
    fn check_receive(&self, sent: &Sent) -> Result<(), Error> {
        self.ready()?;
        sent.mark.check("low-latency operation", &self.mark())?;
        let next = self.low.received + 1;
        if sent.op != next {
            let limit = format_args!("{next}, the oldest that was not received");
            return Err(Error::invalid("low-latency operation to receive", sent.op, limit));
        }
        Ok(())
    }

    /// A half of operation `op`, which begins now.
    fn call(&self, op: u64, kind: LowKind) -> Call<'_, M> {
        let started = self.machine.now();
        Call {
            machine: &self.machine,
            layout: &self.layout,
            me: self.me,
            mask: &self.low.mask,
            peers: &self.low.peers,
            near: &self.neighbours.near,
            rail: &self.neighbours.rail,
            vigil: &self.vigil,
            op,
            generation: self.generation,
            kind,
            started,
            deadline: started + self.settings().deadline(),
            board: Rc::new(Board::new(self.topology().ranks() as usize)),
        }
    }

    /// Runs `post`, the sending half of the next operation.
    async fn send(
        &mut self,
        kind: LowKind,
        post: impl AsyncFnOnce(&Call<'_, M>, &mut Outbox, &mut Faults) -> Result<(), Fault>,
    ) -> Result<Sent, Error> {
        let op = self.low.op;
        self.low.op += 1;
        let mut faults = Faults::default();
        let sent = self.half(op, kind, async |call, outbox| post(call, outbox, &mut faults).await).await;
        match sent {
            Ok(()) => Ok(Sent { mark: self.mark(), op, faults: RefCell::new(faults) }),
            // Not a peer's doing: what was sent is not known.
            Err(failure) => {
                self.poisoned = Some(failure);
                Err(failure.into())
            }
        }
    }

    /// Runs `take`, the receiving half of an operation that was sent.
    async fn take<T>(
        &mut self,
        sent: &Sent,
        kind: LowKind,
        take: impl AsyncFnOnce(&Call<'_, M>) -> Result<T, Fault>,
    ) -> Result<T, Error> {
        self.check_receive(sent)?;
        let taken = self.half(sent.op, kind, async |call, outbox| {
            let mut faults = sent.faults.take();
            let delivered = deliver(call, outbox, &mut faults).await;
            let fault = delivered.err().or_else(|| faults.unmasked(call.mask));
            sent.faults.replace(faults);
            match fault {
                Some(fault) => Err(fault),
                None => take(call).await,
            }
        });
        match taken.await {
            Ok(value) => {
                self.low.received = sent.op;
                self.stats.operations += 1;
                Ok(value)
            }
            Err(failure) => {
                tracing::warn!(%failure, "low-latency operation failed");
                Err(failure.into())
            }
        }
    }

    /// Runs one half of operation `op` beside its lookout.
    async fn half<T>(
        &mut self,
        op: u64,
        kind: LowKind,
        work: impl AsyncFnOnce(&Call<'_, M>, &mut Outbox) -> Result<T, Fault>,
    ) -> Result<T, Failure> {
        // Until it is through: who drops the future half-way has posted an unknown part.
        self.poisoned = Some(Failure { op, culprit: self.me, reporter: self.me, fault: Fault::Abandoned });
        let (mut outbox, mut voice) = (take(&mut self.low.outbox), take(&mut self.low.voice));
        let (result, waited) = {
            let call = self.call(op, kind);
            let outcome = {
                let (work, lookout) = (pin!(work(&call, &mut outbox)), pin!(lookout(&call, &mut voice)));
                match select(work, lookout).await {
                    Either::Left((result, _)) => result,
                    Either::Right((fault, _)) => Err(fault),
                }
            };
            let result = match outcome {
                Ok(value) => {
                    voice.retract(&call).await;
                    Ok(value)
                }
                Err(fault) => {
                    let reporter = if let Fault::Aborted { reporter, .. } = fault { reporter } else { self.me };
                    Err(Failure { op, culprit: culprit(&call, &fault), reporter, fault })
                }
            };
            (result, call.board.waited())
        };
        (self.low.outbox, self.low.voice, self.poisoned) = (outbox, voice, None);
        self.low.failed = result.as_ref().err().map(|failure| failure.culprit);
        // Of many peers most kept nobody waiting.
        for (peer, waited) in self.stats.peers.iter_mut().zip(waited).filter(|(_, waited)| *waited > Nanos(0)) {
            peer.waited = peer.waited + waited;
        }
        result
    }

    /// Refuses weights that are not one for each choice.
    fn check_weights(&self, weights: Option<&Vec<f32>>, choices: usize) -> Result<(), Error> {
        match weights.filter(|weights| weights.len() != choices) {
            Some(weights) => Err(Error::invalid(
                "length of topk_weights",
                weights.len(),
                format_args!("{choices}, that of topk_idx"),
            )),
            None => Ok(()),
        }
    }

    /// Counts the rows that this rank exchanged with each other rank.
    fn count_low(&mut self, row_bytes: u64, rows: impl Fn(Rank) -> (u64, u64)) {
        for (rank, peer) in (0..).map(Rank).zip(&mut self.stats.peers) {
            let (sent, received) = rows(rank);
            peer.rows_sent += sent;
            peer.rows_received += received;
            peer.bytes_sent += sent * row_bytes;
            peer.bytes_received += received * row_bytes;
        }
    }
}

impl<M: Machine> LowLatency for Engine<M> {
    type LowHandle = LowHandle;
    type Dispatching = Dispatching;
    type Combining = Combining;

    async fn send_dispatch(&mut self, x: &Self::Buf, routing: &LowRoutingOf<Self>) -> Result<Dispatching, Error> {
        self.check_send()?;
        let LowRouting { topk_idx, topk_weights } = routing;
        self.check_weights(topk_weights.as_ref(), topk_idx.len())?;
        let plan = Plan::of_topk(self.shape(), self.topology().ranks(), &self.low.mask, TopK { topk_idx })?;
        if plan.tokens() > self.shape().max_tokens() {
            let limit = format_args!("at most {}, max_tokens of the shape", self.shape().max_tokens());
            return Err(Error::invalid("tokens of a low-latency dispatch", plan.tokens(), limit));
        }
        self.check_results("x", x, plan.tokens())?;
        let routed = Routed { plan, topk_idx: topk_idx.clone(), topk_weights: topk_weights.clone() };
        let tokens =
            Tokens { x, plan: &routed.plan, topk_idx: &routed.topk_idx, topk_weights: routed.topk_weights.as_deref() };
        let sent =
            self.send(LowKind::Dispatch, async |call, outbox, faults| send_tokens(call, &tokens, outbox, faults).await);
        let sent = sent.await?;
        Ok(Dispatching { sent, routed: Arc::new(routed) })
    }

    async fn receive_dispatch(&mut self, dispatching: &Dispatching) -> Result<LowReceived<Self>, Error> {
        let Dispatching { sent, routed } = dispatching;
        let own = routed.plan.rows()[self.me.index()];
        let intake = self.take(sent, LowKind::Dispatch, async |call| receive_tokens(call, own).await).await?;
        let Intake { x, source_token, segments, counts, sources, rows, picks } = intake;
        for (sum, &count) in self.stats.expert_rows.iter_mut().zip(&counts) {
            *sum += u64::from(count);
        }
        let row = *self.layout.row();
        self.count_low(row.header_bytes() + row.payload_bytes(), |rank| {
            let range = &sources[rank.index()];
            (routed.plan.rows()[rank.index()].into(), (range.end - range.start).into())
        });
        let inner = Inner { mark: sent.mark.clone(), routed: Arc::clone(routed), sources, rows, picks };
        Ok(LowReceived {
            x,
            expert_counts: counts.iter().map(|&count| count as i32).collect(),
            segments: segments.iter().map(|&(first, rows)| i64::from(first) << 32 | i64::from(rows)).collect(),
            source_token,
            handle: LowHandle { inner: Arc::new(inner) },
            event: Ready,
        })
    }

    async fn send_combine(
        &mut self,
        y: &Self::Buf,
        handle: &LowHandle,
        topk_weights: Option<&Vec<f32>>,
    ) -> Result<Combining, Error> {
        self.check_send()?;
        let Inner { mark, routed, sources, rows, picks } = &*handle.inner;
        mark.check("handle", &self.mark())?;
        let kind = LowKind::of_weights(routed.topk_weights.is_some(), topk_weights.is_some())?;
        self.check_weights(topk_weights, routed.topk_idx.len())?;
        let most = self.topology().ranks() * self.shape().max_tokens() * self.layout.local_experts();
        self.check_results("y", y, if picks.is_empty() { 0 } else { most })?;
        let results = Results { y, sources, rows, picks };
        let sent =
            self.send(kind, async |call, outbox, faults| return_results(call, &results, outbox, faults).await).await?;
        let returned = |rank: Rank| {
            let range = &sources[rank.index()];
            let rows = &rows[range.start as usize..range.end as usize];
            match kind {
                LowKind::PerChoice => rows.iter().map(|row| u64::from(row.picks.end - row.picks.start)).sum(),
                LowKind::Dispatch | LowKind::PerRank => rows.len() as u64,
            }
        };
        let bytes = crate::layout::RESULT_HEADER + self.shape().result_bytes();
        self.count_low(bytes, |rank| (returned(rank), 0));
        Ok(Combining { sent, routed: Arc::clone(routed), topk_weights: topk_weights.cloned() })
    }

    async fn receive_combine(&mut self, combining: &Combining) -> Result<LowCombined<Self>, Error> {
        let Combining { sent, routed, topk_weights } = combining;
        let kind = if topk_weights.is_some() { LowKind::PerChoice } else { LowKind::PerRank };
        let asked = Asked {
            plan: &routed.plan,
            topk_idx: &routed.topk_idx,
            topk_weights: topk_weights.as_deref().unwrap_or_default(),
        };
        let x = self.take(sent, kind, async |call| reduce_results(call, &asked).await).await?;
        let bytes = crate::layout::RESULT_HEADER + self.shape().result_bytes();
        let local = self.layout.local_experts();
        self.count_low(bytes, |rank| (0, asked.owed(kind, local, rank).into()));
        Ok(LowCombined { x: HostRows::Owned { bytes: x.into(), row_bytes: self.result_bytes() }, event: Ready })
    }

    fn low_latency_mask(&self) -> &RankSet {
        &self.low.mask
    }

    async fn mask_rank(&mut self, rank: Rank) -> Result<(), Error> {
        if rank == self.me || rank.0 >= self.topology().ranks() {
            let limit = format_args!("another rank, 0 to {}", self.topology().ranks() - 1);
            return Err(Error::invalid("rank to mask", rank, limit));
        }
        if self.low.mask.contains(rank) {
            return Ok(());
        }
        self.machine.reset_peer(rank).await;
        self.low.mask.insert(rank);
        self.low.peers.retain(|&peer| peer != rank);
        self.call(self.low.op, LowKind::Dispatch).mask(rank).await;
        Ok(())
    }
}
