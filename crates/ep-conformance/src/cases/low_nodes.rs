//! Low latency over several nodes: every rank writes to every other.

use std::future::poll_fn;
use std::task::Poll;

use ep_core::incident::Incident;
use ep_core::reference::{Weighing, World};
use ep_core::{Element, Error, Failure, Fault, LowLatency, Rank, RankSet};

use super::fixture::{Verdict, ensure, text};
use super::low_latency::{Layer, TURN, check, hurried, layer_of, scenario};
use super::low_lost;
use crate::backend::{Backend, Requirement, Setup};
use crate::drive;
use crate::harness::Case;
use crate::low_latency::scenario::{Scenario, Turn};
use crate::low_latency::{Seen, round, verify};
use crate::workload::{Batch, RoutingKind};

const NODES: &[Requirement] = &[Requirement::LowLatency, Requirement::Nodes, Requirement::FarLowLatency];
const INCIDENTS: &[Requirement] =
    &[Requirement::LowLatency, Requirement::Nodes, Requirement::FarLowLatency, Requirement::Incidents];
const LEAVING: &[Requirement] =
    &[Requirement::LowLatency, Requirement::Nodes, Requirement::FarLowLatency, Requirement::Departures];
const DYING: &[Requirement] = &[
    Requirement::LowLatency,
    Requirement::Nodes,
    Requirement::FarLowLatency,
    Requirement::Incidents,
    Requirement::ModesHeard,
];

pub(super) fn cases<B: Backend>() -> Vec<Case<B>> {
    let case = |name, needs, body| Case { name, needs, body };
    vec![
        case("low_latency_over_nodes_is_a_full_mesh", NODES, full_mesh::<B> as fn(&B) -> _),
        case("low_latency_over_nodes_rows_and_results_of_every_form", NODES, forms::<B>),
        case("low_latency_over_nodes_full_batches_and_empty_ones", NODES, full_and_empty::<B>),
        case("low_latency_over_nodes_two_operations_in_flight", NODES, in_flight::<B>),
        case("low_latency_over_nodes_a_masked_rank_is_told_and_rejoins", NODES, |backend| {
            low_lost::rejoin_over(backend, 3)
        }),
        case("low_latency_over_nodes_a_crashed_rank_is_masked", INCIDENTS, |backend| low_lost::crash_over(backend, 2)),
        case("low_latency_over_nodes_a_delay_within_the_deadline_heals", INCIDENTS, |backend| {
            low_lost::delay_over(backend, 3)
        }),
        case("low_latency_over_nodes_who_leaves_with_its_lost_rank_is_not_blamed", LEAVING, leaves_along::<B>),
        case("low_latency_over_nodes_who_dies_between_the_modes_is_named", DYING, dies_between::<B>),
    ]
}

fn full_mesh<B: Backend>(backend: &B) -> Verdict {
    [(2, 2), (3, 1), (2, 3), (4, 2)].into_iter().try_for_each(|(nodes, ranks)| {
        check(backend, &Scenario { nodes, turns: vec![Turn { ahead: true, ..TURN }; 3], ..scenario(nodes * ranks, 8) })
    })
}

/// Two nodes of two, results in both forms: rows of bf16 and FP8, of lengths that are no multiple of anything, several choices of a rank's
/// experts, and one.
fn forms<B: Backend>(backend: &B) -> Verdict {
    let over = |more: Scenario| check(backend, &Scenario { nodes: 2, ..more });
    let makes = |element: &Element| matches!(element, Element::Bf16) || backend.makes_fp8();
    let elements = Element::ALL.into_iter().filter(|&element| element != Element::Int8).filter(makes);
    elements
        .flat_map(|element| [(element, 127), (element, 256)])
        .try_for_each(|(element, hidden)| over(Scenario { element, hidden, ..scenario(4, 5) }))?;
    [(1, 1), (2, 1), (8, 4), (11, 3)]
        .into_iter()
        .try_for_each(|(topk, local_experts)| over(Scenario { topk, local_experts, ..scenario(4, 6) }))
}

fn full_and_empty<B: Backend>(backend: &B) -> Verdict {
    let over = |more: Scenario| check(backend, &Scenario { nodes: 2, ..more });
    over(Scenario { max_tokens: 10, ..scenario(4, 10) })?;
    over(Scenario { routing: RoutingKind::Single, max_tokens: 16, ..scenario(4, 16) })?;
    over(Scenario { drop: 0.8, ..scenario(4, 7) })?;
    over(scenario(4, 0))?;
    over(Scenario { tokens: vec![6, 0, 0, 5], ..scenario(4, 6) })
}

fn in_flight<B: Backend>(backend: &B) -> Verdict {
    let turns = [false, true, false, true, true, false].map(|at_experts| Turn { at_experts, ahead: true, ..TURN });
    (0..backend.seeds(6)).try_for_each(|seed| {
        check(backend, &Scenario { seed: seed * 10, nodes: 2, turns: turns.to_vec(), ..scenario(4, 9) })
    })
}

