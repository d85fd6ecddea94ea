//! Several nodes: rows travel once along the rail to each node, and the sums come back along it.

use ep_core::incident::Incident;
use ep_core::port::LaneKind;
use ep_core::reference::World;
use ep_core::ring::Geometry;
use ep_core::{
    Element, Endpoint, Error, Layout, Nanos, Placement, Rank, RankSet, Rings, Scaling, Settings, Shape, Topology,
};

use super::fixture::{PATIENCE, TURN, Verdict, allowed, check, direct, ensure, scenario, text};
use crate::backend::{Backend, Requirement, Setup, finished};
use crate::drive::{Round, cached_round, round};
use crate::harness::Case;
use crate::scenario::{Scenario, Turn};
use crate::verify::{self, Observed};
use crate::workload::{Batch, RoutingKind, Workload};

pub(super) fn cases<B: Backend>() -> Vec<Case<B>> {
    let case = |name, needs, body| Case { name, needs, body };
    let nodes: &'static [Requirement] = &[Requirement::Nodes];
    let many: &'static [Requirement] = &[Requirement::Nodes, Requirement::ManyNodes];
    let leaving: &'static [Requirement] = &[Requirement::Nodes, Requirement::Departures];
    let breakable: &'static [Requirement] = &[Requirement::Nodes, Requirement::Incidents];
    vec![
        case("nodes_two_of_two", nodes, two_of_two::<B> as fn(&B) -> _),
        case("nodes_of_one_rank_each", nodes, single_ranks::<B>),
        case("nodes_in_odd_numbers", nodes, odd_numbers::<B>),
        case("nodes_more_than_four", many, more_than_four::<B>),
        case("nodes_eight_of_eight", many, eight_of_eight::<B>),
        case("nodes_with_rings_of_one_slot_everywhere", nodes, one_slot::<B>),
        case("nodes_every_chunk_and_credit_of_far_rings", nodes, every_far_step::<B>),
        case("nodes_a_batch_of_a_hundred_times_the_rings", nodes, large_batch::<B>),
        case("nodes_all_tokens_to_one_expert_elsewhere", nodes, one_expert::<B>),
        case("nodes_without_tokens", nodes, no_tokens::<B>),
        case("nodes_cached_pulled_and_recut", nodes, many_rounds::<B>),
        case("nodes_an_arena_too_small_falls_back_to_rings", nodes, small_arena::<B>),
        case("nodes_coded_rows_are_placed_within_nodes", nodes, coded_rows::<B>),
        case("nodes_counts_that_stay_in_the_machine_change_nothing", nodes, device_counts::<B>),
        case("nodes_a_row_travels_once_to_each_node", nodes, deduplicated::<B>),
        case("nodes_a_lost_rank_takes_its_node_along", breakable, lost_rank::<B>),
        case("nodes_a_lost_rank_is_named_and_not_who_passes_its_rows_on", breakable, far_off::<B>),
        case("nodes_a_lost_node_is_named_and_the_others_go_on", breakable, lost_node::<B>),
        case("nodes_a_lost_far_lane_is_blamed_alike_everywhere", breakable, lost_lane::<B>),
        case("nodes_a_rank_that_leaves_after_its_last_operation_fails_nobody", leaving, leaves_in_time::<B>),
    ]
}

/// `nodes` nodes of `ranks` ranks.
pub(super) fn over(nodes: u32, ranks: u32, tokens: u32) -> Scenario {
    Scenario { nodes, ..scenario(nodes * ranks, tokens) }
}

fn over_direct(nodes: u32, ranks: u32, tokens: u32) -> Scenario {
    Scenario { nodes, ..direct(nodes * ranks, tokens) }
}

fn two_of_two<B: Backend>(backend: &B) -> Verdict {
    check(backend, &over(2, 2, 20))?;
    check(backend, &over_direct(2, 2, 20))
}

fn all_of<B: Backend>(backend: &B, topologies: &[(u32, u32)], tokens: u32) -> Verdict {
    topologies.iter().try_for_each(|&(nodes, ranks)| {
        check(backend, &over(nodes, ranks, tokens))?;
        check(backend, &over_direct(nodes, ranks, tokens))
    })
}

fn single_ranks<B: Backend>(backend: &B) -> Verdict {
    all_of(backend, &[(2, 1), (4, 1)], 12)
}

