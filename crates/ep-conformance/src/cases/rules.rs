//! F1 to F11 as scripts of verbs, on lanes within a node and between nodes. Scripts work in the arena; its first bytes are
//! called `A`.

use ep_core::port::{LaneId, LaneKind, Nanos, unit_bytes};
use ep_core::topology::Reach;
use ep_core::{Error, Fault, Layout, Phase, Rank, Settings, Shape, Topology};

use crate::backend::{Backend, Requirement, Setup};
use crate::harness::Case;
use crate::script::{Script, Seen, Step};
use ep_core::incident::Incident;

/// The freedom of a backend is drawn anew for each of these.
const SEEDS: u64 = 40;
/// Bytes that scripts move; more than one page of most machines.
const LEN: u64 = 9000;
/// A wait in vain: long enough for what another rank has published to come meanwhile.
const WAIT: Nanos = Nanos::from_secs(2);

pub(super) fn cases<B: Backend>() -> Vec<Case<B>> {
    let case = |name, needs, body: fn(&B) -> _| Case { name, needs, body };
    let far = |name, body| case(name, &[Requirement::Scripts, Requirement::Nodes], body);
    vec![
        case("f1_a_put_changes_exactly_the_bytes_named", &[Requirement::Scripts], |b| f1(b, Reach::Near)),
        case("f2_puts_of_a_lane_all_land_in_any_order", &[Requirement::Scripts], |b| f2(b, Reach::Near)),
        case("f3_who_sees_the_value_sees_the_puts_before_it", &[Requirement::Scripts], |b| f3(b, Reach::Near)),
        case("f4_cells_never_fall_and_values_may_repeat", &[Requirement::Scripts], |b| f4(b, Reach::Near)),
        case("f5_a_flushed_source_may_be_overwritten", &[Requirement::Scripts], |b| f5(b, Reach::Near)),
        case("f6_a_wait_ends_at_its_deadline_and_says_for_what", &[Requirement::Scripts], f6::<B>),
        case("f7_a_lost_peer_fails_only_what_involves_it", &[Requirement::Scripts, Requirement::Incidents], f7::<B>),
        case("f8_ranges_outside_the_window_are_refused", &[Requirement::Scripts], |b| f8(b, Reach::Near)),
        case("f9_a_read_before_credit_is_safe_from_what_follows", &[Requirement::Scripts], |b| f9(b, Reach::Near)),
        far("far_f1_a_put_changes_exactly_the_bytes_named", |b| f1(b, Reach::Far)),
        far("far_f2_puts_of_a_lane_all_land_in_any_order", |b| f2(b, Reach::Far)),
        far("far_f3_who_sees_the_value_sees_the_puts_before_it", |b| f3(b, Reach::Far)),
        far("far_f4_cells_never_fall_and_values_may_repeat", |b| f4(b, Reach::Far)),
        far("far_f5_a_flushed_source_may_be_overwritten", |b| f5(b, Reach::Far)),
        far("far_f8_ranges_outside_the_window_are_refused", |b| f8(b, Reach::Far)),
        far("far_f9_a_read_before_credit_is_safe_from_what_follows", |b| f9(b, Reach::Far)),
        case("f10_a_get_sees_what_was_written_before_the_publish", &[Requirement::Scripts, Requirement::Get], |b| {
            f10(b, Reach::Near)
        }),
        case("f11_units_come_whole_and_announce_themselves", &[Requirement::Scripts, Requirement::Units], f11::<B>),
    ]
}

/// A communicator of three ranks, of one node or of a node each, with room for scripts, its layout and the first byte of the
/// arena.
fn bench(seed: u64, reach: Reach) -> Result<(Setup, Layout, u64), Error> {
    let topology = if reach == Reach::Far { Topology::new(3, 1)? } else { Topology::new(1, 3)? };
    let shape = Shape::builder().experts(3).topk(1).hidden(16).max_tokens(16).build()?;
    let settings = Settings::builder(&shape, &topology).channels(1).slots(2).arena_bytes(256 << 10).build()?;
    let layout = Layout::new(&shape, &topology, &settings)?;
    let arena = layout.arena().offset.0;
    Ok((Setup::new(shape, topology, seed)?.settings(settings), layout, arena))
}

