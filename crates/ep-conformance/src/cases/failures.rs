//! Incidents: what heals ends in success, what does not in the same verdict on every survivor, within the deadline, and
//! the survivors recover to verified work.

use ep_core::incident::Incident;
use ep_core::port::LaneKind;
use ep_core::reference::World;
use ep_core::{Endpoint, Error, Failure, Fault, Nanos, Placement, Rank, RankSet, Settings};

use serde::{Deserialize, Serialize};

use super::fixture::{Layer, Verdict, allowed, ensure, layer, placements, text};
use crate::backend::{Backend, Requirement, Setup};
use crate::drive::{Round, round};
use crate::harness::Case;
use crate::verify::{self, Observed};
use crate::workload::Batch;

/// Ranks of the communicators here; the last one is the victim.
const RANKS: u32 = 4;
const VICTIM: Rank = Rank(RANKS - 1);
/// Time allowed to one operation where some wait lasts until it is over.
fn deadline() -> Nanos {
    allowed(1)
}
/// Time allowed where no wait may last so long, on a machine with other work on all its cores neither.
fn patience() -> Nanos {
    allowed(10)
}
/// How much later than its deadline an operation may return: none in virtual time, some on real machines.
const GRACE: Nanos = Nanos::from_millis(500);
/// Where the arena has room, as with direct placement, combine pulls.
const HOW: Round = Round::PULLING;

pub(super) fn cases<B: Backend>() -> Vec<Case<B>> {
    let case = |name, body| Case { name, needs: &[Requirement::Incidents], body };
    let departure = |name, body| Case { name, needs: &[Requirement::Departures], body };
    vec![
        case("failure_a_delay_within_the_deadline_heals", delay_heals::<B> as fn(&B) -> _),
        case("failure_a_delay_beyond_the_deadline_is_named", delay_kills::<B>),
        departure("failure_a_starved_rank_is_only_slow", starved::<B>),
        case("failure_a_crash_is_named_by_all_survivors_who_recover", crash::<B>),
        departure("failure_a_noticed_crash_ends_waits_at_once", noticed_crash::<B>),
        departure("failure_a_rank_that_leaves_after_its_last_operation_fails_nobody", leaves_in_time::<B>),
        departure("failure_a_rank_that_leaves_too_early_is_named_at_once", leaves_early::<B>),
        case("failure_a_lost_lane_is_blamed_alike_at_both_ends", lost_lane::<B>),
        departure("failure_a_poisoned_communicator_refuses_work", poisoned::<B>),
        departure("failure_a_mask_before_any_failure", masked::<B>),
        case("failure_two_recoveries_in_a_row", two_recoveries::<B>),
        case("failure_an_excluded_rank_is_told", excluded::<B>),
        Case { name: "failure_who_is_given_up_by_a_recovery_is_told", needs: &[Requirement::Get], body: given_up::<B> },
    ]
}

/// A communicator of four ranks.
fn fragile(seed: u64, placement: Placement, deadline: Nanos) -> Result<(Layer, World), Error> {
    let mut layer = layer(RANKS, 9, seed, placement)?;
    let Setup { shape, topology, .. } = layer.setup;
    let settings =
        Settings::builder(&shape, &topology).channels(1).slots(2).placement(placement).deadline(deadline).build()?;
    layer.setup.settings = settings;
    Ok((layer, World::new(shape, topology, RankSet::new())?))
}

/// What a rank went through: rounds until one failed, then a recovery and a round among the survivors.
#[derive(Debug, Serialize, Deserialize)]
struct Story {
    failure: Option<Failure>,
    /// How long the failing operation took.
    took: Nanos,
    after: Result<Observed, Error>,
}

/// Rounds until something fails, at most `rounds`; then recovers without the culprit and runs one round more.
async fn live<E: Endpoint>(ep: &mut E, world: &World, batch: &Batch, rounds: u32) -> Story {
    let mut story = Story { failure: None, took: Nanos(0), after: Ok(Observed::default()) };
    for _ in 0..rounds {
        let began = ep.now();
        match round(ep, world, batch, &HOW).await {
            Ok((observed, _)) => story.after = Ok(observed),
            Err(Error::Failed(failure)) => {
                story.took = ep.now() - began;
                story.failure = Some(failure);
                story.after = recover(ep, world, batch, failure.culprit).await;
                break;
            }
            Err(error) => {
                story.after = Err(error);
                break;
            }
        }
    }
    story
}

