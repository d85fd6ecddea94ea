//! Low latency: fixed slots in two banks, sending and receiving apart.
//!
//! Everything is checked and enqueued; nothing of the routing comes to the host. Each half is a launch of a kernel that reads the number
//! of its operation from the device. With [`wait_for_kernels`](crate::Builder::wait_for_kernels) a half ends when its kernel has,
//! so that its failure is its own: the user may mask the peer that it names and receive again. Without, a failure is told by
//! the next call, and poisons the communicator: what was enqueued behind it did nothing.
//!
//! Halves may be captured into CUDA graphs ([`super::graphs`]). A capture counts its operations for itself, from nothing in flight; the
//! kernels see that this is so when it is replayed.
//!
//! Rows are read from the user's memory by the sending half, and once more by the receiving half where a peer was late: the operation
//! keeps that memory from being given back, but not from being written to. Write to it after the receiving half only.

mod failure;
mod flights;

use std::any::Any;
use std::sync::Arc;

use ep_core::engine::Mark;
use ep_core::engine::low_latency::{LowCombined, LowReceived, LowRoutingOf};
use ep_core::layout::LowKind;
use ep_core::plan::{Plan, TopK};
use ep_core::{Endpoint as _, Error, Failure, Fault, LowLatency, Rank, RankSet};

use super::foreign::{LowPlaces, LowScales};
use super::rows::stride;
use super::{Array, CudaEndpoint, Event, Rows};
use crate::args;
use crate::driver::{Capture, Scratch};
use crate::error::CudaError;
use crate::rank::{LOW_RECEIVE, LOW_SEND, RankDevice};
pub(super) use flights::Low;
use flights::Sent;

/// Says combine where the rows of a low-latency dispatch came from. Cheap to clone.
#[derive(Clone, Debug)]
pub struct LowHandle {
    inner: Arc<Inner>,
}

impl LowHandle {
    /// Tokens of this rank's batch.
    pub fn tokens(&self) -> u32 {
        self.inner.routed.tokens
    }

    /// Whether each rank weighs and sums its own experts' results: the weights were given at dispatch.
    pub fn reduces_per_rank(&self) -> bool {
        self.inner.routed.topk_weights.is_some()
    }
}

#[derive(Debug)]
struct Inner {
    mark: Mark,
    routed: Arc<Routed>,
    /// What the receiver keeps of each row: `ep_low_record`.
    records: Scratch,
}

/// Where this rank's own tokens went.
#[derive(Debug)]
struct Routed {
    tokens: u32,
    /// The endpoint's own: where the user's lie elsewhere, the sending half copies them to here.
    topk_idx: Array<i64>,
    topk_weights: Option<Array<f32>>,
    memory: Arc<Scratch>,
    /// Where in `memory` is u32 `[2, ranks]`: rows to each rank, choices of its experts.
    numbers: u64,
}

impl Routed {
    fn numbers(&self) -> u64 {
        self.memory.address() + self.numbers
    }
}

/// Rows that a kernel reads, kept for as long as it may.
#[derive(Debug)]
struct Kept {
    memory: Arc<Scratch>,
    stride: usize,
}

/// A low-latency dispatch that was sent and is to be received.
#[derive(Debug)]
pub struct Dispatching {
    sent: Sent,
    routed: Arc<Routed>,
    x: Kept,
}

/// A low-latency combine that was sent and is to be received.
#[derive(Debug)]
pub struct Combining {
    sent: Sent,
    handle: LowHandle,
    /// `[tokens, topk]`: given with the combine.
    topk_weights: Option<Array<f32>>,
    y: Kept,
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
    /// Where the user adds counts up; 0: nowhere.
    stats: u64,
    /// Of the user's places.
    owner: Option<Arc<dyn Any + Send + Sync>>,
}

