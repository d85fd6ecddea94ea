//! What one rank does in `moexpress run`, on any backend.

use ep_conformance::arrival::Arrival;
use ep_conformance::drive::upload;
use ep_conformance::low_latency::{self, Seen};
use ep_conformance::verify::{Observed, bytes_of};
use ep_conformance::workload::Batch;
use ep_core::engine::Combine;
use ep_core::engine::stats::Stats;
use ep_core::reference::{Weighing, World};
use ep_core::{Endpoint, Error, LowLatency, Nanos};

/// Steps that [`work`] reports to whoever shows progress.
pub(crate) const STEPS: u64 = 3;

/// What all ranks of a run share.
pub(crate) struct Shared<'a> {
    pub(crate) world: &'a World,
    /// The time, given that of the rank's own clock.
    pub(crate) clock: &'a (dyn Fn(Nanos) -> Nanos + Sync),
    /// Called after each of the [`STEPS`] of a rank.
    pub(crate) step: &'a (dyn Fn() + Sync),
}

/// When something began and ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Interval {
    pub(crate) start: Nanos,
    pub(crate) end: Nanos,
}

impl Interval {
    /// From the first start to the last end.
    pub(crate) fn hull(intervals: impl Iterator<Item = Self>) -> Option<Self> {
        intervals.reduce(|a, b| Self { start: a.start.min(b.start), end: a.end.max(b.end) })
    }

    pub(crate) fn length(self) -> Nanos {
        self.end - self.start
    }
}

/// What one rank saw.
#[derive(Debug)]
pub(crate) enum Saw {
    Throughput(Observed),
    LowLatency(Seen),
}

impl Saw {
    /// `[local experts]`: choices received for each.
    pub(crate) fn expert_counts(&self) -> Vec<u64> {
        match self {
            Self::Throughput(observed) => observed.expert_counts.iter().map(|&count| count.into()).collect(),
            Self::LowLatency(seen) => seen.experts.iter().map(|expert| expert.source_token.len() as u64).collect(),
        }
    }
}

/// What one rank saw and measured.
#[derive(Debug)]
pub(crate) struct Account {
    pub(crate) saw: Saw,
    pub(crate) dispatch: Interval,
    pub(crate) combine: Interval,
    /// Traffic of the dispatch.
    pub(crate) after_dispatch: Stats,
    /// Traffic of dispatch and combine.
    pub(crate) after_combine: Stats,
}

/// Dispatches `batch`, lets the reference experts work on what came, and combines, weights included.
pub(crate) async fn work<E: Endpoint>(ep: &mut E, batch: &Batch, shared: &Shared<'_>) -> Result<Account, Error> {
    let (x, routing) = upload(ep, batch)?;
    let start = (shared.clock)(ep.now());
    let got = ep.dispatch(&x, &routing).await?;
    let dispatch = Interval { start, end: (shared.clock)(ep.now()) };
    let after_dispatch = ep.stats();
    let mut observed = Observed::of_dispatch(ep, &got)?;
    (shared.step)();

    let y = bytes_of(&Arrival::observed(shared.world.shape(), &observed).experts(shared.world, ep.rank()));
    let (handle, weights) = (got.handle.clone(), got.topk_weights.clone());
    // The received rows make room in the arena for the experts' results.
    drop(got);
    let results = match ep.output(&handle) {
        Some(mut output) => {
            ep.store(&mut output, 0, &y)?;
            output
        }
        None => ep.rows(&y, handle.rows())?,
    };
    drop(y);
    (shared.step)();

    let start = (shared.clock)(ep.now());
    let options = Combine { topk_weights: Some(&weights), ..Combine::default() };
    let back = ep.combine(&results, &handle, options).await?;
    let combine = Interval { start, end: (shared.clock)(ep.now()) };
    observed.combined_x = ep.bytes(&back.x)?;
    observed.combined_topk_weights = ep.values(&back.topk_weights)?;
    (shared.step)();
    let saw = Saw::Throughput(observed);
    Ok(Account { saw, dispatch, combine, after_dispatch, after_combine: ep.stats() })
}

/// The same in low latency.
pub(crate) async fn work_low_latency<E: LowLatency>(
    ep: &mut E,
    batch: &Batch,
    weighing: Weighing,
    shared: &Shared<'_>,
) -> Result<Account, Error> {
    let (x, routing) = low_latency::upload(ep, batch, weighing)?;
    let start = (shared.clock)(ep.now());
    let got = ep.low_latency_dispatch(&x, &routing).await?;
    let dispatch = Interval { start, end: (shared.clock)(ep.now()) };
    let after_dispatch = ep.stats();
    let mut seen = Seen::of_dispatch(ep, &got)?;
    (shared.step)();

    let y = low_latency::results(ep, shared.world, &seen)?;
    let weights = low_latency::weights(ep, batch, weighing)?;
    (shared.step)();

    let start = (shared.clock)(ep.now());
    let back = ep.low_latency_combine(&y, &got.handle, weights.as_ref()).await?;
    let combine = Interval { start, end: (shared.clock)(ep.now()) };
    seen.combined_x = ep.bytes(&back.x)?;
    (shared.step)();
    Ok(Account { saw: Saw::LowLatency(seen), dispatch, combine, after_dispatch, after_combine: ep.stats() })
}
