//! What the suite needs from a backend.

use ep_core::incident::Incident;
use ep_core::{Error, Fault, Layout, LowLatency, Settings, Shape, Topology};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::script::{Script, Seen};

/// A communicator that a case asks for.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Sizes of the layer.
    pub shape: Shape,
    /// All ranks.
    pub topology: Topology,
    /// Memory and time.
    pub settings: Settings,
    /// What the backend draws its own freedom from: schedules, delays.
    pub seed: u64,
    /// What goes wrong.
    pub incidents: Vec<Incident>,
}

impl Setup {
    /// A communicator with automatic settings where nothing goes wrong.
    ///
    /// # Errors
    /// None at present; a `Result` because callers build settings in the same breath.
    pub fn new(shape: Shape, topology: Topology, seed: u64) -> Result<Self, Error> {
        Ok(Self { shape, topology, settings: Settings::auto(&shape, &topology), seed, incidents: Vec::new() })
    }

    /// The same with other settings.
    #[must_use]
    pub const fn settings(mut self, settings: Settings) -> Self {
        self.settings = settings;
        self
    }

    /// The same with an incident.
    #[must_use]
    pub fn incident(mut self, incident: Incident) -> Self {
        self.incidents.push(incident);
        self
    }
}

/// What a case needs beyond the contract's minimum.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Requirement {
    /// Near lanes offer `get`.
    Get,
    /// Near lanes carry units.
    Units,
    /// The backend has low latency.
    LowLatency,
    /// The backend has several nodes.
    Nodes,
    /// The backend has low latency between nodes.
    FarLowLatency,
    /// The backend can make every incident happen.
    Incidents,
    /// The backend can slow ranks down and end them so that their peers notice it: [`Incident::Starve`], [`Incident::Exit`]
    /// and noticed [`Incident::Crash`]es. Part of [`Requirement::Incidents`], for backends on which lost and late messages
    /// would take real time.
    Departures,
    /// The backend can suspend a rank and let it go on when the others have given it up: [`Incident::Suspend`].
    Suspensions,
    /// What a rank waits for in one mode is heard by those who wait for it in the other, so that nobody is blamed who waits itself.
    ModesHeard,
    /// The backend runs protocol faults that tests plant.
    Plants,
    /// The rows to a rank of another node share a queue, so that there are coordinators.
    Coordinators,
    /// The backend executes scripts of verbs ([`Backend::probe`]).
    Scripts,
    /// More than eight ranks.
    ManyRanks,
    /// More than four nodes.
    ManyNodes,
    /// Dispatches by expert ([`ep_core::engine::Dispatch::by_expert`]).
    ByExpert,
    /// What rounding the sums of rows by expert leaves ([`ep_core::engine::Combine::remainder`]).
    Remainders,
    /// Weights of slots of rows by expert ([`ep_core::engine::ByExpert::weights`]).
    SlotWeights,
    /// Rows of low latency by source, or packed ([`ep_core::engine::low_latency::LowOrder`]).
    LowOrders,
    /// Rows of [`Element::Int8`](ep_core::Element::Int8).
    Int8,
}

/// What every rank returned. Where some failed, the error that says most: of a rank that found out by itself, before those of ranks that
/// others have told, or that saw others go. A lane that broke says little more: whoever fails leaves, and its lanes break.
pub(crate) fn finished<T>(outcomes: Vec<Option<Result<T, Error>>>) -> Result<Vec<T>, String> {
    let weight = |error: &Error| match error.failure().map(|failure| failure.fault) {
        Some(Fault::Aborted { .. } | Fault::PeerGone { .. }) => 0,
        Some(Fault::LaneBroken { .. }) => 1,
        _ => 2,
    };
    let mut all = Vec::with_capacity(outcomes.len());
    let mut worst: Option<(u32, String)> = None;
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        let (weight, error) = match outcome {
            Some(Ok(value)) => {
                all.push(value);
                continue;
            }
            Some(Err(error)) => (weight(&error), format!("rank {rank}: {error}")),
            None => (1, format!("rank {rank} did not finish")),
        };
        if worst.as_ref().is_none_or(|(heaviest, _)| weight > *heaviest) {
            worst = Some((weight, error));
        }
    }
    worst.map_or(Ok(all), |(_, error)| Err(error))
}

