//! The shared suite on the twin: the endpoint and its kernels as they ship, every rank a device of one machine, by turns on one thread; then
//! ranks that are processes, each with a machine of its own.
//!
//! `EP_TWIN_ALL` runs all cases with ranks as processes, not a share. `EP_SEEDS` says how many seeds of a case are run, for this backend
//! alone `EP_NPU_SEEDS`; `EP_CASES` how many scenarios of the campaign, `EP_SEED` from which on.

use std::process::ExitCode;

mod apart;
#[path = "../common/mod.rs"]
mod common;
mod zombies;

use ep_ascend::args::Plant;
use ep_ascend::twin::{Host, Library, Machine, Session, TwinError};
use ep_ascend::{AscendEndpoint, Cluster, Roles};
use ep_conformance::harness::{Suite, run_case, share};
use ep_conformance::script::{Script, Seen, device};
use ep_conformance::{Backend, Requirement, Setup, Travels};
use ep_core::incident::Incident;
use ep_core::port::{Cell, Counter};
use ep_core::{Endpoint as _, Error, Layout};

use apart::Apart;
use common::{IN_CASES, befall};
use libtest_mimic::{Failed, Trial};
use zombies::Zombies;

/// The variable that tells ranks' processes where the library is.
const LIBRARY: &str = "EP_TEST_TWIN";

/// The kernels as they ship, and the one for scripts; with macros for all of them.
fn compiled(defines: &[&str]) -> Library {
    let sources: Vec<_> = ep_ascend::sources().into_iter().chain([ep_ascend::probe::source()]).collect();
    Library::build(&ep_ascend::headers(), &sources, defines).unwrap_or_else(|error| panic!("{error}"))
}

/// The same without macros, compiled once for this process and those that it starts.
fn shipped() -> Library {
    if let Some(path) = std::env::var_os(LIBRARY) {
        // SAFETY: the program that has started this one, the same, has built it.
        return unsafe { Library::open(path.as_ref()) }.unwrap_or_else(|error| panic!("{error}"));
    }
    let library = compiled(&[]);
    // SAFETY: no other thread runs yet.
    unsafe { std::env::set_var(LIBRARY, library.path()) };
    library
}

/// Cases that run with ranks as processes, too, unless `EP_TWIN_ALL` asks for all.
const APART: [&str; 12] = [
    "engine_bias_and_weights",
    "bounds_ranks_that_do_different_things_find_out",
    "bounds_what_a_rank_said_before_it_ended_explains_its_end",
    "failure_a_noticed_crash_ends_waits_at_once",
    "failure_a_rank_that_leaves_after_its_last_operation_fails_nobody",
    "failure_two_recoveries_in_a_row",
    "low_latency_over_nodes_is_a_full_mesh",
    "low_latency_over_nodes_who_leaves_with_its_lost_rank_is_not_blamed",
    "nodes_two_of_two",
    "nodes_a_batch_of_a_hundred_times_the_rings",
    "nodes_a_lost_rank_takes_its_node_along",
    "nodes_a_rank_that_leaves_after_its_last_operation_fails_nobody",
];

/// Cases that take seconds each, left to a thorough run.
const LEFT: [&str; 8] = [
    "twin::by_expert_rows_of_several_channels",
    "twin::by_expert_thousands_of_experts_at_a_rank",
    "twin::engine_fp8_rows_of_every_scaling",
    "twin::engine_fp8_scales_may_lie_apart",
    "twin::failure_a_starved_rank_is_only_slow",
    "twin::low_latency_many_operations",
    "twin::nodes_every_chunk_and_credit_of_far_rings",
    "twin::nodes_with_rings_of_one_slot_everywhere",
];

/// Ranks on the twin.
struct Twin {
    library: Library,
    seeds: u64,
    /// A fault of kernels that are built for tests; 0 for none.
    plant: u32,
}

impl Twin {
    fn new(library: Library) -> Self {
        let said = |name| {
            std::env::var(name)
                .ok()
                .map(|seeds| seeds.parse().unwrap_or_else(|_| panic!("{name} is a number of seeds")))
        };
        let seeds = said("EP_NPU_SEEDS").or_else(|| said("EP_SEEDS")).unwrap_or(share(3, 1));
        Self { library, seeds, plant: 0 }
    }

