//! Low latency: a combine, its halves apart and at once.

use std::sync::Arc;

use ep_core::engine::low_latency::LowCombined;
use ep_core::layout::LowKind;
use ep_core::{Endpoint as _, Error};

use super::super::rows::stride;
use super::super::{Array, CudaEndpoint, Event, Owned, Rows};
use super::early::{Awaited, Ready};
use super::flights::{Sent, Work, in_flight};
use super::{Inner, Kept, LowHandle};
use crate::args;
use crate::args::{LOW_RECEIVE, LOW_SEND};
use crate::driver::{Capture, Scratch};
use crate::error::CudaError;
use crate::rank::RankDevice;

/// A low-latency combine that was sent and is to be received. Dropped, it is skipped by the next call.
#[derive(Debug)]
pub struct Combining {
    sent: Sent,
    sums: Checked,
}

/// A combine whose input was checked.
#[derive(Debug)]
struct Checked {
    handle: LowHandle,
    /// `[tokens, topk]`: given with the combine.
    topk_weights: Option<Array<f32>>,
    y: Kept,
    /// When they are ready, if they are still being made.
    ready: Option<Awaited>,
}

/// A combine to be skipped.
#[derive(Clone, Debug)]
pub(in crate::endpoint) struct Sums {
    handle: LowHandle,
    kind: LowKind,
    /// The experts' results, unless they were the caller's.
    y: Option<Kept>,
}

impl Sums {
    fn new(checked: &Checked, capture: Option<&Capture>) -> Self {
        Self { handle: checked.handle.clone(), kind: checked.kind(), y: checked.y.beyond(capture) }
    }

    pub(super) const fn is_whole(&self) -> bool {
        self.y.is_some()
    }
}

impl Checked {
    const fn kind(&self) -> LowKind {
        if self.topk_weights.is_some() { LowKind::PerChoice } else { LowKind::PerRank }
    }

    fn args(&self, out: Option<(u64, usize)>) -> args::LowCombine {
        let args = args_of(&self.handle, self.kind(), self.topk_weights.as_ref(), Some(&self.y), out);
        Awaited::args(self.ready.as_ref(), args)
    }
}

fn args_of(
    handle: &LowHandle,
    kind: LowKind,
    topk_weights: Option<&Array<f32>>,
    y: Option<&Kept>,
    out: Option<(u64, usize)>,
) -> args::LowCombine {
    let Inner { routed, records, .. } = &*handle.inner;
    let (out, out_stride) = out.unwrap_or((0, 0));
    args::LowCombine {
        y: y.map_or(0, |y| y.memory.address()),
        y_stride: y.map_or(0, |y| y.stride as u64),
        records: records.address(),
        topk_idx: routed.topk_idx.address(),
        topk_weights: topk_weights.map_or(0, Array::address),
        routed: routed.numbers(),
        out,
        out_stride: out_stride as u64,
        tokens: routed.tokens,
        kind: kind as u32,
        repeats: routed.repeats.into(),
        ..args::LowCombine::default()
    }
}

/// Enqueues halves of a combine.
///
/// # Safety
/// As [`RankDevice`] says of `args`.
unsafe fn launch(
    args: args::LowCombine,
    multiprocessors: Option<u32>,
) -> impl FnOnce(&RankDevice) -> Result<(), CudaError> {
    // SAFETY: as the caller promises.
    move |device| unsafe { device.low_combine(args, multiprocessors) }
}

impl CudaEndpoint {
    /// A buffer `[local experts, ranks * max_tokens, hidden]` bf16 for the experts' results: the same memory each time, taken at the
    /// first request. A combine reads results where they lie, so none of them is ever copied; this one is for frameworks
    /// that ask for such a buffer. What it held is overwritten once the combine of it was received.
    ///
    /// # Errors
    /// [`Error::Unsupported`] without room for low latency, [`Error::Broken`] for want of memory.
    pub fn low_latency_combine_buffer(&mut self) -> Result<Rows, Error> {
        let (rows, row_bytes) = (self.expert_rows()?, self.shape().result_bytes() as usize);
        let memory = match &self.low.buffer {
            Some(memory) => Arc::clone(memory),
            None => Arc::new(Scratch::of(self.stream(), rows as usize, stride(row_bytes))?),
        };
        self.low.buffer = Some(Arc::clone(&memory));
        Ok(Rows::Owned(Owned::new(memory, rows, row_bytes)))
    }

    /// Checks a combine, and keeps what it reads.
    fn check_combine(
        &self,
        y: &Rows,
        handle: &LowHandle,
        topk_weights: Option<&Array<f32>>,
        ready: Option<&Ready>,
    ) -> Result<Checked, Error> {
        let Inner { mark, routed, .. } = &*handle.inner;
        mark.check("handle", &self.desk.mark())?;
        routed.order.combine(self.layout(), routed.topk_weights.is_some(), topk_weights.is_some())?;
        self.check_weights(topk_weights, routed.topk_idx.len())?;
        let rows = routed.order.rows(self.layout())?;
        self.check_results("y", y, rows)?;
        let ready = ready.map(|ready| self.awaited(handle, ready)).transpose()?;
        if ready.is_some() && !matches!(y, Rows::Owned(_)) {
            // They would be copied, before they are there.
            return Err(Error::invalid("y", "rows in the arena, still to be made", "rows in memory of their own"));
        }
        let y = self.keep(y, rows)?;
        Ok(Checked { handle: handle.clone(), topk_weights: topk_weights.cloned(), y, ready })
    }

    /// Where the sums of `handle`'s tokens go: to the caller's rows, where he gives some that have room for them.
    fn sums_into(&self, handle: &LowHandle, x: Option<Rows>) -> Result<Rows, Error> {
        let Some(x) = x else {
            return Rows::new(self.stream(), handle.tokens(), self.shape().result_bytes() as usize);
        };
        self.check_results("x to write", &x, handle.tokens())?;
        Ok(x)
    }

