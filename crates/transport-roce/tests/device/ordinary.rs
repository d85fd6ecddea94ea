//! What lanes do when nothing goes wrong.

use ep_core::LaneCause;
use ep_core::layout::Queues;
use ep_core::port::{LaneId, LaneKind, Offset, Scope};
use ep_core::transport::Lanes;
use ep_core::{Fault, Rank};
use ep_roce::{Settings, Signal};

use crate::Test;
use crate::bench::{Bench, Link, pattern, settings};

const SIGNALS: [Signal; 3] = [Signal::OrderedWrite, Signal::FetchAdd, Signal::Counting];

pub(crate) fn tests() -> Vec<Test> {
    vec![
        ("f1_writes_of_all_sizes_change_exactly_the_bytes_named", exact),
        ("f3_rows_are_there_when_their_value_is_with_each_signal", signals),
        ("f3_rows_in_memory_of_a_device_are_there_when_their_value_is", on_devices),
        ("f3_rows_of_relaxed_order_are_there_when_their_value_is", relaxed),
        ("f4_on_a_link_that_loses_packets_every_value_counts_once", lossy),
        ("f3_signals_without_room_inside_requests", staged),
        ("f5_flushed_sources_may_be_overwritten", reuse),
        ("f8_ranges_outside_and_cells_out_of_line_are_refused", refused),
        ("a_full_queue_makes_the_poster_wait_and_loses_nothing", full),
        ("every_role_may_have_lanes_of_its_own", many_lanes),
        ("what_was_posted_arrives_before_an_orderly_end", orderly_end),
        ("devices_are_chosen_by_name_by_address_and_automatically", choices),
        ("mtu_and_service_are_taken", service),
    ]
}

fn with(devices: &str, signal: Signal) -> Settings {
    settings(devices).signal(signal)
}

fn exact(devices: &str) {
    for signal in SIGNALS {
        let mut bench = Bench::new(&with(devices, signal));
        let (lane, a) = (bench.rows(1), bench.arena);
        let cell = bench.cell(0, lane.kind);
        for (round, len) in (1..).zip([1, 7, 8, 63, 64, 65, 256, 1023, 1024, 1025, 4096, 70_000]) {
            let sent = pattern(round, len);
            bench.write(0, a, &sent);
            bench.write(1, a, &vec![0xee; len + 64]);
            let ticket = bench.put(0, lane, a, len as u64, a + 32);
            bench.raise(0, lane, cell, round);
            bench.await_value(1, cell, round);
            let seen = bench.read(1, a, len + 64);
            assert!(seen[..32].iter().chain(&seen[32 + len..]).all(|&byte| byte == 0xee), "{signal}, {len} bytes");
            assert_eq!(seen[32..32 + len], sent, "{signal}, {len} bytes");
            bench.flush(0, lane, ticket);
        }
    }
}

/// The window is known by its address alone. Short rows are fetched, too, and connecting anew begins with cells of zero.
fn on_devices(devices: &str) {
    for signal in [Signal::OrderedWrite, Signal::FetchAdd] {
        let mut bench = Bench::on_devices(&with(devices, signal));
        stream(&mut bench, 100);
        let (lane, a) = (bench.rows(1), bench.arena);
        let cell = bench.cell(0, lane.kind);
        bench.connect();
        assert_eq!(bench.value(1, cell), 0, "{signal}");
        bench.write(0, a, &pattern(5, 16));
        bench.put(0, lane, a, 16, a);
        bench.raise(0, lane, cell, 1);
        bench.await_value(1, cell, 1);
        assert_eq!(bench.read(1, a, 16), pattern(5, 16), "{signal}");
    }
}

/// A ring of slots, filled and emptied as fast as lanes allow: whoever sees the value sees the rows before it.
fn stream(bench: &mut Bench, rows: u64) {
    const SLOTS: u64 = 8;
    const ROW: usize = 300;
    let (there, back, a) = (bench.rows(1), bench.rows(0), bench.arena);
    let (tail, head) = (bench.cell(0, there.kind), bench.cell(1, back.kind));
    let (mut sent, mut seen) = (0, 0);
    bench.until("all rows", |bench| {
        while sent < rows && sent - bench.value(0, head) < SLOTS {
            let at = a + sent % SLOTS * 512;
            bench.write(0, at, &pattern(sent, ROW));
            let ticket = bench.put(0, there, at, ROW as u64, at);
            sent += 1;
            // Tails of one row and of several.
            if !sent.is_multiple_of(3) || sent == rows {
                bench.raise(0, there, tail, sent);
            }
            bench.flush(0, there, ticket);
        }
        bench.progress();
        let visible = bench.value(1, tail);
        while seen < visible {
            assert_eq!(bench.read(1, a + seen % SLOTS * 512, ROW), pattern(seen, ROW), "row {seen} of {visible}");
            seen += 1;
        }
        if bench.value(0, head) < seen && seen > 0 {
            bench.raise(1, back, head, seen);
        }
        (seen == rows).then_some(())
    });
}

