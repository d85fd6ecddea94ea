//! Queues that are full: of receives that nobody posts anew, of requests that nobody completes.

use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ep_core::{Endpoint as _, Error, Fault, Rank, RankSet};
use ep_roce::{Roce, Settings, Signal};

use crate::Test;
use crate::job::{Job, factor};
use crate::link::{Disturbance, Link};

pub(crate) fn tests() -> Vec<Test> {
    vec![
        ("a_receiver_without_receives_makes_its_senders_wait", dry),
        ("a_receiver_that_never_posts_receives_again_is_named_at_the_deadline", silent),
        ("a_send_queue_of_two_requests_carries_everything", full),
    ]
}

/// The rank that does nothing for a while, so that its adapter has no receives left.
const SLEEPER: Rank = Rank(3);

/// How often receivers have said that they are not ready, on all devices.
fn refusals() -> u64 {
    let devices = std::fs::read_dir("/sys/class/infiniband").expect("RDMA devices").flatten();
    let read = |device: std::fs::DirEntry| {
        let path = device.path().join("ports/1/hw_counters/send_rnr_err");
        let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        text.trim().parse::<u64>().expect("a number")
    };
    devices.map(read).sum()
}

/// One message is all that each lane's receiver has room for. A lane's retries last a minute, longer than any wait here: Soft-RoCE
/// sometimes takes the answer that a receiver is not ready for none, where adapters do not, and would call the lane broken.
fn counting(settings: &Settings) -> Roce {
    let settings = settings.clone().signal(Signal::Counting).queue_depth(8).unwrap();
    Roce::new(settings.receive_depth(1).unwrap().ack_timeout(21).unwrap())
}

/// One rank is slow.
fn dry(settings: &Settings) {
    const ROUNDS: usize = 3;
    let before = refusals();
    let job = Job::new(2, 2, Duration::from_secs(60));
    let seen = job.run(counting(settings), async |ep| {
        let mut seen = Vec::new();
        for _ in 0..ROUNDS {
            if ep.rank() == SLEEPER {
                thread::sleep(Duration::from_millis(700));
            }
            seen.push(job.both(ep).await?);
        }
        Ok(seen)
    });
    let seen: Vec<_> = seen.into_iter().collect::<Result<_, Error>>().expect("no rank failed");
    for round in 0..ROUNDS {
        job.verify(&RankSet::new(), seen.iter().map(|seen| seen[round].clone()));
    }
    let refusals = refusals() - before;
    println!("{refusals} times a receiver was not ready");
    assert!(refusals > 0);
}

/// Its process lives, its connections live, it only never looks: nobody can know that it will not, so its senders repeat until
/// their time is over.
fn silent(settings: &Settings) {
    // Rounds that go well must fit, however busy the machine is.
    let deadline = Duration::from_secs(4) * factor();
    let before = refusals();
    let others = AtomicU32::new(3);
    let job = Job::new(2, 2, deadline);
    let ended = job.run(counting(settings), async |ep| {
        job.both(ep).await.unwrap();
        let began = Instant::now();
        while ep.rank() == SLEEPER && others.load(Ordering::Relaxed) > 0 && began.elapsed() < 2 * deadline {
            thread::sleep(Duration::from_millis(10));
        }
        let began = Instant::now();
        let failure = *job.both(ep).await.unwrap_err().failure().unwrap();
        let took = began.elapsed();
        others.fetch_sub(1, Ordering::Relaxed);
        // Whose node is given up cannot go on with the others.
        let mask = (ep.rank() != SLEEPER).then_some(failure.culprit);
        (failure, took, job.go_on(ep, mask).await)
    });
    let mut seen = Vec::new();
    for (rank, (failure, took, after)) in (0..).map(Rank).zip(ended) {
        println!("rank {rank}: {failure}, after {took:?}");
        assert!(took < deadline * 3 / 2, "rank {rank} took {took:?}");
        if rank != SLEEPER {
            assert_eq!(failure.culprit, SLEEPER, "rank {rank}: {failure}");
            assert!(matches!(failure.fault, Fault::Timeout { .. } | Fault::Aborted { .. }), "rank {rank}: {failure}");
        }
        if rank.0 < 2 {
            seen.push(after.unwrap_or_else(|error| panic!("rank {rank} after recovery: {error}")));
        } else {
            assert!(after.is_err(), "the node of rank {rank} was given up");
        }
    }
    assert!(refusals() > before, "a receiver was not ready");
    job.verify(&[Rank(2), Rank(3)].into_iter().collect(), seen);
}

/// A row and its signal fill a lane; each takes milliseconds.
fn full(settings: &Settings) {
    let _slow = Link::disturb(Disturbance::delay(Duration::from_millis(1)));
    let job = Job::new(2, 2, Duration::from_secs(60));
    for signal in [Signal::FetchAdd, Signal::Counting] {
        let settings = settings.clone().signal(signal).queue_depth(2).unwrap().receive_depth(2).unwrap();
        let seen = job.run(Roce::new(settings), async |ep| job.both(ep).await.unwrap());
        job.verify(&RankSet::new(), seen);
    }
}
