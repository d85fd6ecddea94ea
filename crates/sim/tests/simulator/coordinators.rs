//! Where lanes between nodes share queues: coordinators, and nobody else, post what those lanes carry, and every table of
//! lanes and queues moves the same rows.

use std::collections::{BTreeMap, BTreeSet};

use ep_conformance::drive::{Round, round};
use ep_conformance::verify;
use ep_conformance::workload::Workload;
use ep_core::layout::{Queue, Queues};
use ep_core::plant::Plant;
use ep_core::port::{Duty, LaneId, LaneKind, Role};
use ep_core::reference::World;
use ep_core::topology::Reach;
use ep_core::trace::{Record, Verb};
use ep_core::{Error, Rank, RankSet, Settings, Shape, Topology};
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

/// Runs two verified rounds; what they recorded, or what was found wrong.
fn try_rounds(topology: Topology, tokens: u32, cluster: Builder) -> Result<Vec<Record>, String> {
    let shape = shape(&topology, tokens);
    let world = World::new(shape, topology, RankSet::new()).unwrap();
    let batches = Workload::new(shape, vec![tokens; topology.ranks() as usize]).seed(5).batches().unwrap();
    let cluster = cluster.record(true).build(shape).unwrap();
    let run = cluster.run(async |mut ep| {
        let batch = &batches[ep_core::Endpoint::rank(&ep).index()];
        let how = Round { return_weights: true, ..Round::default() };
        round(&mut ep, &world, batch, &how).await?;
        Ok::<_, Error>(round(&mut ep, &world, batch, &how).await?.0)
    });
    let run = run.map_err(|violation| violation.to_string())?;
    let all = run.outcomes.into_iter().map(|rank| rank.finished().ok_or("a rank did not finish".to_owned()));
    let all = all.map(|rank| rank.and_then(|observed| observed.map_err(|error| error.to_string())));
    verify::run(&world, &batches, &all.collect::<Result<Vec<_>, _>>()?).map_err(|wrong| wrong.to_string())?;
    Ok(run.records)
}

fn rounds(topology: Topology, tokens: u32, cluster: Builder) -> Vec<Record> {
    try_rounds(topology, tokens, cluster).unwrap_or_else(|wrong| panic!("{wrong}"))
}

/// The lane that a record posts to, and the bytes that it puts there.
fn posted(record: &Record) -> Option<(LaneId, u64)> {
    match record.verb {
        Verb::Put { lane, len, .. } => Some((lane, len)),
        Verb::Publish { lane, .. } => Some((lane, 0)),
        _ => None,
    }
}

/// What a record posts between nodes.
fn between_nodes(topology: &Topology, record: &Record) -> Option<(LaneId, u64)> {
    posted(record).filter(|(lane, _)| topology.reach(record.rank, lane.peer) == Reach::Far)
}

/// Every table that there is, up to the numbers of its queues.
fn tables() -> Vec<Queues> {
    let [own, a, b, c] = [Queue::Own, Queue::Shared(0), Queue::Shared(1), Queue::Shared(2)];
    let apart = [[own, own, own], [a, own, own], [own, a, own], [own, own, a]];
    let two = [[a, a, own], [a, own, a], [own, a, a], [a, b, own], [a, own, b], [own, a, b]];
    let all = [[a, a, a], [a, a, b], [a, b, a], [b, a, a], [a, b, c]];
    let tables = apart.into_iter().chain(two).chain(all);
    tables.map(|[rows, credit, control]| Queues::new(rows, credit, control)).collect()
}

#[test]
fn the_coordinator_of_a_shared_queue_posts_all_that_its_lanes_carry_and_roles_post_the_rest() {
    let topology = Topology::new(3, 2).unwrap();
    for (seed, queues) in (0..8).flat_map(|seed| Queues::NAMED.map(|queues| (seed, queues))) {
        let cluster = cluster(topology, 20).seed(seed).far_lanes(queues);
        let layout = cluster.clone().build(shape(&topology, 20)).unwrap().layout().clone();
        let mut posters = BTreeMap::<(Rank, LaneId), BTreeSet<Role>>::new();
        for record in rounds(topology, 20, cluster) {
            let Some((lane, _)) = between_nodes(&topology, &record) else { continue };
            let coordinator = queues.coordinator(&layout, record.rank, lane);
            let by_coordinator = (record.role.duty == Duty::Coordinator).then_some(record.role);
            assert_eq!(by_coordinator, coordinator, "{queues:?}: {record:?}");
            let queue = queues.queue(&layout, record.rank, lane);
            posters.entry((record.rank, queue)).or_default().insert(record.role);
        }
        for rank in topology.all() {
            for peer in topology.all().filter(|&peer| topology.reach(rank, peer) == Reach::Far) {
                let used = posters
                    .keys()
                    .filter(|(from, queue)| (*from, queue.peer) == (rank, peer))
                    .map(|(_, lane)| lane.kind);
                let there: BTreeSet<_> = queues.between(&layout, rank, peer).into_iter().collect();
                assert_eq!(used.collect::<BTreeSet<_>>(), there, "every queue is used, and no other: {queues:?}");
            }
        }
        let shared = |(from, queue): &(Rank, LaneId)| queues.coordinator(&layout, *from, *queue).is_some();
        assert!(posters.iter().all(|(at, posters)| !shared(at) || posters.len() == 1), "{posters:?}");
    }
}

