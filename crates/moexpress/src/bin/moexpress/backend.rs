//! Runs all ranks of a job on a backend.

use std::num::NonZeroUsize;
use std::time::Instant;

use ep_bootstrap::Environment;
use ep_conformance::workload::Batch;
use ep_core::layout::Queues;
use ep_core::reference::{Weighing, World};
use ep_core::settings::SettingsBuilder;
use ep_core::trace::Record;
use ep_core::{Error, Settings, Shape, Topology};
#[cfg(any(feature = "ascend", feature = "cuda", feature = "host"))]
use ep_core::{LowLatency, Nanos};

use crate::args::{Backend, FarArgs, ModelName};
use crate::failure::Failure;
use crate::rank::Account;
#[cfg(any(feature = "ascend", feature = "cuda", feature = "host"))]
use crate::rank::{Shared, work, work_low_latency};

#[cfg(feature = "ascend")]
mod ascend;
#[cfg(any(feature = "ascend", feature = "cuda", feature = "host"))]
mod budget;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
#[cfg(all(feature = "host", target_os = "linux"))]
mod far;
#[cfg(any(feature = "ascend", feature = "cuda", feature = "host"))]
mod gather;
#[cfg(all(feature = "host", target_os = "linux"))]
mod host;
#[cfg(all(feature = "ibgda", target_os = "linux"))]
mod posted;
#[cfg(any(feature = "ascend", feature = "cuda", feature = "host"))]
mod processes;
mod sim;
pub(crate) mod timed;

/// Other backends are no part of the program of unit tests, which would take as long to build as the command.
#[cfg(test)]
pub(crate) use sim::run as simulated;
pub(crate) use sim::simulator;

/// That time is virtual, and on which machine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Timing {
    pub(crate) model: ModelName,
    /// Whether rows have no payload to speak of.
    pub(crate) elide_payload: bool,
    pub(crate) threads: NonZeroUsize,
}

/// What is to be run.
#[derive(Debug)]
pub(crate) struct Job<'a> {
    #[cfg_attr(
        not(any(feature = "ascend", feature = "cuda", feature = "host")),
        expect(dead_code, reason = "the simulator's ranks are tasks")
    )]
    pub(crate) backend: Backend,
    /// The layer that was asked for.
    pub(crate) shape: Shape,
    /// Of the layer that ranks see: [`seen_shape`].
    pub(crate) world: &'a World,
    pub(crate) topology: Topology,
    pub(crate) settings: Settings,
    pub(crate) seed: u64,
    /// Of NPUs: on their twin.
    #[cfg_attr(not(feature = "ascend"), expect(dead_code, reason = "there are no NPUs"))]
    pub(crate) twin: bool,
    /// None: throughput mode.
    pub(crate) low_latency: Option<Weighing>,
    /// None: as the backend's time is.
    pub(crate) timing: Option<Timing>,
    pub(crate) far_lanes: Queues,
    /// The same where it was given.
    #[cfg_attr(
        not(any(feature = "cuda", all(feature = "host", target_os = "linux"))),
        expect(dead_code, reason = "there is no transport")
    )]
    pub(crate) asked_far_lanes: Option<Queues>,
    /// What carries rows between nodes, of CPU ranks and GPUs.
    #[cfg_attr(
        not(any(feature = "cuda", all(feature = "host", target_os = "linux"))),
        expect(dead_code, reason = "the simulator has a network of its own")
    )]
    pub(crate) far: Option<&'a FarArgs>,
    /// The place of this process, where every rank is one.
    #[cfg_attr(
        not(any(feature = "ascend", feature = "cuda", feature = "host")),
        expect(dead_code, reason = "the simulator's ranks are tasks")
    )]
    pub(crate) launched: Option<&'a Environment>,
    /// Since when times are told.
    pub(crate) began: Instant,
    /// Whether to record every verb.
    pub(crate) record: bool,
    /// `[ranks]`
    pub(crate) batches: &'a [Batch],
}

