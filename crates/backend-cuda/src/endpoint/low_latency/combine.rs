//! Low latency: a combine, its halves apart and at once.

use std::sync::Arc;

use ep_core::engine::low_latency::LowCombined;
use ep_core::layout::LowKind;
use ep_core::{Endpoint as _, Error};

use super::super::rows::stride;
use super::super::{Array, CudaEndpoint, Rows};
use super::flights::Sent;
use super::{Inner, Kept, LowHandle};
use crate::args;
use crate::driver::{Capture, Scratch};
use crate::rank::{LOW_RECEIVE, LOW_SEND};

/// A low-latency combine that was sent and is to be received.
#[derive(Debug)]
pub struct Combining {
    sent: Sent,
    handle: LowHandle,
    /// `[tokens, topk]`: given with the combine.
    topk_weights: Option<Array<f32>>,
    y: Kept,
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

    /// Checks a combine; which form it has.
    fn check_combine(&self, y: &Rows, handle: &LowHandle, topk_weights: Option<&Array<f32>>) -> Result<LowKind, Error> {
        let Inner { mark, routed, .. } = &*handle.inner;
        mark.check("handle", &self.mark())?;
        let kind = LowKind::of_weights(routed.topk_weights.is_some(), topk_weights.is_some())?;
        Self::check_weights(topk_weights, routed.topk_idx.len())?;
        self.check_results("y", y, self.expert_rows())?;
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

    /// The sending half.
    pub(super) async fn low_send_combine(
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

    /// The receiving half of a combine, into rows of the caller's where he gives some.
    pub(in crate::endpoint) async fn low_receive_sums(
        &mut self,
        combining: &Combining,
        x: Option<Rows>,
    ) -> Result<LowCombined<Self>, Error> {
        let capture = self.low_begin()?;
        let in_flight = self.check_receive(&combining.sent, capture.as_ref())?;
        self.low_reduce(combining, LOW_RECEIVE, in_flight, capture.as_ref(), x).await
    }

    /// Both halves of a combine, in one launch where nothing is in flight; into rows of the caller's where he gives some.
    pub(in crate::endpoint) async fn low_combine_at_once(
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
            let sent = self.low_send_combine(y, handle, topk_weights).await?;
            return self.low_receive_sums(&sent, None).await;
        }
        let combining = self.combining(op, (y, handle, topk_weights), capture)?;
        let reduced = self.low_reduce(&combining, LOW_SEND | LOW_RECEIVE, in_flight, capture, x).await;
        if reduced.as_ref().err().is_none_or(|error| error.failure().is_some()) {
            self.low.flights(capture).sent = op;
        }
        reduced
    }
}
