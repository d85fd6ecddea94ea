//! Faults on the real path: engines whose ranks are threads of two or three nodes, with RoCE between them over a link that is
//! disturbed, or with settings that run dry. What heals ends in right results; what does not ends, well before the deadline where
//! anybody can know it, in a fault that names the peer; and the survivors recover.
//!
//! The link must be a pair of interfaces that this program may disturb, as in the guest of `ci/softroce/run`
//! (`SOFTROCE_DEVICES`). Elsewhere every test is counted as ignored and says so. Processes that are killed are in the target
//! `processes`, lanes alone in `ep-roce`.

mod credit;
mod job;
mod link;
mod network;
mod wrong;

use std::process::ExitCode;

use ep_roce::Settings;
use libtest_mimic::{Arguments, Trial};

/// A name, and what is done with the devices.
type Test = (&'static str, fn(&Settings));

fn main() -> ExitCode {
    let devices = std::env::var("SOFTROCE_DEVICES").ok().map(|devices| devices.replace(',', "/"));
    let settings = devices.map(|devices| {
        // Emulated devices have little memory.
        let settings = Settings::new().devices(devices.parse().expect("names of devices"));
        settings.queue_depth(32).and_then(|settings| settings.receive_depth(64)).expect("within limits")
    });
    let why = "NOT RUN: no link that may be disturbed (SOFTROCE_DEVICES); see ci/softroce/run";
    if settings.is_none() {
        // Not on the output: who lists the tests reads that.
        eprintln!("{why}");
    }
    let trial = |(name, test): Test| match settings.clone() {
        Some(settings) => Trial::test(name, move || {
            test(&settings);
            Ok(())
        }),
        None => Trial::test(name, move || Err(why.into())).with_ignored_flag(true).with_kind("skipped: no such link"),
    };
    let mut arguments = Arguments::from_args();
    // There is one link.
    arguments.test_threads = Some(1);
    let trials = network::tests().into_iter().chain(credit::tests()).map(trial).collect();
    libtest_mimic::run(&arguments, trials).exit_code()
}
