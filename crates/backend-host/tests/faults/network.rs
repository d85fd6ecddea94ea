//! A link that loses packets, for a while or for ever, and a key that is wrong.

use std::thread;
use std::time::Duration;

use ep_core::layout::Queues;
use ep_core::{Endpoint as _, Error, Failure, Fault, LaneCause, Rank, RankSet};
use ep_roce::{Roce, Settings, Signal};

use crate::Test;
use crate::job::{Both, Job, Rounds};
use crate::link::{Disturbance, Link};
use crate::wrong::Wrong;

const SIGNALS: [Signal; 3] = [Signal::FetchAdd, Signal::OrderedWrite, Signal::Counting];
/// Of operations. What is noticed is noticed long before.
const DEADLINE: Duration = Duration::from_secs(60);

pub(crate) fn tests() -> Vec<Test> {
    vec![
        ("half_a_percent_of_all_packets_lost_changes_nothing", loss),
        ("a_blackhole_of_200_ms_heals", heals),
        ("a_node_behind_a_permanent_blackhole_is_named_and_the_others_recover", node_lost),
        ("two_nodes_that_a_blackhole_parts_name_each_other_and_recover_when_it_is_gone", parted),
        ("a_wrong_remote_key_is_named_and_all_recover_with_the_right_one", wrong_key),
    ]
}

/// Runs rounds until `disturb` has ended, and gives what each rank saw in each, or why it failed.
fn while_disturbed<R: Send>(
    job: &Job,
    settings: &Settings,
    disturb: impl FnOnce(&Rounds) -> R + Send,
) -> (Vec<Result<Vec<Both>, Error>>, R) {
    let rounds = Rounds::new();
    thread::scope(|scope| {
        let disturbance = scope.spawn(|| {
            let said = disturb(&rounds);
            rounds.end_soon();
            said
        });
        let seen = job.run(Roce::new(settings.clone()), async |ep| {
            let mut seen = Vec::new();
            for round in 1.. {
                if !rounds.includes(round) {
                    break;
                }
                seen.push(job.both(ep).await.inspect_err(|_| rounds.fail())?);
                rounds.done(ep.rank());
            }
            Ok(seen)
        });
        (seen, disturbance.join().expect("the link is disturbed"))
    })
}

/// Compares all rounds with the oracle; how many there were.
fn verify_all(job: &Job, seen: Vec<Result<Vec<Both>, Error>>) -> usize {
    let seen: Vec<Vec<Both>> = seen.into_iter().collect::<Result<_, _>>().expect("no rank failed");
    let rounds = seen[0].len();
    assert!(seen.iter().all(|seen| seen.len() == rounds), "all ranks did the same rounds");
    for round in 0..rounds {
        job.verify(&RankSet::new(), seen.iter().map(|seen| seen[round].clone()));
    }
    rounds
}

fn loss(settings: &Settings) {
    const LOST: u64 = 10;
    let job = Job::new(2, 2, DEADLINE);
    for signal in SIGNALS {
        let link = Link::disturb(Disturbance::loss(0.005));
        let (seen, lost) = while_disturbed(&job, &settings.clone().signal(signal), |rounds| {
            while link.lost() < LOST && rounds.pass(1, DEADLINE) {}
            link.lost()
        });
        assert!(lost >= LOST, "{lost} packets lost");
        println!("{signal}: {} rounds, {lost} packets lost", verify_all(&job, seen));
    }
}

