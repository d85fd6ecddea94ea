//! The watch role: tells the others what this rank waits for when it waits long, and listens to theirs.
//!
//! First it tells every peer which operation has begun here, and of what kind: ranks that do different things find out.
//!
//! At three quarters of the time allowed, a rank that waits publishes a *suspicion*: what for, from whom. Whoever hears
//! one and waits itself answers with its own, a few times at once and then at intervals. A rank whose operation ends well after all takes its suspicion back, by one
//! of itself. At seven eighths all waits end. In the last eighth the ranks speak in turn:
//! each, when nobody has spoken before, names the rank that waits for nobody ([`Board::culprit`]) and spreads that
//! *verdict*; whoever hears a verdict takes it over and spreads it too. So ranks that see different halves of a broken
//! lane still name the same culprit.
//!
//! A peer that is gone ends the operation at once, unless it is done with it.
//!
//! [`Board::culprit`]: super::Board::culprit

use super::board::Wait;
use super::voice::{Voice, named, word_of};
use super::{Attended, Operation};
use crate::error::{Fault, Phase};
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
    /// What this rank says in low latency, and there of this mode.
    pub(crate) voice: Voice,
}

impl Vigil {
    pub(crate) fn new(ranks: usize) -> Self {
        Self { serial: 0, heard: vec![0; ranks], voice: Voice::default() }
    }

    /// Publishes an alarm to every peer. One that cannot be told does not keep the others from hearing it.
    async fn raise<M: Machine>(
        &mut self,
        operation: &Operation<'_, M>,
        port: &mut Attended<M::Port>,
        verdict: bool,
        wait: Wait,
    ) {
        self.publish(operation.me, operation.neighbours(), port, verdict, wait).await;
        if !verdict {
            self.voice.say(operation.me, operation.listeners, port, wait.peer).await;
        }
    }

    /// Tells `peers` that `me` blames `culprit`, and goes on with them by a recovery only.
    pub(crate) async fn warn(&mut self, me: Rank, peers: &[Rank], port: &mut impl Port, op: u64, culprit: Rank) {
        self.publish(me, peers.iter().copied(), port, true, Wait::new(op, Phase::Alarm, culprit)).await;
    }

    /// Tells `peer` that `me` goes on without it, and has come through all operations before `op` with it.
    pub(crate) async fn leave(&mut self, me: Rank, peer: Rank, port: &mut impl Port, op: u64) {
        let wait = Wait { in_circle: true, ..Wait::new(op, Phase::Alarm, peer) };
        self.publish(me, std::iter::once(peer), port, true, wait).await;
    }

    async fn publish(
        &mut self,
        me: Rank,
        peers: impl Iterator<Item = Rank>,
        port: &mut impl Port,
        verdict: bool,
        wait: Wait,
    ) {
        // The last serial is kept for a verdict.
        if self.serial >= Alarm::MAX_SERIAL - u16::from(!verdict) {
            return;
        }
        self.serial += 1;
        let Wait { phase, in_circle, peer, .. } = wait;
        let alarm = Alarm { serial: self.serial, verdict, op: Alarm::op_bits(wait.op), phase, in_circle, peer };
        let cell = Cell::new(me, LaneKind::Watch, Counter::Alarm);
        for peer in peers {
            let _ = port.publish(LaneId { peer, kind: LaneKind::Watch }, cell, alarm.encode()).await;
        }
    }

    /// Tells everybody whom this rank blames for the end of `operation`.
    pub(crate) async fn spread<M: Machine>(&mut self, operation: &Operation<'_, M>, culprit: Rank) {
        let mut port = operation.port_until(Role::new(Duty::Watch), operation.times.ends);
        let wait = Wait::new(operation.op, Phase::Alarm, culprit);
        self.raise(operation, &mut port, true, wait).await;
    }

