//! Rows by expert that the device makes, and sums of their results, held against the oracle; and the faults that they show.

use ep_ascend::Cluster;
use ep_ascend::args::Plant;
use ep_ascend::twin::{Host, Machine};
use ep_conformance::by_expert::{How, Seen, cached_round, compare, round};
use ep_conformance::harness::share;
use ep_conformance::workload::{Batch, RoutingKind, Workload};
use ep_core::reference::World;
use ep_core::{Element, Endpoint as _, Error, Fault, Nanos, RankSet, Settings, Shape, Topology};

use crate::{FEW, library};

/// Seeds that are tried until one catches.
const SEEDS: u64 = 12;
const RANKS: u32 = 2;

/// A layer whose rows by expert are made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Case {
    topk: u32,
    local_experts: u32,
    hidden: u32,
    tokens: u32,
    alignment: u32,
    element: Element,
    routing: RoutingKind,
}

/// Choices of many experts each, with room between the experts.
const USUAL: Case = Case {
    topk: 4,
    local_experts: 3,
    hidden: 40,
    tokens: 13,
    alignment: 8,
    element: Element::Bf16,
    routing: RoutingKind::Uniform,
};

/// Most experts have nothing, and most cores no row.
const SPARSE: Case = Case { topk: 1, local_experts: 30, tokens: 3, alignment: 128, ..USUAL };

/// What was wrong; nothing where all is as it must be: two rounds by expert, and one along the handle of the second.
fn found(case: Case, seed: u64, plant: u32) -> Option<String> {
    tell(case, seed, plant).err()
}

fn tell(case: Case, seed: u64, plant: u32) -> Result<(), String> {
    let Case { topk, local_experts, hidden, tokens, alignment, element, routing } = case;
    let topology = Topology::new(1, RANKS).expect("a topology");
    let shape = Shape::builder().experts(RANKS * local_experts).topk(topk).hidden(hidden).max_tokens(tokens);
    let shape = shape.element(element).build().expect("a shape");
    let settings = Settings::builder(&shape, &topology).channels(2).slots(3).chunk(2).credit(2).low_latency(false);
    let settings = settings.deadline(Nanos::from_millis(100)).build().expect("settings");
    let drawn = |seed| {
        let workload = Workload::new(shape, vec![tokens; RANKS as usize]).kind(routing).drop(0.1);
        workload.seed(seed).batches().expect("batches")
    };
    let batches = [drawn(seed), drawn(seed + 100)];
    let world = World::new(shape, topology, RankSet::new()).expect("a world");
    let how = How { alignment, zero_spare: true, return_weights: true, ..How::default() };
    let machine = Machine::new(library(), seed, RANKS, RANKS).expect("a machine");
    let session = Host::install(machine, "Ascend910B3").expect("the thread's only twin");
    let builder = Cluster::builder(topology, library().path()).settings(settings).roles(FEW).plant(plant);
    let cluster = builder.build(&session.table(), shape).expect("a cluster");
    let ran = cluster.run(async |mut ep| {
        let [first, second] = [0, 1].map(|which: usize| &batches[which][ep.rank().index()]);
        let (before, _) = round(&mut ep, &world, first, &how).await?;
        let (fresh, handle) = round(&mut ep, &world, second, &how).await?;
        Ok([before, fresh, cached_round(&mut ep, &world, first, &handle, &how).await?])
    });
    if let Some(fault) = session.fault() {
        return Err(fault);
    }
    let seen = ran.into_iter().collect::<Result<Vec<[Seen; 3]>, Error>>().map_err(|error| said(&error))?;
    let how = vec![how; RANKS as usize];
    let held = |which: usize, routed: &[Batch], moved: &[Batch]| {
        let seen: Vec<Seen> = seen.iter().map(|rounds| rounds[which].clone()).collect();
        compare(&world, (routed, moved), &how, which == 2, &seen).map_err(|mismatch| format!("oracle: {mismatch}"))
    };
    held(0, &batches[0], &batches[0])?;
    held(1, &batches[1], &batches[1])?;
    held(2, &batches[1], &batches[0]).map(drop)
}

fn said(error: &Error) -> String {
    match error.failure().map(|failure| failure.fault) {
        Some(Fault::Mismatch { field, .. }) => format!("refused: {field}: {error}"),
        _ => format!("error: {error}"),
    }
}

#[test]
fn rows_stand_by_expert_as_the_oracle_says() {
    let cases = [
        USUAL,
        Case { alignment: 1, ..USUAL },
        // Several pieces of a row, and an odd number of bytes.
        Case { hidden: 17_001, tokens: 3, alignment: 2, ..USUAL },
        Case { element: Element::Int8, hidden: 400, ..USUAL },
        // More rows than a core looks at together.
        Case { tokens: 400, topk: 1, local_experts: 1, hidden: 16, ..USUAL },
        Case { topk: 32, local_experts: 24, tokens: 5, alignment: 128, ..USUAL },
        Case { routing: RoutingKind::Single, topk: 1, ..USUAL },
        SPARSE,
    ];
    for case in cases {
        for seed in 1..=if case.tokens > 100 { 1 } else { 2 } {
            assert_eq!(found(case, seed, 0), None, "{case:?}, seed {seed}");
        }
    }
    for seed in 1..=share(SEEDS, 3) {
        assert_eq!(found(USUAL, seed, 0), None, "seed {seed}");
    }
}

/// A planted fault, the case that shows it, and what must be said of it.
type Planted = (Plant, Case, &'static [&'static str]);

pub(crate) const PLANTED: &[Planted] = &[
    (Plant::SpreadToldEarly, USUAL, &["oracle: ", "refused: ", "order: "]),
    (Plant::PaddingLeft, USUAL, &["oracle: "]),
    (Plant::ZerosFlag, USUAL, &["order: "]),
    (Plant::SpreadUnshared, USUAL, &["oracle: ", "refused: "]),
    (Plant::OffsetsReused, USUAL, &["order: "]),
    (Plant::FoldDescending, USUAL, &["oracle: "]),
    (Plant::SlotsReused, SPARSE, &["flags: "]),
];

#[test]
fn each_fault_of_rows_by_expert_is_caught_by_what_it_breaks() {
    for (plant, case, said) in PLANTED {
        let caught = (1..=SEEDS).find_map(|seed| found(*case, seed, *plant as u32));
        let caught = caught.unwrap_or_else(|| panic!("{plant:?} is not caught in {SEEDS} seeds"));
        assert!(said.iter().any(|said| caught.starts_with(said)), "{plant:?} is caught as {caught}, expected {said:?}");
    }
}