/// With the settings that ranks have if nobody says otherwise: lanes give up 470 ms after the last answer. A machine that is too busy
/// to end the blackhole well before that tries again.
fn heals(settings: &Settings) {
    const HOLE: Duration = Duration::from_millis(200);
    const MOST: Duration = Duration::from_millis(300);
    const HOLES: usize = 3;
    const ATTEMPTS: usize = 5;
    let job = Job::new(2, 2, DEADLINE);
    for _ in 0..ATTEMPTS {
        let link = Link::disturb(Disturbance::NONE);
        let (seen, holes) = while_disturbed(&job, settings, |rounds| {
            let mut holes: Vec<(Duration, Duration)> = Vec::new();
            while holes.len() < HOLES && holes.iter().all(|&(_, most)| most <= MOST) && rounds.pass(2, DEADLINE) {
                holes.push(link.swallow(HOLE));
            }
            holes
        });
        println!("blackholes, at least and at most: {holes:?}; {} packets lost", link.lost());
        if holes.iter().all(|&(_, most)| most <= MOST) {
            assert!(link.lost() >= HOLES as u64, "each blackhole swallowed something");
            println!("{} rounds", verify_all(&job, seen));
            assert_eq!(holes.len(), HOLES);
            return;
        }
    }
    panic!("no blackhole of {HOLE:?} ended within {MOST:?}: the machine is too busy");
}

/// Cuts the link after some rounds, for as long as what it returns lives. None when a round failed before.
fn cut_soon(rounds: &Rounds) -> Option<Link> {
    let link = Link::disturb(Disturbance::NONE);
    rounds.pass(2, DEADLINE).then(|| {
        link.change(Disturbance::BLACKHOLE);
        link
    })
}

/// That a rank found out by the network that `peers` are out of reach, or was told so.
fn check(rank: Rank, failure: &Failure, peers: &[Rank]) {
    assert!(peers.contains(&failure.culprit), "rank {rank}: {failure}");
    match failure.fault {
        Fault::LaneBroken { lane, cause } => {
            assert!(peers.contains(&lane.peer), "rank {rank}: {failure}");
            assert!(
                matches!(cause, LaneCause::NoAnswer | LaneCause::Flushed | LaneCause::Cut),
                "rank {rank}: {failure}"
            );
        }
        Fault::Aborted { reporter, .. } => assert!(!peers.contains(&reporter), "rank {rank}: {failure}"),
        _ => panic!("rank {rank}: {failure}"),
    }
}

fn is_no_answer(failure: &Failure) -> bool {
    matches!(failure.fault, Fault::LaneBroken { cause: LaneCause::NoAnswer, .. })
}

/// Node 1's device hears and says nothing any more; nodes 0 and 2 share the other one. A rank that has sent something is told by the
/// network soon; one that only waits probes its peers, after a 32nd of the time.
fn node_lost(settings: &Settings) {
    const LOST: Rank = Rank(1);
    let deadline = Duration::from_secs(20);
    let job = Job::new(3, 1, deadline);
    // A busy machine is not to be taken for a blackhole.
    let patient = |settings: Settings| settings.ack_timeout(16).unwrap();
    let kinds = [
        settings.clone(),
        // A lane that is full when the link is cut.
        settings.clone().signal(Signal::Counting).far_lanes(Queues::PER_ROLE).queue_depth(2).unwrap(),
    ]
    .map(patient);
    for settings in kinds {
        let rounds = Rounds::new();
        let (ended, link) = thread::scope(|scope| {
            let cutter = scope.spawn(|| cut_soon(&rounds));
            let ended = job.run(Roce::new(settings), async |ep| {
                let failed = job.until_failure(ep, &rounds).await;
                let mask = (ep.rank() != LOST).then_some(failed.0.culprit);
                (failed, job.go_on(ep, mask).await)
            });
            (ended, cutter.join().unwrap())
        });
        // Until here the link was cut.
        assert!(link.is_some(), "failed before: {:?}", ended[0].0);
        drop(link);
        let mut seen = Vec::new();
        for (rank, ((failure, took), after)) in (0..).map(Rank).zip(&ended) {
            println!("rank {rank}: {failure}, after {took:?}");
            assert!(*took < deadline / 2, "rank {rank} took {took:?}");
            if rank == LOST {
                check(rank, failure, &[Rank(0), Rank(2)]);
                assert_eq!(after.as_ref().err(), Some(&Error::Excluded { rank: LOST }));
            } else {
                check(rank, failure, &[LOST]);
                seen.push(after.clone().unwrap_or_else(|error| panic!("rank {rank} after recovery: {error}")));
            }
        }
        assert!(ended.iter().filter(|((failure, _), _)| is_no_answer(failure)).count() >= 2, "both sides find out");
        job.verify(&[LOST].into_iter().collect(), seen);
    }
}

