//! Low latency: fixed slots in two banks, sending and receiving apart.
//!
//! Everything is checked and enqueued; nothing of the routing comes to the host. Each half is a launch of a kernel that reads the number
//! of its operation from the device. With [`wait_for_kernels`](crate::Builder::wait_for_kernels) a half ends when its kernel has,
//! so that its failure is its own: the user may mask the peer that it names and receive again. Without, a failure is told by
//! the next call, and poisons the communicator: what was enqueued behind it did nothing. A call that waits behind such a one, or
//! behind a graph, tells the two apart: its kernel has reported by itself, or found that an earlier one had.
//!
//! Halves may be captured into CUDA graphs ([`super::graphs`]). A capture counts its operations for itself, from nothing in flight; the
//! kernels see that this is so when it is replayed.
//!
//! An operation that was dropped is skipped by the next call of low latency ([`LowLatency`]), in which it takes a launch of its own. One
//! whose rows lay in memory of the caller's, and which has a peer that was late, cannot be: that poisons the communicator.
//!
//! Rows may be consumed, and results made, while a half runs: [`early`].
//!
//! Rows are read from the user's memory by the sending half, and once more by the receiving half where a peer was late: the operation
//! keeps that memory from being given back, but not from being written to. Write to it after the receiving half only.

mod combine;
mod dispatch;
mod early;
mod flights;

use std::any::Any;
use std::sync::Arc;

use ep_core::engine::Mark;
use ep_core::engine::low_latency::{LowCombined, LowOrder, LowReceived, LowRoutingOf};
use ep_core::{Error, LowLatency, Rank, RankSet};

use super::report;
use super::{Array, CudaEndpoint, Event, Rows, ScaleStrides};
use crate::driver::{Capture, Scratch};
use crate::error::CudaError;
use crate::rank::RankDevice;
pub use combine::Combining;
pub use dispatch::Dispatching;
pub use early::{Early, Ready, Signals};
pub(super) use flights::Low;

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

    /// `[tokens, topk]`: the choices of this rank's batch, as they were sent, unless the caller has written to an array of the endpoint's since.
    pub fn topk_idx(&self) -> &Array<i64> {
        &self.inner.routed.topk_idx
    }

    /// How the received rows lie.
    pub fn order(&self) -> LowOrder {
        self.inner.routed.order
    }
}

#[derive(Debug)]
struct Inner {
    mark: Mark,
    routed: Arc<Routed>,
    /// What the receiver keeps of each row: `ep_low_record`.
    records: Scratch,
    /// What the rows were counted in.
    early: Option<Early>,
}

/// Where this rank's own tokens went.
#[derive(Debug)]
struct Routed {
    tokens: u32,
    /// The endpoint's own: where the user's lie elsewhere, the sending half copies them to here.
    topk_idx: Array<i64>,
    topk_weights: Option<Array<f32>>,
    /// Whether a token may name an expert more than once.
    repeats: bool,
    order: LowOrder,
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
#[derive(Clone, Debug)]
struct Kept {
    memory: Arc<Scratch>,
    stride: usize,
    /// Of coded rows: what their scales lie in, the address of the first, and how they lie.
    scales: Option<(Arc<Scratch>, u64, ScaleStrides)>,
    /// Of a copy what it is made of: a graph makes it anew.
    copied: Option<Arc<dyn Any + Send + Sync>>,
}

impl Kept {
    /// These rows, for a call that comes when the user may have dropped what he gave: not where they are his, unless a graph keeps them.
    fn beyond(&self, capture: Option<&Capture>) -> Option<Self> {
        let foreign = self.memory.is_foreign() || self.scales.as_ref().is_some_and(|(memory, ..)| memory.is_foreign());
        Some(self.clone()).filter(|_| capture.is_some() || !foreign)
    }

    /// What a graph keeps of them.
    fn all(&self) -> impl Iterator<Item = Arc<dyn Any + Send + Sync>> + use<> {
        let scales = self.scales.as_ref().map(|(memory, ..)| Arc::clone(memory) as _);
        [Arc::clone(&self.memory) as _].into_iter().chain(scales).chain(self.copied.clone())
    }
}

impl CudaEndpoint {
    /// Rows of all local experts.
    fn expert_rows(&self) -> Result<u32, Error> {
        self.layout().low_expert_rows()
    }

    /// Refuses to start while poisoned, and tells of what kernels of low latency have reported since. The capture that the call goes
    /// to.
    fn low_begin(&mut self) -> Result<Option<Capture>, Error> {
        let capture = self.begin()?;
        let Some(error) = self.low_failure() else { return Ok(capture) };
        let op = self.low.next();
        let fallback = self.desk.abandoned(op);
        self.desk.set_poisoned(Some(error.failure().copied().unwrap_or(fallback)));
        Err(error)
    }

    /// What kernels of low latency have reported, and no call has told.
    pub(super) fn low_failure(&self) -> Option<Error> {
        self.device.low_reported(self.desk.rank())
    }

    /// Whether the launch that ended last found that an earlier one had failed.
    fn low_did_nothing(&self) -> bool {
        self.device.low_report().is_some_and(|report| report::read(report).behind != 0)
    }

