//! Low-latency dispatch and combine: fixed slots in two banks, sending and receiving apart.

mod endpoint;
mod flights;
mod handle;

use std::mem::take;
use std::pin::pin;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::future::{Either, select};

pub use endpoint::{LowBySource, LowCombined, LowLatency, LowOrder, LowPacked, LowReceived, LowRouting, LowRoutingOf};
pub use flights::{Flight, Flights};
pub use handle::{Combining, Dispatching, LowHandle};

use super::{Engine, HostRows, Ready};
use crate::error::{Error, Failure, Fault};
use crate::layout::{Layout, LowKind};
use crate::machine::Machine;
use crate::plan::{Plan, Repeats, TopK};
use crate::plant::Plant;
use crate::port::{Nanos, Scope};
use crate::roles::Board;
use crate::roles::low_latency::{
    Call, Faults, Intake, Outbox, Packed, Packing, Results, Tokens, culprit, deliver, last_words, lookout, pack,
    receive_tokens, reduce_results, return_results, send_tokens, skip,
};
use crate::settings::Settings;
use crate::topology::{Rank, RankSet};
use handle::{Inner, Routed, Work};

/// Low latency's part of an engine, for one generation.
#[derive(Debug)]
pub(super) struct Low {
    flights: Flights<Arc<Work>>,
    /// Operations of earlier generations, at least.
    serials: u64,
    /// One of them in whose stretch of tags both banks of memory for units were cleared.
    cleared: u64,
    /// The ranks that take no part, and those masked here.
    mask: RankSet,
    /// The other ranks, ascending.
    pub(super) peers: Vec<Rank>,
    outbox: Outbox,
    /// Whom the last half named, if it failed.
    pub(super) failed: Option<Rank>,
    /// What that rank had last said.
    word: u64,
    /// `[ranks]`: the last word for which a rank was waited for once more.
    words: Vec<u64>,
}

impl Low {
    pub(super) fn new(layout: &Layout, me: Rank, mask: &RankSet, [serials, cleared]: [u64; 2]) -> Self {
        let mut low = Self {
            flights: Flights::default(),
            serials,
            cleared,
            mask: mask.clone(),
            peers: Vec::new(),
            outbox: Outbox::new(layout),
            failed: None,
            word: 0,
            words: vec![0; layout.topology().ranks() as usize],
        };
        low.peers = layout.topology().all().filter(|&rank| rank != me && !mask.contains(rank)).collect();
        low
    }

    /// Operations so far, in this generation and before: tags of units run on from there.
    pub(super) fn serial(&self) -> u64 {
        self.serials + self.flights.sent()
    }

    /// The same as [`Low::cleared`], for the generation that follows: an operation that was received as the first of its bank, and did not
    /// clear it, does not count.
    pub(super) fn cleared(&self) -> u64 {
        let received = self.flights.received();
        if received > 3 { self.serials + received - 1 } else { self.cleared }
    }

    /// Whether the rank that was waited for in vain has said something since it was last waited for: whom it waits for, or that it goes
    /// on. Then it is alive, and late because of others: it may have had to wait for the one who is dead itself, until its own time was
    /// up. It is waited for once more.
    fn has_new_words(&mut self, failure: &Failure) -> bool {
        let Failure { culprit, fault: Fault::Timeout { .. }, .. } = *failure else { return false };
        let before = std::mem::replace(&mut self.words[culprit.index()], self.word);
        self.word > before
    }

    /// Who hears in low latency whom this rank waits for, and it them.
    pub(super) fn listeners(&self, settings: &Settings) -> &[Rank] {
        if settings.low_latency() && !settings.plants(Plant::DeafToTheOtherMode) { &self.peers } else { &[] }
    }

    /// The number of the next operation.
    pub(super) const fn next(&self) -> u64 {
        self.flights.sent() + 1
    }
}