impl CudaEndpoint {
    /// A buffer `[local experts, ranks * max_tokens, hidden]` bf16 for the experts' results: the same memory each time, taken at the
    /// first request. A combine reads results where they lie, so none of them is ever copied; this one is for frameworks
    /// that ask for such a buffer. What it held is overwritten once the combine of it was received.
    ///
    /// # Errors
    /// [`Error::Unsupported`] without room for low latency, or for want of memory.
    pub fn low_latency_combine_buffer(&mut self) -> Result<Rows, Error> {
        self.layout().check_low_latency()?;
        let (rows, row_bytes) = (self.expert_rows(), self.shape().result_bytes() as usize);
        let memory = match &self.low.buffer {
            Some(memory) => Arc::clone(memory),
            None => Arc::new(Scratch::new(self.stream(), rows as usize * stride(row_bytes))?),
        };
        self.low.buffer = Some(Arc::clone(&memory));
        Ok(Rows::Owned { memory, rows, row_bytes })
    }

    /// Rows of all local experts.
    fn expert_rows(&self) -> u32 {
        // Cutting the layout refused products that are too large.
        self.layout().local_experts() * self.topology().ranks() * self.shape().max_tokens()
    }

    /// Refuses to start while poisoned, and tells of what kernels of low latency have reported since. The capture that the call goes
    /// to.
    fn low_begin(&mut self) -> Result<Option<Capture>, Error> {
        let capture = self.begin()?;
        let Some(error) = self.low_failure() else { return Ok(capture) };
        let op = self.low.called.received + 1;
        let fallback = Failure { op, culprit: self.me, reporter: self.me, fault: Fault::Abandoned };
        self.poisoned = Some(error.failure().copied().unwrap_or(fallback));
        Err(error)
    }

    /// What kernels of low latency have reported, and no call has told.
    pub(super) fn low_failure(&self) -> Option<Error> {
        self.device.low_report().map(|report| failure::of(report, self.me))
    }

    /// Refuses weights that are not one for each choice.
    fn check_weights(weights: Option<&Array<f32>>, choices: usize) -> Result<(), Error> {
        match weights.filter(|weights| weights.len() != choices) {
            Some(weights) => {
                let limit = format_args!("{choices}, that of topk_idx");
                Err(Error::invalid("length of topk_weights", weights.len(), limit))
            }
            None => Ok(()),
        }
    }

    /// The memory of rows, so that it is not given back. Leased rows may be granted to others: they are copied.
    fn keep(&self, rows: &Rows, count: u32) -> Result<Kept, Error> {
        let stride = rows.stride();
        if let Rows::Owned { memory, .. } = rows {
            return Ok(Kept { memory: Arc::clone(memory), stride });
        }
        let memory = Arc::new(Scratch::new(self.stream(), count as usize * stride)?);
        self.stream().copy_rows((memory.address(), stride), (self.address(rows), stride), stride, count as usize)?;
        Ok(Kept { memory, stride })
    }

    /// Enqueues halves of operation `op`.
    async fn low_half(
        &mut self,
        op: u64,
        captured: bool,
        launch: impl FnOnce(&RankDevice) -> Result<(), CudaError>,
    ) -> Result<Event, Error> {
        if captured {
            launch(&self.device)?;
            return Ok(Event(Arc::new(self.device.stream.record(false)?)));
        }
        self.poisoned = Some(Failure { op, culprit: self.me, reporter: self.me, fault: Fault::Abandoned });
        launch(&self.device)?;
        let event = Event(Arc::new(self.device.stream.record(false)?));
        if self.wait_for_kernels {
            self.until(|_| Ok(event.0.has_come()?.then_some(()))).await?;
            if let Some(report) = self.device.low_report() {
                let error = failure::of(report, self.me);
                self.device.low_resume()?;
                self.poisoned = None;
                tracing::warn!(%error, "low-latency operation failed");
                return Err(error);
            }
        }
        self.poisoned = None;
        Ok(event)
    }