    /// Refuses weights that are not one for each choice, or lie elsewhere.
    fn check_weights(&self, weights: Option<&Array<f32>>, choices: usize) -> Result<(), Error> {
        self.desk.check_weights(weights.map(Array::len), choices)?;
        weights.map_or(Ok(()), |weights| weights.check_home("topk_weights", self.stream()))
    }

    /// The memory of rows, so that it is not given back. Leased rows may be granted to others: they are copied.
    fn keep(&self, rows: &Rows, count: u32) -> Result<Kept, Error> {
        let stride = rows.stride();
        if let Rows::Owned(owned) = rows {
            return Ok(Kept { memory: Arc::clone(owned.memory()), stride, scales: None, copied: None });
        }
        let memory = Arc::new(Scratch::of(self.stream(), count as usize, stride)?);
        let (to, from) = ((memory.address(), stride), (self.address(rows), stride));
        // SAFETY: the caller has checked that there are so many rows, of this endpoint's window; a capture's callers keep both.
        unsafe { self.stream().copy_rows(to, from, stride, count as usize) }?;
        Ok(Kept { memory, stride, scales: None, copied: Some(rows.memory()) })
    }

    /// The same of rows that are given as they travel.
    fn keep_coded(&self, rows: &Rows, count: u32) -> Result<Kept, Error> {
        let (stride, (scales, strides)) = (rows.stride(), self.scales(rows));
        match rows {
            _ if scales == 0 => self.keep(rows, count),
            Rows::Owned(owned) => {
                let memory = Arc::clone(owned.memory());
                Ok(Kept { scales: Some((Arc::clone(&memory), scales, strides)), memory, stride, copied: None })
            }
            Rows::Apart(apart) => {
                let [memory, scaled] = apart.memory();
                Ok(Kept { memory, stride, scales: Some((scaled, scales, strides)), copied: None })
            }
            Rows::Leased(_) => {
                let format = *self.layout().row();
                let words = format.scales_stride() as usize;
                let memory = Arc::new(Scratch::of(self.stream(), count as usize, stride + words)?);
                let behind = memory.address() + (count as usize * stride) as u64;
                let from = (self.address(rows), stride);
                // SAFETY: as in `keep`; there is room for codes, and for scales behind them.
                unsafe {
                    self.stream().copy_rows((memory.address(), stride), from, stride, count as usize)?;
                    self.stream().copy_rows((behind, words), (scales, strides.row as usize), words, count as usize)?;
                }
                let dense = ScaleStrides::dense(words as u64);
                Ok(Kept {
                    scales: Some((Arc::clone(&memory), behind, dense)),
                    memory,
                    stride,
                    copied: Some(rows.memory()),
                })
            }
        }
    }

    /// Enqueues halves of operation `op`.
    async fn low_half(
        &mut self,
        op: u64,
        captured: bool,
        launch: impl FnOnce(&RankDevice) -> Result<(), CudaError>,
    ) -> Result<Event, Error> {
        self.low_half_awaited(op, captured, self.wait_for_kernels, launch).await
    }

    /// The same; `waits`: until they have ended.
    async fn low_half_awaited(
        &mut self,
        op: u64,
        captured: bool,
        waits: bool,
        launch: impl FnOnce(&RankDevice) -> Result<(), CudaError>,
    ) -> Result<Event, Error> {
        if captured {
            launch(&self.device)?;
            return Ok(Event(Arc::new(self.device.stream.record(false)?)));
        }
        self.desk.set_poisoned(Some(self.desk.abandoned(op)));
        launch(&self.device)?;
        let event = Event(Arc::new(self.device.stream.record(false)?));
        if waits {
            self.ended(&event).await?;
            if let Some(error) = self.low_failure() {
                if self.low_did_nothing() {
                    self.desk.set_poisoned(Some(error.failure().copied().unwrap_or(self.desk.abandoned(op))));
                    return Err(error);
                }
                self.device.low_resume()?;
                self.desk.set_poisoned(None);
                self.low.failed = error.failure().map(|failure| failure.culprit).or(self.low.failed);
                tracing::warn!(%error, "low-latency operation failed");
                return Err(error);
            }
        }
        self.desk.set_poisoned(None);
        Ok(event)
    }
}

impl LowLatency for CudaEndpoint {
    type LowHandle = LowHandle;
    type Dispatching = Dispatching;
    type Combining = Combining;

    async fn send_dispatch(&mut self, x: &Rows, routing: &LowRoutingOf<Self>) -> Result<Dispatching, Error> {
        self.low_send_dispatch(x, routing, None).await
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
        self.low_send_combine(y, handle, topk_weights, None).await
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
        self.low_dispatch_at_once(x, routing, None, false).await
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

    fn check_at_once(&mut self) -> Result<(), Error> {
        let capture = self.low_begin()?;
        self.check_both(capture.as_ref()).map(drop)
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
        self.stream().must_run("a mask")?;
        self.device.low_mask(rank)?;
        self.low.mask.insert(rank);
        Ok(())
    }
}
