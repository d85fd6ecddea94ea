//! The timed scheduler's time, worked out by hand to the nanosecond.

use crate::common::{A, B, C, DATA, cell, free, lane, need, probe, shape};
use ep_core::incident::Incident;
use ep_core::machine::{Machine as _, Opening};
use ep_core::port::{Cell, Counter, Duty, LaneId, LaneKind, Port as _, Role, Scope, Ticket, Work};
use ep_core::{Fault, Nanos, Phase, Rank};
use ep_sim::{Awaited, Cluster, Machine, Model, ModelBuilder, Rate, Violation};

/// 2 bytes a nanosecond and 100 ns near, 1 byte a nanosecond and 1000 ns far; nothing else costs anything.
fn bare() -> ModelBuilder {
    Model::builder().near(Rate::gb_per_s(2), Nanos(100)).far(Rate::gb_per_s(1), Nanos(1000))
}

fn cluster(nodes: u32, locals: u32, model: ModelBuilder) -> Cluster {
    crate::common::cluster(nodes, locals).timed(model.build().unwrap()).build(shape()).unwrap()
}

/// Runs `each` on every rank; what each returned, which is mostly a time.
fn run<T>(cluster: &Cluster, each: impl AsyncFn(Machine) -> T) -> Vec<T> {
    cluster.run_machines(each).unwrap_or_else(|violation| panic!("{violation}")).finished()
}

#[test]
fn a_put_takes_its_bytes_and_the_latency_and_publish_and_flush_know_it() {
    for (nodes, locals, left, there) in [(1, 2, 500, 600), (2, 1, 1000, 2000)] {
        let times = run(&cluster(nodes, locals, bare()), async |machine: Machine| {
            let mut port = probe(&machine, 0);
            if machine.rank() == A {
                port.write(free(&machine, 0), &[7; 1000]).unwrap();
                let ticket = port.put(lane(B), free(&machine, 0).span(1000), free(&machine, 0)).await.unwrap();
                port.publish(lane(B), cell(A), 1).await.unwrap();
                assert_eq!(port.now(), Nanos(0), "posting costs nothing");
                port.flush(lane(B), ticket).await.unwrap();
            } else {
                port.wait_any(&need(A, 1)).await.unwrap();
                let mut bytes = [0; 1000];
                port.read(free(&machine, 0), &mut bytes).unwrap();
                assert_eq!(bytes, [7; 1000]);
            }
            port.now()
        });
        assert_eq!(times, [Nanos(left), Nanos(there)], "{nodes} x {locals}");
    }
}

#[test]
fn two_puts_share_a_port_out() {
    let times = run(&cluster(1, 3, bare()), async |machine: Machine| {
        let mut port = probe(&machine, 0);
        if machine.rank() == A {
            for peer in [B, C] {
                port.put(lane(peer), free(&machine, 0).span(1000), free(&machine, 0)).await.unwrap();
                port.publish(lane(peer), cell(A), 1).await.unwrap();
            }
        } else {
            port.wait_any(&need(A, 1)).await.unwrap();
        }
        port.now()
    });
    assert_eq!(times, [Nanos(0), Nanos(600), Nanos(1100)]);
}

#[test]
fn puts_of_two_ranks_share_a_port_in() {
    let times = run(&cluster(1, 3, bare()), async |machine: Machine| {
        let mut port = probe(&machine, 0);
        if machine.rank() == C {
            port.wait_any(&need(A, 1)).await.unwrap();
            let first = port.now();
            port.wait_any(&need(B, 1)).await.unwrap();
            return (first, port.now());
        }
        // B's bytes reach C 50 ns after A's have begun to enter.
        port.charge(Work::Row { bytes: 100 * 50 * u64::from(machine.rank().0) });
        let ticket = port.put(lane(C), free(&machine, 0).span(1000), free(&machine, 1000)).await.unwrap();
        port.publish(lane(C), cell(machine.rank()), 1).await.unwrap();
        port.flush(lane(C), ticket).await.unwrap();
        (Nanos(0), port.now())
    });
    assert_eq!(times[0].1, Nanos(500));
    assert_eq!(times[1].1, Nanos(550), "both leave unhindered");
    assert_eq!(times[2], (Nanos(600), Nanos(1100)));
}

