//! The suite's ranks as processes of this host, with any transport between their nodes.

use std::future::Future;
use std::sync::Arc;

use ep_bootstrap::Member;
use ep_conformance::processes::{Place, Processes};
use ep_conformance::{Requirement, Setup};
use ep_core::Rank;
use ep_core::engine::Engine;
use ep_core::machine::Decorated;
use ep_core::transport::AnyLanes;
use ep_host::{Cluster, Machine, block_on};

use crate::common::fate::Fate;
use crate::common::{Network, settings};

/// One rank, in a process of its own.
pub(crate) struct Apart<N> {
    pub(crate) network: N,
    /// Cases of the random campaign.
    pub(crate) campaign: u32,
    /// Of how many seeds of a case one is run: each run is a meeting of processes, and most seeds change nothing here.
    pub(crate) one_in: u64,
    /// What befalls a rank that has met the others; whether it misreads rows from then on.
    pub(crate) befall: fn(Rank) -> Result<bool, String>,
}

impl<N: Network> Processes for Apart<N> {
    type Endpoint = Engine<Decorated<Machine<AnyLanes>, Fate>>;
    type Stay = Arc<Member>;

    fn lacks(&self, what: Requirement) -> Option<&'static str> {
        match what {
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

    fn join(&self, setup: &Setup, place: Place) -> Result<(Self::Endpoint, Arc<Member>), String> {
        let text = |error: &dyn std::error::Error| error.to_string();
        let rank = place.rank;
        let member = place.meet()?;
        let misreads = (self.befall)(rank)?;
        let machine = Cluster::builder(setup.topology)
            .settings(settings(setup))
            .far(self.network.transport(setup))
            .join_machine(setup.shape, &member)
            .map_err(|error| text(&error))?;
        let fate = Fate::new(rank, &setup.incidents, true).misreading(misreads);
        let engine = Engine::new(Decorated::new(machine, fate)).map_err(|error| text(&error))?;
        Ok((engine, member))
    }

    fn block_on<T>(&self, work: impl Future<Output = T>) -> T {
        block_on(work)
    }
}