    /// After an operation that ended well: takes back what this rank said that it waits for.
    pub(crate) async fn retract<M: Machine>(&mut self, operation: &Operation<'_, M>) {
        if operation.board.has_reported() {
            let mut port = operation.port_until(Role::new(Duty::Watch), operation.times.ends);
            let wait = Wait::new(operation.op, Phase::Alarm, operation.me);
            self.raise(operation, &mut port, false, wait).await;
        }
    }

    /// Takes in the alarm that `need` waited for: notes a suspicion, returns a verdict.
    fn hear<M: Machine>(&mut self, operation: &Operation<'_, M>, need: &mut Need, value: u64) -> Option<Fault> {
        let reporter = need.cell.writer;
        need.at_least = value + 1;
        if need.cell.counter == Counter::Waiting {
            note_word(operation, reporter, value);
            return None;
        }
        let alarm = Alarm::decode(value);
        if alarm.is_some_and(|alarm| alarm.verdict && !alarm.ends(operation.op, operation.me)) {
            // The next operation hears it.
            return None;
        }
        self.heard[reporter.index()] = value;
        let alarm = alarm?;
        if alarm.verdict {
            return Some(Fault::Aborted { reporter, culprit: alarm.peer });
        }
        note_suspicion(operation, reporter, alarm);
        None
    }

    /// What peers have not said yet: alarms, and words where low latency is on. What they have said before this operation began here is
    /// noted: they may still wait for that.
    fn listen<M: Machine>(&self, operation: &Operation<'_, M>, port: &impl Port) -> Vec<Need> {
        for peer in operation.neighbours() {
            let before = Alarm::decode(self.heard[peer.index()]).filter(|alarm| !alarm.verdict);
            if let Some(alarm) = before {
                note_suspicion(operation, peer, alarm);
            }
        }
        let word = |&peer: &Rank| {
            let value = port.peek(word_of(peer));
            note_word(operation, peer, value);
            Need { cell: word_of(peer), at_least: value + 1 }
        };
        let mut needs = self.unheard(operation);
        needs.extend(operation.listeners.iter().map(word));
        needs
    }

    /// The alarms of peers that have not been heard.
    fn unheard<M: Machine>(&self, operation: &Operation<'_, M>) -> Vec<Need> {
        operation.neighbours().map(|peer| self.next_alarm(peer)).collect()
    }

    /// The alarm of `peer` after the last that was heard.
    pub(crate) fn next_alarm(&self, peer: Rank) -> Need {
        let cell = Cell::new(peer, LaneKind::Watch, Counter::Alarm);
        Need { cell, at_least: self.heard[peer.index()] + 1 }
    }
}

/// Notes the suspicion of `reporter`; one of itself takes back what it said.
fn note_suspicion<M: Machine>(operation: &Operation<'_, M>, reporter: Rank, alarm: Alarm) {
    let op = full_op(alarm.op, operation.op);
    match alarm.peer == reporter {
        true => operation.board.forget(reporter),
        false => {
            let Alarm { phase, in_circle, peer, .. } = alarm;
            operation.board.suspect(reporter, Wait { op, phase, in_circle, peer });
        }
    }
}

/// Notes what `rank` says in low latency. Who waits there has not come to this operation, and so is nearer to the cause.
fn note_word<M: Machine>(operation: &Operation<'_, M>, rank: Rank, value: u64) {
    let peer = named(value).filter(|&peer| peer != rank);
    let wait = |peer| Wait::new(operation.op.saturating_sub(1), Phase::Rows, peer);
    operation.board.hear_word(rank, peer.map(wait));
}

/// The operation nearest to `near` whose low bits an alarm carries.
fn full_op(bits: u16, near: u64) -> u64 {
    let span = u64::from(u16::MAX >> 4) + 1;
    let ahead = (u64::from(bits) + span - near % span) % span;
    if ahead < span / 2 { near + ahead } else { (near + ahead).saturating_sub(span) }
}

/// Suspicions that a rank tells in one step as it hears others. Where relayed ones come back, each answer may change the next: ranks of several
/// nodes would answer each other as fast as they can until their time is up.
const ANSWERS: u32 = 16;

