//! GPUs as a backend: every rank a thread of this process.

use std::time::Instant;

use ep_core::{Endpoint, Nanos};
use ep_cuda::Cluster;

use super::{Job, Ran};
use crate::failure::Failure;
use crate::rank::{Shared, work, work_low_latency};

pub(super) fn run(job: &Job<'_>, step: &(dyn Fn() + Sync)) -> Result<Ran, Failure> {
    let builder = Cluster::builder(job.topology).settings(job.settings).wait_for_kernels(true);
    let cluster = builder.build(job.shape).map_err(Failure::bad_input)?;
    // The clocks of endpoints do not start together.
    let start = Instant::now();
    let host = |_| Nanos(u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX));
    let shared = Shared { world: job.world, clock: &host, step };
    let outcomes = cluster
        .run(async |mut ep| {
            let batch = &job.batches[ep.rank().index()];
            let account = match job.low_latency {
                None => work(&mut ep, batch, &shared).await,
                Some(weighing) => work_low_latency(&mut ep, batch, weighing, &shared).await,
            };
            account.map_err(|error| error.to_string())
        })
        .map_err(Failure::failed)?;
    Ok(Ran { accounts: outcomes, events: None, records: Vec::new() })
}