    /// Checks a batch and takes memory for it.
    fn routed(&self, x: &Rows, routing: &LowRoutingOf<Self>) -> Result<Routed, Error> {
        let (topk_idx, topk_weights) = (&routing.topk_idx, &routing.topk_weights);
        Self::check_weights(topk_weights.as_ref(), topk_idx.len())?;
        let (topk, most) = (self.shape().topk(), self.shape().max_tokens());
        if !topk_idx.len().is_multiple_of(topk as usize) {
            let limit = format_args!("a multiple of the {topk} topk");
            return Err(Error::invalid("length of topk_idx", topk_idx.len(), limit));
        }
        let tokens = topk_idx.len() / topk as usize;
        if tokens > most as usize {
            let limit = format_args!("at most {most}, max_tokens of the shape");
            return Err(Error::invalid("tokens of a low-latency dispatch", tokens, limit));
        }
        let tokens = tokens as u32;
        self.check_rows("x", x, self.shape().result_bytes(), tokens)?;
        let choices = topk_idx.len();
        let copied = if topk_idx.is_foreign() { choices * size_of::<i64>() } else { 0 };
        let memory = Arc::new(Scratch::new(self.stream(), copied + 8 * self.topology().ranks() as usize)?);
        let own = if copied > 0 { Array::of_memory(Arc::clone(&memory), choices) } else { topk_idx.clone() };
        Ok(Routed { tokens, topk_idx: own, topk_weights: topk_weights.clone(), memory, numbers: copied as u64 })
    }

