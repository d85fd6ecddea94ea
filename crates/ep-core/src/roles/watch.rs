//! The watch role: tells the others what this rank waits for when it waits long, and listens to theirs.
//!
//! First it tells every peer which operation has begun here, and of what kind: ranks that do different things find out.
//!
//! At three quarters of the deadline a rank that waits publishes a *suspicion*: what for, from whom. Whoever hears one
//! and waits itself answers with its own at once. So when deadlines pass, every rank knows who waits for whom, and all
//! name the rank that waits for nobody (`Board::culprit`). A *verdict* ends the operation of everybody who hears it.

use super::board::Wait;
use super::{Attended, Operation};
use crate::error::Fault;
use crate::layout::Alarm;
use crate::machine::Machine;
use crate::port::{Cell, Counter, Duty, LaneId, LaneKind, Nanos, Need, Port, Role};
use crate::topology::Rank;

/// What the watch role of a rank remembers from one operation to the next, within a generation.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Vigil {
    /// Alarms sent so far.
    serial: u16,
    /// `[ranks]`: the last alarm heard from each rank, as a cell value.
    heard: Vec<u64>,
}

impl Vigil {
    pub(crate) fn new(ranks: usize) -> Self {
        Self { serial: 0, heard: vec![0; ranks] }
    }

    async fn raise<M: Machine>(
        &mut self,
        operation: &Operation<'_, M>,
        port: &mut Attended<M::Port>,
        verdict: bool,
        wait: Wait,
    ) -> Result<(), Fault> {
        // The last serial is kept for a verdict.
        if self.serial >= Alarm::MAX_SERIAL - u16::from(!verdict) {
            return Ok(());
        }
        self.serial += 1;
        let alarm =
            Alarm { serial: self.serial, verdict, op: Alarm::op_bits(wait.op), phase: wait.phase, peer: wait.peer };
        let cell = Cell::new(operation.me, LaneKind::Watch, Counter::Alarm);
        for &peer in operation.peers {
            // A peer that cannot be told does not keep the others from hearing it.
            let _ = port.publish(LaneId { peer, kind: LaneKind::Watch }, cell, alarm.encode()).await;
        }
        Ok(())
    }

    /// Tells everybody whom this rank blames for the end of `operation`.
    pub(crate) async fn verdict<M: Machine>(&mut self, operation: &Operation<'_, M>, wait: Wait) {
        let mut port = operation.port(Role::new(Duty::Watch));
        let _ = self.raise(operation, &mut port, true, wait).await;
    }

    /// Drops suspicions of ranks that have finished the operation they waited in.
    pub(crate) fn forget_healed<M: Machine>(&self, operation: &Operation<'_, M>) {
        let port = operation.port(Role::new(Duty::Watch));
        for (reporter, wait) in operation.board.suspicions() {
            if port.peek(Cell::new(reporter, LaneKind::Control, Counter::Done)) >= wait.op {
                operation.board.forget(reporter);
            }
        }
    }
}

/// The operation nearest to `near` whose low bits an alarm carries.
fn full_op(bits: u16, near: u64) -> u64 {
    let span = u64::from(u16::MAX >> 4) + 1;
    let ahead = (u64::from(bits) + span - near % span) % span;
    if ahead < span / 2 { near + ahead } else { (near + ahead).saturating_sub(span) }
}

/// Watches until a peer's verdict or a machine's knowledge ends the operation, and returns that fault. Runs beside the
/// work and is dropped with it; at the deadline it leaves the word to the roles that wait.
pub(crate) async fn watch<M: Machine>(operation: &Operation<'_, M>, vigil: &mut Vigil) -> Fault {
    let allowed = operation.deadline - operation.started;
    let step = Nanos((allowed.0 / 16).max(1));
    let mut look = operation.started + Nanos(allowed.0 / 4 * 3);
    let mut reported = None;
    let mut port = operation.port_until(Role::new(Duty::Watch), look);
    if let Err(fault) = open(operation, &mut port).await {
        return fault;
    }
    let mut needs = needs(operation, vigil);
    loop {
        match port.wait_any(&needs).await {
            Ok(at) if needs[at].cell.counter == Counter::Opening => {
                if let Err(fault) = check_opening(operation, needs[at].cell.writer, port.peek(needs[at].cell)) {
                    return fault;
                }
                needs.swap_remove(at);
                continue;
            }
            Ok(at) => {
                let (peer, value) = (needs[at].cell.writer, port.peek(needs[at].cell));
                vigil.heard[peer.index()] = value;
                needs[at].at_least = value + 1;
                let Some(alarm) = Alarm::decode(value) else { continue };
                if alarm.verdict {
                    return Fault::Aborted { reporter: peer, culprit: alarm.peer };
                }
                let op = full_op(alarm.op, operation.op);
                operation.board.suspect(peer, Wait { op, phase: alarm.phase, peer: alarm.peer });
                look = port.now();
            }
            Err(Fault::Timeout { .. }) if port.now() < operation.deadline => {}
            Err(Fault::Timeout { .. }) => std::future::pending().await,
            Err(fault) => return fault,
        }
        // Time to say what this rank waits for: it waits long, or somebody asked.
        let now = port.now();
        if now >= look {
            if let Some(wait) = operation.board.foremost().filter(|wait| reported != Some(*wait)) {
                reported = Some(wait);
                let _ = vigil.raise(operation, &mut port, false, wait).await;
            }
            look = if operation.board.is_suspicious() || reported.is_some() { now + step } else { operation.deadline };
        }
        drop(port);
        port = operation.port_until(Role::new(Duty::Watch), look.min(operation.deadline));
    }
}

/// Tells every peer what has begun here.
async fn open<M: Machine>(operation: &Operation<'_, M>, port: &mut Attended<M::Port>) -> Result<(), Fault> {
    let cell = Cell::new(operation.me, LaneKind::Watch, Counter::Opening);
    for &peer in operation.peers {
        let lane = LaneId { peer, kind: LaneKind::Watch };
        port.publish(lane, cell, operation.kind.opening(operation.op)).await?;
    }
    Ok(())
}

/// What the watch waits for: any alarm that it has not heard, and the opening of this operation by each peer.
fn needs<M: Machine>(operation: &Operation<'_, M>, vigil: &Vigil) -> Vec<Need> {
    let need = |peer: Rank, counter, at_least| Need { cell: Cell::new(peer, LaneKind::Watch, counter), at_least };
    let alarms = operation.peers.iter().map(|&peer| need(peer, Counter::Alarm, vigil.heard[peer.index()] + 1));
    let first = operation.op << 3;
    alarms.chain(operation.peers.iter().map(|&peer| need(peer, Counter::Opening, first))).collect()
}

/// Refuses a peer that has begun this operation as another kind.
fn check_opening<M: Machine>(operation: &Operation<'_, M>, peer: Rank, opening: u64) -> Result<(), Fault> {
    let (op, theirs) = (opening >> 3, opening & 7);
    let mine = operation.kind as u64;
    if op == operation.op && theirs != mine {
        return Err(Fault::Mismatch { field: "kind of the operation", mine, theirs, peer });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alarms_name_operations_by_their_low_bits() {
        for near in [1, 5, 4095, 4096, 5000, 1 << 40] {
            for op in [near, near + 1, near + 7, near - 1] {
                assert_eq!(full_op(Alarm::op_bits(op), near), op);
            }
        }
    }
}