fn odd_numbers<B: Backend>(backend: &B) -> Verdict {
    all_of(backend, &[(3, 5), (3, 1)], 6)
}

fn more_than_four<B: Backend>(backend: &B) -> Verdict {
    all_of(backend, &[(5, 1), (5, 3), (7, 1)], 6)
}

fn eight_of_eight<B: Backend>(backend: &B) -> Verdict {
    let large = Scenario { topk: 8, local_experts: 1, ..over(8, 8, 2) };
    large.check(backend).map(drop)
}

fn one_slot<B: Backend>(backend: &B) -> Verdict {
    let one = Geometry { slots: 1, chunk: 1, credit: 1 };
    let rounds = vec![Turn { channels: 2, ..TURN }; 2];
    check(backend, &Scenario { rings: Rings::uniform(2, one), rounds, ..over(3, 2, 25) })
}

fn every_far_step<B: Backend>(backend: &B) -> Verdict {
    let near = Geometry { slots: 2, chunk: 1, credit: 1 };
    for slots in 1..=4 {
        for (chunk, credit) in (1..=slots).flat_map(|chunk| (1..=slots).map(move |credit| (chunk, credit))) {
            let rings = Rings { channels: 1, near, far: Geometry { slots, chunk, credit } };
            check(backend, &Scenario { rings, ..over(2, 2, 9) })?;
        }
    }
    Ok(())
}

fn large_batch<B: Backend>(backend: &B) -> Verdict {
    let two = Geometry { slots: 2, chunk: 1, credit: 2 };
    let large = over(3, 2, 0);
    let tokens = vec![200, 0, 3, 0, 1, 200];
    check(backend, &Scenario { rings: Rings::uniform(1, two), topk: 4, tokens, ..large })
}

fn one_expert<B: Backend>(backend: &B) -> Verdict {
    check(backend, &Scenario { routing: RoutingKind::Single, ..over(3, 2, 40) })?;
    check(backend, &Scenario { routing: RoutingKind::Single, ..over_direct(3, 2, 40) })
}

fn no_tokens<B: Backend>(backend: &B) -> Verdict {
    check(backend, &over(3, 2, 0))?;
    let mut tokens = vec![0; 6];
    tokens[4] = 30;
    check(backend, &Scenario { tokens, ..over_direct(3, 2, 0) })
}

fn many_rounds<B: Backend>(backend: &B) -> Verdict {
    let geometry = Geometry { slots: 3, chunk: 2, credit: 3 };
    let rounds: Vec<Turn> = (0u32..12)
        .map(|at| Turn {
            channels: 1 + at * 7 % 3,
            pull: at % 2 == 0,
            cached: at % 3 == 1,
            bias: (at % 3) as u8,
            ..TURN
        })
        .collect();
    check(backend, &Scenario { rings: Rings::uniform(3, geometry), rounds: rounds.clone(), ..over(2, 3, 9) })?;
    check(backend, &Scenario { rings: Rings::uniform(3, geometry), rounds, ..over_direct(2, 3, 9) })
}

fn small_arena<B: Backend>(backend: &B) -> Verdict {
    [0, 64, 1000, 5000].into_iter().try_for_each(|arena_bytes| {
        check(backend, &Scenario { arena_bytes, rounds: vec![TURN; 3], ..over_direct(2, 2, 20) })
    })
}

/// A communicator of `nodes` x `ranks` with two experts a rank, and its batches.
fn layer(nodes: u32, ranks: u32, seed: u64, placement: Placement) -> Result<(Setup, Vec<Batch>, World), Error> {
    let topology = Topology::new(nodes, ranks)?;
    let shape = Shape::builder().experts(2 * topology.ranks()).topk(4).hidden(32).max_tokens(16).build()?;
    let settings = Settings::builder(&shape, &topology).slots(2).placement(placement).deadline(allowed(1));
    let batches = Workload::new(shape, vec![9; topology.ranks() as usize]).seed(seed).batches()?;
    let setup = Setup::new(shape, topology, seed)?.settings(settings.build()?);
    Ok((setup, batches, World::new(shape, topology, RankSet::new())?))
}

