//! Ranks as processes.

use std::future::Future;
use std::process::exit;
use std::sync::{Arc, Mutex, PoisonError};

use ep_bootstrap::Member;
use ep_conformance::processes::{Place, Processes};
use ep_conformance::{Requirement, Setup};
use ep_cuda::{CrashFlag, CudaEndpoint};

use crate::common;

/// One rank, in a process of its own.
#[derive(Default)]
pub(crate) struct Apart {
    crash: Mutex<Option<CrashFlag>>,
}

impl Processes for Apart {
    type Endpoint = CudaEndpoint;
    type Stay = Arc<Member>;

    fn absent(&self) -> Option<&'static str> {
        common::absent()
    }

    fn lacks(&self, what: Requirement) -> Option<&'static str> {
        match what {
            Requirement::Incidents => Some("late and lost messages would take real time: they come with threads"),
            Requirement::ManyRanks => Some("sixteen processes would take turns on a GPU"),
            _ => common::lacks(what),
        }
    }

    fn campaign(&self) -> u32 {
        4
    }

    fn seeds(&self, most: u64) -> u64 {
        common::seeds(most).min(2)
    }

    fn join(&self, setup: &Setup, place: Place) -> Result<(CudaEndpoint, Arc<Member>), String> {
        let member = place.meet()?;
        let builder = common::builder(setup, None, None).map_err(|error| error.to_string())?;
        let builder = builder.far(common::network(setup).between_processes());
        let endpoint = builder.join(setup.shape, &member).map_err(|error| error.to_string())?;
        *self.crash.lock().unwrap_or_else(PoisonError::into_inner) = Some(endpoint.crash_flag());
        Ok((endpoint, member))
    }

    fn block_on<T>(&self, work: impl Future<Output = T>) -> T {
        let crash = self.crash.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(crash) = crash else { return futures_executor::block_on(work) };
        futures_executor::block_on(common::befall(work, crash, false)).unwrap_or_else(|| exit(1))
    }
}
