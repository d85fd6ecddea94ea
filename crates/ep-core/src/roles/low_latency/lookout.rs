//! The watch of low latency: says whom this rank waits for when it waits long, and follows what others say.
//!
//! A rank that waits in vain mostly waits for another that waits in vain. At three quarters of the time allowed, or when
//! somebody has said that it waits for this rank, a rank that waits publishes for whom, to all. So everybody who gives up
//! can follow the chain to the one who waits for nobody. A rank that goes on takes back what it said.

use super::Call;
use crate::error::Fault;
use crate::machine::{Machine, Opening};
use crate::port::{Cell, Counter, Duty, LaneId, LaneKind, Nanos, Need, Port, Role};
use crate::topology::Rank;

/// What a rank has said, for the life of a generation.
#[derive(Debug, Default)]
pub(crate) struct Voice {
    serial: u64,
    /// Whom it last said that it waits for.
    waits_for: Option<Rank>,
}

/// Looks so often, in parts of the time allowed.
const STEPS: u64 = 16;

const fn cell(writer: Rank) -> Cell {
    Cell::new(writer, LaneKind::Watch, Counter::Waiting)
}

/// Whom a cell's value names.
const fn named(value: u64) -> Option<Rank> {
    if value == 0 { None } else { Some(Rank((value & 0xffff) as u32)) }
}

impl<M: Machine> Call<'_, M> {
    fn watch_port(&self, deadline: Nanos) -> M::Port {
        let Self { op, generation, .. } = *self;
        self.machine.port(Opening { role: Role::new(Duty::Watch), op, generation, deadline })
    }
}

impl Voice {
    /// Tells all peers that this rank waits for `rank`.
    async fn say<M: Machine>(&mut self, call: &Call<'_, M>, port: &mut M::Port, rank: Rank) {
        self.serial += 1;
        let value = self.serial << 16 | u64::from(rank.0);
        for &peer in call.peers {
            // Who cannot hear it is somebody else's trouble.
            let _ = port.publish(LaneId { peer, kind: LaneKind::Watch }, cell(call.me), value).await;
        }
    }

    /// Takes back what was said, once this rank goes on.
    pub(crate) async fn retract<M: Machine>(&mut self, call: &Call<'_, M>) {
        if self.waits_for.take().is_some() {
            self.say(call, &mut call.watch_port(call.deadline), call.me).await;
        }
    }
}

/// Runs beside a role, and never ends before it.
pub(crate) async fn lookout<M: Machine>(call: &Call<'_, M>, voice: &mut Voice) -> Fault {
    let step = Nanos(((call.deadline - call.started).0 / STEPS).max(1));
    let mut look = call.started + Nanos(step.0 * STEPS / 2);
    while look < call.deadline {
        let mut port = call.watch_port(look);
        // Nobody publishes that: the wait is a clock.
        let never = Need { cell: cell(call.me), at_least: u64::MAX };
        let _ = port.wait_any(&[never]).await;
        drop(port);
        let mut port = call.watch_port(call.deadline);
        let late = port.now() >= call.started + Nanos(step.0 * STEPS / 4 * 3);
        let asked = || call.peers.iter().any(|&peer| named(port.peek(cell(peer))) == Some(call.me));
        if let Some(wait) = call.board.foremost().filter(|wait| voice.waits_for != Some(wait.peer))
            && (late || asked())
        {
            voice.waits_for = Some(wait.peer);
            voice.say(call, &mut port, wait.peer).await;
        }
        look = port.now() + step;
    }
    std::future::pending().await
}

/// Who is to blame for `fault`: the end of the chain of those who wait for each other.
pub(crate) fn culprit<M: Machine>(call: &Call<'_, M>, fault: &Fault) -> Rank {
    let Some(first) = fault.peer() else { return call.me };
    if !matches!(fault, Fault::Timeout { .. }) {
        return first;
    }
    let port = call.watch_port(call.deadline);
    let mut chain = vec![call.me, first];
    let mut last = first;
    while let Some(next) = named(port.peek(cell(last))).filter(|&next| !chain.contains(&next)) {
        if call.mask.contains(next) {
            break;
        }
        chain.push(next);
        last = next;
    }
    last
}
