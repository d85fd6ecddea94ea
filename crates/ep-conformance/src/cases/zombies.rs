//! Ranks that are suspended, given up, and go on: whatever they still do, the others' rows are right, and nobody else is blamed.
//!
//! `EP_ZOMBIES` says how many of each case, `EP_SEED` the first; 10,000 is what a release is checked with.

use ep_core::incident::Incident;
use ep_core::port::LaneKind;
use ep_core::reference::Weighing;
use ep_core::{Nanos, Rank};

use super::fixture::{self, Verdict, text};
use super::low_latency as low;
use super::low_lost::{persist, survived};
use super::nodes::over;
use crate::backend::{Backend, Requirement};
use crate::harness::{Case, env_number};
use crate::low_latency::scenario::{self as low_scenario, Turn};
use crate::scenario::Scenario;
use crate::zombie::Zombie;

const THROUGHPUT: &[Requirement] = &[Requirement::Suspensions];
const PULLING: &[Requirement] = &[Requirement::Suspensions, Requirement::Incidents, Requirement::Get];
const LOW: &[Requirement] = &[Requirement::Suspensions, Requirement::LowLatency];

pub(super) fn cases<B: Backend>() -> Vec<Case<B>> {
    let case = |name, needs, body| Case { name, needs, body };
    vec![
        case("zombie_in_throughput_mode_harms_nobody", THROUGHPUT, throughput::<B> as fn(&B) -> _),
        case("zombie_that_pulls_and_hears_late_ends_no_call_with_wrong_rows", PULLING, late::<B>),
        case("zombie_in_low_latency_harms_nobody", LOW, low_latency::<B>),
        case("zombie_that_was_masked_in_low_latency_harms_nobody", LOW, masked::<B>),
    ]
}

/// Zombies of most cases.
const USUAL: u64 = 120;

/// Zombies of one case: rank, and verbs before, spread over what a rank does in a run.
fn zombies<B: Backend>(backend: &B, usual: u64, ranks: u32, verbs: u64) -> impl Iterator<Item = (u64, Zombie)> {
    let most = env_number("EP_ZOMBIES").map_or_else(|| backend.seeds(usual), u64::from);
    let first = env_number("EP_SEED").map_or(0, u64::from);
    (first..first + most).map(move |seed| {
        let rank = Rank((seed % u64::from(ranks)) as u32);
        (seed, Zombie { rank, after: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) % verbs })
    })
}

fn throughput<B: Backend>(backend: &B) -> Verdict {
    for (seed, zombie) in zombies(backend, USUAL, 4, 240) {
        let scenario = match seed % 4 {
            0 => fixture::scenario(4, 9),
            1 => fixture::direct(4, 9),
            2 if backend.lacks(Requirement::Get).is_none() => fixture::pulled(4, 9),
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

/// What the others say of the zombie comes later to it than they come together: what it pulls may be overwritten before.
fn late<B: Backend>(backend: &B) -> Verdict {
    for (seed, zombie) in zombies(backend, 6 * USUAL, 3, 120) {
        let rounds = vec![fixture::TURN; 2];
        let scenario = Scenario { seed, rounds, zombie: Some(zombie), ..fixture::pulled(3, 2) };
        let mut setup = scenario.setup().map_err(text)?;
        let by = Nanos(setup.settings.deadline().0 / 40);
        for from in setup.topology.all().filter(|&rank| rank != zombie.rank) {
            let kind = Some(LaneKind::Watch);
            setup = setup.incident(Incident::Delay { from, to: zombie.rank, kind, by, after: 0 });
        }
        scenario.check_in(backend, &setup).map_err(|error| format!("seed {seed}, {zombie:?}: {error}"))?;
    }
    Ok(())
}

fn low_latency<B: Backend>(backend: &B) -> Verdict {
    for (seed, zombie) in zombies(backend, USUAL, 4, 240) {
        let turn = |at: u64| Turn {
            at_experts: (seed + at).is_multiple_of(3),
            ahead: (seed + at).is_multiple_of(2),
            // Of half the tokens results may travel in another form.
            quarters: if at == 1 { 2 } else { 4 },
            ..low::TURN
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
    for (seed, zombie) in zombies(backend, USUAL, 4, 240) {
        let weighing = if seed % 2 == 0 { Weighing::AtSource } else { Weighing::AtExperts };
        let layer = low::layer(4, 6, seed).map_err(text)?;
        let setup = zombie.haunt(&layer.setup);
        let outcomes = backend.run(&setup, async |mut ep| persist(&mut ep, &layer, weighing, 6).await)?;
        survived(&layer, zombie.rank, weighing, outcomes)
            .map_err(|error| format!("seed {seed}, {zombie:?}: {error}"))?;
    }
    Ok(())
}
