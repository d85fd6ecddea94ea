//! What ranks owe each other beside the rows, seen in the records of runs: waits for banks, suspicions taken back, masked
//! ranks that are told, alarms that are heard again after a recovery.

use crate::common::{A, B, C, DEADLINE, pause};
use ep_core::engine::low_latency::LowRouting;
use ep_core::engine::{Combine, Engine, Routing};
use ep_core::layout::{Alarm, MASKED};
use ep_core::machine::{Machine as _, Opening};
use ep_core::port::{Cell, Counter, Duty, LaneId, LaneKind, Port as _, Role};
use ep_core::topology::Reach;
use ep_core::trace::{Record, Verb};
use ep_core::{
    Endpoint, Error, Fault, LowLatency, Nanos, OutboxUse, Phase, Placement, Rank, RankSet, Settings, Shape, Topology,
};
use ep_sim::{Builder, Cluster, Incident, Machine};

const TOKENS: u32 = 6;
const SEEDS: u64 = 20;

fn shape(ranks: u32) -> Shape {
    Shape::builder().experts(2 * ranks).topk(2).hidden(32).max_tokens(TOKENS).build().unwrap()
}

fn cluster(nodes: u32, ranks_per_node: u32, low_latency: bool) -> Builder {
    let topology = Topology::new(nodes, ranks_per_node).unwrap();
    let settings = Settings::builder(&shape(topology.ranks()), &topology).slots(3).far_slots(3).deadline(DEADLINE);
    Cluster::builder(topology).settings(settings.low_latency(low_latency).build().unwrap()).deadlines(true).record(true)
}

type Choices = ep_core::engine::endpoint::RoutingOf<Engine<Machine>>;
type Buf = <Engine<Machine> as Endpoint>::Buf;

fn batch(ep: &mut Engine<Machine>) -> (Buf, Choices) {
    let x = ep.rows(&vec![1; TOKENS as usize * 64], TOKENS).unwrap();
    (x, Routing::TopK { topk_idx: choices(ep.topology().ranks()), topk_weights: None })
}

/// Every token for two experts, of different ranks.
fn choices(ranks: u32) -> Vec<i64> {
    let experts = i64::from(2 * ranks);
    (0..i64::from(TOKENS)).flat_map(|token| [token % experts, (token + experts / 2) % experts]).collect()
}

fn low_routing(ranks: u32) -> LowRouting<Vec<i64>, Vec<f32>> {
    LowRouting::new(choices(ranks), None)
}

/// What ranks published in cells of this counter, in order: writer, reader and value.
fn published(records: &[Record], counter: Counter) -> Vec<(Rank, Rank, u64)> {
    let told = |record: &Record| match record.verb {
        Verb::Publish { lane, cell, value } if cell.counter == counter => Some((record.rank, lane.peer, value)),
        _ => None,
    };
    records.iter().filter_map(told).collect()
}

/// Before a rank puts anything into a bank it has seen that every neighbour, of its node and of its rail, is done with what
/// lay there.
#[test]
fn banks_are_waited_for_at_every_neighbour() {
    const CALLS: u64 = 4;
    let run = cluster(2, 2, false).build(shape(4)).unwrap().run(async |mut ep| {
        let (x, routing) = batch(&mut ep);
        let got = ep.dispatch(&x, &routing).await.unwrap();
        for _ in 1..CALLS {
            ep.redispatch(&x, &got.handle).await.unwrap();
        }
    });
    let run = run.unwrap_or_else(|violation| panic!("{violation}"));
    let topology = Topology::new(2, 2).unwrap();
    for (rank, op) in topology.all().flat_map(|rank| (3..=CALLS).map(move |op| (rank, op))) {
        let near = topology.all().filter(|&peer| topology.reach(rank, peer) == Reach::Near);
        let rail = topology.all().filter(|&peer| peer != rank && topology.local_of(peer) == topology.local_of(rank));
        for peer in near.chain(rail) {
            let cell = Cell::new(peer, LaneKind::Control, Counter::Done);
            let waits = |record: &Record| {
                let due =
                    matches!(record.verb, Verb::Wait { cell: seen, at_least } if seen == cell && at_least == op - 2);
                due && (record.rank, record.role.duty, record.op) == (rank, Duty::Control, op)
            };
            assert!(run.records.iter().any(waits), "rank {rank} opens bank {} without rank {peer}", op % 2);
        }
    }
}