    /// Few cores a rank, and every seed other ones.
    fn roles(seed: u64, nodes: u32) -> Roles {
        let of = |at: u64| 1 + (seed / at % 3) as u32;
        let (coordinators, forwarders) =
            if nodes > 1 { (2 + (seed / 5 % 2) as u32, 1 + (seed / 2 % 2) as u32) } else { (1, 0) };
        Roles { senders: of(1), coordinators, forwarders, forwarder_coordinators: 0, receivers: of(3) }
    }
}

/// Ticks of a turn in which nothing moves, where a wait must last to its deadline: 10 us. Such deadlines are of a second.
const HURRY: u64 = 500;
const NANOS_PER_TICK: u64 = 20;

/// Lets an incident befall the machine. Of a lane its cells' lines are lost or late, in both banks: what is never announced has not come.
fn strike(machine: &mut Machine, layout: &Layout, incident: &Incident) -> Result<(), TwinError> {
    let (ways, kind, after, late) = match *incident {
        Incident::Crash { rank, after, noticed } => {
            if !noticed {
                machine.hurry(HURRY);
            }
            return machine.crash(rank.0, after);
        }
        Incident::Starve { rank } => return machine.starve(rank.0),
        Incident::Suspend { rank, after } => {
            machine.hurry(HURRY);
            return machine.suspend(rank.0, after);
        }
        // It leaves when its endpoint is dropped.
        Incident::Exit { .. } => return Ok(()),
        Incident::LoseLane { from, to, kind, after } => ((from, to), kind, after, None),
        Incident::Delay { from, to, kind, by, after } => ((from, to), kind, after, Some(by.0 / NANOS_PER_TICK)),
    };
    machine.hurry(HURRY);
    let ranks = (ways.0.0, ways.1.0);
    let Some(kind) = kind else { return machine.block(ranks, 0..layout.window_bytes(), after, late) };
    (1..=2).try_for_each(|generation| {
        let cell = layout.cell(Cell::new(ways.0, kind, Counter::Tail), generation).0;
        let line = cell / LINE * LINE;
        machine.block(ranks, line..line + LINE, after, late)
    })
}

/// Bytes of the line of a writer's lane.
const LINE: u64 = 64;

impl Backend for Twin {
    type Endpoint = AscendEndpoint;

    fn lacks(&self, what: Requirement) -> Option<&'static str> {
        match what {
            Requirement::ManyNodes => Some("the kernels have up to four servers"),
            Requirement::Coordinators => Some("lanes between nodes share one queue in any case"),
            Requirement::Get => Some("combines do not pull: there is no kernel for it yet"),
            Requirement::Units => Some("lanes carry no units"),
            Requirement::ModesHeard => Some("kernels hear what others wait for in their own mode"),
            Requirement::LowOrders => Some("kernels bring rows of low latency by expert"),
            Requirement::Remainders => Some("kernels have sums alone"),
            Requirement::SlotWeights => Some("kernels bring weights by received row"),
            Requirement::Plants => Some("kernels have planted faults of their own: see the test target `kernels`"),
            Requirement::Departures
            | Requirement::ByExpert
            | Requirement::FarLowLatency
            | Requirement::Incidents
            | Requirement::Int8
            | Requirement::LowLatency
            | Requirement::ManyRanks
            | Requirement::Nodes
            | Requirement::Scripts
            | Requirement::Suspensions => None,
        }
    }

    fn makes_fp8(&self) -> bool {
        false
    }

    fn campaign(&self) -> u32 {
        share(24, 3)
    }

    fn largest(&self) -> (u32, u32) {
        (4, 8)
    }

    fn seeds(&self, most: u64) -> u64 {
        most.min(self.seeds)
    }

    fn run<T, F>(&self, setup: &Setup, user: F) -> Result<Vec<Option<T>>, String>
    where
        T: Travels,
        F: AsyncFn(AscendEndpoint) -> T + Send + Sync,
    {
        self.on(setup, |session, cluster| {
            let crashes = !setup.incidents.iter().any(is_unnoticed);
            let zombies = Zombies::new(session, setup.topology.ranks(), setup.seed, cluster.given_up());
            let ran = cluster.run(async |endpoint| {
                let rank = endpoint.rank();
                let alive = befall(user(endpoint), || session.has_crashed(rank.0), crashes);
                zombies.suspend(rank, alive).await
            });
            Ok(ran)
        })
    }

    fn probe(&self, setup: &Setup, scripts: &[Script]) -> Result<Vec<Option<Vec<Seen>>>, String> {
        let layout = Layout::new(&setup.shape, &setup.topology, &setup.settings).map_err(|error| error.to_string())?;
        let told: Vec<_> = scripts.iter().map(device::to_device).collect();
        let logs = self.on(setup, |_, cluster| cluster.probe(&told))?;
        let seen = |(script, log): (&Script, Option<Vec<_>>)| Some(device::seen(script, &log?, layout.window_bytes()));
        Ok(scripts.iter().zip(logs).map(seen).collect())
    }
}