/// Neither node is dead. When the link is mended all go on together.
fn parted(settings: &Settings) {
    let deadline = Duration::from_secs(20);
    let job = Job::new(2, 2, deadline);
    for signal in [Signal::FetchAdd, Signal::Counting] {
        let rounds = Rounds::new();
        let settings = settings.clone().signal(signal).ack_timeout(16).unwrap();
        let ended = thread::scope(|scope| {
            let cutter = scope.spawn(|| {
                let link = cut_soon(&rounds);
                // One rank has failed, and the others have, or do: no answer comes any more.
                rounds.until_failed(DEADLINE);
                thread::sleep(Duration::from_secs(2));
                link.is_some()
            });
            let ended = job.run(Roce::new(settings), async |ep| {
                let failure = job.until_failure(ep, &rounds).await;
                // What a user does who has heard that the link is mended.
                while !cutter.is_finished() {
                    thread::sleep(Duration::from_millis(5));
                }
                (failure, job.go_on(ep, None).await)
            });
            assert!(cutter.join().unwrap(), "failed before the link was cut: {:?}", ended[0].0);
            ended
        });
        let (mut seen, mut noticed) = (Vec::new(), 0);
        for (rank, ((failure, took), after)) in (0..).map(Rank).zip(ended) {
            println!("{signal}, rank {rank}: {failure}, after {took:?}");
            let others = if rank.0 < 2 { [Rank(2), Rank(3)] } else { [Rank(0), Rank(1)] };
            // Who has noticed nothing before the link is mended may hear the other node's verdict then.
            if !matches!(failure.fault, Fault::Aborted { .. }) {
                check(rank, &failure, &others);
            }
            noticed += usize::from(is_no_answer(&failure));
            assert!(took < deadline / 2, "rank {rank} took {took:?}");
            seen.push(after.unwrap_or_else(|error| panic!("rank {rank} after recovery: {error}")));
        }
        assert!(noticed > 0, "{signal}: nobody says what broke");
        job.verify(&RankSet::new(), seen);
    }
}

/// Rank 3 tells its key wrong: what rank 1 writes to it is refused. The lane between them ends, whichever end notices first.
fn wrong_key(settings: &Settings) {
    const LIAR: Rank = Rank(3);
    let job = Job::new(2, 2, DEADLINE);
    for signal in SIGNALS {
        let rounds = Rounds::new();
        let transport = Wrong { roce: Roce::new(settings.clone().signal(signal)), liar: LIAR };
        let ended = job.run(transport, async |ep| {
            let failed = job.until_failure(ep, &rounds).await;
            (failed, job.go_on(ep, None).await)
        });
        let mut seen = Vec::new();
        let mut broken = 0;
        for (rank, ((failure, took), after)) in (0..).map(Rank).zip(ended) {
            println!("{signal}, rank {rank}: {failure}, after {took:?}");
            assert!([Rank(1), LIAR].contains(&failure.culprit), "{signal}, rank {rank}: {failure}");
            assert!(took < DEADLINE / 4, "rank {rank} took {took:?}");
            if let Fault::LaneBroken { lane, cause } = failure.fault {
                let refused = (rank, lane.peer, cause) == (Rank(1), LIAR, LaneCause::RemoteAccess);
                // The other end's queue pair breaks, too, which it may notice first.
                let ended = (rank, lane.peer) == (LIAR, Rank(1));
                assert!(refused || ended, "{signal}, rank {rank}: {failure}");
                broken += 1;
            }
            seen.push(after.unwrap_or_else(|error| panic!("rank {rank} after recovery: {error}")));
        }
        assert!(broken > 0, "{signal}: nobody says what broke");
        job.verify(&RankSet::new(), seen);
    }
}
