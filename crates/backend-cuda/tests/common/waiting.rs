//! A rank that only waits while the link to the other node is lost: its proxy's probes find that out.
#![allow(unreachable_pub)] // The test targets that hold it are crates of their own.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ep_conformance::Setup;
use ep_conformance::drive::{Round, round};
use ep_conformance::workload::{Batch, Workload};
use ep_core::reference::World;
use ep_core::{Endpoint as _, Error, Fault, LaneCause, Nanos, Rank, RankSet, Settings, Shape, Topology};
use ep_loop::Loop;
use libtest_mimic::Trial;

use crate::common;

const DEADLINE: Nanos = Nanos::from_secs(60);
/// Waits are suspected after three quarters of the deadline: what is named long before was found by a probe.
const SOON: Duration = Duration::from_secs(20);

/// Two nodes of one rank.
fn setup() -> Result<(Setup, World, Vec<Batch>), Error> {
    let topology = Topology::new(2, 1)?;
    let shape = Shape::builder().experts(8).topk(4).hidden(32).max_tokens(16).build()?;
    let settings = Settings::builder(&shape, &topology).slots(2).deadline(DEADLINE).build()?;
    let batches = Workload::new(shape, vec![9; 2]).seed(1).batches()?;
    let world = World::new(shape, topology, RankSet::new())?;
    Ok((Setup::new(shape, topology, 1)?.settings(settings), world, batches))
}

/// Rank 1 does nothing; rank 0 has posted its counts, and they have arrived, before the link is lost.
fn a_lost_link() -> Result<(), String> {
    let text = |error: Error| error.to_string();
    let (setup, world, batches) = setup().map_err(text)?;
    let network = Loop::new();
    let builder = common::builder(&setup, None, None).map_err(text)?.far(network.clone());
    let cluster = builder.build(setup.shape).map_err(text)?;
    let over = AtomicBool::new(false);
    let outcomes = common::run_on(cluster, &setup, async |mut ep| {
        let began = Instant::now();
        if ep.rank() == Rank(0) {
            let failed = round(&mut ep, &world, &batches[0], &Round::default()).await.err();
            over.store(true, Ordering::Relaxed);
            return Some((failed, began.elapsed()));
        }
        thread::sleep(Duration::from_secs(1));
        network.lose(Rank(0), Rank(1));
        network.lose(Rank(1), Rank(0));
        // It does not leave before rank 0 has failed.
        while !over.load(Ordering::Relaxed) && began.elapsed() < Duration::from_nanos(DEADLINE.0) {
            thread::sleep(Duration::from_millis(10));
        }
        None
    })?;
    let Some((failed, took)) = outcomes.into_iter().next().flatten().flatten() else {
        return Err("rank 0 did not finish".to_owned());
    };
    match failed.as_ref().and_then(Error::failure).map(|failure| failure.fault) {
        Some(Fault::LaneBroken { lane, cause: LaneCause::NoAnswer }) if lane.peer == Rank(1) && took < SOON => Ok(()),
        _ => Err(format!("after {took:?}: {failed:?}")),
    }
}

/// All of it. `absent`: why nothing runs here.
pub fn trials(absent: Option<&'static str>) -> Vec<Trial> {
    const NAME: &str = "waiting::a_link_that_is_lost_while_a_rank_only_waits_is_found_by_a_probe";
    vec![match absent {
        Some(reason) => Trial::test(NAME, move || Err(reason.into())).with_ignored_flag(true),
        None => Trial::test(NAME, || Ok(a_lost_link()?)),
    }]
}