/// Where rows may come in any order, their values may not.
fn relaxed(devices: &str) {
    for signal in [Signal::FetchAdd, Signal::Counting] {
        stream(&mut Bench::new(&with(devices, signal).relaxed_ordering(true)), 100);
    }
}

fn signals(devices: &str) {
    for signal in SIGNALS {
        let mut bench = Bench::new(&with(devices, signal));
        assert_eq!(bench.lanes[0].signal(), signal);
        stream(&mut bench, 400);
    }
}

fn lossy(devices: &str) {
    let _lossy = Link::disturb("loss 1%");
    for signal in SIGNALS {
        let mut bench = Bench::new(&with(devices, signal));
        stream(&mut bench, 150);
        let (tail, head) = (bench.cell(0, bench.rows(1).kind), bench.cell(1, bench.rows(0).kind));
        bench.await_value(0, head, 150);
        assert_eq!((bench.value(1, tail), bench.value(0, head)), (150, 150), "{signal}");
    }
}

fn staged(devices: &str) {
    for signal in SIGNALS {
        let settings = with(devices, signal).inline_bytes(0).unwrap().queue_depth(4).unwrap();
        let settings = settings.receive_depth(3).unwrap();
        stream(&mut Bench::new(&settings), 200);
    }
}

fn reuse(devices: &str) {
    let mut bench = Bench::new(&settings(devices));
    let (lane, a) = (bench.rows(1), bench.arena);
    let cell = bench.cell(0, lane.kind);
    for round in 1..=100 {
        bench.write(0, a, &pattern(round, 900));
        let ticket = bench.put(0, lane, a, 900, a + 1000 * (round % 50));
        bench.flush(0, lane, ticket);
        bench.write(0, a, &[0; 900]);
        bench.raise(0, lane, cell, round);
        bench.await_value(1, cell, round);
        assert_eq!(bench.read(1, a + 1000 * (round % 50), 900), pattern(round, 900));
    }
}

fn refused(devices: &str) {
    let mut bench = Bench::new(&settings(devices));
    let (lane, end, rows) = (bench.rows(1), bench.layout.window_bytes(), bench.arena);
    let lanes = &mut bench.lanes[0];
    for (from, to) in [(end - 8, 0), (0, end - 8), (u64::MAX - 4, 0), (0, u64::MAX - 4)] {
        let outcome = lanes.put(lane, Offset(from).span(16), Offset(to));
        assert!(matches!(outcome, Err(Fault::OutOfRange { window, .. }) if window == end), "{outcome:?}");
    }
    assert!(lanes.raise(lane, Offset(end), 1).is_err());
    for no_cell in [12, rows] {
        assert!(matches!(lanes.raise(lane, Offset(no_cell), 1), Err(Fault::NotOffered { .. })), "{no_cell}");
    }
    assert!(lanes.put(lane, Offset(0).span(0), Offset(end)).unwrap().is_some(), "nothing is a no-op");
    let nowhere = LaneId { peer: Rank(0), kind: LaneKind::Watch };
    assert!(matches!(lanes.put(nowhere, Offset(0).span(8), Offset(0)), Err(Fault::NotOffered { .. })));
    assert!(lanes.broken(Rank(1)).is_none());
}

fn full(devices: &str) {
    for signal in SIGNALS {
        let settings = with(devices, signal).queue_depth(6).unwrap().receive_depth(4).unwrap();
        let mut bench = Bench::new(&settings);
        let (lane, a) = (bench.rows(1), bench.arena);
        let cell = bench.cell(0, lane.kind);
        let mut waited = 0;
        let _slow = Link::disturb("delay 2ms");
        const ROWS: u64 = 300;
        for row in 0..ROWS {
            let at = a + row * 1024;
            bench.write(0, at, &pattern(row, 1024));
            // As fast as the lane says yes, with nothing else done in between.
            while bench.lanes[0].put(lane, Offset(at).span(1024), Offset(at)).unwrap().is_none() {
                waited += 1;
                bench.lanes[1].progress();
            }
        }
        bench.raise(0, lane, cell, 1);
        bench.await_value(1, cell, 1);
        assert!(waited > 0, "{signal}: the queue was never full");
        for row in 0..ROWS {
            assert_eq!(bench.read(1, a + row * 1024, 1024), pattern(row, 1024), "{signal}, row {row}");
        }
        assert!(bench.lanes[0].broken(Rank(1)).is_none());
    }
}

