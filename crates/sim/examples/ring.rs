//! Two ranks, one ring: rank 0 sends rows of 14 KiB to rank 1, on the machine contract alone, under a few adversaries.
//!
//! `cargo run --release -p ep-sim --example ring -- [rows] [untracked]`; `untracked` switches race tracking off.

use std::error::Error;
use std::time::Instant;

use ep_core::machine::{Machine as _, Opening};
use ep_core::port::{Cell, Counter, Duty, LaneId, LaneKind, Need, Port as _, Role, Ticket};
use ep_core::ring::{Consumer, Producer};
use ep_core::{Fault, Nanos, Rank, Shape, Topology};
use ep_sim::{Cluster, Machine};

const SENDER: Rank = Rank(0);
const RECEIVER: Rank = Rank(1);
const DATA: LaneKind = LaneKind::Data(0);
const CREDIT: LaneKind = LaneKind::Credit(0);
const TAIL: Cell = Cell::new(SENDER, DATA, Counter::Tail);
const HEAD: Cell = Cell::new(RECEIVER, CREDIT, Counter::Head);

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

fn opening(machine: &Machine, duty: Duty) -> Opening {
    let deadline = machine.now() + Nanos::from_secs(60);
    Opening { role: Role::new(duty), op: 1, generation: 1, deadline }
}

/// Fills the ring; returns the bytes sent.
async fn send(machine: &Machine, rows: u64) -> Result<u64, Fault> {
    let mut port = machine.port(opening(machine, Duty::Sender));
    let layout = machine.layout();
    let rings = layout.settings().rings();
    let lane = LaneId { peer: RECEIVER, kind: DATA };
    let mut row = vec![0u8; layout.row().wire_bytes() as usize];
    let mut ring = Producer::new(rings.near);
    let mut staged = vec![Ticket(0); rings.near.staging_slots() as usize];
    for number in 0..rows {
        let slot = loop {
            if let Some(slot) = ring.slot() {
                break slot;
            }
            if let Some(tail) = ring.pending() {
                port.publish(lane, TAIL, tail).await?;
            }
            port.wait_any(&[Need { cell: HEAD, at_least: ring.awaited_head() }]).await?;
            ring.saw_head(port.peek(HEAD)).expect("the receiver counts right");
        };
        let staging = (number % staged.len() as u64) as usize;
        port.flush(lane, staged[staging]).await?;
        row[..8].copy_from_slice(&number.to_le_bytes());
        let from = layout.staging_slot(RECEIVER, &rings, 0, staging as u32);
        port.write(from.offset, &row)?;
        staged[staging] = port.put(lane, from, layout.ring_slot(SENDER, &rings, 0, slot).offset).await?;
        if let Some(tail) = ring.push() {
            port.publish(lane, TAIL, tail).await?;
        }
    }
    if let Some(tail) = ring.pending() {
        port.publish(lane, TAIL, tail).await?;
    }
    port.flush(lane, Ticket(rows)).await?;
    Ok(rows * row.len() as u64)
}

/// Drains the ring; returns the bytes received.
async fn receive(machine: &Machine, rows: u64) -> Result<u64, Fault> {
    let mut port = machine.port(opening(machine, Duty::Receiver));
    let layout = machine.layout();
    let rings = layout.settings().rings();
    let lane = LaneId { peer: SENDER, kind: CREDIT };
    let mut row = vec![0u8; layout.row().wire_bytes() as usize];
    let mut ring = Consumer::new(rings.near);
    for number in 0..rows {
        let slot = loop {
            if let Some(slot) = ring.slot() {
                break slot;
            }
            if let Some(head) = ring.pending() {
                port.publish(lane, HEAD, head).await?;
            }
            port.wait_any(&[Need { cell: TAIL, at_least: ring.awaited_tail() }]).await?;
            ring.saw_tail(port.peek(TAIL)).expect("the sender counts right");
        };
        port.read(layout.ring_slot(SENDER, &rings, 0, slot).offset, &mut row)?;
        assert_eq!(row[..8], number.to_le_bytes(), "row {number} is another");
        if let Some(head) = ring.pop() {
            port.publish(lane, HEAD, head).await?;
        }
    }
    Ok(rows * row.len() as u64)
}