/// What came of it.
#[derive(Debug)]
pub(crate) struct Ran {
    /// `[ranks]`: what each saw, or why it failed.
    pub(crate) accounts: Vec<Result<Account, String>>,
    /// Things that the backend let happen, if it counts them.
    pub(crate) events: Option<u64>,
    /// Every verb, if recorded.
    pub(crate) records: Vec<Record>,
}

impl Ran {
    /// Where nothing else is told.
    #[cfg(any(feature = "ascend", feature = "cuda", feature = "host"))]
    const fn of_accounts(accounts: Vec<Result<Account, String>>) -> Self {
        Self { accounts, events: None, records: Vec::new() }
    }
}

/// What one rank does whose time is real.
#[cfg(any(feature = "ascend", feature = "cuda", feature = "host"))]
async fn rank<E: LowLatency>(job: &Job<'_>, step: &(dyn Fn() + Sync), mut ep: E) -> Result<Account, String> {
    // The clocks of endpoints need not start together; that of the process is the same for its threads.
    let host = |_| Nanos(u64::try_from(job.began.elapsed().as_nanos()).unwrap_or(u64::MAX));
    let shared = Shared { world: job.world, clock: &host, step };
    let batch = &job.batches[ep.rank().index()];
    let account = match job.low_latency {
        None => work(&mut ep, batch, &shared).await,
        Some(weighing) => work_low_latency(&mut ep, batch, weighing, &shared).await,
    };
    account.map_err(|error| error.to_string())
}

/// Where the settings of a backend begin.
pub(crate) fn automatic(backend: Backend, shape: &Shape, topology: &Topology) -> SettingsBuilder {
    match backend {
        #[cfg(feature = "cuda")]
        Backend::Cuda => {
            // Without a GPU the settings are looked at alone.
            let multiprocessors = ep_cuda::Cluster::multiprocessors_of_a_rank(*topology).ok();
            ep_cuda::Cluster::settings(shape, topology, multiprocessors)
        }
        _ => Settings::builder(shape, topology),
    }
}

/// The layer that ranks see when one of `shape` is asked for: with elided payload rows are shorter.
pub(crate) fn seen_shape(
    shape: &Shape,
    topology: &Topology,
    settings: &Settings,
    timing: Option<Timing>,
) -> Result<Shape, Error> {
    match timing {
        Some(Timing { model, elide_payload: true, .. }) => {
            Ok(*timed::cluster(shape, topology, settings, model.model())?.layout(shape)?.shape())
        }
        _ => Ok(*shape),
    }
}

/// Runs `job`; `step` is called [`crate::rank::STEPS`] times a rank. None where another process tells what came of it.
///
/// Fails as bad input where the backend refuses the job before anything moved, and as failed where it found a rule of
/// the protocol broken.
pub(crate) fn run(backend: Backend, job: &Job<'_>, step: &(dyn Fn() + Sync)) -> Result<Option<Ran>, Failure> {
    match backend {
        Backend::Sim => sim::run(job, step).map(Some),
        #[cfg(feature = "cuda")]
        Backend::Cuda => cuda::run(job, step),
        #[cfg(feature = "ascend")]
        Backend::Ascend => ascend::run(job, step),
        #[cfg(not(feature = "ascend"))]
        Backend::Ascend => {
            Err(Failure::bad_input("--backend ascend: this program was built without the feature ascend"))
        }
        #[cfg(all(feature = "host", target_os = "linux"))]
        Backend::Host => host::run(job, step),
        #[cfg(not(all(feature = "host", target_os = "linux")))]
        Backend::Host => Err(Failure::bad_input(
            "--backend host: this program was built without the feature host, or for another system than Linux",
        )),
        #[cfg(not(feature = "cuda"))]
        Backend::Cuda => Err(Failure::bad_input("--backend cuda: this program was built without the feature cuda")),
    }
}