/// What a rank did: how it failed, and what it saw after it had recovered.
type Story = (Option<Failure>, Result<Seen, Error>);

/// Lets the other ranks go on meanwhile.
async fn linger() {
    let mut left = 100;
    poll_fn(|context| {
        left -= 1;
        context.waker().wake_by_ref();
        if left == 0 { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

/// Rounds, of both modes in turn or of low latency alone, until one fails; then one more without whom that names.
async fn live<E: LowLatency>(ep: &mut E, layer: &Layer, both: bool) -> Story {
    let batch = &layer.batches[ep.rank().index()];
    let mut rounds = 0u32;
    let failed = loop {
        if both && ep.rank().0 < 2 {
            linger().await;
        }
        let outcome = if !both || rounds.is_multiple_of(2) {
            round(ep, &layer.world, batch, Weighing::AtSource).await.err()
        } else {
            drive::round(ep, &layer.world, batch, &drive::Round::default()).await.err()
        };
        rounds += 1;
        if rounds == 60 || outcome.is_some() {
            break outcome;
        }
    };
    let failure = failed.and_then(|error| error.failure().copied());
    let after = match ep.recover(&failure.map(|failure| failure.culprit).into_iter().collect()).await {
        Ok(()) => round(ep, &layer.world, batch, Weighing::AtExperts).await,
        Err(error) => Err(error),
    };
    (failure, after)
}

/// Rank 3 of two nodes of two is lost. Rank 2 learns that its node leaves, and ends at once, perhaps before the others have missed
/// anybody: all name rank 3, and what ranks 0 and 1 do without that node is right. (Or those two are so early that rank 2 hears from
/// them that they go on without it.)
fn leaves_along<B: Backend>(backend: &B) -> Verdict {
    let unnoticed = backend.lacks(Requirement::Incidents).is_none();
    // The fourth is the first for which NPUs' kernels have blamed rank 2.
    let seeds = backend.seeds(60).max(4);
    lives(backend, seeds, true, true)?;
    if unnoticed { lives(backend, seeds, false, false) } else { Ok(()) }
}

/// The same where nobody notices that rank 3 is lost, and some ranks wait for it in low latency, others for those in throughput mode.
fn dies_between<B: Backend>(backend: &B) -> Verdict {
    lives(backend, backend.seeds(60), false, true)
}

fn lives<B: Backend>(backend: &B, seeds: u64, noticed: bool, both: bool) -> Verdict {
    for seed in 0..seeds {
        let layer = losing(seed, noticed).map_err(text)?;
        survive(backend, &layer, &layer.setup, both)
            .map_err(|error| format!("seed {seed}, noticed {noticed}, both modes {both}: {error}"))?;
    }
    Ok(())
}

/// Two nodes of two that lose rank 3, and rank 2 when it has ended.
pub(super) fn losing(seed: u64, noticed: bool) -> Result<Layer, Error> {
    let scenario = Scenario { seed, nodes: 2, ..scenario(4, 6) };
    // Who is noticed to be lost nobody waits for.
    let mut layer = if noticed { layer_of(scenario)? } else { hurried(scenario)? };
    let crash = Incident::Crash { rank: Rank(3), after: 7 * seed, noticed };
    layer.setup = layer.setup.incident(crash).incident(Incident::Exit { rank: Rank(2) });
    Ok(layer)
}

/// What becomes of them.
pub(super) fn survive<B: Backend>(backend: &B, layer: &Layer, setup: &Setup, both: bool) -> Verdict {
    let outcomes = backend.run(setup, async |mut ep| live(&mut ep, layer, both).await)?;
    let mut seen = vec![Seen::default(); 4];
    for (rank, outcome) in outcomes.into_iter().enumerate().take(3) {
        let (failure, after) = outcome.ok_or_else(|| format!("rank {rank} did not finish"))?;
        let told = |failure: Failure| rank == 2 && matches!(failure.fault, Fault::MaskedBy { .. });
        let right = failure.is_some_and(|failure| failure.culprit == Rank(3) || told(failure));
        ensure(right, || format!("rank {rank} failed with {failure:?}"))?;
        match after {
            Ok(last) if rank < 2 => seen[rank] = last,
            Err(Error::Excluded { rank: Rank(2) }) if rank == 2 => {}
            other => return Err(format!("rank {rank} went on with {other:?}")),
        }
    }
    let mask: RankSet = [Rank(2), Rank(3)].into_iter().collect();
    let left = World::new(setup.shape, setup.topology, mask).map_err(text)?;
    let mut batches = layer.batches.clone();
    batches[2..].fill(Batch::default());
    verify::run(&left, &batches, Weighing::AtExperts, &seen).map(drop).map_err(text)
}
