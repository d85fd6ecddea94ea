//! Accesses that nothing orders are found under every adversary, right bytes or not; ordered ones never.

use crate::common::{A, B, SEEDS, cell, cluster, free, lane, need, probe, shape};
use ep_core::RankSet;
use ep_core::machine::{Machine as _, Proposal, Window as _};
use ep_core::port::{LaneId, LaneKind, Port as _};
use ep_sim::{AccessKind, Machine, Race, Violation};

/// The race that every adversary's run ends with.
fn races(each: impl AsyncFn(Machine)) -> Vec<Race> {
    let run = |seed| cluster(1, 2).seed(seed).build(shape()).unwrap().run_machines(&each).map(drop);
    let race = |seed| match run(seed) {
        Err(Violation::Race(race)) => *race,
        other => panic!("seed {seed}: {other:?}"),
    };
    (0..SEEDS).map(race).collect()
}

/// Whether all races are between accesses of these kinds, in either order.
fn between(races: &[Race], one: AccessKind, other: AccessKind) -> bool {
    let kinds = |race: &Race| (race.earlier.kind, race.later.kind);
    races.iter().map(kinds).all(|seen| seen == (one, other) || seen == (other, one))
}

#[test]
fn a_tail_published_before_its_data_is_a_race() {
    let found = races(async |machine| {
        let mut port = probe(&machine, 0);
        let place = free(&machine, 0);
        if machine.rank() == A {
            port.write(place, &[1; 64]).unwrap();
            port.publish(lane(B), cell(A), 1).await.unwrap();
            port.put(lane(B), place.span(64), place).await.unwrap();
            port.wait_any(&need(B, 1)).await.unwrap();
        } else {
            port.wait_any(&need(A, 1)).await.unwrap();
            port.read(place, &mut [0; 64]).unwrap();
            port.publish(lane(A), cell(B), 1).await.unwrap();
        }
    });
    assert!(between(&found, AccessKind::PutDestination, AccessKind::Read));
    let text = Violation::Race(Box::new(found[7].clone())).to_string();
    assert!(text.contains("seed 7") && text.contains("probe") && text.contains("arena"), "{text}");
}

#[test]
fn a_source_overwritten_without_flush_is_a_race_even_after_credit() {
    let found = races(async |machine| {
        let mut port = probe(&machine, 0);
        let place = free(&machine, 0);
        if machine.rank() == A {
            port.write(place, &[1; 64]).unwrap();
            port.put(lane(B), place.span(64), place).await.unwrap();
            port.publish(lane(B), cell(A), 1).await.unwrap();
            port.wait_any(&need(B, 1)).await.unwrap();
            port.write(place, &[2; 64]).unwrap();
            port.wait_any(&need(B, 1)).await.unwrap();
        } else {
            port.wait_any(&need(A, 1)).await.unwrap();
            port.publish(lane(A), cell(B), 1).await.unwrap();
        }
    });
    assert!(between(&found, AccessKind::PutSource, AccessKind::Write));
}

#[test]
fn credit_before_the_read_is_a_race() {
    let found = races(async |machine| {
        let mut port = probe(&machine, 0);
        let place = free(&machine, 0);
        if machine.rank() == A {
            for round in 1..=2 {
                port.wait_any(&need(B, round - 1)).await.unwrap();
                port.put(lane(B), free(&machine, round * 64).span(64), place).await.unwrap();
                port.publish(lane(B), cell(A), round).await.unwrap();
            }
        } else {
            port.wait_any(&need(A, 1)).await.unwrap();
            port.publish(lane(A), cell(B), 1).await.unwrap();
            port.read(place, &mut [0; 64]).unwrap();
            port.wait_any(&need(A, 2)).await.unwrap();
        }
    });
    assert!(between(&found, AccessKind::PutDestination, AccessKind::Read));
}

#[test]
fn bytes_of_a_get_read_before_its_flush_are_a_race() {
    let found = races(async |machine| {
        let mut port = probe(&machine, 0);
        if machine.rank() == A {
            port.get(lane(B), free(&machine, 0).span(64), free(&machine, 64)).await.unwrap();
            port.read(free(&machine, 100), &mut [0; 4]).unwrap();
            port.wait_any(&need(B, 1)).await.unwrap();
        }
    });
    assert!(between(&found, AccessKind::GetDestination, AccessKind::Read));
}

#[test]
fn an_owner_overwriting_what_a_peer_still_gets_is_a_race() {
    let found = races(async |machine| {
        let mut port = probe(&machine, 0);
        if machine.rank() == A {
            port.get(lane(B), free(&machine, 0).span(64), free(&machine, 64)).await.unwrap();
            // Without a flush before it, the credit says nothing about the get (F9).
            port.publish(lane(B), cell(A), 1).await.unwrap();
        } else {
            port.wait_any(&need(A, 1)).await.unwrap();
            port.write(free(&machine, 32), &[0; 4]).unwrap();
        }
        port.wait_any(&need(if machine.rank() == A { B } else { A }, 5)).await.unwrap();
    });
    assert!(between(&found, AccessKind::GetSource, AccessKind::Write));
}

