//! Rows of a low-latency dispatch that are consumed as they come, and results that a combine reads as they are ready; on one node.
//!
//! The sending half of such a dispatch ([`CudaEndpoint::send_dispatch_early`]) begins a batch of its [`Early`] counters. Whoever is enqueued
//! behind it, on any stream, may run beside the receiving half: it waits for blocks of rows by `expected` and `arrived`, and says by `ready` which
//! blocks of results it has made. [`CudaEndpoint::send_combine_ready`] waits for those.
//!
//! A consumer needs nothing of the host but the addresses, which stay: so captured launches replay. What it must do is in `docs/cuda.md`.

use std::any::Any;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use ep_core::engine::Mark;
use ep_core::engine::low_latency::{LowOrder, LowRoutingOf};
use ep_core::{Endpoint as _, Error, device};

use super::super::{Array, CudaEndpoint, Rows};
use super::{Combining, Dispatching, Inner, LowHandle};
use crate::args;
use crate::driver::Scratch;

/// Counters by which consumers learn of rows as they come. Cheap to clone. Made by [`CudaEndpoint::early`], for any number of batches, one
/// after the other.
///
/// At [`Early::address`] lie u64 `epoch` and `stopped`, then three arrays of u64 `[local experts, blocks]`. A counter has the number of a batch in
/// its high half and a count in its low half; `epoch` is that number, likewise in the high half.
#[derive(Clone, Debug)]
pub struct Early {
    inner: Arc<Counters>,
}

#[derive(Debug)]
struct Counters {
    memory: Arc<Scratch>,
    experts: u32,
    rows: u32,
    blocks: u32,
    multiprocessors: Option<u32>,
    /// Of the last batch that was sent.
    last: Mutex<Weak<Batch>>,
}

impl Early {
    /// Local experts.
    pub fn experts(&self) -> u32 {
        self.inner.experts
    }

    /// Rows of a block; the last block of an expert may have fewer.
    pub fn rows(&self) -> u32 {
        self.inner.rows
    }

    /// Blocks of an expert.
    pub fn blocks(&self) -> u32 {
        self.inner.blocks
    }

    /// Where `epoch` lies: the number of the last batch that was sent.
    pub fn address(&self) -> u64 {
        self.inner.memory.address()
    }

    /// Where `stopped` lies: `epoch` of a batch whose rows do not come, as its launch has failed, or what was sent was dropped.
    pub fn stopped(&self) -> u64 {
        self.address() + std::mem::offset_of!(device::Early, stopped) as u64
    }

    /// Where `arrived` lies, u64 `[local experts, blocks]`: a block's rows are there when it has reached `expected`.
    pub fn arrived(&self) -> u64 {
        self.address() + device::Early::arrived(0) as u64
    }

    /// Where `expected` lies, u64 `[local experts, blocks]`: of the batch as soon as counts are in. `expert_counts` and `segments` are there, too, then.
    pub fn expected(&self) -> u64 {
        self.address() + device::Early::expected(self.counters(), 0) as u64
    }

    /// Where `ready` lies, u64 `[local experts, blocks]`: the consumer adds to it what it has done of a block.
    pub fn ready(&self) -> u64 {
        self.address() + device::Early::ready(self.counters(), 0) as u64
    }

    /// The memory, for those that use it beyond this value's life.
    pub fn memory(&self) -> Arc<dyn Any + Send + Sync> {
        Arc::clone(&self.inner.memory) as _
    }

    /// Multiprocessors of the receiving half.
    pub(super) fn multiprocessors(&self) -> Option<u32> {
        self.inner.multiprocessors
    }

    fn counters(&self) -> usize {
        self.inner.experts as usize * self.inner.blocks as usize
    }

    /// Refuses counters of another endpoint, and such as a batch that was sent still counts.
    pub(super) fn check(&self, endpoint: &CudaEndpoint) -> Result<(), Error> {
        if !Arc::ptr_eq(self.inner.memory.stream(), endpoint.stream()) {
            return Err(Error::invalid("early", "of another endpoint", "one of this endpoint"));
        }
        let last = self.inner.last.lock().unwrap_or_else(PoisonError::into_inner).upgrade();
        // One of before a recovery cannot be received any more.
        let lasts = |batch: &Batch| batch.mark.check("early", &endpoint.desk.mark()).is_ok();
        if last.is_some_and(|batch| !batch.received.load(Ordering::Relaxed) && lasts(&batch)) {
            let limit = "those of a dispatch that was received";
            return Err(Error::invalid("early", "of a dispatch that is still to be received", limit));
        }
        Ok(())
    }

    /// The batch that is sent now.
    pub(super) fn begin(&self, mark: Mark) -> Arc<Batch> {
        let batch = Arc::new(Batch { early: self.clone(), mark, received: AtomicBool::new(false) });
        *self.inner.last.lock().unwrap_or_else(PoisonError::into_inner) = Arc::downgrade(&batch);
        batch
    }
}

