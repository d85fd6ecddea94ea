//! The shared suite on the simulator: on the explore scheduler once for each named table of lanes and queues, and on the timed one.

use std::process::ExitCode;

use ep_conformance::Requirement;
use ep_conformance::harness::{Suite, thorough};
use ep_core::layout::Queues;

mod explore;
mod timed;

use explore::Simulator;
use timed::Timed;

fn main() -> ExitCode {
    let (most, campaign) = if thorough() { (2000, 300) } else { (300, 60) };
    let simulator = |far_lanes| Simulator { far_lanes, units: false, campaign };
    Suite::default()
        .on("per-role", Simulator { campaign: most, ..simulator(Queues::PER_ROLE) })
        .on("rows-and-credit", simulator(Queues::ROWS_AND_CREDIT))
        .on("one", simulator(Queues::ONE))
        .on_those("units", Requirement::LowLatency, Simulator { units: true, ..simulator(Queues::PER_ROLE) })
        .on_those("timed-units", Requirement::LowLatency, Timed { units: true })
        .on("timed", Timed { units: false })
        .run()
}
