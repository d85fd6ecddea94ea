//! Low latency against the oracle: both forms, two operations in flight, bad input.

use ep_core::engine::Routing;
use ep_core::engine::low_latency::LowRouting;
use ep_core::reference::{Weighing, World};
use ep_core::{Element, Endpoint, Error, LowLatency, Nanos, Rank, RankSet, Scaling, Settings};

use super::fixture::{PATIENCE, Verdict, allowed, ensure, finished, text};
use crate::backend::{Backend, Requirement, Setup};
use crate::drive;
use crate::harness::Case;
use crate::low_latency::scenario::{Scenario, Sent, Turn};
use crate::low_latency::{Seen, results, round, upload, verify, weights};
use crate::verify::Observed;
use crate::workload::{Batch, RoutingKind};

const LOW: &[Requirement] = &[Requirement::LowLatency];

pub(super) fn cases<B: Backend>() -> Vec<Case<B>> {
    let case = |name, needs, body| Case { name, needs, body };
    vec![
        case("low_latency_both_forms", LOW, both_forms::<B> as fn(&B) -> _),
        case("low_latency_results_of_small_and_of_large_batches", LOW, batch_sizes::<B>),
        case("low_latency_combines_of_different_kinds_are_refused", LOW, other_kind::<B>),
        case("low_latency_ranks_in_odd_numbers", LOW, odd_ranks::<B>),
        case("low_latency_bf16_rows", LOW, bf16_rows::<B>),
        case("low_latency_rows_of_every_scaling", LOW, scalings::<B>),
        case("low_latency_int8_rows", &[Requirement::LowLatency, Requirement::Int8], int8_rows::<B>),
        case("low_latency_full_batches_and_empty_ones", LOW, full_and_empty::<B>),
        case("low_latency_every_choice_dropped", LOW, dropped::<B>),
        case("low_latency_topk_from_1_to_32", LOW, topk_sizes::<B>),
        case("low_latency_a_token_that_names_an_expert_twice", LOW, repeats::<B>),
        case("low_latency_two_operations_in_flight", LOW, in_flight::<B>),
        case("low_latency_a_third_in_flight_is_refused", LOW, third::<B>),
        case("low_latency_bad_input_is_refused", LOW, bad_input::<B>),
        case("low_latency_refuses_fp8_rows_of_throughput_mode", LOW, fp8_rows::<B>),
        case("low_latency_beside_throughput_mode", LOW, beside_throughput::<B>),
        case("low_latency_many_operations", LOW, many::<B>),
        case("low_latency_statistics_count_what_moved", LOW, statistics::<B>),
        case("low_latency_statistics_count_what_was_sent_and_dropped", LOW, dropped_statistics::<B>),
    ]
}

/// A plain turn.
pub(super) const TURN: Turn = Turn::PLAIN;

/// A small scenario, to be varied.
pub(super) fn scenario(ranks: u32, tokens: u32) -> Scenario {
    Scenario {
        seed: 3,
        nodes: 1,
        local_experts: 3,
        topk: 4.min(3 * ranks),
        hidden: 40,
        element: Element::Bf16,
        max_tokens: tokens.max(1) + 2,
        tokens: vec![tokens; ranks as usize],
        routing: RoutingKind::Uniform,
        drop: 0.0,
        turns: vec![TURN, Turn { at_experts: true, ..TURN }],
        zombie: None,
    }
}

/// Checks a scenario under several seeds of the backend's freedom.
pub(super) fn check<B: Backend>(backend: &B, scenario: &Scenario) -> Verdict {
    (0..backend.seeds(3)).try_for_each(|more| {
        let scenario = Scenario { seed: scenario.seed + more, ..scenario.clone() };
        let compared = scenario.check(backend).map_err(|error| format!("seed {}: {error}", scenario.seed))?;
        let expects_rows = scenario.tokens.iter().any(|&tokens| tokens > 0);
        ensure(!expects_rows || compared.rows > 0, || "nothing was compared".into())
    })
}

