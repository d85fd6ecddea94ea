//! Ranks of two nodes, threads with a transport made for tests between them: a lane that breaks, a rank that leaves, and how the
//! others go on.

use std::future::Future as _;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use crate::double::Double;
use ep_conformance::drive::{Round, round};
use ep_conformance::verify::{self, Observed};
use ep_conformance::workload::{Batch, Workload};
use ep_core::layout::Queues;
use ep_core::reference::World;
use ep_core::{Endpoint as _, Error, Nanos, Rank, RankSet, Settings, Shape, Topology};
use ep_host::Cluster;

const HOW: Round = Round::PULLING;

fn topology() -> Topology {
    Topology::new(2, 2).unwrap()
}

fn shape() -> Shape {
    Shape::builder().experts(8).topk(3).hidden(64).max_tokens(20).build().unwrap()
}

/// The layer without the ranks of `mask`, and its batches.
fn layer(mask: &RankSet) -> (World, Vec<Batch>) {
    let tokens = topology().all().map(|rank| if mask.contains(rank) { 0 } else { 20 }).collect();
    let batches = Workload::new(shape(), tokens).seed(3).batches().unwrap();
    (World::new(shape(), topology(), mask.clone()).unwrap(), batches)
}

fn builder(far_lanes: Queues) -> ep_host::Builder<Double> {
    let settings = Settings::builder(&shape(), &topology()).slots(2).deadline(Nanos::from_secs(60)).build().unwrap();
    Cluster::builder(topology()).settings(settings).far(Double::new(far_lanes, 5))
}

/// Rank 2 does one round and leaves. Its node leaves with it; the other goes on, on lanes that are connected anew.
#[test]
fn a_rank_that_leaves_takes_its_node_along_and_the_other_node_goes_on() {
    for far_lanes in Queues::NAMED {
        let outcomes = builder(far_lanes).build(shape()).unwrap().run(async |mut ep| {
            let (world, batches) = layer(&RankSet::new());
            let me = ep.rank();
            let batch = &batches[me.index()];
            if me == Rank(2) {
                return round(&mut ep, &world, batch, &HOW).await.map(|_| Observed::default());
            }
            let began = Instant::now();
            // Who is still in the first round may hear of it there.
            let failure = loop {
                if let Err(failure) = round(&mut ep, &world, batch, &HOW).await {
                    break failure;
                }
            };
            assert!(began.elapsed() < Duration::from_secs(20), "long before the deadline");
            assert_eq!(failure.failure().map(|failure| failure.culprit), Some(Rank(2)), "rank {me}: {failure}");
            ep.recover(&[Rank(2)].into_iter().collect()).await?;
            let (world, batches) = layer(ep.mask());
            round(&mut ep, &world, &batches[me.index()], &HOW).await.map(|(observed, _)| observed)
        });
        let mut outcomes = outcomes.unwrap();
        assert_eq!(outcomes[3], Err(Error::Excluded { rank: Rank(3) }), "its rail is gone");
        outcomes[3] = Ok(Observed::default());
        let observed: Vec<Observed> = outcomes.into_iter().collect::<Result<_, _>>().unwrap();
        let (world, batches) = layer(&[Rank(2), Rank(3)].into_iter().collect());
        assert!(verify::run(&world, &batches, &observed).unwrap().rows > 0);
    }
}

/// Rank 2 lives and does nothing. Who waits for it has sent it all there is to send, and finds out by probing it, long before the
/// deadline.
#[test]
fn a_rank_out_of_reach_is_named_by_those_who_only_wait_for_it() {
    const DEADLINE: Duration = Duration::from_secs(20);
    let settings = Settings::builder(&shape(), &topology()).slots(2).deadline(Nanos(DEADLINE.as_nanos() as u64));
    let mut network = Double::new(Queues::ONE, 5);
    network.out_of_reach = Some(Rank(2));
    let cluster = Cluster::builder(topology()).settings(settings.build().unwrap()).far(network);
    let others = AtomicU32::new(3);
    let outcomes = cluster.build(shape()).unwrap().run(async |mut ep| {
        let (world, batches) = layer(&RankSet::new());
        let me = ep.rank();
        let began = Instant::now();
        let ended = match me {
            Rank(2) => Ok(()),
            _ => {
                let ended = round(&mut ep, &world, &batches[me.index()], &HOW).await.map(drop);
                others.fetch_sub(1, Ordering::Relaxed);
                ended
            }
        };
        let took = began.elapsed();
        // Who leaves would be gone, which is another matter.
        while others.load(Ordering::Relaxed) > 0 && began.elapsed() < 2 * DEADLINE {
            thread::sleep(Duration::from_millis(1));
        }
        Ok((ended, took))
    });
    for (rank, (ended, took)) in outcomes.unwrap().into_iter().map(Result::<_, Error>::unwrap).enumerate() {
        if rank != 2 {
            let failure = *ended.unwrap_err().failure().unwrap();
            assert_eq!(failure.culprit, Rank(2), "rank {rank}: {failure}");
            assert!(took < DEADLINE / 2, "rank {rank} took {took:?}: {failure}");
        }
    }
}

