//! Low latency used wrongly: what is refused has no effect, what is dropped is skipped, and neither disturbs anybody.

use ep_core::incident::Incident;
use ep_core::reference::Weighing;
use ep_core::{Endpoint, Error, LowLatency, Rank};

use super::fixture::{Verdict, ensure, finished, text};
use super::low_latency::{Layer, hurried, layer, scenario};
use super::low_lost::{persist, survived};
use crate::backend::{Backend, Requirement, Setup};
use crate::harness::Case;
use crate::low_latency::scenario::Scenario;
use crate::low_latency::{Seen, results, round, upload, verify, weights};
use crate::workload::Workload;

const LOW: &[Requirement] = &[Requirement::LowLatency];
const INCIDENTS: &[Requirement] = &[Requirement::LowLatency, Requirement::Incidents];

pub(super) fn cases<B: Backend>() -> Vec<Case<B>> {
    let case = |name, needs, body| Case { name, needs, body };
    vec![
        case("low_latency_what_is_refused_has_sent_nothing", LOW, refused::<B> as fn(&B) -> _),
        case("low_latency_what_is_dropped_is_skipped", LOW, dropped::<B>),
        case("low_latency_what_failed_is_skipped_once_its_culprit_is_masked", INCIDENTS, failed::<B>),
        case("low_latency_what_is_of_before_is_refused", LOW, of_before::<B>),
    ]
}

/// How `seed` weighs.
const fn weighing(seed: u64) -> Weighing {
    if seed.is_multiple_of(2) { Weighing::AtSource } else { Weighing::AtExperts }
}

/// Compares the last round of every rank with the oracle.
fn verified(layer: &Layer, weighing: Weighing, seen: &[Seen]) -> Verdict {
    verify::run(&layer.world, &layer.batches, weighing, seen).map_err(text).map(drop)
}

fn said<T>(result: Result<T, Error>) -> String {
    result.err().map_or_else(|| "nothing was refused".to_owned(), text)
}

fn refused<B: Backend>(backend: &B) -> Verdict {
    (0..backend.seeds(6)).try_for_each(|seed| {
        let layer = layer(3, 5, seed).map_err(text)?;
        refuse(backend, &layer, seed).map_err(|error| format!("seed {seed}: {error}"))
    })
}

/// One rank makes calls that are refused, with an operation in flight. The others would see whatever it sent.
pub(super) fn refuse<B: Backend>(backend: &B, layer: &Layer, seed: u64) -> Verdict {
    let (clumsy, weighing) = (Rank((seed % 3) as u32), weighing(seed));
    let outcomes = backend.run(&layer.setup, async |mut ep| {
        let batch = &layer.batches[ep.rank().index()];
        let (x, routing) = upload(&mut ep, batch, weighing)?;
        let got = ep.low_latency_dispatch(&x, &routing).await?;
        let mut seen = Seen::of_dispatch(&ep, &got)?;
        let y = results(&mut ep, &layer.world, &seen)?;
        let weights = weights(&mut ep, batch, weighing)?;
        let sent = ep.send_dispatch(&x, &routing).await?;
        let mut errors = Vec::new();
        if ep.rank() == clumsy {
            errors.push(said(ep.low_latency_dispatch(&x, &routing).await));
            errors.push(said(ep.low_latency_combine(&y, &got.handle, weights.as_ref()).await));
        }
        ep.receive_dispatch(&sent).await?;
        if ep.rank() == clumsy {
            errors.push(said(ep.receive_dispatch(&sent).await));
        }
        let combine = ep.send_combine(&y, &got.handle, weights.as_ref()).await?;
        if ep.rank() == clumsy {
            errors.push(said(ep.low_latency_dispatch(&x, &routing).await));
        }
        let back = ep.receive_combine(&combine).await?;
        seen.combined_x = ep.bytes(&back.x)?;
        if ep.rank() == clumsy {
            errors.push(said(ep.receive_combine(&combine).await));
        }
        let after = round(&mut ep, &layer.world, batch, weighing).await?;
        Ok((errors, seen, after))
    })?;
    let in_flight = |op| {
        format!(
            "low-latency operations in flight is 1, allowed: 0 for both halves at once; receive operation {op} first"
        )
    };
    let twice = |op| format!("low-latency operation to receive is {op}, received before, allowed: once");
    let expected = [in_flight(2), in_flight(2), twice(2), in_flight(3), twice(3)];
    let (mut before, mut after) = (Vec::new(), Vec::new());
    for (rank, (errors, seen, last)) in (0u32..).map(Rank).zip(finished(outcomes)?) {
        ensure(rank != clumsy || errors == expected, || format!("rank {rank} was told {errors:#?}"))?;
        before.push(seen);
        after.push(last);
    }
    verified(layer, weighing, &before)?;
    verified(layer, weighing, &after)
}