fn both_forms<B: Backend>(backend: &B) -> Verdict {
    [1, 2, 4, 8].into_iter().try_for_each(|ranks| check(backend, &scenario(ranks, 12)))
}

/// Where low latency travels as units, results of small batches do, and those of large ones lie in slots: each rank tells the others which it has.
fn batch_sizes<B: Backend>(backend: &B) -> Verdict {
    // Small ones and large ones by turns, in the same bank; and such as are given up with results under way.
    let anew = Some(Sent::Combine);
    let small = Turn { quarters: 1, ..TURN };
    let twice = Turn { twice: true, ..TURN };
    let turns = vec![twice, Turn { at_experts: true, anew, ..small }, Turn { anew, ..TURN }, small, TURN];
    let sizes = Scenario { tokens: vec![9, 1, 0, 4], turns, ..scenario(4, 9) };
    [0, 1, 5, 9].into_iter().try_for_each(|most| {
        let mut setup = sizes.setup().map_err(text)?;
        let settings = Settings::builder(&setup.shape, &setup.topology).low_latency(true);
        setup.settings = settings.low_latency_unit_bytes(sizes.unit_bytes(most)).build().map_err(text)?;
        let compared =
            sizes.check_in(backend, &setup).map_err(|error| format!("units up to {most} tokens: {error}"))?;
        ensure(compared.rows > 0, || "nothing was compared".into())
    })
}

/// One rank weighs its results, the other lets them be weighed: both are told so, though where results travel as units one kind of this size does and the other
/// does not.
fn other_kind<B: Backend>(backend: &B) -> Verdict {
    let scenario = Scenario { max_tokens: 8, ..scenario(2, 6) };
    let mut layer = layer_of(scenario.clone()).map_err(text)?;
    let settings =
        Settings::builder(&layer.setup.shape, &layer.setup.topology).low_latency(true).deadline(allowed(PATIENCE));
    layer.setup.settings = settings.low_latency_unit_bytes(scenario.unit_bytes(4)).build().map_err(text)?;
    let outcomes = backend.run(&layer.setup, async |mut ep| {
        let batch = &layer.batches[ep.rank().index()];
        let weighing = if ep.rank() == Rank(0) { Weighing::AtExperts } else { Weighing::AtSource };
        let (x, routing) = upload(&mut ep, batch, weighing)?;
        let got = ep.low_latency_dispatch(&x, &routing).await?;
        let seen = Seen::of_dispatch(&ep, &got)?;
        let y = results(&mut ep, &layer.world, &seen)?;
        let weights = weights(&mut ep, batch, weighing)?;
        Ok(ep.low_latency_combine(&y, &got.handle, weights.as_ref()).await.map(drop))
    })?;
    for outcome in finished(outcomes)? {
        let kind = "kind of the low-latency operation";
        let is_told = |error: &Error| error.to_string().contains(kind);
        ensure(outcome.as_ref().is_err_and(is_told), || format!("{outcome:?}, expected a word of the {kind}"))?;
    }
    Ok(())
}

fn odd_ranks<B: Backend>(backend: &B) -> Verdict {
    [3, 5, 7].into_iter().try_for_each(|ranks| check(backend, &scenario(ranks, 9)))
}

fn bf16_rows<B: Backend>(backend: &B) -> Verdict {
    rows_of(backend, Element::Bf16)
}

/// Where FP8 cannot be made, it is refused, and nothing has moved.
fn scalings<B: Backend>(backend: &B) -> Verdict {
    let makes = backend.makes_fp8();
    let all = Element::ALL.into_iter().filter(|&element| !matches!(element, Element::Bf16 | Element::Int8));
    all.into_iter()
        .try_for_each(|element| if makes { rows_of(backend, element) } else { refused_rows(backend, element) })
}

