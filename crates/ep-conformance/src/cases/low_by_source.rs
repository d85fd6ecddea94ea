//! Low latency whose rows lie by source, against the oracle of throughput mode.

use ep_core::Element;
use ep_core::engine::low_latency::{LowOrder, LowRouting};
use ep_core::reference::Weighing;
use ep_core::{Endpoint, Error, Layout, LowLatency, Settings};

use super::fixture::{Verdict, ensure, finished, text};
use super::low_latency::{TURN, layer_of, scenario};
use crate::backend::{Backend, Requirement};
use crate::harness::Case;
use crate::low_latency::by_source::{self, Given};
use crate::low_latency::scenario::{Scenario, Turn};
use crate::low_latency::{Seen, results, upload};
use crate::workload::RoutingKind;

const NEEDS: &[Requirement] = &[Requirement::LowLatency, Requirement::LowOrders];
const FAR: &[Requirement] = &[Requirement::FarLowLatency, Requirement::LowOrders];

pub(super) fn cases<B: Backend>() -> Vec<Case<B>> {
    let case = |name, needs, body| Case { name, needs, body };
    vec![
        case("low_by_source_brings_what_throughput_mode_brings", NEEDS, brings::<B> as fn(&B) -> _),
        case("low_by_source_rows_of_every_scaling", NEEDS, scalings::<B>),
        case("low_by_source_full_batches_and_empty_ones", NEEDS, full_and_empty::<B>),
        case("low_by_source_beside_rows_by_expert", NEEDS, beside::<B>),
        case("low_by_source_bad_input_is_refused", NEEDS, bad_input::<B>),
        case("low_by_source_without_room_for_a_row_a_choice", NEEDS, without_choices::<B>),
        case("low_by_source_over_nodes", FAR, nodes::<B>),
    ]
}

fn check<B: Backend>(backend: &B, scenario: &Scenario) -> Verdict {
    (0..backend.seeds(3)).try_for_each(|more| {
        let scenario = Scenario { seed: scenario.seed + more, ..scenario.clone() };
        let setup = scenario.setup().map_err(text)?;
        let compared =
            by_source::check(&scenario, backend, &setup).map_err(|error| format!("seed {}: {error}", scenario.seed))?;
        let expects_rows = scenario.tokens.iter().any(|&tokens| tokens > 0);
        ensure(!expects_rows || compared.rows > 0, || "nothing was compared".into())
    })
}

fn brings<B: Backend>(backend: &B) -> Verdict {
    [1, 2, 3, 8].into_iter().try_for_each(|ranks| check(backend, &scenario(ranks, 12)))
}

fn scalings<B: Backend>(backend: &B) -> Verdict {
    let coded = Turn { ahead: true, ..TURN };
    let turns = vec![TURN, Turn { at_experts: true, ..coded }, coded];
    Element::ALL.into_iter().filter(|element| *element != Element::Int8).try_for_each(|element| {
        check(
            backend,
            &Scenario {
                element,
                hidden: if element == Element::Bf16 { 272 } else { 269 },
                turns: turns.clone(),
                ..scenario(3, 5)
            },
        )
    })
}

fn full_and_empty<B: Backend>(backend: &B) -> Verdict {
    let full = Scenario { max_tokens: 7, tokens: vec![7, 0, 7, 1], ..scenario(4, 7) };
    check(backend, &full)?;
    check(backend, &Scenario { routing: RoutingKind::Single, ..full.clone() })?;
    check(backend, &Scenario { drop: 0.5, ..full.clone() })?;
    check(backend, &Scenario { drop: 1.0, ..full.clone() })?;
    check(backend, &Scenario { tokens: vec![0; 4], ..full })
}

const WEIGHED: Given = Given { weights: true, coded: false };

/// A communicator gives rows in either order, from call to call, along handles that combine in either order.
fn beside<B: Backend>(backend: &B) -> Verdict {
    let layer = layer_of(scenario(3, 6)).map_err(text)?;
    let outcomes = backend.run(&layer.setup, async |mut ep| {
        let batch = &layer.batches[ep.rank().index()];
        let first = by_source::round(&mut ep, &layer.world, batch, WEIGHED).await?;
        let between = crate::low_latency::round(&mut ep, &layer.world, batch, Weighing::AtSource).await?;
        let last = by_source::round(&mut ep, &layer.world, batch, WEIGHED).await?;
        Ok((first == last, between.combined_x.len() == last.combined_x.len()))
    })?;
    for outcome in finished(outcomes)? {
        ensure(outcome == (true, true), || {
            format!("{outcome:?}, expected the same twice, with a round by expert between")
        })?;
    }
    Ok(())
}