/// Of a script for ranks of one node: the same between nodes, where `reach` says so, on the lane that carries the rows there.
fn carried(mut script: Script, layout: &Layout, reach: Reach) -> Script {
    if reach == Reach::Far {
        for step in &mut script.steps {
            match step {
                Step::Put { lane: LaneId { kind, .. }, .. }
                | Step::Get { lane: LaneId { kind, .. }, .. }
                | Step::Publish { lane: LaneId { kind, .. }, .. }
                | Step::PutUnits { lane: LaneId { kind, .. }, .. }
                | Step::Units { lane: LaneId { kind, .. }, .. }
                | Step::Flush { lane: LaneId { kind, .. } }
                | Step::Wait { kind, .. }
                | Step::Peek { kind, .. } => *kind = LaneKind::Data(layout.far_track(0)),
                Step::Write { .. } | Step::Read { .. } => {}
            }
        }
    }
    script
}

const fn to(peer: u32) -> LaneId {
    LaneId { peer: Rank(peer), kind: LaneKind::Data(0) }
}

const fn wait(writer: u32, at_least: u64) -> Step {
    Step::Wait { writer: Rank(writer), kind: LaneKind::Data(0), at_least }
}

const fn publish(peer: u32, value: u64) -> Step {
    Step::Publish { lane: to(peer), value }
}

/// Runs scripts under many seeds and hands each log to `check`: `[scripts][steps]`.
fn under_seeds<B: Backend>(
    backend: &B,
    reach: Reach,
    scripts: impl Fn(u64) -> Vec<Script>,
    check: impl Fn(u64, &[Vec<Seen>]) -> Result<(), String>,
) -> Result<(), String> {
    for seed in 0..backend.seeds(SEEDS) {
        let (setup, layout, arena) = bench(seed, reach).map_err(|error| error.to_string())?;
        let scripts: Vec<Script> = scripts(arena).into_iter().map(|script| carried(script, &layout, reach)).collect();
        let logs = backend.probe(&setup, &scripts)?;
        let logs: Vec<Vec<Seen>> =
            logs.into_iter().collect::<Option<_>>().ok_or_else(|| format!("seed {seed}: a script did not end"))?;
        for seen in logs.iter().flatten() {
            if let Seen::Fault(fault) = seen {
                return Err(format!("seed {seed}: {fault}"));
            }
        }
        check(arena, &logs).map_err(|error| format!("seed {seed}: {error}"))?;
    }
    Ok(())
}

/// The bytes that the last read of a log saw.
fn last_bytes(log: &[Seen]) -> &[u8] {
    log.iter()
        .rev()
        .find_map(|seen| match seen {
            Seen::Bytes(bytes) => Some(bytes.as_slice()),
            _ => None,
        })
        .unwrap_or_default()
}

fn filled(bytes: &[u8], fill: u8, what: &str) -> Result<(), String> {
    match bytes.iter().position(|&byte| byte != fill) {
        Some(at) => Err(format!("{what}: byte {at} of {} is {:#04x}, expected {fill:#04x}", bytes.len(), bytes[at])),
        None => Ok(()),
    }
}

fn f1<B: Backend>(backend: &B, reach: Reach) -> Result<(), String> {
    let scripts = |a: u64| {
        let writer = Script::new(Rank(0))
            .then(Step::Write { at: a, len: LEN, fill: 0xee })
            .then(wait(1, 1))
            .then(Step::Put { lane: to(1), from: a, to: a + 100, len: LEN })
            .then(publish(1, 1))
            .then(Step::Flush { lane: to(1) });
        let reader = Script::new(Rank(1))
            .then(Step::Write { at: a, len: LEN + 200, fill: 0x11 })
            .then(Step::Read { at: a, len: LEN + 200 })
            .then(publish(0, 1))
            .then(wait(0, 1))
            .then(Step::Read { at: a, len: LEN + 200 });
        vec![writer, reader]
    };
    under_seeds(backend, reach, scripts, |_, logs| {
        if let Seen::Bytes(before) = &logs[1][1] {
            filled(before, 0x11, "before the put was issued")?;
        }
        let bytes = last_bytes(&logs[1]);
        filled(&bytes[..100], 0x11, "before the range")?;
        filled(&bytes[100..100 + LEN as usize], 0xee, "the range")?;
        filled(&bytes[100 + LEN as usize..], 0x11, "after the range")
    })
}

fn f2<B: Backend>(backend: &B, reach: Reach) -> Result<(), String> {
    const PIECE: u64 = 700;
    let scripts = |a: u64| {
        let pieces = (0..12).rev();
        let writer = Script::new(Rank(0))
            .all((0..12).map(|at| Step::Write { at: a + at * PIECE, len: PIECE, fill: at as u8 + 1 }))
            .all(pieces.map(|at| Step::Put { lane: to(1), from: a + at * PIECE, to: a + at * PIECE, len: PIECE }))
            .then(publish(1, 1))
            .then(Step::Flush { lane: to(1) });
        vec![writer, Script::new(Rank(1)).then(wait(0, 1)).then(Step::Read { at: a, len: 12 * PIECE })]
    };
    under_seeds(backend, reach, scripts, |_, logs| {
        let pieces = last_bytes(&logs[1]).chunks_exact(PIECE as usize);
        pieces.zip(1..).try_for_each(|(bytes, fill)| filled(bytes, fill, "a piece"))
    })
}

