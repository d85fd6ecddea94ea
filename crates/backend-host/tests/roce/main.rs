//! The shared suite on CPU ranks whose nodes reach each other over RoCE. `ci/softroce/run` has a guest with two devices
//! (`SOFTROCE_DEVICES`); elsewhere `EP_ROCE_DEVICES=NAME/NAME` names those of the nodes, in turn. Without either, every case
//! is counted as ignored and says so. With ranks that are threads, then, as `processes::...`, with ranks that are processes.
//!
//! `EP_ROCE_SIGNAL` chooses how cells are raised: ordered-write, fetch-add (which is what the devices have otherwise) or
//! counting.

#[path = "../common/apart.rs"]
mod apart;
#[path = "../common/mod.rs"]
mod common;

use apart::Apart;
use common::{Host, Network};
use ep_conformance::Setup;
use ep_core::layout::Queues;
use ep_core::transport::AnyTransport;
use ep_roce::{Roce, Settings, Signal};

/// Found in the environment, when the suite begins.
#[derive(Clone)]
struct Devices(Settings);

impl Network for Devices {
    fn transport(&self, _: &Setup) -> AnyTransport {
        AnyTransport::new(Roce::new(self.0.clone()))
    }

    fn far_lanes(&self) -> Queues {
        Queues::ROWS_WITH_CREDIT
    }
}

fn devices() -> Option<Settings> {
    let named = std::env::var("EP_ROCE_DEVICES").ok();
    let named = named.or_else(|| Some(std::env::var("SOFTROCE_DEVICES").ok()?.replace(',', "/")))?;
    // Many small communicators: each lane's queue costs memory, and emulated devices have little.
    let settings = Settings::new().devices(named.parse().expect("names of devices"));
    let settings = settings.queue_depth(32).and_then(|settings| settings.receive_depth(64)).expect("within limits");
    // Sixty-four ranks on a busy emulated machine may keep each other waiting for an answer for longer than the default half second.
    let settings = settings.ack_timeout(17).expect("within limits");
    Some(match std::env::var("EP_ROCE_SIGNAL") {
        Ok(signal) => settings.signal(signal.parse::<Signal>().expect("a signal")),
        Err(_) => settings,
    })
}

fn main() -> std::process::ExitCode {
    let settings = devices();
    let absent = settings.is_none().then_some("no RDMA device is named (SOFTROCE_DEVICES, EP_ROCE_DEVICES)");
    if let Some(absent) = absent {
        // Not on the output: who lists the cases reads that.
        eprintln!("NOT RUN: {absent}; see ci/softroce/run");
    }
    let network = Devices(settings.unwrap_or_default());
    let apart = Apart { network: network.clone(), campaign: 4, one_in: 16, absent, befall: |_| Ok(()) };
    // Schedules are the machine's affair here: most seeds change nothing, and an emulated machine is slow.
    let threads = Host { network, campaign: 12, largest: (2, 2), one_in: 3, absent };
    ep_conformance::harness::main_with_processes(|| threads, || apart)
}