/// Watches until a peer's verdict or a machine's knowledge ends the operation, and returns that fault. Runs beside the
/// work and is dropped with it; at the deadline it leaves the word to the roles that wait.
pub(crate) async fn watch<M: Machine>(operation: &Operation<'_, M>, vigil: &mut Vigil) -> Fault {
    let times = operation.times;
    let mut look = times.suspicions;
    let mut port = operation.port_until(Role::new(Duty::Watch), look);
    if let Err(fault) = open(operation, &mut port).await {
        return fault;
    }
    let mut needs = vigil.listen(operation, &port);
    if operation.board.is_troubled() {
        look = port.now();
        drop(port);
        port = operation.port_until(Role::new(Duty::Watch), look);
    }
    needs.extend(openings(operation));
    let mut answers = 0;
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
                let value = port.peek(needs[at].cell);
                if let Some(verdict) = vigil.hear(operation, &mut needs[at], value) {
                    return verdict;
                }
                if answers < ANSWERS {
                    look = port.now();
                }
            }
            // A peer that is done may be gone: nobody needs it any more, and it has no more to say. Nor is one missed here that this rank has
            // nothing to do with in this mode.
            Err(fault) if fault.gone().is_some_and(|peer| port.is_done(peer) || !operation.hears_alarms_of(peer)) => {
                needs.retain(|need| Some(need.cell.writer) != fault.gone());
                continue;
            }
            Err(Fault::Timeout { .. }) if port.now() < times.deadline => answers = 0,
            Err(Fault::Timeout { .. }) => std::future::pending().await,
            Err(fault) => return fault,
        }
        // Time to say what this rank waits for: it waits long, or somebody asked.
        let now = port.now();
        if now >= look {
            let relays = operation.layout.topology().nodes() > 1;
            if let Some(wait) = operation.board.report(operation.me, relays) {
                vigil.raise(operation, &mut port, false, wait).await;
                answers += 1;
            }
            look = if operation.board.is_troubled() { now + times.step } else { times.deadline };
        }
        drop(port);
        port = operation.port_until(Role::new(Duty::Watch), look.min(times.deadline));
    }
}

/// Who is to blame for `fault`, and whose verdict that is.
pub(crate) async fn verdict<M: Machine>(
    operation: &Operation<'_, M>,
    vigil: &mut Vigil,
    fault: &Fault,
) -> (Rank, Rank) {
    let me = operation.me;
    match *fault {
        Fault::Aborted { reporter, culprit } => (culprit, reporter),
        Fault::Timeout { phase, peer, .. } => match await_turn(operation, vigil).await {
            Some((culprit, reporter)) => (culprit, reporter),
            None => {
                let topology = operation.layout.topology();
                let hears = |rank, peer| {
                    let near = [me, rank].into_iter().any(|rank| topology.are_neighbours(rank, peer));
                    near || operation.listeners.contains(&peer)
                };
                (operation.board.culprit(me, hears, Wait::new(operation.op, phase, peer)), me)
            }
        },
        _ => (fault.peer().unwrap_or(me), me),
    }
}

/// What `fault` is about, when it is that a peer is gone: the verdict that a peer has spread meanwhile, if one has. Who is
/// gone may have said before it went what made it give up.
pub(crate) fn last_words<M: Machine>(operation: &Operation<'_, M>, vigil: &mut Vigil, fault: Fault) -> Fault {
    if fault.gone().is_none() {
        return fault;
    }
    let port = operation.port_until(Role::new(Duty::Watch), operation.times.ends);
    let mut heard = vigil.unheard(operation).into_iter().filter_map(|mut need| {
        let value = port.peek(need.cell);
        if value < need.at_least { None } else { vigil.hear(operation, &mut need, value) }
    });
    heard.next().unwrap_or(fault)
}