fn f3<B: Backend>(backend: &B, reach: Reach) -> Result<(), String> {
    const ROUNDS: u64 = 12;
    let place = |a: u64, round: u64| a + round * 1024;
    let scripts = |a: u64| {
        let writer = Script::new(Rank(0))
            .all((0..ROUNDS).flat_map(|round| {
                [
                    Step::Write { at: place(a, round), len: 1024, fill: round as u8 + 1 },
                    Step::Put { lane: to(1), from: place(a, round), to: place(a, round), len: 1024 },
                    publish(1, round + 1),
                ]
            }))
            .then(Step::Flush { lane: to(1) });
        let reader = Script::new(Rank(1))
            .all((0..ROUNDS).flat_map(|round| [wait(0, round + 1), Step::Read { at: place(a, round), len: 1024 }]));
        vec![writer, reader]
    };
    under_seeds(backend, reach, scripts, |_, logs| {
        let reads = logs[1].iter().filter_map(|seen| match seen {
            Seen::Bytes(bytes) => Some(bytes),
            _ => None,
        });
        reads.zip(1..).try_for_each(|(bytes, fill)| filled(bytes, fill, "a round's bytes"))
    })
}

fn f4<B: Backend>(backend: &B, reach: Reach) -> Result<(), String> {
    const LAST: u64 = 20;
    let peek = Step::Peek { writer: Rank(0), kind: LaneKind::Data(0) };
    let scripts = |_| {
        let writer = Script::new(Rank(0)).all((1..=LAST).flat_map(|value| [publish(1, value), publish(1, value)]));
        let reader =
            Script::new(Rank(1)).all(std::iter::repeat_n(peek.clone(), 60)).then(wait(0, LAST)).then(peek.clone());
        vec![writer, reader]
    };
    under_seeds(backend, reach, scripts, |_, logs| {
        let mut last = 0;
        for seen in &logs[1] {
            if let Seen::Value(value) = *seen {
                if value < last {
                    return Err(format!("the cell fell from {last} to {value}"));
                }
                last = value;
            }
        }
        if last == LAST { Ok(()) } else { Err(format!("the cell ended at {last}, {LAST} was published")) }
    })
}

fn f5<B: Backend>(backend: &B, reach: Reach) -> Result<(), String> {
    let scripts = |a: u64| {
        let writer = Script::new(Rank(0))
            .then(Step::Write { at: a, len: LEN, fill: 0x51 })
            .then(Step::Put { lane: to(1), from: a, to: a, len: LEN })
            .then(Step::Flush { lane: to(1) })
            .then(Step::Write { at: a, len: LEN, fill: 0x52 })
            .then(publish(1, 1));
        vec![writer, Script::new(Rank(1)).then(wait(0, 1)).then(Step::Read { at: a, len: LEN })]
    };
    under_seeds(backend, reach, scripts, |_, logs| filled(last_bytes(&logs[1]), 0x51, "what was put"))
}

fn f6<B: Backend>(backend: &B) -> Result<(), String> {
    let (setup, ..) = bench(1, Reach::Near).map_err(|error| error.to_string())?;
    // Something must be able to go wrong for time to pass in a simulator: what is lost here nobody waits for.
    let setup = match backend.lacks(Requirement::Incidents) {
        None => {
            setup.incident(Incident::LoseLane { from: Rank(2), to: Rank(1), kind: Some(LaneKind::Watch), after: 0 })
        }
        Some(_) => setup,
    };
    let script = Script::new(Rank(0)).then(wait(1, 5)).within(WAIT);
    let feeder = Script::new(Rank(1)).then(publish(0, 3));
    let lost = Step::Publish { lane: LaneId { peer: Rank(1), kind: LaneKind::Watch }, value: 1 };
    let logs = backend.probe(&setup, &[script, feeder, Script::new(Rank(2)).then(lost)])?;
    match logs.first().and_then(Option::as_ref).and_then(|log| log.first()) {
        Some(Seen::Fault(Fault::Timeout {
            phase: Phase::Probe, peer: Rank(1), seen: 3, awaited: 5, waited, ..
        })) if *waited >= Nanos(WAIT.0 - 1_000_000) => Ok(()),
        other => Err(format!("expected a timeout of rank 1 after 2 s that saw 3 and awaited 5, got {other:?}")),
    }
}