/// How many rows of a rank lie in one of its outboxes at a time is what the call says, whatever its readers say of theirs.
#[test]
fn outboxes_are_filled_as_far_as_their_ranks_say() {
    const MANY: u32 = 100;
    let topology = Topology::new(1, 2).unwrap();
    let settings = Settings::builder(&shape(2), &topology).placement(Placement::Pulled).channels(1).slots(70).chunk(1);
    let cluster = Cluster::builder(topology).settings(settings.build().unwrap()).record(true);
    let most = (0..SEEDS).map(|seed| {
        let run = cluster.clone().seed(seed).build(shape(2)).unwrap().run(async |mut ep| {
            let x = ep.rows(&vec![1; MANY as usize * 64], MANY).unwrap();
            let topk_idx = (0..MANY).flat_map(|_| [0, 2]).collect();
            let got = ep.dispatch(&x, &Routing::TopK { topk_idx, topk_weights: None }).await.unwrap();
            // Rank 0 has less than any piece, which counts as the largest, and rank 1 half of its slots.
            let outbox = OutboxUse { piece: None, slots: Some([1, 35][ep.rank().index()]) };
            let got = ep.redispatch_with(&x, &got.handle, outbox).await.unwrap();
            ep.combine(&got.x, &got.handle, Combine { outbox, ..Combine::default() }).await.unwrap();
        });
        let run = run.unwrap_or_else(|violation| panic!("seed {seed}: {violation}"));
        // `[dispatch, combine][rank]`: most rows at a time.
        let (mut taken, mut most) = ([0, 0], [[0; 2]; 2]);
        for record in &run.records {
            match record.verb {
                Verb::Publish { lane, cell, value } if cell.counter == Counter::Head => {
                    taken[lane.peer.index()] = value
                }
                Verb::Publish { cell, value, .. } if cell.counter == Counter::Tail && record.op > 1 => {
                    let rank = record.rank.index();
                    let at_a_time: &mut u64 = &mut most[record.op as usize - 2][rank];
                    *at_a_time = (value - taken[rank]).max(*at_a_time);
                }
                _ => {}
            }
        }
        most
    });
    let most = most.fold([[0; 2]; 2], |all, one| {
        let larger = |op: usize| [0, 1].map(|rank: usize| all[op][rank].max(one[op][rank]));
        [larger(0), larger(1)]
    });
    assert_eq!(most, [[32, 35]; 2]);
}

/// Counts come late, but in time: whoever was suspected is not any more, or a later failure would be explained by it.
#[test]
fn suspicions_are_taken_back_when_all_goes_well() {
    let late =
        Incident::Delay { from: B, to: A, kind: Some(LaneKind::Control), by: Nanos(DEADLINE.0 / 16 * 13), after: 0 };
    for seed in 0..SEEDS {
        let run = cluster(1, 3, false).incident(late).seed(seed).build(shape(3)).unwrap().run(async |mut ep| {
            let (x, routing) = batch(&mut ep);
            ep.dispatch(&x, &routing).await.map(drop)
        });
        let run = run.unwrap_or_else(|violation| panic!("seed {seed}: {violation}"));
        let told: Vec<_> = published(&run.records, Counter::Alarm);
        let said = |(rank, _, value): &(Rank, Rank, u64)| (*rank == A).then(|| Alarm::decode(*value).unwrap().peer);
        let said: Vec<Rank> = told.iter().filter_map(said).collect();
        assert!(run.finished().iter().all(Result::is_ok), "seed {seed}");
        assert!(said.contains(&B), "seed {seed}: rank 0 waited long: {said:?}");
        assert_eq!(said.last(), Some(&A), "seed {seed}: {said:?}");
    }
}

