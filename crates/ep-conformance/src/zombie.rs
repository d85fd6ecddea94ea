//! A rank that is suspended, given up, and goes on: what the others do then must be right, and nobody else may be blamed.
//!
//! Every rank plays its scenario, then all come together by `recover`, and play again. So all know in which play the rank was lost:
//! what every member of a play came through is compared with the oracle.

use ep_core::incident::Incident;
use ep_core::reference::World;
use ep_core::{Endpoint, Error, Failure, Fault, Phase, Rank, RankSet};
use proptest::prelude::*;
use serde::{Deserialize, Serialize};

use crate::backend::{Setup, Travels};
use crate::workload::Batch;

/// Times that a rank comes to recover before it gives up a rank that does not come: the others may still wait for their deadlines.
const PATIENCE: u32 = 3;
const PLAYS: usize = 2;

/// A rank that is suspended, and how many verbs it does before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Zombie {
    /// The rank.
    pub rank: Rank,
    /// Verbs.
    pub after: u64,
}

/// Mostly nobody. At most one rank of several.
pub(crate) fn zombies(ranks: u32, possible: bool) -> BoxedStrategy<Option<Zombie>> {
    if !possible || ranks < 2 {
        return Just(None).boxed();
    }
    let after = prop_oneof![1 => 0u64..40, 2 => 0u64..300, 1 => 0u64..3000];
    let zombie = (0..ranks, after).prop_map(|(rank, after)| Zombie { rank: Rank(rank), after });
    prop::option::weighted(0.25, zombie).boxed()
}

impl Zombie {
    /// The communicator in which it is suspended.
    pub(crate) fn haunt(self, setup: &Setup) -> Setup {
        setup.clone().incident(Incident::Suspend { rank: self.rank, after: self.after })
    }

    /// Those who are given up with it.
    fn lost(self, setup: &Setup) -> RankSet {
        let topology = setup.topology;
        match topology.nodes() {
            1 => [self.rank].into_iter().collect(),
            _ => topology.ranks_of(topology.node_of(self.rank)).collect(),
        }
    }
}

/// What became of a rank.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Story<T> {
    /// Each play, and the ranks that took no part in it.
    plays: Vec<(Vec<u32>, Result<T, Error>)>,
    /// What failed while it played.
    failures: Vec<Failure>,
    /// Why it could not go on.
    end: Option<Error>,
}

/// Plays, comes together with the others, and plays again.
pub(crate) async fn live<E: Endpoint, T: Travels>(
    ep: &mut E,
    play: impl AsyncFn(&mut E) -> Result<T, Error>,
) -> Story<T> {
    let mut story = Story { plays: Vec::new(), failures: Vec::new(), end: None };
    for _ in 0..PLAYS {
        let without = ep.mask().iter().map(|rank| rank.0).collect();
        let played = play(ep).await;
        let failure = played.as_ref().err().and_then(|error| error.failure().copied());
        story.failures.extend(failure);
        story.plays.push((without, played));
        if let Err(error) = come_together(ep, failure.map(|failure| failure.culprit)).await {
            story.end = Some(error);
            break;
        }
    }
    story
}

async fn come_together<E: Endpoint>(ep: &mut E, culprit: Option<Rank>) -> Result<(), Error> {
    let mut given_up: RankSet = culprit.into_iter().collect();
    for attempt in 0.. {
        match ep.recover(&given_up).await {
            Err(Error::Failed(Failure { culprit, fault: Fault::Timeout { phase: Phase::Recovery, .. }, .. }))
                if attempt < 2 * PATIENCE =>
            {
                if attempt >= PATIENCE {
                    given_up.insert(culprit);
                }
            }
            other => return other,
        }
    }
    Ok(())
}

/// A play that all came through.
pub(crate) struct Whole<T> {
    pub(crate) world: World,
    /// What each rank saw; nothing where it took no part.
    pub(crate) seen: Vec<T>,
}

impl<T> Whole<T> {
    /// The batches of those who took part.
    pub(crate) fn batches(&self, all: &[Batch]) -> Vec<Batch> {
        let present = |(rank, batch): (u32, &Batch)| {
            if self.world.takes_part(Rank(rank)) { batch.clone() } else { Batch::default() }
        };
        (0..).zip(all).map(present).collect()
    }
}

/// Checks whom the ranks blamed and who was left, and gives the plays to compare: one at least.
pub(crate) fn whole<T: Default + Clone>(
    zombie: Zombie,
    setup: &Setup,
    stories: Vec<Option<Story<T>>>,
) -> Result<Vec<Whole<T>>, String> {
    let lost = zombie.lost(setup);
    let mut whole: Vec<Whole<T>> = Vec::new();
    let named = (0..).map(Rank).zip(stories);
    let stories = named.map(|(rank, story)| Ok((rank, story.ok_or_else(|| format!("rank {rank} did not finish"))?)));
    let stories = stories.collect::<Result<Vec<_>, String>>()?;
    let living = || stories.iter().filter(|(rank, _)| !lost.contains(*rank));
    for (rank, story) in living() {
        if let Some(failure) = story.failures.iter().find(|failure| failure.culprit != zombie.rank) {
            return Err(format!("rank {rank} blames another than rank {}: {failure}", zombie.rank));
        }
        if let Some(error) = &story.end {
            return Err(format!("rank {rank} could not go on: {error}"));
        }
    }
    for at in 0..PLAYS {
        let mut masks = living().map(|(_, story)| &story.plays[at].0);
        let mask = masks.next().ok_or("nobody is left")?;
        if masks.any(|other| other != mask) {
            return Err(format!("play {at}: the ranks went on without different ranks"));
        }
        let mask: RankSet = mask.iter().copied().map(Rank).collect();
        if !mask.is_empty() && mask != lost {
            return Err(format!("play {at} went on without {mask:?}, expected {lost:?}"));
        }
        let played = |(rank, story): &(Rank, Story<T>)| match story.plays.get(at) {
            _ if mask.contains(*rank) => Ok(T::default()),
            Some((_, played)) => played.clone().map_err(|error| format!("play {at} of rank {rank}: {error}")),
            None => Err(format!("play {at} of rank {rank} never began")),
        };
        match stories.iter().map(played).collect() {
            Ok(seen) => {
                let world = World::new(setup.shape, setup.topology, mask).map_err(|error| error.to_string())?;
                whole.push(Whole { world, seen });
            }
            // In which it was lost.
            Err(_) if mask.is_empty() => {}
            Err(error) => return Err(error),
        }
    }
    if whole.is_empty() { Err("nobody played to the end".into()) } else { Ok(whole) }
}