    /// Lets a graph keep what a combine uses.
    fn keep_combining(&self, capture: Option<&Capture>, sums: &Checked) -> Result<(), Error> {
        self.keep_for(capture, || {
            let weights = sums.topk_weights.as_ref().map(Array::memory);
            let handle = [Arc::clone(&sums.handle.inner) as _];
            sums.y.all().chain(handle).chain(weights).chain(sums.ready.as_ref().map(Awaited::memory)).collect()
        })
    }

    /// A combine was received.
    fn low_combined(
        &mut self,
        sums: &Checked,
        (x, event): (Rows, Event),
        capture: Option<&Capture>,
    ) -> Result<LowCombined<Self>, Error> {
        self.low.flights(capture).receive();
        self.keep_combining(capture, sums)?;
        self.keep_for(capture, || vec![x.memory()])?;
        Ok(LowCombined { x, event })
    }

    /// The sending half.
    pub(super) async fn low_send_combine(
        &mut self,
        y: &Rows,
        handle: &LowHandle,
        topk_weights: Option<&Array<f32>>,
        ready: Option<&Ready>,
    ) -> Result<Combining, Error> {
        let capture = self.low_begin()?;
        let capture = capture.as_ref();
        let op = self.check_send(capture)?;
        let sums = self.check_combine(y, handle, topk_weights, ready)?;
        self.skip(capture).await?;
        let in_flight = in_flight(self.low.flights(capture));
        let args = args::LowCombine { phases: LOW_SEND, in_flight, ..sums.args(None) };
        let few = sums.ready.as_ref().and_then(|ready| ready.multiprocessors);
        // SAFETY: results, weights, sums and what the handle keeps are memory of the own stream's, for all rows and tokens of the handle.
        let half = self.low_half(op, capture.is_some(), unsafe { launch(args, few) }).await;
        // Results that were never ready were sent in part: no other call may take the operation's number.
        half.map_err(|error| if ready.is_some() { self.fail(error) } else { error })?;
        let sent = self.sent(Work::Combine(Sums::new(&sums, capture)), capture);
        self.keep_combining(capture, &sums)?;
        Ok(Combining { sent, sums })
    }

    /// The receiving half of a combine, into rows of the caller's where he gives some.
    pub(in crate::endpoint) async fn low_receive_sums(
        &mut self,
        combining: &Combining,
        x: Option<Rows>,
    ) -> Result<LowCombined<Self>, Error> {
        let capture = self.low_begin()?;
        let capture = capture.as_ref();
        let Combining { sent, sums } = combining;
        self.check_receive(sent, capture)?;
        let x = self.sums_into(&sums.handle, x)?;
        self.skip(capture).await?;
        let in_flight = in_flight(self.low.flights(capture));
        let args = sums.args(Some((self.address(&x), x.stride())));
        let args = args::LowCombine { phases: LOW_RECEIVE, in_flight, ..args };
        // SAFETY: as in the sending half.
        let event = self.low_half(sent.op(), capture.is_some(), unsafe { launch(args, None) }).await?;
        self.low_combined(sums, (x, event), capture)
    }

    /// Both halves of a combine, in one launch; into rows of the caller's where he gives some.
    pub(in crate::endpoint) async fn low_combine_at_once(
        &mut self,
        y: &Rows,
        handle: &LowHandle,
        topk_weights: Option<&Array<f32>>,
        x: Option<Rows>,
    ) -> Result<LowCombined<Self>, Error> {
        let capture = self.low_begin()?;
        let capture = capture.as_ref();
        let op = self.check_both(capture)?;
        let sums = self.check_combine(y, handle, topk_weights, None)?;
        let x = self.sums_into(handle, x)?;
        self.skip(capture).await?;
        let args = sums.args(Some((self.address(&x), x.stride())));
        let args = args::LowCombine { phases: LOW_SEND | LOW_RECEIVE, ..args };
        // SAFETY: as in the sending half.
        let half = self.low_half(op, capture.is_some(), unsafe { launch(args, None) }).await;
        if let Err(error) = &half
            && error.failure().is_none()
        {
            return Err(error.clone());
        }
        // What failed in receiving was sent; it is dropped here, and so skipped by the next call.
        let _sent = self.sent(Work::Combine(Sums::new(&sums, capture)), capture);
        self.low_combined(&sums, (x, half?), capture)
    }

    /// Receives a combine that was dropped into memory of nobody's.
    pub(super) async fn skip_combine(&mut self, op: u64, sums: &Sums, capture: Option<&Capture>) -> Result<(), Error> {
        let Sums { handle, kind, y } = sums;
        let x = self.sums_into(handle, None)?;
        // Any weights do for sums that nobody sees.
        let weights = match kind {
            LowKind::PerChoice => Some(Array::new(self.stream(), handle.inner.routed.topk_idx.len())?),
            LowKind::Dispatch | LowKind::PerRank => None,
        };
        let args = args_of(handle, *kind, weights.as_ref(), y.as_ref(), Some((self.address(&x), x.stride())));
        let in_flight = in_flight(self.low.flights(capture));
        let args = args::LowCombine { phases: LOW_RECEIVE, in_flight, ..args };
        // SAFETY: as in the sending half.
        self.low_half(op, capture.is_some(), unsafe { launch(args, None) }).await?;
        self.keep_for(capture, || {
            let kept = [x.memory(), Arc::clone(&handle.inner) as _];
            let y = y.iter().flat_map(Kept::all);
            kept.into_iter().chain(weights.iter().map(Array::memory)).chain(y).collect()
        })
    }
}
