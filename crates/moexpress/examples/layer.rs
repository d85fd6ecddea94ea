//! One mixture-of-experts layer on four simulated ranks: dispatch, experts, combine.
//!
//! `cargo run -p moexpress --example layer`
//!
//! Expert `e` multiplies by `e + 1`. Every rank has three tokens of ones; token `t` of rank `r` chooses experts
//! `(r + t) mod 8` and `(r + t + 3) mod 8` with weight 1/2 each, so what comes back is known.

use moexpress::engine::{Combine, Received, Routing};
use moexpress::{Endpoint, Error, Shape, Topology, sim};

const EXPERTS: u32 = 8;
const HIDDEN: usize = 16;
const TOKENS: u32 = 3;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let shape = Shape::builder().experts(EXPERTS).topk(2).hidden(HIDDEN as u32).max_tokens(TOKENS).build()?;
    let cluster = sim::Cluster::builder(Topology::new(1, 4)?).seed(7).build(shape)?;
    let run = cluster.run(async |mut ep| layer(&mut ep).await)?;
    println!("{} events in the simulated cluster", run.events);
    for (rank, sums) in run.finished().into_iter().enumerate() {
        let sums = sums?;
        println!("rank {rank}: its tokens came back times {sums:?}");
        for (token, sum) in sums.into_iter().enumerate() {
            let [a, b] = choices(rank as u32, token as u32);
            assert_eq!(sum, (factor(a) + factor(b)) / 2.0);
        }
    }
    Ok(())
}

/// What one rank does.
async fn layer<E: Endpoint>(ep: &mut E) -> Result<Vec<f32>, Error> {
    let me = ep.rank().0;
    let x = ep.rows(&bf16(1.0).repeat(TOKENS as usize * HIDDEN), TOKENS)?;
    let chosen: Vec<i64> = (0..TOKENS).flat_map(|token| choices(me, token)).map(i64::from).collect();
    let topk_weights = Some(ep.array(&vec![0.5f32; chosen.len()])?);
    let topk_idx = ep.array(&chosen)?;

    let got = ep.dispatch(&x, &Routing::TopK { topk_idx, topk_weights }).await?;
    let y = experts(ep, &got)?;
    let y = ep.rows(&y, got.rows)?;
    let back = ep.combine(&y, &got.handle, Combine::default()).await?;
    Ok(ep.bytes(&back.x)?.chunks_exact(2 * HIDDEN).map(|row| f32_of(&row[..2])).collect())
}

/// For each received row the weighted sum over this rank's experts that it is for; combine adds up the ranks.
fn experts<E: Endpoint>(ep: &E, got: &Received<E>) -> Result<Vec<u8>, Error> {
    let (topk, local) = (ep.shape().topk() as usize, EXPERTS / ep.topology().ranks());
    let (rows, idx, weights) = (ep.bytes(&got.x)?, ep.values(&got.topk_idx)?, ep.values(&got.topk_weights)?);
    let scale = |row: usize| -> f32 {
        let choices = idx.iter().zip(&weights).skip(row * topk).take(topk);
        let here = choices.filter(|(expert, _)| **expert >= 0);
        here.map(|(expert, weight)| weight * factor(ep.rank().0 * local + *expert as u32)).sum()
    };
    let elements = rows.chunks_exact(2).enumerate();
    Ok(elements.flat_map(|(at, element)| bf16(scale(at / HIDDEN) * f32_of(element))).collect())
}

fn choices(rank: u32, token: u32) -> [u32; 2] {
    [(rank + token) % EXPERTS, (rank + token + 3) % EXPERTS]
}

fn factor(expert: u32) -> f32 {
    (expert + 1) as f32
}

/// The upper half of an f32: exact for the small numbers here.
fn bf16(value: f32) -> [u8; 2] {
    ((value.to_bits() >> 16) as u16).to_le_bytes()
}

fn f32_of(element: &[u8]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes([element[0], element[1]])) << 16)
}
