//! The suite's ranks as processes of one node.

use std::future::Future;
use std::sync::Arc;

use ep_bootstrap::Member;
use ep_conformance::processes::{Place, Processes};
use ep_conformance::{Requirement, Setup};
use ep_core::engine::Engine;
use ep_core::machine::Decorated;
use ep_host::{Cluster, Machine, block_on};

use crate::common::fate::Fate;

/// One rank, in a process of its own.
pub(crate) struct Apart;

impl Processes for Apart {
    type Endpoint = Engine<Decorated<Machine, Fate>>;
    type Stay = Arc<Member>;

    fn lacks(&self, what: Requirement) -> Option<&'static str> {
        match what {
            Requirement::Nodes => Some("ranks that are processes have no transport for tests between nodes"),
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
        let machine = Cluster::builder(setup.topology)
            .settings(setup.settings)
            .join_machine(setup.shape, &member)
            .map_err(|error| text(&error))?;
        let fate = Fate::new(rank, &setup.incidents, true);
        let engine = Engine::new(Decorated::new(machine, fate)).map_err(|error| text(&error))?;
        Ok((engine, member))
    }

    fn block_on<T>(&self, work: impl Future<Output = T>) -> T {
        block_on(work)
    }
}
