//! Lanes on real RDMA devices: two ports that reach each other. `ci/softroce/run` has a guest with such (`SOFTROCE_DEVICES`);
//! elsewhere `EP_ROCE_DEVICES=NAME/NAME` names those of two nodes. Without either, every test is counted as ignored and says so.

mod bench;
mod failures;
mod ordinary;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};

/// A name, and what is done with the devices.
type Test = (&'static str, fn(&str));

/// The devices of the two nodes, as [`ep_roce::Choices`] reads them.
fn devices() -> Option<String> {
    let named = std::env::var("EP_ROCE_DEVICES").ok();
    named.or_else(|| Some(std::env::var("SOFTROCE_DEVICES").ok()?.replace(',', "/")))
}

fn main() -> ExitCode {
    let found = devices();
    let why = "NOT RUN: no RDMA devices are named (SOFTROCE_DEVICES or EP_ROCE_DEVICES); see ci/softroce/run";
    if found.is_none() {
        // Not on the output: who lists the tests reads that.
        eprintln!("{why}");
    }
    let trial = |(name, test): Test| {
        // A link can be disturbed in the guest only.
        let disturbs = name.contains("link") && !bench::Link::is_ours();
        match found.clone().filter(|_| !disturbs) {
            Some(devices) => Trial::test(name, move || {
                test(&devices);
                Ok(())
            }),
            None => {
                Trial::test(name, move || Err(why.into())).with_ignored_flag(true).with_kind("skipped: no such device")
            }
        }
    };
    let mut arguments = Arguments::from_args();
    // The devices are shared, and emulated ones slow: one at a time.
    arguments.test_threads = Some(1);
    let trials = ordinary::tests().into_iter().chain(failures::tests()).map(trial).collect();
    libtest_mimic::run(&arguments, trials).exit_code()
}
