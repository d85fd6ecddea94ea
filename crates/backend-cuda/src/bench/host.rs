//! What calls cost the host: enqueued behind a kernel that pauses, so that none of their own runs meanwhile.

use std::fmt::Write as _;
use std::time::Instant;

use ep_core::engine::low_latency::LowRouting;
use ep_core::engine::{Combine, Routing};
use ep_core::{Endpoint as _, Error, LowLatency as _, Nanos, Placement, Settings, Shape, Topology};

use super::{Plan, route};
use crate::args;
use crate::rank::Call;
use crate::{Cluster, CudaEndpoint};

/// Calls that are enqueued behind one pause.
const CALLS: u32 = 20;
/// Nanoseconds of the pause, in which they are enqueued.
const PAUSE: u64 = 3_000_000;

/// Microseconds of the host by what it does: of the fastest mean of 20 calls, of the slowest rank.
pub type HostTimes = Vec<(&'static str, f64)>;

/// Measures on ranks that are threads of this process; those that share a GPU also wait for each other in the driver. Rows are bf16,
/// and go straight back.
///
/// # Errors
/// What is missing, or what a call reported.
pub fn run_host(plan: &Plan) -> Result<HostTimes, Error> {
    let topology = Topology::new(1, plan.ranks)?;
    let shape = Shape::builder()
        .experts(plan.experts)
        .topk(plan.topk)
        .hidden(plan.hidden)
        .max_tokens(plan.tokens)
        .element(plan.element)
        .build()?;
    let settings = Settings::builder(&shape, &topology)
        .placement(Placement::Direct)
        .low_latency(true)
        .deadline(Nanos::from_secs(5))
        .build()?;
    let cluster = Cluster::builder(topology).settings(settings).build(shape)?;
    let ranks = cluster.run(async |ep| measure(plan, ep).await)?.into_iter().collect::<Result<Vec<_>, _>>()?;
    let slower = |mut all: HostTimes, rank: HostTimes| {
        all.iter_mut().zip(rank).for_each(|((_, all), (_, time))| *all = all.max(time));
        all
    };
    ranks.into_iter().reduce(slower).ok_or_else(|| Error::invalid("ranks", 0, "at least 1"))
}

/// One kind of call, on the rank of a bench.
struct Host {
    ep: CudaEndpoint,
    repetitions: u32,
    meetings: u64,
    times: HostTimes,
}

impl Host {
    async fn time(
        &mut self,
        what: &'static str,
        mut call: impl AsyncFnMut(&mut CudaEndpoint) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut best = f64::INFINITY;
        for _ in 0..self.repetitions {
            self.ep.stream().synchronize()?;
            self.meetings += 1;
            self.ep.device().meet(self.meetings, PAUSE)?;
            let began = Instant::now();
            for _ in 0..CALLS {
                call(&mut self.ep).await?;
            }
            best = best.min(began.elapsed().as_secs_f64() * 1e6 / f64::from(CALLS));
        }
        self.ep.stream().synchronize()?;
        self.times.push((what, best));
        Ok(())
    }
}

async fn measure(plan: &Plan, mut ep: CudaEndpoint) -> Result<HostTimes, Error> {
    let x = ep.rows(&vec![0; plan.tokens as usize * ep.shape().result_bytes() as usize], plan.tokens)?;
    let topk_idx = ep.array(&route(plan, ep.rank().0))?;
    let routing = Routing::TopK { topk_idx: topk_idx.clone(), topk_weights: None };
    let topk_weights = Some(ep.array(&vec![0.125f32; topk_idx.len()])?);
    let low_routing = LowRouting { topk_idx, topk_weights };
    let handle = ep.dispatch(&x, &routing).await?.handle;
    let y = ep.redispatch(&x, &handle).await?.x;
    let mut host = Host { ep, repetitions: plan.repetitions, meetings: 0, times: Vec::new() };
    host.time("context made current", async |ep| Ok(ep.stream().device().bind()?)).await?;
    host.time("asking for a capture", async |ep| Ok(ep.stream().capture().map(drop)?)).await?;
    host.time("event recorded", async |ep| Ok(ep.stream().record(false).map(drop)?)).await?;
    let nothing = args::Offer::default();
    host.time("plain launch", async |ep| Ok(ep.device().offer(Call::none(), &nothing)?)).await?;
    host.time("cached dispatch", async |ep| ep.redispatch(&x, &handle).await.map(drop)).await?;
    host.time("combine", async |ep| ep.combine(&y, &handle, Combine::default()).await.map(drop)).await?;
    let low = async |ep: &mut CudaEndpoint| {
        let got = ep.low_latency_dispatch(&x, &low_routing).await?;
        ep.low_latency_combine(&got.x, &got.handle, None).await.map(drop)
    };
    host.time("low-latency dispatch and combine", low).await?;
    Ok(host.times)
}

/// The times as a table.
pub fn host_table(plan: &Plan, times: &HostTimes) -> String {
    let mut text = format!("{plan:?}\n");
    for (what, time) in times {
        let _ = writeln!(text, "{what:40} {time:8.2} us");
    }
    text
}