/// The same in low latency.
#[test]
fn suspicions_of_low_latency_are_taken_back_when_all_goes_well() {
    let late = Incident::Delay { from: B, to: A, kind: None, by: Nanos(DEADLINE.0 / 16 * 15), after: 0 };
    for seed in 0..SEEDS {
        let run = cluster(1, 3, true).incident(late).seed(seed).build(shape(3)).unwrap().run(async |mut ep| {
            let (x, _) = batch(&mut ep);
            ep.low_latency_dispatch(&x, &low_routing(3)).await.map(drop)
        });
        let run = run.unwrap_or_else(|violation| panic!("seed {seed}: {violation}"));
        let told = published(&run.records, Counter::Waiting);
        let said: Vec<u64> = told.iter().filter(|(rank, ..)| *rank == A).map(|(.., value)| value & 0xffff).collect();
        assert!(run.finished().iter().all(Result::is_ok), "seed {seed}");
        assert!(said.contains(&1), "seed {seed}: rank 0 waited long: {said:?}");
        assert_eq!(said.last(), Some(&0), "seed {seed}: {said:?}");
    }
}

/// Who waits in low latency hears it, too: the one that it waits for may wait in throughput mode.
#[test]
fn suspicions_of_throughput_mode_are_told_in_low_latency() {
    let late =
        Incident::Delay { from: B, to: A, kind: Some(LaneKind::Control), by: Nanos(DEADLINE.0 / 16 * 13), after: 0 };
    for seed in 0..SEEDS {
        let run = cluster(1, 3, true).incident(late).seed(seed).build(shape(3)).unwrap().run(async |mut ep| {
            let (x, routing) = batch(&mut ep);
            ep.dispatch(&x, &routing).await.map(drop)
        });
        let run = run.unwrap_or_else(|violation| panic!("seed {seed}: {violation}"));
        let told = published(&run.records, Counter::Waiting);
        for peer in [B, C] {
            let said = told.iter().filter(|(rank, to, _)| (*rank, *to) == (A, peer)).map(|(.., value)| value & 0xffff);
            let said: Vec<u64> = said.collect();
            assert!(said.contains(&1), "seed {seed}: rank 0 waited long: {said:?}");
            assert_eq!(said.last(), Some(&0), "seed {seed}: {said:?}");
        }
    }
}

/// Nobody need know of a wait that lasts no longer than half of its time.
#[test]
fn who_waits_for_a_while_in_low_latency_says_nothing() {
    let late = Incident::Delay { from: B, to: A, kind: None, by: Nanos(DEADLINE.0 / 2), after: 0 };
    for seed in 0..SEEDS {
        let run = cluster(1, 3, true).incident(late).seed(seed).build(shape(3)).unwrap().run(async |mut ep| {
            let (x, _) = batch(&mut ep);
            ep.low_latency_dispatch(&x, &low_routing(3)).await.map(drop)
        });
        let run = run.unwrap_or_else(|violation| panic!("seed {seed}: {violation}"));
        assert_eq!(published(&run.records, Counter::Waiting), [], "seed {seed}");
        assert!(run.finished().iter().all(Result::is_ok), "seed {seed}");
    }
}

/// Only who has said something since is waited for once more.
#[test]
fn a_silent_rank_is_waited_for_once_in_low_latency() {
    for seed in 0..SEEDS {
        let run = cluster(1, 2, true).seed(seed).build(shape(2)).unwrap().run(async |mut ep| {
            if ep.rank() == B {
                return None;
            }
            let (x, _) = batch(&mut ep);
            let error = ep.low_latency_dispatch(&x, &low_routing(2)).await.err()?;
            Some((error.failure()?.culprit, ep.now()))
        });
        let run = run.unwrap_or_else(|violation| panic!("seed {seed}: {violation}"));
        assert_eq!(run.finished(), [Some((B, DEADLINE)), None], "seed {seed}");
    }
}

