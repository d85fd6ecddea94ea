//! Two nodes on one machine, with a network made of software between them.
//!
//! `cargo run -p ep-host --example nodes` dispatches the same rows over networks of three speeds, then cuts one off.

use std::error::Error;
use std::time::{Duration, Instant};

use ep_core::engine::Routing;
use ep_core::{Endpoint, Nanos, Rank, Settings, Shape, Topology};
use ep_host::Cluster;
use ep_loop::Loop;

const TOKENS: u32 = 64;
const HIDDEN: u32 = 1024;

fn main() -> Result<(), Box<dyn Error>> {
    let unlimited = Loop::new().latency(Duration::from_micros(2))?;
    for (rate, network) in [
        ("as fast as cores copy", unlimited.clone()),
        ("20 MB/s a rank", unlimited.clone().bytes_per_second(20_000_000)?),
        ("2 MB/s a rank", unlimited.bytes_per_second(2_000_000)?),
    ] {
        let slowest = dispatch(network, |_| ())?.into_iter().max().unwrap_or_default();
        println!("{rate}: a dispatch of {TOKENS} tokens took {slowest:.1?}");
    }
    // What rank 0 posts to its peer on the other node arrives no more: its operation ends, and names it.
    match dispatch(Loop::new(), |network| network.lose(Rank(0), Rank(2))) {
        Err(error) => println!("a lost lane: {error}"),
        Ok(_) => return Err("a dispatch over a lost lane succeeded".into()),
    }
    Ok(())
}

/// How long each rank's dispatch took, over this network with what was planted there.
fn dispatch(network: Loop, plant: impl Fn(&Loop)) -> Result<Vec<Duration>, Box<dyn Error>> {
    let topology = Topology::new(2, 2)?;
    let shape = Shape::builder().experts(4).topk(2).hidden(HIDDEN).max_tokens(TOKENS).build()?;
    let settings = Settings::builder(&shape, &topology).deadline(Nanos::from_millis(5000)).build()?;
    let cluster = Cluster::builder(topology).settings(settings).far(network.clone()).build(shape)?;
    plant(&network);
    let took = cluster.run(async |mut ep| {
        // Token i chooses expert i and the one after: half of all rows go to the other node.
        let experts: Vec<i64> = (0..i64::from(TOKENS)).flat_map(|token| [token % 4, (token + 1) % 4]).collect();
        let (x, topk_idx) = (ep.rows(&vec![0; (TOKENS * HIDDEN * 2) as usize], TOKENS)?, ep.array(&experts)?);
        let began = Instant::now();
        ep.dispatch(&x, &Routing::TopK { topk_idx, topk_weights: None }).await?;
        Ok::<_, ep_core::Error>(began.elapsed())
    })?;
    Ok(took.into_iter().collect::<Result<_, _>>()?)
}