async fn recover<E: Endpoint>(ep: &mut E, world: &World, batch: &Batch, culprit: Rank) -> Result<Observed, Error> {
    ep.recover(&[culprit].into_iter().collect()).await?;
    round(ep, world, batch, &HOW).await.map(|(observed, _)| observed)
}

/// Checks that every rank but the culprit failed by that culprit's fault and did verified work afterwards.
fn survivors(layer: &Layer, culprit: Rank, stories: &[Option<Story>]) -> Verdict {
    let mask: RankSet = [culprit].into_iter().collect();
    let Setup { shape, topology, .. } = layer.setup;
    let world = World::new(shape, topology, mask).map_err(text)?;
    let mut observed = Vec::new();
    for (rank, story) in topology.all().zip(stories) {
        if rank == culprit {
            observed.push(Observed::default());
            continue;
        }
        let story = story.as_ref().ok_or_else(|| format!("rank {rank} did not finish"))?;
        let failure = story.failure.as_ref().ok_or_else(|| format!("rank {rank} saw no failure"))?;
        ensure(failure.culprit == culprit, || {
            let told: Vec<_> =
                stories.iter().flatten().filter_map(|story| story.failure).map(|failure| failure.to_string()).collect();
            format!("rank {rank} blames another than rank {culprit}: {}", told.join("; "))
        })?;
        let deadline = layer.setup.settings.deadline();
        let limit = deadline + deadline + GRACE;
        ensure(story.took <= limit, || format!("rank {rank} took {} to fail", story.took))?;
        observed.push(story.after.clone().map_err(|error| format!("rank {rank} after recovery: {error}"))?);
    }
    let batches: Vec<Batch> = topology
        .all()
        .zip(&layer.batches)
        .map(|(rank, batch)| if rank == culprit { Batch::default() } else { batch.clone() })
        .collect();
    verify::run(&world, &batches, &observed).map_err(text).map(drop)
}

/// Runs stories of up to `rounds` rounds under `incident`.
fn stories<B: Backend>(
    backend: &B,
    layer: &Layer,
    world: &World,
    incident: Incident,
    rounds: u32,
) -> Result<Vec<Option<Story>>, String> {
    let setup = layer.setup.clone().incident(incident);
    backend.run(&setup, async |mut ep| {
        let batch = &layer.batches[ep.rank().index()];
        live(&mut ep, world, batch, rounds).await
    })
}

fn seeds_and_placements<B: Backend>(backend: &B, seeds: u64) -> impl Iterator<Item = (u64, Placement)> + use<B> {
    let all = placements(backend);
    (0..seeds).flat_map(move |seed| all.clone().into_iter().map(move |placement| (seed, placement)))
}

fn delay_heals<B: Backend>(backend: &B) -> Verdict {
    for (seed, placement) in seeds_and_placements(backend, backend.seeds(10)) {
        let (layer, world) = fragile(seed, placement, deadline()).map_err(text)?;
        // Who pulls asks for each row, and waits for it.
        let by = Nanos(deadline().0 / if placement == Placement::Pulled { 200 } else { 20 });
        let delay = Incident::Delay { from: VICTIM, to: Rank(0), kind: None, by, after: seed * 3 };
        let stories = stories(backend, &layer, &world, delay, 2)?;
        let mut observed = Vec::new();
        for (rank, story) in stories.into_iter().enumerate() {
            let story = story.ok_or_else(|| format!("seed {seed}: rank {rank} did not finish"))?;
            ensure(story.failure.is_none(), || format!("seed {seed}: rank {rank} failed: {:?}", story.failure))?;
            observed.push(story.after.map_err(text)?);
        }
        verify::run(&world, &layer.batches, &observed).map_err(text)?;
    }
    Ok(())
}

