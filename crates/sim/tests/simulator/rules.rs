//! The rules F1 to F10 of the machine contract (F11: `units`), each in its smallest form, under many adversaries.

use std::collections::BTreeSet;

use crate::common::{A, B, C, DATA, DEADLINE, cell, cluster, explore, explore_with, free, lane, need, probe, shape};
use ep_core::layout::Queues;
use ep_core::machine::Machine as _;
use ep_core::port::{Cell, Counter, LaneId, LaneKind, Mail, Need, Offset, Port as _, Span, Ticket};
use ep_core::{Fault, Nanos, Node, Phase, Rank};
use ep_sim::{Builder, Machine, Violation};

#[test]
fn f1_a_put_changes_exactly_the_bytes_named() {
    explore(2, async |machine: Machine| {
        let mut port = probe(&machine, 0);
        if machine.rank() == B {
            port.write(free(&machine, 1000), &[7; 400]).unwrap();
            port.publish(lane(A), cell(B), 1).await.unwrap();
            port.wait_any(&need(A, 1)).await.unwrap();
            let mut seen = [0; 400];
            port.read(free(&machine, 1000), &mut seen).unwrap();
            assert!(seen[..37].iter().chain(&seen[137..]).all(|&byte| byte == 7));
            assert_eq!(seen[37..137], [9; 100]);
        } else {
            port.wait_any(&need(B, 1)).await.unwrap();
            port.write(free(&machine, 5), &[9; 100]).unwrap();
            port.put(lane(B), free(&machine, 5).span(100), free(&machine, 1037)).await.unwrap();
            port.publish(lane(B), cell(A), 1).await.unwrap();
        }
    });
}

#[test]
fn f2_puts_land_in_any_pieces_and_any_order() {
    let watch = async |machine: Machine| {
        let mut port = probe(&machine, 0);
        let mut seen = BTreeSet::new();
        if machine.rank() == A {
            port.write(free(&machine, 0), &[1; 64]).unwrap();
            port.put(lane(B), free(&machine, 0).span(32), free(&machine, 0)).await.unwrap();
            let last = port.put(lane(B), free(&machine, 32).span(32), free(&machine, 32)).await.unwrap();
            port.flush(lane(B), last).await.unwrap();
            return seen;
        }
        for round in 0..200 {
            let mut bytes = [0; 64];
            port.read(free(&machine, 0), &mut bytes).unwrap();
            let landed = |half: &[u8]| half.iter().filter(|&&byte| byte == 1).count();
            seen.insert((landed(&bytes[..32]), landed(&bytes[32..])));
            port.publish(lane(A), cell(B), round).await.unwrap();
        }
        seen
    };
    let runs = explore_with(cluster(1, 2).race_tracking(false), watch);
    let seen: BTreeSet<(usize, usize)> = runs.into_iter().flat_map(|mut ranks| ranks.remove(B.index())).collect();
    assert!(seen.contains(&(32, 0)) && seen.contains(&(0, 32)), "one before the other, both ways: {seen:?}");
    let torn = |landed: usize| !landed.is_multiple_of(32);
    assert!(seen.iter().any(|pair| torn(pair.0)) && seen.iter().any(|pair| torn(pair.1)), "in pieces: {seen:?}");
}

#[test]
fn f3_who_sees_a_published_value_sees_all_puts_before_it() {
    let counts = explore(2, async |machine: Machine| {
        let mut port = probe(&machine, 0);
        let mut seen = Vec::new();
        for row in 0..20u64 {
            let place = free(&machine, row * 64);
            if machine.rank() == A {
                port.write(place, &[row as u8 + 1; 64]).unwrap();
                port.put(lane(B), place.span(64), place).await.unwrap();
                port.publish(lane(B), cell(A), row + 1).await.unwrap();
            } else {
                port.wait_any(&need(A, row + 1)).await.unwrap();
                seen.push(port.peek(cell(A)));
                let mut bytes = [0; 64];
                port.read(place, &mut bytes).unwrap();
                assert_eq!(bytes, [row as u8 + 1; 64]);
            }
        }
        seen
    });
    let mut jumped = false;
    for seen in counts.iter().map(|ranks| &ranks[B.index()]) {
        assert!(seen.is_sorted(), "publishes of a lane are ordered: {seen:?}");
        jumped |= seen[0] > 1;
    }
    assert!(jumped, "some adversary lets a reader see several publishes at once");
}