fn f7<B: Backend>(backend: &B) -> Result<(), String> {
    for (seed, noticed) in (0..backend.seeds(SEEDS)).flat_map(|seed| [(seed, false), (seed, true)]) {
        let (setup, _, a) = bench(seed, Reach::Near).map_err(|error| error.to_string())?;
        let setup = setup.incident(Incident::Crash { rank: Rank(2), after: 0, noticed });
        let victim = Script::new(Rank(2)).then(publish(0, 1)).then(publish(1, 1));
        let talk = |me: u32| {
            Script::new(Rank(me))
                .then(Step::Write { at: a, len: LEN, fill: 0x70 + me as u8 })
                .then(Step::Put { lane: to(1 - me), from: a, to: a + LEN, len: LEN })
                .then(publish(1 - me, 1))
                .then(wait(1 - me, 1))
                .then(Step::Read { at: a + LEN, len: LEN })
                .then(Step::Flush { lane: to(1 - me) })
                .then(wait(2, 1))
                .within(Nanos::from_secs(1))
        };
        let logs = backend.probe(&setup, &[talk(0), talk(1), victim])?;
        for (me, log) in logs.iter().take(2).enumerate() {
            let log = log.as_ref().ok_or_else(|| format!("seed {seed}: rank {me} ended with rank 2"))?;
            filled(last_bytes(log), 0x71 - me as u8, "what the other survivor sent")?;
            let fault = match log.last() {
                Some(Seen::Fault(fault)) => *fault,
                other => return Err(format!("seed {seed}: the wait for rank 2 saw {other:?}")),
            };
            let right = match fault {
                Fault::PeerGone { peer, .. } => peer == Rank(2) && noticed,
                Fault::Timeout { peer, .. } => peer == Rank(2) && !noticed,
                _ => false,
            };
            if !right {
                return Err(format!("seed {seed}, noticed {noticed}: rank {me} got {fault}"));
            }
        }
    }
    Ok(())
}

fn f8<B: Backend>(backend: &B, reach: Reach) -> Result<(), String> {
    let (setup, layout, a) = bench(3, reach).map_err(|error| error.to_string())?;
    let end = backend.window(layout.clone()).map_err(|error| error.to_string())?.window_bytes();
    let outside = [
        Step::Put { lane: to(1), from: end - 8, to: a, len: 16 },
        Step::Put { lane: to(1), from: a, to: end - 8, len: 16 },
        Step::Put { lane: to(1), from: u64::MAX - 4, to: a, len: 16 },
        Step::Put { lane: to(1), from: a, to: u64::MAX - 4, len: 16 },
        Step::Write { at: end, len: 1, fill: 1 },
        Step::Read { at: end - 1, len: 2 },
    ];
    let empty = [
        Step::Put { lane: to(1), from: end, to: a, len: 0 },
        Step::Put { lane: to(1), from: a, to: end, len: 0 },
        Step::Write { at: end, len: 0, fill: 0 },
    ];
    let count = outside.len();
    let writer = Script::new(Rank(0))
        .then(wait(1, 1))
        .all(outside)
        .all(empty)
        .then(publish(1, 1))
        .then(Step::Flush { lane: to(1) });
    let reader = Script::new(Rank(1))
        .then(Step::Write { at: a, len: 64, fill: 0x33 })
        .then(Step::Write { at: end - 8, len: 8, fill: 0x33 })
        .then(publish(0, 1))
        .then(wait(0, 1))
        .then(Step::Read { at: end - 8, len: 8 })
        .then(Step::Read { at: a, len: 64 });
    let scripts = [writer, reader].map(|script| carried(script, &layout, reach));
    let logs = backend.probe(&setup, &scripts)?;
    let [Some(writer), Some(reader)] = &logs[..] else { return Err("a script did not end".into()) };
    for (at, seen) in writer[1..=count].iter().enumerate() {
        if !matches!(seen, Seen::Fault(Fault::OutOfRange { window, .. }) if *window == end) {
            return Err(format!("outside access {at} saw {seen:?}"));
        }
    }
    if let Some(seen) = writer[count + 1..].iter().find(|seen| **seen != Seen::Done) {
        return Err(format!("a verb that names no byte saw {seen:?}"));
    }
    for seen in reader {
        if let Seen::Bytes(bytes) = seen {
            filled(bytes, 0x33, "a refused verb touched the peer")?;
        }
    }
    Ok(())
}

