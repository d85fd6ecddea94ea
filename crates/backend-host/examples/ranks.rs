//! Dispatch and combine on the CPUs of this host.
//!
//! `cargo run -p ep-host --example ranks` does it with four threads; under a launcher, for instance
//! `moexpress launch -n 4 -- target/debug/examples/ranks`, each process is one rank.

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use ep_bootstrap::{Environment, EnvironmentError, Member, Secret, Settings};
use ep_core::engine::{Combine, Routing};
use ep_core::{Endpoint, Shape, Topology};
use ep_host::Cluster;

const HIDDEN: u32 = 16;
const TOKENS: u32 = 3;
/// 1.0 in bf16, little-endian.
const ONE: [u8; 2] = [0x80, 0x3f];

fn main() -> Result<(), Box<dyn Error>> {
    match Environment::detect() {
        Ok(environment) => process(&environment),
        Err(EnvironmentError::NotLaunched) => threads(Topology::new(1, 4)?),
        Err(error) => Err(error.into()),
    }
}

/// One expert on each rank; a token chooses two.
fn shape(topology: Topology) -> Result<Shape, ep_core::Error> {
    Shape::builder().experts(topology.ranks()).topk(topology.ranks().min(2)).hidden(HIDDEN).max_tokens(TOKENS).build()
}

fn threads(topology: Topology) -> Result<(), Box<dyn Error>> {
    let cluster = Cluster::builder(topology).build(shape(topology)?)?;
    for report in cluster.run(async |mut ep| layer(&mut ep).await)? {
        println!("{}", report?);
    }
    Ok(())
}

fn process(environment: &Environment) -> Result<(), Box<dyn Error>> {
    let topology = environment.topology()?;
    let member = Arc::new(Member::join(Settings::of(environment).secret(Secret::detect()?))?);
    let mut ep = Cluster::builder(topology).join(shape(topology)?, &member)?;
    println!("{}", ep_host::block_on(layer(&mut ep))?);
    // Rank 0 holds the meeting place, so nobody leaves before all are done.
    Ok(member.barrier(Duration::from_secs(10))?)
}

/// Sends tokens of ones to the experts of this rank and the next, which return what they get.
async fn layer<E: Endpoint>(ep: &mut E) -> Result<String, ep_core::Error> {
    let (me, ranks, topk) = (ep.rank().0, ep.topology().ranks(), ep.shape().topk());
    let x = ep.rows(&ONE.repeat((TOKENS * HIDDEN) as usize), TOKENS)?;
    let choices = (0..TOKENS).flat_map(|_| (0..topk).map(|choice| i64::from((me + choice) % ranks)));
    let topk_idx = ep.array(&choices.collect::<Vec<i64>>())?;
    let got = ep.dispatch(&x, &Routing::TopK { topk_idx, topk_weights: None }).await?;
    let sources = ep.values(&got.source_rank)?;
    let back = ep.combine(&got.x, &got.handle, Combine::default()).await?;
    let sums = ep.bytes(&back.x)?;
    // 2.0 in bf16 has the next exponent.
    let expected = if topk == 2 { [0x00, 0x40] } else { ONE };
    assert!(sums.chunks_exact(2).all(|sum| sum == expected), "one from each rank that got the token");
    Ok(format!("rank {me} got {} rows of ranks {sources:?}; its own came back times {topk}", got.rows))
}
