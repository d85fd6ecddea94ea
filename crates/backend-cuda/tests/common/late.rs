//! A rank whose host stands still before it combines: the others give it up, recover, and lay other rows where its results lay. What it pulls then it
//! does not use.
#![allow(unreachable_pub)] // The test targets that hold it are crates of their own.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ep_conformance::Setup;
use ep_conformance::drive::upload;
use ep_conformance::workload::Workload;
use ep_core::engine::Combine;
use ep_core::{Endpoint as _, Error, Fault, Nanos, Placement, Rank, Settings, Shape, Topology};
use ep_cuda::CudaEndpoint;
use libtest_mimic::Trial;

use crate::common;

/// Of which the results lie first in an outbox, where rows of the next dispatch lie; but what describes them lies behind those.
const LATE: Rank = Rank(0);
/// What waits for the late rank waits so long; no other wait does, however busy the machine is.
const DEADLINE: Nanos = Nanos::from_secs(6);
/// Nothing takes longer.
const LONG: Duration = Duration::from_secs(60);

/// What the late rank's combine gave; of the others nothing.
async fn act(ep: &mut CudaEndpoint, setup: &Setup, ready: &AtomicUsize) -> Result<Option<Result<(), Error>>, Error> {
    let mut batch = Workload::new(setup.shape, vec![6; 3]).seed(7).batch(ep.rank())?;
    // Nobody waits for results of the late rank, and it not for whoever would take them: experts 0 and 1 are its own.
    batch.topk_idx = (0..6).flat_map(|token| (0..3).map(move |k| 2 + (token + k) % 4)).collect();
    let (x, routing) = upload(ep, &batch)?;
    let got = ep.dispatch(&x, &routing).await?;
    let results = vec![1; got.rows as usize * setup.shape.result_bytes() as usize];
    let y = ep.rows(&results, got.rows)?;
    if ep.rank() == LATE {
        let began = Instant::now();
        while ready.load(Ordering::Acquire) < 2 && began.elapsed() < LONG {
            thread::sleep(Duration::from_millis(1));
        }
        return Ok(Some(ep.combine(&y, &got.handle, Combine::default()).await.map(drop)));
    }
    let combined = ep.combine(&y, &got.handle, Combine::default()).await;
    let failed =
        combined.err().ok_or_else(|| Error::invalid("a combine without the late rank", "well", "a failure"))?;
    if failed.failure().map(|failure| failure.culprit) != Some(LATE) {
        return Err(failed);
    }
    ep.recover(&[LATE].into_iter().collect()).await?;
    ep.dispatch(&x, &routing).await?;
    ready.fetch_add(1, Ordering::Release);
    Ok(None)
}

fn does_not_use_what_is_not_what_was_offered() -> Result<(), String> {
    let text = |error: Error| error.to_string();
    let topology = Topology::new(1, 3).map_err(text)?;
    let shape = Shape::builder().experts(6).topk(3).hidden(32).max_tokens(8).build().map_err(text)?;
    let settings =
        Settings::builder(&shape, &topology).placement(Placement::Pulled).channels(1).slots(8).deadline(DEADLINE);
    let setup = Setup::new(shape, topology, 7).map_err(text)?.settings(settings.build().map_err(text)?);
    let cluster = common::builder(&setup, None, None).map_err(text)?.build(shape).map_err(text)?;
    let ready = AtomicUsize::new(0);
    let ended = common::run_on(cluster, &setup, async |mut ep| act(&mut ep, &setup, &ready).await)?;
    let ended = ended.into_iter().map(|ended| ended.ok_or("a rank did not end")?.map_err(text));
    let late =
        ended.collect::<Result<Vec<_>, String>>()?.swap_remove(LATE.index()).ok_or("the late rank did not combine")?;
    match late.as_ref().err().and_then(Error::failure).map(|failure| (failure.culprit, failure.fault)) {
        Some((LATE, Fault::Aborted { .. })) => Ok(()),
        _ => Err(format!("the late rank was given up, and its combine says {late:?}")),
    }
}

/// `absent`: why nothing runs here.
pub fn trial(absent: Option<&'static str>) -> Trial {
    let name = "late::what_a_rank_that_was_given_up_pulls_it_does_not_use";
    match absent {
        Some(reason) => Trial::test(name, move || Err(reason.into())).with_ignored_flag(true),
        None => Trial::test(name, || does_not_use_what_is_not_what_was_offered().map_err(Into::into)),
    }
}