/// Rank 1 has given up rank 2, and then rank 0, too: what rank 0 is told is why, as rank 1 has said it before.
#[test]
fn who_is_given_up_in_low_latency_is_told_for_whose_sake() {
    let verdict = Alarm { serial: 1, verdict: true, op: 1, phase: Phase::Alarm, in_circle: false, peer: C };
    for seed in 0..SEEDS {
        let run = cluster(1, 3, true).seed(seed).build(shape(3)).unwrap().run_machines(async |machine: Machine| {
            match machine.rank() {
                A => {
                    // Until it has landed.
                    pause(&machine, Nanos(DEADLINE.0 / 2)).await;
                    let mut ep = Engine::new(machine).unwrap();
                    let (x, _) = batch(&mut ep);
                    let error = ep.low_latency_dispatch(&x, &low_routing(3)).await.err()?;
                    Some(error.failure()?.fault)
                }
                B => {
                    let opening = Opening { role: Role::new(Duty::Watch), op: 1, generation: 1, deadline: DEADLINE };
                    let mut port = machine.port(opening);
                    for (kind, counter, value) in
                        [(LaneKind::Watch, Counter::Alarm, verdict.encode()), (LaneKind::LowRows, Counter::Odd, MASKED)]
                    {
                        port.publish(LaneId { peer: A, kind }, Cell::new(B, kind, counter), value).await.unwrap();
                    }
                    None
                }
                _ => None,
            }
        });
        let run = run.unwrap_or_else(|violation| panic!("seed {seed}: {violation}"));
        let told = Fault::Aborted { reporter: B, culprit: C };
        assert_eq!(run.finished(), [Some(told), None, None], "seed {seed}");
    }
}

/// Rank 1 begins to wait for rank 2, which has lost its rows, when rank 0 has waited for rank 1 for most of its time: before
/// rank 0 says so, or behind that and shortly before it gives up.
#[test]
fn who_is_asked_in_low_latency_answers_however_short_it_has_waited() {
    let lost = Incident::LoseLane { from: C, to: B, kind: Some(LaneKind::LowRows), after: 0 };
    for (seed, tenths) in (0..SEEDS).flat_map(|seed| [(seed, 7), (seed, 9)]) {
        let run = cluster(1, 3, true).incident(lost).seed(seed).build(shape(3)).unwrap().run(async |mut ep| {
            let (x, _) = batch(&mut ep);
            let routing = low_routing(3);
            let first = ep.send_dispatch(&x, &routing).await.unwrap();
            let outcome = match ep.rank() {
                A => {
                    ep.receive_dispatch(&first).await.unwrap();
                    ep.low_latency_dispatch(&x, &routing).await.map(drop)
                }
                B => {
                    pause(ep.machine(), Nanos(DEADLINE.0 / 10 * tenths)).await;
                    ep.receive_dispatch(&first).await.map(drop)
                }
                _ => Ok(()),
            };
            outcome.err().and_then(|error| error.failure().map(|failure| failure.culprit))
        });
        let run = run.unwrap_or_else(|violation| panic!("seed {seed}, {tenths} tenths: {violation}"));
        assert_eq!(run.finished(), [Some(C), Some(C), None], "seed {seed}, {tenths} tenths");
    }
}

/// Whoever is gone when all that it owed has come is missed in the next operation: this one has brought what it shall.
#[test]
fn low_latency_ends_well_where_a_rank_goes_that_has_given_all() {
    for seed in 0..SEEDS {
        let exit = Incident::Exit { rank: B };
        let run = cluster(1, 2, true).incident(exit).seed(seed).build(shape(2)).unwrap().run(async |mut ep| {
            let (x, _) = batch(&mut ep);
            let sent = ep.send_dispatch(&x, &low_routing(2)).await?;
            if ep.rank() == A {
                pause(ep.machine(), Nanos(DEADLINE.0 / 2)).await;
            }
            ep.receive_dispatch(&sent).await.map(drop)
        });
        let ended: Vec<Result<(), Error>> =
            run.unwrap_or_else(|violation| panic!("seed {seed}: {violation}")).finished();
        assert_eq!(ended, [Ok(()), Ok(())], "seed {seed}");
    }
}

