//! Ranks of two nodes that recover together, as threads and on one thread.
#![allow(unreachable_pub)] // The test targets that hold it are crates of their own.

use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use ep_conformance::Setup;
use ep_core::{Endpoint as _, Error, Fault, Nanos, Phase, Rank, RankSet, Settings, Shape, Topology};
use ep_cuda::{Cluster, CudaEndpoint};
use libtest_mimic::Trial;

use crate::common;

const DEADLINE: Nanos = Nanos::from_secs(10);
/// What nobody waits for takes less, however busy the machine is.
const SOON: Duration = Duration::from_secs(5);

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

/// Lets work get as far as it gets alone, which is not to its end: by time, as a busy machine makes sleeps long, and a few times at least.
fn goes_on<F: Future>(work: &mut Pin<Box<F>>, because: &str) {
    let (began, mut polls) = (Instant::now(), 0);
    while polls < 20 || began.elapsed() < Duration::from_millis(100) {
        assert!(poll(work).is_pending(), "{because}");
        polls += 1;
        std::thread::sleep(Duration::from_micros(100));
    }
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

/// Rank 1 ends when both have agreed and it has not connected.
fn one_that_ends_behind_the_agreement() -> Result<(), String> {
    let mut endpoints = cluster().map_err(|error| error.to_string())?.into_endpoints();
    let (mut leaving, mut staying) = (endpoints.pop().expect("rank 1"), endpoints.pop().expect("rank 0"));
    let nobody = RankSet::new();
    let mut stays = Box::pin(staying.recover(&nobody));
    {
        let mut leaves = Box::pin(leaving.recover(&nobody));
        // Rank 1 has come to the agreement.
        goes_on(&mut leaves, "rank 0 has not come");
        // So rank 0 agrees, and waits for its offer.
        goes_on(&mut stays, "rank 1 has offered nothing");
    }
    drop(leaving);
    let began = Instant::now();
    let ended = loop {
        if let Poll::Ready(ended) = poll(&mut stays) {
            break ended;
        }
    };
    let gone = Fault::PeerGone { peer: Rank(1), phase: Phase::Recovery };
    let fault = ended.as_ref().err().and_then(Error::failure).map(|failure| failure.fault);
    if fault != Some(gone) || began.elapsed() >= SOON {
        return Err(format!("after {:?}: {ended:?}", began.elapsed()));
    }
    Ok(())
}

type Named = (&'static str, fn() -> Result<(), String>);

/// All of it. `absent`: why nothing runs here.
pub fn trials(absent: Option<&'static str>) -> Vec<Trial> {
    let all: [Named; 2] = [
        ("recovering::again_and_again_on_one_thread", again_and_again),
        ("recovering::a_rank_that_ends_behind_the_agreement_is_named_at_once", one_that_ends_behind_the_agreement),
    ];
    let trial = |(name, body): Named| match absent {
        Some(reason) => Trial::test(name, move || Err(reason.into())).with_ignored_flag(true),
        None => Trial::test(name, move || body().map_err(Into::into)),
    };
    all.map(trial).into()
}
