//! Scripts of the suite as devices execute them, and what they saw as the suite expects it.

use ep_core::device::probe::{self, Ended, Saw, Verb};
use ep_core::port::{LaneId, LaneKind, Offset, unit_bytes};
use ep_core::{Fault, Phase, Rank};

use super::{Script, Seen, Step};

/// The script for a device.
pub fn to_device(script: &Script) -> probe::Script {
    probe::Script { rank: script.rank, allowed: script.allowed, steps: script.steps.iter().map(step).collect() }
}

fn step(step: &Step) -> probe::Step {
    let named = |verb, peer: Rank, kind: LaneKind| probe::Step {
        peer: peer.0,
        lane: kind.index() as u32,
        ..probe::Step::new(verb)
    };
    match *step {
        Step::Write { at, len, fill } => {
            probe::Step { to: at, len, fill: fill.into(), ..probe::Step::new(Verb::Write) }
        }
        Step::Read { at, len } => probe::Step { from: at, len, ..probe::Step::new(Verb::Read) },
        Step::Put { lane, from, to, len } => probe::Step { from, to, len, ..named(Verb::Put, lane.peer, lane.kind) },
        Step::Get { lane, from, to, len } => probe::Step { from, to, len, ..named(Verb::Get, lane.peer, lane.kind) },
        Step::Publish { lane, value } => probe::Step { value, ..named(Verb::Publish, lane.peer, lane.kind) },
        Step::Wait { writer, kind, at_least } => probe::Step { value: at_least, ..named(Verb::Wait, writer, kind) },
        Step::Peek { writer, kind } => named(Verb::Peek, writer, kind),
        Step::Flush { lane } => named(Verb::Flush, lane.peer, lane.kind),
        Step::PutUnits { lane, from, to, len, serial } => {
            probe::Step { from, to, len, value: serial, ..named(Verb::PutUnits, lane.peer, lane.kind) }
        }
        Step::Units { lane, at, len, serial } => {
            probe::Step { from: at, len, value: serial, ..named(Verb::Units, lane.peer, lane.kind) }
        }
    }
}

/// What the steps of `script` saw, in windows of `window` bytes.
pub fn seen(script: &Script, log: &[Saw], window: u64) -> Vec<Seen> {
    script.steps.iter().zip(log).map(|(step, saw)| seen_by(step, saw, window)).collect()
}

fn seen_by(step: &Step, saw: &Saw, window: u64) -> Seen {
    let outside = |at: u64, len: u64| Seen::Fault(Fault::out_of_range(Offset(at).span(len), window));
    match (saw.ended, step) {
        (Ended::Done, Step::Read { .. } | Step::Units { .. }) => Seen::Bytes(saw.bytes.clone()),
        (Ended::Done, Step::Peek { .. }) => Seen::Value(saw.value),
        (
            Ended::OutsideFrom,
            &(Step::Put { from: at, len, .. }
            | Step::PutUnits { from: at, len, .. }
            | Step::Get { from: at, len, .. }
            | Step::Read { at, len }),
        )
        | (
            Ended::OutsideTo,
            &(Step::Put { to: at, len, .. } | Step::Get { to: at, len, .. } | Step::Write { at, len, .. }),
        ) => outside(at, len),
        (Ended::OutsideFrom, &Step::Units { at, len, .. })
        | (Ended::OutsideTo, &Step::PutUnits { to: at, len, .. }) => outside(at, unit_bytes(len)),
        (Ended::Timeout, &Step::Units { lane, serial, .. }) => Seen::Fault(Fault::Timeout {
            phase: Phase::Probe,
            peer: lane.peer,
            lane,
            seen: saw.value,
            awaited: serial,
            waited: saw.waited,
        }),
        (Ended::Gone, &Step::Units { lane, .. }) => {
            Seen::Fault(Fault::PeerGone { peer: lane.peer, phase: Phase::Probe })
        }
        (Ended::Timeout, &Step::Wait { writer, kind, at_least }) => Seen::Fault(Fault::Timeout {
            phase: Phase::Probe,
            peer: writer,
            lane: LaneId { peer: writer, kind },
            seen: saw.value,
            awaited: at_least,
            waited: saw.waited,
        }),
        (Ended::Gone, &Step::Wait { writer, .. }) => Seen::Fault(Fault::PeerGone { peer: writer, phase: Phase::Probe }),
        _ => Seen::Done,
    }
}
