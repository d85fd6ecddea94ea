//! Turns of a scenario whose oracle is throughput mode's on one node, one after the other, on ranks of which one may be a zombie.

use std::fmt::Debug;

use ep_core::reference::World;
use ep_core::{Endpoint as _, Error, Rank, RankSet, Topology};

use super::scenario::Scenario;
use crate::backend::{Backend, Setup, Travels};
use crate::verify::{Compared, Mismatch};
use crate::workload::Batch;
use crate::zombie::{self, Played};

/// What each turn of each play asks for, and the batches of its ranks.
pub(super) type Plays<A> = Vec<Vec<(A, Vec<Batch>)>>;

/// The turns of a scenario. `asked` says what a turn asks for; where that gives no weights at dispatch, those of its batches are 1.
///
/// # Errors
/// Those of [`Scenario::batches`].
pub(super) fn plays<A>(
    scenario: &Scenario,
    setup: &Setup,
    asked: impl Fn(usize) -> A,
    gives_weights: impl Fn(&A) -> bool,
) -> Result<Plays<A>, Error> {
    let of_play = |play| -> Result<Vec<_>, Error> {
        let batches = scenario.play_batches(setup.shape, play)?.into_iter().enumerate();
        Ok(batches
            .map(|(at, mut batches)| {
                let asked = asked(at);
                if !gives_weights(&asked) {
                    batches.iter_mut().for_each(|batch| batch.topk_weights.fill(1.0));
                }
                (asked, batches)
            })
            .collect())
    };
    (0..zombie::plays(scenario.zombie)).map(of_play).collect()
}

/// Plays them, and compares with the oracle each turn that all ranks came through.
///
/// # Errors
/// What the backend or the comparison found.
pub(super) fn check<B: Backend, A: Copy + Debug + Send + Sync, T: Travels + Clone + Default>(
    backend: &B,
    (scenario, setup, plays): (&Scenario, &Setup, &Plays<A>),
    round: impl AsyncFn(&mut B::Endpoint, &World, &Batch, A) -> Result<T, Error> + Send + Sync,
    compare: impl Fn(&World, &[Batch], A, &[T]) -> Result<Compared, Mismatch>,
) -> Result<Compared, String> {
    // Low latency is a full mesh: no node has a sum of its own.
    let without = |mask: RankSet| -> Result<World, String> {
        let mesh = Topology::new(1, setup.topology.ranks());
        mesh.and_then(|mesh| World::new(setup.shape, mesh, mask)).map_err(|error| error.to_string())
    };
    let world = without(RankSet::new())?;
    let play = async |ep: &mut B::Endpoint, number: usize, seen: &mut Vec<T>| {
        for (asked, batches) in &plays[number] {
            seen.push(round(ep, &world, &batches[ep.rank().index()], *asked).await?);
        }
        Ok(())
    };
    zombie::run(backend, (setup, scenario.zombie), play, |play: Played<Vec<T>>| {
        let absent = |rank: &Rank| !play.world.takes_part(*rank);
        let world = without(setup.topology.all().filter(absent).collect())?;
        let mut compared = Compared::default();
        for (at, (asked, batches)) in plays[play.number].iter().enumerate() {
            let mut seen = setup.topology.all().zip(&play.seen);
            if let Some((rank, _)) = seen.find(|(rank, seen)| world.takes_part(*rank) && seen.len() <= at) {
                if play.whole {
                    return Err(format!("turn {at}: rank {rank} saw nothing of it"));
                }
                break;
            }
            let seen: Vec<T> = play.seen.iter().map(|seen| seen.get(at).cloned().unwrap_or_default()).collect();
            compared += compare(&world, &play.batches(batches), *asked, &seen)
                .map_err(|mismatch| format!("turn {at}, {asked:?}: {mismatch}"))?;
        }
        Ok(compared)
    })
}
