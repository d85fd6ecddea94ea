//! Where rows lie: rings far smaller than the batch, the arena, leases, pulled output.

use ep_core::engine::Combine;
use ep_core::reference::{self, World};
use ep_core::ring::Geometry;
use ep_core::{Element, Endpoint, Placement, Rank, RankSet, Rings, Scaling};

use super::fixture::{Layer, TURN, Verdict, check, direct, ensure, finished, layer, placements, scenario, text};
use crate::backend::{Backend, Requirement};
use crate::drive::upload;
use crate::harness::Case;
use crate::scenario::{Scenario, Turn};
use crate::verify::bytes_of;
use crate::workload::{Batch, RoutingKind};

pub(super) fn cases<B: Backend>() -> Vec<Case<B>> {
    let case = |name, needs, body| Case { name, needs, body };
    vec![
        case("memory_rings_of_one_slot", &[], one_slot::<B> as fn(&B) -> _),
        case("memory_every_chunk_and_credit_up_to_slots", &[], every_step::<B>),
        case("memory_a_batch_a_thousand_times_the_rings", &[], thousandfold::<B>),
        case("memory_an_arena_too_small_falls_back_to_rings", &[], small_arena::<B>),
        case("memory_some_have_a_block_for_their_rows_and_some_do_not", &[], some_blocks::<B>),
        case("memory_one_full_arena_among_others", &[Requirement::Get], one_full_arena::<B>),
        case("memory_a_held_lease_is_never_overwritten", &[], held_leases::<B>),
        case("memory_leases_of_batches_that_bring_ever_more_rows", &[], ever_more::<B>),
        case("memory_a_dropped_lease_is_granted_again", &[], leases_return::<B>),
        case("memory_received_rows_go_back_as_they_lie", &[], identity::<B>),
        case("memory_output_is_the_callers_again_when_combine_returns", &[Requirement::Get], overwritten::<B>),
        case("memory_output_in_the_window_is_pulled", &[Requirement::Get], pulled::<B>),
    ]
}

fn one_slot<B: Backend>(backend: &B) -> Verdict {
    let rings = |channels| Rings::uniform(channels, Geometry { slots: 1, chunk: 1, credit: 1 });
    check(backend, &Scenario { rings: rings(1), ..scenario(4, 30) })?;
    check(backend, &Scenario { rings: rings(3), rounds: vec![Turn { channels: 3, ..TURN }; 2], ..scenario(4, 30) })
}

fn every_step<B: Backend>(backend: &B) -> Verdict {
    for slots in 1..=5 {
        for (chunk, credit) in (1..=slots).flat_map(|chunk| (1..=slots).map(move |credit| (chunk, credit))) {
            let rings = Rings::uniform(1, Geometry { slots, chunk, credit });
            check(backend, &Scenario { rings, ..scenario(2, 11) })?;
        }
    }
    Ok(())
}

fn thousandfold<B: Backend>(backend: &B) -> Verdict {
    let rings = Rings::uniform(1, Geometry { slots: 1, chunk: 1, credit: 1 });
    let tokens = vec![1000, 0, 1000];
    check(
        backend,
        &Scenario { rings, tokens, topk: 1, local_experts: 1, routing: RoutingKind::Single, ..scenario(3, 0) },
    )
}

fn small_arena<B: Backend>(backend: &B) -> Verdict {
    [0, 64, 1000, 5000]
        .into_iter()
        .try_for_each(|arena_bytes| check(backend, &Scenario { arena_bytes, rounds: vec![TURN; 3], ..direct(3, 20) }))
}

/// Without an arena only who has no rows has a block for them; who has rows may have none of some source.
fn some_blocks<B: Backend>(backend: &B) -> Verdict {
    let rings = Rings::uniform(3, Geometry { slots: 5, chunk: 2, credit: 3 });
    let rounds: Vec<Turn> = (1..=3).map(|channels| Turn { channels, ..TURN }).collect();
    for busy in 0..4 {
        let tokens = (0..4).map(|rank| u32::from(rank == busy)).collect();
        let few = Scenario { tokens, topk: 2, local_experts: 1, arena_bytes: 0, ..direct(4, 0) };
        check(backend, &Scenario { rings, rounds: rounds.clone(), ..few })?;
    }
    let lopsided = Scenario { tokens: vec![0, 2, 9, 30], arena_bytes: 1000, drop: 0.6, ..direct(4, 0) };
    check(backend, &Scenario { rings, rounds, ..lopsided })
}