/// A batch that early consumers learn of.
#[derive(Debug)]
pub(super) struct Batch {
    pub(super) early: Early,
    mark: Mark,
    received: AtomicBool,
}

impl Batch {
    /// It is over: the counters may count another.
    pub(super) fn receive(&self) {
        self.received.store(true, Ordering::Relaxed);
    }
}

impl Drop for Batch {
    /// Nobody can receive it any more: its consumers are told. Not where the counters count another batch, nor in a capture, whose replays would say it of
    /// the batch that they find.
    fn drop(&mut self) {
        let counters = &*self.early.inner;
        let is_last = std::ptr::eq(counters.last.lock().unwrap_or_else(PoisonError::into_inner).as_ptr(), self);
        let stream = counters.memory.stream();
        if *self.received.get_mut() || !is_last || stream.must_run("telling early consumers").is_err() {
            return;
        }
        // SAFETY: both are words of these counters, which are given back in the order of their stream.
        let told = unsafe { stream.copy_rows((self.early.stopped(), 8), (self.early.address(), 8), 8, 1) };
        if let Err(error) = told {
            tracing::warn!(%error, "consumers of a batch that was dropped were not told");
        }
    }
}

/// What of a launch's arguments says where to count; nothing without `early`.
pub(super) fn counted(args: args::LowDispatch, early: Option<&Early>) -> args::LowDispatch {
    let Some(early) = early else { return args };
    args::LowDispatch { early: early.address(), early_rows: early.rows(), early_blocks: early.blocks(), ..args }
}

/// Which counters say that experts' results are ready.
#[derive(Clone, Debug)]
pub enum Signals {
    /// [`Early::ready`] of the dispatch, which was sent with [`CudaEndpoint::send_dispatch_early`].
    Early,
    /// 32-bit words `[local experts, blocks]`, one for each `rows` rows of an expert; there may be more behind them. The caller clears them.
    Blocks {
        /// The words.
        signals: Array<i32>,
        /// Rows of a block.
        rows: u32,
    },
    /// 32-bit words `[local experts]`. The caller clears them.
    Experts(Array<i32>),
}

/// When a combine may read which results.
#[derive(Clone, Debug)]
pub struct Ready {
    /// The counters.
    pub signals: Signals,
    /// What the counter of a block reaches when its results are ready: of [`Signals::Early`] how much is added for each batch. At least 1.
    /// Blocks without rows need nothing.
    pub due: u32,
    /// Multiprocessors of the sending half, at most: the kernel that makes the results needs the others.
    pub multiprocessors: Option<u32>,
}

/// Readiness that was checked.
#[derive(Clone, Debug)]
pub(super) struct Awaited {
    counters: u64,
    epoch: u64,
    due: u32,
    rows: u32,
    blocks: u32,
    pub(super) multiprocessors: Option<u32>,
    /// Keeps the counters.
    memory: Arc<dyn Any + Send + Sync>,
}

impl Awaited {
    pub(super) fn memory(&self) -> Arc<dyn Any + Send + Sync> {
        Arc::clone(&self.memory)
    }

    pub(super) fn args(ready: Option<&Self>, args: args::LowCombine) -> args::LowCombine {
        let Some(ready) = ready else { return args };
        args::LowCombine {
            ready: ready.counters,
            ready_epoch: ready.epoch,
            ready_due: ready.due,
            ready_rows: ready.rows,
            ready_blocks: ready.blocks,
            ..args
        }
    }
}

impl CudaEndpoint {
    /// Counters for dispatches whose rows are consumed as they come, in blocks of `rows` rows of an expert. `multiprocessors`: how many the receiving
    /// half takes at most; where it takes all, a consumer begins when it ends.
    ///
    /// # Errors
    /// [`Error::Unsupported`] without room for low latency, over several nodes, and in a capture; [`Error::Invalid`] for `rows` or multiprocessors that are 0;
    /// [`Error::Broken`] for want of memory.
    pub fn early(&self, rows: u32, multiprocessors: Option<u32>) -> Result<Early, Error> {
        self.check_early()?;
        self.stream().must_run("making counters of early consumers")?;
        let (experts, room) = (self.layout().local_experts(), self.expert_room());
        check_rows(rows)?;
        check_multiprocessors(multiprocessors)?;
        let blocks = room.div_ceil(rows);
        let memory = Scratch::new(self.stream(), device::Early::bytes(experts as usize * blocks as usize))?;
        // SAFETY: the stream is not captured.
        unsafe { memory.fill(0) }?;
        let memory = Arc::new(memory);
        let last = Mutex::new(Weak::new());
        Ok(Early { inner: Arc::new(Counters { memory, experts, rows, blocks, multiprocessors, last }) })
    }