fn refused_rows<B: Backend>(backend: &B, element: Element) -> Verdict {
    let scenario = Scenario { element, ..scenario(3, 5) };
    let setup = scenario.setup().map_err(text)?;
    let batches = scenario.batches(setup.shape, 0).map_err(text)?;
    let outcomes = backend.run(&setup, async |mut ep| {
        let batch = &batches[ep.rank().index()];
        let (x, routing) = upload(&mut ep, batch, Weighing::AtSource)?;
        let said = ep.send_dispatch(&x, &routing).await.err();
        Ok((said, ep.stats().peers.iter().map(|peer| peer.rows_sent).sum::<u64>()))
    })?;
    for (rank, (said, sent)) in finished(outcomes)?.into_iter().enumerate() {
        let is_named = matches!(&said, Some(Error::Unsupported { what, .. }) if what.contains(&element.to_string()));
        ensure(is_named && sent == 0, || format!("rank {rank}: {element}: {said:?}, {sent} rows sent"))?;
    }
    Ok(())
}

fn int8_rows<B: Backend>(backend: &B) -> Verdict {
    rows_of(backend, Element::Int8)
}

fn rows_of<B: Backend>(backend: &B, element: Element) -> Verdict {
    [1, 127, 128, 2880]
        .into_iter()
        .try_for_each(|hidden| check(backend, &Scenario { element, hidden, ..scenario(3, 5) }))
}

fn full_and_empty<B: Backend>(backend: &B) -> Verdict {
    check(backend, &Scenario { max_tokens: 10, ..scenario(4, 10) })?;
    check(backend, &Scenario { routing: RoutingKind::Single, max_tokens: 16, ..scenario(4, 16) })?;
    check(backend, &scenario(4, 0))?;
    (0..3).try_for_each(|empty| {
        let mut tokens = vec![6; 3];
        tokens[empty] = 0;
        check(backend, &Scenario { tokens, ..scenario(3, 6) })
    })
}

fn dropped<B: Backend>(backend: &B) -> Verdict {
    check(backend, &Scenario { drop: 1.0, ..scenario(3, 7) })?;
    check(backend, &Scenario { drop: 0.5, ..scenario(3, 7) })
}

fn topk_sizes<B: Backend>(backend: &B) -> Verdict {
    [1, 2, 11, 32]
        .into_iter()
        .try_for_each(|topk| check(backend, &Scenario { topk, local_experts: 11, ..scenario(3, 6) }))
}

/// A batch whose tokens name an expert twice; and one in which they name it once, with the sum of both weights.
fn repeated(batch: &Batch) -> [Batch; 2] {
    let [mut twice, mut once] = [batch.clone(), batch.clone()];
    let mut tokens = twice.topk_idx.chunks_exact_mut(4).zip(once.topk_idx.chunks_exact_mut(4));
    for (token, (twice, once)) in (0u32..).zip(&mut tokens) {
        match token % 2 {
            0 => {
                twice[1] = twice[0];
                once[1] = -1;
            }
            _ => {
                let first = twice[0];
                twice[1..].copy_from_slice(&[-1, -1, first]);
                once[1..].fill(-1);
            }
        }
    }
    // So that both sums are exact.
    twice.topk_weights = [0.5, 0.25, 1.0, 0.25].repeat(batch.tokens as usize);
    once.topk_weights = [0.75, 0.0, 1.0, 0.25].repeat(batch.tokens as usize);
    [twice, once]
}

