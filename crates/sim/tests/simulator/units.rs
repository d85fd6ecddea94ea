//! F11: units are seen whole or not at all, in any order, and order nothing but themselves and the reads before them.

use std::collections::BTreeSet;

use crate::common::{A, B, DEADLINE, SEEDS, cell, cluster, explore, explore_with, free, lane, need, probe, shape};
use ep_core::incident::Incident;
use ep_core::machine::Machine as _;
use ep_core::port::{Offset, Port as _, Tag, UNIT_BYTES, UNIT_DATA, Units, unit_bytes};
use ep_core::{Fault, Nanos, Phase, Rank};
use ep_sim::{AccessKind, Builder, Machine, Model, Port, Race, Rate, Violation};

/// Bytes of a payload of five units, the last of them not full.
const LEN: u64 = 52;

/// Where units come, in every window.
fn place(machine: &Machine) -> Offset {
    free(machine, 1 << 16)
}

/// What `writer` puts there in operation `serial`.
fn payload(machine: &Machine, writer: Rank, serial: u64) -> Units {
    Units { lane: lane(writer), at: place(machine), len: LEN, tag: Tag::of(serial) }
}

/// Puts `fill` as operation `serial`'s payload to `peer`, from a place of its own.
async fn put(machine: &Machine, port: &mut Port, peer: Rank, serial: u64, fill: u8) {
    let from = free(machine, serial * 64);
    port.write(from, &[fill; LEN as usize]).unwrap();
    port.put_units(lane(peer), from.span(LEN), place(machine), Tag::of(serial)).await.unwrap();
}

/// Waits for `writer`'s payload of operation `serial`.
async fn take(machine: &Machine, port: &mut Port, writer: Rank, serial: u64) -> [u8; LEN as usize] {
    let (units, mut bytes) = (payload(machine, writer, serial), [0; LEN as usize]);
    assert_eq!(port.wait_units(&[units], &[]).await, Ok(0));
    assert_eq!(port.poll_units(&units, &mut bytes), Ok(true), "what was waited for is there");
    bytes
}

/// Looks at each unit by itself, again and again: which had come at each look, the first one in the lowest bit; and whether each of
/// those held `fill`, whole.
async fn watch(machine: &Machine, port: &mut Port, serial: u64, fill: u8) -> (BTreeSet<u8>, bool) {
    let (whole, mut seen, mut right) = (payload(machine, A, serial), BTreeSet::new(), true);
    for round in 0..60 {
        let mut come = 0;
        for unit in 0..5 {
            let len = UNIT_DATA.min(LEN - unit * UNIT_DATA);
            let (one, mut bytes) = (Units { at: whole.at.plus(unit * UNIT_BYTES), len, ..whole }, [0; 12]);
            let bytes = &mut bytes[..len as usize];
            if port.poll_units(&one, bytes).unwrap() {
                come |= 1 << unit;
                right &= bytes.iter().all(|&byte| byte == fill);
            }
        }
        seen.insert(come);
        port.publish(lane(A), cell(B), round).await.unwrap();
    }
    (seen, right)
}

/// A run in which B watches the units of one payload come.
fn watched(builder: Builder) -> Vec<(BTreeSet<u8>, bool)> {
    let runs = explore_with(builder, async |machine: Machine| {
        let mut port = probe(&machine, 0);
        if machine.rank() == A {
            put(&machine, &mut port, B, 1, 9).await;
            return None;
        }
        Some(watch(&machine, &mut port, 1, 9).await)
    });
    runs.into_iter().filter_map(|mut ranks| ranks.remove(B.index())).collect()
}

#[test]
fn units_come_whole_and_in_any_order() {
    let runs = watched(cluster(1, 2));
    assert!(runs.iter().all(|(_, right)| *right), "no unit is seen in halves");
    let seen: BTreeSet<u8> = runs.into_iter().flat_map(|(seen, _)| seen).collect();
    assert!(seen.contains(&0) && seen.contains(&0b11111));
    assert!(seen.iter().any(|come| come & 3 == 1) && seen.iter().any(|come| come & 3 == 2), "{seen:?}");
    let has_gap = |come: &u8| come.leading_zeros() + come.count_ones() + come.trailing_zeros() < u8::BITS;
    assert!(seen.iter().any(has_gap), "{seen:?}");
}

/// As on a machine whose stores of 16 bytes are two: the tag shows what has not come.
#[test]
fn a_machine_that_tears_units_is_found() {
    let runs = watched(cluster(1, 2).torn_units(true));
    assert!(runs.iter().any(|(_, right)| !right));
}