    /// Memory for a dispatch: the caller's, but for what the handle keeps.
    fn low_landing_at(&self, places: &LowPlaces) -> Result<Landing, Error> {
        let (ranks, local) = (self.topology().ranks() as usize, self.layout().local_experts() as usize);
        let rows = self.expert_rows();
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
                source_token: self.foreign_array(places.source_token, rows as usize),
                records: self.records()?,
                stats: places.stats,
                owner: places.owner.clone(),
            })
        }
    }

    fn records(&self) -> Result<Scratch, Error> {
        let ranks = self.topology().ranks() as usize;
        let records = ranks * self.shape().max_tokens() as usize * 8 * (1 + self.shape().topk() as usize);
        Ok(Scratch::new(self.stream(), 8 * ranks + records)?)
    }

    fn low_landing(&self) -> Result<Landing, Error> {
        let (ranks, local) = (self.topology().ranks() as usize, self.layout().local_experts() as usize);
        let (stream, rows) = (self.stream(), self.expert_rows());
        Ok(Landing {
            x: Rows::new(stream, rows, self.layout().row().payload_bytes() as usize)?,
            scales: None,
            expert_counts: Array::new(stream, local)?,
            segments: Array::new(stream, local * ranks)?,
            source_token: Array::new(stream, rows as usize)?,
            records: self.records()?,
            stats: 0,
            owner: None,
        })
    }

    /// `topk_idx`: the user's, of a sending half.
    fn low_dispatch_args(
        &self,
        routed: &Routed,
        topk_idx: Option<&Array<i64>>,
        x: &Kept,
        landing: Option<&Landing>,
    ) -> args::LowDispatch {
        let own = routed.topk_idx.address();
        let topk_idx = topk_idx.map_or(own, Array::address);
        let args = args::LowDispatch {
            x: x.memory.address(),
            x_stride: x.stride as u64,
            topk_idx,
            kept_idx: if topk_idx == own { 0 } else { own },
            topk_weights: routed.topk_weights.as_ref().map_or(0, Array::address),
            routed: routed.numbers(),
            tokens: routed.tokens,
            ..args::LowDispatch::default()
        };
        let Some(landing) = landing else { return args };
        let scales = landing.scales.unwrap_or_default();
        args::LowDispatch {
            out: self.address(&landing.x),
            out_stride: landing.x.stride() as u64,
            scales: scales.address,
            scales_expert: scales.expert,
            scales_row: scales.row,
            scales_word: scales.word,
            expert_counts: landing.expert_counts.address(),
            segments: landing.segments.address(),
            source_token: landing.source_token.address(),
            records: landing.records.address(),
            stats: landing.stats,
            ..args
        }
    }

    /// Bad choices that a kernel found, named as on the host.
    fn name_choices(&self, topk_idx: &Array<i64>, error: Error) -> Error {
        if error.failure().is_some() {
            return error;
        }
        let Ok(topk_idx) = topk_idx.to_vec(self.stream()) else { return error };
        let planned =
            Plan::of_topk(self.shape(), self.topology().ranks(), &self.low.mask, TopK { topk_idx: &topk_idx });
        planned.err().unwrap_or(error)
    }

    /// A dispatch was received.
    fn low_received(
        &mut self,
        (sent, x): (&Sent, &Kept),
        routed: &Arc<Routed>,
        landing: Landing,
        event: Event,
        capture: Option<&Capture>,
    ) -> Result<LowReceived<Self>, Error> {
        self.low.flights(capture).received += 1;
        let Landing { x: rows, expert_counts, segments, source_token, records, owner, .. } = landing;
        let inner = Arc::new(Inner { mark: sent.mark.clone(), routed: Arc::clone(routed), records });
        self.keep_for(capture, || {
            let arrays = [expert_counts.memory(), segments.memory(), source_token.memory()];
            let all = [Arc::clone(&x.memory) as _, rows.memory(), Arc::clone(&inner) as _];
            all.into_iter().chain(arrays).chain(owner).collect()
        })?;
        Ok(LowReceived { x: rows, expert_counts, segments, source_token, handle: LowHandle { inner }, event })
    }

    /// Checks a combine; which form it has.
    fn check_combine(&self, y: &Rows, handle: &LowHandle, topk_weights: Option<&Array<f32>>) -> Result<LowKind, Error> {
        let Inner { mark, routed, .. } = &*handle.inner;
        mark.check("handle", &self.mark())?;
        let kind = match (&routed.topk_weights, topk_weights) {
            (None, Some(_)) => LowKind::PerChoice,
            (Some(_), None) => LowKind::PerRank,
            (None, None) => return Err(Error::invalid("topk_weights", "absent", "given at dispatch or here")),
            (Some(_), Some(_)) => {
                return Err(Error::invalid("topk_weights", "given twice", "given at dispatch or here"));
            }
        };
        Self::check_weights(topk_weights, routed.topk_idx.len())?;
        self.check_rows("y", y, self.shape().result_bytes(), self.expert_rows())?;
        Ok(kind)
    }

    /// A combine, checked, that keeps what it reads.
    fn combining(
        &self,
        op: u64,
        (y, handle, topk_weights): (&Rows, &LowHandle, Option<&Array<f32>>),
        capture: Option<&Capture>,
    ) -> Result<Combining, Error> {
        self.check_combine(y, handle, topk_weights)?;
        let y = self.keep(y, self.expert_rows())?;
        let sent = self.sent(op, capture);
        Ok(Combining { sent, handle: handle.clone(), topk_weights: topk_weights.cloned(), y })
    }

    fn low_combine_args(combining: &Combining, out: Option<(u64, usize)>) -> args::LowCombine {
        let Inner { routed, records, .. } = &*combining.handle.inner;
        let kind = if combining.topk_weights.is_some() { LowKind::PerChoice } else { LowKind::PerRank };
        let (out, out_stride) = out.unwrap_or((0, 0));
        args::LowCombine {
            y: combining.y.memory.address(),
            y_stride: combining.y.stride as u64,
            records: records.address(),
            topk_idx: routed.topk_idx.address(),
            topk_weights: combining.topk_weights.as_ref().map_or(0, Array::address),
            routed: routed.numbers(),
            out,
            out_stride: out_stride as u64,
            tokens: routed.tokens,
            kind: kind as u32,
            ..args::LowCombine::default()
        }
    }

    /// Lets a graph keep what a combine uses.
    fn keep_combining(&self, capture: Option<&Capture>, combining: &Combining) -> Result<(), Error> {
        self.keep_for(capture, || {
            let weights = combining.topk_weights.as_ref().map(Array::memory);
            let all = [Arc::clone(&combining.y.memory) as _, Arc::clone(&combining.handle.inner) as _];
            all.into_iter().chain(weights).collect()
        })
    }

    /// Enqueues halves of a combine, the receiving one among them.
    async fn low_reduce(
        &mut self,
        combining: &Combining,
        phases: u32,
        in_flight: u32,
        capture: Option<&Capture>,
        x: Option<Rows>,
    ) -> Result<LowCombined<Self>, Error> {
        let bytes = self.shape().result_bytes() as usize;
        let x = match x {
            Some(x) => x,
            None => Rows::new(self.stream(), combining.handle.tokens(), bytes)?,
        };
        let args = Self::low_combine_args(combining, Some((self.address(&x), x.stride())));
        let args = args::LowCombine { phases, in_flight, ..args };
        let event = self.low_half(combining.sent.op, capture.is_some(), |device| device.low_combine(args)).await?;
        self.low.flights(capture).received += 1;
        self.keep_combining(capture, combining)?;
        self.keep_for(capture, || vec![x.memory()])?;
        Ok(LowCombined { x, event })
    }

    /// The receiving half of a dispatch, into memory of the caller's where he gives some.
    pub(super) async fn low_receive(
        &mut self,
        dispatching: &Dispatching,
        places: Option<&LowPlaces>,
    ) -> Result<LowReceived<Self>, Error> {
        let capture = self.low_begin()?;
        let capture = capture.as_ref();
        let Dispatching { sent, routed, x } = dispatching;
        let in_flight = self.check_receive(sent, capture)?;
        let landing = places.map_or_else(|| self.low_landing(), |places| self.low_landing_at(places))?;
        let args = self.low_dispatch_args(routed, None, x, Some(&landing));
        let args = args::LowDispatch { phases: LOW_RECEIVE, in_flight, ..args };
        let event = self.low_half(sent.op, capture.is_some(), |device| device.low_dispatch(args)).await?;
        self.low_received((sent, x), routed, landing, event, capture)
    }

    /// The receiving half of a combine, into rows of the caller's where he gives some.
    pub(super) async fn low_receive_sums(
        &mut self,
        combining: &Combining,
        x: Option<Rows>,
    ) -> Result<LowCombined<Self>, Error> {
        let capture = self.low_begin()?;
        let in_flight = self.check_receive(&combining.sent, capture.as_ref())?;
        self.low_reduce(combining, LOW_RECEIVE, in_flight, capture.as_ref(), x).await
    }

    /// Both halves of a dispatch, in one launch where nothing is in flight; into memory of the caller's where he gives some.
    pub(super) async fn low_dispatch_at_once(
        &mut self,
        x: &Rows,
        routing: &LowRoutingOf<Self>,
        places: Option<&LowPlaces>,
    ) -> Result<LowReceived<Self>, Error> {
        let capture = self.low_begin()?;
        let capture = capture.as_ref();
        let (op, in_flight) = self.check_send(capture)?;
        if in_flight > 0 {
            let sent = self.send_dispatch(x, routing).await?;
            return self.low_receive(&sent, places).await;
        }
        let routed = Arc::new(self.routed(x, routing)?);
        let x = self.keep(x, routed.tokens)?;
        let landing = places.map_or_else(|| self.low_landing(), |places| self.low_landing_at(places))?;
        let args = self.low_dispatch_args(&routed, Some(&routing.topk_idx), &x, Some(&landing));
        let args = args::LowDispatch { phases: LOW_SEND | LOW_RECEIVE, in_flight, ..args };
        let half = self.low_half(op, capture.is_some(), |device| device.low_dispatch(args)).await;
        // What failed in receiving was sent.
        if half.as_ref().err().is_none_or(|error| error.failure().is_some()) {
            self.low.flights(capture).sent = op;
        }
        let event = half.map_err(|error| self.name_choices(&routing.topk_idx, error))?;
        let sent = self.sent(op, capture);
        self.low_received((&sent, &x), &routed, landing, event, capture)
    }

    /// Both halves of a combine, in one launch where nothing is in flight; into rows of the caller's where he gives some.
    pub(super) async fn low_combine_at_once(
        &mut self,
        y: &Rows,
        handle: &LowHandle,
        topk_weights: Option<&Array<f32>>,
        x: Option<Rows>,
    ) -> Result<LowCombined<Self>, Error> {
        let capture = self.low_begin()?;
        let capture = capture.as_ref();
        let (op, in_flight) = self.check_send(capture)?;
        if in_flight > 0 {
            let sent = self.send_combine(y, handle, topk_weights).await?;
            return self.receive_combine(&sent).await;
        }
        let combining = self.combining(op, (y, handle, topk_weights), capture)?;
        let reduced = self.low_reduce(&combining, LOW_SEND | LOW_RECEIVE, in_flight, capture, x).await;
        if reduced.as_ref().err().is_none_or(|error| error.failure().is_some()) {
            self.low.flights(capture).sent = op;
        }
        reduced
    }
}