fn repeats<B: Backend>(backend: &B) -> Verdict {
    let layer = layer(3, 7, 5).map_err(text)?;
    let batches: Vec<_> = layer.batches.iter().map(repeated).collect();
    let outcomes = backend.run(&layer.setup, async |mut ep| {
        let [twice, once] = &batches[ep.rank().index()];
        let mut errors = Vec::new();
        for (weighing, repeats) in [(Weighing::AtSource, false), (Weighing::AtExperts, true)] {
            let (x, routing) = upload(&mut ep, twice, weighing)?;
            let sent = ep.send_dispatch(&x, &LowRouting { repeats, ..routing }).await;
            errors.extend(sent.err().map(|error| error.to_string()));
        }
        let expected = round(&mut ep, &layer.world, once, Weighing::AtSource).await?;
        let (x, routing) = upload(&mut ep, twice, Weighing::AtSource)?;
        let got = ep.low_latency_dispatch(&x, &LowRouting { repeats: true, ..routing }).await?;
        let mut seen = Seen::of_dispatch(&ep, &got)?;
        let y = results(&mut ep, &layer.world, &seen)?;
        let weights = ep.array(&twice.topk_weights)?;
        let back = ep.low_latency_combine(&y, &got.handle, Some(&weights)).await?;
        seen.combined_x = ep.bytes(&back.x)?;
        Ok((errors, seen, expected))
    })?;
    for (rank, (errors, seen, expected)) in finished(outcomes)?.into_iter().enumerate() {
        let choice = batches[rank][0].topk_idx[0];
        let refused = [
            format!("topk_idx of token 0 is {choice} twice, allowed: every expert at most once per token"),
            "repeats with topk_weights of a low-latency dispatch is true, allowed: false".to_owned(),
        ];
        ensure(errors == refused, || format!("rank {rank}: {errors:#?}"))?;
        ensure(seen == expected, || format!("rank {rank} saw {seen:?}, and {expected:?} of experts named once"))?;
        ensure(expected.combined_x.iter().any(|&byte| byte != 0), || "nothing was compared".into())?;
    }
    Ok(())
}

fn in_flight<B: Backend>(backend: &B) -> Verdict {
    let turns = [false, true, false, true, true, false].map(|at_experts| Turn { at_experts, ahead: true, ..TURN });
    (0..backend.seeds(6))
        .try_for_each(|seed| check(backend, &Scenario { seed: seed * 10, turns: turns.to_vec(), ..scenario(4, 9) }))
}

fn many<B: Backend>(backend: &B) -> Verdict {
    let turn = |at: usize| Turn { at_experts: at % 3 == 1, ahead: at % 2 == 1, twice: at.is_multiple_of(7), ..TURN };
    check(backend, &Scenario { turns: (0..40).map(turn).collect(), ..scenario(3, 4) })
}

/// A communicator, its batches and the oracle's world, for cases of their own.
pub(super) struct Layer {
    pub(super) setup: Setup,
    pub(super) world: World,
    pub(super) batches: Vec<Batch>,
}

pub(super) fn layer(ranks: u32, tokens: u32, seed: u64) -> Result<Layer, Error> {
    layer_of(Scenario { seed, ..scenario(ranks, tokens) })
}

pub(super) fn layer_of(scenario: Scenario) -> Result<Layer, Error> {
    layer_within(scenario, allowed(PATIENCE))
}

/// One whose ranks are waited for in vain.
pub(super) fn hurried(scenario: Scenario) -> Result<Layer, Error> {
    layer_within(scenario, deadline())
}

fn layer_within(scenario: Scenario, deadline: Nanos) -> Result<Layer, Error> {
    let mut setup = scenario.setup()?;
    let settings = Settings::builder(&setup.shape, &setup.topology).slots(4).low_latency(true).deadline(deadline);
    setup.settings = settings.build()?;
    let world = World::new(setup.shape, setup.topology, RankSet::new())?;
    Ok(Layer { batches: scenario.batches(setup.shape, 0)?, setup, world })
}

/// Time allowed to one operation where somebody waits for it to pass.
pub(super) fn deadline() -> Nanos {
    allowed(1)
}

