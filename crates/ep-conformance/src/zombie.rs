//! A rank that is suspended, given up, and goes on: what the others do then must be right, and nobody else may be blamed.
//!
//! Every rank plays its scenario, then all come together by `recover`, and play again, with other rows. So all know in which play the rank
//! was lost. Whatever a call gave to any rank, that one too, in a play that did not end well as well, is compared with the oracle.

use ep_core::incident::Incident;
use ep_core::reference::World;
use ep_core::{Endpoint, Error, Failure, Fault, Phase, Rank, RankSet};
use proptest::prelude::*;
use serde::{Deserialize, Serialize};

use crate::backend::{Backend, Setup, Travels, finished};
use crate::verify::Compared;
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
    pub(crate) fn lost(self, setup: &Setup) -> RankSet {
        let topology = setup.topology;
        match topology.nodes() {
            1 => [self.rank].into_iter().collect(),
            _ => topology.ranks_of(topology.node_of(self.rank)).collect(),
        }
    }
}

/// What a rank came through.
#[derive(Debug, Serialize, Deserialize)]
struct Play<T> {
    /// The ranks that took no part in it.
    without: Vec<u32>,
    /// What calls that ended well gave.
    seen: T,
    ended: Result<(), Error>,
}

/// What became of a rank.
#[derive(Debug, Serialize, Deserialize)]
struct Story<T> {
    plays: Vec<Play<T>>,
    /// What failed while it played.
    failures: Vec<Failure>,
    /// Why it could not go on.
    end: Option<Error>,
}

/// How often ranks play of which one may be a zombie.
pub(crate) const fn plays(zombie: Option<Zombie>) -> usize {
    if zombie.is_some() { PLAYS } else { 1 }
}

/// Lets all ranks of `setup` play, with `zombie` among them if there is one, and has `compare` look at what they saw of each play. `play` is told the
/// number of the play, and notes what it saw.
pub(crate) fn run<B: Backend, T: Travels + Default + Clone>(
    backend: &B,
    (setup, zombie): (&Setup, Option<Zombie>),
    play: impl AsyncFn(&mut B::Endpoint, usize, &mut T) -> Result<(), Error> + Send + Sync,
    compare: impl Fn(Played<T>) -> Result<Compared, String>,
) -> Result<Compared, String> {
    let Some(zombie) = zombie else {
        let once = async |mut ep| {
            let mut seen = T::default();
            play(&mut ep, 0, &mut seen).await.map(|()| seen)
        };
        return backend.run_judged(setup, once, |outcomes| {
            let world = World::new(setup.shape, setup.topology, RankSet::new()).map_err(|error| error.to_string())?;
            compare(Played { number: 0, world, whole: true, seen: finished(outcomes)? })
        });
    };
    let judge = |stories| {
        let mut compared = Compared::default();
        for play in played(zombie, setup, stories)? {
            let number = play.number;
            compared += compare(play).map_err(|error| format!("play {number}: {error}"))?;
        }
        Ok(compared)
    };
    backend.run_judged(&zombie.haunt(setup), async |mut ep| live(&mut ep, &play).await, judge)
}

/// Plays, comes together with the others, and plays again. `play` is told the number of the play, and notes what it saw.
async fn live<E: Endpoint, T: Travels + Default>(
    ep: &mut E,
    play: impl AsyncFn(&mut E, usize, &mut T) -> Result<(), Error>,
) -> Story<T> {
    let mut story = Story { plays: Vec::new(), failures: Vec::new(), end: None };
    for number in 0..PLAYS {
        let without = ep.mask().iter().map(|rank| rank.0).collect();
        let mut seen = T::default();
        let ended = play(ep, number, &mut seen).await;
        let failure = ended.as_ref().err().and_then(|error| error.failure().copied());
        story.failures.extend(failure);
        story.plays.push(Play { without, seen, ended });
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

/// A play, as all ranks saw it.
pub(crate) struct Played<T> {
    pub(crate) number: usize,
    pub(crate) world: World,
    /// Whether all who took part came through.
    pub(crate) whole: bool,
    /// What each rank saw; nothing where it took no part.
    pub(crate) seen: Vec<T>,
}

impl<T> Played<T> {
    /// The batches of those who took part.
    pub(crate) fn batches(&self, all: &[Batch]) -> Vec<Batch> {
        let present = |(rank, batch): (u32, &Batch)| {
            if self.world.takes_part(Rank(rank)) { batch.clone() } else { Batch::default() }
        };
        (0..).zip(all).map(present).collect()
    }
}

/// Checks whom the ranks blamed and who was left, and gives the plays to compare: one at least is whole.
fn played<T: Default + Clone>(
    zombie: Zombie,
    setup: &Setup,
    stories: Vec<Option<Story<T>>>,
) -> Result<Vec<Played<T>>, String> {
    let lost = zombie.lost(setup);
    let mut all: Vec<Played<T>> = Vec::new();
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
    for number in 0..PLAYS {
        let mut masks = living().map(|(_, story)| &story.plays[number].without);
        let mask = masks.next().ok_or("nobody is left")?;
        if masks.any(|other| other != mask) {
            return Err(format!("play {number}: the ranks went on without different ranks"));
        }
        let mask: RankSet = mask.iter().copied().map(Rank).collect();
        if !mask.is_empty() && mask != lost {
            return Err(format!("play {number} went on without {mask:?}, expected {lost:?}"));
        }
        let world = World::new(setup.shape, setup.topology, mask.clone()).map_err(|error| error.to_string())?;
        let mut play = Played { number, world, whole: true, seen: Vec::new() };
        for (rank, story) in &stories {
            let took_part = story.plays.get(number).filter(|_| !mask.contains(*rank));
            play.seen.push(took_part.map(|play| play.seen.clone()).unwrap_or_default());
            let ended = match took_part {
                _ if mask.contains(*rank) => Ok(()),
                Some(play) => play.ended.clone().map_err(|error| format!("play {number} of rank {rank}: {error}")),
                None => Err(format!("play {number} of rank {rank} never began")),
            };
            match ended {
                Ok(()) => {}
                // In which it was lost.
                Err(_) if mask.is_empty() => play.whole = false,
                Err(error) => return Err(error),
            }
        }
        all.push(play);
    }
    if all.iter().any(|play| play.whole) { Ok(all) } else { Err("nobody played to the end".into()) }
}
