//! Low latency: a dispatch, its halves apart and at once.

use std::any::Any;
use std::sync::Arc;

use ep_core::engine::low_latency::{LowBySource, LowOrder, LowPacked, LowReceived, LowRouting, LowRoutingOf};
use ep_core::plan::{Plan, Repeats, TopK};
use ep_core::{Endpoint as _, Error};

use super::super::foreign::{LowPlaces, LowScales};
use super::super::{Array, CudaEndpoint, Event, Rows, ScaleStrides};
use super::early::{self, Early, counted};
use super::flights::{Sent, Work, in_flight};
use super::{Inner, Kept, LowHandle, Routed};
use crate::args;
use crate::args::{LOW_RECEIVE, LOW_SEND};
use crate::driver::{Capture, Scratch};
use crate::error::CudaError;
use crate::rank::RankDevice;

/// A low-latency dispatch that was sent and is to be received.
#[derive(Debug)]
pub struct Dispatching {
    sent: Sent,
    routed: Arc<Routed>,
    x: Kept,
    early: Option<Arc<early::Batch>>,
}

/// A dispatch to be skipped.
#[derive(Clone, Debug)]
pub(in crate::endpoint) struct Batch {
    routed: Arc<Routed>,
    /// Its rows, unless they were the caller's.
    x: Option<Kept>,
    /// Whether its weights are here, or there are none.
    has_weights: bool,
}

impl Batch {
    fn new(routed: &Arc<Routed>, x: &Kept, capture: Option<&Capture>) -> Self {
        let is_kept = |weights: &Array<f32>| capture.is_some() || !weights.is_foreign();
        let has_weights = routed.topk_weights.as_ref().is_none_or(is_kept);
        Self { routed: Arc::clone(routed), x: x.beyond(capture), has_weights }
    }

    pub(super) const fn is_whole(&self) -> bool {
        self.x.is_some() && self.has_weights
    }
}

/// Where a dispatch's results go.
struct Landing {
    x: Rows,
    /// Where scales go that do not follow their codes.
    scales: Option<LowScales>,
    expert_counts: Array<i32>,
    segments: Array<i64>,
    source_token: Array<i32>,
    records: Scratch,
    by_source: Option<LowBySource<CudaEndpoint>>,
    packed: Option<LowPacked<CudaEndpoint>>,
    order: LowOrder,
    /// Where its choices go once more; 0: nowhere.
    choices_too: u64,
    /// Rows of x that may come.
    most_rows: u32,
    /// Where the user adds counts up; 0: nowhere.
    stats: u64,
    /// Of the user's places.
    owner: Option<Arc<dyn Any + Send + Sync>>,
}

/// What a graph keeps of what is told of rows.
fn memory_of(
    by_source: Option<&LowBySource<CudaEndpoint>>,
    packed: Option<&LowPacked<CudaEndpoint>>,
) -> Vec<Arc<dyn Any + Send + Sync>> {
    let mut all: Vec<Arc<dyn Any + Send + Sync>> = Vec::new();
    if let Some(LowBySource { first_of, topk_idx, topk_weights, source_rank }) = by_source {
        all.extend([first_of.memory(), topk_idx.memory(), topk_weights.memory(), source_rank.memory()]);
    }
    if let Some(LowPacked { first, slots, weights }) = packed {
        all.extend([first.memory(), slots.memory(), weights.memory()]);
    }
    all
}

/// Enqueues halves of a dispatch.
///
/// # Safety
/// As [`RankDevice`] says of `args`.
unsafe fn launch(
    args: args::LowDispatch,
    multiprocessors: Option<u32>,
) -> impl FnOnce(&RankDevice) -> Result<(), CudaError> {
    // SAFETY: as the caller promises.
    move |device| unsafe { device.low_dispatch(args, multiprocessors) }
}