/// A window that has room for a row a rank alone, which a combine of a row a choice is told.
fn without_choices<B: Backend>(backend: &B) -> Verdict {
    let scenario = Scenario { turns: vec![TURN, Turn { at_experts: true, ..TURN }], ..scenario(4, 9) };
    let mut setup = scenario.setup().map_err(text)?;
    let settings = Settings::builder(&setup.shape, &setup.topology).slots(4).low_latency(true);
    let whole = Layout::new(&setup.shape, &setup.topology, &setup.settings).map_err(text)?.window_bytes();
    let settings = settings.low_latency_per_choice(false).low_latency_unit_bytes(scenario.unit_bytes(5));
    setup.settings = settings.build().map_err(text)?;
    let bytes = Layout::new(&setup.shape, &setup.topology, &setup.settings).map_err(text)?.window_bytes();
    ensure(bytes < whole, || format!("the window has {bytes} bytes, with room for a row a choice {whole}"))?;
    by_source::check(&scenario, backend, &setup)?;
    let layer = layer_of(scenario).map_err(text)?;
    let outcomes = backend.run(&setup, async |mut ep| {
        let batch = &layer.batches[ep.rank().index()];
        let (x, routing) = upload(&mut ep, batch, Weighing::AtSource)?;
        let got = ep.low_latency_dispatch(&x, &routing).await?;
        let seen = Seen::of_dispatch(&ep, &got)?;
        let (y, weights) = (results(&mut ep, &layer.world, &seen)?, ep.array(&batch.topk_weights)?);
        let refused = ep.low_latency_combine(&y, &got.handle, Some(&weights)).await.map(drop);
        crate::low_latency::round(&mut ep, &layer.world, batch, Weighing::AtExperts).await?;
        Ok(refused)
    })?;
    for refused in finished(outcomes)? {
        let is_told = matches!(&refused, Err(error @ Error::Unsupported { .. }) if error.to_string().contains("low_latency_per_choice"));
        ensure(is_told, || format!("{refused:?}, expected that it is not supported"))?;
    }
    Ok(())
}

fn bad_input<B: Backend>(backend: &B) -> Verdict {
    let layer = layer_of(scenario(2, 4)).map_err(text)?;
    let outcomes = backend.run(&layer.setup, async |mut ep| {
        let batch = &layer.batches[ep.rank().index()];
        let (x, routing) = upload(&mut ep, batch, Weighing::AtSource)?;
        let by_source = LowRouting { order: LowOrder::BySource, ..routing };
        let twice = ep.send_dispatch(&x, &LowRouting { repeats: true, ..by_source.clone() }).await.map(drop);
        let got = ep.low_latency_dispatch(&x, &by_source).await?;
        let room = ep.topology().ranks() * ep.shape().max_tokens();
        let bytes = vec![0; room as usize * ep.shape().result_bytes() as usize];
        let (y, weights) = (ep.rows(&bytes, room)?, ep.array(&batch.topk_weights)?);
        let weighed = ep.send_combine(&y, &got.handle, Some(&weights)).await.map(drop);
        let short = ep.rows(&bytes[..bytes.len() / 2], room / 2)?;
        let short = ep.send_combine(&short, &got.handle, None).await.map(drop);
        // Nothing was sent by these.
        ep.low_latency_combine(&y, &got.handle, None).await?;
        Ok([twice, weighed, short])
    })?;
    for [twice, weighed, short] in finished(outcomes)? {
        for (refused, limit) in [(twice, "allowed: false"), (weighed, "allowed: absent"), (short, "at least 12")] {
            let is_told = |error: &Error| error.to_string().contains(limit);
            ensure(refused.as_ref().is_err_and(is_told), || format!("{refused:?}, expected a word of `{limit}`"))?;
        }
    }
    Ok(())
}

fn nodes<B: Backend>(backend: &B) -> Verdict {
    check(backend, &Scenario { nodes: 2, ..scenario(4, 6) })?;
    check(backend, &Scenario { nodes: 2, max_tokens: 7, tokens: vec![7, 0], drop: 0.3, ..scenario(2, 7) })
}