#[test]
fn every_table_moves_the_same_rows_right() {
    let topology = Topology::new(2, 2).unwrap();
    let puts = |queues, seed| {
        let records = rounds(topology, 20, cluster(topology, 20).seed(seed).far_lanes(queues));
        let far = records.iter().filter_map(|record| between_nodes(&topology, record));
        let mut puts: Vec<_> = far.filter(|(_, bytes)| *bytes > 0).collect();
        puts.sort_unstable();
        puts
    };
    let per_role = puts(Queues::PER_ROLE, 0);
    for (seed, queues) in (0..10).flat_map(|seed| tables().into_iter().map(move |queues| (seed, queues))) {
        assert_eq!(puts(queues, seed), per_role, "{queues:?}, seed {seed}");
    }
}

#[test]
fn coordinators_publish_a_tail_for_each_chunk() {
    let topology = Topology::new(2, 2).unwrap();
    let records = rounds(topology, 40, cluster(topology, 40).far_lanes(Queues::ONE));
    let rows = |lane: &LaneId| matches!(lane.kind, LaneKind::Data(_));
    let far = records.iter().filter_map(|record| between_nodes(&topology, record)).filter(|(lane, _)| rows(lane));
    let (puts, tails): (Vec<_>, Vec<_>) = far.partition(|(_, bytes)| *bytes > 0);
    assert!(tails.len() < puts.len(), "{} tails of {} puts", tails.len(), puts.len());
}

/// What only a shared queue can get wrong is found wherever lanes share, under some seed at least, and by the right check.
/// Where the lane shares no queue the fault does not exist, and nothing is found.
#[test]
fn faults_on_shared_queues_are_caught() {
    let topology = Topology::new(2, 1).unwrap();
    let settings = |cluster: Builder, plant| {
        let shape = shape(&topology, 14);
        let settings = Settings::builder(&shape, &topology).channels(2).slots(6).chunk(3).credit(2);
        let settings = settings.far_slots(6).far_chunk(3).far_credit(2).build().unwrap();
        cluster.settings(settings.with_plant(plant))
    };
    let caught = |queues, plant| -> Vec<String> {
        let run = |seed| try_rounds(topology, 14, settings(cluster(topology, 14).seed(seed).far_lanes(queues), plant));
        (0..30).filter_map(|seed| run(seed).err()).collect()
    };
    for (plant, lane, sign) in [
        (Plant::SecondPoster, LaneKind::Data(0), "F4"),
        (Plant::SecondPosterOfCredit, LaneKind::Credit(0), "F4"),
        (Plant::SecondPosterOfControl, LaneKind::Control, "F4"),
        (Plant::CountsUnasked, LaneKind::Control, "race"),
        (Plant::StagingFreedEarly, LaneKind::Data(0), "race"),
    ] {
        for queues in Queues::NAMED {
            let errors = caught(queues, plant);
            let wrong = errors.iter().find(|error| !error.contains(sign));
            assert_eq!(wrong, None, "{plant:?} on {queues:?}");
            let shares = queues.of(lane) != Queue::Own;
            assert_eq!(!errors.is_empty(), shares, "{plant:?} on {queues:?}");
        }
    }
}

#[test]
fn one_node_has_no_coordinators() {
    let topology = Topology::new(1, 4).unwrap();
    let records = rounds(topology, 20, cluster(topology, 20).far_lanes(Queues::ONE));
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
    let [per_role, two, _, one] = Queues::NAMED.map(time);
    println!("{per_role} with a queue for each role, {two} with one for rows and one for credit, {one} with one");
    for shared in [two, one] {
        assert!(shared.0 < per_role.0 * 5 / 4, "{shared} against {per_role}");
    }
}