/// One rank's rows come through rings, in both directions, while those of the others are placed and pulled.
fn one_full_arena<B: Backend>(backend: &B) -> Verdict {
    let rounds: Vec<Turn> = [(false, 1, false), (true, 1, false), (false, 7, true), (true, 7, true)]
        .map(|(cached, channels, pull)| Turn { cached, channels, pull, ..TURN })
        .to_vec();
    let rings = Rings::uniform(7, Geometry { slots: 3, chunk: 2, credit: 2 });
    let elements = [Element::Bf16, Element::Fp8(Scaling::Exact)];
    for (element, full) in elements.into_iter().flat_map(|element| [0, 2].map(|rank| (element, Some(Rank(rank))))) {
        let some = Scenario { element, full, rings, rounds: rounds.clone(), arena_bytes: 48 << 10, ..direct(3, 20) };
        check(backend, &some)?;
    }
    Ok(())
}

fn pulled<B: Backend>(backend: &B) -> Verdict {
    let rounds = vec![Turn { pull: true, ..TURN }, Turn { pull: true, bias: 2, channels: 2, ..TURN }];
    let rings = Rings::uniform(2, Geometry { slots: 2, chunk: 1, credit: 2 });
    check(backend, &Scenario { rings, rounds: rounds.clone(), ..direct(4, 25) })?;
    // With rings for dispatch the arena serves the output alone.
    check(backend, &Scenario { placement: Placement::Ring, rings, rounds, ..direct(4, 25) })
}

fn held_leases<B: Backend>(backend: &B) -> Verdict {
    (0..backend.seeds(6))
        .try_for_each(|seed| hold_leases(backend, layer(3, 12, seed, Placement::Direct).map_err(text)?))
}

/// Leases of several dispatches held at once: each still shows its own rows at the end.
pub(super) fn hold_leases<B: Backend>(backend: &B, layer: Layer) -> Verdict {
    let Layer { setup, batches } = layer;
    let world = World::new(setup.shape, setup.topology, RankSet::new()).map_err(text)?;
    let inputs: Vec<_> = batches.iter().map(|batch| batch.reference()).collect();
    let expected = reference::dispatch(&world, &inputs);
    let outcomes = backend.run(&setup, async |mut ep| {
        let batch = &batches[ep.rank().index()];
        let (x, routing) = upload(&mut ep, batch)?;
        let other = vec![0x3f80u16; batch.x.len()];
        let other = ep.rows(&bytes_of(&other), batch.tokens)?;
        let first = ep.dispatch(&x, &routing).await?;
        let second = ep.dispatch(&other, &routing).await?;
        let third = ep.dispatch(&other, &routing).await?;
        let seen = ep.bytes(&first.x)?;
        drop((second, third));
        Ok(seen)
    })?;
    for (rank, (seen, expected)) in finished(outcomes)?.iter().zip(&expected).enumerate() {
        ensure(*seen == bytes_of(&expected.x), || format!("the first lease of rank {rank} changed"))?;
    }
    Ok(())
}

