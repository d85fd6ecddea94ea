//! What the benchmarks of calls share: ranks that are threads of this process, and a batch for both modes.

use ep_core::engine::low_latency::{LowRouting, LowRoutingOf};
use ep_core::engine::{Combine, Handle, Routing};
use ep_core::{Endpoint as _, Error, LowLatency as _, Nanos, Placement, Settings, Topology};

use super::{Plan, route};
use crate::{Cluster, CudaEndpoint, Rows};

/// Runs `measure` on every rank of a plan.
pub(super) fn on_ranks<T: Send>(
    plan: &Plan,
    measure: impl AsyncFn(CudaEndpoint) -> Result<T, Error> + Send + Sync,
) -> Result<Vec<T>, Error> {
    let (topology, shape) = (Topology::new(1, plan.ranks)?, plan.shape()?);
    let settings = Settings::builder(&shape, &topology)
        .placement(Placement::Direct)
        .low_latency(true)
        .deadline(Nanos::from_secs(5))
        .build()?;
    Cluster::builder(topology).settings(settings).build(shape)?.run(measure)?.into_iter().collect()
}

/// A rank's batch, which was dispatched once. Rows are bf16, and go straight back.
pub(super) struct Calls {
    pub(super) x: Rows,
    pub(super) handle: Handle,
    low_routing: LowRoutingOf<CudaEndpoint>,
}

impl Calls {
    pub(super) async fn new(plan: &Plan, ep: &mut CudaEndpoint) -> Result<Self, Error> {
        let x = ep.rows(&vec![0; plan.tokens as usize * ep.shape().result_bytes() as usize], plan.tokens)?;
        let topk_idx = ep.array(&route(plan, ep.rank().0))?;
        let routing = Routing::TopK { topk_idx: topk_idx.clone(), topk_weights: None };
        let topk_weights = Some(ep.array(&vec![0.125f32; topk_idx.len()])?);
        let handle = ep.dispatch(&x, &routing).await?.handle;
        Ok(Self { x, handle, low_routing: LowRouting::new(topk_idx, topk_weights) })
    }

    /// A cached dispatch, and a combine of what came.
    pub(super) async fn cached(&self, ep: &mut CudaEndpoint) -> Result<(), Error> {
        let got = ep.redispatch(&self.x, &self.handle).await?;
        ep.combine(&got.x, &self.handle, Combine::default()).await.map(drop)
    }

    /// A low-latency dispatch, and a combine of what came.
    pub(super) async fn low(&self, ep: &mut CudaEndpoint) -> Result<(), Error> {
        let got = ep.low_latency_dispatch(&self.x, &self.low_routing).await?;
        ep.low_latency_combine(&got.x, &got.handle, None).await.map(drop)
    }
}