/// Nobody is given up: all connect anew, and the cells between nodes begin anew with them.
#[test]
fn all_go_on_together_on_new_connections_again_and_again() {
    for far_lanes in Queues::NAMED {
        let outcomes = builder(far_lanes).build(shape()).unwrap().run(async |mut ep| {
            let (world, batches) = layer(&RankSet::new());
            let batch = &batches[ep.rank().index()];
            for _ in 0..3 {
                round(&mut ep, &world, batch, &HOW).await?;
                ep.recover(&RankSet::new()).await?;
            }
            round(&mut ep, &world, batch, &HOW).await.map(|(observed, _)| observed)
        });
        let observed: Vec<Observed> = outcomes.unwrap().into_iter().collect::<Result<_, _>>().unwrap();
        let (world, batches) = layer(&RankSet::new());
        assert!(verify::run(&world, &batches, &observed).unwrap().rows > 0);
    }
}

/// Returns when so many calls of it have begun.
fn meet(come: &AtomicU32, all: u32) {
    let began = Instant::now();
    come.fetch_add(1, Ordering::SeqCst);
    while come.load(Ordering::SeqCst) < all {
        assert!(began.elapsed() < Duration::from_secs(60), "another rank has failed");
        thread::sleep(Duration::from_millis(1));
    }
}

fn said(ended: Result<(), Error>) -> String {
    ended.map_or_else(|error| error.to_string(), |()| "ok".to_owned())
}

/// Rank 0 drops a recovery when all have agreed and it has not heard so; then all recover again, at the same time.
#[test]
fn a_recovery_that_was_dropped_behind_its_agreement_can_be_done_again() {
    let settings = Settings::builder(&shape(), &topology()).slots(2).deadline(Nanos::from_secs(5)).build().unwrap();
    let cluster = Cluster::builder(topology()).settings(settings).far(Double::new(Queues::ONE, 5));
    let (first, come, again) = (AtomicU32::new(0), AtomicU32::new(0), AtomicU32::new(0));
    let outcomes = cluster.build(shape()).unwrap().run(async |mut ep| {
        let me = ep.rank();
        {
            let nobody = RankSet::new();
            let mut recovery = pin!(ep.recover(&nobody));
            let mut context = Context::from_waker(Waker::noop());
            // Rank 0 comes first, so that it has not heard when the last one comes.
            while me != Rank(0) && first.load(Ordering::SeqCst) == 0 {
                thread::sleep(Duration::from_millis(1));
            }
            let began = recovery.as_mut().poll(&mut context);
            first.fetch_add(1, Ordering::SeqCst);
            meet(&come, 4);
            if me != Rank(0)
                && let Poll::Pending = began
            {
                // The others wait for what rank 0 does not give any more.
                let _ = recovery.await;
            }
        }
        meet(&again, 4);
        said(ep.recover(&RankSet::new()).await)
    });
    assert_eq!(outcomes.unwrap(), ["ok"; 4]);
}

/// Rank 0 comes to recover first, and the others shortly before its time is up; connecting takes longer than what is left.
#[test]
fn ranks_that_come_late_to_a_recovery_come_together() {
    const DEADLINE: Duration = Duration::from_secs(8);
    let deadline = Nanos(DEADLINE.as_nanos() as u64);
    let settings = Settings::builder(&shape(), &topology()).slots(2).deadline(deadline).build().unwrap();
    let slow = Arc::new(AtomicBool::new(false));
    let mut network = Double::new(Queues::ONE, 5);
    network.slow = Arc::clone(&slow);
    let cluster = Cluster::builder(topology()).settings(settings).far(network).build(shape()).unwrap();
    slow.store(true, Ordering::SeqCst);
    let (come, done) = (AtomicU32::new(0), AtomicU32::new(0));
    let outcomes = cluster.run(async |mut ep| {
        meet(&come, 4);
        if ep.rank() != Rank(0) {
            thread::sleep(DEADLINE - Duration::from_secs(2));
        }
        let ended = said(ep.recover(&RankSet::new()).await);
        meet(&done, 4);
        ended
    });
    assert_eq!(outcomes.unwrap(), ["ok"; 4]);
}
