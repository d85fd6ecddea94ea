//! What one rank does in `moexpress run`, on any backend.

use ep_conformance::arrival::Arrival;
use ep_conformance::drive::upload;
use ep_conformance::verify::{Observed, bytes_of};
use ep_conformance::workload::Batch;
use ep_core::engine::Combine;
use ep_core::engine::stats::Stats;
use ep_core::reference::World;
use ep_core::{Endpoint, Error, Nanos};

/// Steps that [`work`] reports to whoever shows progress.
pub(crate) const STEPS: u64 = 3;

/// What all ranks of a run share.
pub(crate) struct Shared<'a> {
    pub(crate) world: &'a World,
    /// The time, given that of the rank's own clock.
    pub(crate) clock: &'a dyn Fn(Nanos) -> Nanos,
    /// Called after each of the [`STEPS`] of a rank.
    pub(crate) step: &'a dyn Fn(),
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

/// What one rank saw and measured.
#[derive(Debug)]
pub(crate) struct Account {
    pub(crate) observed: Observed,
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
    let y = match ep.output(&handle) {
        Some(mut output) => {
            ep.store(&mut output, 0, &y)?;
            output
        }
        None => ep.rows(&y, handle.rows())?,
    };
    (shared.step)();

    let start = (shared.clock)(ep.now());
    let options = Combine { topk_weights: Some(&weights), ..Combine::default() };
    let back = ep.combine(&y, &handle, options).await?;
    let combine = Interval { start, end: (shared.clock)(ep.now()) };
    observed.combined_x = ep.bytes(&back.x)?;
    observed.combined_topk_weights = ep.values(&back.topk_weights)?;
    (shared.step)();
    Ok(Account { observed, dispatch, combine, after_dispatch, after_combine: ep.stats() })
}
