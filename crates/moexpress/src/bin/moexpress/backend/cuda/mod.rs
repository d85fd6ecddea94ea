//! GPUs as a backend: every rank a thread of this process, or a process of its own.

mod gather;
mod processes;

use ep_core::{Endpoint, Nanos};
use ep_cuda::{Builder, Cluster, CudaEndpoint};

use super::{Job, Ran};
use crate::failure::Failure;
use crate::rank::{Account, Shared, work, work_low_latency};

pub(super) fn run(job: &Job<'_>, step: &(dyn Fn() + Sync)) -> Result<Option<Ran>, Failure> {
    let accounts = match job.launched {
        None => {
            let cluster = builder(job).build(job.shape).map_err(Failure::bad_input)?;
            let user = async |ep| rank(job, step, ep).await;
            Some(cluster.run(user).map_err(Failure::failed)?)
        }
        Some(environment) => processes::run(job, step, environment)?,
    };
    Ok(accounts.map(|accounts| Ran { accounts, events: None, records: Vec::new() }))
}

const fn builder(job: &Job<'_>) -> Builder {
    Cluster::builder(job.topology).settings(job.settings).wait_for_kernels(true)
}

/// What one rank does.
async fn rank(job: &Job<'_>, step: &(dyn Fn() + Sync), mut ep: CudaEndpoint) -> Result<Account, String> {
    // The clocks of endpoints do not start together; that of the process is the same for its threads.
    let host = |_| Nanos(u64::try_from(job.began.elapsed().as_nanos()).unwrap_or(u64::MAX));
    let shared = Shared { world: job.world, clock: &host, step };
    let batch = &job.batches[ep.rank().index()];
    let account = match job.low_latency {
        None => work(&mut ep, batch, &shared).await,
        Some(weighing) => work_low_latency(&mut ep, batch, weighing, &shared).await,
    };
    account.map_err(|error| error.to_string())
}
