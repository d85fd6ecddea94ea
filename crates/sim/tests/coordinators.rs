//! Where lanes between nodes admit one poster: coordinators, and nobody else, post rows, tails and credits between nodes.

use std::collections::BTreeSet;

use ep_conformance::drive::{Round, round};
use ep_conformance::verify;
use ep_conformance::workload::Workload;
use ep_core::machine::FarLanes;
use ep_core::port::{Duty, LaneId, LaneKind};
use ep_core::reference::World;
use ep_core::topology::Reach;
use ep_core::trace::{Record, Verb};
use ep_core::{Nanos, RankSet, Settings, Shape, Topology};
use ep_sim::{Builder, Cluster, Model};

fn shape(topology: &Topology, tokens: u32) -> Shape {
    Shape::builder().experts(2 * topology.ranks()).topk(4).hidden(256).max_tokens(tokens).build().unwrap()
}

/// Two channels, and chunks of several rows.
fn cluster(topology: Topology, tokens: u32) -> Builder {
    let shape = shape(&topology, tokens);
    let settings = Settings::builder(&shape, &topology).channels(2).slots(6).chunk(3).credit(2);
    let settings = settings.far_slots(6).far_chunk(3).far_credit(2).build().unwrap();
    Cluster::builder(topology).settings(settings)
}

/// Runs two verified rounds and gives the records and the time they took.
fn rounds(topology: Topology, tokens: u32, cluster: Builder) -> (Vec<Record>, Nanos) {
    let shape = shape(&topology, tokens);
    let world = World::new(shape, topology, RankSet::new()).unwrap();
    let batches = Workload::new(shape, vec![tokens; topology.ranks() as usize]).seed(5).batches().unwrap();
    let cluster = cluster.record(true).build(shape).unwrap();
    let run = cluster.run(async |mut ep| {
        let batch = &batches[ep_core::Endpoint::rank(&ep).index()];
        let how = Round { return_weights: true, ..Round::default() };
        round(&mut ep, &world, batch, &how).await.unwrap();
        round(&mut ep, &world, batch, &how).await.unwrap().0
    });
    let run = run.unwrap_or_else(|violation| panic!("{violation}"));
    let observed: Vec<_> = run.outcomes.into_iter().map(|rank| rank.finished().unwrap()).collect();
    verify::run(&world, &batches, &observed).unwrap();
    (run.records, run.time)
}

/// The lane that a record posts to, and the bytes that it puts there.
fn posted(record: &Record) -> Option<(LaneId, u64)> {
    match record.verb {
        Verb::Put { lane, len, .. } => Some((lane, len)),
        Verb::Publish { lane, .. } => Some((lane, 0)),
        _ => None,
    }
}

/// Rows and what belongs to them that a record posts between nodes.
fn between_nodes(topology: &Topology, record: &Record) -> Option<(LaneId, u64)> {
    let far = |lane: &LaneId| topology.reach(record.rank, lane.peer) == Reach::Far;
    posted(record).filter(|(lane, _)| far(lane) && !matches!(lane.kind, LaneKind::Watch | LaneKind::Control))
}

#[test]
fn one_coordinator_posts_on_one_lane_to_each_rail_peer() {
    let topology = Topology::new(3, 2).unwrap();
    for seed in 0..20 {
        let coordinated = cluster(topology, 20).seed(seed).far_lanes(FarLanes::One);
        let rail = cluster(topology, 20).build(shape(&topology, 20)).unwrap().layout().rail_lane();
        let (records, _) = rounds(topology, 20, coordinated);
        let mut pairs = BTreeSet::new();
        for record in &records {
            if let Some((lane, _)) = between_nodes(&topology, record) {
                assert_eq!((record.role.duty, record.role.peer), (Duty::Coordinator, Some(lane.peer)), "{record:?}");
                assert_eq!(lane.kind, rail, "{record:?}");
                pairs.insert((record.rank, lane.peer));
            } else if let Some((lane, _)) = posted(record).filter(|_| record.role.duty == Duty::Coordinator) {
                assert!(lane.peer == record.rank && lane.kind.is_mailbox(), "{record:?}");
            }
        }
        assert_eq!(pairs.len(), 6 * 2, "every rank has two rail peers: {pairs:?}");
    }
}

#[test]
fn coordinators_put_what_roles_would_put_and_publish_a_tail_for_each_chunk() {
    let topology = Topology::new(2, 2).unwrap();
    let far = |far_lanes| {
        let (records, _) = rounds(topology, 40, cluster(topology, 40).far_lanes(far_lanes));
        let far: Vec<_> = records.iter().filter_map(|record| between_nodes(&topology, record)).collect();
        let mut puts: Vec<u64> = far.iter().map(|(_, bytes)| *bytes).filter(|&bytes| bytes > 0).collect();
        puts.sort_unstable();
        (puts, far.len())
    };
    let (per_role, coordinated) = (far(FarLanes::PerRole), far(FarLanes::One));
    assert_eq!(per_role.0, coordinated.0, "the same puts");
    let publishes = coordinated.1 - coordinated.0.len();
    assert!(publishes < coordinated.0.len(), "{publishes} publishes of {} puts", coordinated.0.len());
}

#[test]
fn one_node_has_no_coordinators() {
    let topology = Topology::new(1, 4).unwrap();
    let (records, _) = rounds(topology, 20, cluster(topology, 20).far_lanes(FarLanes::One));
    assert!(records.iter().all(|record| record.role.duty != Duty::Coordinator));
    assert!(records.iter().filter_map(posted).all(|(lane, _)| !lane.kind.is_mailbox()));
}

/// Handing over costs time, but little of it.
#[test]
fn coordinators_in_virtual_time() {
    let topology = Topology::new(2, 4).unwrap();
    let shape = Shape::builder().experts(64).topk(8).hidden(7168).max_tokens(512).build().unwrap();
    let time = |far_lanes| {
        let cluster = Cluster::builder(topology).timed(Model::h800_cx7()).elide_payload(true).far_lanes(far_lanes);
        let cluster = cluster.build(shape).unwrap();
        let thin = Shape::builder().experts(64).topk(8).hidden(1).max_tokens(512).build().unwrap();
        let batches = Workload::new(thin, vec![512; 8]).seed(1).batches().unwrap();
        let run = cluster.run(async |mut ep| {
            use ep_core::Endpoint;
            let topk_idx = batches[ep.rank().index()].topk_idx.clone();
            let x = ep.rows(&vec![0; 512 * ep.shape().row_bytes() as usize], 512).unwrap();
            let got = ep.dispatch(&x, &ep_core::engine::Routing::TopK { topk_idx, topk_weights: None }).await.unwrap();
            let y = ep.rows(&vec![0; got.rows as usize * ep.shape().row_bytes() as usize], got.rows).unwrap();
            ep.combine(&y, &got.handle, ep_core::engine::Combine::default()).await.unwrap();
        });
        run.unwrap().time
    };
    let (per_role, coordinated) = (time(FarLanes::PerRole), time(FarLanes::One));
    println!("{per_role} with a lane for each role, {coordinated} with coordinators");
    assert!(coordinated.0 < per_role.0 * 5 / 4, "{coordinated} against {per_role}");
}
