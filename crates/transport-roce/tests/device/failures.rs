//! What lanes do when something goes wrong: typed faults that name the peer, and no more than its lanes.

use std::os::fd::AsFd;
use std::time::Instant;

use ep_core::port::{Offset, Scope};
use ep_core::transport::{Lanes, Place, Transport};
use ep_core::{Fault, LaneCause, Rank};
use ep_roce::{Offer, Roce, Signal};

use crate::Test;
use crate::bench::{Bench, LONG, Link, pattern, settings};

pub(crate) fn tests() -> Vec<Test> {
    vec![
        ("f7_a_wrong_key_breaks_that_peers_lane_and_no_other", wrong_key),
        ("f7_a_peer_that_is_gone_is_named_when_retries_are_used_up", gone),
        ("f7_a_cut_link_is_noticed_and_lanes_connect_anew_when_it_is_mended", cut_link),
        ("f7_a_rank_that_sends_nothing_finds_out_by_a_probe_that_the_link_is_cut", probe),
        ("a_wrong_key_for_cells_is_refused_by_the_peers_adapter", wrong_cells_key),
        ("lanes_that_are_cut_hold_nothing_and_connect_anew", cut),
        ("offers_that_do_not_fit_name_the_rank_and_the_difference", misfits),
        ("devices_that_are_not_there_are_named_with_those_that_are", no_device),
    ]
}

fn is(fault: Fault, lane: ep_core::port::LaneId, cause: LaneCause) {
    assert_eq!(fault, Fault::LaneBroken { lane, cause });
    assert_eq!((fault.peer(), fault.gone()), (Some(lane.peer), Some(lane.peer)));
}

/// Cells have a key of their own: rows come, and are not announced.
fn wrong_cells_key(devices: &str) {
    for signal in [Signal::OrderedWrite, Signal::FetchAdd] {
        let mut bench =
            Bench::open(2, 1, &settings(devices).signal(signal).relaxed_ordering(signal == Signal::FetchAdd));
        let mut offers = bench.offers();
        let mut offer = Offer::from_bytes(Rank(1), offers[1].as_ref().unwrap()).unwrap();
        assert_ne!(offer.header.cells_key, offer.header.rows_key);
        offer.header.cells_key = (offer.header.cells_key.get() ^ 0x5a5a).into();
        offers[1] = Some(offer.to_bytes());
        bench.lanes.iter_mut().for_each(|lanes| lanes.connect(&offers).unwrap());
        let (wrong, a) = (bench.rows(1), bench.arena);
        bench.write(0, a, &pattern(1, 500));
        bench.put(0, wrong, a, 500, a);
        let cell = bench.cell(0, wrong.kind);
        bench.raise(0, wrong, cell, 1);
        let fault = bench.until("a refusal", |bench| bench.lanes[0].broken(Rank(1)));
        is(fault, wrong, LaneCause::RemoteAccess);
        assert_eq!((bench.read(1, a, 500), bench.value(1, cell)), (pattern(1, 500), 0), "{signal}");
    }
}

/// Of three ranks, rank 1 tells a key that nobody gave out.
fn wrong_key(devices: &str) {
    for signal in [Signal::OrderedWrite, Signal::FetchAdd, Signal::Counting] {
        let mut bench = Bench::open(3, 1, &settings(devices).signal(signal));
        let mut offers = bench.offers();
        let mut offer = Offer::from_bytes(Rank(1), offers[1].as_ref().unwrap()).unwrap();
        offer.header.rows_key = (offer.header.rows_key.get() ^ 0x5a5a).into();
        offers[1] = Some(offer.to_bytes());
        bench.lanes.iter_mut().for_each(|lanes| lanes.connect(&offers).unwrap());
        let (wrong, right, a) = (bench.rows(1), bench.rows(2), bench.arena);
        bench.write(0, a, &pattern(1, 500));
        bench.write(1, a, &[0x77; 500]);
        bench.put(0, wrong, a, 500, a);
        let cell = bench.cell(0, wrong.kind);
        bench.raise(0, wrong, cell, 1);
        let fault = bench.until("a refusal", |bench| bench.lanes[0].broken(Rank(1)));
        is(fault, wrong, LaneCause::RemoteAccess);
        assert!(fault.to_string().contains("of rank 1 broke: the peer's adapter refuses the access"), "{fault}");
        assert_eq!(bench.lanes[0].put(wrong, Offset(a).span(8), Offset(a)), Err(fault));
        assert_eq!(bench.read(1, a, 500), [0x77; 500]);
        assert_eq!(bench.value(1, cell), 0);
        // The other peer's lane goes on.
        bench.put(0, right, a, 500, a);
        bench.raise(0, right, cell, 1);
        bench.await_value(2, cell, 1);
        assert_eq!(bench.read(2, a, 500), pattern(1, 500), "{signal}");
        assert!(bench.lanes[0].broken(Rank(2)).is_none());
        assert!(bench.lanes[0].drain(Scope::Peer(Rank(1))), "nothing is under way on a broken lane");
    }
}

fn gone(devices: &str) {
    let mut bench = Bench::new(&settings(devices));
    let (lane, cell) = (bench.rows(1), bench.cell(0, bench.rows(1).kind));
    drop(bench.lanes.remove(1));
    let began = Instant::now();
    let fault = bench.breaks(0, lane, cell);
    is(fault, lane, LaneCause::NoAnswer);
    println!("noticed after {:?}", began.elapsed());
}