fn third<B: Backend>(backend: &B) -> Verdict {
    let layer = layer(3, 6, 1).map_err(text)?;
    let outcomes = backend.run(&layer.setup, async |mut ep| {
        let batch = &layer.batches[ep.rank().index()];
        let (x, routing) = upload(&mut ep, batch, Weighing::AtSource)?;
        let first = ep.send_dispatch(&x, &routing).await?;
        let second = ep.send_dispatch(&x, &routing).await?;
        let refused = ep.send_dispatch(&x, &routing).await.map(drop);
        let early = ep.receive_dispatch(&second).await.map(drop);
        let mut seen = Vec::new();
        for sent in [&first, &second] {
            let got = ep.receive_dispatch(sent).await?;
            seen.push(Seen::of_dispatch(&ep, &got)?);
        }
        let again = ep.receive_dispatch(&second).await.map(drop);
        let after = round(&mut ep, &layer.world, batch, Weighing::AtSource).await?;
        Ok((refused, early, again, seen, after))
    })?;
    let mut after = Vec::new();
    for (refused, early, again, seen, last) in finished(outcomes)? {
        ensure(refused == Err(Error::TooManyInFlight { op: 3 }), || format!("the third send gave {refused:?}"))?;
        let out_of_turn = "low-latency operation to receive is 2, allowed: 1, the oldest that was not received";
        ensure(early.as_ref().is_err_and(|error| error.to_string() == out_of_turn), || format!("{early:?}"))?;
        ensure(again.is_err(), || "an operation was received twice".into())?;
        ensure(seen[0].experts == seen[1].experts, || "two dispatches of one batch differ".into())?;
        ensure(seen[0].experts == last.experts, || "what was in flight differs from what was not".into())?;
        after.push(last);
    }
    verify::run(&layer.world, &layer.batches, Weighing::AtSource, &after).map_err(text).map(drop)
}

fn bad_input<B: Backend>(backend: &B) -> Verdict {
    let layer = layer(2, 5, 2).map_err(text)?;
    let most = layer.setup.shape.max_tokens();
    let outcomes = backend.run(&layer.setup, async |mut ep| {
        let batch = &layer.batches[ep.rank().index()];
        let mut errors: Vec<String> = Vec::new();
        let topk = ep.shape().topk() as usize;
        let row_bytes = ep.shape().result_bytes() as usize;
        let too_many = most + 1;
        let long = ep.rows(&vec![0; too_many as usize * row_bytes], too_many)?;
        let dropped = ep.array(&vec![-1i64; too_many as usize * topk])?;
        let routing = LowRouting::new(dropped, None);
        errors.extend(ep.send_dispatch(&long, &routing).await.err().map(|error| error.to_string()));
        let (x, routing) = upload(&mut ep, batch, Weighing::AtSource)?;
        let short = LowRouting { topk_weights: Some(ep.array(&[1.0f32])?), ..routing.clone() };
        errors.extend(ep.send_dispatch(&x, &short).await.err().map(|error| error.to_string()));
        let got = ep.low_latency_dispatch(&x, &routing).await?;
        let seen = Seen::of_dispatch(&ep, &got)?;
        let y = results(&mut ep, &layer.world, &seen)?;
        errors.extend(ep.send_combine(&y, &got.handle, None).await.err().map(|error| error.to_string()));
        let few = ep.rows(&vec![0; row_bytes], 1)?;
        let weights = ep.array(&batch.topk_weights)?;
        errors.extend(ep.send_combine(&few, &got.handle, Some(&weights)).await.err().map(|error| error.to_string()));
        let me = ep.rank();
        errors.extend(ep.mask_rank(me).await.err().map(|error| error.to_string()));
        // Nothing moved: the layer goes on.
        let back = ep.low_latency_combine(&y, &got.handle, Some(&weights)).await?;
        Ok((errors, Seen { combined_x: ep.bytes(&back.x)?, ..seen }))
    })?;
    let mut seen = Vec::new();
    for (rank, (errors, last)) in finished(outcomes)?.into_iter().enumerate() {
        let expected = [
            format!(
                "tokens of a low-latency dispatch is {}, allowed: at most {most}, max_tokens of the shape",
                most + 1
            ),
            "length of topk_weights is 1, allowed: 20, that of topk_idx".to_owned(),
            "topk_weights is absent, allowed: given at dispatch or here".to_owned(),
            format!("rows of y is 1, allowed: at least {}", 2 * most * 3),
            format!("rank to mask is {rank}, allowed: another rank, 0 to 1"),
        ];
        ensure(errors == expected, || format!("rank {rank}: {errors:#?}"))?;
        seen.push(last);
    }
    verify::run(&layer.world, &layer.batches, Weighing::AtSource, &seen).map_err(text).map(drop)
}

