//! The shared suite on CPU ranks: threads of this process, and between nodes a transport made for tests, or a network made of
//! software; then processes of a host with that network between nodes, and processes of which one is broken.
//!
//! Where RDMA devices are named ([`roce::devices`]) the nodes of all ranks reach each other over those instead.
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
mod roce;

use std::process::ExitCode;

use apart::Apart;
use common::{Host, Network};
use double::Double;
use ep_conformance::Setup;
use ep_conformance::harness::{Suite, share};
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

fn main() -> ExitCode {
    if let Some(settings) = roce::devices() {
        return roce::run(settings);
    }
    let threads = Host { network: Doubles, campaign: share(400, 60), largest: (4, 4), one_in: share(1, 2) };
    let (campaign, one_in) = (share(60, 15), share(4, 8));
    Suite::default()
        .on("threads", threads)
        .on("loop", looped::RANKS)
        .with(broken::trials())
        .with(vec![roce::absent()])
        .run_with_processes(Apart { network: looped::Apart, campaign, one_in, befall: broken::befall })
}