fn delay_kills<B: Backend>(backend: &B) -> Verdict {
    for (seed, placement) in seeds_and_placements(backend, backend.seeds(10)) {
        let (layer, world) = fragile(seed, placement, deadline()).map_err(text)?;
        let delay = Incident::Delay {
            from: VICTIM,
            to: Rank(0),
            kind: Some(LaneKind::Control),
            by: Nanos(deadline().0 * 20),
            after: 0,
        };
        // Lost counts are late for ever, and their sender goes on: who waits for its rows is no nearer to the cause.
        let lost = Incident::LoseLane { from: VICTIM, to: Rank(0), kind: Some(LaneKind::Control), after: 0 };
        for incident in [delay, lost] {
            let stories = stories(backend, &layer, &world, incident, 2)?;
            survivors(&layer, VICTIM, &stories)
                .map_err(|error| format!("seed {seed}, {placement:?}, {incident:?}: {error}"))?;
        }
    }
    Ok(())
}

fn starved<B: Backend>(backend: &B) -> Verdict {
    for (seed, placement) in seeds_and_placements(backend, backend.seeds(10)) {
        let (layer, world) = fragile(seed, placement, patience()).map_err(text)?;
        let stories = stories(backend, &layer, &world, Incident::Starve { rank: VICTIM }, 3)?;
        let observed: Vec<Observed> = stories
            .into_iter()
            .map(|story| story.filter(|story| story.failure.is_none()).and_then(|story| story.after.ok()))
            .collect::<Option<_>>()
            .ok_or_else(|| format!("seed {seed}: a rank failed"))?;
        verify::run(&world, &layer.batches, &observed).map_err(text)?;
    }
    Ok(())
}

fn crash<B: Backend>(backend: &B) -> Verdict {
    for (seed, placement) in seeds_and_placements(backend, backend.seeds(60)) {
        let (layer, world) = fragile(seed, placement, deadline()).map_err(text)?;
        let incident = Incident::Crash { rank: VICTIM, after: seed * 4, noticed: false };
        let stories = stories(backend, &layer, &world, incident, 60)?;
        survivors(&layer, VICTIM, &stories).map_err(|error| format!("seed {seed}, {placement:?}: {error}"))?;
    }
    Ok(())
}

fn noticed_crash<B: Backend>(backend: &B) -> Verdict {
    for (seed, placement) in seeds_and_placements(backend, backend.seeds(60)) {
        let (layer, world) = fragile(seed, placement, patience()).map_err(text)?;
        let incident = Incident::Crash { rank: VICTIM, after: seed * 4, noticed: true };
        let stories = stories(backend, &layer, &world, incident, 60)?;
        survivors(&layer, VICTIM, &stories).map_err(|error| format!("seed {seed}, {placement:?}: {error}"))?;
        let slow = stories.iter().flatten().find(|story| story.took >= patience());
        ensure(slow.is_none(), || format!("seed {seed}, {placement:?}: a wait lasted to its deadline: {slow:?}"))?;
    }
    Ok(())
}

/// A process that ends right after its last call has left nobody in the lurch, however slow the others are.
fn leaves_in_time<B: Backend>(backend: &B) -> Verdict {
    for (seed, placement) in seeds_and_placements(backend, backend.seeds(60)) {
        let (mut layer, world) = fragile(seed, placement, patience()).map_err(text)?;
        layer.setup = layer.setup.incident(Incident::Starve { rank: Rank(seed as u32 % (RANKS - 1)) });
        let stories = stories(backend, &layer, &world, Incident::Exit { rank: VICTIM }, 1 + seed as u32 % 3)?;
        let observed: Result<Vec<Observed>, String> = stories
            .into_iter()
            .map(|story| match story {
                Some(Story { failure: None, after: Ok(observed), .. }) => Ok(observed),
                Some(Story { failure: Some(failure), .. }) => Err(format!("seed {seed}, {placement:?}: {failure}")),
                other => Err(format!("seed {seed}, {placement:?}: a rank ended with {other:?}")),
            })
            .collect();
        verify::run(&world, &layer.batches, &observed?).map_err(text)?;
    }
    Ok(())
}

/// The others need one operation more than the rank that leaves.
fn leaves_early<B: Backend>(backend: &B) -> Verdict {
    for (seed, placement) in seeds_and_placements(backend, backend.seeds(30)) {
        let (layer, world) = fragile(seed, placement, patience()).map_err(text)?;
        let setup = layer.setup.clone().incident(Incident::Exit { rank: VICTIM });
        let stories = backend.run(&setup, async |mut ep| {
            let rounds = if ep.rank() == VICTIM { seed % 3 } else { 60 };
            let batch = &layer.batches[ep.rank().index()];
            live(&mut ep, &world, batch, rounds as u32).await
        })?;
        survivors(&layer, VICTIM, &stories).map_err(|error| format!("seed {seed}, {placement:?}: {error}"))?;
        let slow = stories.iter().flatten().find(|story| story.took >= patience());
        ensure(slow.is_none(), || format!("seed {seed}, {placement:?}: a wait lasted to its deadline: {slow:?}"))?;
    }
    Ok(())
}

