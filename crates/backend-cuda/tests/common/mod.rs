//! Ranks on GPUs as a backend of the suite: threads of this process, on all GPUs that are visible, several on one where there are more
//! ranks than GPUs.
#![allow(unreachable_pub)] // The test targets that hold it are crates of their own.

use std::future::poll_fn;
use std::task::Poll;
use std::time::Duration;

use ep_conformance::script::{Script, Seen, device};
use ep_conformance::{Backend, Requirement, Setup, Travels};
use ep_core::incident::Incident;
use ep_core::layout::Queues;
use ep_core::{Error, Layout, Nanos};
use ep_cuda::checks::Checks;
use ep_cuda::{Builder, Cluster, CrashFlag, CudaEndpoint};
use ep_loop::Loop;

/// Why nothing runs here.
pub fn absent() -> Option<&'static str> {
    let absent = match ep_cuda::driver::devices() {
        Ok(0) => Some("a GPU; none is visible".to_owned()),
        Ok(_) => ep_cuda::build::version().err().map(|error| error.to_string()),
        Err(error) => Some(error.to_string()),
    };
    absent.map(|reason| &*reason.leak())
}

/// What ranks on GPUs lack, be they threads or processes.
pub fn lacks(what: Requirement) -> Option<&'static str> {
    match what {
        Requirement::ManyNodes => Some("each node has a proxy's thread for each rank"),
        Requirement::Plants => Some("kernels have planted faults of their own: see the test target `checks`"),
        Requirement::Coordinators => Some("one node has no lanes between nodes"),
        Requirement::Int8 => Some("no kernel makes rows of int8: GPUs have FP8"),
        Requirement::Suspensions => Some("a kernel cannot be stopped and let go on from outside"),
        Requirement::ModesHeard => Some("kernels hear what others wait for in their own mode"),
        Requirement::ByExpert
        | Requirement::Remainders
        | Requirement::SlotWeights
        | Requirement::LowOrders
        | Requirement::Departures
        | Requirement::FarLowLatency
        | Requirement::Get
        | Requirement::Incidents
        | Requirement::LowLatency
        | Requirement::ManyRanks
        | Requirement::Nodes
        | Requirement::Scripts
        | Requirement::Units => None,
    }
}

/// Seeds of a case that are run at most, where `EP_SEEDS` does not say: each takes real time.
pub fn seeds(most: u64) -> u64 {
    let wanted = std::env::var("EP_SEEDS").ok().map(|seeds| seeds.parse().expect("EP_SEEDS is a number of seeds"));
    most.min(wanted.unwrap_or(4))
}

/// The network between a case's nodes: which of its lanes share a queue is drawn.
pub fn network(setup: &Setup) -> Loop {
    Loop::new().queues(Queues::NAMED[setup.seed as usize % Queues::NAMED.len()])
}

/// Builds what a case asks for, with kernels for tests where `checks` or its incidents need them, and for all shapes: specialised ones take seconds.
pub fn builder(setup: &Setup, checks: Option<&Checks>, deadline: Option<Nanos>) -> Result<Builder, Error> {
    let settings = match deadline {
        Some(deadline) => setup.settings.with_deadline(deadline)?,
        None => setup.settings,
    };
    let builder = Cluster::builder(setup.topology).settings(settings).multiprocessors(2).wait_for_kernels(true);
    // In kernels for tests sources are read late, so that one that is written again too early is found.
    let lateness = if checks.is_some() { Duration::from_millis(3) } else { Duration::ZERO };
    // Who copies between nodes is drawn: the driver, or a kernel.
    let movers = (setup.seed + u64::from(setup.topology.ranks() / 2)) % 2;
    let builder = builder.far(network(setup).latency(lateness)?).far_movers(movers as u32);
    // Batches that would be placed at once are placed in several launches, too.
    let builder = builder.launches_by_expert(1 + setup.seed as u32 % 4).specialise(false);
    // How windows are mapped, whose arenas are there at first all the same.
    let is_mapped = setup.topology.nodes() == 1 && (setup.seed + u64::from(setup.shape.topk())) % 2 == 1;
    let builder = if is_mapped { builder.arena_at_first(settings.arena_bytes()) } else { builder };
    // A rank that only leaves needs nothing.
    let needs_kernels = setup.incidents.iter().any(|incident| !matches!(incident, Incident::Exit { .. }));
    if checks.is_none() && !needs_kernels {
        return Ok(builder);
    }
    let checks = checks.cloned().unwrap_or_default();
    let seed = checks.seed.wrapping_add(setup.seed);
    Ok(builder.checks(Checks { seed, incidents: setup.incidents.clone(), ..checks }))
}

/// Does a rank's work to its end, or until the rank crashes: none then.
pub async fn befall<T>(work: impl Future<Output = T>, crash: CrashFlag, is_noticed: bool) -> Option<T> {
    let mut work = Box::pin(work);
    let done = poll_fn(|context| match work.as_mut().poll(context) {
        Poll::Ready(value) => Poll::Ready(Some(value)),
        Poll::Pending if crash.is_up() => Poll::Ready(None),
        Poll::Pending => Poll::Pending,
    });
    let done = done.await;
    if done.is_none() && !is_noticed {
        // Nobody is to learn of it, so the endpoint is never dropped.
        std::mem::forget(work);
    }
    done
}

