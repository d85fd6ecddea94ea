//! Stopping lanes, and agreeing on how to go on.

use std::collections::BTreeSet;

use crate::common::{A, B, C, DEADLINE, SEEDS, cell, cluster, explore, explore_with, free, lane, need, probe, shape};
use ep_core::machine::{Machine as _, Opening, Proposal, Window as _};
use ep_core::port::{Cell, Counter, Duty, LaneId, LaneKind, Need, Port as _, Role, Scope};
use ep_core::{Error, Nanos, Phase, Rank, RankSet, Settings, Topology};
use ep_sim::{Cluster, Incident, Machine, Outcome};

fn proposal(mask: &[Rank], generation: u16, op: u64) -> Proposal {
    Proposal { mask: mask.iter().copied().collect(), generation, op }
}

#[test]
fn after_reset_nothing_is_read_and_nothing_lands() {
    let seen = explore(2, async |machine: Machine| {
        let place = free(&machine, 0);
        if machine.rank() == A {
            let mut port = probe(&machine, 0);
            port.write(place, &[1; 64]).unwrap();
            port.put(lane(B), place.span(64), place).await.unwrap();
            port.publish(lane(B), cell(A), 1).await.unwrap();
            drop(port);
            machine.reset(Scope::All).await;
            // Were the put still in flight, this would be a race, and might arrive.
            machine.window().write(place, &[2; 64]).unwrap();
        }
        machine.bootstrap().agree(proposal(&[], 1, 1), DEADLINE).await.unwrap();
        let mut bytes = [0; 64];
        machine.window().read(place, &mut bytes).unwrap();
        let port = probe(&machine, 0);
        (bytes.iter().filter(|&&byte| byte == 1).count(), port.peek(cell(A)), bytes.contains(&2))
    });
    let seen: BTreeSet<(usize, u64, bool)> = seen.into_iter().map(|ranks| ranks[B.index()]).collect();
    assert!(seen.iter().all(|&(landed, told, late)| !late && (told == 0 || landed == 64)), "{seen:?}");
    assert!(seen.contains(&(0, 0, false)) && seen.contains(&(64, 0, false)) && seen.contains(&(64, 1, false)));
    assert!(seen.iter().any(|&(landed, ..)| landed % 64 > 0), "a put may be applied in part");
}

/// What throughput mode has under way to a rank arrives, though low latency is done with it.
#[test]
fn a_reset_of_low_latency_touches_no_other_lane() {
    const LOW: [LaneKind; 2] = [LaneKind::LowRows, LaneKind::LowDone];
    const OTHERS: [LaneKind; 3] = [LaneKind::Watch, LaneKind::Control, LaneKind::Data(0)];
    let cell = |kind| Cell::new(A, kind, Counter::Probe);
    let topology = Topology::new(1, 3).unwrap();
    let settings = Settings::builder(&shape(), &topology).low_latency(true).deadline(DEADLINE).build().unwrap();
    let cluster = Cluster::builder(topology).settings(settings);
    let seen = explore_with(cluster, async |machine: Machine| {
        let mut port = probe(&machine, 0);
        if machine.rank() == A {
            for kind in LOW.into_iter().chain(OTHERS) {
                for peer in [B, C] {
                    port.publish(LaneId { peer, kind }, cell(kind), 1).await.unwrap();
                }
            }
            machine.reset(Scope::LowLatency(B)).await;
        } else {
            for kind in OTHERS {
                port.wait_any(&[Need { cell: cell(kind), at_least: 1 }]).await.unwrap();
            }
        }
        if machine.rank() == C {
            for kind in LOW {
                port.wait_any(&[Need { cell: cell(kind), at_least: 1 }]).await.unwrap();
            }
        }
        machine.bootstrap().agree(proposal(&[], 1, 1), DEADLINE).await.unwrap();
        LOW.map(|kind| port.peek(cell(kind)))
    });
    let told: BTreeSet<[u64; 2]> = seen.into_iter().map(|ranks| ranks[B.index()]).collect();
    assert_eq!(told, BTreeSet::from([[0, 0], [0, 1], [1, 0], [1, 1]]), "the reset stops what had not arrived");
}