/// After the work of an operation: whether a peer that had not come through it has said that it goes on without this rank. What this rank has pulled
/// there may not be what lay there, then: who recovers says so before it writes anew. (Who came through it had waited for what this rank pulls.)
pub(crate) fn given_up<M: Machine>(operation: &Operation<'_, M>, vigil: &mut Vigil) -> Option<Fault> {
    if !operation.machine.capabilities().get {
        return None;
    }
    let port = operation.port_until(Role::new(Duty::Watch), operation.times.ends);
    let me = operation.me;
    let ends = |alarm: Alarm| alarm.peer == me && alarm.ends(operation.op, me);
    let told = |need: &Need| Alarm::decode(port.peek(need.cell)).is_some_and(ends);
    let reporter = vigil.unheard(operation).into_iter().find(told)?.cell.writer;
    Some(Fault::Aborted { reporter, culprit: me })
}

/// Listens until it is this rank's turn to speak: lower ranks first. Returns an earlier speaker's verdict, if any.
async fn await_turn<M: Machine>(operation: &Operation<'_, M>, vigil: &mut Vigil) -> Option<(Rank, Rank)> {
    let times = operation.times;
    let ranks = u64::from(operation.layout.topology().ranks());
    let turn = times.deadline + Nanos((times.ends - times.deadline).0 / ranks * u64::from(operation.me.0));
    let mut port = operation.port_until(Role::new(Duty::Watch), turn);
    let mut needs = vigil.listen(operation, &port);
    loop {
        match port.wait_any(&needs).await {
            Ok(at) => {
                let value = port.peek(needs[at].cell);
                if let Some(Fault::Aborted { reporter, culprit }) = vigil.hear(operation, &mut needs[at], value) {
                    return Some((culprit, reporter));
                }
            }
            // Who is gone says nothing more; the turn of the others is still to come.
            Err(fault) if fault.gone().is_some() => needs.retain(|need| Some(need.cell.writer) != fault.gone()),
            Err(_) => return None,
        }
    }
}

/// Tells every peer what has begun here.
async fn open<M: Machine>(operation: &Operation<'_, M>, port: &mut Attended<M::Port>) -> Result<(), Fault> {
    let cell = Cell::new(operation.me, LaneKind::Watch, Counter::Opening);
    for peer in operation.neighbours() {
        let lane = LaneId { peer, kind: LaneKind::Watch };
        port.publish(lane, cell, operation.kind.opening(operation.op)).await?;
    }
    Ok(())
}

