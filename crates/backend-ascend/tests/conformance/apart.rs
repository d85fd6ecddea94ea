//! The suite's ranks as processes, each on a twin of its own.

use std::cell::RefCell;
use std::future::Future;
use std::process::exit;
use std::sync::Arc;

use ep_ascend::twin::{Host, Library, Machine, Session};
use ep_ascend::{AscendEndpoint, Cluster, block_on};
use ep_bootstrap::Member;
use ep_conformance::processes::{Place, Processes};
use ep_conformance::{Backend as _, Requirement, Setup};
use ep_core::incident::Incident;

use crate::Twin;
use crate::common::befall;

thread_local! {
    /// The twin of a run, from its meeting to the end of its work.
    static TWIN: RefCell<Option<(Session, u32)>> = const { RefCell::new(None) };
}

/// One rank, in a process of its own.
pub(crate) struct Apart {
    pub(crate) library: Library,
    /// What ranks of one process lack.
    pub(crate) here: Twin,
}

impl Processes for Apart {
    type Endpoint = AscendEndpoint;
    type Stay = Arc<Member>;

    fn lacks(&self, what: Requirement) -> Option<&'static str> {
        match what {
            Requirement::Incidents => Some("late and lost messages would take real time: they come with one process"),
            Requirement::Suspensions => Some("zombies are processes that are stopped: tests/processes"),
            Requirement::ManyRanks => Some("sixteen machines would take turns on few cores"),
            _ => self.here.lacks(what),
        }
    }

    fn campaign(&self) -> u32 {
        4
    }

    fn makes_fp8(&self) -> bool {
        self.here.makes_fp8()
    }

    fn largest(&self) -> (u32, u32) {
        (3, 3)
    }

    fn seeds(&self, most: u64) -> u64 {
        self.here.seeds(most).min(1)
    }

    fn join(&self, setup: &Setup, place: Place) -> Result<(AscendEndpoint, Arc<Member>), String> {
        let text = |error: &dyn std::error::Error| error.to_string();
        let (rank, ranks) = (place.rank, place.ranks);
        let member = place.meet()?;
        let seed = setup.seed.wrapping_add(u64::from(rank.0) << 32);
        let machine = Machine::new(&self.library, seed, ranks, setup.topology.ranks_per_node());
        let session =
            Host::install(machine.map_err(|error| text(&error))?, "Ascend910B1").map_err(|error| text(&error))?;
        session.share();
        for incident in &setup.incidents {
            let befalls = session.befall(|machine| match *incident {
                Incident::Crash { rank: of, after, .. } if of == rank => machine.crash(of.0, after),
                Incident::Starve { rank: of } if of == rank => machine.starve(of.0),
                // It leaves when its work is done; all else is of another rank.
                _ => Ok(()),
            });
            befalls.map_err(|error| text(&error))?;
        }
        let builder = Cluster::builder(setup.topology, self.library.path()).settings(setup.settings);
        let builder = builder.roles(Twin::roles(setup.seed, setup.topology.nodes())).devices(vec![rank.0]);
        let endpoint = builder.join(&session.table(), setup.shape, &member).map_err(|error| text(&error))?;
        TWIN.set(Some((session, rank.0)));
        Ok((endpoint, member))
    }

    fn block_on<T>(&self, work: impl Future<Output = T>) -> T {
        let Some((session, rank)) = TWIN.take() else { return block_on(work) };
        let done = block_on(befall(work, || session.has_crashed(rank), false));
        let Some(done) = done else { exit(1) };
        // A process that ends so is the failure of its case.
        assert_eq!(session.fault(), None, "of the twin of rank {rank}");
        assert_eq!(session.left(), [0, 0, 0], "blocks of memory, streams, events left of rank {rank}");
        done
    }
}
