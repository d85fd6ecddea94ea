//! One ring on the machine contract alone: rank 0 sends messages to rank 1, on any machine.

use ep_core::machine::{Machine, Opening};
use ep_core::port::{Cell, Counter, Duty, LaneId, LaneKind, Need, Port as _, Role, Ticket};
use ep_core::ring::{Consumer, Producer};
use ep_core::{Fault, Nanos, Rank};

const SENDER: Rank = Rank(0);
const RECEIVER: Rank = Rank(1);
const DATA: LaneKind = LaneKind::Data(0);
const CREDIT: LaneKind = LaneKind::Credit(0);
const TAIL: Cell = Cell::new(SENDER, DATA, Counter::Tail);
const HEAD: Cell = Cell::new(RECEIVER, CREDIT, Counter::Head);

/// Messages that are sent in turn.
pub const MESSAGES: usize = 64;

/// They lie ready, as rows do: a message that was written a moment before it is copied would measure how a core forwards
/// small stores to large loads.
pub fn messages(bytes: usize) -> Vec<Vec<u8>> {
    (0..MESSAGES).map(|number| vec![number as u8; bytes]).collect()
}

/// Plays the part of the machine's rank: `count` messages of `bytes` bytes, at most a slot, through the first near ring as the
/// layout's settings cut it. A machine's rings are fresh once: it plays only one part, once.
///
/// # Errors
/// Those of the verbs.
///
/// # Panics
/// When a message is not the one due, or a peer counts wrong.
pub async fn play<M: Machine>(machine: &M, count: u64, bytes: usize) -> Result<(), Fault> {
    match machine.rank() {
        SENDER => send(machine, count, bytes).await,
        _ => receive(machine, count, bytes).await,
    }
}

/// Writes to every page of the own rings and staging memory.
///
/// # Panics
/// Never: all of it lies in the window.
pub fn touch<M: Machine>(machine: &M) {
    let (mut port, layout) = (open(machine, Duty::Receiver), machine.layout());
    let rings = layout.settings().rings();
    let peer = Rank(1 - machine.rank().0);
    for slot in 0..rings.near.slots {
        port.write(layout.ring_slot(peer, &rings, 0, slot).offset, &[0; 8]).expect("a slot of the window");
    }
    for slot in 0..rings.near.staging_slots() {
        port.write(layout.staging_slot(peer, &rings, 0, slot).offset, &[0; 8]).expect("a slot of the window");
    }
}

fn open<M: Machine>(machine: &M, duty: Duty) -> M::Port {
    let deadline = machine.now() + Nanos::from_secs(60);
    machine.port(Opening { role: Role::new(duty), op: 1, generation: 1, deadline })
}

async fn send<M: Machine>(machine: &M, count: u64, bytes: usize) -> Result<(), Fault> {
    let mut port = open(machine, Duty::Sender);
    let layout = machine.layout();
    let rings = layout.settings().rings();
    let lane = LaneId { peer: RECEIVER, kind: DATA };
    let messages = messages(bytes);
    let mut ring = Producer::new(rings.near);
    let mut staged = vec![Ticket(0); rings.near.staging_slots() as usize];
    let mut staging = 0;
    for number in 0..count {
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
        port.flush(lane, staged[staging]).await?;
        let from = layout.staging_slot(RECEIVER, &rings, 0, staging as u32).offset.span(bytes as u64);
        port.write(from.offset, &messages[number as usize % MESSAGES])?;
        staged[staging] = port.put(lane, from, layout.ring_slot(SENDER, &rings, 0, slot).offset).await?;
        staging = if staging + 1 == staged.len() { 0 } else { staging + 1 };
        if let Some(tail) = ring.push() {
            port.publish(lane, TAIL, tail).await?;
        }
    }
    if let Some(tail) = ring.pending() {
        port.publish(lane, TAIL, tail).await?;
    }
    let last = staged.into_iter().max().unwrap_or_default();
    port.flush(lane, last).await
}

async fn receive<M: Machine>(machine: &M, count: u64, bytes: usize) -> Result<(), Fault> {
    let mut port = open(machine, Duty::Receiver);
    let layout = machine.layout();
    let rings = layout.settings().rings();
    let lane = LaneId { peer: SENDER, kind: CREDIT };
    let mut message = vec![0u8; bytes];
    let mut ring = Consumer::new(rings.near);
    for number in 0..count as usize {
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
        port.read(layout.ring_slot(SENDER, &rings, 0, slot).offset, &mut message)?;
        assert_eq!(usize::from(message[0]), number % MESSAGES, "message {number} is another");
        if let Some(head) = ring.pop() {
            port.publish(lane, HEAD, head).await?;
        }
    }
    Ok(())
}
