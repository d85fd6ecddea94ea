//! The shared suite over RoCE: with ranks that are threads, then, as `processes::...`, with ranks that are processes. `ci/softroce/run` has a
//! guest with two devices (`SOFTROCE_DEVICES`); elsewhere `EP_ROCE_DEVICES=NAME/NAME` names those of the nodes, in turn.
//!
//! `EP_ROCE_SIGNAL` chooses how cells are raised: ordered-write, fetch-add (which is what the devices have otherwise) or
//! counting.

use std::process::ExitCode;

use ep_conformance::Setup;
use ep_conformance::harness;
use ep_core::layout::Queues;
use ep_core::transport::AnyTransport;
use ep_roce::{Roce, Settings, Signal};
use libtest_mimic::Trial;

use crate::apart::Apart;
use crate::common::{Host, Network};

/// A network over devices.
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

/// Those that the environment names.
pub(crate) fn devices() -> Option<Settings> {
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

/// The suite over these devices.
pub(crate) fn run(settings: Settings) -> ExitCode {
    let network = Devices(settings);
    let apart = Apart { network: network.clone(), campaign: 4, one_in: 16, befall: |_| Ok(false) };
    // Schedules are the machine's affair here: most seeds change nothing, and an emulated machine is slow.
    let threads = Host { network, campaign: 12, largest: (2, 2), one_in: 6 };
    harness::main_with_processes(|| threads, || apart)
}

/// Says that nothing of it is run, and fails where it is asked for.
pub(crate) fn absent() -> Trial {
    const ABSENT: &str = "no RDMA device is named (SOFTROCE_DEVICES, EP_ROCE_DEVICES); see ci/softroce/run";
    Trial::test("roce", || Err(ABSENT.into())).with_kind(format!("skipped: {ABSENT}")).with_ignored_flag(true)
}