/// FP8 with scales of sizes that are no units of 16 bytes, and of one that is.
fn coded_rows<B: Backend>(backend: &B) -> Verdict {
    for (scaling, hidden) in [(Scaling::Exact, 300), (Scaling::Ue8m0, 300), (Scaling::PowerOfTwo, 512)] {
        let element = Element::Fp8(scaling);
        let rounds = vec![TURN, Turn { cached: true, ..TURN }];
        check(backend, &Scenario { element, hidden, rounds, ..over_direct(2, 3, 9) })?;
    }
    Ok(())
}

/// Room for the worst case, and counts that the host does not hear of: the same rows, those of rails among them, and the same along the handle.
fn device_counts<B: Backend>(backend: &B) -> Verdict {
    for placement in [Placement::Ring, Placement::Direct] {
        let (mut setup, batches, world) = layer(2, 2, 5, placement).map_err(text)?;
        setup.settings = setup.settings.with_deadline(allowed(20)).map_err(text)?;
        let how = Round { worst_rows: 36, device_counts: true, return_weights: true, ..Round::default() };
        let outcomes = backend.run(&setup, async |mut ep| {
            let batch = &batches[ep.rank().index()];
            let (observed, handle) = round(&mut ep, &world, batch, &how).await?;
            let (_, exact) = round(&mut ep, &world, batch, &Round::default()).await?;
            let along = cached_round(&mut ep, &world, batch, &handle, &how).await?;
            let expected = cached_round(&mut ep, &world, batch, &exact, &Round::default()).await?;
            let known = handle.rows() == 36 && exact.rows() < 36;
            Ok::<_, Error>((observed, along == expected, known, handle.exchange()? == exact.exchange()?))
        })?;
        let mut observed = Vec::new();
        for (rank, (saw, along, known, told)) in finished(outcomes)?.into_iter().enumerate() {
            let named = |what: &str| format!("{placement:?}, rank {rank}: {what}");
            ensure(along, || named("other rows along the handle"))?;
            ensure(known, || named("the handle has another bound than 36, or the batch fills it"))?;
            ensure(told, || named("the handle tells other counts"))?;
            observed.push(saw);
        }
        verify::run(&world, &batches, &observed).map_err(text)?;
    }
    Ok(())
}

/// The rows that leave a rank for another node are its tokens with an expert there, each once.
fn deduplicated<B: Backend>(backend: &B) -> Verdict {
    let (mut setup, batches, world) = layer(2, 2, 4, Placement::Ring).map_err(text)?;
    setup.settings = setup.settings.with_deadline(allowed(PATIENCE)).map_err(text)?;
    let outcomes = backend.run(&setup, async |mut ep| {
        let batch = &batches[ep.rank().index()];
        let before = ep.stats();
        let (x, routing) = crate::drive::upload(&mut ep, batch)?;
        ep.dispatch(&x, &routing).await?;
        let rail = Rank((ep.rank().0 + 2) % 4);
        Ok::<_, Error>(ep.stats().peers[rail.index()].rows_sent - before.peers[rail.index()].rows_sent)
    })?;
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        let sent = outcome.ok_or_else(|| format!("rank {rank} did not finish"))?.map_err(text)?;
        let elsewhere = |&&expert: &&i64| expert >= 0 && expert / 4 != rank as i64 / 2;
        let expected = batches[rank].topk_idx.chunks(4).filter(|token| token.iter().find(elsewhere).is_some()).count();
        ensure(sent == expected as u64, || {
            format!("rank {rank} sent {sent} rows along its rail, expected {expected}")
        })?;
        ensure(world.topology().nodes() == 2 && expected > 0, || "nothing had to travel".into())?;
    }
    Ok(())
}