/// Round after round in the same place: units are data, their own announcement, and credit.
#[test]
fn units_carry_rounds_without_a_publish() {
    explore(2, async |machine: Machine| {
        let mut port = probe(&machine, 0);
        for round in 1..=12 {
            if machine.rank() == A {
                put(&machine, &mut port, B, round, round as u8).await;
                take(&machine, &mut port, B, round).await;
            } else {
                assert_eq!(take(&machine, &mut port, A, round).await, [round as u8; LEN as usize]);
                put(&machine, &mut port, A, round, 0).await;
            }
        }
    });
}

/// The races that runs end with: every one of them, or where `some` is enough, at least one.
fn races(some: bool, each: impl AsyncFn(Machine, Port)) -> Vec<Race> {
    let each = async |machine: Machine| {
        let port = probe(&machine, 0);
        each(machine, port).await;
    };
    let run = |seed| cluster(1, 2).seed(seed).build(shape()).unwrap().run_machines(each).map(drop);
    let race = |seed| match run(seed) {
        Err(Violation::Race(race)) => Some(*race),
        Ok(()) if some => None,
        other => panic!("seed {seed}: {other:?}"),
    };
    let found: Vec<Race> = (0..SEEDS).filter_map(race).collect();
    assert!(!found.is_empty(), "nothing was found");
    found
}

fn between(races: &[Race], one: AccessKind, other: AccessKind) -> bool {
    let kinds = |race: &Race| (race.earlier.kind, race.later.kind);
    races.iter().map(kinds).all(|seen| seen == (one, other) || seen == (other, one))
}

#[test]
fn units_announce_no_put_of_their_lane() {
    let found = races(false, async |machine, mut port| {
        let beside = free(&machine, 1 << 15);
        if machine.rank() == A {
            port.write(beside, &[1; 64]).unwrap();
            port.put(lane(B), beside.span(64), beside).await.unwrap();
            put(&machine, &mut port, B, 1, 1).await;
            take(&machine, &mut port, B, 1).await;
        } else {
            take(&machine, &mut port, A, 1).await;
            port.read(beside, &mut [0; 64]).unwrap();
            put(&machine, &mut port, A, 1, 1).await;
        }
    });
    assert!(between(&found, AccessKind::PutDestination, AccessKind::Read));
}

#[test]
fn units_announce_no_other_units() {
    let found = races(false, async |machine, mut port| {
        if machine.rank() == A {
            put(&machine, &mut port, B, 1, 1).await;
            take(&machine, &mut port, B, 1).await;
        } else {
            // One unit has come; the bytes beside it were not polled.
            let first = Units { len: UNIT_DATA, ..payload(&machine, A, 1) };
            port.wait_units(&[first], &[]).await.unwrap();
            assert_eq!(port.poll_units(&first, &mut [0; UNIT_DATA as usize]), Ok(true));
            port.read(place(&machine).plus(UNIT_BYTES), &mut [0; 16]).unwrap();
            put(&machine, &mut port, A, 1, 1).await;
        }
    });
    assert!(between(&found, AccessKind::UnitsDestination, AccessKind::Read));
}

#[test]
fn a_publish_behind_units_announces_them() {
    explore(2, async |machine: Machine| {
        let mut port = probe(&machine, 0);
        if machine.rank() == A {
            put(&machine, &mut port, B, 1, 5).await;
            port.publish(lane(B), cell(A), 1).await.unwrap();
        } else {
            port.wait_any(&need(A, 1)).await.unwrap();
            assert_eq!(port.poll_units(&payload(&machine, A, 1), &mut [0; LEN as usize]), Ok(true));
            port.read(place(&machine), &mut [0; unit_bytes(LEN) as usize]).unwrap();
        }
    });
}

#[test]
fn units_over_ones_that_were_not_polled_yet_are_a_race() {
    let found = races(false, async |machine, mut port| {
        if machine.rank() == A {
            put(&machine, &mut port, B, 1, 1).await;
            put(&machine, &mut port, B, 2, 2).await;
            take(&machine, &mut port, B, 1).await;
        } else {
            take(&machine, &mut port, A, 2).await;
            put(&machine, &mut port, A, 1, 1).await;
        }
    });
    assert!(between(&found, AccessKind::UnitsDestination, AccessKind::UnitsDestination));
}