impl LowLatency for CudaEndpoint {
    type LowHandle = LowHandle;
    type Dispatching = Dispatching;
    type Combining = Combining;

    async fn send_dispatch(&mut self, x: &Rows, routing: &LowRoutingOf<Self>) -> Result<Dispatching, Error> {
        let capture = self.low_begin()?;
        let capture = capture.as_ref();
        let (op, in_flight) = self.check_send(capture)?;
        let routed = Arc::new(self.routed(x, routing)?);
        let x = self.keep(x, routed.tokens)?;
        let args = self.low_dispatch_args(&routed, Some(&routing.topk_idx), &x, None);
        let args = args::LowDispatch { phases: LOW_SEND, in_flight, ..args };
        let half = self.low_half(op, capture.is_some(), |device| device.low_dispatch(args)).await;
        half.map_err(|error| self.name_choices(&routing.topk_idx, error))?;
        self.low.flights(capture).sent = op;
        self.keep_for(capture, || vec![Arc::clone(&x.memory) as _, Arc::clone(&routed) as _])?;
        Ok(Dispatching { sent: self.sent(op, capture), routed, x })
    }

    async fn receive_dispatch(&mut self, dispatching: &Dispatching) -> Result<LowReceived<Self>, Error> {
        self.low_receive(dispatching, None).await
    }