impl CudaEndpoint {
    /// Checks a batch and takes memory for it.
    fn routed(&self, x: &Rows, routing: &LowRoutingOf<Self>) -> Result<Routed, Error> {
        routing.check_repeats()?;
        let LowRouting { topk_idx, topk_weights, repeats, order, coded } = routing;
        order.rows(self.layout())?;
        topk_idx.check_home("topk_idx", self.stream())?;
        let weights = topk_weights.as_ref();
        weights.map_or(Ok(()), |weights| weights.check_home("topk_weights", self.stream()))?;
        let tokens = self.desk.check_low_batch(x.extent(), topk_idx.len(), weights.map(Array::len), *coded)?;
        self.check_home("x", x)?;
        let choices = topk_idx.len();
        let copied = if topk_idx.is_foreign() { choices * size_of::<i64>() } else { 0 };
        let memory = Arc::new(Scratch::new(self.stream(), copied + 8 * self.topology().ranks() as usize)?);
        let own = if copied > 0 { Array::of_memory(Arc::clone(&memory), choices) } else { topk_idx.clone() };
        let (topk_weights, repeats, order, numbers) = (topk_weights.clone(), *repeats, *order, copied as u64);
        Ok(Routed { tokens, topk_idx: own, topk_weights, repeats, order, memory, numbers })
    }

    /// Memory for a dispatch: the caller's, but for what the handle keeps.
    fn low_landing_at(&self, places: &LowPlaces, order: LowOrder) -> Result<Landing, Error> {
        let (ranks, local) = (self.topology().ranks() as usize, self.layout().local_experts() as usize);
        let (rows, topk) = (order.rows(self.layout())?, self.shape().topk() as usize);
        let received = order.told_rows(self.layout())?;
        let packs = matches!(order, LowOrder::Packed { .. });
        if order.tells_rows() != places.by_source.is_some() || packs != places.packed.is_some() {
            return Err(Error::invalid(
                "places for a low-latency dispatch",
                "for another order",
                format_args!("{order:?}"),
            ));
        }
        let format = self.layout().row();
        let row_bytes = match places.scales {
            Some(_) => format.codes_bytes() as usize,
            None => format.payload_bytes() as usize,
        };
        if places.scales.is_some() && (row_bytes as u64 != format.scales_offset() || format.scales_bytes() == 0) {
            let limit = "FP8 and a multiple of 16 elements";
            return Err(Error::invalid("row whose scales go elsewhere", format_args!("{row_bytes} bytes"), limit));
        }
        // SAFETY: who gave the places promised this.
        unsafe {
            Ok(Landing {
                x: self.foreign_rows(places.x, rows, row_bytes),
                scales: places.scales,
                expert_counts: self.foreign_array(places.expert_counts, local),
                segments: self.foreign_array(places.segments, local * ranks),
                source_token: self.foreign_array(places.source_token, received as usize),
                records: self.records()?,
                by_source: places.by_source.map(|told| LowBySource {
                    first_of: self.foreign_array(told.first_of, ranks + 1),
                    topk_idx: self.foreign_array(told.topk_idx, received as usize * topk),
                    topk_weights: self.foreign_array(told.topk_weights, received as usize * topk),
                    source_rank: self.foreign_array(told.source_rank, received as usize),
                }),
                packed: places.packed.map(|told| LowPacked {
                    first: self.foreign_array(told.first, local + 1),
                    slots: self.foreign_array(told.slots, received as usize * topk),
                    weights: self.foreign_array(told.weights, rows as usize),
                }),
                order,
                choices_too: places.by_source.map_or(0, |told| told.topk_idx_too),
                most_rows: places.most_rows.map_or(rows, |most| most.min(rows)),
                stats: places.stats,
                owner: places.owner.clone(),
            })
        }
    }

    fn records(&self) -> Result<Scratch, Error> {
        let ranks = self.topology().ranks() as usize;
        let records = ranks * self.shape().max_tokens() as usize * 8 * (1 + self.shape().topk() as usize);
        Ok(Scratch::new(self.stream(), 16 * ranks + records)?)
    }