/// What a rank's work gives: it can be sent from the rank's process to another.
pub trait Travels: Serialize + DeserializeOwned + Send + 'static {}

impl<T: Serialize + DeserializeOwned + Send + 'static> Travels for T {}

/// A backend under test.
pub trait Backend: Send + Sync + 'static {
    /// Endpoints of this backend. One without low latency says so by [`Requirement::LowLatency`].
    type Endpoint: LowLatency;

    /// Why no case can run here at all, for want of a device; none when cases can.
    fn absent(&self) -> Option<&'static str> {
        None
    }

    /// Why a case that needs `what` cannot run here; none when it can.
    fn lacks(&self, what: Requirement) -> Option<&'static str>;

    /// Whether low latency makes rows of FP8. Where it does not, they are refused.
    fn makes_fp8(&self) -> bool {
        true
    }

    /// The windows of this backend for `layout`: with regions behind it, where its roles are kernels.
    ///
    /// # Errors
    /// Where there is no room for them.
    fn window(&self, layout: Layout) -> Result<Layout, Error> {
        Ok(layout)
    }

    /// Cases of the random campaign to run when the environment does not say.
    fn campaign(&self) -> u32 {
        64
    }

    /// How many of the `most` seeds of a case to run: all, where time costs nothing.
    fn seeds(&self, most: u64) -> u64 {
        most
    }

    /// Nodes, and ranks of each node, of the largest communicators that the campaign may draw.
    fn largest(&self) -> (u32, u32) {
        (8, 8)
    }

    /// Whether what the campaign found is written down, to be tried first the next time.
    fn persists(&self) -> bool {
        true
    }

    /// Runs `user` once on every rank and gives what each returned; none for ranks that an incident ended.
    ///
    /// # Errors
    /// What the backend itself found wrong: a race, a deadlock, a set-up that failed; with what reproduces it.
    fn run<T, F>(&self, setup: &Setup, user: F) -> Result<Vec<Option<T>>, String>
    where
        T: Travels,
        F: AsyncFn(Self::Endpoint) -> T + Send + Sync;

    /// Runs `user` as [`Backend::run`] does, and has `judge` look at what the ranks returned: once, where ranks are processes that all go
    /// through the case. The oracle's word on all ranks takes time and memory. What `judge` gives, all of them get.
    ///
    /// # Errors
    /// As [`Backend::run`], and those of `judge`.
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
        judge(self.run(setup, user)?)
    }

    /// Runs scripts of verbs, at the same time, and gives what each step saw; none for ranks that an incident ended.
    ///
    /// # Errors
    /// As [`Backend::run`].
    fn probe(&self, setup: &Setup, scripts: &[Script]) -> Result<Vec<Option<Vec<Seen>>>, String>;
}

#[cfg(test)]
mod tests {
    use ep_core::error::LaneCause;
    use ep_core::port::{LaneId, LaneKind};
    use ep_core::{Failure, Rank};

    use super::*;

    #[test]
    fn of_failures_the_one_is_told_that_its_rank_found_out_by_itself() {
        let lane = LaneId { peer: Rank(1), kind: LaneKind::Control };
        let failed = |fault| Some(Err(Error::Failed(Failure { op: 1, culprit: Rank(1), reporter: Rank(0), fault })));
        let told = failed(Fault::Aborted { reporter: Rank(1), culprit: Rank(2) });
        let broken = failed(Fault::LaneBroken { lane, cause: LaneCause::Flushed });
        let found = failed(Fault::Mismatch { field: "operation of a row", mine: 1, theirs: 2, peer: Rank(1) });
        let said = |outcomes: &[Option<Result<(), Error>>]| finished(outcomes.to_vec()).unwrap_err();
        assert!(said(&[told.clone(), broken.clone(), Some(Ok(()))]).starts_with("rank 1: "));
        assert!(said(&[told, broken, Some(Ok(())), found]).starts_with("rank 3: "));
    }
}
