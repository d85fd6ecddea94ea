//! Rows of low latency that are packed: what a dispatch by expert of throughput mode brings, by a launch or two.

use ep_core::Element;
use ep_core::engine::low_latency::{LowOrder, LowRouting};
use ep_core::reference::Weighing;
use ep_core::{Endpoint, Error, LowLatency};

use super::fixture::{Verdict, ensure, finished, text};
use super::low_latency::{TURN, layer_of, scenario};
use crate::backend::{Backend, Requirement};
use crate::harness::Case;
use crate::low_latency::by_source::Given;
use crate::low_latency::packed::{self, Asked};
use crate::low_latency::scenario::{Scenario, Turn};
use crate::low_latency::{round, upload};
use crate::workload::RoutingKind;

const NEEDS: &[Requirement] = &[Requirement::LowLatency, Requirement::LowOrders];
const FAR: &[Requirement] = &[Requirement::FarLowLatency, Requirement::LowOrders];

const ALIGNMENTS: [u32; 3] = [1, 8, 128];

pub(super) fn cases<B: Backend>() -> Vec<Case<B>> {
    let case = |name, needs, body| Case { name, needs, body };
    vec![
        case("low_packed_brings_what_throughput_mode_brings_by_expert", NEEDS, brings::<B> as fn(&B) -> _),
        case("low_packed_rows_of_every_scaling", NEEDS, scalings::<B>),
        case("low_packed_full_batches_and_empty_ones", NEEDS, full_and_empty::<B>),
        case("low_packed_beside_rows_in_other_orders", NEEDS, beside::<B>),
        case("low_packed_bad_input_is_refused", NEEDS, bad_input::<B>),
        case("low_packed_over_nodes", FAR, nodes::<B>),
    ]
}

/// Both ways back, each with padding of zeros and without.
fn turns() -> Vec<Turn> {
    let by_choice = Turn { twice: true, ..TURN };
    let weighed = Turn { at_experts: true, ..TURN };
    vec![TURN, weighed, by_choice, Turn { at_experts: true, ..by_choice }]
}

fn check<B: Backend>(backend: &B, scenario: &Scenario, alignment: u32) -> Verdict {
    (0..backend.seeds(3)).try_for_each(|more| {
        let scenario = Scenario { seed: scenario.seed + more, ..scenario.clone() };
        let setup = scenario.setup().map_err(text)?;
        let compared = packed::check(&scenario, backend, &setup, alignment)
            .map_err(|error| format!("seed {}, alignment {alignment}: {error}", scenario.seed))?;
        let expects_rows = scenario.tokens.iter().any(|&tokens| tokens > 0);
        ensure(!expects_rows || compared.rows > 0, || "nothing was compared".into())
    })
}

fn brings<B: Backend>(backend: &B) -> Verdict {
    [1, 2, 3, 8].into_iter().zip([1, 8, 128, 1]).try_for_each(|(ranks, alignment)| {
        check(backend, &Scenario { turns: turns(), ..scenario(ranks, 12) }, alignment)
    })
}

fn scalings<B: Backend>(backend: &B) -> Verdict {
    let coded = Turn { ahead: true, ..TURN };
    let turns = vec![TURN, coded, Turn { at_experts: true, ..coded }];
    Element::ALL
        .into_iter()
        .filter(|element| *element != Element::Int8)
        .zip(ALIGNMENTS.into_iter().cycle())
        .try_for_each(|(element, alignment)| {
            let hidden = if element == Element::Bf16 { 272 } else { 269 };
            check(backend, &Scenario { element, hidden, turns: turns.clone(), ..scenario(3, 5) }, alignment)
        })
}

fn full_and_empty<B: Backend>(backend: &B) -> Verdict {
    let full = Scenario { max_tokens: 7, tokens: vec![7, 0, 7, 1], turns: turns(), ..scenario(4, 7) };
    check(backend, &full, 4)?;
    check(backend, &Scenario { routing: RoutingKind::Single, ..full.clone() }, 1)?;
    check(backend, &Scenario { drop: 0.5, ..full.clone() }, 8)?;
    check(backend, &Scenario { drop: 1.0, ..full.clone() }, 3)?;
    check(backend, &Scenario { tokens: vec![0; 4], ..full }, 8)
}

/// A communicator gives rows in any order, from call to call.
fn beside<B: Backend>(backend: &B) -> Verdict {
    let layer = layer_of(scenario(3, 6)).map_err(text)?;
    let outcomes = backend.run(&layer.setup, async |mut ep| {
        let batch = &layer.batches[ep.rank().index()];
        let given = Given { weights: true, coded: false };
        let asked = Asked { alignment: 8, zero_spare: true, by_choice: false, given };
        let first = packed::round(&mut ep, &layer.world, batch, asked).await?;
        round(&mut ep, &layer.world, batch, Weighing::AtSource).await?;
        let between = crate::low_latency::by_source::round(&mut ep, &layer.world, batch, given).await?;
        let last = packed::round(&mut ep, &layer.world, batch, asked).await?;
        Ok((first == last, between.combined_x.len() == last.observed.combined_x.len()))
    })?;
    for outcome in finished(outcomes)? {
        ensure(outcome == (true, true), || format!("{outcome:?}, expected the same twice, with other orders between"))?;
    }
    Ok(())
}

fn bad_input<B: Backend>(backend: &B) -> Verdict {
    let layer = layer_of(scenario(2, 4)).map_err(text)?;
    let outcomes = backend.run(&layer.setup, async |mut ep| {
        let batch = &layer.batches[ep.rank().index()];
        let (x, routing) = upload(&mut ep, batch, Weighing::AtSource)?;
        let packed =
            |alignment| LowRouting { order: LowOrder::Packed { alignment, zero_spare: false }, ..routing.clone() };
        let twice = ep.send_dispatch(&x, &LowRouting { repeats: true, ..packed(8) }).await.map(drop);
        let unaligned = ep.send_dispatch(&x, &packed(0)).await.map(drop);
        let huge = ep.send_dispatch(&x, &packed(u32::MAX)).await.map(drop);
        let got = ep.low_latency_dispatch(&x, &packed(8)).await?;
        let rows = ep.bytes(&got.x)?.len() as u64 / ep.shape().row_bytes();
        let bytes = vec![0; (rows * ep.shape().result_bytes()) as usize];
        let y = ep.rows(&bytes, rows as u32)?;
        let short = ep.rows(&bytes[..bytes.len() / 2], rows as u32 / 2)?;
        let short = ep.send_combine(&short, &got.handle, None).await.map(drop);
        // Nothing was sent by these.
        ep.low_latency_combine(&y, &got.handle, None).await?;
        Ok([twice, unaligned, huge, short])
    })?;
    for refused in finished(outcomes)? {
        for (refused, limit) in refused.into_iter().zip(["allowed: false", "at least 1", "at most", "at least"]) {
            let is_told = |error: &Error| error.to_string().contains(limit);
            ensure(refused.as_ref().is_err_and(is_told), || format!("{refused:?}, expected a word of `{limit}`"))?;
        }
    }
    Ok(())
}

fn nodes<B: Backend>(backend: &B) -> Verdict {
    check(backend, &Scenario { nodes: 2, turns: turns(), ..scenario(4, 6) }, 8)?;
    let small = Scenario { nodes: 2, max_tokens: 7, tokens: vec![7, 0], drop: 0.3, ..scenario(2, 7) };
    check(backend, &Scenario { turns: turns(), ..small }, 1)
}
