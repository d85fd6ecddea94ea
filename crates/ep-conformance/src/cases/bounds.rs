//! Bad input: refused with the value and its limit, before anything moves, and nothing is lost by it.

use ep_core::engine::{Combine, Combined, Dispatch, Routing};
use ep_core::incident::Incident;
use ep_core::reference::World;
use ep_core::ring::Geometry;
use ep_core::{Endpoint, Error, Placement, Rank, RankSet, Rings};

use super::fixture::{Layer, Verdict, ensure, finished, layer, text};
use crate::backend::{Backend, Requirement};
use crate::drive::{Round, round, upload};
use crate::harness::Case;
use crate::verify;

pub(super) fn cases<B: Backend>() -> Vec<Case<B>> {
    let case = |name, body| Case { name, needs: &[], body };
    vec![
        case("bounds_bad_input_names_value_and_limit_and_costs_nothing", bad_input::<B> as fn(&B) -> _),
        case("bounds_too_many_rows_for_the_worst_case_fail_everywhere", overflow::<B>),
        case("bounds_ranks_that_do_different_things_find_out", different_calls::<B>),
        case("bounds_weights_of_some_ranks_alone_are_refused", weights_of_one::<B>),
        Case {
            name: "bounds_what_a_rank_said_before_it_ended_explains_its_end",
            needs: &[Requirement::Departures],
            body: different_calls_then_exit::<B>,
        },
    ]
}

/// Keeps what a refusal said.
fn refusal<T>(what: &str, result: Result<T, Error>, said: &mut Vec<String>) {
    said.push(match result {
        Ok(_) => format!("{what}: was accepted"),
        Err(error) => error.to_string(),
    });
}

fn bad_input<B: Backend>(backend: &B) -> Verdict {
    let Layer { setup, batches } = layer(2, 4, 1, Placement::Ring).map_err(text)?;
    let world = World::new(setup.shape, setup.topology, RankSet::new()).map_err(text)?;
    let outcomes = backend.run(&setup, async |mut ep| {
        let mut said = Vec::new();
        let batch = &batches[ep.rank().index()];
        let (x, routing) = upload(&mut ep, batch)?;
        for choices in [[9, 0], [-2, 0], [1, 1]] {
            let mut topk_idx = batch.topk_idx.clone();
            topk_idx[2..4].copy_from_slice(&choices);
            let topk_idx = ep.array(&topk_idx)?;
            refusal("choices", ep.dispatch(&x, &Routing::TopK { topk_idx, topk_weights: None }).await, &mut said);
        }
        let topk_idx = ep.array(&batch.topk_idx[..7])?;
        refusal("7 choices", ep.dispatch(&x, &Routing::TopK { topk_idx, topk_weights: None }).await, &mut said);
        let few = ep.rows(&[0; 3 * 64], 3)?;
        refusal("few rows", ep.dispatch(&few, &routing).await, &mut said);
        let rings = Rings::uniform(9, Geometry { slots: 1, chunk: 1, credit: 1 });
        let options = Dispatch { rings: Some(rings), ..Dispatch::default() };
        refusal("9 channels", ep.dispatch_with(&x, &routing, &options).await, &mut said);
        let options = Dispatch { expert_alignment: 0, ..Dispatch::default() };
        refusal("alignment 0", ep.dispatch_with(&x, &routing, &options).await, &mut said);
        let options = Dispatch { worst_rows: u32::MAX, ..Dispatch::default() };
        refusal("too many rows", ep.dispatch_with(&x, &routing, &options).await, &mut said);
        let options = Dispatch { device_counts: true, ..Dispatch::default() };
        refusal("no bound", ep.dispatch_with(&x, &routing, &options).await, &mut said);
        let in_rank = ep.array(&[1u8; 8])?;
        let membership = Routing::Membership { in_rank, tokens_per_expert: vec![1, 4, 5, 0] };
        refusal("5 of 4 tokens", ep.dispatch(&x, &membership).await, &mut said);
        refusal("short bytes", ep.rows(&[0; 10], 1), &mut said);
        // Nothing is lost: the same endpoint works.
        let (observed, handle) =
            round(&mut ep, &world, batch, &Round { return_weights: true, ..Round::default() }).await?;
        let none = ep.rows(&[], 0)?;
        if handle.rows() > 0 {
            refusal("no rows", ep.combine(&none, &handle, Combine::default()).await, &mut said);
        }
        Ok((observed, said))
    })?;
    let (observed, said): (Vec<_>, Vec<_>) = finished(outcomes)?.into_iter().unzip();
    let expected = [
        "topk_idx of token 1 is 9, allowed: -1 or 0 to 3",
        "topk_idx of token 1 is -2, allowed: -1 or 0 to 3",
        "topk_idx of token 1 is 1 twice, allowed: every expert at most once per token",
        "length of topk_idx is 7, allowed: a multiple of the 2 topk",
        "rows of x is 3, allowed: at least 4",
        "channels is 9, allowed: 1 to 1 of the communicator",
        "expert alignment is 0, allowed: at least 1",
        "worst-case rows is 4294967295, allowed: at most 8, of 2 ranks with 4 tokens",
        "worst-case rows of a dispatch with device counts is 0, allowed: at least 1",
        "tokens of expert 2 is 5, allowed: at most the 4 tokens",
        "length of the rows in bytes is 10, allowed: 1 rows of 64 bytes",
    ];
    for said in said {
        for (said, expected) in said.iter().zip(expected) {
            ensure(said == expected, || format!("said `{said}`, expected `{expected}`"))?;
        }
        ensure(said.len() >= expected.len(), || "a refusal is missing".into())?;
        if let Some(last) = said.get(expected.len()) {
            ensure(last.starts_with("rows of y is 0, allowed: at least"), || format!("said `{last}`"))?;
        }
    }
    verify::run(&world, &batches, &observed).map_err(text).map(drop)
}

