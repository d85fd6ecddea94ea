//! Low latency, within a server and between servers: fixed slots in two banks, sending and receiving apart.
//!
//! Each half is a launch, which the call waits for. A peer that fails fails nothing but what involves it: a sending half leaves out a rank
//! whose bank is not free in time, and the receiving half tries again. For that it reads the rows once more: write to them after the
//! receiving half only.
//!
//! | half | kernels |
//! |---|---|
//! | a dispatch is sent, received | positions, send; receive |
//! | a combine is sent, received | return; reduce |
//! | a rank is masked | tell |
//!
//! For rows of FP8 there are no instructions: they are refused by name.

mod combine;
mod dispatch;
mod halves;

use std::sync::Arc;

use ep_core::engine::Mark;
use ep_core::engine::low_latency::{Flight, LowCombined, LowReceived, LowRoutingOf};
use ep_core::{Endpoint as _, Error, LowLatency, Rank, RankSet};

use super::{Array, AscendEndpoint, Rows};
pub(super) use halves::LowHalves;
use halves::Work;

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

    /// `[tokens, topk]`: the choices of this rank's batch.
    pub fn topk_idx(&self) -> &Array<i64> {
        &self.inner.routed.topk_idx
    }
}

#[derive(Debug)]
struct Inner {
    mark: Mark,
    routed: Arc<Routed>,
    /// What the receiver keeps of each row.
    records: Array<u32>,
    /// `[2, ranks]`: rows of each source, and choices of this rank's experts.
    received: Vec<u32>,
}

/// Where this rank's own tokens went.
#[derive(Debug)]
struct Routed {
    tokens: u32,
    topk_idx: Array<i64>,
    topk_weights: Option<Array<f32>>,
    /// `[tokens, ranks]`.
    position: Array<i32>,
    /// `[2, ranks]`: rows to each rank, and choices of its experts.
    counted: Array<u32>,
}

/// A low-latency dispatch that was sent and is to be received. Dropped, it is skipped by the endpoint's next call.
#[derive(Debug)]
pub struct Dispatching {
    flight: Flight<Arc<Work>>,
    routed: Arc<Routed>,
}

/// A low-latency combine that was sent and is to be received. Dropped, it is skipped by the endpoint's next call.
#[derive(Debug)]
pub struct Combining {
    flight: Flight<Arc<Work>>,
    routed: Arc<Routed>,
    /// Rows that each rank owes.
    owed: Vec<u32>,
}

impl Combining {
    /// Tokens of this rank's own, whose sums come back.
    pub(super) fn tokens(&self) -> u32 {
        self.routed.tokens
    }
}

/// Memory for what a dispatch brings.
#[derive(Debug)]
pub(super) struct LowArrays {
    pub(super) x: Rows,
    pub(super) expert_counts: Array<i32>,
    pub(super) segments: Array<i64>,
    pub(super) source_token: Array<i32>,
}

impl LowLatency for AscendEndpoint {
    type LowHandle = LowHandle;
    type Dispatching = Dispatching;
    type Combining = Combining;

    async fn send_dispatch(&mut self, x: &Rows, routing: &LowRoutingOf<Self>) -> Result<Dispatching, Error> {
        self.low_send_dispatch(x, routing).await
    }

    async fn receive_dispatch(&mut self, sent: &Dispatching) -> Result<LowReceived<Self>, Error> {
        let into = self.low_arrays()?;
        self.low_receive_dispatch(sent, into, None).await
    }

    async fn send_combine(
        &mut self,
        y: &Rows,
        handle: &LowHandle,
        topk_weights: Option<&Array<f32>>,
    ) -> Result<Combining, Error> {
        self.low_send_combine(y, handle, topk_weights).await
    }

    async fn receive_combine(&mut self, sent: &Combining) -> Result<LowCombined<Self>, Error> {
        let row = self.shape().result_bytes() as usize;
        let x = Rows::new(self.device.device(), sent.tokens(), row)?;
        self.low_receive_combine(sent, x).await
    }

    fn check_at_once(&mut self) -> Result<(), Error> {
        self.check_low_send()?;
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
        self.layout().check_low_latency()?;
        if self.low.mask.contains(rank) {
            return Ok(());
        }
        self.low_tell(&[rank].into_iter().collect(), None).await?;
        self.device.low_leave_out(rank)?;
        self.low.mask.insert(rank);
        Ok(())
    }
}