fn f9<B: Backend>(backend: &B, reach: Reach) -> Result<(), String> {
    const ROUNDS: u64 = 10;
    let scripts = |a: u64| {
        let writer = Script::new(Rank(0)).all((1..=ROUNDS).flat_map(|round| {
            [
                Step::Flush { lane: to(1) },
                Step::Write { at: a, len: LEN, fill: round as u8 },
                wait(1, round - 1),
                Step::Put { lane: to(1), from: a, to: a, len: LEN },
                publish(1, round),
            ]
        }));
        let writer = writer.then(Step::Flush { lane: to(1) });
        let reader = Script::new(Rank(1))
            .all((1..=ROUNDS).flat_map(|round| [wait(0, round), Step::Read { at: a, len: LEN }, publish(0, round)]));
        vec![writer, reader]
    };
    under_seeds(backend, reach, scripts, |_, logs| {
        let reads = logs[1].iter().filter_map(|seen| match seen {
            Seen::Bytes(bytes) => Some(bytes),
            _ => None,
        });
        reads.zip(1..).try_for_each(|(bytes, fill)| filled(bytes, fill, "a round's read"))
    })
}

fn f10<B: Backend>(backend: &B, reach: Reach) -> Result<(), String> {
    let scripts = |a: u64| {
        let owner = Script::new(Rank(0))
            .then(Step::Write { at: a, len: LEN, fill: 0xab })
            .then(publish(1, 1))
            .then(wait(1, 1))
            .then(Step::Write { at: a, len: LEN, fill: 0xcd });
        let getter = Script::new(Rank(1))
            .then(wait(0, 1))
            .then(Step::Get { lane: to(0), from: a, to: a + 64, len: LEN })
            .then(Step::Flush { lane: to(0) })
            .then(publish(0, 1))
            .then(Step::Read { at: a + 64, len: LEN });
        vec![owner, getter]
    };
    under_seeds(backend, reach, scripts, |_, logs| filled(last_bytes(&logs[1]), 0xab, "what was got"))
}

/// A payload in the same place, round after round, and a unit back for each: nothing is published or cleared in between.
fn f11<B: Backend>(backend: &B) -> Result<(), String> {
    const ROUNDS: u64 = 10;
    // Not a multiple of what a unit holds.
    const PAYLOAD: u64 = 1003;
    let room = unit_bytes(PAYLOAD);
    let place = |a: u64| a + 16384;
    let units = |lane, a, len, serial| Step::Units { lane, at: place(a), len, serial };
    let put = |lane, a, len, serial| Step::PutUnits { lane, from: a, to: place(a), len, serial };
    let scripts = |a: u64| {
        let writer = Script::new(Rank(0))
            .then(Step::Write { at: place(a), len: room, fill: 0 })
            .then(publish(1, 1))
            .then(wait(1, 1))
            .all((1..=ROUNDS).flat_map(|round| {
                [
                    Step::Write { at: a, len: PAYLOAD, fill: round as u8 },
                    put(to(1), a, PAYLOAD, round),
                    units(to(1), a, 4, round),
                    Step::Flush { lane: to(1) },
                ]
            }));
        let reader = Script::new(Rank(1))
            .then(Step::Write { at: place(a) - 64, len: 64, fill: 0x33 })
            .then(Step::Write { at: place(a), len: room, fill: 0 })
            .then(Step::Write { at: place(a) + room, len: 64, fill: 0x33 })
            .then(Step::Write { at: a, len: 4, fill: 7 })
            .then(publish(0, 1))
            .then(wait(0, 1))
            .all((1..=ROUNDS).flat_map(|round| [units(to(0), a, PAYLOAD, round), put(to(0), a, 4, round)]))
            .then(Step::Flush { lane: to(0) })
            .then(Step::Read { at: place(a) - 64, len: 64 })
            .then(Step::Read { at: place(a) + room, len: 64 });
        vec![writer, reader]
    };
    under_seeds(backend, Reach::Near, scripts, |_, logs| {
        let bytes = |log: &[Seen]| {
            let bytes = log.iter().filter_map(|seen| match seen {
                Seen::Bytes(bytes) => Some(bytes.clone()),
                _ => None,
            });
            bytes.collect::<Vec<_>>()
        };
        let [replies, seen] = [&logs[0], &logs[1]].map(|log| bytes(log));
        let (rounds, around) = seen.split_at(ROUNDS as usize);
        rounds.iter().zip(1..).try_for_each(|(bytes, round)| filled(bytes, round, "a round's payload"))?;
        replies.iter().try_for_each(|bytes| filled(bytes, 7, "a reply"))?;
        around.iter().try_for_each(|bytes| filled(bytes, 0x33, "beside the units"))
    })
}