    async fn send_combine(
        &mut self,
        y: &Rows,
        handle: &LowHandle,
        topk_weights: Option<&Array<f32>>,
    ) -> Result<Combining, Error> {
        let capture = self.low_begin()?;
        let capture = capture.as_ref();
        let (op, in_flight) = self.check_send(capture)?;
        let combining = self.combining(op, (y, handle, topk_weights), capture)?;
        let args = args::LowCombine { phases: LOW_SEND, in_flight, ..Self::low_combine_args(&combining, None) };
        self.low_half(op, capture.is_some(), |device| device.low_combine(args)).await?;
        self.low.flights(capture).sent = op;
        self.keep_combining(capture, &combining)?;
        Ok(combining)
    }

    async fn receive_combine(&mut self, combining: &Combining) -> Result<LowCombined<Self>, Error> {
        self.low_receive_sums(combining, None).await
    }

    /// Both halves of a dispatch, in one launch where nothing is in flight.
    async fn low_latency_dispatch(
        &mut self,
        x: &Rows,
        routing: &LowRoutingOf<Self>,
    ) -> Result<LowReceived<Self>, Error> {
        self.low_dispatch_at_once(x, routing, None).await
    }

    /// Both halves of a combine, in one launch where nothing is in flight.
    async fn low_latency_combine(
        &mut self,
        y: &Rows,
        handle: &LowHandle,
        topk_weights: Option<&Array<f32>>,
    ) -> Result<LowCombined<Self>, Error> {
        self.low_combine_at_once(y, handle, topk_weights, None).await
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
        self.layout().check_low_latency()?;
        self.stream().must_run("a mask")?;
        self.device.low_mask(rank)?;
        self.low.mask.insert(rank);
        Ok(())
    }
}
