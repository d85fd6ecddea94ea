//! Who gets which row at which place, and how a window is cut: the pure part of the protocol, on a routing small enough
//! to check by hand.
//!
//! `cargo run -p ep-core --example plan`

use ep_core::layout::Layout;
use ep_core::plan::{Exchange, Plan, TopK};
use ep_core::{Error, Rank, RankSet, Settings, Shape, Topology};

fn main() -> Result<(), Error> {
    // Three ranks with two experts each: expert e lives on rank e / 2.
    let topology = Topology::new(1, 3)?;
    let shape = Shape::builder().experts(6).topk(2).hidden(64).max_tokens(4).build()?;
    let batches: [&[i64]; 3] = [
        &[0, 2, 1, 0, 5, -1], // three tokens of rank 0; the last one's second choice is dropped
        &[4, 5],              // one token of rank 1, both choices on rank 2
        &[3, 0, 2, 4],        // two tokens of rank 2
    ];
    let nobody_masked = RankSet::new();
    let plans: Vec<Plan> = batches
        .iter()
        .map(|topk_idx| Plan::of_topk(&shape, topology.ranks(), &nobody_masked, TopK { topk_idx }))
        .collect::<Result<_, _>>()?;

    // What the ranks tell each other before rows move. (The experts' counts of rank 0 are those it receives.)
    let rows = plans.iter().flat_map(|plan| plan.rows().to_vec()).collect();
    let tokens = plans.iter().map(Plan::tokens).collect();
    let local = shape.local_experts(topology.ranks())? as usize;
    let experts = (0..local).map(|expert| plans.iter().map(|plan| plan.experts()[expert]).sum()).collect();
    let exchange = Exchange::new(rows, tokens, experts)?;

    println!("source  token  goes to  position  lands in row");
    for (source, plan) in (0..).map(Rank).zip(&plans) {
        for token in 0..plan.tokens() {
            for &(to, position) in plan.reached(token) {
                let row = exchange.first_row(source, to) + position;
                println!("{source:>6}  {token:>5}  {:>7}  {position:>8}  {row:>12}", format!("rank {to}"));
            }
        }
    }
    for rank in topology.all() {
        println!("rank {rank} receives {} rows", exchange.received(rank));
    }
    assert_eq!(exchange.received(Rank(0)), 3, "token 1 of rank 0 chose both experts of rank 0 and travels once");

    let layout = Layout::new(&shape, &topology, &Settings::auto(&shape, &topology))?;
    println!("\nevery rank's window, {} bytes:", layout.window_bytes());
    for region in layout.regions() {
        println!("{:>8}  {:>7} bytes  {}", region.span.offset.0, region.span.len, region.name);
    }
    Ok(())
}
