//! Low latency, which is not there on GPUs yet: every call says so, and nothing moves.

use std::convert::Infallible;

use ep_core::engine::low_latency::{LowCombined, LowReceived, LowRoutingOf};
use ep_core::{Endpoint, Error, LowLatency, Rank, RankSet};

use super::CudaEndpoint;

fn missing() -> Error {
    Error::unsupported("low latency on GPUs", "throughput mode, or another backend")
}

impl LowLatency for CudaEndpoint {
    type LowHandle = Infallible;
    type Dispatching = Infallible;
    type Combining = Infallible;

    async fn send_dispatch(&mut self, _x: &Self::Buf, _routing: &LowRoutingOf<Self>) -> Result<Infallible, Error> {
        Err(missing())
    }

    async fn receive_dispatch(&mut self, sent: &Infallible) -> Result<LowReceived<Self>, Error> {
        match *sent {}
    }

    async fn send_combine(
        &mut self,
        _y: &Self::Buf,
        handle: &Infallible,
        _topk_weights: Option<&Self::Array<f32>>,
    ) -> Result<Infallible, Error> {
        match *handle {}
    }

    async fn receive_combine(&mut self, sent: &Infallible) -> Result<LowCombined<Self>, Error> {
        match *sent {}
    }

    fn low_latency_mask(&self) -> &RankSet {
        self.mask()
    }

    async fn mask_rank(&mut self, _rank: Rank) -> Result<(), Error> {
        Err(missing())
    }
}