/// Batches that bring few rows, then many, and few again, however many those before brought: none lies where another does.
fn ever_more<B: Backend>(backend: &B) -> Verdict {
    let Layer { setup, batches } = layer(3, 30, 9, Placement::Direct).map_err(text)?;
    let world = World::new(setup.shape, setup.topology, RankSet::new()).map_err(text)?;
    let dropped = |(turn, share): (u64, f64)| {
        let mut batches = batches.clone();
        let each = (0..).map(Rank).zip(&mut batches);
        each.map(|(rank, batch)| batch.drop_choices(share, turn, rank)).collect::<Result<Vec<_>, _>>()?;
        Ok(batches)
    };
    let turns = (0..).zip([1.0, 1.0, 0.8, 0.0, 0.9, 0.2]).map(dropped);
    let turns = turns.collect::<Result<Vec<Vec<Batch>>, ep_core::Error>>().map_err(text)?;
    let outcomes = backend.run(&setup, async |mut ep| {
        let (mut kept, me) = (Vec::new(), ep.rank().index());
        for batches in &turns {
            let (x, routing) = upload(&mut ep, &batches[me])?;
            kept.push(ep.dispatch(&x, &routing).await?);
        }
        kept.iter().map(|got| ep.bytes(&got.x)).collect::<Result<Vec<_>, _>>()
    })?;
    let seen = finished(outcomes)?;
    for (turn, batches) in turns.iter().enumerate() {
        let inputs: Vec<_> = batches.iter().map(Batch::reference).collect();
        for (rank, expected) in reference::dispatch(&world, &inputs).iter().enumerate() {
            let message = || format!("the lease of rank {rank} of turn {turn} has other rows");
            ensure(seen[rank][turn] == bytes_of(&expected.x), message)?;
        }
    }
    Ok(())
}

/// An arena with room for one block at a time serves any number of dispatches, when each lease is dropped.
fn leases_return<B: Backend>(backend: &B) -> Verdict {
    check(backend, &Scenario { rounds: vec![TURN; 20], arena_bytes: 16 << 10, ..direct(3, 20) })
}

/// What was received goes straight back: each token times the ranks that it reached.
fn identity<B: Backend>(backend: &B) -> Verdict {
    for placement in placements(backend) {
        let Layer { setup, batches } = layer(4, 15, 8, placement).map_err(text)?;
        let outcomes = backend.run(&setup, async |mut ep| {
            let batch = &batches[ep.rank().index()];
            let (x, routing) = upload(&mut ep, batch)?;
            let got = ep.dispatch(&x, &routing).await?;
            let combined = ep.combine(&got.x, &got.handle, Combine::default()).await?;
            let plan = got.handle.plan()?;
            let fan_out: Vec<usize> = (0..15).map(|token| plan.reached(token).len()).collect();
            Ok((ep.bytes(&combined.x)?, fan_out))
        })?;
        for ((bytes, fan_out), batch) in finished(outcomes)?.iter().zip(&batches) {
            for (token, &ranks) in fan_out.iter().enumerate() {
                let (at, end) = (token * 32, (token + 1) * 32);
                let times = |&bits: &u16| {
                    let value = half::bf16::from_bits(bits).to_f32();
                    half::bf16::from_f32((0..ranks).map(|_| value).sum()).to_bits()
                };
                let expected: Vec<u16> = batch.x[at..end].iter().map(times).collect();
                ensure(bytes[at * 2..end * 2] == bytes_of(&expected), || format!("token {token} came back wrong"))?;
            }
        }
    }
    Ok(())
}

fn overwritten<B: Backend>(backend: &B) -> Verdict {
    (0..backend.seeds(10))
        .try_for_each(|seed| overwrite_output(backend, layer(3, 12, seed, Placement::Direct).map_err(text)?))
}

/// Each rank scribbles over its output as soon as combine returns, while slower peers may still be about to pull.
pub(super) fn overwrite_output<B: Backend>(backend: &B, layer: Layer) -> Verdict {
    let Layer { setup, batches } = layer;
    let outcomes = backend.run(&setup, async |mut ep| {
        let batch = &batches[ep.rank().index()];
        let (x, routing) = upload(&mut ep, batch)?;
        let got = ep.dispatch(&x, &routing).await?;
        let mut output = ep.output(&got.handle);
        let rows = ep.bytes(&got.x)?;
        let Some(y) = &mut output else { return Ok(None) };
        ep.store(y, 0, &rows)?;
        let first = ep.combine(y, &got.handle, Combine::default()).await?;
        ep.store(y, 0, &vec![0xff; rows.len()])?;
        let second = ep.combine(&got.x, &got.handle, Combine::default()).await?;
        Ok(Some((ep.bytes(&first.x)?, ep.bytes(&second.x)?)))
    })?;
    for (rank, outcome) in finished(outcomes)?.into_iter().enumerate() {
        let (first, second) = outcome.ok_or("the arena had no room for the output")?;
        ensure(first == second, || format!("rank {rank} got back what was written after combine"))?;
    }
    Ok(())
}
