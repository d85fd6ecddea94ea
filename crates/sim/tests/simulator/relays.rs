//! Suspicions that are relayed between nodes: a rank that hears one answers with its own, and the answers end; and who stopped is named where not
//! everybody hears everybody.

use ep_conformance::scenario::{Scenario, Turn};
use ep_conformance::script::{Script, Seen};
use ep_conformance::workload::RoutingKind;
use ep_conformance::zombie::Zombie;
use ep_conformance::{Backend, Requirement, Setup};
use ep_core::engine::Engine;
use ep_core::ring::Geometry;
use ep_core::{Element, OutboxUse, Placement, Rank, Rings, Scaling};
use ep_sim::{Cluster, Machine, Outcome};

/// The explore scheduler, which gives up early.
struct Impatient {
    events: u64,
}

impl Backend for Impatient {
    type Endpoint = Engine<Machine>;

    fn lacks(&self, _: Requirement) -> Option<&'static str> {
        None
    }

    fn run<T, F>(&self, setup: &Setup, user: F) -> Result<Vec<Option<T>>, String>
    where
        T: Send + 'static,
        F: AsyncFn(Engine<Machine>) -> T + Send + Sync,
    {
        let mut builder = Cluster::builder(setup.topology).seed(setup.seed).settings(setup.settings);
        for &incident in &setup.incidents {
            builder = builder.incident(incident);
        }
        let cluster = builder.max_events(self.events).build(setup.shape).map_err(|error| error.to_string())?;
        let run = cluster.run(user).map_err(|violation| violation.to_string())?;
        Ok(run.outcomes.into_iter().map(Outcome::finished).collect())
    }

    fn probe(&self, _: &Setup, _: &[Script]) -> Result<Vec<Option<Vec<Seen>>>, String> {
        Err("no scripts here".to_owned())
    }
}

const fn rings(near: [u32; 3], far: [u32; 3]) -> Rings {
    const fn geometry([slots, chunk, credit]: [u32; 3]) -> Geometry {
        Geometry { slots, chunk, credit }
    }
    Rings { channels: 1, near: geometry(near), far: geometry(far) }
}

/// Three nodes of five, of which rank 14 is suspended. Rank 0 hears neither that one nor ranks of the other nodes that wait in a circle, but others who
/// wait for these. In one of thirty runs it blamed one of them.
#[test]
fn a_wait_in_a_circle_that_is_not_heard_here_is_not_blamed() {
    let turn = Turn { cached: false, pull: false, return_weights: false, bias: 0, channels: 1 };
    for (seed, after) in (1..=10).flat_map(|seed| (15..35).map(move |after| (seed, after))) {
        let scenario = Scenario {
            seed,
            nodes: 3,
            local_experts: 1,
            topk: 1,
            hidden: 63,
            element: Element::Bf16,
            tokens: vec![0; 15],
            routing: RoutingKind::Uniform,
            drop: 0.0,
            rings: rings([1; 3], [1; 3]),
            placement: Placement::Ring,
            arena_bytes: 0,
            outboxes: None,
            uses: Vec::new(),
            full: None,
            rounds: vec![turn],
            zombie: Some(Zombie { rank: Rank(14), after }),
        };
        let checked = scenario.check(&Impatient { events: 400_000 });
        checked.unwrap_or_else(|error| panic!("seed {seed}, after {after}: {error}"));
    }
}

/// 49 ranks of seven nodes, one of which is suspended. What each tells depends on what the others relay, and that on what it tells: they went on
/// until they had no numbers for alarms left.
#[test]
fn ranks_that_relay_suspicions_do_not_answer_each_other_without_end() {
    let turn = Turn { cached: true, pull: false, return_weights: false, bias: 2, channels: 1 };
    let (nodes, ranks) = (7, 49);
    // Ranks that have a token.
    let some = 0b1_0111_1110_0101_0101_0110_0000_0011_1011_0111_0001_1101_0001u64;
    let scenario = Scenario {
        seed: 15_076_586_145_198_401_298,
        nodes,
        local_experts: 3,
        topk: 11,
        hidden: 599,
        element: Element::Fp8(Scaling::Ue8m0),
        tokens: (0..ranks).map(|rank| (some >> rank & 1) as u32).collect(),
        routing: RoutingKind::Skewed { exponent: 1.113_934_694_053_424_5 },
        drop: 0.0,
        rings: Rings { channels: 2, ..rings([2, 2, 1], [30, 9, 29]) },
        placement: Placement::Ring,
        arena_bytes: 0,
        outboxes: None,
        uses: vec![OutboxUse::USUAL],
        full: None,
        rounds: vec![turn; 2],
        zombie: Some(Zombie { rank: Rank(34), after: 106 }),
    };
    // Half of that is enough.
    scenario.check(&Impatient { events: 400_000 }).map(drop).unwrap();
}
