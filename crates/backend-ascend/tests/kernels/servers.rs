//! Jobs over several servers: rows cross once to each, sums come back, over rings of any size and queues of four elements.

use ep_ascend::twin::{Host, Machine};
use ep_ascend::{Cluster, Roles};
use ep_conformance::drive::{Round, round};
use ep_conformance::verify;
use ep_conformance::workload::{RoutingKind, Workload};
use ep_core::reference::World;
use ep_core::ring::Geometry;
use ep_core::{Endpoint as _, RankSet, Rings, Settings, Shape, Topology};

use crate::job::Job;
use crate::{job, library, passes, rings};

/// Few cores, and at least one of each role.
pub(crate) const FEW: Roles =
    Roles { senders: 1, coordinators: 2, forwarders: 1, forwarder_coordinators: 0, receivers: 1 };

/// A job of `nodes` servers of `each` ranks, and so many tokens a rank.
pub(crate) fn servers(seed: u64, nodes: u32, each: u32, geometry: Geometry, tokens: u32) -> Job {
    let mut job = job(seed, nodes * each, geometry, tokens);
    (job.nodes, job.roles, job.polls) = (nodes, FEW, seed % 2 == 1);
    job
}

fn channels(job: &mut Job, channels: u32) {
    job.channels = channels;
    job.rounds[0].rings = Rings::uniform(channels, job.geometry);
}

#[test]
fn a_row_crosses_once_to_each_server() {
    for seed in 1..=4 {
        let of = |nodes, each, geometry, tokens, change: &dyn Fn(&mut Job)| {
            let mut job = servers(seed, nodes, each, geometry, tokens);
            change(&mut job);
            job
        };
        let jobs = [
            ("two servers", of(2, 2, rings(3, 2, 1), 9, &|job| job.topk = 4)),
            ("two servers of one rank", of(2, 1, rings(1, 1, 1), 7, &|_| {})),
            ("three servers", of(3, 1, rings(2, 1, 2), 8, &|job| job.topk = 4)),
            ("four servers", of(4, 1, rings(4, 4, 4), 6, &|job| job.topk = 6)),
            ("no token at all", of(2, 2, rings(2, 1, 1), 0, &|_| {})),
            (
                "all tokens to one expert",
                of(2, 2, rings(2, 2, 2), 6, &|job| job.rounds[0].routing = RoutingKind::Single),
            ),
            ("rows of several pieces", of(2, 1, rings(2, 1, 1), 2, &|job| job.hidden = 16_456)),
            (
                "a bias, and dropped choices",
                of(2, 2, rings(3, 1, 2), 7, &|job| (job.rounds[0].bias, job.rounds[0].drop, job.topk) = (2, 0.4, 5)),
            ),
            (
                "several cores on a channel",
                of(2, 2, rings(6, 2, 3), 14, &|job| {
                    channels(job, 2);
                    (job.roles.senders, job.roles.receivers, job.roles.forwarders) = (7, 2, 2);
                }),
            ),
        ];
        for (name, job) in jobs {
            passes(name, &job);
        }
    }
}

/// Endpoints: positions and counts are found on the devices, go along the rails, and are passed on; some queues are polled by kernels. Rank 0
/// of the first server sends a hundred times what its rings hold.
#[test]
fn endpoints_of_several_servers_move_every_bit() {
    for (seed, nodes, each) in [(1, 2, 2), (2, 3, 1)] {
        let topology = Topology::new(nodes, each).expect("a topology");
        let ranks = nodes * each;
        let shape = Shape::builder().experts(2 * ranks).topk(3).hidden(24).max_tokens(200).build().expect("a shape");
        let settings = Settings::builder(&shape, &topology).channels(1).slots(2).chunk(1).credit(1).low_latency(false);
        let settings = settings.build().expect("settings");
        let tokens = (0..ranks).map(|rank| if rank == 0 { 200 } else { 5 * (rank % 2) }).collect();
        let batches = Workload::new(shape, tokens).seed(seed).batches().expect("batches");
        let world = World::new(shape, topology, RankSet::new()).expect("a world");
        let machine = Machine::new(library(), seed, ranks, each).expect("a machine");
        let session = Host::install(machine, "Ascend910B3").expect("the thread's only twin");
        let builder = Cluster::builder(topology, library().path()).settings(settings).roles(FEW);
        let cluster = builder.build(&session.table(), shape).expect("a cluster");
        let ran = cluster.run(async |mut ep| {
            let how = Round { return_weights: true, ..Round::default() };
            let batch = &batches[ep.rank().index()];
            round(&mut ep, &world, batch, &how).await.map(|(observed, _)| observed)
        });
        assert_eq!(session.fault(), None, "seed {seed}");
        let observed: Vec<_> = ran.into_iter().collect::<Result<_, _>>().unwrap_or_else(|error| panic!("{error}"));
        verify::run(&world, &batches, &observed).unwrap_or_else(|mismatch| panic!("seed {seed}: {mismatch}"));
    }
}
