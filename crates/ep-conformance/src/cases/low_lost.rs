//! Low latency where ranks are lost or late: masks and return.

use ep_core::incident::Incident;
use ep_core::reference::{Weighing, World};
use ep_core::{Endpoint, Error, Fault, LowLatency, Nanos, Rank, RankSet};

use super::fixture::{Verdict, ensure, finished, text};
use super::low_latency::{Layer, deadline, hurried, layer_of, scenario};
use crate::backend::{Backend, Requirement};
use crate::drive;
use crate::harness::Case;
use crate::low_latency::scenario::Scenario;
use crate::low_latency::{Seen, results, round, upload, verify, weights};
use crate::workload::Batch;

const LOW: &[Requirement] = &[Requirement::LowLatency];
const INCIDENTS: &[Requirement] = &[Requirement::LowLatency, Requirement::Incidents];

pub(super) fn cases<B: Backend>() -> Vec<Case<B>> {
    let case = |name, needs, body| Case { name, needs, body };
    vec![
        case("low_latency_a_crashed_rank_is_masked_and_the_others_go_on", INCIDENTS, crash::<B> as fn(&B) -> _),
        case("low_latency_a_masked_rank_is_told_and_rejoins", LOW, rejoin::<B>),
        case("low_latency_who_is_given_up_by_a_recovery_is_told", LOW, given_up::<B>),
        case("low_latency_a_delay_within_the_deadline_heals", INCIDENTS, delay::<B>),
    ]
}

/// Receives; on failures masks the culprit and receives again.
macro_rules! masking {
    ($ep:ident, $masked:ident, $receive:expr) => {
        loop {
            match $receive {
                Ok(value) => break value,
                Err(Error::Failed(failure)) if !$masked.contains(failure.culprit) => {
                    $masked.insert(failure.culprit);
                    $ep.mask_rank(failure.culprit).await?;
                }
                Err(error) => return Err(error),
            }
        }
    };
}

/// Rounds in which culprits are masked; what the last saw, and whom this rank masked.
pub(super) async fn persist<E: LowLatency>(
    ep: &mut E,
    layer: &Layer,
    weighing: Weighing,
    rounds: u32,
) -> Result<(Seen, RankSet), Error> {
    let batch = &layer.batches[ep.rank().index()];
    let (mut masked, mut last) = (RankSet::new(), Seen::default());
    for _ in 0..rounds {
        let (x, routing) = upload(ep, batch, weighing)?;
        let sent = ep.send_dispatch(&x, &routing).await?;
        let got = masking!(ep, masked, ep.receive_dispatch(&sent).await);
        last = Seen::of_dispatch(ep, &got)?;
        let y = results(ep, &layer.world, &last)?;
        let weights = weights(ep, batch, weighing)?;
        let sent = ep.send_combine(&y, &got.handle, weights.as_ref()).await?;
        let back = masking!(ep, masked, ep.receive_combine(&sent).await);
        last.combined_x = ep.bytes(&back.x)?;
    }
    Ok((last, masked))
}

/// All but `victim` have masked it alone, and their last round is right without it.
pub(super) fn survived(
    layer: &Layer,
    victim: Rank,
    weighing: Weighing,
    outcomes: Vec<Option<Result<(Seen, RankSet), Error>>>,
) -> Verdict {
    let mask: RankSet = [victim].into_iter().collect();
    let world = World::new(layer.setup.shape, layer.setup.topology, mask.clone()).map_err(text)?;
    let mut batches = layer.batches.clone();
    batches[victim.index()] = Batch::default();
    let mut seen = Vec::new();
    for (rank, outcome) in layer.setup.topology.all().zip(outcomes) {
        if rank == victim {
            seen.push(Seen::default());
            continue;
        }
        let outcome = outcome.ok_or_else(|| format!("rank {rank} did not finish"))?;
        let (last, masked) = outcome.map_err(|error| format!("rank {rank}: {error}"))?;
        ensure(masked == mask, || format!("rank {rank} masked {masked:?}"))?;
        seen.push(last);
    }
    verify::run(&world, &batches, weighing, &seen).map_err(text).map(drop)
}

fn crash<B: Backend>(backend: &B) -> Verdict {
    crash_over(backend, 1)
}

/// Four ranks of so many nodes.
pub(super) fn crash_over<B: Backend>(backend: &B, nodes: u32) -> Verdict {
    let victim = Rank(3);
    for (seed, noticed) in (0..backend.seeds(12)).flat_map(|seed| [(seed, false), (seed, true)]) {
        let weighing = if seed % 2 == 0 { Weighing::AtSource } else { Weighing::AtExperts };
        let layer = hurried(Scenario { seed, nodes, ..scenario(4, 6) }).map_err(text)?;
        let setup = layer.setup.clone().incident(Incident::Crash { rank: victim, after: 11 * seed, noticed });
        let outcomes = backend.run(&setup, async |mut ep| persist(&mut ep, &layer, weighing, 6).await)?;
        survived(&layer, victim, weighing, outcomes).map_err(|error| format!("seed {seed}: {error}"))?;
    }
    Ok(())
}

