//! What each injected fault does, and that a run without one that stands still is a deadlock.

use crate::common::{A, B, C, DATA, DEADLINE, SEEDS, cell, cluster, explore_with, free, lane, need, probe, shape};
use ep_core::machine::Machine as _;
use ep_core::port::{Port as _, Ticket};
use ep_core::trace::Verb;
use ep_core::{Fault, Nanos, Phase};
use ep_sim::{Awaited, Incident, Machine, Outcome, Violation};

fn deadlock(each: impl AsyncFn(Machine), incidents: &[Incident]) -> ep_sim::Report {
    let builder = incidents.iter().fold(cluster(1, 2).seed(9), |builder, &incident| builder.incident(incident));
    match builder.build(shape()).unwrap().run_machines(each) {
        Err(Violation::Deadlock(report)) => *report,
        other => panic!("{other:?}"),
    }
}

/// Rank B waits for something that rank A never does.
async fn forgotten(machine: Machine) {
    let mut port = probe(&machine, 0);
    if machine.rank() == A {
        port.publish(lane(B), cell(A), 3).await.unwrap();
    } else {
        port.wait_any(&need(A, 4)).await.unwrap();
    }
}

#[test]
fn a_deadlock_is_found_at_once_and_names_who_waits_for_what() {
    let report = deadlock(forgotten, &[]);
    assert_eq!((report.time, report.seed), (Nanos(0), 9));
    assert_eq!(report.unfinished, [B]);
    let [waiting] = &report.waiting[..] else { panic!("{report}") };
    assert_eq!(waiting.rank, B);
    assert_eq!(waiting.awaits, [Awaited::Cell { cell: cell(A), seen: 3, awaited: 4 }]);
    let text = report.to_string();
    assert!(text.contains("rank 1, probe, track 0, op 1: Probe of rank 0 (Data(0)) is 3, awaits 4"), "{text}");
    assert!(text.contains("unfinished ranks [1], which wait for ranks that have ended [0]\n"), "{text}");
}

#[test]
fn a_fault_that_had_no_chance_to_act_excuses_no_deadlock() {
    let never = Incident::Crash { rank: A, after: 1000, noticed: false };
    let elsewhere = Incident::LoseLane { from: B, to: A, kind: None, after: 0 };
    assert_eq!(deadlock(forgotten, &[never, elsewhere, Incident::Starve { rank: A }]).unfinished, [B]);
}

#[test]
fn a_wait_that_was_dropped_is_no_longer_reported() {
    let report = deadlock(
        async |machine: Machine| {
            let (mut one, mut two) = (probe(&machine, 0), probe(&machine, 1));
            let never = need(A, 4);
            assert_eq!(futures_util::future::poll_immediate(Box::pin(one.wait_any(&never))).await, None);
            two.wait_any(&need(A, 5)).await.unwrap();
        },
        &[],
    );
    assert_eq!(report.waiting.len(), 2, "one role of each rank: {report}");
}

#[test]
fn a_run_that_does_not_end_is_a_livelock() {
    let cluster = cluster(1, 2).max_events(10_000).build(shape()).unwrap();
    let run = cluster.run_machines(async |machine: Machine| {
        let mut port = probe(&machine, 0);
        loop {
            port.flush(lane(A), Ticket(0)).await.unwrap();
        }
    });
    let run: Result<ep_sim::Run<()>, Violation> = run;
    assert!(matches!(run, Err(Violation::Livelock(report)) if report.events > 10_000));
}

#[test]
fn a_lost_lane_swallows_puts_and_publishes_and_its_poster_notices_nothing() {
    let lost = Incident::LoseLane { from: A, to: B, kind: Some(DATA), after: 2 };
    explore_with(cluster(1, 2).incident(lost), async |machine: Machine| {
        let mut port = probe(&machine, 0);
        if machine.rank() == A {
            for value in 1..=3 {
                let ticket = port.put(lane(B), free(&machine, 0).span(8), free(&machine, value * 8)).await.unwrap();
                port.publish(lane(B), cell(A), value).await.unwrap();
                port.flush(lane(B), ticket).await.unwrap();
            }
            assert_eq!(port.now(), Nanos(0));
        } else {
            port.wait_any(&need(A, 1)).await.unwrap();
            let fault = port.wait_any(&need(A, 2)).await.unwrap_err();
            let waited = DEADLINE;
            let phase = Phase::Probe;
            assert_eq!(fault, Fault::Timeout { phase, peer: A, lane: lane(A), seen: 1, awaited: 2, waited });
        }
    });
}