impl<M: Machine> Engine<M> {
    /// Refuses to send when that cannot be.
    fn check_send(&self) -> Result<(), Error> {
        self.desk.ready()?;
        self.desk.layout.check_low_latency()?;
        if self.desk.settings().low_latency_units() && !self.machine.capabilities().units {
            return Err(Error::unsupported("low latency as units", "a machine whose near lanes carry units"));
        }
        self.low.flights.check_send(self.desk.shape()).map(drop)
    }

    /// A half of operation `op`, which begins now.
    pub(super) fn call(&self, op: u64, kind: LowKind) -> Call<'_, M> {
        let started = self.machine.now();
        Call {
            machine: &self.machine,
            layout: &self.desk.layout,
            me: self.desk.me,
            mask: &self.low.mask,
            peers: &self.low.peers,
            vigil: &self.vigil,
            op,
            serials: self.low.serials,
            cleared: self.low.cleared,
            generation: self.desk.generation,
            kind,
            started,
            deadline: started + self.desk.settings().deadline(),
            board: Rc::new(Board::new(self.desk.topology().ranks() as usize)),
        }
    }

    /// Runs `post`, the sending half of the next operation, once everything is skipped that can be.
    async fn send(
        &mut self,
        kind: LowKind,
        routed: Arc<Routed>,
        topk_weights: Option<Vec<f32>>,
        post: impl AsyncFnOnce(&Call<'_, M>, &mut Outbox, &mut Faults) -> Result<(), Fault>,
    ) -> Result<Flight<Arc<Work>>, Error> {
        self.skip().await?;
        let op = self.low.flights.sent() + 1;
        let mut faults = Faults::default();
        let sent = self.half(op, kind, async |call, outbox| post(call, outbox, &mut faults).await).await;
        let work = Work { kind, routed, topk_weights, faults: Mutex::new(faults) };
        match sent {
            Ok(()) => Ok(self.low.flights.send(self.desk.mark(), Arc::new(work))),
            // Not a peer's doing: what was sent is not known.
            Err(failure) => {
                self.desk.poisoned = Some(failure);
                Err(failure.into())
            }
        }
    }

    /// Runs `take`, the receiving half of an operation that was sent, which is the next in turn once everything is skipped that can be.
    async fn take<T>(
        &mut self,
        flight: &Flight<Arc<Work>>,
        take: impl AsyncFn(&Call<'_, M>) -> Result<T, Fault>,
    ) -> Result<T, Error> {
        self.desk.ready()?;
        self.low.flights.check_receive(flight, &self.desk.mark())?;
        self.skip().await?;
        self.finish(flight.op(), flight.work(), take).await
    }

    /// Skips the oldest operations, as far as they were dropped. What fails here may be tried again, like a receiving half.
    async fn skip(&mut self) -> Result<(), Error> {
        while let Some((op, work)) = self.low.flights.dropped() {
            if self.desk.settings().plants(Plant::DroppedWithoutSkipping) {
                self.low.flights.receive();
                continue;
            }
            let asked = work.asked();
            self.finish(op, &work, async |call| skip(call, &asked).await).await?;
        }
        Ok(())
    }

    /// Delivers what could not be sent before, and runs `take`: then operation `op` was received.
    async fn finish<T>(
        &mut self,
        op: u64,
        work: &Work,
        take: impl AsyncFn(&Call<'_, M>) -> Result<T, Fault>,
    ) -> Result<T, Error> {
        let faults = || work.faults.lock().unwrap_or_else(PoisonError::into_inner);
        let mut left = std::mem::take(&mut *faults());
        let taken = loop {
            let half = self.half(op, work.kind, async |call, outbox| {
                let delivered = deliver(call, outbox, &mut left).await;
                match delivered.err().or_else(|| left.unmasked(call.mask)) {
                    Some(fault) => Err(fault),
                    None => take(call).await,
                }
            });
            match half.await {
                Err(failure) if self.low.has_new_words(&failure) => {}
                taken => break taken,
            }
        };
        *faults() = left;
        match taken {
            Ok(value) => {
                self.low.flights.receive();
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
        self.desk.poisoned = Some(self.desk.abandoned(op));
        let (mut outbox, mut voice) = (take(&mut self.low.outbox), take(&mut self.vigil.voice));
        let mut word = 0;
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
                    if voice.has_named() {
                        voice.say(call.me, call.peers, &mut call.watch_port(call.deadline), call.me).await;
                    }
                    Ok(value)
                }
                Err(fault) => {
                    let fault = last_words(&call, fault);
                    let reporter = if let Fault::Aborted { reporter, .. } = fault { reporter } else { self.desk.me };
                    let culprit = culprit(&call, &fault);
                    word = call.word(culprit);
                    Err(Failure { op, culprit, reporter, fault })
                }
            };
            (result, call.board.waited())
        };
        (self.low.outbox, self.vigil.voice, self.desk.poisoned) = (outbox, voice, None);
        self.low.word = word;
        self.low.failed = result.as_ref().err().map(|failure| failure.culprit);
        // Of many peers most kept nobody waiting.
        for (peer, waited) in self.stats.peers.iter_mut().zip(waited).filter(|(_, waited)| *waited > Nanos(0)) {
            peer.waited = peer.waited + waited;
        }
        result
    }

    /// Bytes of a row of a dispatch as it travels.
    fn low_row_bytes(&self) -> u64 {
        let row = self.desk.layout.row();
        row.header_bytes() + row.payload_bytes()
    }

    /// Counts the rows that this rank exchanged with each other rank.
    fn count_low(&mut self, row_bytes: u64, rows: impl Fn(Rank) -> (u64, u64)) {
        for (rank, peer) in (0..).map(Rank).zip(&mut self.stats.peers) {
            let (sent, received) = rows(rank);
            peer.count(sent, received, row_bytes);
        }
    }
}

impl<M: Machine> LowLatency for Engine<M> {
    type LowHandle = LowHandle;
    type Dispatching = Dispatching;
    type Combining = Combining;

    async fn send_dispatch(&mut self, x: &Self::Buf, routing: &LowRoutingOf<Self>) -> Result<Dispatching, Error> {
        self.check_send()?;
        routing.check_repeats()?;
        let LowRouting { topk_idx, topk_weights, repeats, order, coded } = routing;
        order.rows(&self.desk.layout)?;
        self.desk.check_low_batch(x.extent(), topk_idx.len(), topk_weights.as_ref().map(Vec::len), *coded)?;
        let repeats = Repeats::Once.where_allowed(*repeats);
        let plan = Plan::of_choices(
            self.desk.shape(),
            self.desk.topology().ranks(),
            &self.low.mask,
            TopK { topk_idx },
            repeats,
        )?;
        let (topk_idx, topk_weights) = (topk_idx.clone(), topk_weights.clone());
        let routed = Arc::new(Routed { plan, topk_idx, topk_weights, order: *order });
        let Routed { plan, topk_idx, topk_weights, .. } = &*routed;
        let tokens = Tokens { x, coded: *coded, plan, topk_idx, topk_weights: topk_weights.as_deref() };
        let post = async |call: &Call<'_, M>, outbox: &mut Outbox, faults: &mut Faults| {
            send_tokens(call, &tokens, outbox, faults).await
        };
        let flight = self.send(LowKind::Dispatch, Arc::clone(&routed), None, post).await?;
        self.count_low(self.low_row_bytes(), |rank| (routed.plan.rows()[rank.index()].into(), 0));
        Ok(Dispatching { flight })
    }

    async fn receive_dispatch(&mut self, dispatching: &Dispatching) -> Result<LowReceived<Self>, Error> {
        let flight = &dispatching.flight;
        let routed = &flight.work().routed;
        let room = routed.order.rows(&self.desk.layout)?;
        let packing = match routed.order {
            LowOrder::Packed { alignment, .. } => Some(Packing { alignment, room }),
            LowOrder::ByExpert | LowOrder::BySource => None,
        };
        let receive = async |call: &Call<'_, M>| {
            let mut intake = receive_tokens(call, &routed.plan, routed.order.tells_rows()).await?;
            let packed = packing.map(|packing| pack(call, &mut intake, packing)).transpose()?;
            Ok((intake, packed))
        };
        let (intake, packed) = self.take(flight, receive).await?;
        let Intake { x, source_token, segments, counts, sources, tokens, rows, picks, by_source } = intake;
        for (sum, &count) in self.stats.expert_rows.iter_mut().zip(&counts) {
            *sum += u64::from(count);
        }
        self.count_low(self.low_row_bytes(), |rank| {
            let range = &sources[rank.index()];
            (0, (range.end - range.start).into())
        });
        let inner = Inner { mark: flight.mark().clone(), routed: Arc::clone(routed), sources, tokens, rows, picks };
        Ok(LowReceived {
            x,
            expert_counts: counts.iter().map(|&count| count as i32).collect(),
            segments: segments.iter().map(|&(first, rows)| i64::from(first) << 32 | i64::from(rows)).collect(),
            source_token,
            by_source: by_source.map(|told| {
                let ends = inner.sources.iter().map(|range| range.end as i32);
                LowBySource {
                    first_of: std::iter::once(0).chain(ends).collect(),
                    topk_idx: told.topk_idx,
                    topk_weights: told.topk_weights,
                    source_rank: told.source_rank,
                }
            }),
            packed: packed.map(|Packed { first, slots, weights }| LowPacked { first, slots, weights }),
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
        self.check_low_handle(handle)?;
        let Inner { routed, sources, tokens, rows, picks, .. } = &*handle.inner;
        let kind = routed.order.combine(&self.desk.layout, routed.topk_weights.is_some(), topk_weights.is_some())?;
        self.desk.check_weights(topk_weights.map(Vec::len), routed.topk_idx.len())?;
        let most = routed.order.rows(&self.desk.layout)?;
        self.desk.check_results("y", y.extent(), if picks.is_empty() { 0 } else { most })?;
        let results = Results { y, sources, tokens, rows, picks };
        let post = async |call: &Call<'_, M>, outbox: &mut Outbox, faults: &mut Faults| {
            return_results(call, &results, outbox, faults).await
        };
        let flight = self.send(kind, Arc::clone(routed), topk_weights.cloned(), post).await?;
        let returned = |rank: Rank| {
            let range = &sources[rank.index()];
            let rows = &rows[range.start as usize..range.end as usize];
            match kind {
                LowKind::PerChoice => rows.iter().map(|row| u64::from(row.picks.end - row.picks.start)).sum(),
                LowKind::Dispatch | LowKind::PerRank => rows.len() as u64,
            }
        };
        let bytes = crate::layout::RESULT_HEADER + self.desk.shape().result_bytes();
        self.count_low(bytes, |rank| (returned(rank), 0));
        Ok(Combining { flight })
    }

    async fn receive_combine(&mut self, combining: &Combining) -> Result<LowCombined<Self>, Error> {
        let flight = &combining.flight;
        let (asked, kind) = (flight.work().asked(), flight.work().kind);
        let x = self.take(flight, async |call| reduce_results(call, &asked).await).await?;
        let bytes = crate::layout::RESULT_HEADER + self.desk.shape().result_bytes();
        let local = self.desk.layout.local_experts();
        self.count_low(bytes, |rank| (0, asked.owed(kind, local, rank).into()));
        Ok(LowCombined { x: HostRows::Owned { bytes: x.into(), row_bytes: self.result_bytes() }, event: Ready })
    }

    fn check_at_once(&mut self) -> Result<(), Error> {
        self.check_send()?;
        if self.desk.settings().plants(Plant::SentBeforeRefused) {
            return Ok(());
        }
        self.low.flights.check_at_once()
    }

    fn check_low_handle(&self, handle: &LowHandle) -> Result<(), Error> {
        handle.inner.mark.check("handle", &self.desk.mark())
    }

    fn low_latency_mask(&self) -> &RankSet {
        &self.low.mask
    }

    async fn mask_rank(&mut self, rank: Rank) -> Result<(), Error> {
        self.desk.check_mask(rank)?;
        if self.low.mask.contains(rank) {
            return Ok(());
        }
        // What throughput mode has sent to it still arrives: the rank may be waiting for the end of an operation that ended here.
        self.machine.reset(Scope::LowLatency(rank)).await;
        self.low.mask.insert(rank);
        self.low.peers.retain(|&peer| peer != rank);
        self.call(self.low.next(), LowKind::Dispatch).mask(rank).await;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Phase;
    use crate::layout::MASKED;
    use crate::machine::loopback::{LoopbackMachine, finish};
    use crate::machine::{Decorated, FaultPlan, Trigger, Trouble, VerbKind};
    use crate::port::{Cell, Counter, Duty, LaneId, LaneKind, Port as _};
    use crate::shape::Shape;
    use crate::topology::Topology;

    #[test]
    fn units_are_refused_where_the_machine_has_none() {
        let (topology, shape) = (Topology::new(1, 2).unwrap(), Shape::builder().experts(2).topk(1).hidden(16));
        let shape = shape.max_tokens(4).build().unwrap();
        let refused = |units| {
            let settings = Settings::builder(&shape, &topology).low_latency(true).low_latency_units(units);
            let machine = LoopbackMachine::with(&shape, &topology, &settings.build().unwrap());
            Engine::new(machine).unwrap().check_at_once().map_err(|error| error.to_string())
        };
        assert_eq!(refused(false), Ok(()));
        assert!(refused(true).unwrap_err().contains("low latency as units"));
    }

    /// What is put to it fails first, though it has told that it goes on without this rank.
    #[test]
    fn who_is_gone_may_have_said_that_it_goes_on_without_this_rank() {
        let (topology, shape) = (Topology::new(1, 2).unwrap(), Shape::builder().experts(2).topk(1).hidden(16));
        let shape = shape.max_tokens(4).build().unwrap();
        let settings = Settings::builder(&shape, &topology).low_latency(true).build().unwrap();
        let engine = Engine::new(LoopbackMachine::with(&shape, &topology, &settings)).unwrap();
        let (call, peer, kind) = (engine.call(1, LowKind::Dispatch), Rank(1), LaneKind::LowDone);
        let gone = Fault::PeerGone { peer, phase: Phase::Rows };
        assert_eq!(last_words(&call, gone), gone);
        let cell = Cell::new(peer, kind, Counter::Received);
        finish(call.port(Duty::Control).publish(LaneId { peer, kind }, cell, MASKED)).unwrap();
        assert_eq!(last_words(&call, gone), Fault::MaskedBy { peer });
    }

    /// Everything is here: whoever is gone will be missed in the next operation. A lane that stays full is told.
    #[test]
    fn what_keeps_a_rank_from_saying_that_it_has_received_is_told_unless_the_peer_is_gone() {
        let (topology, shape) = (Topology::new(1, 2).unwrap(), Shape::builder().experts(2).topk(1).hidden(16));
        let shape = shape.max_tokens(4).build().unwrap();
        let settings = Settings::builder(&shape, &topology).low_latency(true).build().unwrap();
        let (peer, phase) = (Rank(1), Phase::Credit);
        let lane = LaneId { peer, kind: LaneKind::LowDone };
        let full = Fault::Timeout { phase, peer, lane, seen: 0, awaited: 0, waited: Nanos(1) };
        for (fault, told) in [(Fault::PeerGone { peer, phase }, Ok(())), (full, Err(full))] {
            let faults = FaultPlan::new().with(Trigger::kind(VerbKind::Publish), 1, Trouble::Fail(fault));
            let machine = Decorated::new(LoopbackMachine::with(&shape, &topology, &settings), faults.clone());
            let engine = Engine::new(machine).unwrap();
            let call = engine.call(1, LowKind::Dispatch);
            assert_eq!(finish(call.received(&mut call.port(Duty::Receiver))), told);
            assert_eq!(faults.struck(), 1);
        }
    }
}
