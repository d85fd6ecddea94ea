//! The shared suite on the simulator: on the explore scheduler once for each named table of lanes and queues, and on the timed one.

use std::process::ExitCode;

use ep_conformance::Requirement;
use ep_conformance::harness::{Suite, share};
use ep_core::layout::Queues;

mod explore;
mod timed;

use explore::Simulator;
use timed::Timed;

/// Suites of tables other than that of the first.
const OTHERS: [&str; 2] = ["rows-and-credit::", "one::"];
/// What is in names of cases whose ranks are, or may be, of several nodes: which lanes share a queue there is nothing to the rest.
const FAR: [&str; 11] = [
    "far_",
    "nodes",
    "campaign",
    "zombie",
    "forward",
    "partial",
    "to_a_node",
    "share_too_long",
    "far_rings",
    "staging",
    "second_poster",
];

/// They take longest; with a lane each they run in any case.
const LONG: [&str; 3] = [
    "nodes_eight_of_eight",
    "nodes_a_lost_node_is_named_and_the_others_go_on",
    "nodes_a_lost_rank_takes_its_node_along",
];

/// Whether a run that is not thorough runs the case.
fn takes(name: &str) -> bool {
    let other = OTHERS.iter().find_map(|suite| name.strip_prefix(suite));
    other.is_none_or(|case| !LONG.contains(&case) && FAR.iter().any(|far| case.contains(far)))
}

fn main() -> ExitCode {
    let (most, campaign) = share((1000, 150), (60, 20));
    let simulator = |far_lanes| Simulator { far_lanes, units: false, campaign };
    Suite::default()
        .on("per-role", Simulator { campaign: most, ..simulator(Queues::PER_ROLE) })
        .on("rows-and-credit", simulator(Queues::ROWS_AND_CREDIT))
        .on("one", simulator(Queues::ONE))
        .on_those("units", Requirement::LowLatency, Simulator { units: true, ..simulator(Queues::PER_ROLE) })
        .on_those("timed-units", Requirement::LowLatency, Timed { units: true })
        .on("timed", Timed { units: false })
        .share(takes)
        .run()
}
