//! The explore scheduler under the shared suite, for each way in which lanes between nodes may share queues.

use ep_conformance::script::{Script, Seen, execute};
use ep_conformance::{Backend, Requirement, Setup};
use ep_core::engine::Engine;
use ep_core::layout::Queues;
use ep_core::machine::Machine as _;
use ep_sim::{Cluster, Machine, Outcome};

/// The explore scheduler as a backend of the suite.
pub(crate) struct Simulator {
    /// Which of its lanes between nodes share a queue.
    pub(crate) far_lanes: Queues,
    /// Whether low latency travels, within a node, as GPUs' does: as units, or each row is announced.
    pub(crate) units: bool,
    /// Cases of the campaign.
    pub(crate) campaign: u32,
}

impl Simulator {
    fn cluster(&self, setup: &Setup) -> Result<Cluster, String> {
        let settings =
            if self.units { setup.settings.with_units(&setup.topology).with_announced_rows() } else { setup.settings };
        let mut builder = Cluster::builder(setup.topology).seed(setup.seed).settings(settings);
        for &incident in &setup.incidents {
            builder = builder.incident(incident);
        }
        builder.far_lanes(self.far_lanes).build(setup.shape).map_err(|error| error.to_string())
    }
}

impl Backend for Simulator {
    type Endpoint = Engine<Machine>;

    fn lacks(&self, what: Requirement) -> Option<&'static str> {
        let per_role = what == Requirement::Coordinators && self.far_lanes == Queues::PER_ROLE;
        per_role.then_some("every role has far queues of its own")
    }

    fn campaign(&self) -> u32 {
        self.campaign
    }

    fn run<T, F>(&self, setup: &Setup, user: F) -> Result<Vec<Option<T>>, String>
    where
        T: Send + 'static,
        F: AsyncFn(Engine<Machine>) -> T + Send + Sync,
    {
        let run = self.cluster(setup)?.run(user).map_err(|violation| violation.to_string())?;
        Ok(run.outcomes.into_iter().map(Outcome::finished).collect())
    }

    fn probe(&self, setup: &Setup, scripts: &[Script]) -> Result<Vec<Option<Vec<Seen>>>, String> {
        let run = self
            .cluster(setup)?
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