fn cut_link(devices: &str) {
    let mut bench = Bench::new(&settings(devices));
    let (lane, cell) = (bench.rows(1), bench.cell(0, bench.rows(1).kind));
    bench.raise(0, lane, cell, 5);
    bench.await_value(1, cell, 5);
    let link = Link::disturb("loss 100%");
    let fault = bench.breaks(0, lane, cell);
    drop(link);
    is(fault, lane, LaneCause::NoAnswer);
    assert!(bench.lanes[1].broken(Rank(0)).is_none(), "that end has said nothing");
    let seen = bench.value(1, cell);
    assert_eq!(seen, 5, "nothing came through");
    bench.connect();
    assert_eq!(bench.value(1, cell), 0, "cells begin anew");
    for lanes in 0..2 {
        assert!(bench.lanes[lanes].broken(Rank(1 - lanes as u32)).is_none());
    }
    bench.raise(0, lane, cell, 3);
    bench.await_value(1, cell, 3);
    assert_eq!(bench.value(1, cell), 3);
}

/// A probe of a peer that can be reached changes nothing; of one that cannot, it breaks a lane. The rank has sent nothing else.
fn probe(devices: &str) {
    for signal in [Signal::OrderedWrite, Signal::FetchAdd, Signal::Counting] {
        let mut bench = Bench::new(&settings(devices).signal(signal));
        let a = bench.arena;
        bench.write(1, a, &pattern(2, 500));
        // More than a lane holds at once.
        for _ in 0..300 {
            bench.lanes[0].probe(Rank(1));
            bench.until("an acknowledgement", |bench| bench.lanes[0].drain(Scope::All).then_some(()));
        }
        assert!(bench.lanes.iter().zip([1, 0]).all(|(lanes, peer)| lanes.broken(Rank(peer)).is_none()), "{signal}");
        assert_eq!(bench.read(1, a, 500), pattern(2, 500));
        let link = Link::disturb("loss 100%");
        let began = Instant::now();
        bench.lanes[0].probe(Rank(1));
        let fault = bench.until("no answer", |bench| {
            // Again, as a rank does that goes on waiting.
            bench.lanes[0].probe(Rank(1));
            bench.lanes[0].progress();
            bench.lanes[0].broken(Rank(1))
        });
        drop(link);
        assert!(matches!(fault, Fault::LaneBroken { cause: LaneCause::NoAnswer, .. }), "{signal}: {fault}");
        assert_eq!(fault.peer(), Some(Rank(1)));
        println!("{signal}: noticed after {:?}", began.elapsed());
    }
}

fn cut(devices: &str) {
    let mut bench = Bench::new(&settings(devices));
    let (lane, cell, a) = (bench.rows(1), bench.cell(0, bench.rows(1).kind), bench.arena);
    let _slow = Link::disturb("delay 40ms");
    for part in 0..8 {
        bench.put(0, lane, a, 100_000, a + part);
    }
    bench.raise(0, lane, cell, 1);
    assert!(!bench.lanes[0].drain(Scope::All), "that takes longer");
    bench.lanes[0].cut(Scope::Peer(Rank(1)));
    assert!(bench.lanes[0].drain(Scope::All));
    is(bench.lanes[0].broken(Rank(1)).unwrap(), lane, LaneCause::Cut);
    bench.write(0, a, &[1; 100_000]);
    bench.connect();
    bench.write(1, a, &[2; 100_100]);
    bench.raise(0, lane, cell, 1);
    bench.await_value(1, cell, 1);
    assert_eq!(bench.read(1, a, 100_100), [2; 100_100], "nothing comes late");
}

fn misfits(devices: &str) {
    let mut counting = Bench::open(2, 1, &settings(devices).signal(Signal::Counting));
    let mut adding = Bench::open(2, 1, &settings(devices).signal(Signal::FetchAdd));
    let offers = counting.offers();
    adding.offers();
    let error = adding.lanes[0].connect(&offers).unwrap_err().to_string();
    assert!(error.starts_with("RoCE on rank 0 is not supported: rank 1: it raises cells otherwise"), "{error}");
    let mut more = Bench::open(2, 3, &settings(devices).signal(Signal::FetchAdd));
    let offers = more.offers();
    let error = adding.lanes[0].connect(&offers).unwrap_err().to_string();
    assert!(error.contains("rank 1: its window has"), "{error}");
    let error = adding.lanes[0].connect(&[None, Some(vec![1, 2, 3])]).unwrap_err().to_string();
    assert!(error.contains("rank 1: its offer has 3 bytes only"), "{error}");
    assert!(began_at_once(|| drop(adding)), "teardown after a failure");
}

fn began_at_once(act: impl FnOnce()) -> bool {
    let began = Instant::now();
    act();
    began.elapsed() < LONG / 2
}

fn no_device(devices: &str) {
    let bench = Bench::open(2, 1, &settings(devices));
    let refusal = |devices: &str| {
        let place = Place { me: Rank(0), layout: &bench.layout, window: bench.windows[0].as_fd() };
        Roce::new(settings(devices)).open(place).expect_err("there is no such device").to_string()
    };
    let (first, second) = devices.split_once('/').unwrap();
    let none = refusal("mlx9_7");
    assert!(none.contains("there is no RDMA device mlx9_7; there are: "), "{none}");
    assert!(none.contains(first) && none.contains(second), "{none}");
    let none = refusal("192.0.2.77");
    assert!(none.contains("no RDMA device has the address 192.0.2.77; there are: "), "{none}");
    let none = refusal(&format!("{first}:9"));
    assert!(none.contains(&format!("{first} has no port 9, it has 1")), "{none}");
}