fn dropped<B: Backend>(backend: &B) -> Verdict {
    (0..backend.seeds(8)).try_for_each(|seed| {
        let layer = layer(3, 5, seed).map_err(text)?;
        skip(backend, &layer, seed).map_err(|error| format!("seed {seed}: {error}"))
    })
}

/// Receives a dispatch that was sent, or drops it.
async fn settle<E: LowLatency>(ep: &mut E, drops: bool, sent: E::Dispatching) -> Result<(), Error> {
    if drops { Ok(()) } else { ep.receive_dispatch(&sent).await.map(drop) }
}

/// Some ranks drop operations that the others receive, in every place where one may be in flight. What is dropped brings other rows
/// than the rounds that are compared.
pub(super) fn skip<B: Backend>(backend: &B, layer: &Layer, seed: u64) -> Verdict {
    // One rank, two, or all.
    let is_careless = |rank: Rank| u64::from(rank.0 + 1) * 5 % 7 <= 2 * (seed % 3) + 1 || seed % 3 == 2;
    let weighing = weighing(seed);
    let others = Workload::new(layer.setup.shape, vec![5; 3]).seed(seed + 1000).batches().map_err(text)?;
    let outcomes = backend.run(&layer.setup, async |mut ep| {
        let (me, batch) = (ep.rank(), &layer.batches[ep.rank().index()]);
        let drops = is_careless(me);
        let (x, routing) = upload(&mut ep, &others[me.index()], weighing)?;
        let mut rounds = Vec::new();
        // One.
        let one = ep.send_dispatch(&x, &routing).await?;
        settle(&mut ep, drops, one).await?;
        rounds.push(round(&mut ep, &layer.world, batch, weighing).await?);
        // Two in flight.
        let (one, two) = (ep.send_dispatch(&x, &routing).await?, ep.send_dispatch(&x, &routing).await?);
        settle(&mut ep, drops, one).await?;
        settle(&mut ep, drops, two).await?;
        rounds.push(round(&mut ep, &layer.world, batch, weighing).await?);
        // The older of two; then the younger.
        for older in [true, false] {
            let (one, two) = (ep.send_dispatch(&x, &routing).await?, ep.send_dispatch(&x, &routing).await?);
            settle(&mut ep, drops && older, one).await?;
            settle(&mut ep, drops && !older, two).await?;
        }
        rounds.push(round(&mut ep, &layer.world, batch, weighing).await?);
        // A combine, behind a dispatch, and before one that is received.
        let got = ep.low_latency_dispatch(&x, &routing).await?;
        let seen = Seen::of_dispatch(&ep, &got)?;
        let y = results(&mut ep, &layer.world, &seen)?;
        let weights = weights(&mut ep, &others[me.index()], weighing)?;
        let combine = ep.send_combine(&y, &got.handle, weights.as_ref()).await?;
        let two = ep.send_dispatch(&x, &routing).await?;
        if !drops {
            ep.receive_combine(&combine).await?;
        }
        drop(combine);
        settle(&mut ep, false, two).await?;
        rounds.push(round(&mut ep, &layer.world, batch, weighing).await?);
        Ok(rounds)
    })?;
    let ranks = finished(outcomes)?;
    (0..4).try_for_each(|at| {
        let seen: Vec<Seen> = ranks.iter().map(|rounds| rounds[at].clone()).collect();
        verified(layer, weighing, &seen).map_err(|error| format!("round {at}: {error}"))
    })
}

