//! The shared suite on GPUs: ranks are threads of this process, on all GPUs that are visible, several on one where there are more
//! ranks than GPUs.
//!
//! Ranks of one GPU must run at the same time: set `CUDA_DEVICE_MAX_CONNECTIONS=32`, and `--test-threads=1`.

mod scripts;

use ep_conformance::script::{Script, Seen};
use ep_conformance::{Backend, Requirement, Setup};
use ep_core::Layout;
use ep_cuda::{Cluster, CudaEndpoint};

struct Cuda {
    absent: Option<&'static str>,
}

impl Cuda {
    fn new() -> Self {
        let absent = match ep_cuda::driver::devices() {
            Ok(0) => Some("a GPU; none is visible".to_owned()),
            Ok(_) => ep_cuda::build::version().err().map(|error| error.to_string()),
            Err(error) => Some(error.to_string()),
        };
        Self { absent: absent.map(|reason| &*reason.leak()) }
    }
}

fn cluster(setup: &Setup) -> Result<Cluster, String> {
    let built = Cluster::builder(setup.topology)
        .settings(setup.settings)
        .multiprocessors(2)
        .wait_for_kernels(true)
        .build(setup.shape);
    built.map_err(|error| error.to_string())
}

impl Backend for Cuda {
    type Endpoint = CudaEndpoint;

    fn absent(&self) -> Option<&'static str> {
        self.absent
    }

    fn lacks(&self, what: Requirement) -> Option<&'static str> {
        match what {
            Requirement::Nodes => Some("one node; there is no transport between nodes yet"),
            Requirement::Incidents | Requirement::Departures => Some("nothing makes incidents happen on a GPU yet"),
            Requirement::Plants => Some("kernels have no planted faults yet"),
            Requirement::Coordinators => Some("one node has no lanes between nodes"),
            Requirement::Get | Requirement::LowLatency | Requirement::ManyRanks | Requirement::Scripts => None,
        }
    }

    fn run<T, F>(&self, setup: &Setup, user: F) -> Result<Vec<Option<T>>, String>
    where
        T: Send + 'static,
        F: AsyncFn(CudaEndpoint) -> T + Send + Sync,
    {
        let outcomes = cluster(setup)?.run(user).map_err(|error| error.to_string())?;
        Ok(outcomes.into_iter().map(Some).collect())
    }

    fn probe(&self, setup: &Setup, scripts: &[Script]) -> Result<Vec<Option<Vec<Seen>>>, String> {
        let layout = Layout::new(&setup.shape, &setup.topology, &setup.settings).map_err(|error| error.to_string())?;
        let translated: Vec<_> = scripts.iter().map(scripts::to_device).collect();
        let logs = cluster(setup)?.probe(&translated).map_err(|error| error.to_string())?;
        let seen = |(script, log): (&Script, &Vec<_>)| Some(scripts::seen(script, log, layout.window_bytes()));
        Ok(scripts.iter().zip(&logs).map(seen).collect())
    }
}

ep_conformance::suite!(Cuda::new());
