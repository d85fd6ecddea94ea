//! The shared suite on CPU ranks that are threads of this process, with any transport between nodes.

pub(crate) mod fate;

use ep_conformance::script::{Script, Seen, execute};
use ep_conformance::{Backend, Requirement, Setup};
use ep_core::Settings;
use ep_core::engine::Engine;
use ep_core::layout::Queues;
use ep_core::machine::{Decorated, Machine as _};
use ep_core::transport::{AnyLanes, AnyTransport};
use ep_host::{Cluster, Machine};
use fate::Fate;

/// Where the suite gets its transports from: one for each communicator.
pub(crate) trait Network: Send + Sync + 'static {
    /// The transport for a communicator.
    fn transport(&self, setup: &Setup) -> AnyTransport;

    fn far_lanes(&self) -> Queues;
}

/// Those of the setup; every second communicator announces rows of low latency one by one.
pub(crate) fn settings(setup: &Setup) -> Settings {
    if setup.seed.is_multiple_of(2) { setup.settings.with_announced_rows() } else { setup.settings }
}

/// CPU ranks, and how they reach other nodes.
pub(crate) struct Host<N> {
    pub(crate) network: N,
    /// Cases of the random campaign.
    pub(crate) campaign: u32,
    /// Nodes, and ranks of each, of the largest communicator of the campaign.
    pub(crate) largest: (u32, u32),
    /// Of how many seeds of a case one is run.
    pub(crate) one_in: u64,
}

impl<N: Network> Host<N> {
    fn cluster(&self, setup: &Setup) -> Result<Cluster<AnyLanes>, String> {
        let builder = Cluster::builder(setup.topology).settings(settings(setup)).far(self.network.transport(setup));
        builder.build(setup.shape).map_err(|error| error.to_string())
    }
}

impl<N: Network> Backend for Host<N> {
    type Endpoint = Engine<Decorated<Machine<AnyLanes>, Fate>>;

    fn lacks(&self, what: Requirement) -> Option<&'static str> {
        match what {
            Requirement::Coordinators if self.network.far_lanes() == Queues::PER_ROLE => {
                Some("every role has far lanes of its own here")
            }
            Requirement::Incidents => Some("late and lost messages would take real time"),
            Requirement::Units => Some("Rust has no atomic of 16 bytes"),
            Requirement::Suspensions => Some("zombies are processes of their own: tests/processes"),
            Requirement::Plants => Some("most planted faults show as races, which only the simulator sees"),
            Requirement::Nodes
            | Requirement::Coordinators
            | Requirement::Departures
            | Requirement::Get
            | Requirement::LowLatency
            | Requirement::LowOrders
            | Requirement::Int8
            | Requirement::ByExpert
            | Requirement::Remainders
            | Requirement::SlotWeights
            | Requirement::ManyRanks
            | Requirement::FarLowLatency
            | Requirement::ManyNodes
            | Requirement::ModesHeard
            | Requirement::Scripts => None,
        }
    }

    fn campaign(&self) -> u32 {
        self.campaign
    }

    fn seeds(&self, most: u64) -> u64 {
        most.div_ceil(self.one_in)
    }

    fn largest(&self) -> (u32, u32) {
        self.largest
    }

    fn run<T, F>(&self, setup: &Setup, user: F) -> Result<Vec<Option<T>>, String>
    where
        T: Send + 'static,
        F: AsyncFn(Self::Endpoint) -> T + Send + Sync,
    {
        let ran = self.cluster(setup)?.run_machines(async |machine| {
            let fate = Fate::new(machine.rank(), &setup.incidents, false);
            let engine = Engine::new(Decorated::new(machine, fate.clone())).map_err(|error| error.to_string())?;
            Ok(fate.befall(user(engine)).await)
        });
        ran.map_err(|error| error.to_string())?.into_iter().collect()
    }

    /// The scripts of a rank take turns on its thread. No rank leaves before all scripts have ended.
    fn probe(&self, setup: &Setup, scripts: &[Script]) -> Result<Vec<Option<Vec<Seen>>>, String> {
        let ran = self.cluster(setup)?.run_machines(async |machine| {
            let mine = (0u16..).zip(scripts).filter(|(_, script)| script.rank == machine.rank());
            let logs = mine.map(|(number, script)| execute(&machine, script, number));
            (futures_util::future::join_all(logs).await, machine)
        });
        let ran = ran.map_err(|error| error.to_string())?;
        let (mut logs, _machines): (Vec<_>, Vec<_>) =
            ran.into_iter().map(|(logs, machine)| (logs.into_iter(), machine)).unzip();
        Ok(scripts.iter().map(|script| logs[script.rank.index()].next()).collect())
    }
}