/// Whether the others learn of the crashes of `setup`.
pub fn is_noticed(setup: &Setup) -> bool {
    !setup.incidents.iter().any(|incident| matches!(incident, Incident::Crash { noticed: false, .. }))
}

/// Ranks that are threads.
#[derive(Debug)]
pub struct Cuda {
    /// Why nothing runs here.
    pub absent: Option<&'static str>,
    /// What kernels do beside their work.
    pub checks: Option<Checks>,
    /// Time allowed to operations; the case's where it is not given.
    pub deadline: Option<Nanos>,
    /// Whether rows between nodes travel by way of pinned memory, over a network that knows memory of the host alone.
    pub staged: bool,
    /// Whether kernels are compiled for the case's shape alone.
    pub specialised: bool,
    /// Blocks of the kernels of low latency; where that is not said, as many as there are multiprocessors for a rank.
    pub low: Blocks,
}

/// Blocks of the kernels of low latency.
#[derive(Clone, Copy, Debug)]
pub enum Blocks {
    /// One for each multiprocessor.
    Automatic,
    /// So many.
    #[allow(dead_code)] // Not in every test target.
    Few(u32),
    /// So many for each multiprocessor, which runs one at a time.
    #[allow(dead_code)] // As above.
    Waves(u32),
}

impl Cuda {
    pub fn new() -> Self {
        Self {
            absent: absent(),
            checks: None,
            deadline: None,
            staged: false,
            specialised: false,
            low: Blocks::Automatic,
        }
    }

    fn cluster(&self, setup: &Setup) -> Result<Cluster, String> {
        let builder = builder(setup, self.checks.as_ref(), self.deadline).map_err(|error| error.to_string())?;
        let builder = builder.specialise(self.specialised);
        let builder = match self.low {
            Blocks::Automatic => builder,
            Blocks::Few(blocks) => builder.low_latency_multiprocessors(blocks),
            Blocks::Waves(each) => builder.low_latency_waves(each),
        };
        let builder = if self.staged { builder.far_staged(Loop::new()) } else { builder };
        builder.build(setup.shape).map_err(|error| error.to_string())
    }
}

impl Backend for Cuda {
    type Endpoint = CudaEndpoint;

    fn absent(&self) -> Option<&'static str> {
        self.absent
    }

    fn lacks(&self, what: Requirement) -> Option<&'static str> {
        lacks(what)
    }

    fn window(&self, layout: Layout) -> Result<Layout, Error> {
        layout.with_kernels()
    }

    fn seeds(&self, most: u64) -> u64 {
        seeds(most)
    }

    /// A rank of several nodes has two streams, and a GPU some 30 queues: with more ranks a kernel waits behind one that waits for it.
    fn largest(&self) -> (u32, u32) {
        (2, 4)
    }

    fn run<T, F>(&self, setup: &Setup, user: F) -> Result<Vec<Option<T>>, String>
    where
        T: Travels,
        F: AsyncFn(CudaEndpoint) -> T + Send + Sync,
    {
        run_on(self.cluster(setup)?, setup, async |endpoint| {
            assert_eq!(endpoint.is_specialised(), self.specialised, "kernels of one shape");
            user(endpoint).await
        })
    }

    fn probe(&self, setup: &Setup, scripts: &[Script]) -> Result<Vec<Option<Vec<Seen>>>, String> {
        probe_on(&self.cluster(setup)?, setup, scripts)
    }
}

/// Runs `user` on the ranks of a cluster as a case wants it.
pub fn run_on<T: Send, F>(cluster: Cluster, setup: &Setup, user: F) -> Result<Vec<Option<T>>, String>
where
    F: AsyncFn(CudaEndpoint) -> T + Send + Sync,
{
    let ran = cluster.run(async |endpoint| {
        let crash = endpoint.crash_flag();
        befall(user(endpoint), crash, is_noticed(setup)).await
    });
    ran.map_err(|error| error.to_string())
}

/// Runs scripts of verbs on the devices of a cluster.
pub fn probe_on(cluster: &Cluster, setup: &Setup, scripts: &[Script]) -> Result<Vec<Option<Vec<Seen>>>, String> {
    let layout = Layout::new(&setup.shape, &setup.topology, &setup.settings).and_then(Layout::with_kernels);
    let bytes = layout.map_err(|error| error.to_string())?.window_bytes();
    let translated: Vec<_> = scripts.iter().map(device::to_device).collect();
    let logs = cluster.probe(&translated).map_err(|error| error.to_string())?;
    let seen = |(script, log): (&Script, &Vec<_>)| Some(device::seen(script, log, bytes));
    Ok(scripts.iter().zip(&logs).map(seen).collect())
}