/// Rank 3 of two nodes of two is lost: all name it, rank 2 learns that its node has left, ranks 0 and 1 go on.
fn lost_rank<B: Backend>(backend: &B) -> Verdict {
    let how = Round { return_weights: true, ..Round::default() };
    for (seed, placement, noticed) in (0..backend.seeds(80)).flat_map(|seed| {
        [Placement::Ring, Placement::Direct].into_iter().flat_map(move |p| [(seed, p, false), (seed, p, true)])
    }) {
        let named = |what: &str| format!("seed {seed}, {placement:?}, noticed {noticed}: {what}");
        let (setup, batches, world) = layer(2, 2, seed, placement).map_err(text)?;
        let setup = setup.incident(Incident::Crash { rank: Rank(3), after: 5 * seed, noticed });
        let outcomes = backend.run(&setup, async |mut ep| {
            let batch = &batches[ep.rank().index()];
            let mut failed = None;
            for _ in 0..60 {
                failed = round(&mut ep, &world, batch, &how).await.err();
                if failed.is_some() {
                    break;
                }
            }
            let culprit = failed.and_then(|error| error.failure().map(|failure| failure.culprit));
            let after = match ep.recover(&culprit.into_iter().collect()).await {
                Ok(()) => round(&mut ep, &world, batch, &how).await.map(|(observed, _)| observed),
                Err(error) => Err(error),
            };
            (culprit, after)
        })?;
        let mut observed = vec![Observed::default(); 4];
        for (rank, outcome) in outcomes.into_iter().enumerate().take(3) {
            let (culprit, after) = outcome.ok_or_else(|| named(&format!("rank {rank} did not finish")))?;
            ensure(culprit == Some(Rank(3)), || named(&format!("rank {rank} blamed {culprit:?}")))?;
            match after {
                Ok(seen) if rank < 2 => observed[rank] = seen,
                Err(Error::Excluded { rank: Rank(2) }) if rank == 2 => {}
                other => return Err(named(&format!("rank {rank} went on with {other:?}"))),
            }
        }
        let mask: RankSet = [Rank(2), Rank(3)].into_iter().collect();
        let left = World::new(setup.shape, setup.topology, mask).map_err(text)?;
        let mut batches = batches;
        batches[2..].fill(Batch::default());
        verify::run(&left, &batches, &observed).map_err(|error| named(&text(error)))?;
    }
    Ok(())
}

/// The last rank of three nodes is lost. Ranks 0 and 2 do not hear it, and wait for what ranks 1 and 3 are to pass on.
fn far_off<B: Backend>(backend: &B) -> Verdict {
    let how = Round { return_weights: true, ..Round::default() };
    for seed in 0..backend.seeds(40) {
        let (setup, batches, world) = layer(3, 2, seed, Placement::Ring).map_err(text)?;
        let setup = setup.incident(Incident::Crash { rank: Rank(5), after: 60 + 41 * seed, noticed: false });
        let outcomes = backend.run(&setup, async |mut ep| {
            let batch = &batches[ep.rank().index()];
            loop {
                if let Err(error) = round(&mut ep, &world, batch, &how).await {
                    return error.failure().map(|failure| failure.culprit);
                }
            }
        })?;
        let culprits: Vec<Option<Rank>> = outcomes.into_iter().take(5).map(Option::flatten).collect();
        ensure(culprits == [Some(Rank(5)); 5], || format!("seed {seed}: blamed {culprits:?}"))?;
    }
    Ok(())
}

/// Both ranks of node 1 of three are lost, in any operation: the others name one of them, go on over two nodes, and what they do is right.
fn lost_node<B: Backend>(backend: &B) -> Verdict {
    let how = Round { return_weights: true, ..Round::default() };
    let lost: RankSet = [Rank(2), Rank(3)].into_iter().collect();
    for (seed, noticed) in (0..backend.seeds(40)).flat_map(|seed| [(seed, false), (seed, true)]) {
        let named = |what: &str| format!("seed {seed}, noticed {noticed}: {what}");
        let (mut setup, batches, world) = layer(3, 2, seed, Placement::Ring).map_err(text)?;
        for rank in lost.iter() {
            setup = setup.incident(Incident::Crash { rank, after: 60 + 97 * seed, noticed });
        }
        let outcomes = backend.run(&setup, async |mut ep| {
            let batch = &batches[ep.rank().index()];
            let mut failed = None;
            while failed.is_none() {
                failed = round(&mut ep, &world, batch, &how).await.err();
            }
            let culprit = failed.and_then(|error| error.failure().map(|failure| failure.culprit));
            let after = match ep.recover(&culprit.into_iter().collect()).await {
                Ok(()) => round(&mut ep, &world, batch, &how).await.map(|(observed, _)| observed),
                Err(error) => Err(error),
            };
            (culprit, after)
        })?;
        let mut observed = vec![Observed::default(); 6];
        for (rank, outcome) in setup.topology.all().zip(outcomes).filter(|(rank, _)| !lost.contains(*rank)) {
            let (culprit, after) = outcome.ok_or_else(|| named(&format!("rank {rank} did not finish")))?;
            let is_right = culprit.is_some_and(|culprit| lost.contains(culprit));
            ensure(is_right, || named(&format!("rank {rank} blamed {culprit:?}")))?;
            observed[rank.index()] = after.map_err(|error| named(&format!("rank {rank} went on with {error}")))?;
        }
        let left = World::new(setup.shape, setup.topology, lost.clone()).map_err(text)?;
        let mut batches = batches;
        batches[2..4].fill(Batch::default());
        verify::run(&left, &batches, &observed).map_err(|error| named(&text(error)))?;
    }
    Ok(())
}

