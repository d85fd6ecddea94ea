//! Ranks that are suspended, given up, and go on: whatever they still do, the others' rows are right, and nobody else is blamed.
//!
//! `EP_ZOMBIES` says how many of each case, `EP_SEED` the first; 10,000 is what a release is checked with.

use std::cell::{Cell, RefCell};

use ep_core::reference::{Weighing, World};
use ep_core::{Endpoint, Placement, Rank, RankSet};

use super::fixture::{self, Verdict, text};
use super::low_latency::{self as low, persist, survived};
use super::nodes::over;
use crate::arrival::Arrival;
use crate::backend::{Backend, Requirement, Setup};
use crate::drive::upload;
use crate::harness::{Case, env_number};
use crate::low_latency::scenario::{self as low_scenario, Turn};
use crate::scenario::Scenario;
use crate::verify::{self, Observed};
use crate::workload::{Batch, Workload};
use crate::zombie::{PLAYS, Zombie, live};

const THROUGHPUT: &[Requirement] = &[Requirement::Suspensions];
const PULLED: &[Requirement] = &[Requirement::Suspensions, Requirement::Get];
const LOW: &[Requirement] = &[Requirement::Suspensions, Requirement::LowLatency];

pub(super) fn cases<B: Backend>() -> Vec<Case<B>> {
    let case = |name, needs, body| Case { name, needs, body };
    vec![
        case("zombie_in_throughput_mode_harms_nobody", THROUGHPUT, throughput::<B> as fn(&B) -> _),
        case("zombie_that_pulls_rows_gets_those_of_its_operation", PULLED, pulling::<B>),
        case("zombie_in_low_latency_harms_nobody", LOW, low_latency::<B>),
        case("zombie_that_was_masked_in_low_latency_harms_nobody", LOW, masked::<B>),
    ]
}

/// Zombies of one case: rank, and verbs before, spread over what a rank does in a run.
fn zombies<B: Backend>(backend: &B, ranks: u32, verbs: u64) -> impl Iterator<Item = (u64, Zombie)> {
    let most = env_number("EP_ZOMBIES").map_or_else(|| backend.seeds(120), u64::from);
    let first = env_number("EP_SEED").map_or(0, u64::from);
    (first..first + most).map(move |seed| {
        let rank = Rank((seed % u64::from(ranks)) as u32);
        (seed, Zombie { rank, after: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) % verbs })
    })
}

fn throughput<B: Backend>(backend: &B) -> Verdict {
    for (seed, zombie) in zombies(backend, 4, 240) {
        let scenario = match seed % 3 {
            0 => fixture::scenario(4, 9),
            1 => fixture::direct(4, 9),
            _ if backend.lacks(Requirement::Nodes).is_none() => over(2, 2, 7),
            _ => fixture::direct(4, 20),
        };
        let pull = fixture::TURN.pull || seed % 2 == 0;
        let rounds = vec![crate::scenario::Turn { pull, ..fixture::TURN }; 2];
        let scenario = Scenario { seed, rounds, zombie: Some(zombie), ..scenario };
        scenario.check(backend).map_err(|error| format!("seed {seed}, {zombie:?}: {error}"))?;
    }
    Ok(())
}

/// Rows lie in outboxes, which their owners use again when they have given up the zombie: each dispatch that ends well, a zombie's too,
/// has brought the rows of its own operation.
fn pulling<B: Backend>(backend: &B) -> Verdict {
    for (seed, zombie) in zombies(backend, 4, 160) {
        let layer = fixture::layer(4, 1, seed, Placement::Pulled).map_err(text)?;
        pull_on(backend, &zombie.haunt(&layer.setup), seed)
            .map_err(|error| format!("seed {seed}, {zombie:?}: {error}"))?;
    }
    Ok(())
}

/// Dispatches of each play.
const DISPATCHES: usize = 2;

