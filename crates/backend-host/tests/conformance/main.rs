//! The shared suite on CPU ranks: threads of this process, then processes.

mod fate;

use std::future::Future;
use std::sync::Arc;

use ep_bootstrap::Member;
use ep_conformance::processes::{Place, Processes};
use ep_conformance::script::{Script, Seen, execute};
use ep_conformance::{Backend, Requirement, Setup};
use ep_core::engine::Engine;
use ep_core::machine::{Decorated, Machine as _};
use ep_host::{Builder, Cluster, Machine, block_on};
use fate::Fate;

struct Host;

fn builder(setup: &Setup) -> Builder {
    Cluster::builder(setup.topology).settings(setup.settings)
}

fn cluster(setup: &Setup) -> Result<Cluster, String> {
    builder(setup).build(setup.shape).map_err(|error| error.to_string())
}

/// What ranks lack, be they threads or processes.
fn lacks(what: Requirement) -> Option<&'static str> {
    match what {
        Requirement::Nodes => Some("one node; there is no transport between nodes yet"),
        Requirement::Coordinators => Some("one node has no lanes between nodes"),
        Requirement::Incidents => Some("late and lost messages would take real time"),
        Requirement::Plants => Some("most planted faults show as races, which only the simulator sees"),
        Requirement::Departures
        | Requirement::Get
        | Requirement::LowLatency
        | Requirement::ManyRanks
        | Requirement::Scripts => None,
    }
}

impl Backend for Host {
    type Endpoint = Engine<Decorated<Machine, Fate>>;

    fn lacks(&self, what: Requirement) -> Option<&'static str> {
        lacks(what)
    }

    fn campaign(&self) -> u32 {
        400
    }

    fn run<T, F>(&self, setup: &Setup, user: F) -> Result<Vec<Option<T>>, String>
    where
        T: Send + 'static,
        F: AsyncFn(Self::Endpoint) -> T + Send + Sync,
    {
        let ran = cluster(setup)?.run_machines(async |machine| {
            let fate = Fate::new(machine.rank(), &setup.incidents);
            let engine = Engine::new(Decorated::new(machine, fate.clone())).map_err(|error| error.to_string())?;
            Ok(fate.befall(user(engine)).await)
        });
        ran.map_err(|error| error.to_string())?.into_iter().collect()
    }

    /// The scripts of a rank take turns on its thread. No rank leaves before all scripts have ended.
    fn probe(&self, setup: &Setup, scripts: &[Script]) -> Result<Vec<Option<Vec<Seen>>>, String> {
        let ran = cluster(setup)?.run_machines(async |machine| {
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

/// One rank, in a process of its own.
struct Apart;

impl Processes for Apart {
    type Endpoint = Engine<Decorated<Machine, Fate>>;
    type Stay = Arc<Member>;

    fn lacks(&self, what: Requirement) -> Option<&'static str> {
        lacks(what)
    }

    fn campaign(&self) -> u32 {
        60
    }

    /// Each run is a meeting of processes, and most seeds change nothing here.
    fn seeds(&self, most: u64) -> u64 {
        most.div_ceil(4)
    }

    fn join(&self, setup: &Setup, place: Place) -> Result<(Self::Endpoint, Arc<Member>), String> {
        let text = |error: &dyn std::error::Error| error.to_string();
        let Place { rank, ranks, address, listener } = place;
        let settings = ep_bootstrap::Settings::new(rank, ranks, address.to_string());
        let member = match listener {
            Some(listener) => Member::host(listener, settings),
            None => Member::join(settings),
        };
        let member = Arc::new(member.map_err(|error| text(&error))?);
        let machine = builder(setup).join_machine(setup.shape, &member).map_err(|error| text(&error))?;
        let fate = Fate::of_process(rank, &setup.incidents);
        let engine = Engine::new(Decorated::new(machine, fate)).map_err(|error| text(&error))?;
        Ok((engine, member))
    }

    fn block_on<T>(&self, work: impl Future<Output = T>) -> T {
        block_on(work)
    }
}

ep_conformance::suite!(Host, processes: Apart);