#[test]
fn a_publish_waits_for_the_puts_of_its_lane_and_passes_those_of_others() {
    let times = run(&cluster(1, 2, bare()), async |machine: Machine| {
        let mut port = probe(&machine, 0);
        let control = LaneId { peer: B, kind: LaneKind::Control };
        let passing = Cell::new(A, LaneKind::Control, Counter::Probe);
        if machine.rank() == A {
            port.put(lane(B), free(&machine, 0).span(1000), free(&machine, 0)).await.unwrap();
            port.publish(lane(B), cell(A), 1).await.unwrap();
            port.publish(control, passing, 1).await.unwrap();
            port.put(lane(B), free(&machine, 0).span(1000), free(&machine, 0)).await.unwrap();
            port.publish(lane(B), cell(A), 2).await.unwrap();
            return Vec::new();
        }
        let mut times = Vec::new();
        port.wait_any(&[ep_core::port::Need { cell: passing, at_least: 1 }]).await.unwrap();
        times.push((port.now().0, port.peek(cell(A))));
        for value in [1, 2] {
            port.wait_any(&need(A, value)).await.unwrap();
            times.push((port.now().0, port.peek(cell(A))));
        }
        times
    });
    assert_eq!(times[B.index()], [(100, 0), (600, 1), (1100, 2)]);
}

#[test]
fn a_role_that_only_posts_puts_at_the_same_times() {
    let times = |only: bool| {
        run(&cluster(2, 2, bare().post(Nanos(10)).copy(Rate::gb_per_s(4))), async |machine: Machine| {
            let mut port = probe(&machine, 0);
            let peers = (1..4).map(|step| Rank((machine.rank().0 + step) % 4));
            for row in 0..50 {
                port.only_posts(only && row < 49);
                for peer in peers.clone() {
                    port.charge(Work::Row { bytes: 100 * row });
                    port.put(lane(peer), free(&machine, 0).span(1 + 40 * row), free(&machine, 4000)).await.unwrap();
                }
            }
            let put = port.now();
            let mut there = Vec::new();
            for peer in peers.clone() {
                port.publish(lane(peer), cell(machine.rank()), 1).await.unwrap();
                port.flush(lane(peer), Ticket(150)).await.unwrap();
            }
            for peer in peers {
                port.wait_any(&need(peer, 1)).await.unwrap();
                there.push(port.now());
            }
            (put, there)
        })
    };
    let (before, only) = (times(false), times(true));
    assert_eq!(before, only);
    assert!(only.iter().all(|(put, there)| there[0] > *put));
}

#[test]
fn what_is_due_leaves_before_what_a_role_that_only_posts_puts_later() {
    let times = run(&cluster(1, 3, bare().post(Nanos(50))), async |machine: Machine| {
        let mut port = probe(&machine, 0);
        if machine.rank() != A {
            port.wait_any(&need(A, 1)).await.unwrap();
            return port.now();
        }
        for (peer, only) in [(B, false), (C, true)] {
            port.only_posts(only);
            port.put(lane(peer), free(&machine, 0).span(1000), free(&machine, 0)).await.unwrap();
            port.publish(lane(peer), cell(A), 1).await.unwrap();
        }
        port.now()
    });
    assert_eq!(times, [Nanos(100), Nanos(50 + 500 + 100), Nanos(50 + 1000 + 100)]);
}

#[test]
fn a_get_goes_there_and_comes_back() {
    let times = run(&cluster(1, 2, bare()), async |machine: Machine| {
        let mut port = probe(&machine, 0);
        if machine.rank() == A {
            let ticket = port.get(lane(B), free(&machine, 0).span(1000), free(&machine, 0)).await.unwrap();
            port.flush(lane(B), ticket).await.unwrap();
        }
        port.now()
    });
    assert_eq!(times, [Nanos(700), Nanos(0)]);
}

#[test]
fn work_and_verbs_cost_their_role_and_nobody_else() {
    let model = bare().copy(Rate::gb_per_s(4)).reduce(Rate::gb_per_s(8)).row(Nanos(3)).post(Nanos(10));
    let model = model.publish(Nanos(20)).poll(Nanos(5)).launch(Nanos(1000));
    let times = run(&cluster(1, 2, model), async |machine: Machine| {
        let mut port = probe(&machine, 0);
        let other = probe(&machine, 1);
        if machine.rank() == A {
            port.charge(Work::Row { bytes: 400 });
            port.charge(Work::Reduce { bytes: 400 });
            assert_eq!(port.now(), Nanos(1000 + 103 + 53));
            port.put(lane(B), free(&machine, 0).span(100), free(&machine, 0)).await.unwrap();
            assert_eq!(port.now(), Nanos(1166));
            port.publish(lane(B), cell(A), 1).await.unwrap();
            assert_eq!(port.now(), Nanos(1186));
            assert_eq!(other.now(), Nanos(1156), "the world is less than a latency behind");
            drop((port, other));
            assert_eq!(machine.now(), Nanos(1186));
            machine.spend(Nanos(14));
            return machine.now();
        }
        port.wait_any(&need(A, 1)).await.unwrap();
        port.now()
    });
    assert_eq!(times, [Nanos(1200), Nanos(1166 + 50 + 100 + 5)]);
}