#[test]
fn a_lost_get_never_completes() {
    let lost = Incident::LoseLane { from: A, to: B, kind: None, after: 0 };
    explore_with(cluster(1, 2).incident(lost), async |machine: Machine| {
        let mut port = probe(&machine, 0);
        if machine.rank() == A {
            let ticket = port.get(lane(B), free(&machine, 0).span(8), free(&machine, 8)).await.unwrap();
            let fault = port.flush(lane(B), ticket).await.unwrap_err();
            assert!(matches!(fault, Fault::Timeout { peer: B, seen: 1, awaited: 1, .. }), "{fault}");
        }
    });
}

#[test]
fn delayed_effects_arrive_late_and_in_order() {
    let by = Nanos::from_millis(2);
    let delay = Incident::Delay { from: A, to: B, kind: None, by, after: 1 };
    explore_with(cluster(1, 2).incident(delay), async |machine: Machine| {
        let mut port = probe(&machine, 0);
        if machine.rank() == A {
            port.write(free(&machine, 0), &[5; 8]).unwrap();
            port.publish(lane(B), cell(A), 1).await.unwrap();
            port.put(lane(B), free(&machine, 0).span(8), free(&machine, 8)).await.unwrap();
            port.publish(lane(B), cell(A), 2).await.unwrap();
        } else {
            port.wait_any(&need(A, 1)).await.unwrap();
            assert_eq!(port.now(), Nanos(0));
            port.wait_any(&need(A, 2)).await.unwrap();
            assert_eq!(port.now(), by);
            let mut bytes = [0; 8];
            port.read(free(&machine, 8), &mut bytes).unwrap();
            assert_eq!(bytes, [5; 8]);
        }
    });
}

#[test]
fn a_delay_beyond_the_deadline_is_a_timeout_of_flush_too() {
    let delay = Incident::Delay { from: A, to: B, kind: None, by: Nanos::from_secs(1), after: 0 };
    explore_with(cluster(1, 2).incident(delay), async |machine: Machine| {
        let mut port = probe(&machine, 0);
        if machine.rank() == A {
            let ticket = port.put(lane(B), free(&machine, 0).span(8), free(&machine, 8)).await.unwrap();
            let fault = port.flush(lane(B), ticket).await.unwrap_err();
            assert!(matches!(fault, Fault::Timeout { peer: B, .. }), "{fault}");
            assert_eq!(port.now(), DEADLINE);
        }
    });
}

#[test]
fn an_unnoticed_crash_shows_only_at_the_deadline() {
    let mut landed = std::collections::BTreeSet::new();
    for seed in 0..SEEDS {
        let crash = Incident::Crash { rank: C, after: 3, noticed: false };
        let cluster = cluster(1, 3).incident(crash).seed(seed).build(shape()).unwrap();
        let run = cluster.run_machines(async |machine: Machine| {
            let mut port = probe(&machine, 0);
            if machine.rank() == C {
                for value in 1..10 {
                    port.publish(lane(A), cell(C), value).await.unwrap();
                }
            }
            if machine.rank() == B {
                return port.publish(lane(C), cell(B), 1).await.map(|()| 0).unwrap();
            }
            let fault = port.wait_any(&need(C, 9)).await.unwrap_err();
            assert_eq!(port.now(), DEADLINE);
            match fault {
                Fault::Timeout { peer: C, seen, awaited: 9, .. } => seen,
                other => panic!("{other}"),
            }
        });
        let run = run.unwrap();
        assert_eq!(run.time, DEADLINE);
        assert_eq!(run.outcomes[C.index()], Outcome::Crashed);
        landed.extend(run.outcomes[A.index()].finished());
    }
    assert_eq!(landed.into_iter().collect::<Vec<_>>(), [0, 1, 2, 3], "what is in flight lands or vanishes");
}

#[test]
fn a_starved_rank_runs_when_nothing_else_can() {
    let mut last = 0;
    for seed in 0..SEEDS {
        let builder = cluster(1, 2).incident(Incident::Starve { rank: A }).record(true).seed(seed);
        let run = builder.build(shape()).unwrap().run_machines(async |machine: Machine| {
            let mut port = probe(&machine, 0);
            for value in 1..20 {
                let peer = if machine.rank() == A { B } else { A };
                port.publish(lane(peer), cell(machine.rank()), value).await.unwrap();
            }
        });
        let records = run.unwrap().records;
        let publishes = records.iter().filter(|record| matches!(record.verb, Verb::Publish { .. }));
        let ranks: Vec<_> = publishes.map(|record| record.rank).collect();
        last += u64::from(ranks[..19].iter().all(|&rank| rank == B));
    }
    assert!(last > SEEDS / 4, "most adversaries do not starve B as well: {last} of {SEEDS}");
}

#[test]
fn a_fault_of_a_rank_that_does_not_exist_is_refused() {
    let error = cluster(1, 2).incident(Incident::Starve { rank: C }).build(shape()).unwrap_err();
    assert_eq!(error.to_string(), "rank of an incident is 2, allowed: 0 to 1");
}