/// The rule that one verb sequence of rank A breaks.
fn broken(each: impl AsyncFn(&Machine)) -> &'static str {
    broken_on(cluster(1, 2), each)
}

/// As [`broken`], on a cluster of one's own.
fn broken_on(cluster: Builder, each: impl AsyncFn(&Machine)) -> &'static str {
    let each = async |machine: Machine| {
        if machine.rank() == A {
            each(&machine).await;
        }
    };
    match cluster.build(shape()).unwrap().run_machines(each) {
        Err(Violation::Rule(broken)) => broken.rule,
        other => panic!("{other:?}"),
    }
}

#[test]
fn f4_a_cell_is_never_lowered_and_has_one_lane_and_one_poster() {
    let lowered = broken(async |machine| {
        let mut port = probe(machine, 0);
        port.publish(lane(B), cell(A), 2).await.unwrap();
        port.publish(lane(B), cell(A), 1).await.unwrap();
        port.flush(lane(B), Ticket(0)).await.unwrap();
    });
    let foreign = broken(async |machine| {
        probe(machine, 0).publish(lane(B), cell(B), 1).await.unwrap();
        probe(machine, 0).flush(lane(B), Ticket(0)).await.unwrap();
    });
    let another_lane = broken(async |machine| {
        let cell = Cell::new(A, LaneKind::Control, Counter::Probe);
        probe(machine, 0).publish(lane(B), cell, 1).await.unwrap();
        probe(machine, 0).flush(lane(B), Ticket(0)).await.unwrap();
    });
    let two_posters = broken(async |machine| {
        let (mut one, mut two) = (probe(machine, 0), probe(machine, 1));
        one.publish(lane(B), cell(A), 1).await.unwrap();
        two.publish(lane(B), cell(A), 2).await.unwrap();
        two.flush(lane(B), Ticket(0)).await.unwrap();
    });
    assert_eq!([lowered, foreign, another_lane, two_posters], ["F4"; 4]);
}

/// Rank A's lane to rank B of another node that carries `kind`.
fn far(kind: LaneKind) -> LaneId {
    LaneId { peer: B, kind }
}

/// The lanes between ranks A and B of different nodes that may share queues: rows, credit, control.
fn sharing(machine: &Machine) -> [LaneId; 3] {
    let track = machine.layout().far_track(0);
    [LaneKind::Data(track), LaneKind::Credit(track), LaneKind::Control].map(far)
}

/// Publishes on two lanes, one after the other, by a role each.
async fn by_two(machine: &Machine, lanes: [LaneId; 2]) {
    for (channel, lane) in (0..).zip(lanes) {
        let mut port = probe(machine, channel);
        port.publish(lane, Cell::new(A, lane.kind, Counter::Probe), 1).await.unwrap();
        port.flush(lane, Ticket(0)).await.unwrap();
    }
}

#[test]
fn f4_a_queue_that_lanes_share_has_one_poster() {
    let shared = |queues| cluster(2, 1).far_lanes(queues);
    // Posting one after the other, by two roles, which is harmless on a lane with a queue of its own.
    for (queues, pairs) in [
        (Queues::ROWS_AND_CREDIT, &[[0, 0], [1, 1]][..]),
        (Queues::ONE, &[[0, 0], [0, 1], [1, 0], [1, 2], [2, 2], [2, 0]][..]),
    ] {
        for &[one, two] in pairs {
            let each = async |machine: &Machine| by_two(machine, [one, two].map(|at| sharing(machine)[at])).await;
            assert_eq!(broken_on(shared(queues), each), "F4", "lanes {one} and {two} on {queues:?}");
        }
    }
    for (queues, pairs) in
        [(Queues::PER_ROLE, &[[0, 0], [0, 1], [1, 2]][..]), (Queues::ROWS_AND_CREDIT, &[[0, 1], [1, 2], [2, 2]][..])]
    {
        for &[one, two] in pairs {
            explore_with(shared(queues), async |machine: Machine| {
                if machine.rank() == A {
                    by_two(&machine, [one, two].map(|at| sharing(&machine)[at])).await;
                }
            });
        }
    }
    // A cell stays with its lane, whatever shares its queue.
    let another_lane = broken_on(shared(Queues::ONE), async |machine| {
        let [rows, credit, _] = sharing(machine);
        probe(machine, 0).publish(rows, Cell::new(A, credit.kind, Counter::Probe), 1).await.unwrap();
        probe(machine, 0).flush(rows, Ticket(0)).await.unwrap();
    });
    assert_eq!(another_lane, "F4");
}

