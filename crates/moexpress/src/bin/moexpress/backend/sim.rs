//! The simulator as a backend.

use std::num::NonZeroUsize;
use std::sync::{Mutex, PoisonError};

use ep_core::{Endpoint, Error, Nanos, Rank, Settings, Shape, Topology};
use ep_sim::{Builder, Cluster, Outcome};

use super::{Job, Ran, Timing, timed};
use crate::failure::Failure;
use crate::rank::{Shared, work, work_low_latency};

/// The simulator of a run: in virtual time on a model, or exploring.
pub(crate) fn simulator(
    shape: &Shape,
    topology: &Topology,
    settings: &Settings,
    timing: Option<Timing>,
) -> Result<Builder, Error> {
    let plain = Cluster::builder(*topology).settings(*settings);
    match timing {
        None => Ok(plain.race_tracking(true)),
        Some(Timing { model, elide_payload: true, .. }) => timed::cluster(shape, topology, settings, model.model()),
        Some(Timing { model, .. }) => Ok(plain.timed(model.model())),
    }
}

pub(crate) fn run(job: &Job<'_>, step: &(dyn Fn() + Sync)) -> Result<Ran, Failure> {
    let builder = simulator(&job.shape, &job.topology, &job.settings, job.timing).map_err(Failure::bad_input)?;
    let builder = builder.seed(job.seed).far_lanes(job.far_lanes).record(job.record);
    let cluster = builder.build(job.shape).map_err(Failure::bad_input)?;
    // Under explore simulated time stands still while anything can run, so the host's clock is the one that says something.
    let (start, timed) = (job.began, job.timing.is_some());
    let host = move || Nanos(u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX));
    let clock = move |own: Nanos| if timed { own } else { host() };
    let shared = Shared { world: job.world, clock: &clock, step };
    // Where a rank's own call fails the others wait for it in vain, and that is all that the simulator finds.
    let failed: Mutex<Option<(Rank, Error)>> = Mutex::new(None);
    let threads = job.timing.map_or(NonZeroUsize::MIN, |timing| timing.threads);
    let run = cluster
        .run_on(threads, async |mut ep| {
            let batch = &job.batches[ep.rank().index()];
            let account = match job.low_latency {
                None => work(&mut ep, batch, &shared).await,
                Some(weighing) => work_low_latency(&mut ep, batch, weighing, &shared).await,
            };
            account.inspect_err(|error| {
                let mut failed = failed.lock().unwrap_or_else(PoisonError::into_inner);
                failed.get_or_insert_with(|| (ep.rank(), error.clone()));
            })
        })
        .map_err(|violation| match &*failed.lock().unwrap_or_else(PoisonError::into_inner) {
            Some((rank, error)) => {
                Failure::failed(format_args!("rank {rank}: {error}\n       the others wait for it: {violation}"))
            }
            None => Failure::failed(violation),
        })?;
    let accounts = run.outcomes.into_iter().map(|outcome| match outcome {
        Outcome::Finished(account) => account.map_err(|error| error.to_string()),
        Outcome::Crashed => Err("crashed".to_owned()),
    });
    Ok(Ran { accounts: accounts.collect(), events: Some(run.events), records: run.records })
}
