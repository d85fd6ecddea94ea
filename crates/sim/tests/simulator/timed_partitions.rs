//! Nodes as partitions, on one thread and on several: it comes out the same, and nothing that goes from node to node is
//! lost on the way.

use std::future::{Future as _, poll_fn};
use std::num::NonZeroUsize;
use std::task::Poll;

use crate::common::{A, B, cell, free, lane, need, probe, shape};
use ep_core::engine::low_latency::LowRouting;
use ep_core::engine::{Combine, Routing};
use ep_core::machine::{Machine as _, Opening, Proposal};
use ep_core::port::{Cell, Counter, Duty, LaneId, LaneKind, Port as _, Role, Scope};
use ep_core::{Endpoint, Fault, LowLatency, Nanos, Rank, RankSet, Settings, Shape, Topology};
use ep_sim::{Cluster, Machine, Model, ModelBuilder, Rate, Run, Violation};

const FAR: Nanos = Nanos(1000);

/// 2 bytes a nanosecond and 100 ns near, 1 byte a nanosecond and 1000 ns far; nothing else costs anything.
fn bare() -> ModelBuilder {
    Model::builder().near(Rate::gb_per_s(2), Nanos(100)).far(Rate::gb_per_s(1), FAR)
}

fn cluster(nodes: u32, locals: u32, model: ModelBuilder) -> Cluster {
    crate::common::cluster(nodes, locals).timed(model.build().unwrap()).build(shape()).unwrap()
}

fn threads(count: usize) -> NonZeroUsize {
    NonZeroUsize::new(count).unwrap()
}

/// Runs on 1 to 3 threads and returns what came of it, the same each time.
fn run<T: Send + PartialEq + std::fmt::Debug>(cluster: &Cluster, each: impl AsyncFn(Machine) -> T + Sync) -> Vec<T> {
    let alone = cluster.run_machines(&each).unwrap_or_else(|violation| panic!("{violation}"));
    for count in 1..=3 {
        let run = cluster.run_machines_on(threads(count), &each).unwrap_or_else(|violation| panic!("{violation}"));
        assert_eq!((run.events, run.time, run.resident), (alone.events, alone.time, alone.resident), "{count} threads");
        assert_eq!((&run.outcomes, &run.records), (&alone.outcomes, &alone.records), "{count} threads");
    }
    alone.finished()
}

#[test]
fn a_layer_is_the_same_on_any_number_of_threads() {
    for (nodes, locals) in [(5, 2), (3, 3), (2, 1)] {
        let topology = Topology::new(nodes, locals).unwrap();
        let ranks = i64::from(topology.ranks());
        let shape = Shape::builder().experts(topology.ranks() * 2).topk(2).hidden(64).max_tokens(40).build().unwrap();
        let settings = Settings::builder(&shape, &topology).slots(8).chunk(2).credit(2).low_latency(true);
        let cluster = Cluster::builder(topology)
            .settings(settings.build().unwrap())
            .timed(Model::h800_cx7())
            .record(true)
            .build(shape)
            .unwrap();
        let on = |count| -> Run<Nanos> {
            let run = cluster.run_on(threads(count), async |mut ep| {
                let first = i64::from(ep.rank().0);
                let topk_idx: Vec<i64> = (0..40).flat_map(|t| [(first + t) % ranks, ranks + (3 * t) % ranks]).collect();
                let x = ep.rows(&vec![1; 40 * ep.shape().row_bytes() as usize], 40).unwrap();
                let routing = Routing::TopK { topk_idx: topk_idx.clone(), topk_weights: None };
                let got = ep.dispatch(&x, &routing).await.unwrap();
                ep.combine(&got.x, &got.handle, Combine::default()).await.unwrap();
                let routing = LowRouting::new(topk_idx, None);
                let got = ep.low_latency_dispatch(&x, &routing).await.unwrap();
                ep.low_latency_combine(&got.x, &got.handle, Some(&vec![0.5; 80])).await.unwrap();
                ep.now()
            });
            run.unwrap()
        };
        let alone = on(1);
        assert!(alone.records.len() > 1000);
        for count in [2, 3, 64] {
            let run = on(count);
            assert_eq!((run.events, run.time, run.resident), (alone.events, alone.time, alone.resident));
            assert_eq!((run.outcomes, run.records), (alone.outcomes.clone(), alone.records.clone()), "{count} threads");
        }
    }
}