fn lost_lane<B: Backend>(backend: &B) -> Verdict {
    let kinds = [None, Some(LaneKind::Control), Some(LaneKind::Data(0)), Some(LaneKind::Credit(0))];
    for ((seed, placement), kind) in
        seeds_and_placements(backend, backend.seeds(12)).flat_map(|at| kinds.map(|kind| (at, kind)))
    {
        let (layer, world) = fragile(seed, placement, deadline()).map_err(text)?;
        let incident = Incident::LoseLane { from: VICTIM, to: Rank(0), kind, after: seed };
        let stories = stories(backend, &layer, &world, incident, 40)?;
        let named = |what: &str| format!("seed {seed}, {placement:?}, {kind:?}: {what}");
        let culprits: Vec<Option<Rank>> =
            stories.iter().map(|story| story.as_ref()?.failure.map(|failure| failure.culprit)).collect();
        // A lane that carries nothing in this placement may be lost without loss.
        let Some(culprit) = culprits.iter().flatten().next().copied() else {
            let after = |story: &Option<Story>| story.as_ref().and_then(|story| story.after.clone().ok());
            let observed: Option<Vec<Observed>> = stories.iter().map(after).collect();
            let observed = observed.ok_or_else(|| named(&format!("{stories:?}")))?;
            verify::run(&world, &layer.batches, &observed).map_err(|error| named(&error.to_string()))?;
            continue;
        };
        ensure(culprits.iter().all(|&blamed| blamed == Some(culprit)), || {
            let failures: Vec<_> = stories.iter().flatten().map(|story| &story.failure).collect();
            named(&format!("blamed {culprits:?}: {failures:?}"))
        })?;
        ensure(culprit == VICTIM || culprit == Rank(0), || named(&format!("blamed rank {culprit}")))?;
        survivors(&layer, culprit, &stories).map_err(|error| named(&error))?;
    }
    Ok(())
}

fn poisoned<B: Backend>(backend: &B) -> Verdict {
    let (layer, world) = fragile(1, Placement::Ring, patience()).map_err(text)?;
    let setup = layer.setup.clone().incident(Incident::Crash { rank: VICTIM, after: 30, noticed: true });
    let outcomes = backend.run(&setup, async |mut ep| {
        let batch = &layer.batches[ep.rank().index()];
        let mut failed = None;
        while failed.is_none() {
            failed = round(&mut ep, &world, batch, &HOW).await.err();
        }
        (failed, round(&mut ep, &world, batch, &HOW).await.err())
    })?;
    for (first, second) in outcomes.into_iter().flatten() {
        ensure(matches!(first, Some(Error::Failed(_))), || format!("the failing call said {first:?}"))?;
        ensure(matches!(second, Some(Error::Poisoned { .. })), || format!("the next call said {second:?}"))?;
    }
    Ok(())
}

/// Three ranks agree to leave the fourth out, which does nothing.
fn masked<B: Backend>(backend: &B) -> Verdict {
    for (seed, placement) in seeds_and_placements(backend, backend.seeds(10)) {
        let (layer, world) = fragile(seed, placement, patience()).map_err(text)?;
        let outcomes = backend.run(&layer.setup, async |mut ep| {
            if ep.rank() == VICTIM {
                return Ok(Observed::default());
            }
            let batch = &layer.batches[ep.rank().index()];
            recover(&mut ep, &world, batch, VICTIM).await
        })?;
        let stories: Vec<Option<Story>> = outcomes
            .into_iter()
            .map(|after| {
                let fault = Fault::Aborted { reporter: VICTIM, culprit: VICTIM };
                let failure = Some(Failure { op: 0, culprit: VICTIM, reporter: VICTIM, fault });
                Some(Story { failure, took: Nanos(0), after: after? })
            })
            .collect();
        survivors(&layer, VICTIM, &stories).map_err(|error| format!("seed {seed}, {placement:?}: {error}"))?;
    }
    Ok(())
}