/// A puts 64 bytes on the lane of rows, then raises the cells of two lanes. B waits for the second cell. How often B sees
/// the bytes and the first cell by then, of how many adversaries.
fn seen_behind(queues: Queues) -> (usize, usize) {
    let cluster = cluster(2, 1).far_lanes(queues).race_tracking(false);
    let runs = explore_with(cluster, async |machine: Machine| {
        let mut port = probe(&machine, 0);
        let [rows, credit, _] = sharing(&machine);
        let cells = [rows, credit].map(|lane| Cell::new(A, lane.kind, Counter::Probe));
        if machine.rank() == B {
            port.wait_any(&[Need { cell: cells[1], at_least: 1 }]).await.unwrap();
            let mut seen = [0; 64];
            port.read(free(&machine, 0), &mut seen).unwrap();
            return seen == [3; 64] && port.peek(cells[0]) == 1;
        }
        port.write(free(&machine, 0), &[3; 64]).unwrap();
        let ticket = port.put(rows, free(&machine, 0).span(64), free(&machine, 0)).await.unwrap();
        port.publish(rows, cells[0], 1).await.unwrap();
        port.publish(credit, cells[1], 1).await.unwrap();
        port.flush(rows, ticket).await.unwrap();
        true
    });
    (runs.iter().filter(|ranks| ranks[B.index()]).count(), runs.len())
}

#[test]
fn f3_a_queue_keeps_the_order_of_the_lanes_that_share_it_and_no_other() {
    let (ordered, all) = seen_behind(Queues::ONE);
    assert_eq!(ordered, all);
    for queues in [Queues::PER_ROLE, Queues::ROWS_AND_CREDIT] {
        let (ordered, all) = seen_behind(queues);
        assert!(ordered < all, "some adversary lets credit overtake rows: {queues:?}");
    }
}

#[test]
fn a_rank_has_mailboxes_of_its_own_only() {
    explore_with(cluster(2, 1), async |machine: Machine| {
        let me = machine.rank();
        let kind = LaneKind::Mailbox(Mail::Staged, machine.layout().mailbox(Node(1 - me.0), 0));
        let (mut one, mut two) = (probe(&machine, 0), probe(&machine, 1));
        let cell = Cell::new(me, kind, Counter::Tail);
        one.write(free(&machine, 0), &[5; 8]).unwrap();
        one.publish(LaneId { peer: me, kind }, cell, 7).await.unwrap();
        two.wait_any(&[Need { cell, at_least: 7 }]).await.unwrap();
        let mut seen = [0; 8];
        two.read(free(&machine, 0), &mut seen).unwrap();
        assert_eq!(seen, [5; 8]);
        let refused = one.publish(LaneId { peer: Rank(1 - me.0), kind }, cell, 8).await;
        assert!(matches!(refused, Err(Fault::NotOffered { .. })), "{refused:?}");
    });
}

#[test]
fn a_role_has_one_port_at_a_time_and_cells_are_of_the_layout() {
    let two_ports = broken(async |machine| {
        let _one = probe(machine, 0);
        probe(machine, 0).flush(lane(B), Ticket(0)).await.unwrap();
    });
    let no_cell = broken(async |machine| {
        let mut port = probe(machine, 0);
        port.peek(Cell::new(A, LaneKind::Data(9), Counter::Probe));
        port.flush(lane(B), Ticket(0)).await.unwrap();
    });
    assert_eq!([two_ports, no_cell], ["one port a role", "F8"]);
}