#[test]
fn an_agreement_is_the_union_of_masks_and_the_highest_numbers() {
    let agreed = explore(3, async |machine: Machine| {
        let me = machine.rank();
        let mine = if me == A { proposal(&[C], 4, 17) } else { proposal(&[], 3, 18) };
        machine.bootstrap().agree(mine, Nanos(u64::MAX)).await
    });
    for ranks in agreed {
        for rank in [A, B] {
            let Ok(agreement) = &ranks[rank.index()] else { panic!("{ranks:?}") };
            assert_eq!((agreement.generation, agreement.op), (5, 18));
            assert_eq!(agreement.mask, RankSet::from_iter([C]));
        }
        assert_eq!(ranks[C.index()], Err(Error::Excluded { rank: C }));
    }
}

#[test]
fn a_rank_that_does_not_come_is_named_at_the_deadline() {
    let answers = explore(3, async |machine: Machine| {
        if machine.rank() == B {
            return None;
        }
        Some(machine.bootstrap().agree(proposal(&[], 1, 5), DEADLINE).await.unwrap_err())
    });
    for answer in answers.into_iter().flatten().flatten() {
        let failure = *answer.failure().unwrap();
        assert_eq!((failure.culprit, failure.op), (B, 5));
        assert!(matches!(failure.fault, ep_core::Fault::Timeout { phase: Phase::Recovery, waited: DEADLINE, .. }));
    }
}

#[test]
fn survivors_of_a_crash_use_the_memory_again_without_a_race() {
    for seed in 0..SEEDS {
        let crash = Incident::Crash { rank: C, after: 6, noticed: seed % 2 == 0 };
        let cluster = cluster(1, 3).incident(crash).seed(seed).build(shape()).unwrap();
        let run = cluster.run_machines(async |machine: Machine| {
            let (me, place) = (machine.rank(), free(&machine, 0));
            let mut port = probe(&machine, 0);
            let failed = async |port: &mut ep_sim::Port| {
                for value in 1..100 {
                    for peer in [A, B, C].into_iter().filter(|&peer| peer != me) {
                        let to = place.plus(256 * value + 64 * u64::from(me.0));
                        let ticket = port.put(lane(peer), place.span(64), to).await?;
                        port.publish(lane(peer), cell(me), value).await?;
                        port.flush(lane(peer), ticket).await?;
                    }
                    for peer in [A, B, C].into_iter().filter(|&peer| peer != me) {
                        port.wait_any(&need(peer, value)).await?;
                    }
                }
                Ok::<(), ep_core::Fault>(())
            };
            failed(&mut port).await.unwrap_err();
            drop(port);
            machine.reset(Scope::All).await;
            // Later than the deadline by which a peer may notice that this rank stopped talking to it.
            let soon = machine.now() + Nanos::from_secs(1);
            let agreement = machine.bootstrap().agree(proposal(&[C], 1, 2), soon).await.unwrap();
            machine.window().write(place, &[me.0 as u8; 512]).unwrap();
            let role = Role::new(Duty::Probe);
            let opening = |generation| Opening { role, op: 2, generation, deadline: soon };
            let peer = if me == A { B } else { A };
            let seen = machine.port(opening(agreement.generation)).peek(cell(peer));
            assert_eq!(seen, 0, "cells of an earlier generation read zero");
            let again = machine.bootstrap().agree(proposal(&[C], agreement.generation, 2), soon).await.unwrap();
            let mut port = machine.port(opening(again.generation));
            port.put(lane(peer), place.span(64), place.plus(64)).await.unwrap();
            port.publish(lane(peer), cell(me), 1).await.unwrap();
            port.wait_any(&need(peer, 1)).await.unwrap();
            let mut bytes = [0; 64];
            port.read(place.plus(64), &mut bytes).unwrap();
            assert_eq!(bytes, [peer.0 as u8; 64]);
        });
        assert_eq!(run.unwrap_or_else(|violation| panic!("{violation}")).outcomes[C.index()], Outcome::Crashed);
    }
}

#[test]
fn a_verb_that_was_dropped_half_way_leaves_its_port_usable() {
    explore_with(cluster(1, 2), async |machine: Machine| {
        let mut port = probe(&machine, 0);
        if machine.rank() == A {
            {
                let never = std::pin::pin!(async { port.wait_any(&need(B, 100)).await });
                let once = futures_util::future::poll_immediate(never).await;
                assert_eq!(once, None);
            }
            port.publish(lane(B), cell(A), 1).await.unwrap();
        }
        let peer = if machine.rank() == A { B } else { A };
        if machine.rank() == B {
            port.publish(lane(A), cell(B), 1).await.unwrap();
        }
        port.wait_any(&need(peer, 1)).await.unwrap();
    });
}