#[test]
fn a_put_that_leaves_late_comes_late() {
    // 20 rows of 5000 ns each: they leave long after they were posted, over many stretches.
    let times = run(&cluster(2, 1, bare()), async |machine: Machine| {
        let mut port = probe(&machine, 0);
        if machine.rank() == A {
            for row in 0..20u8 {
                port.write(free(&machine, 0), &[row; 5000]).unwrap();
                let to = free(&machine, 5000 * u64::from(row));
                let ticket = port.put(lane(B), free(&machine, 0).span(5000), to).await.unwrap();
                port.publish(lane(B), cell(A), u64::from(row) + 1).await.unwrap();
                if row == 19 {
                    port.flush(lane(B), ticket).await.unwrap();
                }
            }
            return vec![port.now()];
        }
        let mut times = Vec::new();
        for row in 0..20u8 {
            port.wait_any(&need(A, u64::from(row) + 1)).await.unwrap();
            times.push(port.now());
            let mut bytes = [0; 5000];
            port.read(free(&machine, 5000 * u64::from(row)), &mut bytes).unwrap();
            assert_eq!(bytes, [row; 5000], "row {row}");
        }
        times
    });
    assert_eq!(times[0], [Nanos(20 * 5000)]);
    assert_eq!(times[1], (1..=20).map(|row| Nanos(5000 * row + 1000)).collect::<Vec<_>>());
}

#[test]
fn a_publish_before_its_put_waits_for_it_there() {
    let times = run(&cluster(2, 1, bare()), async |machine: Machine| {
        let mut port = probe(&machine, 0);
        if machine.rank() == A {
            port.put(lane(B), free(&machine, 0).span(7000), free(&machine, 0)).await.unwrap();
            port.publish(lane(B), cell(A), 1).await.unwrap();
            return port.now();
        }
        port.wait_any(&need(A, 1)).await.unwrap();
        port.now()
    });
    assert_eq!(times, [Nanos(0), Nanos(8000)]);
}

#[test]
fn a_reset_asks_the_other_nodes() {
    let times = run(&cluster(3, 1, bare()), async |machine: Machine| {
        if machine.rank() == A {
            let mut port = probe(&machine, 0);
            port.put(lane(B), free(&machine, 0).span(5000), free(&machine, 0)).await.unwrap();
            port.publish(lane(Rank(2)), cell(A), 1).await.unwrap();
            drop(port);
            machine.reset(Scope::All).await;
            let once = machine.now();
            machine.reset(Scope::All).await;
            return (once, machine.now());
        }
        (Nanos(0), Nanos(0))
    });
    // There by 6000; the answer takes 1000 more. The second time both ask and hear at once.
    assert_eq!(times[0], (Nanos(7000), Nanos(9000)));
}

#[test]
fn ranks_of_all_nodes_leave_an_agreement_together() {
    let times = run(&cluster(3, 2, bare()), async |machine: Machine| {
        let mut left = Vec::new();
        for round in 0..3u64 {
            machine.spend(Nanos(100 * ((u64::from(machine.rank().0) + round) % 6)));
            let proposal = Proposal { mask: RankSet::new(), generation: 1, op: 1 };
            let agreed = machine.bootstrap().agree(proposal, Nanos::from_secs(1)).await.unwrap();
            assert_eq!((agreed.generation, agreed.op), (2, 1));
            left.push(machine.now());
        }
        left
    });
    assert!(times.iter().all(|left| *left == times[0]), "{times:?}");
    // The last one, which is far, writes and is written to.
    assert_eq!(times[0][0], Nanos(500 + 2 * FAR.0));
}

#[test]
fn an_agreement_that_somebody_misses_ends_at_its_deadline() {
    let outcomes = run(&cluster(2, 1, bare()), async |machine: Machine| {
        if machine.rank() == A {
            return None;
        }
        let proposal = Proposal { mask: RankSet::new(), generation: 1, op: 1 };
        let missed = machine.bootstrap().agree(proposal, Nanos(50_000)).await.unwrap_err();
        Some((missed.to_string(), machine.now()))
    });
    let (missed, at) = outcomes[1].clone().unwrap();
    assert!(missed.contains("rank 0"), "{missed}");
    assert_eq!(at, Nanos(50_000 + FAR.0));
}

#[test]
fn a_deadline_ends_a_wait_while_another_node_works_on() {
    let outcomes = run(&cluster(3, 1, bare()), async |machine: Machine| {
        if machine.rank() == A {
            let opening = Opening { role: Role::new(Duty::Probe), op: 1, generation: 1, deadline: Nanos(15_500) };
            let mut port = machine.port(opening);
            let fault = port.wait_any(&need(B, 1)).await.unwrap_err();
            let Fault::Timeout { waited, .. } = fault else { panic!("{fault}") };
            return (port.now(), waited);
        }
        if machine.rank() == B {
            let mut port = probe(&machine, 0);
            for _ in 0..30 {
                let ticket = port.put(lane(Rank(2)), free(&machine, 0).span(1000), free(&machine, 0)).await.unwrap();
                port.flush(lane(Rank(2)), ticket).await.unwrap();
            }
        }
        (Nanos(0), Nanos(0))
    });
    assert_eq!(outcomes[0], (Nanos(15_500), Nanos(15_500)));
}

