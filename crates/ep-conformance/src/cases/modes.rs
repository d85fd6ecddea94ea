//! Ranks that work in both modes, in turn, when one of them ends: whatever each is doing at that moment, all name it.

use ep_core::incident::Incident;
use ep_core::reference::World;
use ep_core::{Endpoint, Error, Failure, LowLatency, Nanos, Placement, Rank, RankSet, Settings};
use serde::{Deserialize, Serialize};

use super::fixture::{Layer, Verdict, allowed, ensure, layer, text};
use crate::backend::{Backend, Requirement, Setup};
use crate::drive::{self, Round};
use crate::harness::Case;
use crate::low_latency::{self, Seen, Weighing};
use crate::verify::{self, Observed};
use crate::workload::Batch;

/// Ranks of the communicators here; the last one is the victim.
const RANKS: u32 = 4;
const VICTIM: Rank = Rank(RANKS - 1);
/// Time allowed to one operation.
fn deadline() -> Nanos {
    allowed(4)
}
const HOW: Round = Round::PULLING;

pub(super) fn cases<B: Backend>() -> Vec<Case<B>> {
    let needs = &[Requirement::Departures, Requirement::LowLatency];
    vec![Case { name: "failure_a_noticed_crash_is_named_in_both_modes", needs, body: crash::<B> }]
}

fn fragile(seed: u64) -> Result<(Layer, World), Error> {
    let mut layer = layer(RANKS, 9, seed, Placement::Ring)?;
    let Setup { shape, topology, .. } = layer.setup;
    let settings = Settings::builder(&shape, &topology).slots(2).low_latency(true).deadline(deadline());
    layer.setup.settings = settings.build()?;
    Ok((layer, World::new(shape, topology, RankSet::new())?))
}

/// A round of each mode.
async fn both<E: LowLatency>(ep: &mut E, world: &World, batch: &Batch) -> Result<(Observed, Seen), Error> {
    let (observed, _) = drive::round(ep, world, batch, &HOW).await?;
    Ok((observed, low_latency::round(ep, world, batch, Weighing::AtExperts).await?))
}

/// How it ended for a rank, and what it saw afterwards.
#[derive(Debug, Serialize, Deserialize)]
struct Story {
    failure: Failure,
    /// How long the failing round took.
    took: Nanos,
    after: Result<(Observed, Seen), Error>,
}

/// Rounds of both modes until something fails, then without the culprit.
async fn live<E: LowLatency>(ep: &mut E, world: &World, batch: &Batch) -> Result<Story, Error> {
    loop {
        let began = ep.now();
        let failure = match both(ep, world, batch).await {
            Ok(_) => continue,
            Err(Error::Failed(failure)) => failure,
            Err(error) => return Err(error),
        };
        let took = ep.now() - began;
        let after = match ep.recover(&[failure.culprit].into_iter().collect()).await {
            Ok(()) => both(ep, world, batch).await,
            Err(error) => Err(error),
        };
        return Ok(Story { failure, took, after });
    }
}

/// Who is ahead waits in low latency for one that has failed in throughput mode, or the other way round.
fn crash<B: Backend>(backend: &B) -> Verdict {
    for seed in 0..backend.seeds(120) {
        let (mut layer, world) = fragile(seed).map_err(text)?;
        layer.setup = layer.setup.incident(Incident::Crash { rank: VICTIM, after: 40 + seed * 5, noticed: true });
        let stories = backend.run(&layer.setup, async |mut ep| {
            let batch = &layer.batches[ep.rank().index()];
            live(&mut ep, &world, batch).await
        })?;
        survivors(&layer, stories).map_err(|error| format!("seed {seed}: {error}"))?;
    }
    Ok(())
}

fn survivors(layer: &Layer, stories: Vec<Option<Result<Story, Error>>>) -> Verdict {
    let Setup { shape, topology, .. } = layer.setup;
    let world = World::new(shape, topology, [VICTIM].into_iter().collect()).map_err(text)?;
    let (mut batches, mut observed, mut seen) = (layer.batches.clone(), Vec::new(), Vec::new());
    batches[VICTIM.index()] = Batch::default();
    for (rank, story) in topology.all().zip(stories) {
        if rank == VICTIM {
            observed.push(Observed::default());
            seen.push(Seen::default());
            continue;
        }
        let story = story.ok_or_else(|| format!("rank {rank} did not finish"))?;
        let Story { failure, took, after } = story.map_err(|error| format!("rank {rank}: {error}"))?;
        ensure(failure.culprit == VICTIM, || format!("rank {rank} blames another than rank {VICTIM}: {failure}"))?;
        ensure(took < deadline(), || format!("rank {rank} waited to its deadline: {failure}"))?;
        let after = after.map_err(|error| format!("rank {rank} after recovery: {error}"))?;
        observed.push(after.0);
        seen.push(after.1);
    }
    verify::run(&world, &batches, &observed).map_err(text)?;
    low_latency::verify::run(&world, &batches, Weighing::AtExperts, &seen).map_err(text).map(drop)
}
