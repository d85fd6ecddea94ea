//! Rows to a peer stripe over lanes: with k channels k queue pairs to it carry them, each with a cell and a poster of its own.
#![allow(unreachable_pub)] // The test targets that hold it are crates of their own.

use ep_conformance::Setup;
use ep_conformance::drive::{Round, round};
use ep_conformance::workload::{Batch, Workload};
use ep_core::reference::World;
use ep_core::{Endpoint as _, Error, Rank, RankSet, Settings, Shape, Topology};
use libtest_mimic::Trial;

use crate::common::run_on;
use crate::posted::{Adapters, Cards};

/// Of each rank.
const TOKENS: u32 = 64;

/// A job of two nodes in which each row goes to the other node, a put and a publish each.
fn job(channels: u32) -> Result<(Setup, Vec<Batch>, World), Error> {
    let topology = Topology::new(2, 1)?;
    let shape = Shape::builder().experts(2).topk(2).hidden(32).max_tokens(TOKENS).build()?;
    let settings = Settings::builder(&shape, &topology).channels(channels).slots(4).chunk(1).credit(1);
    let setup = Setup::new(shape, topology, 1)?.settings(settings.build()?);
    let batches = Workload::new(shape, vec![TOKENS; 2]).seed(1).batches()?;
    let world =
        World::new(shape, topology, RankSet::new()).map_err(|error| Error::broken("the world", error, "none"))?;
    Ok((setup, batches, world))
}

fn rows_stripe(cards: Cards) -> Result<(), String> {
    for channels in [1, 4, 8] {
        let (setup, batches, world) = job(channels).map_err(|error| error.to_string())?;
        let adapters = Adapters::new(&setup, cards)?;
        let seen = run_on(adapters.cluster(&setup)?, &setup, async |mut ep| {
            let me = ep.rank();
            let ran = round(&mut ep, &world, &batches[me.index()], &Round::default()).await;
            ran.map(|_| adapters.fabric().card(me.index()).queue_pairs()).map_err(|error| error.to_string())
        })?;
        for (rank, pairs) in (0..).map(Rank).zip(seen) {
            let mut elements: Vec<u64> =
                pairs.ok_or("a rank has not finished")??.iter().map(|pair| pair.produced).collect();
            elements.sort_unstable_by(|a, b| b.cmp(a));
            // There and back: a put and a publish of each row. Of a lane of credits only the publishes.
            let of_each = u64::from(2 * 2 * TOKENS / channels);
            let busy = elements.iter().filter(|&&elements| elements >= of_each).count();
            if busy != channels as usize {
                return Err(format!(
                    "rank {rank}, {channels} channels: {busy} lanes carry rows, of {elements:?} elements"
                ));
            }
        }
    }
    Ok(())
}

/// Called `NAME::...`. `absent`: why nothing runs here.
pub fn trial(name: &str, cards: Cards, absent: Option<&'static str>) -> Trial {
    let name = format!("{name}::rows_stripe_over_as_many_lanes_as_there_are_channels");
    match absent {
        Some(reason) => Trial::test(name, move || Err(reason.into())).with_ignored_flag(true),
        None => Trial::test(name, move || rows_stripe(cards).map_err(Into::into)),
    }
}