/// Rank 3 has no lanes to rank 0 but those of low latency: in throughput mode it is none of its business when that one is through and goes.
#[test]
fn throughput_mode_ends_well_where_a_rank_goes_that_only_low_latency_hears() {
    let (exit, by) = (Incident::Exit { rank: Rank(3) }, Nanos(DEADLINE.0 / 16));
    let late = Incident::Delay { from: B, to: A, kind: Some(LaneKind::Data(0)), by, after: 0 };
    for seed in 0..SEEDS {
        let cluster = cluster(2, 2, true).incident(exit).incident(late).seed(seed).build(shape(4)).unwrap();
        let run = cluster.run(async |mut ep| {
            let (x, routing) = batch(&mut ep);
            ep.dispatch(&x, &routing).await.map(drop)
        });
        let run = run.unwrap_or_else(|violation| panic!("seed {seed}: {violation}"));
        assert_eq!(run.finished(), [const { Ok(()) }; 4], "seed {seed}");
    }
}

/// The others pull rows from its memory: whoever goes has waited until they have.
#[test]
fn a_rank_goes_when_its_outbox_is_empty() {
    let topology = Topology::new(1, 3).unwrap();
    let settings = Settings::builder(&shape(3), &topology).placement(Placement::Pulled).deadline(DEADLINE);
    let cluster = Cluster::builder(topology).settings(settings.build().unwrap()).deadlines(true);
    for seed in 0..SEEDS {
        let exit = Incident::Exit { rank: A };
        let run = cluster.clone().incident(exit).seed(seed).build(shape(3)).unwrap().run(async |mut ep| {
            let (x, routing) = batch(&mut ep);
            let got = ep.dispatch(&x, &routing).await?;
            ep.bytes(&got.x).map(|bytes| bytes.iter().all(|&byte| byte == 1))
        });
        let run = run.unwrap_or_else(|violation| panic!("seed {seed}: {violation}"));
        assert_eq!(run.finished(), [const { Ok(true) }; 3], "seed {seed}");
    }
}

/// It may wait for a bank to send to, and for rows of either bank: each wait ends at once.
#[test]
fn a_masked_rank_is_told_wherever_it_may_wait() {
    let run = cluster(1, 3, true).build(shape(3)).unwrap().run(async |mut ep| {
        let (x, _) = batch(&mut ep);
        ep.low_latency_dispatch(&x, &low_routing(3)).await.unwrap();
        if ep.rank() == A {
            ep.mask_rank(C).await.unwrap();
        }
    });
    let run = run.unwrap_or_else(|violation| panic!("{violation}"));
    for counter in [Counter::Even, Counter::Odd, Counter::Received] {
        let told: Vec<_> =
            published(&run.records, counter).into_iter().filter(|(.., value)| *value == MASKED).collect();
        assert_eq!(told, [(A, C, MASKED)], "{counter:?}");
    }
}

/// Rank 2 waits for two that go on without it: it need not wait until its time is up.
#[test]
fn who_is_given_up_by_a_recovery_hears_it_at_once() {
    for seed in 0..SEEDS {
        let run = cluster(1, 3, true).seed(seed).build(shape(3)).unwrap().run(async |mut ep| {
            let (x, _) = batch(&mut ep);
            if ep.rank() != C {
                ep.recover(&[C].into_iter().collect()).await.unwrap();
                return None;
            }
            let began = ep.now();
            let error = ep.low_latency_dispatch(&x, &low_routing(3)).await.err()?;
            Some((error.failure()?.fault, ep.now() - began))
        });
        let told = run.unwrap_or_else(|violation| panic!("seed {seed}: {violation}")).finished().pop().flatten();
        let (fault, waited) = told.unwrap_or_else(|| panic!("seed {seed}: nobody came to its operation"));
        assert!(matches!(fault, Fault::MaskedBy { .. }), "seed {seed}: {fault:?}");
        assert!(waited < Nanos(DEADLINE.0 / 2), "seed {seed}: after {waited}");
    }
}