#[test]
fn a_publish_on_another_lane_says_nothing_about_puts() {
    let control = LaneId { peer: B, kind: LaneKind::Control };
    let told = ep_core::port::Cell::new(A, LaneKind::Control, ep_core::port::Counter::Probe);
    let found = races(async |machine| {
        let mut port = probe(&machine, 0);
        let place = free(&machine, 0);
        if machine.rank() == A {
            let ticket = port.put(lane(B), place.span(64), place).await.unwrap();
            port.flush(lane(B), ticket).await.unwrap();
            port.publish(control, told, 1).await.unwrap();
        } else {
            port.wait_any(&[ep_core::port::Need { cell: told, at_least: 1 }]).await.unwrap();
            port.read(place, &mut [0; 64]).unwrap();
            port.wait_any(&need(A, 5)).await.unwrap();
        }
    });
    assert!(between(&found, AccessKind::PutDestination, AccessKind::Read));
}

#[test]
fn two_roles_of_a_rank_are_ordered_by_cells_only() {
    let found = races(async |machine| {
        let (mut one, mut two) = (probe(&machine, 0), probe(&machine, 1));
        one.write(free(&machine, 0), &[1]).unwrap();
        two.write(free(&machine, 0), &[1]).unwrap();
        two.wait_any(&need(A, 5)).await.unwrap();
    });
    assert!(between(&found, AccessKind::Write, AccessKind::Write));
}

#[test]
fn ports_are_ordered_after_the_main_line_and_the_main_line_after_ports() {
    crate::common::explore(1, async |machine: Machine| {
        let window = machine.window();
        let place = free(&machine, 0);
        for round in 0..5u8 {
            window.write(place, &[round; 64]).unwrap();
            let mut port = probe(&machine, u16::from(round % 2));
            port.read(place, &mut [0; 64]).unwrap();
            port.write(place.plus(8), &[9; 8]).unwrap();
            let ticket = port.put(lane(A), place.span(8), place.plus(100)).await.unwrap();
            port.publish(lane(A), cell(A), u64::from(round) + 1).await.unwrap();
            port.wait_any(&need(A, u64::from(round) + 1)).await.unwrap();
            port.flush(lane(A), ticket).await.unwrap();
            drop(port);
            let mut bytes = [0; 16];
            window.read(place.plus(100), &mut bytes[..8]).unwrap();
            window.read(place.plus(8), &mut bytes[8..]).unwrap();
            assert_eq!(bytes, [[round; 8], [9; 8]].concat()[..]);
        }
    });
}

#[test]
fn a_flush_says_nothing_about_the_put_after_its_ticket() {
    let found = races(async |machine| {
        let mut port = probe(&machine, 0);
        if machine.rank() == A {
            let first = port.put(lane(B), free(&machine, 0).span(64), free(&machine, 0)).await.unwrap();
            port.put(lane(B), free(&machine, 64).span(64), free(&machine, 64)).await.unwrap();
            port.flush(lane(B), first).await.unwrap();
            port.write(free(&machine, 0), &[2; 64]).unwrap();
            port.write(free(&machine, 64), &[2; 64]).unwrap();
        }
        port.wait_any(&need(if machine.rank() == A { B } else { A }, 1)).await.unwrap();
    });
    assert!(between(&found, AccessKind::PutSource, AccessKind::Write));
    let second = |race: &Race| race.earlier.span.offset == race.later.span.offset && race.earlier.span.len == 64;
    let offsets: Vec<_> = found.iter().map(|race| race.earlier.span.offset).collect();
    assert!(found.iter().all(second) && offsets.windows(2).all(|pair| pair[0] == pair[1]), "{offsets:?}");
}

/// Of two roles that read, the first returns the credit: the second still reads.
#[test]
fn every_reader_must_be_ordered_before_a_put() {
    for (ordered, other) in [(0, 1), (1, 0)] {
        let found = races(async |machine| {
            let place = free(&machine, 0);
            if machine.rank() == A {
                let mut port = probe(&machine, 0);
                port.wait_any(&need(B, 1)).await.unwrap();
                port.put(lane(B), free(&machine, 64).span(64), place).await.unwrap();
                port.wait_any(&need(B, 5)).await.unwrap();
            } else {
                let mut ports = [probe(&machine, 0), probe(&machine, 1)];
                for port in &ports {
                    port.read(place, &mut [0; 64]).unwrap();
                }
                ports[ordered].publish(lane(A), cell(B), 1).await.unwrap();
                ports[other].wait_any(&need(A, 5)).await.unwrap();
            }
        });
        assert!(between(&found, AccessKind::PutDestination, AccessKind::Read), "{ordered}");
    }
}

/// A meeting orders what was before it, and nothing that comes after.
#[test]
fn what_follows_a_meeting_is_ordered_by_nothing() {
    let found = races(async |machine| {
        let proposal = Proposal { mask: RankSet::new(), generation: 1, op: 1 };
        machine.bootstrap().agree(proposal, crate::common::DEADLINE).await.unwrap();
        let place = free(&machine, 0);
        if machine.rank() == A {
            machine.window().write(place, &[1; 64]).unwrap();
        }
        let mut port = probe(&machine, 0);
        if machine.rank() == B {
            port.put(lane(A), free(&machine, 64).span(64), place).await.unwrap();
        }
        port.wait_any(&need(if machine.rank() == A { B } else { A }, 5)).await.unwrap();
    });
    assert!(between(&found, AccessKind::PutDestination, AccessKind::Write));
}