/// A rank crashes, the others recover; later one more is left out.
fn two_recoveries<B: Backend>(backend: &B) -> Verdict {
    for seed in 0..backend.seeds(12) {
        let (layer, world) = fragile(seed, Placement::Direct, deadline()).map_err(text)?;
        let setup =
            layer.setup.clone().incident(Incident::Crash { rank: VICTIM, after: 10 * seed, noticed: seed % 2 == 0 });
        let outcomes = backend.run(&setup, async |mut ep| {
            let rank = ep.rank();
            let batch = &layer.batches[rank.index()];
            let story = live(&mut ep, &world, batch, 60).await;
            story.after?;
            if rank == Rank(0) {
                return Ok(Observed::default());
            }
            recover(&mut ep, &world, batch, Rank(0)).await
        })?;
        let mask: RankSet = [Rank(0), VICTIM].into_iter().collect();
        let left = World::new(layer.setup.shape, layer.setup.topology, mask.clone()).map_err(text)?;
        let mut observed = Vec::new();
        for (rank, outcome) in outcomes.into_iter().enumerate() {
            match outcome {
                Some(outcome) => observed.push(outcome.map_err(|error| format!("seed {seed}: rank {rank}: {error}"))?),
                None => observed.push(Observed::default()),
            }
        }
        let batches: Vec<Batch> = (0..)
            .map(Rank)
            .zip(&layer.batches)
            .map(|(rank, batch)| if mask.contains(rank) { Batch::default() } else { batch.clone() })
            .collect();
        verify::run(&left, &batches, &observed).map_err(|error| format!("seed {seed}: {error}"))?;
    }
    Ok(())
}

/// A rank that the others gave up on and that is alive hears it when it wants to recover.
fn excluded<B: Backend>(backend: &B) -> Verdict {
    let (layer, world) = fragile(3, Placement::Ring, deadline()).map_err(text)?;
    let lost = Incident::LoseLane { from: VICTIM, to: Rank(0), kind: Some(LaneKind::Control), after: 0 };
    let setup = layer.setup.clone().incident(lost);
    let outcomes = backend.run(&setup, async |mut ep| {
        let batch = &layer.batches[ep.rank().index()];
        let failed = round(&mut ep, &world, batch, &HOW).await.err();
        let culprit = failed.and_then(|error| error.failure().map(|failure| failure.culprit));
        let mask = if ep.rank() == VICTIM { RankSet::new() } else { culprit.into_iter().collect() };
        (culprit, ep.recover(&mask).await.err())
    })?;
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        let (culprit, refused) = outcome.ok_or_else(|| format!("rank {rank} did not finish"))?;
        ensure(culprit == Some(VICTIM), || format!("rank {rank} blamed {culprit:?}"))?;
        let expected = (rank == VICTIM.index()).then_some(Error::Excluded { rank: VICTIM });
        ensure(refused == expected, || format!("rank {rank} recovered with {refused:?}, expected {expected:?}"))?;
    }
    Ok(())
}

/// A rank that waits for ranks which have recovered without it hears it from one of them, before its time is up. (It is told where it may pull from
/// them: what lies there is not for it any more.)
fn given_up<B: Backend>(backend: &B) -> Verdict {
    for (seed, placement) in seeds_and_placements(backend, backend.seeds(6)) {
        let (layer, world) = fragile(seed, placement, patience()).map_err(text)?;
        let outcomes = backend.run(&layer.setup, async |mut ep| {
            let me = ep.rank();
            if me != VICTIM {
                return ep.recover(&[VICTIM].into_iter().collect()).await.err();
            }
            round(&mut ep, &world, &layer.batches[me.index()], &HOW).await.err()
        })?;
        for (rank, error) in (0..).map(Rank).zip(outcomes) {
            let error = error.ok_or_else(|| format!("rank {rank} did not finish"))?;
            let fault = error.as_ref().and_then(Error::failure).map(|failure| failure.fault);
            let is_told = matches!(fault, Some(Fault::Aborted { culprit: VICTIM, .. }));
            ensure(if rank == VICTIM { is_told } else { error.is_none() }, || {
                format!("seed {seed}, {placement:?}: rank {rank} says {error:?}")
            })?;
        }
    }
    Ok(())
}
