//! What cells order, under every order of threads and every value that a load may see: the verbs as they are, on memory that loom
//! watches. An access to a slot that no publish and wait order after the last one ends a test.
//!
//! `RUSTFLAGS="--cfg ep_loom" cargo test --release -p ep-host --test ordering --target-dir target/loom`
#![cfg(ep_loom)]

use ep_core::machine::{Machine as _, Opening};
use ep_core::port::{Cell, Counter, Duty, LaneId, LaneKind, Need, Port as _, Role};
use ep_core::transport::NoLanes;
use ep_core::{Nanos, Rank, Settings, Shape, Topology};
use ep_host::{Cluster, Machine, Port, block_on};

const A: Rank = Rank(0);
const B: Rank = Rank(1);
const DATA: LaneKind = LaneKind::Data(0);
const CREDIT: LaneKind = LaneKind::Credit(0);
const TAIL: Cell = Cell::new(A, DATA, Counter::Tail);
const HEAD: Cell = Cell::new(B, CREDIT, Counter::Head);

/// Two ranks with a ring of two slots.
fn machines() -> [Machine; 2] {
    let topology = Topology::new(1, 2).expect("a topology");
    let shape = Shape::builder().experts(2).topk(1).hidden(8).max_tokens(2).build().expect("a shape");
    let settings =
        Settings::builder(&shape, &topology).channels(1).slots(2).chunk(1).credit(1).arena_bytes(2048).build();
    let cluster = Cluster::builder(topology).settings(settings.expect("settings")).build(shape).expect("a cluster");
    cluster.into_machines().try_into().expect("two ranks")
}

fn open(machine: &Machine, duty: Duty) -> Port<NoLanes> {
    let deadline = machine.now() + Nanos::from_secs(3600);
    machine.port(Opening { role: Role::new(duty), op: 1, generation: 1, deadline })
}

/// Runs both ranks under every schedule.
fn model<F, G>(
    a: impl Fn(Machine) -> F + Copy + Send + Sync + 'static,
    b: impl Fn(Machine) -> G + Copy + Send + Sync + 'static,
) where
    F: Future<Output = Machine>,
    G: Future<Output = Machine>,
{
    loom::model(move || {
        let [first, second] = machines();
        let other = loom::thread::spawn(move || block_on(b(second)));
        let first = block_on(a(first));
        // A rank that leaves is gone for the other: both stay until both are done.
        drop((first, other.join().expect("a rank that ends")));
    });
}

/// Sends `count` messages through the ring of two slots. `early`: the tail goes before its message, which is wrong.
async fn send(machine: Machine, count: u64, early: bool) -> Machine {
    let mut port = open(&machine, Duty::Sender);
    let layout = machine.layout().clone();
    let rings = layout.settings().rings();
    let lane = LaneId { peer: B, kind: DATA };
    for number in 0..count {
        if number >= 2 {
            port.wait_any(&[Need { cell: HEAD, at_least: number - 1 }]).await.expect("credit");
        }
        if early {
            port.publish(lane, TAIL, number + 1).await.expect("a publish");
        }
        let from = layout.staging_slot(B, &rings, 0, number as u32 % 2).offset.span(8);
        port.write(from.offset, &number.to_le_bytes()).expect("a write");
        let to = layout.ring_slot(A, &rings, 0, number as u32 % 2).offset;
        let ticket = port.put(lane, from, to).await.expect("a put");
        port.flush(lane, ticket).await.expect("a flush");
        if !early {
            port.publish(lane, TAIL, number + 1).await.expect("a publish");
        }
    }
    drop(port);
    machine
}

