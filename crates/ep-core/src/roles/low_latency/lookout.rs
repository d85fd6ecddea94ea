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
use crate::layout::{Alarm, MASKED};
use crate::machine::{Machine, Opening};
use crate::port::{Counter, Duty, Nanos, Need, Port, Role};
use crate::roles::voice::{Voice, named, word_of};
use crate::topology::Rank;

/// Looks so often, in parts of the time allowed.
const STEPS: u64 = 16;

impl<M: Machine> Call<'_, M> {
    /// The next alarm of every rank that takes part.
    fn alarms(&self) -> impl Iterator<Item = Need> {
        self.peers.iter().filter(|&&peer| !self.mask.contains(peer)).map(|&peer| self.vigil.next_alarm(peer))
    }

    /// The next word of every rank that takes part, after what it has said.
    fn words(&self) -> impl Iterator<Item = Need> {
        let port = self.watch_port(self.deadline);
        self.peers.iter().map(move |&peer| Need { cell: word_of(peer), at_least: port.peek(word_of(peer)) + 1 })
    }

    /// Whether somebody says that it waits for this rank.
    fn is_asked(&self, port: &M::Port) -> bool {
        self.peers.iter().any(|&peer| named(port.peek(word_of(peer))) == Some(self.me))
    }

    pub(crate) fn watch_port(&self, deadline: Nanos) -> M::Port {
        let Self { op, generation, .. } = *self;
        self.machine.port(Opening { role: Role::new(Duty::Watch), op, generation, deadline })
    }
}

/// A wait of so little, in parts of a step, is nothing to worry about: nearly all calls end before anything is looked at.
const EARLY: u64 = 4;

/// Runs beside a role. Ends before it only with a peer's verdict.
pub(crate) async fn lookout<M: Machine>(call: &Call<'_, M>, voice: &mut Voice) -> Fault {
    let step = Nanos(((call.deadline - call.started).0 / STEPS).max(1));
    // Nobody publishes that: the wait is a clock.
    let never = Need { cell: word_of(call.me), at_least: u64::MAX };
    let early = call.started + Nanos(step.0 / EARLY);
    let _ = call.watch_port(early).wait_any(&[never]).await;
    let mut needs = vec![never];
    needs.extend(call.alarms());
    needs.extend(call.words());
    let late = call.started + Nanos(step.0 * STEPS / 4 * 3);
    loop {
        let mut port = call.watch_port(call.deadline);
        let now = port.now();
        if now >= call.deadline {
            break;
        }
        // The others may have begun to wait long before this rank: it answers however short its own wait has been.
        let speaks = now >= late || call.is_asked(&port);
        if let Some(wait) = call.board.foremost().filter(|_| speaks) {
            voice.say(call.me, call.peers, &mut port, wait.peer).await;
        }
        drop(port);
        let look = if speaks { now + step } else { late };
        if let Some(verdict) = listen(call, &mut needs, look.min(call.deadline)).await {
            return verdict;
        }
    }
    std::future::pending().await
}

/// What `fault` is about, when it is that a peer is gone, or goes on without this rank: the verdict about another rank that a peer has
/// spread, if one has. It may have said why before; and who is gone, that it goes on without this rank.
pub(crate) fn last_words<M: Machine>(call: &Call<'_, M>, fault: Fault) -> Fault {
    if fault.gone().is_none() && !matches!(fault, Fault::MaskedBy { .. }) {
        return fault;
    }
    let port = call.watch_port(call.deadline);
    let about_others = |fault: &Fault| fault.peer() != Some(call.me);
    let mut said =
        call.alarms().filter_map(|need| verdict(call.me, need.cell.writer, port.peek(need.cell))).filter(about_others);
    let masks = |&peer: &Rank| port.peek(call.bank_need(peer).cell) == MASKED;
    let masked = || fault.gone().filter(masks).map(|peer| Fault::MaskedBy { peer });
    said.next().or_else(masked).unwrap_or(fault)
}

/// What an alarm of `reporter` ends, if it is a verdict. (Who goes on without this rank says so where it waits, too.)
fn verdict(me: Rank, reporter: Rank, value: u64) -> Option<Fault> {
    let alarm = Alarm::decode(value).filter(|alarm| alarm.verdict && !alarm.leaves(me))?;
    Some(Fault::Aborted { reporter, culprit: alarm.peer })
}

/// Listens until `until`, or until somebody says for whom it waits; returns a verdict.
async fn listen<M: Machine>(call: &Call<'_, M>, needs: &mut Vec<Need>, until: Nanos) -> Option<Fault> {
    let mut port = call.watch_port(until);
    loop {
        match port.wait_any(needs).await {
            Ok(at) => {
                let (reporter, value) = (needs[at].cell.writer, port.peek(needs[at].cell));
                needs[at].at_least = value + 1;
                if needs[at].cell.counter == Counter::Waiting {
                    return None;
                }
                if let Some(verdict) = verdict(call.me, reporter, value) {
                    return Some(verdict);
                }
                // A suspicion of throughput mode: it comes as a word, too.
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
        if rank == self.me { 0 } else { self.watch_port(self.deadline).peek(word_of(rank)) }
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
    while let Some(next) = named(port.peek(word_of(last))).filter(|&next| !chain.contains(&next)) {
        if call.mask.contains(next) {
            break;
        }
        chain.push(next);
        last = next;
    }
    last
}