#[test]
fn f4_publishing_twice_and_posting_one_after_the_other_is_harmless() {
    explore(2, async |machine: Machine| {
        if machine.rank() == A {
            let mut port = probe(&machine, 0);
            port.publish(lane(B), cell(A), 1).await.unwrap();
            port.publish(lane(B), cell(A), 1).await.unwrap();
            drop(port);
            probe(&machine, 1).publish(lane(B), cell(A), 2).await.unwrap();
        } else {
            probe(&machine, 0).wait_any(&need(A, 2)).await.unwrap();
        }
    });
}

/// Whether a put's bytes arrive as they were, when the source is overwritten after it, with a flush or without.
async fn overwrite(machine: Machine, flush: bool) -> bool {
    let mut port = probe(&machine, 0);
    let place = free(&machine, 0);
    if machine.rank() == A {
        port.write(place, &[1; 64]).unwrap();
        let ticket = port.put(lane(B), place.span(64), place).await.unwrap();
        if flush {
            port.flush(lane(B), ticket).await.unwrap();
        }
        port.write(place, &[2; 64]).unwrap();
        port.publish(lane(B), cell(A), 1).await.unwrap();
        return true;
    }
    port.wait_any(&need(A, 1)).await.unwrap();
    let mut bytes = [0; 64];
    port.read(place, &mut bytes).unwrap();
    bytes == [1; 64]
}

#[test]
fn f5_a_source_may_be_read_until_flush_and_not_after() {
    let untracked = || cluster(1, 2).race_tracking(false);
    let flushed = explore_with(untracked(), async |machine: Machine| overwrite(machine, true).await);
    assert!(flushed.iter().all(|ranks| ranks[B.index()]));
    let hasty = explore_with(untracked(), async |machine: Machine| overwrite(machine, false).await);
    assert!(hasty.iter().any(|ranks| !ranks[B.index()]), "some adversary reads the source late");
}

#[test]
fn f6_a_wait_ends_at_the_deadline_and_names_what_it_awaited() {
    let faults = explore_with(cluster(1, 2).deadlines(true), async |machine: Machine| {
        let mut port = probe(&machine, 0);
        if machine.rank() == A {
            port.publish(lane(B), cell(A), 3).await.unwrap();
            return None;
        }
        port.wait_any(&need(A, 3)).await.unwrap();
        let fault = port.wait_any(&need(A, 4)).await.unwrap_err();
        assert_eq!(port.now(), DEADLINE);
        Some(fault)
    });
    let timeout = Fault::Timeout { phase: Phase::Probe, peer: A, lane: lane(A), seen: 3, awaited: 4, waited: DEADLINE };
    assert!(faults.iter().all(|ranks| ranks[B.index()] == Some(timeout)));
}

#[test]
fn f7_a_failed_peer_fails_only_calls_that_involve_it() {
    let crash = ep_core::incident::Incident::Crash { rank: C, after: 3, noticed: true };
    for seed in 0..crate::common::SEEDS {
        let cluster = cluster(1, 3).incident(crash).seed(seed).build(shape()).unwrap();
        let run = cluster.run_machines(async |machine: Machine| {
            let mut port = probe(&machine, 0);
            let me = machine.rank();
            if me == C {
                for value in 1.. {
                    port.publish(lane(A), cell(C), value).await.unwrap();
                }
            }
            if me == A {
                let gone = port.wait_any(&need(C, 100)).await;
                assert_eq!(gone, Err(Fault::PeerGone { peer: C, phase: Phase::Probe }));
                assert_eq!(port.now(), Nanos(0), "known to be gone: no wait for the deadline");
                let post = port.publish(lane(C), cell(A), 1).await;
                assert!(matches!(post, Err(Fault::PeerGone { peer: C, .. })));
            }
            let peer = if me == A { B } else { A };
            for value in 1..20 {
                port.publish(lane(peer), cell(me), value).await.unwrap();
                port.wait_any(&need(peer, value)).await.unwrap();
            }
        });
        assert_eq!(run.unwrap().outcomes[C.index()], ep_sim::Outcome::Crashed);
    }
}