/// Both halves at once leave nothing to receive again when they fail: the next call skips what they sent.
fn failed<B: Backend>(backend: &B) -> Verdict {
    let victim = Rank(3);
    for (seed, noticed) in (0..backend.seeds(12)).flat_map(|seed| [(seed, false), (seed, true)]) {
        let layer = hurried(Scenario { seed, ..scenario(4, 6) }).map_err(text)?;
        let crash = Incident::Crash { rank: victim, after: 7 * seed, noticed };
        let setup: Setup = layer.setup.clone().incident(crash);
        let outcomes = backend.run(&setup, async |mut ep| {
            let batch = &layer.batches[ep.rank().index()];
            for _ in 0..4 {
                let (x, routing) = upload(&mut ep, batch, Weighing::AtSource)?;
                match ep.low_latency_dispatch(&x, &routing).await {
                    Ok(_) => {}
                    Err(Error::Failed(failure)) if ep.low_latency_mask().is_empty() => {
                        ep.mask_rank(failure.culprit).await?;
                    }
                    Err(error) => return Err(error),
                }
            }
            let (last, _) = persist(&mut ep, &layer, Weighing::AtSource, 5).await?;
            Ok((last, ep.low_latency_mask().clone()))
        })?;
        survived(&layer, victim, Weighing::AtSource, outcomes).map_err(|error| format!("seed {seed}: {error}"))?;
    }
    Ok(())
}

fn of_before<B: Backend>(backend: &B) -> Verdict {
    (0..backend.seeds(4)).try_for_each(|seed| {
        let (layer, weighing) = (layer(3, 5, seed).map_err(text)?, weighing(seed));
        let outcomes = backend.run(&layer.setup, async |mut ep| {
            let batch = &layer.batches[ep.rank().index()];
            let (x, routing) = upload(&mut ep, batch, weighing)?;
            let got = ep.low_latency_dispatch(&x, &routing).await?;
            let seen = Seen::of_dispatch(&ep, &got)?;
            let y = results(&mut ep, &layer.world, &seen)?;
            let weights = weights(&mut ep, batch, weighing)?;
            let combine = ep.send_combine(&y, &got.handle, weights.as_ref()).await?;
            let dispatch = ep.send_dispatch(&x, &routing).await?;
            ep.rejoin().await?;
            let errors = vec![
                said(ep.check_low_handle(&got.handle)),
                said(ep.send_combine(&y, &got.handle, weights.as_ref()).await),
                said(ep.low_latency_combine(&y, &got.handle, weights.as_ref()).await),
                said(ep.receive_combine(&combine).await),
                said(ep.receive_dispatch(&dispatch).await),
            ];
            // Nobody waits for what was in flight before.
            drop((combine, dispatch));
            Ok((errors, round(&mut ep, &layer.world, batch, weighing).await?))
        })?;
        let of = |what: &str| format!("generation of the {what} is 1, allowed: 2, the communicator's");
        let (handle, operation) = (of("handle"), of("low-latency operation"));
        let expected = [&handle, &handle, &handle, &operation, &operation];
        let mut seen = Vec::new();
        for (rank, (errors, last)) in finished(outcomes)?.into_iter().enumerate() {
            ensure(errors.iter().eq(expected), || format!("seed {seed}: rank {rank} was told {errors:#?}"))?;
            seen.push(last);
        }
        verified(&layer, weighing, &seen).map_err(|error| format!("seed {seed}: {error}"))
    })
}
