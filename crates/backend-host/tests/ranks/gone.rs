//! What is done to a rank that is known to be gone ends at once, and says so.

use ep_core::machine::{Machine as _, Opening};
use ep_core::port::{Cell, Counter, Duty, LaneId, LaneKind, Port as _, Role};
use ep_core::{Fault, Nanos, Rank, Settings, Shape, Topology};
use ep_host::{Cluster, Machine, block_on};

const GONE: Rank = Rank(1);

/// The machine of rank 0 of two, after rank 1 has left.
fn left_alone() -> Machine {
    let topology = Topology::new(1, 2).unwrap();
    let shape = Shape::builder().experts(2).topk(1).hidden(8).max_tokens(2).build().unwrap();
    let settings = Settings::builder(&shape, &topology).arena_bytes(2048).build().unwrap();
    let cluster = Cluster::builder(topology).settings(settings).build(shape).unwrap();
    let [first, second]: [Machine; 2] = cluster.into_machines().try_into().unwrap();
    drop(second);
    first
}

/// Nobody would find the rows: whoever puts them is to learn that now, and not at a wait later.
#[test]
fn puts_gets_and_publishes_to_a_gone_peer_say_so() {
    let machine = left_alone();
    let deadline = machine.now() + Nanos::from_secs(60);
    let mut port = machine.port(Opening { role: Role::new(Duty::Sender), op: 1, generation: 1, deadline });
    let (lane, place) = (LaneId { peer: GONE, kind: LaneKind::Data(0) }, machine.layout().arena().offset);
    let gone = |fault: Fault| assert!(matches!(fault, Fault::PeerGone { peer: GONE, .. }), "{fault}");
    gone(block_on(port.put(lane, place.span(64), place)).unwrap_err());
    gone(block_on(port.get(lane, place.span(64), place)).unwrap_err());
    let tail = Cell::new(Rank(0), lane.kind, Counter::Tail);
    gone(block_on(port.publish(lane, tail, 1)).unwrap_err());
    // A put outside of the window is the caller's own mistake, whoever is there.
    let outside = block_on(port.put(lane, place.span(64), place.plus(1 << 40))).unwrap_err();
    assert!(matches!(outside, Fault::OutOfRange { .. }), "{outside}");
    assert!(block_on(port.put(lane, place.span(0), place)).is_ok(), "nothing is a no-op");
}