/// One rank has no room: it says so, the others learn who, and all recover.
fn overflow<B: Backend>(backend: &B) -> Verdict {
    [false, true].into_iter().try_for_each(|device_counts| {
        overflow_with(backend, device_counts)
            .map_err(|error| format!("{error}, with counts {}", if device_counts { "in the machine" } else { "told" }))
    })
}

fn overflow_with<B: Backend>(backend: &B, device_counts: bool) -> Verdict {
    let Layer { setup, batches } = layer(3, 10, 2, Placement::Ring).map_err(text)?;
    let world = World::new(setup.shape, setup.topology, RankSet::new()).map_err(text)?;
    let outcomes = backend.run(&setup, async |mut ep| {
        let batch = &batches[ep.rank().index()];
        let (x, routing) = upload(&mut ep, batch)?;
        let small = ep.rank().0 == 1;
        let worst_rows = if small { 1 } else { 30 };
        let options = Dispatch { worst_rows, device_counts, ..Dispatch::default() };
        let first = ep.dispatch_with(&x, &routing, &options).await;
        let error = match first {
            // A rank that had all it needed may be through; its next call fails.
            Ok(got) => {
                let y = ep.rows(&vec![0; got.handle.rows() as usize * 64], got.handle.rows())?;
                ep.combine(&y, &got.handle, Combine::default()).await.err()
            }
            Err(error) => Some(error),
        };
        let failure = error.and_then(|error| error.failure().copied());
        let named =
            !small || matches!(failure, Some(by) if by.fault.to_string().starts_with("worst-case rows is 1 here and"));
        ep.recover(&RankSet::new()).await?;
        let how = Round { return_weights: true, ..Round::default() };
        let culprit = failure.map(|failure| failure.culprit);
        Ok(((culprit, named), round(&mut ep, &world, batch, &how).await?.0))
    })?;
    let (culprits, observed): (Vec<_>, Vec<_>) = finished(outcomes)?.into_iter().unzip();
    ensure(culprits.iter().all(|(culprit, _)| culprit.map(|rank| rank.0) == Some(1)), || {
        format!("culprits {culprits:?}, expected rank 1 everywhere")
    })?;
    ensure(culprits.iter().all(|&(_, named)| named), || "rank 1 did not say what its bound was".into())?;
    verify::run(&world, &batches, &observed).map_err(text).map(drop)
}

fn different_calls<B: Backend>(backend: &B) -> Verdict {
    find_out(backend, &layer(2, 6, 2, Placement::Ring).map_err(text)?)
}

/// One finds out first, says so and ends; the other does not take that for the cause.
fn different_calls_then_exit<B: Backend>(backend: &B) -> Verdict {
    for (seed, rank) in (0..backend.seeds(30)).flat_map(|seed| [(seed, Rank(0)), (seed, Rank(1))]) {
        let mut layer = layer(2, 6, seed, Placement::Ring).map_err(text)?;
        layer.setup = layer.setup.incident(Incident::Exit { rank });
        find_out(backend, &layer).map_err(|error| format!("seed {seed}, rank {rank} ends: {error}"))?;
    }
    Ok(())
}

/// Both ranks dispatch; then one dispatches again and the other combines.
fn find_out<B: Backend>(backend: &B, Layer { setup, batches }: &Layer) -> Verdict {
    let outcomes = backend.run(setup, async |mut ep| {
        let batch = &batches[ep.rank().index()];
        let (x, routing) = upload(&mut ep, batch)?;
        let got = ep.dispatch(&x, &routing).await?;
        let second = if ep.rank().0 == 0 {
            ep.dispatch(&x, &routing).await.err()
        } else {
            ep.combine(&got.x, &got.handle, Combine::default()).await.err()
        };
        Ok(second.map(|error| error.to_string()))
    })?;
    for said in finished(outcomes)? {
        let said = said.unwrap_or_default();
        ensure(said.contains("kind of the operation") || said.contains("gave up on"), || format!("said `{said}`"))?;
    }
    Ok(())
}

/// One rank sends weights home, and the other none: sums would lack what that one did not say.
fn weights_of_one<B: Backend>(backend: &B) -> Verdict {
    let Layer { setup, batches } = layer(2, 6, 3, Placement::Ring).map_err(text)?;
    let outcomes = backend.run(&setup, async |mut ep| {
        let batch = &batches[ep.rank().index()];
        let (x, routing) = upload(&mut ep, batch)?;
        let got = ep.dispatch(&x, &routing).await?;
        let topk_weights = (ep.rank().0 == 0).then_some(&got.topk_weights);
        let back = ep.combine(&got.x, &got.handle, Combine { topk_weights, ..Combine::default() }).await;
        let error = match back {
            // Kernels say it when they have ended.
            Ok(Combined { x, .. }) => ep.bytes(&x).err(),
            Err(error) => Some(error),
        };
        Ok(error.map(|error| error.to_string()))
    })?;
    let said: Vec<_> = finished(outcomes)?.into_iter().map(Option::unwrap_or_default).collect();
    let differs = |said: &String| said.contains("options and replayed dispatch");
    let told = |said: &String| differs(said) || said.contains("gave up on");
    ensure(said.iter().any(differs) && said.iter().all(told), || format!("said {said:?}"))
}