/// Rank 0 goes when its turn has come to say whom it gives up, which is rank 3: then the turn of rank 1 is the next, and rank 2 hears it.
#[test]
fn who_goes_in_its_turn_to_speak_is_passed_over() {
    let mut spoke = [0; 3];
    for (seed, after) in (0..SEEDS).flat_map(|seed| (0..40).map(move |after| (seed, after))) {
        let crash = Incident::Crash { rank: A, after, noticed: true };
        let run = cluster(1, 4, false).incident(crash).seed(seed).build(shape(4)).unwrap().run(async |mut ep| {
            if ep.rank() == Rank(3) {
                return None;
            }
            let (x, routing) = batch(&mut ep);
            let failure = *ep.dispatch(&x, &routing).await.err()?.failure()?;
            matches!(failure.fault, Fault::Timeout { .. }).then_some((failure.culprit, failure.reporter))
        });
        let run = run.unwrap_or_else(|violation| panic!("seed {seed}, after {after}: {violation}"));
        let mut told = run.outcomes.into_iter().map(|outcome| outcome.finished().flatten());
        if let (None, Some(one), Some(other)) = (told.next().flatten(), told.next().flatten(), told.next().flatten()) {
            assert_eq!((one.0, other.0), (Rank(3), Rank(3)), "seed {seed}, after {after}");
            spoke[other.1.index()] += 1;
        }
    }
    assert!(spoke[1] > 0 && spoke[2] * 4 < spoke[1], "{spoke:?}");
}

/// Whoever gives up first says so, after a recovery as before it, and the others take that over: rank 0 speaks first, and
/// rank 1 hears it, unless it is told very late. Before the recovery rank 0 has said more than it says after it: its alarms
/// count anew.
#[test]
fn verdicts_are_heard_again_after_a_recovery() {
    let late =
        Incident::Delay { from: B, to: A, kind: Some(LaneKind::Control), by: Nanos(DEADLINE.0 / 16 * 13), after: 0 };
    let mut heard = [0, 0];
    for seed in 0..SEEDS {
        let run = cluster(1, 4, false).incident(late).seed(seed).build(shape(4)).unwrap().run(async |mut ep| {
            let (x, routing) = batch(&mut ep);
            let me = ep.rank();
            let mut verdicts = Vec::new();
            let mut mask = RankSet::new();
            // Suspected, and taken back.
            ep.dispatch(&x, &routing).await.unwrap();
            for lost in [Rank(3), Rank(2)] {
                if me == lost {
                    break;
                }
                let Err(Error::Failed(failure)) = ep.dispatch(&x, &routing).await else {
                    panic!("rank {lost} is gone")
                };
                verdicts.push((failure.culprit, failure.reporter));
                mask.insert(lost);
                ep.recover(&mask).await.unwrap();
            }
            verdicts
        });
        let seen = run.unwrap_or_else(|violation| panic!("seed {seed}: {violation}")).finished();
        for (failed, culprit) in [Rank(3), Rank(2)].into_iter().enumerate() {
            let told: Vec<_> = seen.iter().filter_map(|verdicts| verdicts.get(failed)).collect();
            assert_eq!(told.len(), 3 - failed, "seed {seed}");
            assert!(told.iter().all(|(blamed, _)| *blamed == culprit), "seed {seed}: {told:?}");
            heard[failed] += u64::from(seen[B.index()][failed].1 == A);
        }
    }
    assert!(heard.iter().all(|&heard| heard > SEEDS / 2), "{heard:?} of {SEEDS}");
}