/// Who accepts the tag of the operation before reads what is being overwritten.
#[test]
fn a_tag_of_another_operation_that_is_accepted_is_a_race() {
    let found = races(true, async |machine, mut port| {
        if machine.rank() == A {
            put(&machine, &mut port, B, 1, 1).await;
            take(&machine, &mut port, B, 1).await;
            put(&machine, &mut port, B, 2, 2).await;
            port.wait_any(&need(B, 1)).await.unwrap();
        } else {
            take(&machine, &mut port, A, 1).await;
            put(&machine, &mut port, A, 1, 1).await;
            port.poll_units(&payload(&machine, A, 1), &mut [0; LEN as usize]).unwrap();
            port.publish(lane(A), cell(B), 1).await.unwrap();
        }
    });
    assert!(between(&found, AccessKind::UnitsDestination, AccessKind::Poll));
}

#[test]
fn credit_by_a_unit_that_goes_before_the_read_is_a_race() {
    let found = races(false, async |machine, mut port| {
        let beside = free(&machine, 1 << 15);
        if machine.rank() == A {
            take(&machine, &mut port, B, 1).await;
            port.put(lane(B), beside.span(64), beside).await.unwrap();
            port.publish(lane(B), cell(A), 1).await.unwrap();
        } else {
            put(&machine, &mut port, A, 1, 1).await;
            port.read(beside, &mut [0; 64]).unwrap();
            port.wait_any(&need(A, 1)).await.unwrap();
        }
    });
    assert!(between(&found, AccessKind::PutDestination, AccessKind::Read));
}

/// A unit is credit for what was read, and says nothing of what was written: a store of its own may land after it.
#[test]
fn units_are_no_credit_for_what_their_rank_wrote() {
    let found = races(false, async |machine, mut port| {
        let beside = free(&machine, 1 << 15);
        if machine.rank() == A {
            take(&machine, &mut port, B, 1).await;
            port.put(lane(B), beside.span(64), beside).await.unwrap();
            port.publish(lane(B), cell(A), 1).await.unwrap();
        } else {
            port.write(beside, &[1; 64]).unwrap();
            put(&machine, &mut port, A, 1, 1).await;
            port.wait_any(&need(A, 1)).await.unwrap();
        }
    });
    assert!(between(&found, AccessKind::PutDestination, AccessKind::Write));
}

#[test]
fn other_bytes_where_units_are_polled_are_a_race() {
    let found = races(true, async |machine, mut port| {
        if machine.rank() == A {
            port.put(lane(B), place(&machine).span(64), place(&machine)).await.unwrap();
            port.publish(lane(B), cell(A), 1).await.unwrap();
            port.wait_any(&need(B, 1)).await.unwrap();
        } else {
            for round in 1..20 {
                port.poll_units(&payload(&machine, A, 1), &mut [0; LEN as usize]).unwrap();
                port.publish(lane(A), cell(B), round).await.unwrap();
            }
        }
    });
    assert!(between(&found, AccessKind::PutDestination, AccessKind::Poll));
}

/// The rule that every adversary's run finds broken, and how.
fn broken(each: impl AsyncFn(&Machine, &mut Port)) -> String {
    let run = cluster(1, 2).build(shape()).unwrap().run_machines(async |machine: Machine| {
        let mut port = probe(&machine, 0);
        match machine.rank() {
            A => each(&machine, &mut port).await,
            _ => port.wait_any(&need(A, 1)).await.map(drop).unwrap(),
        }
    });
    match run.map(drop) {
        Err(Violation::Rule(broken)) => format!("{}: {}", broken.rule, broken.what),
        other => panic!("{other:?}"),
    }
}

#[test]
fn tags_that_repeat_and_places_of_no_unit_are_refused() {
    let repeated = broken(async |machine, port| {
        for _ in 0..2 {
            put(machine, port, B, 7, 1).await;
            let last = port.put(lane(B), free(machine, 0).span(8), free(machine, 1 << 15)).await.unwrap();
            port.flush(lane(B), last).await.unwrap();
        }
    });
    assert_eq!(repeated, "F11: put units of tag 8 over units that bear it already");
    let odd = broken(async |machine, port| {
        let to = place(machine).plus(8);
        port.put_units(lane(B), free(machine, 0).span(12), to, Tag::of(1)).await.unwrap();
        let _ = port.wait_any(&need(B, 1)).await;
    });
    assert!(odd.starts_with("F11: put units to ") && odd.ends_with(", which is no place of a unit"), "{odd}");
}

