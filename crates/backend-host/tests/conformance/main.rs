//! The shared suite on CPU ranks: threads of this process, and between nodes a transport made for tests, or a network made of
//! software; then processes of one node, and processes of which one is broken.
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
use ep_core::transport::NoTransport;

struct Doubles;

impl Network for Doubles {
    type Transport = Double;

    /// Each table of lanes and queues has a third of the communicators.
    fn transport(&self, setup: &Setup) -> Double {
        Double::new(Queues::NAMED[setup.seed as usize % Queues::NAMED.len()], setup.seed)
    }

    fn far_lanes(&self) -> Queues {
        Queues::ONE
    }
}

/// Ranks that are processes meet on one node only: the transport made for tests joins threads.
struct OneNode;

impl Network for OneNode {
    type Transport = NoTransport;

    fn transport(&self, _: &Setup) -> NoTransport {
        NoTransport
    }

    fn far_lanes(&self) -> Queues {
        Queues::PER_ROLE
    }
}

const THREADS: Host<Doubles> = Host { network: Doubles, campaign: 400, largest: (4, 4), one_in: 1, absent: None };

const PROCESSES: Apart<OneNode> = Apart {
    network: OneNode,
    campaign: 60,
    one_in: 4,
    one_node: Some("ranks that are processes have no transport for tests between nodes"),
    absent: None,
    befall: broken::befall,
};

fn main() -> ExitCode {
    Suite::default()
        .on("threads", THREADS)
        .on("loop", looped::RANKS)
        .with(broken::trials())
        .run_with_processes(PROCESSES)
}
