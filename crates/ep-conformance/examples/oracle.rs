//! A batch from a seed, what the oracle says becomes of it, and how a difference of one bit is reported.
//!
//! `cargo run -p ep-conformance --example oracle`
//!
//! A backend's tests do the same with what its ranks really saw; here the oracle itself plays the ranks.

use ep_conformance::verify::{self, Observed, bytes_of};
use ep_conformance::workload::{Batch, Workload};
use ep_core::reference::{self, Returned, World, apply_experts};
use ep_core::{Rank, RankSet, Shape, Topology};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let shape = Shape::builder().experts(16).topk(4).hidden(32).max_tokens(64).build()?;
    let world = World::new(shape, Topology::new(1, 4)?, RankSet::new())?;
    // Real routers are uneven, ranks may have no tokens, choices may be dropped.
    let work = Workload::new(shape, vec![64, 0, 17, 40]).kind("skewed:1.2".parse()?).drop(0.1).seed(3);
    let batches = work.batches()?;

    let mut observed = play(&world, &batches);
    for (rank, seen) in observed.iter().enumerate() {
        println!("rank {rank}: {} rows, choices for its experts {:?}", seen.source_rank.len(), seen.expert_counts);
    }
    let compared = verify::run(&world, &batches, &observed)?;
    println!("equal: {} rows, {} values, {} weights", compared.rows, compared.values, compared.weights);

    observed[2].combined_x[70] ^= 1;
    let mismatch = verify::run(&world, &batches, &observed).expect_err("a bit has changed");
    println!("after one bit was turned: {mismatch}");
    Ok(())
}

/// Ranks that do exactly what the oracle says.
fn play(world: &World, batches: &[Batch]) -> Vec<Observed> {
    let inputs: Vec<_> = batches.iter().map(Batch::reference).collect();
    let received = reference::dispatch(world, &inputs);
    let results: Vec<_> = (0..).map(Rank).zip(&received).map(|(rank, got)| apply_experts(world, rank, got)).collect();
    let returned: Vec<_> = received
        .iter()
        .zip(&results)
        .zip(batches)
        .map(|((got, y), batch)| Returned {
            y,
            topk_weights: Some(&got.topk_weights),
            tokens: batch.tokens as usize,
            bias: [None; 2],
        })
        .collect();
    let combined = reference::combine(world, &received, &returned);
    received
        .into_iter()
        .zip(combined)
        .map(|(got, back)| Observed {
            recv_x: bytes_of(&got.x),
            source_rank: got.source_rank,
            source_token: got.source_token,
            topk_idx: got.topk_idx,
            topk_weights: got.topk_weights,
            expert_counts: got.expert_counts,
            combined_x: bytes_of(&back.x),
            combined_topk_weights: back.topk_weights,
        })
        .collect()
}
