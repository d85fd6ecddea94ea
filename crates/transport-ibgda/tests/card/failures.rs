//! What breaks while kernels post: it is named, in time, and only the lanes that it concerns end.

use std::time::{Duration, Instant};

use ep_core::device::FarStatus;
use ep_core::port::{Cell, Counter, LaneId, LaneKind, Offset, Scope, Span};
use ep_core::transport::{DeviceLanes, PostingDevice};
use ep_core::{Fault, LaneCause, Layout, Rank};
use ep_ibgda::{HostDevice, Settings};
use soft_hca::{Fabric, Link, Mood};

use crate::life::{drained, talk};
use crate::rank::{Member, Verbs, connect, connected, layout};

const SOON: Duration = Duration::from_secs(20);

/// Adapters give up after some milliseconds.
fn quick() -> Settings {
    Settings::new().ack_timeout(8).and_then(|settings| settings.retries(3)).expect("settings")
}

/// Where a lane's state has the number of elements that have completed.
const COMPLETED: u64 = 144;

fn data(layout: &Layout) -> LaneKind {
    LaneKind::Data(layout.far_track(0))
}

/// The queue pair of a lane, as its state names it.
fn pair(member: &Member, peer: u32, kind: LaneKind) -> u32 {
    let text = ep_ibgda::source(&Settings::new()).text;
    for (field, at) in [("number", 120), ("completed", COMPLETED)] {
        assert!(text.contains(&format!("__builtin_offsetof(EpMlx5, {field}) == {at}")));
    }
    let mut number = [0; 4];
    HostDevice.read(member.state(peer, kind) + 120, &mut number).unwrap();
    u32::from_ne_bytes(number)
}

/// Forty bytes to a place of the peer's.
fn post(verbs: &Verbs, member: &Member, layout: &Layout, peer: u32, kind: LaneKind, allowed: Duration) -> FarStatus {
    let at = Offset(layout.window_bytes() - 4096);
    let (status, ticket) = verbs.put(member.state(peer, kind), at.span(40), at.plus(64), allowed);
    if status == FarStatus::Ok { verbs.flush(member.state(peer, kind), ticket, allowed) } else { status }
}

fn cause(fault: Option<Fault>, peer: u32, kind: LaneKind) -> LaneCause {
    match fault {
        Some(Fault::LaneBroken { lane, cause }) if lane == (LaneId { peer: Rank(peer), kind }) => cause,
        other => panic!("{other:?}"),
    }
}

#[test]
fn each_syndrome_breaks_its_lane_and_no_other_and_is_named() {
    let Some(verbs) = Verbs::new(&Settings::new(), None) else { return };
    let syndromes = [
        (0x01, LaneCause::LocalRequest),
        (0x02, LaneCause::LocalRequest),
        (0x04, LaneCause::LocalAccess),
        (0x10, LaneCause::RemoteOperation),
        (0x11, LaneCause::LocalAccess),
        (0x12, LaneCause::RemoteRequest),
        (0x13, LaneCause::RemoteAccess),
        (0x14, LaneCause::RemoteOperation),
        (0x15, LaneCause::NoAnswer),
        (0x16, LaneCause::NotReady),
    ];
    let layout = layout(2);
    let fabric = Fabric::builder(2, Link::Ethernet).mood(Mood::hostile()).seed(5).running();
    let mut members = connected(&fabric, &layout, &quick()).unwrap();
    for (syndrome, expected) in syndromes {
        for after in [0, 5] {
            connect(&mut members, &[]).unwrap();
            let (own, kind) = (&members[0], data(&layout));
            fabric.card(0).break_element(pair(own, 1, kind), after, syndrome);
            // Several at once: those behind the one that fails are flushed, which must not hide its syndrome.
            let at = Offset(layout.window_bytes() - 4096);
            let mut last = (FarStatus::Ok, 0);
            for _ in 0..12 {
                last = verbs.put(own.state(1, kind), at.span(40), at.plus(64), SOON);
            }
            let status = if last.0 == FarStatus::Ok { verbs.flush(own.state(1, kind), last.1, SOON) } else { last.0 };
            assert_eq!(status, FarStatus::Broken, "{syndrome:#x}");
            assert_eq!(verbs.poll(own.state(1, kind)), FarStatus::Broken);
            assert_eq!(cause(own.lanes.broken(Rank(1)), 1, kind), expected, "{syndrome:#x} after {after}");
            assert_eq!(post(&verbs, own, &layout, 1, LaneKind::Control, SOON), FarStatus::Ok, "another lane");
            drained(&mut members);
        }
    }
    connect(&mut members, &[]).unwrap();
    talk(&verbs, &layout, &members, 3);
}

/// Whoever only publishes reads no completion: its lane is looked at by a thread that waits for something else, and that knows of old states.
#[test]
fn a_poll_finds_errors_behind_what_nobody_flushed_and_takes_nothing_else_for_one() {
    let Some(verbs) = Verbs::new(&Settings::new(), None) else { return };
    let layout = layout(2);
    let fabric = Fabric::builder(2, Link::Ethernet).mood(Mood::hostile()).seed(6).running();
    let mut members = connected(&fabric, &layout, &quick()).unwrap();
    let kind = data(&layout);
    let (state, cell) = (members[0].state(1, kind), layout.cell(Cell::new(Rank(0), kind, Counter::Tail), 1));
    let publish = |value| assert_eq!(verbs.publish(state, cell, value, SOON), FarStatus::Ok);
    // Twice as many as there are places: the first place has another element's completion.
    (1..=600).for_each(publish);
    drained(&mut members);
    HostDevice.write(state + COMPLETED, &0u64.to_ne_bytes()).unwrap();
    assert_eq!(verbs.poll(state), FarStatus::Ok, "of a state that is read late");
    connect(&mut members, &[]).unwrap();
    (1..=5).for_each(publish);
    fabric.card(0).break_element(pair(&members[0], 1, kind), 3, 0x13);
    (6..=12).for_each(publish);
    let began = Instant::now();
    while verbs.poll(state) == FarStatus::Ok {
        assert!(began.elapsed() < SOON, "nobody noticed");
    }
    assert_eq!(verbs.poll(state), FarStatus::Broken);
}