/// Receives them. `early`: credit goes before its message has been read, which is wrong.
async fn receive(machine: Machine, count: u64, early: bool) -> Machine {
    let mut port = open(&machine, Duty::Receiver);
    let layout = machine.layout().clone();
    let rings = layout.settings().rings();
    let lane = LaneId { peer: A, kind: CREDIT };
    for number in 0..count {
        port.wait_any(&[Need { cell: TAIL, at_least: number + 1 }]).await.expect("a message");
        if early {
            port.publish(lane, HEAD, number + 1).await.expect("a publish");
        }
        let mut message = [0; 8];
        port.read(layout.ring_slot(A, &rings, 0, number as u32 % 2).offset, &mut message).expect("a read");
        assert_eq!(u64::from_le_bytes(message), number);
        if !early {
            port.publish(lane, HEAD, number + 1).await.expect("a publish");
        }
    }
    drop(port);
    machine
}

#[test]
fn a_tail_orders_messages_and_a_head_their_slots() {
    model(|machine| send(machine, 3, false), |machine| receive(machine, 3, false));
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_tail_before_its_message_is_found() {
    model(|machine| send(machine, 1, true), |machine| receive(machine, 1, false));
}

#[test]
#[should_panic(expected = "Causality violation")]
fn credit_before_the_read_is_found() {
    model(|machine| send(machine, 3, false), |machine| receive(machine, 3, true));
}

/// F10: a get sees what its owner wrote before a publish that the getter has seen, and the owner may write again once it is told.
#[test]
fn a_get_is_ordered_by_what_the_owner_published() {
    async fn own(machine: Machine) -> Machine {
        let mut port = open(&machine, Duty::Sender);
        let place = machine.layout().arena().offset;
        let lane = LaneId { peer: B, kind: DATA };
        for number in 1..=2u64 {
            port.write(place, &number.to_le_bytes()).expect("a write");
            port.publish(lane, TAIL, number).await.expect("a publish");
            port.wait_any(&[Need { cell: HEAD, at_least: number }]).await.expect("an answer");
        }
        drop(port);
        machine
    }
    async fn get(machine: Machine) -> Machine {
        let mut port = open(&machine, Duty::Receiver);
        let place = machine.layout().arena().offset;
        let lane = LaneId { peer: A, kind: CREDIT };
        for number in 1..=2u64 {
            port.wait_any(&[Need { cell: TAIL, at_least: number }]).await.expect("a publish");
            let into = place.plus(1024);
            let ticket = port.get(lane, place.span(8), into).await.expect("a get");
            port.flush(lane, ticket).await.expect("a flush");
            let mut seen = [0; 8];
            port.read(into, &mut seen).expect("a read");
            assert_eq!(u64::from_le_bytes(seen), number);
            port.publish(lane, HEAD, number).await.expect("a publish");
        }
        drop(port);
        machine
    }
    model(own, get);
}

/// A rank that goes without a word has put a message: who learns that it is gone finds it whole.
#[test]
fn who_learns_that_a_rank_is_gone_sees_what_it_did() {
    async fn put_and_go(machine: Machine) {
        let mut port = open(&machine, Duty::Sender);
        let (layout, rings) = (machine.layout().clone(), machine.layout().settings().rings());
        let from = layout.staging_slot(B, &rings, 0, 0).offset.span(8);
        port.write(from.offset, &7u64.to_le_bytes()).expect("a write");
        let to = layout.ring_slot(A, &rings, 0, 0).offset;
        port.put(LaneId { peer: B, kind: DATA }, from, to).await.expect("a put");
    }
    async fn find(machine: Machine) {
        let mut port = open(&machine, Duty::Receiver);
        let gone = port.wait_any(&[Need { cell: TAIL, at_least: 1 }]).await.expect_err("nobody publishes");
        assert_eq!(gone.gone(), Some(A));
        let (layout, rings) = (machine.layout().clone(), machine.layout().settings().rings());
        let mut message = [0; 8];
        port.read(layout.ring_slot(A, &rings, 0, 0).offset, &mut message).expect("a read");
        assert_eq!(u64::from_le_bytes(message), 7);
    }
    loom::model(|| {
        let [first, second] = machines();
        let other = loom::thread::spawn(move || block_on(put_and_go(first)));
        block_on(find(second));
        other.join().expect("a rank that ends");
    });
}
