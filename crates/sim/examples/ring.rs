//! Two ranks, one ring: rank 0 sends rows of 14 KiB to rank 1, on the machine contract alone, under a few adversaries.
//!
//! `cargo run --release -p ep-sim --example ring -- [rows] [untracked]`; `untracked` switches race tracking off.

use std::error::Error;
use std::time::Instant;

use ep_conformance::ring::{RECEIVER, Receiver, SENDER, Sender};
use ep_core::machine::Machine as _;
use ep_core::{Fault, Shape, Topology};
use ep_sim::{Cluster, Machine};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let rows = arguments.first().map_or(Ok(2_000), |rows| rows.parse())?;
    let tracked = !arguments.iter().any(|argument| argument == "untracked");
    let shape = Shape::builder().experts(2).topk(1).hidden(7168).build()?;
    for seed in 0..6 {
        let cluster = Cluster::builder(Topology::new(1, 2)?).seed(seed).race_tracking(tracked).build(shape)?;
        let started = Instant::now();
        let run = cluster.run_machines(async |machine: Machine| match machine.rank() {
            SENDER => send(&machine, rows).await,
            _ => receive(&machine, rows).await,
        })?;
        let took = started.elapsed();
        let events = run.events;
        let bytes = run.finished().into_iter().collect::<Result<Vec<u64>, Fault>>()?[RECEIVER.index()];
        println!(
            "seed {seed}: {rows} rows in {took:.1?}, {:.2} GB/s, {events} events, {:.0} ns each",
            bytes as f64 / took.as_secs_f64() / 1e9,
            took.as_nanos() as f64 / events as f64,
        );
    }
    Ok(())
}

/// Fills the ring; returns the bytes sent.
async fn send(machine: &Machine, rows: u64) -> Result<u64, Fault> {
    let mut row = vec![0u8; machine.layout().row().wire_bytes() as usize];
    let mut sender = Sender::new(machine);
    for number in 0..rows {
        row[..8].copy_from_slice(&number.to_le_bytes());
        sender.send(&row).await?;
    }
    sender.finish().await?;
    Ok(rows * row.len() as u64)
}

/// Drains the ring; returns the bytes received.
async fn receive(machine: &Machine, rows: u64) -> Result<u64, Fault> {
    let mut row = vec![0u8; machine.layout().row().wire_bytes() as usize];
    let mut receiver = Receiver::new(machine);
    for number in 0..rows {
        receiver.receive(&mut row).await?;
        assert_eq!(row[..8], number.to_le_bytes(), "row {number} is another");
    }
    receiver.finish().await?;
    Ok(rows * row.len() as u64)
}