    fn low_landing(&self, order: LowOrder) -> Result<Landing, Error> {
        let (ranks, local) = (self.topology().ranks() as usize, self.layout().local_experts() as usize);
        let (stream, rows, topk) = (self.stream(), order.rows(self.layout())?, self.shape().topk() as usize);
        let received = order.told_rows(self.layout())? as usize;
        let by_source = match order {
            LowOrder::ByExpert => None,
            LowOrder::BySource | LowOrder::Packed { .. } => Some(LowBySource {
                first_of: Array::new(stream, ranks + 1)?,
                topk_idx: Array::new(stream, received * topk)?,
                topk_weights: Array::new(stream, received * topk)?,
                source_rank: Array::new(stream, received)?,
            }),
        };
        let packed = match order {
            LowOrder::ByExpert | LowOrder::BySource => None,
            LowOrder::Packed { .. } => Some(LowPacked {
                first: Array::new(stream, local + 1)?,
                slots: Array::new(stream, received * topk)?,
                weights: Array::new(stream, rows as usize)?,
            }),
        };
        Ok(Landing {
            x: Rows::new(stream, rows, self.layout().row().payload_bytes() as usize)?,
            scales: None,
            expert_counts: Array::new(stream, local)?,
            segments: Array::new(stream, local * ranks)?,
            source_token: Array::new(stream, received)?,
            records: self.records()?,
            by_source,
            packed,
            order,
            choices_too: 0,
            most_rows: rows,
            stats: 0,
            owner: None,
        })
    }

    /// `topk_idx`: the user's, of a sending half.
    fn low_dispatch_args(
        &self,
        routed: &Routed,
        topk_idx: Option<&Array<i64>>,
        x: Option<&Kept>,
        landing: Option<&Landing>,
    ) -> args::LowDispatch {
        let own = routed.topk_idx.address();
        let topk_idx = topk_idx.map_or(own, Array::address);
        let scales = x.and_then(|x| x.scales.as_ref()).map(|&(_, at, strides)| (at, strides));
        let (x_scales, strides) = scales.unwrap_or((0, ScaleStrides::dense(0)));
        let args = args::LowDispatch {
            x: x.map_or(0, |x| x.memory.address()),
            x_stride: x.map_or(0, |x| x.stride as u64),
            x_scales,
            x_scales_row: strides.row,
            x_scales_word: strides.word,
            topk_idx,
            kept_idx: if topk_idx == own { 0 } else { own },
            topk_weights: routed.topk_weights.as_ref().map_or(0, Array::address),
            routed: routed.numbers(),
            tokens: routed.tokens,
            repeats: routed.repeats.into(),
            ..args::LowDispatch::default()
        };
        let Some(landing) = landing else { return args };
        let scales = landing.scales.unwrap_or_default();
        let args = match &landing.by_source {
            Some(told) => args::LowDispatch {
                first_of: told.first_of.address(),
                out_idx: told.topk_idx.address(),
                out_idx_too: landing.choices_too,
                out_weights: told.topk_weights.address(),
                source_rank: told.source_rank.address(),
                ..args
            },
            None => args,
        };
        let args = match (&landing.packed, landing.order) {
            (Some(told), LowOrder::Packed { alignment, zero_spare }) => args::LowDispatch {
                first_slots: told.first.address(),
                slots: told.slots.address(),
                slot_weights: told.weights.address(),
                alignment,
                zeros: zero_spare.into(),
                ..args
            },
            _ => args,
        };
        // All slots are as if of one expert: they may be more than one has.
        let wide = u64::from(self.topology().ranks()) * u64::from(self.shape().max_tokens());
        args::LowDispatch {
            out: self.address(&landing.x),
            out_stride: landing.x.stride() as u64,
            scales: scales.address,
            scales_expert: if landing.packed.is_some() { wide * scales.row } else { scales.expert },
            scales_row: scales.row,
            scales_word: scales.word,
            expert_counts: landing.expert_counts.address(),
            segments: landing.segments.address(),
            source_token: landing.source_token.address(),
            records: landing.records.address(),
            stats: landing.stats,
            room: landing.most_rows,
            ..args
        }
    }