    /// [`send_dispatch`](ep_core::LowLatency::send_dispatch) of a batch whose rows are counted in `early` while
    /// [`receive_dispatch`](ep_core::LowLatency::receive_dispatch) brings them. Consumers are enqueued behind this call, and end before the next with the
    /// same counters.
    ///
    /// # Errors
    /// Those of `send_dispatch`, and [`Error::Invalid`] for counters of another endpoint, or of a dispatch that is still to be received.
    pub async fn send_dispatch_early(
        &mut self,
        x: &Rows,
        routing: &LowRoutingOf<Self>,
        early: &Early,
    ) -> Result<Dispatching, Error> {
        self.low_send_dispatch(x, routing, Some(early)).await
    }

    /// [`send_combine`](ep_core::LowLatency::send_combine) of results that are still being made: each is read when it is ready. The signals stay until the
    /// receiving half has ended. With [`Builder::wait_for_kernels`](crate::Builder::wait_for_kernels) what makes the results is enqueued before this call,
    /// which waits for them.
    ///
    /// # Errors
    /// Those of `send_combine`, and [`Error::Invalid`] for signals that are too few, or do not belong to the handle's dispatch. Results that are not ready in
    /// time are a failure of this call, with [`Builder::wait_for_kernels`](crate::Builder::wait_for_kernels), or told by the next one: it names
    /// [`Phase::Results`](ep_core::Phase::Results), and poisons the communicator.
    pub async fn send_combine_ready(
        &mut self,
        y: &Rows,
        handle: &LowHandle,
        topk_weights: Option<&Array<f32>>,
        ready: &Ready,
    ) -> Result<Combining, Error> {
        self.low_send_combine(y, handle, topk_weights, Some(ready)).await
    }

    /// Rows of a local expert that there is room for.
    fn expert_room(&self) -> u32 {
        self.topology().ranks() * self.shape().max_tokens()
    }

    fn check_early(&self) -> Result<(), Error> {
        self.layout().check_low_latency()?;
        if self.topology().nodes() > 1 {
            return Err(Error::unsupported("early consumers", "ranks of one node"));
        }
        Ok(())
    }

    /// Checks when results are ready.
    pub(super) fn awaited(&self, handle: &LowHandle, ready: &Ready) -> Result<Awaited, Error> {
        self.check_early()?;
        check_order(handle.order())?;
        let (experts, room) = (self.layout().local_experts(), self.expert_room());
        if ready.due == 0 {
            return Err(Error::invalid("value of a ready signal", 0, "at least 1"));
        }
        check_multiprocessors(ready.multiprocessors)?;
        let (due, multiprocessors) = (ready.due, ready.multiprocessors);
        let words = |signals: &Array<i32>, rows: u32, blocks: u32| {
            signals.check_home("ready signals", self.stream())?;
            let least = experts as usize * blocks as usize;
            if signals.len() < least {
                let limit = format_args!("at least {least}, {blocks} for each of {experts} local experts");
                return Err(Error::invalid("number of ready signals", signals.len(), limit));
            }
            let (counters, memory) = (signals.address(), signals.memory());
            Ok(Awaited { counters, epoch: 0, due, rows, blocks, multiprocessors, memory })
        };
        match &ready.signals {
            Signals::Early => {
                let Inner { early: Some(early), .. } = &*handle.inner else {
                    return Err(Error::invalid("handle", "of a dispatch without early counters", "one with them"));
                };
                Ok(Awaited {
                    counters: early.ready(),
                    epoch: early.address() + std::mem::offset_of!(device::Early, epoch) as u64,
                    due,
                    rows: early.rows(),
                    blocks: early.blocks(),
                    multiprocessors,
                    memory: early.memory(),
                })
            }
            Signals::Blocks { signals, rows } => {
                check_rows(*rows)?;
                words(signals, *rows, room.div_ceil(*rows))
            }
            Signals::Experts(signals) => words(signals, room, 1),
        }
    }
}

/// Rows by source are of no one expert: none of them is ready, or complete, by an expert's blocks.
pub(super) fn check_order(order: LowOrder) -> Result<(), Error> {
    match order {
        LowOrder::ByExpert => Ok(()),
        LowOrder::BySource => Err(Error::unsupported("early consumers of rows by source", "rows by expert")),
        LowOrder::Packed { .. } => Err(Error::unsupported("early consumers of packed rows", "rows by expert")),
    }
}

/// There may be more than an expert has room for: then all its rows are one block.
fn check_rows(rows: u32) -> Result<(), Error> {
    if rows == 0 {
        return Err(Error::invalid("rows of a block", 0, "at least 1"));
    }
    Ok(())
}

fn check_multiprocessors(multiprocessors: Option<u32>) -> Result<(), Error> {
    if multiprocessors == Some(0) {
        return Err(Error::invalid("multiprocessors", 0, "at least 1"));
    }
    Ok(())
}
