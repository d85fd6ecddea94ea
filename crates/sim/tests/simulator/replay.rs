//! A seed replays exactly; seeds differ. And memory exists only where it was written.

use std::collections::BTreeSet;

use crate::common::{cell, cluster, free, lane, need, probe, shape};
use ep_core::Rank;
use ep_core::machine::Machine as _;
use ep_core::port::Port as _;
use ep_core::trace::Record;
use ep_sim::{Cluster, Machine};
use futures_util::stream::{FuturesUnordered, StreamExt};

/// Two roles on each of three ranks: one passes a token around, one watches.
async fn busy(machine: Machine) {
    let me = machine.rank();
    let next = Rank((me.0 + 1) % 3);
    let before = Rank((me.0 + 2) % 3);
    let sender = async {
        let mut port = probe(&machine, 0);
        let place = free(&machine, 0);
        for round in 1..=8u64 {
            let ticket = port.put(lane(next), place.span(64), place.plus(64 * round)).await.unwrap();
            port.publish(lane(next), cell(me), round).await.unwrap();
            port.flush(lane(next), ticket).await.unwrap();
        }
    };
    let watcher = async {
        let mut port = probe(&machine, 1);
        for round in [3, 5, 8] {
            port.wait_any(&need(before, round)).await.unwrap();
        }
    };
    let roles: [std::pin::Pin<Box<dyn Future<Output = ()>>>; 2] = [Box::pin(sender), Box::pin(watcher)];
    let mut roles: FuturesUnordered<_> = roles.into_iter().collect();
    while roles.next().await.is_some() {}
}

fn records(cluster: &Cluster) -> Vec<Record> {
    cluster.run_machines(busy).unwrap().records
}

#[test]
fn a_seed_replays_exactly_and_seeds_differ() {
    let mut stories = BTreeSet::new();
    for seed in 0..50 {
        let cluster = cluster(1, 3).seed(seed).record(true).build(shape()).unwrap();
        let story = records(&cluster);
        assert_eq!(story, records(&cluster), "seed {seed}");
        stories.insert(format!("{story:?}"));
    }
    assert_eq!(stories.len(), 50);
}

#[test]
fn race_tracking_changes_no_schedule() {
    for seed in 0..20 {
        let cluster = cluster(1, 3).seed(seed).record(true);
        let tracked = records(&cluster.clone().build(shape()).unwrap());
        assert_eq!(tracked, records(&cluster.race_tracking(false).build(shape()).unwrap()));
    }
}

#[test]
fn memory_exists_only_where_it_was_written() {
    let settings = ep_core::Settings::builder(&shape(), &ep_core::Topology::new(1, 2).unwrap())
        .arena_bytes(1 << 40)
        .build()
        .unwrap();
    let cluster = cluster(1, 2).settings(settings).build(shape()).unwrap();
    let run = cluster.run_machines(async |machine: Machine| {
        let mut port = probe(&machine, 0);
        let mut bytes = [0; 4];
        port.read(free(&machine, 1 << 39), &mut bytes).unwrap();
        assert_eq!(bytes, [0xA5; 4], "nobody wrote here");
        port.write(free(&machine, (1 << 40) - 1), &[1]).unwrap();
    });
    assert!(run.unwrap().resident < 1 << 20);
}