#[test]
fn units_stay_within_a_node_and_a_window() {
    let refused = explore(2, async |machine: Machine| {
        let (mut port, end) = (probe(&machine, 0), Offset(machine.layout().window_bytes() & !15));
        let peer = if machine.rank() == A { B } else { A };
        let outside = Units { at: end, ..payload(&machine, peer, 1) };
        let put = port.put_units(lane(peer), free(&machine, 0).span(LEN), end, Tag::of(1)).await;
        let all = [put.map(drop), port.poll_units(&outside, &mut [0; LEN as usize]).map(drop)];
        all.into_iter().chain([port.wait_units(&[outside], &[]).await.map(drop)]).collect::<Vec<_>>()
    });
    assert!(refused.iter().flatten().flatten().all(|refused| matches!(refused, Err(Fault::OutOfRange { .. }))));
    let far = explore_with(cluster(2, 1), async |machine: Machine| {
        let (mut port, peer) = (probe(&machine, 0), if machine.rank() == A { B } else { A });
        let units = payload(&machine, peer, 1);
        let put = port.put_units(lane(peer), free(&machine, 0).span(LEN), place(&machine), Tag::of(1)).await;
        let all = [put.map(drop), port.poll_units(&units, &mut [0; LEN as usize]).map(drop)];
        all.into_iter().chain([port.wait_units(&[units], &[]).await.map(drop)]).collect::<Vec<_>>()
    });
    assert!(far.iter().flatten().flatten().all(|refused| matches!(refused, Err(Fault::NotOffered { .. }))));
}

#[test]
fn a_wait_for_units_ends_and_says_for_whom() {
    let waits = async |machine: Machine| {
        let mut port = probe(&machine, 0);
        if machine.rank() == B {
            let first = free(&machine, 0).span(UNIT_DATA);
            port.put_units(lane(A), first, place(&machine), Tag::of(1)).await.unwrap();
            port.publish(lane(A), cell(B), 1).await.unwrap();
            return None;
        }
        let units = payload(&machine, B, 1);
        let or = need(B, 1);
        assert_eq!(port.wait_units(&[units], &or).await, Ok(1), "the cell is raised before all units have come");
        port.wait_units(&[units], &[]).await.err()
    };
    let late = explore_with(cluster(1, 2).deadlines(true), waits);
    assert!(late.iter().all(|ranks| matches!(
        ranks[0],
        Some(Fault::Timeout { peer: B, seen: 1, awaited: 5, waited, .. }) if waited == DEADLINE
    )));
    let crash = Incident::Crash { rank: B, after: 2, noticed: true };
    for seed in 0..SEEDS {
        let cluster = cluster(1, 2).seed(seed).incident(crash).build(shape()).unwrap();
        let gone = cluster.run_machines(async |machine: Machine| {
            let mut port = probe(&machine, 0);
            if machine.rank() == B {
                put(&machine, &mut port, A, 1, 1).await;
                for value in 1.. {
                    port.publish(lane(A), cell(B), value).await.unwrap();
                }
            }
            // Units of the next operation never come.
            port.wait_units(&[payload(&machine, B, 2)], &[]).await.err()
        });
        let mut gone = gone.unwrap_or_else(|violation| panic!("{violation}")).outcomes;
        let fault = gone.remove(0).finished().flatten();
        assert_eq!(fault, Some(Fault::PeerGone { peer: B, phase: Phase::Rows }));
    }
}

/// 2 bytes a nanosecond and 100 ns: 16 bytes for every 12, and nothing for a publish, which costs its poster 30.
#[test]
fn units_take_the_time_of_their_tags_and_of_no_publish() {
    let model = Model::builder().near(Rate::gb_per_s(2), Nanos(100)).publish(Nanos(30)).build().unwrap();
    let cluster = cluster(1, 2).timed(model).build(shape()).unwrap();
    let run = cluster.run_machines(async |machine: Machine| {
        let mut port = probe(&machine, 0);
        let (at, len) = (place(&machine), 1203);
        if machine.rank() == A {
            port.write(free(&machine, 0), &[7; 1203]).unwrap();
            let ticket = port.put_units(lane(B), free(&machine, 0).span(len), at, Tag::of(1)).await.unwrap();
            assert_eq!(port.now(), Nanos(0), "posting costs nothing");
            port.flush(lane(B), ticket).await.unwrap();
            return port.now();
        }
        let (units, mut bytes) = (Units { lane: lane(A), at, len, tag: Tag::of(1) }, [0; 1203]);
        assert_eq!(port.poll_units(&units, &mut bytes), Ok(false), "it is on its way");
        assert_eq!(port.wait_units(&[units], &[]).await, Ok(0));
        assert_eq!(port.poll_units(&units, &mut bytes), Ok(true));
        assert_eq!(bytes, [7; 1203]);
        port.now()
    });
    let times = run.unwrap_or_else(|violation| panic!("{violation}")).finished();
    let bytes = unit_bytes(1203);
    assert_eq!((bytes, times), (101 * 16, vec![Nanos(bytes / 2), Nanos(100 + bytes / 2)]));
}
