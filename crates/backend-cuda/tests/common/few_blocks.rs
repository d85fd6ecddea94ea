//! Low latency needs one running block of each rank, and no more: cases of the suite with one block a rank, and on GPUs with more blocks than run at a
//! time. (`in_turns` has such on the twin.) A block that waited for a peer before all that its launch sends is in the hands of running blocks would stand
//! still until the deadline.
#![allow(unreachable_pub)] // The test targets that hold it are crates of their own.

use ep_conformance::drive::all_of;
use ep_conformance::low_latency::{self, Seen, Weighing, verify};
use ep_conformance::workload::Workload;
use ep_conformance::{Backend, Setup, harness};
use ep_core::reference::World;
use ep_core::{Endpoint as _, Error, Nanos, RankSet, Settings, Shape, Topology};
use ep_cuda::checks::{Checks, Plant};
use libtest_mimic::Trial;

use crate::common::{Blocks, Cuda};

/// Both halves in one launch and apart, units and slots, headers with several shares, every order of rows; within a node and between nodes.
pub const CASES: [&str; 14] = [
    "low_latency_both_forms",
    "low_latency_results_of_small_and_of_large_batches",
    "low_latency_ranks_in_odd_numbers",
    "low_latency_full_batches_and_empty_ones",
    "low_latency_topk_from_1_to_32",
    "low_latency_a_token_that_names_an_expert_twice",
    "low_latency_statistics_count_what_moved",
    "low_latency_two_operations_in_flight",
    "low_latency_many_operations",
    "low_latency_beside_throughput_mode",
    "low_by_source_full_batches_and_empty_ones",
    "low_packed_full_batches_and_empty_ones",
    "low_latency_over_nodes_is_a_full_mesh",
    "low_latency_over_nodes_two_operations_in_flight",
];

/// Time allowed to operations: a busy processor plays all ranks.
pub const DEADLINE: Nanos = Nanos::from_secs(10);

/// Time allowed to those of kernels with a planted fault, which wait for ever.
const SHORT: Nanos = Nanos::from_secs(2);

/// Ranks whose launches of low latency have so many blocks.
pub fn ranks(absent: Option<&'static str>, blocks: u32) -> Cuda {
    Cuda { absent, low: Blocks::Few(blocks), deadline: Some(DEADLINE), ..Cuda::new() }
}

/// Cases on a backend whose ranks have one.
pub fn one<B: Backend>(backend: B) -> Vec<Trial> {
    harness::some("one_block", &CASES, backend)
}

/// Rounds whose dispatch and combine are one launch each, so that who has sent waits in the same launch: batches of so many tokens.
fn rounds<B: Backend>(backend: &B, ranks: u32, tokens: u32) -> Result<(), String> {
    let text = |error: Error| error.to_string();
    let topology = Topology::new(1, ranks).map_err(text)?;
    let shape = Shape::builder().experts(2 * ranks).topk(2).hidden(40).max_tokens(tokens).build().map_err(text)?;
    let world = World::new(shape, topology, RankSet::new()).map_err(text)?;
    let settings = Settings::builder(&shape, &topology).slots(4).low_latency(true);
    // Results travel as units, and in slots.
    for unit_bytes in [u64::from(u32::MAX), 0] {
        let settings = settings.low_latency_unit_bytes(unit_bytes).build().map_err(text)?;
        let batches = Workload::new(shape, vec![tokens; ranks as usize]).seed(unit_bytes).batches().map_err(text)?;
        let setup = Setup::new(shape, topology, 1).map_err(text)?.settings(settings);
        let outcomes = backend.run(&setup, async |mut ep| {
            let batch = &batches[ep.rank().index()];
            let mut seen = Vec::new();
            for weighing in WEIGHINGS {
                seen.push(low_latency::round(&mut ep, &world, batch, weighing).await?);
            }
            Ok(seen)
        })?;
        let outcomes = outcomes.into_iter().collect::<Option<Vec<_>>>().ok_or("a rank did not finish")?;
        let seen = all_of(outcomes)?;
        for (turn, weighing) in WEIGHINGS.into_iter().enumerate() {
            let seen: Vec<Seen> = seen.iter().map(|seen| seen[turn].clone()).collect();
            verify::run(&world, &batches, weighing, &seen).map_err(|wrong| wrong.to_string())?;
        }
    }
    Ok(())
}

/// Operations of each bank.
const WEIGHINGS: [Weighing; 3] = [Weighing::AtSource, Weighing::AtExperts, Weighing::AtSource];

/// Launches of so many blocks that do not all run at a time end well, and not where a block leaves the shares of those that have not begun.
pub fn shares_are_taken<B: Backend>(
    (ranks, tokens): (u32, u32),
    with: impl Fn(Option<Checks>, Nanos) -> B,
) -> Result<(), String> {
    rounds(&with(None, DEADLINE), ranks, tokens)?;
    let checks = |plant| Some(Checks { plant, ..Checks::default() });
    rounds(&with(checks(None), DEADLINE), ranks, tokens).map_err(|error| format!("without the fault: {error}"))?;
    match rounds(&with(checks(Some(Plant::LowSharesLeft)), SHORT), ranks, tokens) {
        Ok(()) => Err("shares that nobody takes went unnoticed".into()),
        Err(error) if error.contains("waited") => Ok(()),
        Err(error) => Err(format!("caught by `{error}`, expected a wait")),
    }
}

/// Tokens of each rank: more than GPUs have multiprocessors.
const MANY: u32 = 300;

/// Twice as many blocks as a GPU runs at a time, on so many GPUs. Each rank has one of its own: where they share one, blocks of one rank that wait may leave
/// no room for another's.
pub fn waves<B: Backend>(absent: Option<&'static str>, gpus: usize, on: impl Fn(Cuda) -> B + Send + 'static) -> Trial {
    let name = "waves::shares_of_blocks_that_have_not_begun_are_taken";
    harness::limited(name.into(), absent, move || {
        shares_are_taken((gpus.clamp(1, 4) as u32, MANY), |checks, deadline| {
            on(Cuda { checks, deadline: Some(deadline), low: Blocks::Waves(2), ..Cuda::new() })
        })
    })
}