#[test]
fn a_ring_of_one_slot_goes_round_once_a_round_trip() {
    const ROWS: u64 = 5;
    let cluster = cluster(1, 2, bare());
    let times = run(&cluster, async |machine: Machine| {
        let mut port = probe(&machine, 0);
        for row in 1..=ROWS {
            if machine.rank() == A {
                port.wait_any(&need(B, row - 1)).await.unwrap();
                port.put(lane(B), free(&machine, 0).span(1000), free(&machine, 0)).await.unwrap();
                port.publish(lane(B), cell(A), row).await.unwrap();
            } else {
                port.wait_any(&need(A, row)).await.unwrap();
                port.publish(lane(A), cell(B), row).await.unwrap();
            }
        }
        port.now()
    });
    // Each row: 500 ns of bytes, 100 ns there, 100 ns back; the last has no way back.
    assert_eq!(times, [Nanos(700 * (ROWS - 1)), Nanos(700 * ROWS - 100)]);
}

#[test]
fn ranks_leave_an_agreement_together() {
    let times = run(&cluster(1, 3, bare()), async |machine: Machine| {
        machine.spend(Nanos(100 * u64::from(machine.rank().0)));
        let proposal = ep_core::machine::Proposal { mask: Default::default(), generation: 1, op: 1 };
        machine.bootstrap().agree(proposal, Nanos::from_secs(1)).await.unwrap();
        machine.now()
    });
    assert_eq!(times, [Nanos(200); 3]);
}

#[test]
fn a_reset_lasts_until_nothing_is_on_its_way() {
    let times = run(&cluster(1, 2, bare()), async |machine: Machine| {
        if machine.rank() == A {
            let mut port = probe(&machine, 0);
            port.put(lane(B), free(&machine, 0).span(1000), free(&machine, 0)).await.unwrap();
            drop(port);
            machine.reset(Scope::All).await;
        }
        machine.now()
    });
    assert_eq!(times[0], Nanos(600));
}

fn opening(deadline: Nanos) -> Opening {
    Opening { role: Role::new(Duty::Probe), op: 1, generation: 1, deadline }
}

#[test]
fn waits_end_at_their_deadline_while_others_work_on() {
    let outcomes = run(&cluster(1, 3, bare()), async |machine: Machine| {
        if machine.rank() == A {
            let mut port = machine.port(opening(Nanos(1500)));
            let fault = port.wait_any(&need(B, 1)).await.unwrap_err();
            return Some((port.now(), fault));
        }
        if machine.rank() == B {
            let mut port = probe(&machine, 0);
            for value in 1..20 {
                port.put(lane(C), free(&machine, 0).span(1000), free(&machine, 0)).await.unwrap();
                port.publish(lane(C), cell(B), value).await.unwrap();
                port.flush(lane(C), Ticket(value)).await.unwrap();
            }
        }
        None
    });
    let fault =
        Fault::Timeout { phase: Phase::Probe, peer: B, lane: lane(B), seen: 0, awaited: 1, waited: Nanos(1500) };
    assert_eq!(outcomes, [Some((Nanos(1500), fault)), None, None]);
}

#[test]
fn standing_still_is_a_deadlock_that_says_who_waits_for_what() {
    let violation = cluster(1, 2, bare()).run_machines(async |machine: Machine| {
        let mut port = probe(&machine, 0);
        if machine.rank() == A {
            port.wait_any(&need(B, 4)).await.unwrap();
        } else {
            port.publish(lane(A), cell(B), 3).await.unwrap();
        }
    });
    let Err(Violation::Deadlock(report)) = violation else { panic!("{violation:?}") };
    assert_eq!((report.time, report.unfinished), (Nanos(100), vec![A]));
    let awaited = Awaited::Cell { cell: Cell::new(B, DATA, Counter::Probe), seen: 3, awaited: 4 };
    assert_eq!(report.waiting[0].awaits, [awaited]);
}

#[test]
fn deadlines_end_a_standstill_where_a_test_asks_for_them() {
    let model = bare().build().unwrap();
    let cluster = crate::common::cluster(1, 2).timed(model).deadlines(true).build(shape()).unwrap();
    let times = run(&cluster, async |machine: Machine| {
        let mut port = machine.port(opening(Nanos(1000 + u64::from(machine.rank().0))));
        port.wait_any(&need(Rank(1 - machine.rank().0), 1)).await.unwrap_err();
        port.now()
    });
    assert_eq!(times, [Nanos(1000), Nanos(1001)]);
}

#[test]
fn faults_and_elided_payload_belong_to_one_scheduler_each() {
    let timed = crate::common::cluster(1, 2).timed(Model::h200_node());
    let error = timed.incident(Incident::Starve { rank: A }).build(shape()).unwrap_err();
    assert!(error.to_string().starts_with("incident under the timed scheduler"), "{error}");
    let error = crate::common::cluster(1, 2).elide_payload(true).build(shape()).unwrap_err();
    assert_eq!(error.to_string(), "scheduler is explore, allowed: timed, to elide payload");
}
