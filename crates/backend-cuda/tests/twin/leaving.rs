//! A communicator with staged rows ends while a kernel of another one of the process waits for a rank that has launched nothing yet. Its pinned memory waits for no kernel.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ep_conformance::Setup;
use ep_conformance::drive::{Round, round};
use ep_conformance::workload::Workload;
use ep_core::reference::World;
use ep_core::{Endpoint as _, Error, Nanos, Rank, RankSet, Settings, Shape, Topology};
use ep_cuda::Cluster;
use ep_loop::Loop;
use libtest_mimic::Trial;

use crate::common;

const DEADLINE: Nanos = Nanos::from_secs(30);
/// So long a launch takes at most to begin.
const WHILE: Duration = Duration::from_millis(500);

/// Two nodes of one rank.
fn cluster(setup: &Setup) -> Result<Cluster, Error> {
    common::builder(setup, None, None)?.far_staged(Loop::new()).build(setup.shape)
}

fn ends_beside_a_kernel() -> Result<(), String> {
    let text = |error: Error| error.to_string();
    let topology = Topology::new(2, 1).map_err(text)?;
    let shape = Shape::builder().experts(8).topk(4).hidden(32).max_tokens(16).build().map_err(text)?;
    let settings = Settings::builder(&shape, &topology).slots(2).deadline(DEADLINE).build().map_err(text)?;
    let setup = Setup::new(shape, topology, 1).map_err(text)?.settings(settings);
    let batches = Workload::new(shape, vec![9; 2]).seed(1).batches().map_err(text)?;
    let world = World::new(shape, topology, RankSet::new()).map_err(text)?;
    let ends = Mutex::new(Some(cluster(&setup).map_err(text)?));
    let begins = AtomicBool::new(false);
    let told = common::run_on(cluster(&setup).map_err(text)?, &setup, async |mut ep| {
        if ep.rank() == Rank(1) {
            let came = Instant::now();
            while !begins.load(Ordering::Relaxed) {
                assert!(came.elapsed() < Duration::from_secs(60), "rank 0 has failed");
                thread::yield_now();
            }
            // The other rank's kernel waits for this one's counts now.
            thread::sleep(WHILE);
            drop(ends.lock().expect("no panic").take());
        }
        begins.store(true, Ordering::Relaxed);
        let (began, batch) = (Instant::now(), &batches[ep.rank().index()]);
        let done = round(&mut ep, &world, batch, &Round::default()).await;
        (done.err(), began.elapsed())
    })?;
    match told.iter().flatten().find(|(failed, _)| failed.is_some()) {
        Some((failed, took)) => Err(format!("after {took:?}: {failed:?}")),
        None => Ok(()),
    }
}

pub(crate) fn trial(absent: Option<&'static str>) -> Trial {
    let name = "leaving::pinned_memory_waits_for_no_kernel_of_others";
    Trial::test(name, || ends_beside_a_kernel().map_err(Into::into)).with_ignored_flag(absent.is_some())
}