/// FP8 rows of 18 elements with f32 scales are as long as bf16 rows.
fn fp8_rows<B: Backend>(backend: &B) -> Verdict {
    let scenario = Scenario { element: Element::Fp8(Scaling::Exact), hidden: 18, ..scenario(3, 4) };
    let setup = scenario.setup().map_err(text)?;
    let batches = scenario.batches(setup.shape, 0).map_err(text)?;
    let outcomes = backend.run(&setup, async |mut ep| {
        let batch = &batches[ep.rank().index()];
        let rows = vec![0; batch.tokens as usize * ep.shape().row_bytes() as usize];
        let x = ep.rows(&rows, batch.tokens)?;
        let topk_idx = ep.array(&batch.topk_idx)?;
        let got = ep.dispatch(&x, &Routing::TopK { topk_idx, topk_weights: None }).await?;
        let (_, routing) = upload(&mut ep, batch, Weighing::AtExperts)?;
        let sent = ep.send_dispatch(&got.x, &routing).await.err();
        Ok((got.rows, sent.map(|error| error.to_string())))
    })?;
    for (rank, (rows, said)) in finished(outcomes)?.into_iter().enumerate() {
        let expected = "x is coded rows of a dispatch, allowed: bf16 rows";
        ensure(rows > 0, || format!("rank {rank} received nothing"))?;
        ensure(said.as_deref() == Some(expected), || format!("rank {rank} was told {said:?}"))?;
    }
    Ok(())
}

fn beside_throughput<B: Backend>(backend: &B) -> Verdict {
    let layer = layer(4, 8, 3).map_err(text)?;
    let how = drive::Round { return_weights: true, ..drive::Round::default() };
    let outcomes = backend.run(&layer.setup, async |mut ep| {
        let batch = &layer.batches[ep.rank().index()];
        let mut low = Vec::new();
        let mut high = Vec::new();
        for _ in 0..3 {
            let (x, routing) = upload(&mut ep, batch, Weighing::AtExperts)?;
            let sent = ep.send_dispatch(&x, &routing).await?;
            // A whole round of throughput mode while the dispatch is in flight.
            high.push(drive::round(&mut ep, &layer.world, batch, &how).await?.0);
            let got = ep.receive_dispatch(&sent).await?;
            let mut seen = Seen::of_dispatch(&ep, &got)?;
            let y = results(&mut ep, &layer.world, &seen)?;
            let back = ep.low_latency_combine(&y, &got.handle, None).await?;
            seen.combined_x = ep.bytes(&back.x)?;
            low.push(seen);
        }
        Ok((low, high))
    })?;
    let ranks = finished(outcomes)?;
    for turn in 0..3 {
        let low: Vec<Seen> = ranks.iter().map(|(low, _)| low[turn].clone()).collect();
        let high: Vec<Observed> = ranks.iter().map(|(_, high)| high[turn].clone()).collect();
        verify::run(&layer.world, &layer.batches, Weighing::AtExperts, &low).map_err(text)?;
        crate::verify::run(&layer.world, &layer.batches, &high).map_err(text)?;
    }
    Ok(())
}

