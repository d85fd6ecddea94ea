//! The shared suite on the simulator's timed scheduler: what no incident and no planted fault is needed for. Runs of several
//! nodes take place on one thread and on several, and come out the same.

use std::num::NonZeroUsize;

use ep_conformance::harness::share;
use ep_conformance::script::{Script, Seen, execute};
use ep_conformance::{Backend, Requirement, Setup};
use ep_core::engine::Engine;
use ep_core::layout::Queues;
use ep_core::machine::Machine as _;
use ep_sim::{Builder, Cluster, Machine, Model, Outcome, Run};

pub(crate) struct Timed {
    /// Whether low latency travels, within a node, as GPUs' does: as units, or each row is announced.
    pub(crate) units: bool,
}

fn builder(setup: &Setup, units: bool) -> Builder {
    // Each seed has a machine of its own: whether links or cores are the narrow place changes who waits for whom.
    let model = if setup.seed.is_multiple_of(2) { Model::h200_node() } else { Model::h800_cx7() };
    // And each table of lanes and queues has one seed of three.
    let far_lanes = Queues::NAMED[setup.seed as usize % Queues::NAMED.len()];
    let settings =
        if units { setup.settings.with_units(&setup.topology).with_announced_rows() } else { setup.settings };
    Cluster::builder(setup.topology).seed(setup.seed).settings(settings).far_lanes(far_lanes).timed(model)
}

impl Backend for Timed {
    type Endpoint = Engine<Machine>;

    fn lacks(&self, what: Requirement) -> Option<&'static str> {
        match what {
            Requirement::Get
            | Requirement::Units
            | Requirement::Nodes
            | Requirement::LowLatency
            | Requirement::Int8
            | Requirement::ByExpert
            | Requirement::Remainders
            | Requirement::SlotWeights
            | Requirement::LowOrders
            | Requirement::ManyRanks
            | Requirement::FarLowLatency
            | Requirement::ManyNodes
            | Requirement::ModesHeard
            | Requirement::Scripts => None,
            Requirement::Incidents | Requirement::Departures | Requirement::Suspensions => {
                Some("incidents are the explore scheduler's")
            }
            Requirement::Coordinators => Some("not in every run"),
            Requirement::Plants => Some("what breaks the rules is the explore scheduler's to find"),
        }
    }

    fn campaign(&self) -> u32 {
        share(200, 30)
    }

    fn run<T, F>(&self, setup: &Setup, user: F) -> Result<Vec<Option<T>>, String>
    where
        T: Send + 'static,
        F: AsyncFn(Engine<Machine>) -> T + Send + Sync,
    {
        let cluster = builder(setup, self.units).build(setup.shape).map_err(|error| error.to_string())?;
        let on = |threads| cluster.run_on(threads, &user).map_err(|violation| violation.to_string());
        let run = on(NonZeroUsize::MIN)?;
        if setup.topology.nodes() > 1 {
            let threads = NonZeroUsize::new(2 + setup.seed as usize % 3).unwrap_or(NonZeroUsize::MIN);
            let other = on(threads)?;
            let came = |run: &Run<T>| (run.events, run.time, run.resident);
            if came(&run) != came(&other) {
                return Err(format!("{threads} threads: {:?} instead of {:?}", came(&other), came(&run)));
            }
        }
        Ok(run.outcomes.into_iter().map(Outcome::finished).collect())
    }

    fn probe(&self, setup: &Setup, scripts: &[Script]) -> Result<Vec<Option<Vec<Seen>>>, String> {
        // Scripts may wait for what never comes, and for nothing else.
        let cluster =
            builder(setup, self.units).deadlines(true).build(setup.shape).map_err(|error| error.to_string())?;
        let run = cluster
            .run_machines(async |machine| {
                let mine = (0u16..).zip(scripts).filter(|(_, script)| script.rank == machine.rank());
                let runs = mine.map(|(number, script)| execute(&machine, script, number));
                futures_util::future::join_all(runs).await
            })
            .map_err(|violation| violation.to_string())?;
        let mut logs: Vec<_> = run.outcomes.into_iter().map(|rank| rank.finished().map(Vec::into_iter)).collect();
        Ok(scripts.iter().map(|script| logs[script.rank.index()].as_mut().and_then(Iterator::next)).collect())
    }
}
