//! The watch of low latency: says whom this rank waits for when it waits long, and follows what others say.
//!
//! A rank that waits in vain mostly waits for another that waits in vain. At three quarters of the time allowed, or when
//! somebody has said that it waits for this rank, a rank that waits publishes for whom, to all. So everybody who gives up
//! can follow the chain to the one who waits for nobody. A rank that goes on takes back what it said.
//!
//! A rank that has failed otherwise, in throughput mode or before it recovers, has spread a verdict, and comes no more: who
//! waits hears that, too, and ends with it. Otherwise it would wait out its time, and blame the one who found out first.

use super::Call;
use crate::error::Fault;
use crate::layout::Alarm;
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
    /// The next alarm of every rank that takes part.
    fn alarms(&self) -> impl Iterator<Item = Need> {
        self.peers.iter().filter(|&&peer| !self.mask.contains(peer)).map(|&peer| self.vigil.next_alarm(peer))
    }

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

/// A wait of so little, in parts of a step, is nothing to worry about: nearly all calls end before anything is looked at.
const EARLY: u64 = 4;

/// Runs beside a role. Ends before it only with a peer's verdict.
pub(crate) async fn lookout<M: Machine>(call: &Call<'_, M>, voice: &mut Voice) -> Fault {
    let step = Nanos(((call.deadline - call.started).0 / STEPS).max(1));
    // Nobody publishes that: the wait is a clock.
    let never = Need { cell: cell(call.me), at_least: u64::MAX };
    let early = call.started + Nanos(step.0 / EARLY);
    let _ = call.watch_port(early).wait_any(&[never]).await;
    let mut needs = vec![never];
    needs.extend(call.alarms());
    let mut look = call.started + Nanos(step.0 * STEPS / 2);
    while look < call.deadline {
        if let Some(verdict) = listen(call, &mut needs, look).await {
            return verdict;
        }
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
    match listen(call, &mut needs, call.deadline).await {
        Some(verdict) => verdict,
        None => std::future::pending().await,
    }
}

/// What `fault` is about, when it is that a peer is gone, or goes on without this rank: the verdict about another rank that a peer has
/// spread, if one has. It may have said why before.
pub(crate) fn last_words<M: Machine>(call: &Call<'_, M>, fault: Fault) -> Fault {
    if fault.gone().is_none() && !matches!(fault, Fault::MaskedBy { .. }) {
        return fault;
    }
    let port = call.watch_port(call.deadline);
    let about_others = |fault: &Fault| fault.peer() != Some(call.me);
    let mut said =
        call.alarms().filter_map(|need| verdict(need.cell.writer, port.peek(need.cell))).filter(about_others);
    said.next().unwrap_or(fault)
}

/// What an alarm of `reporter` ends, if it is a verdict.
fn verdict(reporter: Rank, value: u64) -> Option<Fault> {
    let alarm = Alarm::decode(value).filter(|alarm| alarm.verdict)?;
    Some(Fault::Aborted { reporter, culprit: alarm.peer })
}

/// Listens to alarms until `until`, and returns a verdict.
async fn listen<M: Machine>(call: &Call<'_, M>, needs: &mut Vec<Need>, until: Nanos) -> Option<Fault> {
    let mut port = call.watch_port(until);
    loop {
        match port.wait_any(needs).await {
            Ok(at) => {
                let (reporter, value) = (needs[at].cell.writer, port.peek(needs[at].cell));
                if let Some(verdict) = verdict(reporter, value) {
                    return Some(verdict);
                }
                // A suspicion of throughput mode: who waits there is told by others.
                needs[at].at_least = value + 1;
            }
            // Who is gone says nothing more. Whether it is missed, the roles find out.
            Err(fault) if fault.gone().is_some() => needs.retain(|need| Some(need.cell.writer) != fault.gone()),
            Err(_) => return None,
        }
    }
}

impl<M: Machine> Call<'_, M> {
    /// What `rank` has last said, whatever it was: every word is more than the one before.
    pub(crate) fn word(&self, rank: Rank) -> u64 {
        if rank == self.me { 0 } else { self.watch_port(self.deadline).peek(cell(rank)) }
    }
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
