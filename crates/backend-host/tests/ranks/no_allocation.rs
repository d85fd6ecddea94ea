//! Verbs allocate nothing, waits included.

use std::hint::black_box;
use std::sync::Barrier;

use ep_conformance::ring::{Receiver, SENDER, Sender};
use ep_core::machine::{Machine as _, Opening};
use ep_core::port::{Cell, Counter, Duty, LaneId, LaneKind, Need, Port as _, Role, Work};
use ep_core::{Nanos, Rank, Settings, Shape, Topology};
use ep_host::{Cluster, Machine};

/// Rounds before those that are counted: threads take what they need when they first need it.
const WARM_UP: u64 = 10;
const ROUNDS: u64 = 2_000;

/// What both ranks allocate in `work` behind the first rounds of it.
fn counted(work: impl AsyncFn(&Machine, &dyn Fn(u64)) + Sync) -> Vec<u64> {
    let topology = Topology::new(1, 2).unwrap();
    let shape = Shape::builder().experts(2).topk(1).hidden(64).max_tokens(8).build().unwrap();
    let settings = Settings::builder(&shape, &topology).channels(1).slots(8).arena_bytes(4096).build().unwrap();
    let there = Barrier::new(2);
    let ranks = Cluster::builder(topology).settings(settings).build(shape).unwrap().run_machines(async |machine| {
        let before = std::cell::Cell::new(0);
        work(&machine, &|round| {
            if round == WARM_UP {
                before.set(crate::counting::allocations());
            }
        })
        .await;
        let allocated = crate::counting::allocations() - before.get();
        // A rank that leaves is gone for the other.
        there.wait();
        allocated
    });
    ranks.unwrap()
}

#[test]
fn verbs_allocate_nothing() {
    let allocated = counted(async |machine, begin| {
        let (me, peer) = (machine.rank(), Rank(1 - machine.rank().0));
        let deadline = machine.now() + Nanos::from_secs(3600);
        let mut port = machine.port(Opening { role: Role::new(Duty::Sender), op: 1, generation: 1, deadline });
        let lane = LaneId { peer, kind: LaneKind::Data(0) };
        let cell = |writer| Cell::new(writer, LaneKind::Data(0), Counter::Probe);
        // A part of both windows for each rank to write, and one where what it gets comes.
        let place = machine.layout().arena().offset.plus(1024 * u64::from(me.0));
        for round in 1..=ROUNDS {
            begin(round);
            port.write(place, &[round as u8; 64]).unwrap();
            let ticket = port.put(lane, place.span(64), place.plus(128)).await.unwrap();
            port.flush(lane, ticket).await.unwrap();
            port.publish(lane, cell(me), round).await.unwrap();
            port.wait_any(&[Need { cell: cell(peer), at_least: round }]).await.unwrap();
            assert!(port.peek(cell(peer)) >= round);
            let ticket = port.get(lane, place.plus(128).span(64), place.plus(256)).await.unwrap();
            port.flush(lane, ticket).await.unwrap();
            let mut bytes = [0; 64];
            port.read(place.plus(256), &mut bytes).unwrap();
            assert_eq!(bytes, [round as u8; 64], "what this rank put there");
            port.charge(Work::Row { bytes: 64 });
            black_box(port.now());
        }
    });
    assert_eq!(allocated, [0, 0]);
}

#[test]
fn a_ring_allocates_nothing() {
    let allocated = counted(async |machine, begin| {
        let mut message = vec![7; 100];
        if machine.rank() == SENDER {
            let mut sender = Sender::new(machine);
            for round in 1..=ROUNDS {
                begin(round);
                sender.send(&message).await.unwrap();
            }
            sender.finish().await.unwrap();
        } else {
            let mut receiver = Receiver::new(machine);
            for round in 1..=ROUNDS {
                begin(round);
                message.fill(0);
                receiver.receive(&mut message).await.unwrap();
                assert!(message.iter().all(|&byte| byte == 7));
            }
        }
    });
    assert_eq!(allocated, [0, 0]);
}

#[test]
fn allocations_are_counted() {
    let allocated = counted(async |_, begin| {
        begin(WARM_UP);
        black_box(vec![1u8; 100]);
    });
    assert_eq!(allocated, [1, 1]);
}
