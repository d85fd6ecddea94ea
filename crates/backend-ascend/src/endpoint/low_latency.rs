//! Low latency: there are no kernels for it, so every call is refused.

use std::convert::Infallible;

use ep_core::engine::low_latency::{LowCombined, LowReceived, LowRoutingOf};
use ep_core::{Endpoint as _, Error, LowLatency, Rank, RankSet};

use super::{Array, AscendEndpoint, Rows};

fn none() -> Error {
    Error::unsupported("low latency on NPUs", "kernels that do not exist yet; use dispatch and combine")
}

impl LowLatency for AscendEndpoint {
    type LowHandle = Infallible;
    type Dispatching = Infallible;
    type Combining = Infallible;

    async fn send_dispatch(&mut self, _x: &Rows, _routing: &LowRoutingOf<Self>) -> Result<Infallible, Error> {
        Err(none())
    }

    async fn receive_dispatch(&mut self, sent: &Infallible) -> Result<LowReceived<Self>, Error> {
        match *sent {}
    }

    async fn send_combine(
        &mut self,
        _y: &Rows,
        handle: &Infallible,
        _topk_weights: Option<&Array<f32>>,
    ) -> Result<Infallible, Error> {
        match *handle {}
    }

    async fn receive_combine(&mut self, sent: &Infallible) -> Result<LowCombined<Self>, Error> {
        match *sent {}
    }

    fn check_at_once(&mut self) -> Result<(), Error> {
        Err(none())
    }

    fn check_low_handle(&self, handle: &Infallible) -> Result<(), Error> {
        match *handle {}
    }

    fn low_latency_mask(&self) -> &RankSet {
        self.mask()
    }

    async fn mask_rank(&mut self, _rank: Rank) -> Result<(), Error> {
        Err(none())
    }
}
