//! The shared suite on CPU ranks: threads of this process, and between nodes a transport made for tests, or a network made of
//! software; then processes of a host with that network between nodes, and processes of which one is broken.
//!
//! All in one program: most of the time that it takes to build is spent on the engine and the cases.

#[path = "../common/apart.rs"]
mod apart;
mod broken;
#[path = "../common/mod.rs"]
mod common;
#[path = "../common/double.rs"]
mod double;
mod looped;

use std::process::ExitCode;

use apart::Apart;
use common::{Host, Network};
use double::Double;
use ep_conformance::Setup;
use ep_conformance::harness::Suite;
use ep_core::layout::Queues;
use ep_core::transport::AnyTransport;

struct Doubles;

impl Network for Doubles {
    /// Each table of lanes and queues has a third of the communicators.
    fn transport(&self, setup: &Setup) -> AnyTransport {
        AnyTransport::new(Double::new(Queues::NAMED[setup.seed as usize % Queues::NAMED.len()], setup.seed))
    }

    fn far_lanes(&self) -> Queues {
        Queues::ONE
    }
}

const THREADS: Host<Doubles> = Host { network: Doubles, campaign: 400, largest: (4, 4), one_in: 1, absent: None };

const PROCESSES: Apart<looped::Apart> =
    Apart { network: looped::Apart, campaign: 60, one_in: 4, absent: None, befall: broken::befall };

fn main() -> ExitCode {
    Suite::default()
        .on("threads", THREADS)
        .on("loop", looped::RANKS)
        .with(broken::trials())
        .run_with_processes(PROCESSES)
}
