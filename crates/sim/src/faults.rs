//! How waits end that nothing met, under both schedulers.

use ep_core::port::{Counter, LaneId, LaneKind, Need};
use ep_core::{Fault, Nanos, Phase, Rank};

/// What a lane mostly carries, to name a wait on the lane itself.
pub(crate) fn lane_phase(kind: LaneKind) -> Phase {
    match kind {
        LaneKind::Watch => Counter::Alarm,
        LaneKind::Control => Counter::Counts,
        LaneKind::LowRows => Counter::Even,
        LaneKind::LowDone => Counter::Received,
        LaneKind::Data(_) | LaneKind::Mailbox(..) => Counter::Tail,
        LaneKind::Credit(_) => Counter::Head,
    }
    .phase()
}

/// A wait of `rank` was not met in time: the fault names its first need, with the value seen there. A wait without needs
/// names the rank itself.
pub(crate) fn unmet(rank: Rank, first: Option<(Need, u64)>, waited: Nanos) -> Fault {
    match first {
        None => {
            let lane = LaneId { peer: rank, kind: LaneKind::Watch };
            Fault::Timeout { phase: Phase::Probe, peer: rank, lane, seen: 0, awaited: 0, waited }
        }
        Some((Need { cell, at_least }, seen)) => {
            let lane = LaneId { peer: cell.writer, kind: cell.lane };
            Fault::Timeout { phase: cell.counter.phase(), peer: cell.writer, lane, seen, awaited: at_least, waited }
        }
    }
}