fn statistics<B: Backend>(backend: &B) -> Verdict {
    let layer = layer(3, 7, 4).map_err(text)?;
    let outcomes = backend.run(&layer.setup, async |mut ep| {
        let batch = &layer.batches[ep.rank().index()];
        let seen = round(&mut ep, &layer.world, batch, Weighing::AtSource).await?;
        Ok((seen, ep.stats()))
    })?;
    let ranks = finished(outcomes)?;
    let shape = layer.setup.shape;
    let result_bytes = 16 + shape.result_bytes();
    for (rank, (seen, stats)) in (0u32..).zip(&ranks) {
        let expert_rows: Vec<u64> = seen.experts.iter().map(|expert| expert.source_token.len() as u64).collect();
        ensure(stats.expert_rows == expert_rows, || {
            format!("rank {rank}: {:?} of {expert_rows:?}", stats.expert_rows)
        })?;
        ensure(stats.operations == 2, || format!("rank {rank}: {} operations", stats.operations))?;
        for (peer, with) in (0u32..).zip(&stats.peers) {
            let of = |owner: u32, source: u32| {
                let experts = &ranks[owner as usize].0.experts;
                let tokens = experts.iter().flat_map(|expert| {
                    let rows = expert.source_rank.iter().zip(&expert.source_token);
                    rows.filter(move |(from, _)| **from == source as i32).map(|(_, token)| *token)
                });
                let mut tokens: Vec<i32> = tokens.collect();
                let choices = tokens.len() as u64;
                tokens.sort_unstable();
                tokens.dedup();
                (tokens.len() as u64, choices)
            };
            // Rows of the dispatch once a rank, results one a choice.
            let ((rows_out, choices_in), (rows_in, choices_out)) = (of(peer, rank), of(rank, peer));
            let counted = (with.rows_sent, with.rows_received);
            let expected = (rows_out + choices_out, rows_in + choices_in);
            ensure(counted == expected, || format!("rank {rank}, peer {peer}: {counted:?}, expected {expected:?}"))?;
            let row_bytes = (16 + 8 * u64::from(shape.topk())).next_multiple_of(16) + shape.row_bytes();
            let bytes = rows_out * row_bytes + choices_out * result_bytes;
            ensure(with.bytes_sent == bytes, || format!("rank {rank}, peer {peer}: {} of {bytes}", with.bytes_sent))?;
        }
    }
    Ok(())
}

fn dropped_statistics<B: Backend>(backend: &B) -> Verdict {
    let layer = layer(3, 7, 4).map_err(text)?;
    let outcomes = backend.run(&layer.setup, async |mut ep| {
        let batch = &layer.batches[ep.rank().index()];
        let (x, routing) = upload(&mut ep, batch, Weighing::AtExperts)?;
        let mut sent = Vec::new();
        for drops in [false, true, false] {
            if drops {
                drop(ep.send_dispatch(&x, &routing).await?);
            } else {
                round(&mut ep, &layer.world, batch, Weighing::AtExperts).await?;
            }
            sent.push(ep.stats().peers.iter().map(|peer| peer.rows_sent).collect());
        }
        Ok(sent)
    })?;
    for (rank, sent) in finished(outcomes)?.into_iter().enumerate() {
        let [round, dropped, all]: [Vec<u64>; 3] = sent.try_into().map_err(|_| "three counts".to_owned())?;
        for (peer, ((round, dropped), all)) in round.into_iter().zip(dropped).zip(all).enumerate() {
            let alone = dropped.checked_sub(round);
            let expected = alone.map(|alone| 2 * round + alone);
            let counted = || format!("rank {rank}, peer {peer}: {round}, {dropped} and {all} rows sent");
            // A round sends rows and brings back results: more than the rows alone.
            ensure(round == 0 || alone.is_some_and(|alone| 0 < alone && alone <= round), counted)?;
            ensure(expected == Some(all), counted)?;
        }
    }
    Ok(())
}