fn rejoin<B: Backend>(backend: &B) -> Verdict {
    rejoin_over(backend, 1)
}

/// Three ranks of so many nodes.
pub(super) fn rejoin_over<B: Backend>(backend: &B, nodes: u32) -> Verdict {
    // In the simulator seeds 8 and 17 mask while the throughput round still has something under way to the masked rank.
    for seed in 0..backend.seeds(20) {
        let layer = layer_of(Scenario { seed, nodes, ..scenario(3, 5) }).map_err(text)?;
        let outcomes = backend.run(&layer.setup, async |mut ep| {
            let batch = &layer.batches[ep.rank().index()];
            round(&mut ep, &layer.world, batch, Weighing::AtSource).await?;
            // Nobody gets through a round of throughput mode before all have begun it.
            drive::round(&mut ep, &layer.world, batch, &drive::Round::default()).await?;
            // Rank 0 goes on without rank 2, which finds out.
            let (x, routing) = upload(&mut ep, batch, Weighing::AtSource)?;
            if ep.rank() == Rank(0) {
                ep.mask_rank(Rank(2)).await?;
            }
            let sent = ep.send_dispatch(&x, &routing).await?;
            let told = ep.receive_dispatch(&sent).await.map(drop);
            let stale = (ep.rank() == Rank(2)).then_some(sent);
            ep.rejoin().await?;
            let masked_after = ep.low_latency_mask().clone();
            let refused = match &stale {
                Some(sent) => ep.receive_dispatch(sent).await.err().map(|error| error.to_string()),
                None => None,
            };
            let seen = round(&mut ep, &layer.world, batch, Weighing::AtExperts).await?;
            Ok((told, masked_after, refused, seen))
        })?;
        let mut seen = Vec::new();
        for (rank, (told, masked, refused, last)) in finished(outcomes)?.into_iter().enumerate() {
            let by = |error: &Error| error.failure().map(|failure| failure.fault);
            match rank {
                2 => {
                    let fault = told.as_ref().err().and_then(by);
                    ensure(fault == Some(Fault::MaskedBy { peer: Rank(0) }), || format!("seed {seed}: {told:?}"))?;
                    let old = "generation of the low-latency operation is 1, allowed: 2, the communicator's";
                    ensure(refused.as_deref() == Some(old), || format!("seed {seed}: {refused:?}"))?;
                }
                _ => ensure(told.is_ok(), || format!("seed {seed}: rank {rank}: {told:?}"))?,
            }
            ensure(masked.is_empty(), || format!("seed {seed}: rank {rank} still masks {masked:?}"))?;
            seen.push(last);
        }
        verify::run(&layer.world, &layer.batches, Weighing::AtExperts, &seen)
            .map_err(|error| format!("seed {seed}: {error}"))?;
    }
    Ok(())
}

/// Rank 2 waits for two that recover without it, and may find them gone: one of them has told it so.
fn given_up<B: Backend>(backend: &B) -> Verdict {
    for seed in 0..backend.seeds(8) {
        let layer = layer_of(Scenario { seed, ..scenario(3, 5) }).map_err(text)?;
        let outcomes = backend.run(&layer.setup, async |mut ep| {
            if ep.rank() != Rank(2) {
                ep.recover(&[Rank(2)].into_iter().collect()).await?;
                return Ok(None);
            }
            let (x, routing) = upload(&mut ep, &layer.batches[2], Weighing::AtSource)?;
            let told = match ep.send_dispatch(&x, &routing).await {
                Ok(sent) => ep.receive_dispatch(&sent).await.map(drop),
                Err(error) => Err(error),
            };
            Ok(Some(told))
        })?;
        let told = finished(outcomes)?.pop().flatten().ok_or("rank 2 has no end")?;
        let fault = told.as_ref().err().and_then(|error| error.failure()).map(|failure| failure.fault);
        ensure(matches!(fault, Some(Fault::MaskedBy { .. })), || format!("seed {seed}: {told:?}"))?;
    }
    Ok(())
}

fn delay<B: Backend>(backend: &B) -> Verdict {
    delay_over(backend, 1)
}

/// Three ranks of so many nodes.
pub(super) fn delay_over<B: Backend>(backend: &B, nodes: u32) -> Verdict {
    for seed in 0..backend.seeds(8) {
        let layer = hurried(Scenario { seed, nodes, ..scenario(3, 5) }).map_err(text)?;
        let by = Nanos(deadline().0 / 20);
        let delay = Incident::Delay { from: Rank(2), to: Rank(0), kind: None, by, after: seed * 3 };
        let setup = layer.setup.clone().incident(delay);
        let outcomes = backend.run(&setup, async |mut ep| persist(&mut ep, &layer, Weighing::AtSource, 3).await)?;
        let ranks = finished(outcomes)?;
        ensure(ranks.iter().all(|(_, masked)| masked.is_empty()), || format!("seed {seed}: a slow rank was masked"))?;
        let seen: Vec<Seen> = ranks.into_iter().map(|(seen, _)| seen).collect();
        verify::run(&layer.world, &layer.batches, Weighing::AtSource, &seen).map_err(text)?;
    }
    Ok(())
}
