//! What the tests share: a small cluster, one lane, one cell, and room for data in every window.

use ep_core::machine::{Machine as _, Opening};
use ep_core::port::{Cell, Counter, Duty, LaneId, LaneKind, Need, Offset, Port as _, Role};
use ep_core::{Nanos, Rank, Settings, Shape, Topology};
use ep_sim::{Builder, Cluster, Machine, Port};

/// Adversaries that each rule meets.
pub(crate) const SEEDS: u64 = 150;
/// When every wait ends.
pub(crate) const DEADLINE: Nanos = Nanos::from_millis(5);
/// The lane that the tests post to.
pub(crate) const DATA: LaneKind = LaneKind::Data(0);
/// The ranks of most tests.
pub(crate) const A: Rank = Rank(0);
pub(crate) const B: Rank = Rank(1);
pub(crate) const C: Rank = Rank(2);

pub(crate) fn shape() -> Shape {
    Shape::builder().experts(12).topk(1).hidden(64).max_tokens(16).build().unwrap()
}

/// A cluster with 1 MiB of arena on every rank.
pub(crate) fn cluster(nodes: u32, ranks_per_node: u32) -> Builder {
    let topology = Topology::new(nodes, ranks_per_node).unwrap();
    let settings = Settings::builder(&shape(), &topology).arena_bytes(1 << 20).deadline(DEADLINE).build().unwrap();
    Cluster::builder(topology).settings(settings)
}

/// Runs the same on all ranks of one node under many adversaries; `[seed][rank]` results.
pub(crate) fn explore<T>(ranks: u32, each: impl AsyncFn(Machine) -> T) -> Vec<Vec<T>> {
    explore_with(cluster(1, ranks), each)
}

/// As [`explore`], on a cluster of one's own.
pub(crate) fn explore_with<T>(cluster: Builder, each: impl AsyncFn(Machine) -> T) -> Vec<Vec<T>> {
    let run = |seed| cluster.clone().seed(seed).build(shape()).unwrap().run_machines(&each);
    (0..SEEDS).map(|seed| run(seed).unwrap_or_else(|violation| panic!("{violation}")).finished()).collect()
}

/// Opens the probe `channel` of a rank.
pub(crate) fn probe(machine: &Machine, channel: u16) -> Port {
    machine.port(Opening {
        role: Role { track: channel, ..Role::new(Duty::Probe) },
        op: 1,
        generation: 1,
        deadline: DEADLINE,
    })
}

/// The data lane to `peer`.
pub(crate) fn lane(peer: Rank) -> LaneId {
    LaneId { peer, kind: DATA }
}

/// The cell that `writer` publishes to on its data lanes.
pub(crate) fn cell(writer: Rank) -> Cell {
    Cell::new(writer, DATA, Counter::Probe)
}

/// Awaits `at_least` of [`cell`].
pub(crate) fn need(writer: Rank, at_least: u64) -> [Need; 1] {
    [Need { cell: cell(writer), at_least }]
}

/// The `at`-th free byte of every window.
pub(crate) fn free(machine: &Machine, at: u64) -> Offset {
    machine.layout().arena().offset.plus(at)
}

/// Does nothing until then.
pub(crate) async fn pause(machine: &Machine, deadline: Nanos) {
    let mut port = machine.port(Opening { role: Role::new(Duty::Probe), op: 1, generation: 1, deadline });
    let never = Need { cell: Cell::new(machine.rank(), LaneKind::Watch, Counter::Waiting), at_least: u64::MAX };
    let _ = port.wait_any(&[never]).await;
}