fn many_lanes(devices: &str) {
    const CHANNELS: u32 = 4;
    let mut bench = Bench::open(2, CHANNELS, &settings(devices).far_lanes(Queues::PER_ROLE));
    bench.connect();
    let tracks: Vec<u16> = (0..CHANNELS).map(|channel| bench.layout.far_track(channel)).collect();
    let own = tracks.iter().flat_map(|&track| [LaneKind::Data(track), LaneKind::Credit(track)]);
    let kinds: Vec<LaneKind> = [LaneKind::Watch, LaneKind::Control].into_iter().chain(own).collect();
    let a = bench.arena;
    for (value, &kind) in (1..).zip(&kinds) {
        let lane = LaneId { peer: Rank(1), kind };
        bench.write(0, a + value * 64, &pattern(value, 64));
        bench.put(0, lane, a + value * 64, 64, a + value * 64);
        bench.raise(0, lane, bench.cell(0, kind), value);
    }
    for (value, &kind) in (1..).zip(&kinds) {
        let cell = bench.cell(0, kind);
        bench.await_value(1, cell, value);
        assert_eq!(bench.value(1, cell), value, "{kind:?}");
        assert_eq!(bench.read(1, a + value * 64, 64), pattern(value, 64), "{kind:?}");
    }
}

fn orderly_end(devices: &str) {
    for signal in SIGNALS {
        let mut bench = Bench::new(&with(devices, signal));
        let (lane, a) = (bench.rows(1), bench.arena);
        let cell = bench.cell(0, lane.kind);
        bench.write(0, a, &pattern(9, 50_000));
        bench.put(0, lane, a, 50_000, a);
        bench.raise(0, lane, cell, 1);
        bench.until("draining", |bench| bench.lanes[0].drain(Scope::All).then_some(()));
        drop(bench.lanes.remove(0));
        // The receiver of counted writes has still to look at them.
        bench.await_value(1, cell, 1);
        assert_eq!(bench.read(1, a, 50_000), pattern(9, 50_000), "{signal}");
        // The other end learns of it when it says something.
        let fault = bench.until("an end without an answer", |bench| {
            let cell = bench.cell(1, bench.rows(0).kind);
            let lane = bench.rows(0);
            let _ = bench.lanes[0].raise(lane, cell, 1);
            bench.lanes[0].broken(Rank(0))
        });
        assert_eq!(fault, Fault::LaneBroken { lane: bench.rows(0), cause: LaneCause::NoAnswer }, "{signal}");
    }
}

fn choices(devices: &str) {
    let (first, second) = devices.split_once('/').unwrap();
    let bench = Bench::open(2, 1, &settings(devices));
    for (lanes, name) in bench.lanes.iter().zip([first, second]) {
        assert!(lanes.description().starts_with(&format!("device {name}, as asked for, port 1, address ")));
        assert!(lanes.description().contains("signal fetch-add: the device has atomics"), "{}", lanes.description());
    }
    let address = |name: &str| {
        let bench = Bench::open(2, 1, &settings(name));
        let description = bench.lanes[0].description().to_owned();
        description.split_once("address ").unwrap().1.split(' ').next().unwrap().to_owned()
    };
    let named = address(second);
    let by_address = Bench::open(2, 1, &settings(&named));
    let description = by_address.lanes[0].description();
    assert!(
        description.starts_with(&format!("address {named}, as asked for: device {second}, port 1")),
        "{description}"
    );
    let automatic = Bench::open(2, 1, &settings("auto"));
    let description = automatic.lanes[1].description();
    assert!(description.contains("chosen automatically for local rank 0 among"), "{description}");
    println!("{description}");
}

fn service(devices: &str) {
    let settings = settings(devices).mtu(512).unwrap().service_level(3).unwrap().traffic_class(106);
    stream(&mut Bench::new(&settings), 50);
}