#[test]
fn f8_length_zero_does_nothing_and_a_range_outside_is_refused() {
    explore(2, async |machine: Machine| {
        let mut port = probe(&machine, 0);
        let window = machine.layout().window_bytes();
        let outside = Offset(window - 10).span(11);
        let refused = Err(Fault::OutOfRange { start: window - 10, end: window + 1, window });
        let nothing = Offset(u64::MAX).span(0);
        assert_eq!(port.put(lane(B), nothing, Offset(u64::MAX)).await, Ok(Ticket(0)));
        assert_eq!(port.get(lane(B), nothing, Offset(u64::MAX)).await, Ok(Ticket(0)));
        assert_eq!(port.put(lane(B), outside, Offset(0)).await, refused);
        assert_eq!(port.put(lane(B), Offset(0).span(11), outside.offset).await, refused);
        assert_eq!(port.get(lane(B), outside, Offset(0)).await, refused);
        assert_eq!(port.put(lane(B), Offset(u64::MAX).span(2), Offset(0)).await.map(drop), {
            Err(Fault::out_of_range(Span { offset: Offset(u64::MAX), len: 2 }, window))
        });
        assert!(port.read(Offset(window), &mut [0]).is_err() && port.read(Offset(window), &mut []).is_ok());
        assert!(port.write(Offset(window - 1), &[0; 2]).is_err());
        port.flush(lane(B), Ticket(0)).await.unwrap();
    });
}

#[test]
fn f9_a_finished_read_is_untouched_by_what_credit_allows() {
    explore(2, async |machine: Machine| {
        let mut port = probe(&machine, 0);
        let place = free(&machine, 0);
        for round in 1..=10u64 {
            if machine.rank() == A {
                port.wait_any(&need(B, round - 1)).await.unwrap();
                port.write(place, &[round as u8; 64]).unwrap();
                let ticket = port.put(lane(B), place.span(64), place).await.unwrap();
                port.publish(lane(B), cell(A), round).await.unwrap();
                port.flush(lane(B), ticket).await.unwrap();
            } else {
                port.wait_any(&need(A, round)).await.unwrap();
                let mut bytes = [0; 64];
                port.read(place, &mut bytes).unwrap();
                assert_eq!(bytes, [round as u8; 64]);
                port.publish(lane(A), cell(B), round).await.unwrap();
            }
        }
    });
}

#[test]
fn f10_a_get_sees_all_that_its_owner_wrote_before_a_publish_seen() {
    explore(2, async |machine: Machine| {
        let mut port = probe(&machine, 0);
        let (place, mine) = (free(&machine, 0), free(&machine, 4096));
        for round in 1..=5u64 {
            if machine.rank() == A {
                port.wait_any(&need(B, round - 1)).await.unwrap();
                port.write(place, &[round as u8; 64]).unwrap();
                port.publish(lane(B), cell(A), round).await.unwrap();
            } else {
                port.wait_any(&need(A, round)).await.unwrap();
                let ticket = port.get(lane(A), place.span(64), mine).await.unwrap();
                port.flush(lane(A), ticket).await.unwrap();
                let mut bytes = [0; 64];
                port.read(mine, &mut bytes).unwrap();
                assert_eq!(bytes, [round as u8; 64]);
                port.publish(lane(A), cell(B), round).await.unwrap();
            }
        }
    });
}

#[test]
fn f10_a_get_is_offered_within_a_node_only() {
    explore_with(cluster(2, 1), async |machine: Machine| {
        let peer = if machine.rank() == A { B } else { A };
        let got = probe(&machine, 0).get(lane(peer), free(&machine, 0).span(8), free(&machine, 64)).await;
        assert_eq!(got, Err(Fault::NotOffered { verb: "get", lane: lane(peer) }));
        let far = LaneId { peer: C, kind: DATA };
        let put = probe(&machine, 0).put(far, free(&machine, 0).span(8), free(&machine, 64)).await;
        assert_eq!(put, Err(Fault::NotOffered { verb: "put", lane: far }));
    });
}