    /// Bad choices that a kernel found, named as on the host.
    fn name_choices(&self, LowRouting { topk_idx, repeats, .. }: &LowRoutingOf<Self>, error: Error) -> Error {
        if error.failure().is_some() || self.desk.poisoned().is_some() {
            return error;
        }
        let Ok(topk_idx) = topk_idx.to_vec() else { return error };
        let (choices, repeats) = (TopK { topk_idx: &topk_idx }, Repeats::Once.where_allowed(*repeats));
        let planned = Plan::of_choices(self.shape(), self.topology().ranks(), &self.low.mask, choices, repeats);
        planned.err().unwrap_or(error)
    }

    /// A dispatch was received.
    fn low_received(
        &mut self,
        (sent, x): (&Sent, &Kept),
        routed: &Arc<Routed>,
        (landing, early): (Landing, Option<&early::Batch>),
        event: Event,
        capture: Option<&Capture>,
    ) -> Result<LowReceived<Self>, Error> {
        self.low.flights(capture).receive();
        if let Some(batch) = early {
            batch.receive();
        }
        let Landing { x: rows, expert_counts, segments, source_token, records, by_source, packed, owner, .. } = landing;
        let early = early.map(|batch| batch.early.clone());
        let mark = sent.flight.mark().clone();
        let inner = Arc::new(Inner { mark, routed: Arc::clone(routed), records, early });
        self.keep_for(capture, || {
            let arrays = [expert_counts.memory(), segments.memory(), source_token.memory()];
            let all = [rows.memory(), Arc::clone(&inner) as Arc<dyn Any + Send + Sync>].into_iter().chain(x.all());
            let counters = inner.early.as_ref().map(Early::memory);
            let told = memory_of(by_source.as_ref(), packed.as_ref());
            all.chain(arrays).chain(told).chain(owner).chain(counters).collect()
        })?;
        Ok(LowReceived {
            x: rows,
            expert_counts,
            segments,
            source_token,
            by_source,
            packed,
            handle: LowHandle { inner },
            event,
        })
    }

    /// The sending half.
    pub(super) async fn low_send_dispatch(
        &mut self,
        x: &Rows,
        routing: &LowRoutingOf<Self>,
        early: Option<&Early>,
    ) -> Result<Dispatching, Error> {
        let capture = self.low_begin()?;
        let capture = capture.as_ref();
        let op = self.check_send(capture)?;
        if early.is_some() {
            early::check_order(routing.order)?;
        }
        early.map_or(Ok(()), |early| early.check(self))?;
        let routed = Arc::new(self.routed(x, routing)?);
        self.skip(capture).await?;
        let x = if routing.coded { self.keep_coded(x, routed.tokens) } else { self.keep(x, routed.tokens) }?;
        let args = self.low_dispatch_args(&routed, Some(&routing.topk_idx), Some(&x), None);
        let args = args::LowDispatch { phases: LOW_SEND, in_flight: in_flight(self.low.flights(capture)), ..args };
        let args = counted(args, early);
        // SAFETY: rows, routing and landing are memory of the own stream's, with room for the batch and for all that may come.
        let half = self.low_half(op, capture.is_some(), unsafe { launch(args, None) }).await;
        half.map_err(|error| self.name_choices(routing, error))?;
        let sent = self.sent(Work::Dispatch(Batch::new(&routed, &x, capture)), capture);
        self.keep_for(capture, || {
            let all = [Arc::clone(&routed) as Arc<dyn Any + Send + Sync>];
            all.into_iter().chain(x.all()).chain(early.map(Early::memory)).collect()
        })?;
        Ok(Dispatching { sent, routed, x, early: early.map(|early| early.begin(self.desk.mark())) })
    }