/// Any rank's process ends right after its last call, while another one, near or far, is slow.
fn leaves_in_time<B: Backend>(backend: &B) -> Verdict {
    let how = Round { return_weights: true, pull: true, ..Round::default() };
    for (seed, placement) in
        (0..backend.seeds(60)).flat_map(|seed| [(seed, Placement::Ring), (seed, Placement::Direct)])
    {
        let (mut setup, batches, world) = layer(2, 2, seed, placement).map_err(text)?;
        // Nothing fails here, however slow the machine is.
        let settings = Settings::builder(&setup.shape, &setup.topology).slots(2).placement(placement);
        setup.settings = settings.deadline(Nanos::from_secs(60)).build().map_err(text)?;
        let (leaves, slow) = (Rank(seed as u32 % 4), Rank(seed as u32 / 4 % 4));
        let setup = setup.incident(Incident::Exit { rank: leaves }).incident(Incident::Starve { rank: slow });
        let outcomes = backend.run(&setup, async |mut ep| {
            let batch = &batches[ep.rank().index()];
            round(&mut ep, &world, batch, &how).await.map(|(observed, _)| observed)
        })?;
        let named = |rank, what: &str| format!("seed {seed}, {placement:?}: rank {rank} {what}");
        let mut observed = Vec::new();
        for (rank, outcome) in outcomes.into_iter().enumerate() {
            let outcome = outcome.ok_or_else(|| named(rank, "did not finish"))?;
            observed.push(outcome.map_err(|error| named(rank, &text(error)))?);
        }
        verify::run(&world, &batches, &observed).map_err(text)?;
    }
    Ok(())
}

/// A lane along the rail loses what it carries, and what shares its queue.
fn lost_lane<B: Backend>(backend: &B) -> Verdict {
    let how = Round { return_weights: true, ..Round::default() };
    for (seed, which) in (0..backend.seeds(30)).flat_map(|seed| (0..3).map(move |which| (seed, which))) {
        let (setup, batches, world) = layer(2, 2, seed, Placement::Ring).map_err(text)?;
        let track = Layout::new(&setup.shape, &setup.topology, &setup.settings).map_err(text)?.far_track(0);
        let kind = [LaneKind::Control, LaneKind::Data(track), LaneKind::Credit(track)][which];
        let named = |what: &str| format!("seed {seed}, {kind:?}: {what}");
        let setup = setup.incident(Incident::LoseLane { from: Rank(0), to: Rank(2), kind: Some(kind), after: seed });
        let outcomes = backend.run(&setup, async |mut ep| {
            let batch = &batches[ep.rank().index()];
            let mut seen = Observed::default();
            for _ in 0..20 {
                match round(&mut ep, &world, batch, &how).await {
                    Ok((observed, _)) => seen = observed,
                    Err(error) => return Err(error),
                }
            }
            Ok(seen)
        })?;
        let mut observed = Vec::new();
        let mut culprits = Vec::new();
        for (rank, outcome) in outcomes.into_iter().enumerate() {
            match outcome.ok_or_else(|| named(&format!("rank {rank} did not finish")))? {
                Ok(seen) => observed.push(seen),
                Err(error) => culprits.push(error.failure().map(|failure| failure.culprit)),
            }
        }
        if culprits.is_empty() {
            verify::run(&world, &batches, &observed).map_err(|error| named(&text(error)))?;
            continue;
        }
        let alike = culprits.len() == 4 && culprits.iter().all(|culprit| *culprit == culprits[0]);
        ensure(alike, || named(&format!("blamed {culprits:?}")))?;
        let ends = [Some(Rank(0)), Some(Rank(2))];
        ensure(ends.contains(&culprits[0]), || named(&format!("blamed {culprits:?}")))?;
    }
    Ok(())
}