const fn is_unnoticed(incident: &Incident) -> bool {
    matches!(incident, Incident::Crash { noticed: false, .. })
}

impl Twin {
    /// Does something with the ranks of a case on a twin of their own, and looks what is wrong with the twin then.
    fn on<T>(&self, setup: &Setup, body: impl FnOnce(&Session, Cluster) -> Result<T, Error>) -> Result<T, String> {
        let ranks = setup.topology.ranks();
        let machine = Machine::new(&self.library, setup.seed, ranks, setup.topology.ranks_per_node())
            .map_err(|error| error.to_string())?;
        let session = Host::install(machine, "Ascend910B1").map_err(|error| error.to_string())?;
        let layout = Layout::new(&setup.shape, &setup.topology, &setup.settings).map_err(|error| error.to_string())?;
        let crash = |it: &Incident| matches!(it, Incident::Crash { .. });
        let crashes = setup.incidents.iter().any(crash);
        if setup.incidents.iter().any(is_unnoticed) {
            session.silence();
        }
        for incident in &setup.incidents {
            let befalls = session.befall(|machine| strike(machine, &layout, incident));
            befalls.map_err(|error| error.to_string())?;
        }
        let builder = Cluster::builder(setup.topology, self.library.path()).settings(setup.settings);
        let builder = builder.roles(Self::roles(setup.seed, setup.topology.nodes())).plant(self.plant);
        let ran = builder.build(&session.table(), setup.shape).and_then(|cluster| body(&session, cluster));
        let again = |what: String| format!("{what} (seed {})", setup.seed);
        if let Some(fault) = session.fault() {
            return Err(again(format!("the twin: {fault}")));
        }
        let ran = ran.map_err(|error| again(error.to_string()))?;
        let is_on_the_way = |it: &Incident| matches!(it, Incident::Delay { .. } | Incident::LoseLane { .. });
        if setup.incidents.iter().any(is_on_the_way) && session.befallen() == 0 {
            return Err(again(format!("nothing was late or lost: {:?}", setup.incidents)));
        }
        // Of a rank that has crashed nothing is given back, nor of one whose copies are longer under way than its host waits.
        let hangs = setup.incidents.iter().any(|it| matches!(it, Incident::Delay { .. }));
        match session.left() {
            [0, 0, 0] => Ok(ran),
            _ if crashes || hangs => Ok(ran),
            left => Err(again(format!("blocks of memory, streams, events left: {left:?}"))),
        }
    }
}

/// Seeds that are tried until one catches a fault, and one that few show.
const PLANTED_SEEDS: u64 = 40;
const RARE_SEEDS: u64 = 160;

/// Each of these faults is caught by its case.
fn planted_faults_are_caught_by_cases() -> Result<(), Failed> {
    let library = compiled(&["EP_TEST"]);
    for (plant, name, said) in IN_CASES.into_iter().step_by(share(1, 12)) {
        let is_rare = matches!(plant, Plant::LowFarUnsaid);
        let seeds = if is_rare { RARE_SEEDS } else { PLANTED_SEEDS };
        let twin = Twin { library: library.clone(), seeds, plant: plant as u32 };
        match run_case(name, twin) {
            Err(error) if error.contains(said) => {}
            Err(error) => return Err(format!("{plant:?} is caught as {error}, expected {said}").into()),
            Ok(()) => return Err(format!("{plant:?} is not caught by {name} in {seeds} seeds").into()),
        }
    }
    Ok(())
}

fn main() -> ExitCode {
    let planted = Trial::test("planted_faults_are_caught_by_cases", planted_faults_are_caught_by_cases);
    let library = shipped();
    let here = || Twin::new(library.clone());
    let suite = Suite::default().on("twin", here()).share(|name| !LEFT.contains(&name)).with(vec![planted]);
    let all = std::env::var_os("EP_TWIN_ALL").is_some();
    let apart = Apart { library: library.clone(), here: here() };
    suite.run_with_processes_for(apart, |name| all || APART.contains(&name))
}