    /// The receiving half of a dispatch, into memory of the caller's where he gives some.
    pub(in crate::endpoint) async fn low_receive(
        &mut self,
        dispatching: &Dispatching,
        places: Option<&LowPlaces>,
    ) -> Result<LowReceived<Self>, Error> {
        let capture = self.low_begin()?;
        let capture = capture.as_ref();
        let Dispatching { sent, routed, x, early } = dispatching;
        self.check_receive(sent, capture)?;
        let landing = places
            .map_or_else(|| self.low_landing(routed.order), |places| self.low_landing_at(places, routed.order))?;
        self.skip(capture).await?;
        let args = self.low_dispatch_args(routed, None, Some(x), Some(&landing));
        let args = args::LowDispatch { phases: LOW_RECEIVE, in_flight: in_flight(self.low.flights(capture)), ..args };
        let counters = early.as_deref().map(|batch| &batch.early);
        let (args, few) = (counted(args, counters), counters.and_then(Early::multiprocessors));
        // SAFETY: as in the sending half.
        let event = self.low_half(sent.op(), capture.is_some(), unsafe { launch(args, few) }).await?;
        self.low_received((sent, x), routed, (landing, early.as_deref()), event, capture)
    }

    /// Both halves of a dispatch, in one launch where nothing is in flight; into memory of the caller's where he gives some. `waits`: for the kernel.
    pub(in crate::endpoint) async fn low_dispatch_at_once(
        &mut self,
        x: &Rows,
        routing: &LowRoutingOf<Self>,
        places: Option<&LowPlaces>,
        waits: bool,
    ) -> Result<LowReceived<Self>, Error> {
        let capture = self.low_begin()?;
        let capture = capture.as_ref();
        if waits && capture.is_some() {
            let use_instead = "one whose counts stay on the device";
            return Err(Error::unsupported("a captured dispatch that waits for counts", use_instead));
        }
        let op = self.check_both(capture)?;
        let routed = Arc::new(self.routed(x, routing)?);
        let landing = places
            .map_or_else(|| self.low_landing(routed.order), |places| self.low_landing_at(places, routed.order))?;
        self.skip(capture).await?;
        let x = if routing.coded { self.keep_coded(x, routed.tokens) } else { self.keep(x, routed.tokens) }?;
        let args = self.low_dispatch_args(&routed, Some(&routing.topk_idx), Some(&x), Some(&landing));
        let args = args::LowDispatch { phases: LOW_SEND | LOW_RECEIVE, ..args };
        // SAFETY: as in the sending half.
        let launch = unsafe { launch(args, None) };
        let waits = waits || self.wait_for_kernels;
        let half = self.low_half_awaited(op, capture.is_some(), waits, launch).await;
        // What failed in receiving was sent; it is dropped here, and so skipped by the next call. Choices that were refused, and what came behind
        // another's failure, were not.
        if let Err(error) = &half
            && (error.failure().is_none() || self.desk.poisoned().is_some())
        {
            return Err(self.name_choices(routing, error.clone()));
        }
        let sent = self.sent(Work::Dispatch(Batch::new(&routed, &x, capture)), capture);
        self.low_received((&sent, &x), &routed, (landing, None), half?, capture)
    }

    /// Receives a dispatch that was dropped into memory of nobody's.
    pub(super) async fn skip_dispatch(
        &mut self,
        op: u64,
        batch: &Batch,
        capture: Option<&Capture>,
    ) -> Result<(), Error> {
        let Batch { routed, x, .. } = batch;
        let landing = self.low_landing(routed.order)?;
        let args = self.low_dispatch_args(routed, None, x.as_ref(), Some(&landing));
        let args = args::LowDispatch { phases: LOW_RECEIVE, in_flight: in_flight(self.low.flights(capture)), ..args };
        // SAFETY: as in the sending half.
        self.low_half(op, capture.is_some(), unsafe { launch(args, None) }).await?;
        self.keep_for(capture, || {
            let Landing { x: rows, expert_counts, segments, source_token, records, by_source, packed, .. } = landing;
            let arrays = [expert_counts.memory(), segments.memory(), source_token.memory()];
            let all = [rows.memory(), Arc::new(records) as _, Arc::clone(routed) as _];
            all.into_iter()
                .chain(memory_of(by_source.as_ref(), packed.as_ref()))
                .chain(arrays)
                .chain(x.iter().flat_map(Kept::all))
                .collect()
        })
    }
}
