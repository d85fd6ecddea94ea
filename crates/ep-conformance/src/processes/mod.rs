//! The suite with ranks as processes: every rank's process runs the test program again, and in it the case.
//!
//! ```text
//!   test program                 rank 0                  rank 1  ...
//!   (the hub) --- case ------->  body of the case        body of the case
//!             <-- run, port ---  Backend::run: opens     Backend::run: waits
//!             --- meet at ------------------------->     for the port
//!                                user's work      <-->   user's work          (the backend under test)
//!             <-- results -----  result                  result
//!             --- all results->  goes on                 goes on
//!             <-- verdict -----  end of the case         end of the case
//! ```
//!
//! Where results are only looked at ([`Backend::run_judged`]), one process alone gets them, and all get what it says.
//!
//! A closure cannot be sent, so all processes run the whole case, in step: they differ only in whose work [`Backend::run`] does,
//! and all of them get everybody's results. Pipes carry this; the backend's own meeting has nothing to do with it.
//!
//! A process is started when a run needs it first. One that an incident has ended is started again after that run, and told
//! what the runs before gave: it goes through the case up to there without doing any of them. Any other end of a process is the
//! failure of its case, as is the end of the case's time; then all processes of the case are killed. A rank's process ends when
//! the test program does, however that ends.

mod hub;
pub mod plans;
mod rank;
pub mod started;
mod wire;

pub(crate) use hub::Pool;
pub(crate) use rank::{is_rank, serve};
pub(crate) use wire::{pack, unpack};

use std::future::Future;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;

use ep_bootstrap::{Member, Settings};
use ep_core::{LowLatency, Rank};

use crate::backend::{Backend, Requirement, Setup, Travels};
use crate::script::{Script, Seen};

/// Where the process of a rank meets the others of a run.
#[derive(Debug)]
pub struct Place {
    /// The own rank.
    pub rank: Rank,
    /// Ranks of the run.
    pub ranks: u32,
    /// A loopback address, the same for all.
    pub address: SocketAddr,
    /// Rank 0 listens there already.
    pub listener: Option<TcpListener>,
}

impl Place {
    /// Meets the other ranks there.
    ///
    /// # Errors
    /// Who did not come, or what else went wrong.
    pub fn meet(self) -> Result<Arc<Member>, String> {
        let settings = Settings::new(self.rank, self.ranks, self.address.to_string());
        let member = match self.listener {
            Some(listener) => Member::host(listener, settings),
            None => Member::join(settings),
        };
        member.map(Arc::new).map_err(|error| error.to_string())
    }
}

/// A backend under test whose ranks are processes of this host. What it says is said in the process of every rank alike.
pub trait Processes: Send + Sync + 'static {
    /// Endpoints of this backend. One without low latency says so by [`Requirement::LowLatency`].
    type Endpoint: LowLatency;
    /// What a rank holds until all ranks are through with a run, for instance its place among them.
    type Stay;

    /// As [`Backend::absent`].
    fn absent(&self) -> Option<&'static str> {
        None
    }

    /// As [`Backend::lacks`]; [`Requirement::Scripts`] and [`Requirement::Plants`] are never asked for.
    fn lacks(&self, what: Requirement) -> Option<&'static str>;

    /// As [`Backend::campaign`].
    fn campaign(&self) -> u32 {
        16
    }

    /// As [`Backend::seeds`].
    fn seeds(&self, most: u64) -> u64 {
        most
    }

    /// As [`Backend::makes_fp8`].
    fn makes_fp8(&self) -> bool {
        true
    }

    /// As [`Backend::largest`].
    fn largest(&self) -> (u32, u32) {
        (8, 8)
    }

    /// This process's endpoint of a communicator. An incident that crashes this rank ends the process, by
    /// [`std::process::exit`] for instance; that the process exits after its work is seen to.
    ///
    /// # Errors
    /// Why the ranks did not come together.
    fn join(&self, setup: &Setup, place: Place) -> Result<(Self::Endpoint, Self::Stay), String>;

    /// Runs a rank's work to its end on this thread.
    fn block_on<T>(&self, work: impl Future<Output = T>) -> T;
}

/// The suite's view of ranks that are processes. Outside of a rank's process it only says what the backend lacks.
pub(crate) struct InProcesses<P> {
    pub(crate) backend: P,
    /// Of a rank's process.
    pub(crate) session: Option<Arc<rank::Session>>,
}

impl<P: Processes> InProcesses<P> {
    fn session(&self) -> Result<&rank::Session, String> {
        self.session.as_deref().ok_or_else(|| "this is no rank's process".to_owned())
    }

    /// This rank's part of a run.
    fn part<T>(
        &self,
        setup: &Setup,
        user: &impl AsyncFn(P::Endpoint) -> T,
        place: Place,
    ) -> Result<(T, P::Stay), String> {
        let (endpoint, stay) = self.backend.join(setup, place)?;
        Ok((self.backend.block_on(user(endpoint)), stay))
    }
}

impl<P: Processes> Backend for InProcesses<P> {
    type Endpoint = P::Endpoint;

    fn absent(&self) -> Option<&'static str> {
        self.backend.absent()
    }

    fn lacks(&self, what: Requirement) -> Option<&'static str> {
        match what {
            Requirement::Scripts => Some("scripts need no processes: they run with threads"),
            Requirement::Plants => Some("planted faults are looked for with threads"),
            _ => self.backend.lacks(what),
        }
    }

    fn campaign(&self) -> u32 {
        self.backend.campaign()
    }

    fn seeds(&self, most: u64) -> u64 {
        self.backend.seeds(most)
    }

    fn makes_fp8(&self) -> bool {
        self.backend.makes_fp8()
    }

    fn largest(&self) -> (u32, u32) {
        self.backend.largest()
    }

    fn persists(&self) -> bool {
        false
    }

    fn run<T, F>(&self, setup: &Setup, user: F) -> Result<Vec<Option<T>>, String>
    where
        T: Travels,
        F: AsyncFn(Self::Endpoint) -> T + Send + Sync,
    {
        self.session()?.run(setup, |place| self.part(setup, &user, place))
    }

    fn run_judged<T, F, V>(
        &self,
        setup: &Setup,
        user: F,
        judge: impl FnOnce(Vec<Option<T>>) -> Result<V, String>,
    ) -> Result<V, String>
    where
        T: Travels,
        F: AsyncFn(Self::Endpoint) -> T + Send + Sync,
        V: Travels,
    {
        self.session()?.run_judged(setup, |place| self.part(setup, &user, place), judge)
    }

    fn probe(&self, _: &Setup, _: &[Script]) -> Result<Vec<Option<Vec<Seen>>>, String> {
        Err("scripts run with threads".into())
    }
}
