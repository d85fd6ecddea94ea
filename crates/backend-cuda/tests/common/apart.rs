//! Ranks as processes.

use std::future::Future;
use std::process::exit;
use std::sync::{Arc, Mutex, PoisonError};

use ep_bootstrap::Member;
use ep_conformance::processes::{Place, Processes};
use ep_conformance::{Requirement, Setup};
use ep_core::Error;
use ep_cuda::hca::Pace;
use ep_cuda::{Builder, CrashFlag, CudaEndpoint};

use crate::common;

/// What puts adapters that GPUs play, as fast as that, between the nodes of a builder's ranks.
pub(crate) type Played = (Pace, fn(Builder, Pace, &Member) -> Result<Builder, Error>);

/// What lies between the nodes of ranks that are processes.
#[allow(dead_code)] // Each test target has one of them.
pub(crate) enum Between {
    Loop,
    Adapters(Played),
    /// Of cases in turn.
    Either(Played),
}

/// One rank, in a process of its own.
pub(crate) struct Apart {
    between: Between,
    crash: Mutex<Option<CrashFlag>>,
}

impl Apart {
    pub(crate) const fn over(between: Between) -> Self {
        Self { between, crash: Mutex::new(None) }
    }

    /// Whether adapters are played by GPUs that ranks share: cases have up to four.
    fn plays_in_turns(&self) -> bool {
        matches!(self.between, Between::Adapters(_)) && ep_cuda::driver::devices().is_ok_and(|gpus| gpus < 4)
    }

    fn network(&self, builder: Builder, setup: &Setup, member: &Member) -> Result<Builder, Error> {
        match self.between {
            Between::Adapters((pace, adapters)) => adapters(builder, pace, member),
            Between::Either((pace, adapters)) if setup.seed % 2 == 1 => adapters(builder, pace, member),
            Between::Loop | Between::Either(_) => Ok(builder.far(common::network(setup).between_processes())),
        }
    }
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
            Requirement::LowLatency if self.plays_in_turns() => Some(
                "a process plays its adapter while it has the GPU: where ranks share one, an operation takes too long",
            ),
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
        let joined = || {
            let builder = self.network(common::builder(setup, None, None)?, setup, &member)?;
            builder.join(setup.shape, &member)
        };
        let endpoint = joined().map_err(|error| error.to_string())?;
        *self.crash.lock().unwrap_or_else(PoisonError::into_inner) = Some(endpoint.crash_flag());
        Ok((endpoint, member))
    }

    fn block_on<T>(&self, work: impl Future<Output = T>) -> T {
        let crash = self.crash.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(crash) = crash else { return futures_executor::block_on(work) };
        futures_executor::block_on(common::befall(work, crash, false)).unwrap_or_else(|| exit(1))
    }
}
