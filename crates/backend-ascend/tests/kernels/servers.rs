//! Jobs over several servers: rows cross once to each, sums come back, over rings of any size and queues of four elements.

use ep_ascend::Roles;
use ep_conformance::workload::RoutingKind;
use ep_core::Rings;
use ep_core::ring::Geometry;

use crate::job::Job;
use crate::{job, passes, rings};

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