#[test]
fn a_peer_whose_card_died_is_named_by_the_card_before_the_deadline() {
    let Some(verbs) = Verbs::new(&Settings::new(), None) else { return };
    let layout = layout(3);
    for seed in 0..4 {
        let fabric = Fabric::builder(3, Link::Ethernet).mood(Mood::hostile()).seed(seed).running();
        let mut members = connected(&fabric, &layout, &quick()).unwrap();
        talk(&verbs, &layout, &members, 1);
        fabric.card(1).kill();
        let began = Instant::now();
        assert_eq!(post(&verbs, &members[0], &layout, 1, data(&layout), SOON), FarStatus::Broken, "seed {seed}");
        assert!(began.elapsed() < SOON / 2);
        assert_eq!(cause(members[0].lanes.broken(Rank(1)), 1, data(&layout)), LaneCause::NoAnswer);
        assert_eq!(members[0].lanes.broken(Rank(2)), None, "F7");
        // The survivors go on without it.
        assert!(members[0].lanes.drain(Scope::All));
        connect(&mut members, &[1]).unwrap();
        assert_eq!(post(&verbs, &members[0], &layout, 2, data(&layout), SOON), FarStatus::Ok);
        assert_eq!(post(&verbs, &members[0], &layout, 1, data(&layout), SOON), FarStatus::Broken);
    }
}

#[test]
fn an_own_card_that_died_ends_verbs_at_their_deadline_and_is_cut() {
    let Some(verbs) = Verbs::new(&Settings::new(), None) else { return };
    let (layout, fabric) = (layout(2), Fabric::builder(2, Link::Ethernet).running());
    let mut members = connected(&fabric, &layout, &quick()).unwrap();
    fabric.card(0).kill();
    let (began, allowed) = (Instant::now(), Duration::from_millis(50));
    assert_eq!(post(&verbs, &members[0], &layout, 1, data(&layout), allowed), FarStatus::Timeout);
    assert!(began.elapsed() >= allowed && began.elapsed() < SOON);
    let lanes = &mut members[0].lanes;
    assert!(!lanes.drain(Scope::All), "something is under way, for all that anybody knows");
    lanes.cut(Scope::All);
    assert!(lanes.drain(Scope::All));
    assert_eq!(cause(lanes.broken(Rank(1)), 1, data(&layout)), LaneCause::Cut);
    assert_eq!(post(&verbs, &members[0], &layout, 1, data(&layout), SOON), FarStatus::Broken, "kernels are told");
}

#[test]
fn a_lane_that_loses_all_packets_breaks_and_the_others_do_not() {
    let Some(verbs) = Verbs::new(&Settings::new(), None) else { return };
    let (layout, fabric) = (layout(2), Fabric::builder(2, Link::Ethernet).mood(Mood::hostile()).running());
    let mut members = connected(&fabric, &layout, &quick()).unwrap();
    fabric.card(0).cut(pair(&members[0], 1, data(&layout)), true);
    assert_eq!(post(&verbs, &members[0], &layout, 1, data(&layout), SOON), FarStatus::Broken);
    assert_eq!(cause(members[0].lanes.broken(Rank(1)), 1, data(&layout)), LaneCause::NoAnswer);
    for kind in [LaneKind::Watch, LaneKind::Control, LaneKind::Credit(layout.far_track(0))] {
        assert_eq!(post(&verbs, &members[0], &layout, 1, kind, SOON), FarStatus::Ok, "{kind:?}");
    }
    assert!(members[0].lanes.drain(Scope::All), "what broke is not under way");
    connect(&mut members, &[]).unwrap();
    talk(&verbs, &layout, &members, 11);
    drop(members);
    assert_eq!([0, 1].map(|card| fabric.card(card).objects()), [0; 2]);
}

#[test]
fn what_reaches_out_of_the_window_breaks_its_lane_and_touches_nothing() {
    let Some(verbs) = Verbs::new(&Settings::new(), None) else { return };
    let (layout, fabric) = (layout(2), Fabric::builder(2, Link::Ethernet).running());
    let members = connected(&fabric, &layout, &quick()).unwrap();
    let (own, all) = (&members[0], layout.window_bytes());
    let state = own.state(1, data(&layout));
    let (status, _) = verbs.put(state, Span { offset: Offset(all - 8), len: 16 }, Offset(0), SOON);
    assert_eq!(status, FarStatus::Refused);
    assert!(matches!(own.lanes.broken(Rank(1)), Some(Fault::NotOffered { .. })), "{:?}", own.lanes.broken(Rank(1)));
    let foreign = layout.cell(Cell::new(Rank(1), data(&layout), Counter::Tail), 1);
    let state = own.state(1, LaneKind::Control);
    assert_eq!(verbs.publish(state, foreign, 1, SOON), FarStatus::Refused, "a cell of another writer");
    assert_eq!((fabric.card(0).counts().elements, fabric.complaints()), (0, Vec::new()));
}
