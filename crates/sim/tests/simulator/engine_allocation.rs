//! Rows cost no allocations: an operation allocates for its roles, its plan and its results, however many rows it moves.

use crate::counting;
use ep_core::engine::{Combine, Engine, Routing};
use ep_core::{Endpoint, Placement, Settings, Shape, Topology};
use ep_sim::{Cluster, Machine};

const RANKS: u32 = 4;
/// Tokens of the largest batch.
const MANY: u32 = 1000;
/// Queues of the simulator that may still grow when they meet more at a time than before.
const SLACK: u64 = 8;

fn shape() -> Shape {
    Shape::builder().experts(8).topk(2).hidden(64).max_tokens(MANY).build().unwrap()
}

/// Two rounds with the most tokens, to begin with, then one with `tokens`: its allocations on all ranks together.
fn allocations(tokens: u32, placement: Placement, pull: bool) -> u64 {
    let topology = Topology::new(1, RANKS).unwrap();
    let settings = Settings::builder(&shape(), &topology).placement(placement).arena_bytes(8 << 20);
    let settings = settings.slots(16).build().unwrap();
    let cluster = Cluster::builder(topology).settings(settings).race_tracking(false).seed(3).build(shape()).unwrap();
    let run = cluster.run(async |mut ep| {
        round(&mut ep, MANY, pull).await;
        round(&mut ep, MANY, pull).await;
        let before = counting::allocations();
        round(&mut ep, tokens, pull).await;
        [before, counting::allocations()]
    });
    let counts = run.unwrap().finished();
    let (before, after) = (counts.iter().map(|[before, _]| before).min(), counts.iter().map(|[_, after]| after).max());
    after.unwrap() - before.unwrap()
}

async fn round(ep: &mut Engine<Machine>, tokens: u32, pull: bool) {
    let row = shape().row_bytes() as usize;
    let x = ep.rows(&vec![1; tokens as usize * row], tokens).unwrap();
    let topk_idx = (0..i64::from(tokens)).flat_map(|token| [token % 8, (token + 1 + token / 8 % 7) % 8]).collect();
    let got = ep.dispatch(&x, &Routing::TopK { topk_idx, topk_weights: None }).await.unwrap();
    let rows = vec![1; got.rows as usize * row];
    let y = if pull {
        let mut y = ep.output(&got.handle).expect("room in the arena");
        ep.store(&mut y, 0, &rows).unwrap();
        y
    } else {
        ep.rows(&rows, got.rows).unwrap()
    };
    ep.combine(&y, &got.handle, Combine::default()).await.unwrap();
}

#[test]
fn rows_cost_no_allocations() {
    for (placement, pull) in
        [(Placement::Ring, false), (Placement::Direct, false), (Placement::Ring, true), (Placement::Pulled, false)]
    {
        let [few, many] = [100, MANY].map(|tokens| allocations(tokens, placement, pull));
        assert!(few > 0, "nothing was counted");
        assert!(many <= few + SLACK, "{placement:?}, pull {pull}: {few} for 100 tokens, {many} for {MANY}");
    }
}