#[test]
fn a_deadlock_names_the_ranks_of_all_nodes() {
    for count in 1..=3 {
        let violation = cluster(3, 1, bare()).run_machines_on(threads(count), async |machine: Machine| {
            let mut port = probe(&machine, 0);
            if machine.rank() == A {
                port.publish(lane(B), cell(A), 1).await.unwrap();
            } else {
                port.wait_any(&need(A, 4)).await.unwrap();
            }
        });
        let Err(Violation::Deadlock(report)) = violation else { panic!("{violation:?}") };
        assert_eq!((report.time, report.unfinished), (FAR, vec![B, Rank(2)]));
    }
}

#[test]
fn a_broken_rule_ends_all_nodes() {
    for count in 1..=3 {
        let violation = cluster(3, 1, bare()).run_machines_on(threads(count), async |machine: Machine| {
            let mut port = probe(&machine, 0);
            if machine.rank() == Rank(2) {
                port.publish(lane(B), cell(Rank(2)), 2).await.unwrap();
                port.publish(lane(B), cell(Rank(2)), 1).await.unwrap();
            }
            port.wait_any(&need(A, 4)).await.unwrap();
        });
        let Err(Violation::Rule(broken)) = violation else { panic!("{violation:?}") };
        assert_eq!((broken.rule, broken.rank), ("F4", Rank(2)));
    }
}

#[test]
fn too_many_events_are_a_livelock_wherever_they_happen() {
    for count in 1..=3 {
        let cluster =
            crate::common::cluster(3, 1).timed(bare().build().unwrap()).max_events(100).build(shape()).unwrap();
        let violation = cluster.run_machines_on(threads(count), async |machine: Machine| {
            let mut port = probe(&machine, 0);
            let (me, peer) = (machine.rank(), Rank((machine.rank().0 + 1) % 3));
            let before = Rank((machine.rank().0 + 2) % 3);
            for value in 1.. {
                port.publish(lane(peer), cell(me), value).await.unwrap();
                port.wait_any(&need(before, value)).await.unwrap();
            }
        });
        assert!(matches!(violation, Err(Violation::Livelock(_))), "{violation:?}");
    }
}

#[test]
fn a_panic_on_one_thread_ends_all() {
    let panic = std::panic::catch_unwind(|| {
        cluster(3, 1, bare()).run_machines_on(threads(3), async |machine: Machine| {
            let mut port = probe(&machine, 0);
            assert!(machine.rank() != B, "rank 1 gives up");
            port.wait_any(&need(B, 1)).await.unwrap();
        })
    });
    let message = panic.unwrap_err();
    assert!(
        message.downcast_ref::<String>().map_or("", String::as_str).contains("gives up")
            || message.downcast_ref::<&str>().is_some_and(|text| text.contains("gives up"))
    );
}

#[test]
fn without_a_latency_between_nodes_there_is_one_partition() {
    let times = run(&cluster(2, 1, bare().far(Rate::gb_per_s(1), Nanos(0))), async |machine: Machine| {
        let mut port = probe(&machine, 0);
        let control = LaneId { peer: Rank(1 - machine.rank().0), kind: LaneKind::Control };
        port.publish(control, Cell::new(machine.rank(), LaneKind::Control, Counter::Probe), 1).await.unwrap();
        let theirs = Cell::new(control.peer, LaneKind::Control, Counter::Probe);
        port.wait_any(&[ep_core::port::Need { cell: theirs, at_least: 1 }]).await.unwrap();
        port.now()
    });
    assert_eq!(times, [Nanos(0); 2]);
}

#[test]
fn who_leaves_a_meeting_and_comes_again_is_told_what_was_agreed_then() {
    let agreed = run(&cluster(2, 1, bare()), async |machine: Machine| {
        let proposal = |op| Proposal { mask: RankSet::new(), generation: 1, op };
        if machine.rank() == B {
            // Gives up at once, after it has written to the host.
            let mut early = Box::pin(machine.bootstrap().agree(proposal(7), Nanos::from_secs(1)));
            let pends = poll_fn(|context| Poll::Ready(early.as_mut().poll(context).is_pending())).await;
            assert!(pends);
            drop(early);
        } else {
            machine.spend(Nanos(5000));
        }
        let agreed = machine.bootstrap().agree(proposal(3), Nanos::from_secs(1)).await.unwrap();
        (agreed.op, machine.now())
    });
    assert_eq!(agreed, [(3, Nanos(5000 + FAR.0)); 2]);
}

#[test]
fn a_panic_where_futures_are_made_ends_all() {
    let panic = std::panic::catch_unwind(|| {
        cluster(3, 1, bare()).run_machines_on(threads(3), |machine: Machine| {
            assert!(machine.rank() != B, "rank 1 is not even made");
            async move {
                let mut port = probe(&machine, 0);
                port.wait_any(&need(B, 1)).await.unwrap();
            }
        })
    });
    assert!(panic.is_err());
}
