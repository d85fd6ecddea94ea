//! The shared suite on the simulator: on the explore scheduler once for each named table of lanes and queues, and on the timed one.

use std::process::ExitCode;

use ep_conformance::Requirement;
use ep_conformance::harness::Suite;
use ep_core::layout::Queues;

mod explore;
mod timed;

use explore::Simulator;
use timed::Timed;

fn main() -> ExitCode {
    Suite::default()
        .on("per-role", Simulator { far_lanes: Queues::PER_ROLE, units: false, campaign: 2000 })
        .on("rows-and-credit", Simulator { far_lanes: Queues::ROWS_AND_CREDIT, units: false, campaign: 300 })
        .on("one", Simulator { far_lanes: Queues::ONE, units: false, campaign: 300 })
        .on_those(
            "units",
            Requirement::LowLatency,
            Simulator { far_lanes: Queues::PER_ROLE, units: true, campaign: 300 },
        )
        .on_those("timed-units", Requirement::LowLatency, Timed { units: true })
        .on("timed", Timed { units: false })
        .run()
}
