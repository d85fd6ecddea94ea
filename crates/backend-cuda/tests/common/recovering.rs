//! Ranks of two nodes that recover together, as threads and on one thread.
#![allow(unreachable_pub)] // The test targets that hold it are crates of their own.

use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use ep_conformance::Setup;
use ep_core::{Endpoint as _, Error, Nanos, RankSet, Settings, Shape, Topology};
use ep_cuda::{Cluster, CudaEndpoint};
use libtest_mimic::Trial;

use crate::common;

const DEADLINE: Nanos = Nanos::from_secs(10);

/// Two nodes of one rank.
fn cluster() -> Result<Cluster, Error> {
    let topology = Topology::new(2, 1)?;
    let shape = Shape::builder().experts(8).topk(4).hidden(32).max_tokens(16).build()?;
    let settings = Settings::builder(&shape, &topology).slots(2).deadline(DEADLINE).build()?;
    let setup = Setup::new(shape, topology, 1)?.settings(settings);
    common::builder(&setup, None, None)?.build(shape)
}

fn poll<F: Future>(work: &mut Pin<Box<F>>) -> Poll<F::Output> {
    work.as_mut().poll(&mut Context::from_waker(Waker::noop()))
}

/// Both take turns on this thread, each as far as it gets: so one has often begun its next recovery before the other has heard that all are connected.
fn again_and_again() -> Result<(), String> {
    const TIMES: u32 = 20;
    let endpoints = cluster().map_err(|error| error.to_string())?.into_endpoints();
    let recoveries = async |mut ep: CudaEndpoint| {
        for time in 0..TIMES {
            let (me, began) = (ep.rank(), Instant::now());
            if let Err(error) = ep.recover(&RankSet::new()).await {
                return (ep, Err(format!("rank {me}, recovery {time}, after {:?}: {error}", began.elapsed())));
            }
        }
        (ep, Ok(()))
    };
    let mut running: Vec<_> = endpoints.into_iter().map(|ep| Box::pin(recoveries(ep))).collect();
    // Nobody leaves before all are done.
    let mut done = Vec::new();
    while !running.is_empty() {
        running.retain_mut(|work| match poll(work) {
            Poll::Ready(ended) => {
                done.push(ended);
                false
            }
            Poll::Pending => true,
        });
    }
    done.into_iter().try_for_each(|(_, recovered)| recovered)
}

type Named = (&'static str, fn() -> Result<(), String>);

/// All of it. `absent`: why nothing runs here.
pub fn trials(absent: Option<&'static str>) -> Vec<Trial> {
    let all: [Named; 1] = [("recovering::again_and_again_on_one_thread", again_and_again)];
    let trial = |(name, body): Named| match absent {
        Some(reason) => Trial::test(name, move || Err(reason.into())).with_ignored_flag(true),
        None => Trial::test(name, move || body().map_err(Into::into)),
    };
    all.map(trial).into()
}