/// A dispatch that ended well: the ranks that took no part, which of all dispatches it was, and what it brought.
type Brought = (Vec<u32>, usize, Observed);

/// Plays dispatches whose rows are all different, and compares what each brought.
pub(super) fn pull_on<B: Backend>(backend: &B, setup: &Setup, seed: u64) -> Verdict {
    let tokens = vec![1; setup.topology.ranks() as usize];
    let batches = |at: usize| Workload::new(setup.shape, tokens.clone()).seed(seed + 1000 * at as u64).batches();
    let batches: Vec<_> = (0..PLAYS * DISPATCHES).map(batches).collect::<Result<_, _>>().map_err(text)?;
    let outcomes = backend.run(setup, async |mut ep| {
        let brought: RefCell<Vec<Brought>> = RefCell::default();
        let plays = Cell::new(0..PLAYS * DISPATCHES);
        let story = live(&mut ep, async |ep: &mut B::Endpoint| {
            let mut left = plays.take();
            let mine: Vec<usize> = left.by_ref().take(DISPATCHES).collect();
            plays.set(left);
            for at in mine {
                let (x, routing) = upload(ep, &batches[at][ep.rank().index()])?;
                let got = ep.dispatch(&x, &routing).await?;
                let mask = ep.mask().iter().map(|rank| rank.0).collect();
                brought.borrow_mut().push((mask, at, Observed::of_dispatch(ep, &got)?));
            }
            Ok(())
        });
        let story = story.await;
        (story, brought.into_inner())
    })?;
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        let (_, brought) = outcome.ok_or_else(|| format!("rank {rank} did not finish"))?;
        for (mask, at, observed) in brought {
            let mask: RankSet = mask.into_iter().map(Rank).collect();
            let present = |(rank, batch): (u32, &Batch)| match mask.contains(Rank(rank)) {
                true => Batch::default(),
                false => batch.clone(),
            };
            let present: Vec<Batch> = (0..).zip(&batches[at]).map(present).collect();
            let world = World::new(setup.shape, setup.topology, mask).map_err(text)?;
            let expected = Arrival::expected(&world, &present);
            verify::dispatched(&world, &expected[rank..=rank], &[observed])
                .map_err(|mismatch| format!("dispatch {at} of rank {rank}: {mismatch}"))?;
        }
    }
    Ok(())
}

fn low_latency<B: Backend>(backend: &B) -> Verdict {
    for (seed, zombie) in zombies(backend, 4, 240) {
        let turn = |at: u64| Turn {
            at_experts: (seed + at).is_multiple_of(3),
            ahead: (seed + at).is_multiple_of(2),
            twice: false,
        };
        let has_nodes =
            [Requirement::Nodes, Requirement::FarLowLatency].iter().all(|&need| backend.lacks(need).is_none());
        let nodes = if seed % 5 == 4 && has_nodes { 2 } else { 1 };
        let scenario = low_scenario::Scenario {
            seed,
            nodes,
            turns: (0..3).map(turn).collect(),
            zombie: Some(zombie),
            ..low::scenario(4, 6)
        };
        scenario.check(backend).map_err(|error| format!("seed {seed}, {zombie:?}: {error}"))?;
    }
    Ok(())
}

/// Given up by `mask_rank` alone: the others stay in the generation that the zombie is in, and it goes on when they have ended.
fn masked<B: Backend>(backend: &B) -> Verdict {
    for (seed, zombie) in zombies(backend, 4, 240) {
        let weighing = if seed % 2 == 0 { Weighing::AtSource } else { Weighing::AtExperts };
        let layer = low::layer(4, 6, seed).map_err(text)?;
        let setup = zombie.haunt(&layer.setup);
        let outcomes = backend.run(&setup, async |mut ep| persist(&mut ep, &layer, weighing, 6).await)?;
        survived(&layer, zombie.rank, weighing, outcomes)
            .map_err(|error| format!("seed {seed}, {zombie:?}: {error}"))?;
    }
    Ok(())
}
