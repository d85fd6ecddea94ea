//! How the processes of a group meet.

use std::net::TcpListener;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use ep_bootstrap::{Identity, Member, Secret, Settings};
use moexpress::machine::{Bootstrap, Proposal};
use moexpress::{Nanos, Rank};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::backend::poll;
use crate::error::{closed, of, of_collective, of_meeting};
use crate::guard::{Own, Patience, aside};

/// A meeting place that rank 0 opens: a port of the loopback interface or of an address that other hosts reach, and a secret to be told
/// to the other ranks.
#[pyclass(frozen, module = "moexpress._native")]
#[derive(Debug)]
pub(crate) struct Place {
    listener: Mutex<Option<TcpListener>>,
    /// Where, `host:port`.
    #[pyo3(get)]
    address: String,
    /// What the ranks prove themselves by.
    #[pyo3(get)]
    secret: String,
}

#[pymethods]
impl Place {
    /// Opens it at a port that the system chooses. `host`: an address of this host; None for the loopback interface.
    #[new]
    #[pyo3(signature = (host=None))]
    fn new(py: Python<'_>, host: Option<&str>) -> PyResult<Self> {
        let listener = TcpListener::bind((host.unwrap_or("127.0.0.1"), 0))?;
        let address = listener.local_addr()?.to_string();
        let secret = Secret::generate().map_err(|error| of_meeting(py, &error))?.to_hex();
        Ok(Self { listener: Mutex::new(Some(listener)), address, secret })
    }
}

/// The ranks of a group, met. Rank 0 gives its `place`, the others its address. Returns when all have come.
#[pyclass(frozen, module = "moexpress._native")]
#[derive(Debug)]
pub(crate) struct Meeting {
    member: Own<Mutex<Option<Arc<Member>>>>,
    /// This rank.
    #[pyo3(get)]
    rank: u32,
    /// How many ranks.
    #[pyo3(get)]
    world: u32,
}

#[pymethods]
impl Meeting {
    #[new]
    #[pyo3(signature = (rank, world, address, secret, seconds, place=None))]
    fn new(
        py: Python<'_>,
        rank: u32,
        world: u32,
        address: &str,
        secret: &str,
        seconds: f64,
        place: Option<&Place>,
    ) -> PyResult<Self> {
        let secret = Secret::from_text(secret).map_err(|error| of_meeting(py, &error))?;
        let settings = Settings::new(Rank(rank), world, address)
            .secret(Some(secret))
            .identity(Identity::new().text("version of moexpress", env!("CARGO_PKG_VERSION")))
            .within(within(seconds));
        let listener = place.and_then(|place| place.listener.lock().unwrap_or_else(PoisonError::into_inner).take());
        let met = aside(py, move || match listener {
            Some(listener) => Member::host(listener, settings),
            None => Member::join(settings),
        })?;
        let member = Arc::new(met.map_err(|error| of_meeting(py, &error))?);
        Ok(Self { member: Own::new(Mutex::new(Some(member))), rank, world })
    }

    /// Gives `bytes` to all ranks and returns everybody's, by rank; None for a rank that an agreement went on without.
    fn all_gather<'py>(
        &self,
        py: Python<'py>,
        bytes: Vec<u8>,
        seconds: f64,
    ) -> PyResult<Vec<Option<Bound<'py, PyBytes>>>> {
        let member = self.member(py)?;
        let all = aside(py, move || member.all_gather(&bytes, within(seconds)))?;
        let all = all.map_err(|error| of_collective(py, &error))?;
        Ok(all.into_iter().map(|bytes| bytes.map(|bytes| PyBytes::new(py, &bytes))).collect())
    }

    /// Returns when all ranks have called it.
    fn barrier(&self, py: Python<'_>, seconds: f64) -> PyResult<()> {
        let member = self.member(py)?;
        aside(py, move || member.barrier(within(seconds)))?.map_err(|error| of_collective(py, &error))
    }

    /// Ranks whose processes are gone.
    fn lost(&self, py: Python<'_>) -> PyResult<Vec<u32>> {
        Ok(self.member(py)?.lost().iter().map(|rank| rank.0).collect())
    }

    /// Goes on after a meeting that failed, without the ranks of `mask`: all others call it. Returns all ranks that are given up.
    fn recover(&self, py: Python<'_>, mask: Vec<u32>, seconds: f64) -> PyResult<Vec<u32>> {
        let member = self.member(py)?;
        let mut patience = Patience::new();
        // Polled here: who is interrupted leaves, so that it may come again.
        let agreed = py.detach(|| {
            // Operations and generations are those of communicators, each of which agrees on its own.
            let proposal = Proposal { mask: mask.into_iter().map(Rank).collect(), generation: 0, op: 0 };
            let allowed = u64::try_from(within(seconds).as_nanos()).unwrap_or(u64::MAX);
            let agreement = member.agree(proposal, member.now() + Nanos(allowed));
            poll(agreement, &mut || patience.go_on(), || thread::sleep(Duration::from_micros(100)))
        });
        let Some(agreed) = agreed else { return Err(patience.into_error()) };
        Ok(agreed.map_err(|error| of(py, &error))?.mask.iter().map(|rank| rank.0).collect())
    }

    /// Leaves: the others are told that this rank is gone, once the endpoints made of it are closed, too.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let member = self.member.get(py)?.lock().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| drop(member));
        Ok(())
    }
}

impl Meeting {
    pub(crate) fn member(&self, py: Python<'_>) -> PyResult<Arc<Member>> {
        let member = self.member.get(py)?.lock().unwrap_or_else(PoisonError::into_inner);
        member.clone().ok_or_else(|| closed(py, "meeting"))
    }
}

/// A time in seconds; none that is negative or no number, and at most a year.
pub(crate) fn within(seconds: f64) -> Duration {
    Duration::from_secs_f64(if seconds > 0.0 { seconds.min(3.2e7) } else { 0.0 })
}