/// The opening of this operation by each peer.
fn openings<M: Machine>(operation: &Operation<'_, M>) -> impl Iterator<Item = Need> {
    let at_least = operation.op << 3;
    let need = move |peer: Rank| Need { cell: Cell::new(peer, LaneKind::Watch, Counter::Opening), at_least };
    operation.neighbours().map(need)
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
    use std::rc::Rc;

    use super::*;
    use crate::layout::Kind;
    use crate::machine::loopback::{DEADLINE, Loopback, LoopbackMachine, finish};
    use crate::roles::Board;
    use crate::roles::operation::Times;
    use crate::settings::{OutboxUse, Settings};
    use crate::shape::Shape;
    use crate::topology::{RankSet, Topology};

    #[test]
    fn a_rank_that_has_said_too_much_can_still_give_a_verdict() {
        let (me, mut port, mut vigil) = (Rank(0), Loopback::new(), Vigil::new(1));
        let said = |port: &Loopback| Alarm::decode(port.peek(Cell::new(me, LaneKind::Watch, Counter::Alarm))).unwrap();
        for serial in 1..=Alarm::MAX_SERIAL + 1 {
            let wait = Wait::new(5, Phase::Counts, me);
            finish(vigil.publish(me, [me].into_iter(), &mut port, false, wait));
            let said = said(&port);
            assert_eq!((said.serial, said.verdict), (serial.min(Alarm::MAX_SERIAL - 1), false));
        }
        for _ in 0..2 {
            finish(vigil.warn(me, &[me], &mut port, 5, me));
            let said = said(&port);
            assert_eq!((said.serial, said.verdict, said.peer), (Alarm::MAX_SERIAL, true, me));
        }
    }

    /// Five ranks in each of two nodes.
    fn machine() -> LoopbackMachine {
        let (shape, topology) =
            (Shape::builder().experts(10).hidden(16).build().unwrap(), Topology::new(2, 5).unwrap());
        LoopbackMachine::with(&shape, &topology, &Settings::auto(&shape, &topology))
    }

    /// The first operation of rank 0, where all take part.
    fn operation<'a>(
        machine: &'a LoopbackMachine,
        mask: &'a RankSet,
        listeners: &'a [Rank],
    ) -> Operation<'a, LoopbackMachine> {
        let (layout, near) = (machine.layout(), &[Rank(1), Rank(2), Rank(3), Rank(4)]);
        let (rings, times) = (layout.settings().rings(), Times::new(Nanos(0), DEADLINE));
        let (outbox, board) = (OutboxUse::USUAL, Rc::new(Board::new(10)));
        let (me, kind, rail) = (Rank(0), Kind::Dispatch, &[Rank(5)]);
        let (op, first_op, generation, pulled, settings) = (1, 1, 1, false, 0);
        Operation {
            machine,
            layout,
            me,
            mask,
            near,
            rail,
            listeners,
            op,
            first_op,
            generation,
            kind,
            rings,
            pulled,
            outbox,
            settings,
            times,
            board,
        }
    }

    /// A rank that is ahead says only once what it waits for: here it may have come in the operation before.
    #[test]
    fn what_a_peer_suspected_before_an_operation_began_here_stands() {
        let (machine, mask) = (machine(), RankSet::new());
        let alarm = Alarm { serial: 1, verdict: false, op: 1, phase: Phase::Rows, in_circle: false, peer: Rank(2) };
        for (verdict, suspected) in [(false, vec![(Rank(1), Wait::new(1, Phase::Rows, Rank(2)))]), (true, Vec::new())] {
            let (operation, mut vigil) = (operation(&machine, &mask, &[]), Vigil::new(10));
            vigil.heard[1] = Alarm { verdict, ..alarm }.encode();
            vigil.listen(&operation, &Loopback::new());
            assert_eq!(operation.board.suspicions(), suspected, "verdict: {verdict}");
        }
    }

    /// Ranks 1 and 2 wait for each other, and another for rank 9, which rank 0 hears in low latency only.
    #[test]
    fn a_silence_is_blamed_by_the_word_of_those_who_would_have_heard() {
        let (machine, mask) = (machine(), RankSet::new());
        let wait = |peer| Wait::new(1, Phase::Rows, Rank(peer));
        let all = [Rank(1), Rank(9)];
        for (reporter, listeners, culprit) in [(4, &all[..0], 9), (3, &all[..0], 1), (3, &all[..], 9)] {
            let (operation, mut vigil) = (operation(&machine, &mask, listeners), Vigil::new(10));
            for (rank, peer) in [(1, 2), (2, 1), (reporter, 9)] {
                operation.board.suspect(Rank(rank), wait(peer));
            }
            let tail = Cell::new(Rank(1), LaneKind::Data(0), Counter::Tail);
            let fault = finish(operation.port(Role::new(Duty::Receiver)).wait(tail, 1)).unwrap_err();
            assert_eq!(
                finish(verdict(&operation, &mut vigil, &fault)),
                (Rank(culprit), Rank(0)),
                "rank {reporter} says so, and {listeners:?} are heard"
            );
        }
    }

    #[test]
    fn alarms_name_operations_by_their_low_bits() {
        for near in [1, 5, 4095, 4096, 5000, 1 << 40] {
            for op in [near, near + 1, near + 7, near - 1] {
                assert_eq!(full_op(Alarm::op_bits(op), near), op);
            }
        }
    }
}
