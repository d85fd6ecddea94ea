//! Calls against their graphs: what the host spends on an iteration, and how long iterations take behind each other.

use std::fmt::Write as _;
use std::time::Instant;

use ep_core::Error;

use super::calls::{Calls, on_ranks};
use super::{Plan, median};
use crate::CudaEndpoint;
use crate::driver::Graph;

/// Microseconds of an iteration, of the slowest rank.
#[derive(Clone, Copy, Debug, Default)]
pub struct Iteration {
    /// That the host takes to enqueue one while nothing runs; the median.
    pub host: f64,
    /// From one to the next, of many that are enqueued behind each other.
    pub whole: f64,
}

impl Iteration {
    fn slower(self, other: Self) -> Self {
        Self { host: self.host.max(other.host), whole: self.whole.max(other.whole) }
    }
}

/// One dispatch and one combine, by calls and by replays of the graph of these calls.
#[derive(Clone, Copy, Debug, Default)]
pub struct GraphTimes {
    /// Cached dispatch and combine, by calls.
    pub cached_calls: Iteration,
    /// The same, replayed.
    pub cached_graph: Iteration,
    /// Low latency, by calls.
    pub low_calls: Iteration,
    /// The same, replayed.
    pub low_graph: Iteration,
}

/// Measures on ranks that are threads of this process. Rows are bf16, and go straight back.
///
/// # Errors
/// What is missing, or what a call reported.
pub fn run_graphs(plan: &Plan) -> Result<GraphTimes, Error> {
    let times = on_ranks(plan, async |ep| measure(plan, ep).await)?;
    let slowest = |all: GraphTimes, times: GraphTimes| GraphTimes {
        cached_calls: all.cached_calls.slower(times.cached_calls),
        cached_graph: all.cached_graph.slower(times.cached_graph),
        low_calls: all.low_calls.slower(times.low_calls),
        low_graph: all.low_graph.slower(times.low_graph),
    };
    Ok(times.into_iter().fold(GraphTimes::default(), slowest))
}

async fn measure(plan: &Plan, mut ep: CudaEndpoint) -> Result<GraphTimes, Error> {
    let stream = ep.stream().clone();
    let ep = &mut ep;
    let calls = Calls::new(plan, ep).await?;
    let mut cached = async |ep: &mut CudaEndpoint| calls.cached(ep).await;
    let mut low = async |ep: &mut CudaEndpoint| calls.low(ep).await;
    // All graphs are made before anybody waits for anybody.
    stream.begin_capture()?;
    cached(ep).await?;
    let mut cached_graph = stream.end_capture()?;
    stream.begin_capture()?;
    low(ep).await?;
    let mut low_graph = stream.end_capture()?;
    Ok(GraphTimes {
        cached_calls: iterate(plan, ep, &mut cached).await?,
        cached_graph: iterate(plan, ep, &mut replay(&mut cached_graph)).await?,
        low_calls: iterate(plan, ep, &mut low).await?,
        low_graph: iterate(plan, ep, &mut replay(&mut low_graph)).await?,
    })
}

fn replay(graph: &mut Graph) -> impl AsyncFnMut(&mut CudaEndpoint) -> Result<(), Error> {
    async |ep: &mut CudaEndpoint| Ok(graph.launch(ep.stream())?)
}

async fn iterate(
    plan: &Plan,
    ep: &mut CudaEndpoint,
    work: &mut impl AsyncFnMut(&mut CudaEndpoint) -> Result<(), Error>,
) -> Result<Iteration, Error> {
    for _ in 0..5 {
        work(ep).await?;
    }
    let mut host = Vec::new();
    for _ in 0..plan.repetitions {
        ep.stream().synchronize()?;
        let began = Instant::now();
        work(ep).await?;
        host.push(began.elapsed().as_secs_f64() * 1e6);
    }
    ep.stream().synchronize()?;
    let began = Instant::now();
    for _ in 0..plan.repetitions {
        work(ep).await?;
    }
    ep.stream().synchronize()?;
    let whole = began.elapsed().as_secs_f64() * 1e6 / f64::from(plan.repetitions);
    Ok(Iteration { host: median(host), whole })
}

/// The times as a table.
pub fn graphs_table(plan: &Plan, times: &GraphTimes) -> String {
    let GraphTimes { cached_calls, cached_graph, low_calls, low_graph } = times;
    let mut text = format!("{plan:?}\n");
    let rows = [
        ("cached dispatch and combine, calls", cached_calls),
        ("the same, a graph", cached_graph),
        ("low-latency dispatch and combine, calls", low_calls),
        ("the same, a graph", low_graph),
    ];
    for (what, Iteration { host, whole }) in rows {
        let _ = writeln!(text, "{what:40} host {host:8.1} whole {whole:8.1} us");
    }
    text
}
