//! What all roles of one operation share, and the port they see the machine through.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::rc::Rc;

use futures_util::future::try_join;
use futures_util::stream::{FuturesUnordered, StreamExt};
use tracing::Instrument;

use super::board::{Board, Wait};
use crate::error::{Fault, Phase};
use crate::layout::{Kind, Layout, OpHeader, Outbox, RowFormat};
use crate::machine::{Machine, Opening};
use crate::plant::Plant;
use crate::port::{Cell, Counter, LaneId, LaneKind, Nanos, Need, Offset, Port, Role, Span, Tag, Ticket, Units, Work};
use crate::settings::{OutboxSteps, OutboxUse, Rings};
use crate::topology::{Rank, RankSet};

/// One operation of one rank.
#[derive(Debug)]
pub(crate) struct Operation<'a, M> {
    pub(crate) machine: &'a M,
    pub(crate) layout: &'a Layout,
    pub(crate) me: Rank,
    /// The ranks that take no part: whole nodes, where there are several.
    pub(crate) mask: &'a RankSet,
    /// The other ranks of this node, ascending.
    pub(crate) near: &'a [Rank],
    /// The ranks of other nodes on this rail that take part, ascending.
    pub(crate) rail: &'a [Rank],
    /// The ranks that hear in low latency whom this one waits for, and it them; none where that is off.
    pub(crate) listeners: &'a [Rank],
    pub(crate) op: u64,
    /// The first operation of this generation: earlier ones left no trace in its cells.
    pub(crate) first_op: u64,
    pub(crate) generation: u16,
    pub(crate) kind: Kind,
    /// How the memory of its rings is cut, or of its outboxes.
    pub(crate) rings: Rings,
    /// Whether its rows lie in the outbox of their sender until they are pulled.
    pub(crate) pulled: bool,
    /// How much of that the call uses.
    pub(crate) outbox: OutboxUse,
    /// Hash of shape, topology, the call's settings and the dispatch that is replayed.
    pub(crate) settings: u64,
    pub(crate) times: Times,
    pub(crate) board: Rc<Board>,
}

/// How the time allowed to an operation is used.
///
/// ```text
/// started ............ suspicions (3/4) .... deadline (7/8): waits end .. verdicts .. ends (1)
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Times {
    /// When a rank that still waits tells the others what for.
    pub(crate) suspicions: Nanos,
    /// Pause between looks at what has changed since.
    pub(crate) step: Nanos,
    /// When waits end.
    pub(crate) deadline: Nanos,
    /// When the operation has ended everywhere that began it at the same time.
    pub(crate) ends: Nanos,
}

impl Times {
    pub(crate) fn new(started: Nanos, allowed: Nanos) -> Self {
        let part = |sixteenths: u64| {
            let share = allowed.0 / 16 * sixteenths + allowed.0 % 16 * sixteenths / 16;
            Nanos(started.0.saturating_add(share))
        };
        let step = if allowed.0 < 32 { 1 } else { allowed.0 / 32 };
        Self { suspicions: part(12), step: Nanos(step), deadline: part(14), ends: part(16) }
    }
}

/// A role at work.
pub(crate) type RoleFuture<'a> = Pin<Box<dyn Future<Output = Result<(), Fault>> + 'a>>;

impl<'a, M: Machine> Operation<'a, M> {
    /// Opens the port of a role.
    pub(crate) fn port(&self, role: Role) -> Attended<M::Port> {
        self.port_until(role, self.times.deadline)
    }

    /// Opens the port of a role whose waits end at `deadline`.
    pub(crate) fn port_until(&self, role: Role, deadline: Nanos) -> Attended<M::Port> {
        let opening = Opening { role, op: self.op, generation: self.generation, deadline };
        let port = Attended::new(self.machine.port(opening), &self.board, self.op);
        Attended { pulled: self.pulled && self.kind != Kind::Combine, ..port }
    }

    /// The same, whose rows go through outboxes although the communicator places them: as all its ranks have found.
    pub(crate) fn in_outboxes(&self) -> Self {
        let rings = self.layout.settings().outboxes().unwrap_or(self.rings);
        Self { rings, pulled: true, settings: self.settings, times: self.times, board: Rc::clone(&self.board), ..*self }
    }

    /// What this call uses of its outboxes; none where its rows do not lie in some.
    pub(crate) fn outbox_steps(&self) -> Option<OutboxSteps> {
        self.pulled.then(|| self.layout.outbox_steps(self.kind, &self.rings, self.outbox))
    }

    /// The ranks that this one has lanes with: its node, then its rail.
    pub(crate) fn neighbours(&self) -> impl Iterator<Item = Rank> + use<'a, M> {
        self.near.iter().chain(self.rail).copied()
    }

    /// Whether `rank` is one of those.
    pub(crate) fn hears_alarms_of(&self, rank: Rank) -> bool {
        self.neighbours().any(|neighbour| neighbour == rank)
    }

    /// All other ranks that take part, ascending.
    pub(crate) fn others(&self) -> impl Iterator<Item = Rank> + use<'_, 'a, M> {
        let takes_part = |rank: &Rank| *rank != self.me && !self.mask.contains(*rank);
        self.layout.topology().all().filter(takes_part)
    }

    /// The rank of this node through which rows of `source` come: itself, or the one on its rail.
    pub(crate) fn gate_of(&self, source: Rank) -> Rank {
        let topology = self.layout.topology();
        topology.rank_at(topology.node_of(self.me), topology.local_of(source))
    }

    /// The track that carries this node's own rows on `channel` within the node.
    pub(crate) fn own_track(&self, channel: u32) -> u16 {
        self.layout.near_track(self.layout.topology().node_of(self.me), channel)
    }

    /// Where results for `reader` lie in the window of the rank that returns them on `track`; none where rows are not pulled.
    pub(crate) fn outbox_to(&self, reader: Rank, track: u16) -> Option<Outbox> {
        let pulled = self.pulled && self.kind == Kind::Combine;
        pulled.then(|| self.layout.outbox_to(&self.rings, reader, u32::from(track)))
    }

    /// Slots of the staging memory for the ring on `track` that its role uses in turn.
    pub(crate) fn staging_slots(&self, track: u16) -> u32 {
        let slots = self.layout.staging_slots(&self.rings, track);
        let done = self.machine.capabilities().near_puts_done && !self.layout.is_far(track);
        if done { slots.min(1) } else { slots }
    }

    /// Whether roles wait without publishing what is pending: never, unless a test planted that.
    pub(crate) fn is_impolite(&self) -> bool {
        self.plants(Plant::ImpoliteWaiting)
    }

    /// The format of the rows that move: those of a dispatch, or of the results that a combine brings back.
    pub(crate) fn row(&self) -> RowFormat {
        match self.kind {
            Kind::Combine => self.layout.row().results(),
            _ => *self.layout.row(),
        }
    }

    /// The header of a message or ring of this operation.
    pub(crate) const fn header(&self, rows: u32, first: u32) -> OpHeader {
        OpHeader { op: self.op, kind: self.kind as u32, rows, settings: self.settings, first, reserved: 0 }
    }

    /// Refuses a peer's header that belongs to something else.
    pub(crate) fn check(&self, theirs: &OpHeader, peer: Rank) -> Result<(), Fault> {
        let difference = self.header(theirs.rows, theirs.first).compare(theirs);
        difference.map_or(Ok(()), |difference| Err(difference.fault(peer)))
    }

    /// A number that must be the same on both sides.
    pub(crate) fn agree(&self, field: &'static str, mine: u32, theirs: u32, peer: Rank) -> Result<(), Fault> {
        if mine == theirs {
            return Ok(());
        }
        Err(Fault::Mismatch { field, mine: mine.into(), theirs: theirs.into(), peer })
    }

    /// Boxes a role and gives it its span.
    pub(crate) fn role<'b>(&self, role: Role, work: impl Future<Output = Result<(), Fault>> + 'b) -> RoleFuture<'b> {
        let span = tracing::debug_span!(
            "role",
            duty = role.duty.name(),
            peer = role.peer.map(|peer| peer.0),
            track = role.track
        );
        Box::pin(work.instrument(span))
    }

    /// Whether tests planted this fault.
    pub(crate) fn plants(&self, plant: Plant) -> bool {
        self.layout.settings().plants(plant)
    }
}

/// Runs roles until all are done or one fails; the rest stop then.
pub(crate) async fn join(roles: Vec<RoleFuture<'_>>) -> Result<(), Fault> {
    let mut running: FuturesUnordered<_> = roles.into_iter().collect();
    while let Some(done) = running.next().await {
        done?;
    }
    Ok(())
}

/// Runs `work` beside the coordinators that post for it, which end after it; the first failure stops all.
pub(crate) async fn beside<T>(
    coordinators: Vec<RoleFuture<'_>>,
    work: impl Future<Output = Result<T, Fault>>,
) -> Result<T, Fault> {
    if coordinators.is_empty() {
        return work.await;
    }
    try_join(work, join(coordinators)).await.map(|(done, ())| done)
}

/// A port that writes on the operation's board what it waits for.
#[derive(Debug)]
pub(crate) struct Attended<P> {
    inner: P,
    board: Rc<Board>,
    seat: usize,
    op: u64,
    /// Whether rows are pulled that several ranks read: then a head frees memory that others wait for, too.
    pulled: bool,
}

impl<P: Port> Attended<P> {
    /// A port of operation `op` that takes a seat at its board.
    pub(crate) fn new(inner: P, board: &Rc<Board>, op: u64) -> Self {
        Self { inner, board: Rc::clone(board), seat: board.sit(), op, pulled: false }
    }

    /// Waits until `cell` has reached `at_least`.
    pub(crate) async fn wait(&mut self, cell: Cell, at_least: u64) -> Result<(), Fault> {
        self.wait_any(&[Need { cell, at_least }]).await.map(drop)
    }

    /// Runs a verb that posts to `lane` or flushes it. While it pends, this rank waits for the peer at the other end: a
    /// full lane, or a get that never comes, must explain those who wait for this rank. Its phase is a late one: of both
    /// ends of a lane that carries nothing, the one that waits for what it should bring is nearer to the cause. That is what flushes of
    /// gets wait for: rows.
    async fn on_lane<T>(
        &mut self,
        lane: LaneId,
        phase: Phase,
        verb: impl AsyncFnOnce(&mut P) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        let began = self.now();
        let wait = Wait::new(self.op, phase, lane.peer);
        let (board, seat) = (&self.board, self.seat);
        let mut pended = false;
        let result = {
            let mut verb = pin!(verb(&mut self.inner));
            poll_fn(|context| {
                let polled = verb.as_mut().poll(context);
                // The watch role's own posts explain nothing, nor does what roles of this rank tell each other.
                if polled.is_pending() && !pended && lane.kind != LaneKind::Watch && !lane.kind.is_mailbox() {
                    pended = true;
                    board.waits(seat, wait);
                }
                polled
            })
            .await
        };
        if pended && result.is_ok() {
            self.board.goes_on(self.seat, self.now() - began);
        }
        result
    }

    /// Whether `peer` has said that it needs nothing more in this operation, and has given all: it may be gone.
    pub(crate) fn is_done(&self, peer: Rank) -> bool {
        self.inner.peek(Cell::new(peer, LaneKind::Control, Counter::Done)) >= self.op
    }

    /// Forgives a verb that told something to a peer which is gone, if that is done with this operation: the credit for
    /// its last rows, say, that it did not wait for.
    fn unless_done(&self, told: Result<(), Fault>) -> Result<(), Fault> {
        match told {
            Err(fault) if fault.gone().is_some_and(|peer| self.is_done(peer)) => Ok(()),
            told => told,
        }
    }

    /// Puts this wait's phase right: `done` of the running operation means that offered rows have been pulled, and a head that rows of
    /// several readers have been.
    fn phase(&self, need: &Need) -> Phase {
        if need.cell.counter == Counter::Head && self.pulled {
            Phase::Outbox
        } else if need.cell.counter == Counter::Done && need.at_least == self.op {
            Phase::Pulled
        } else {
            need.cell.counter.phase()
        }
    }
}

impl<P: Port> Port for Attended<P> {
    fn now(&self) -> Nanos {
        self.inner.now()
    }

    fn peek(&self, cell: Cell) -> u64 {
        self.inner.peek(cell)
    }

    async fn wait_any(&mut self, needs: &[Need]) -> Result<usize, Fault> {
        let Some(unmet) = needs.first() else { return self.inner.wait_any(needs).await };
        let began = self.now();
        // The watch role waits for alarms all the time: that explains nothing. Who waits for a role of its own rank is
        // explained by what that one waits for.
        let own = unmet.cell.lane.is_mailbox();
        if unmet.cell.counter != Counter::Alarm && !own {
            let (phase, peer) = (self.phase(unmet), unmet.cell.writer);
            self.board.waits(self.seat, Wait::new(self.op, phase, peer));
        }
        match self.inner.wait_any(needs).await {
            Ok(met) => {
                self.board.goes_on(self.seat, self.now() - began);
                Ok(met)
            }
            Err(Fault::Timeout { phase, peer, lane, seen, awaited, waited }) if own => {
                let cause = self.board.foremost().map_or((phase, peer), |wait| (wait.phase, wait.peer));
                Err(Fault::Timeout { phase: cause.0, peer: cause.1, lane, seen, awaited, waited })
            }
            // The wait stays on the board: a verdict is about to be made of it.
            Err(Fault::Timeout { peer, lane, seen, awaited, waited, .. }) => {
                let need = needs.iter().find(|need| need.cell.writer == peer).unwrap_or(unmet);
                Err(Fault::Timeout { phase: self.phase(need), peer, lane, seen, awaited, waited })
            }
            Err(fault) => Err(fault),
        }
    }

    async fn put(&mut self, lane: LaneId, from: Span, to: Offset) -> Result<Ticket, Fault> {
        self.on_lane(lane, Phase::Credit, async |port: &mut P| port.put(lane, from, to).await).await
    }

    async fn get(&mut self, lane: LaneId, from: Span, to: Offset) -> Result<Ticket, Fault> {
        self.on_lane(lane, Phase::Credit, async |port: &mut P| port.get(lane, from, to).await).await
    }

    async fn publish(&mut self, lane: LaneId, cell: Cell, value: u64) -> Result<(), Fault> {
        let told = self.on_lane(lane, Phase::Credit, async |port: &mut P| port.publish(lane, cell, value).await).await;
        self.unless_done(told)
    }

    async fn flush(&mut self, lane: LaneId, upto: Ticket) -> Result<(), Fault> {
        // Gets are posted to lanes of credit, and nothing else that is flushed. What they bring is needed, whatever their peer has said.
        let gets = matches!(lane.kind, LaneKind::Credit(_));
        let phase = if gets { Phase::Rows } else { Phase::Credit };
        let flushed = self.on_lane(lane, phase, async |port: &mut P| port.flush(lane, upto).await).await;
        if gets { flushed } else { self.unless_done(flushed) }
    }

    async fn put_units(&mut self, lane: LaneId, from: Span, to: Offset, tag: Tag) -> Result<Ticket, Fault> {
        self.on_lane(lane, Phase::Credit, async |port: &mut P| port.put_units(lane, from, to, tag).await).await
    }

    fn poll_units(&self, units: &Units, into: &mut [u8]) -> Result<bool, Fault> {
        self.inner.poll_units(units, into)
    }

    async fn wait_units(&mut self, units: &[Units], or: &[Need]) -> Result<usize, Fault> {
        let Some(Units { lane: LaneId { peer, kind }, .. }) = units.first() else { return self.wait_any(or).await };
        let began = self.now();
        self.board.waits(self.seat, Wait::new(self.op, kind.phase(), *peer));
        let met = self.inner.wait_units(units, or).await?;
        self.board.goes_on(self.seat, self.now() - began);
        Ok(met)
    }

    fn read(&self, from: Offset, into: &mut [u8]) -> Result<(), Fault> {
        self.inner.read(from, into)
    }

    fn write(&mut self, to: Offset, bytes: &[u8]) -> Result<(), Fault> {
        self.inner.write(to, bytes)
    }

    fn charge(&self, work: Work) {
        self.inner.charge(work);
    }

    fn only_posts(&mut self, only: bool) {
        self.inner.only_posts(only);
    }
}

#[cfg(test)]
mod tests {
    use std::task::Poll;

    use futures_util::FutureExt;

    use super::*;
    use crate::machine::loopback::{Loopback, finish, opening};
    use crate::machine::{Decorate as _, FaultPlan, Trigger, Trouble, VerbKind};
    use crate::port::Mail;

    /// Who waits for a role of its own rank to the end blames whom that one waits for, and not its own rank.
    #[test]
    fn a_wait_for_an_own_role_ends_with_what_that_one_waits_for() {
        let (board, me, peer) = (Rc::new(Board::new(4)), Rank(0), Rank(3));
        let mut coordinator = Attended::new(Loopback::new(), &board, 7);
        let mail = Cell::new(me, LaneKind::Mailbox(Mail::Sent, 0), Counter::Head);
        let ended = |port: &mut Attended<Loopback>| match finish(port.wait(mail, 1)) {
            Err(Fault::Timeout { phase, peer, .. }) => (phase, peer),
            other => panic!("{other:?}"),
        };
        assert_eq!(ended(&mut coordinator).1, me, "nobody waits for anything");
        let mut sender = Attended::new(Loopback::new(), &board, 7);
        let tail = Cell::new(peer, LaneKind::Data(0), Counter::Tail);
        assert!(finish(sender.wait(tail, 1)).is_err());
        assert_eq!(ended(&mut coordinator), (Phase::Rows, peer));
        // And waits of its own are on the board, where mailboxes are not.
        assert_eq!(board.foremost().map(|wait| (wait.phase, wait.peer)), Some((Phase::Rows, peer)));
    }

    /// `done` of the running operation says that offered rows were pulled, and that of an earlier one that its bank is free.
    #[test]
    fn a_wait_has_the_phase_of_what_it_waits_for() {
        let board = Rc::new(Board::new(4));
        let phase = |pulled, counter, at_least| {
            let port = Attended { pulled, ..Attended::new(Loopback::new(), &board, 7) };
            port.phase(&Need { cell: Cell::new(Rank(3), LaneKind::Control, counter), at_least })
        };
        for (pulled, head) in [(false, Phase::Credit), (true, Phase::Outbox)] {
            assert_eq!(phase(pulled, Counter::Head, 7), head);
            assert_eq!(phase(pulled, Counter::Tail, 7), Phase::Rows);
            assert_eq!(phase(pulled, Counter::Done, 7), Phase::Pulled);
            assert_eq!(phase(pulled, Counter::Done, 5), Phase::Bank);
        }
    }

    /// A full lane explains those who wait for this rank, to the end of the operation where the verb fails. Posts of the watch role explain nothing,
    /// nor does what roles of this rank tell each other.
    #[test]
    fn a_verb_that_pends_is_on_the_board_until_it_ends_well() {
        let (peer, gone) = (Rank(3), Fault::PeerGone { peer: Rank(3), phase: Phase::Credit });
        let lanes = [(LaneKind::Data(0), true), (LaneKind::Watch, false), (LaneKind::Mailbox(Mail::Sent, 0), false)];
        for ((kind, explains), end) in lanes.into_iter().flat_map(|lane| [(lane, Ok(())), (lane, Err(gone))]) {
            let board = Rc::new(Board::new(4));
            let mut port = Attended::new(Loopback::new(), &board, 7);
            let mut pended = false;
            let once = poll_fn(|_| if std::mem::replace(&mut pended, true) { Poll::Ready(end) } else { Poll::Pending });
            let mut verb = pin!(port.on_lane(LaneId { peer, kind }, Phase::Credit, async |_| once.await));
            let waits = || board.foremost().map(|wait| (wait.phase, wait.peer));
            let wait = explains.then_some((Phase::Credit, peer));
            assert_eq!((verb.as_mut().now_or_never(), waits()), (None, wait), "{kind:?}");
            assert_eq!((verb.as_mut().now_or_never(), waits()), (Some(end), wait.filter(|_| end.is_err())), "{kind:?}");
        }
    }

    /// Of several waits it is the one whose time is up that has the phase.
    #[test]
    fn a_wait_for_one_of_several_ends_with_the_phase_of_that_one() {
        let mut port = Attended::new(Loopback::new(), &Rc::new(Board::new(4)), 7);
        let tail = Need { cell: Cell::new(Rank(3), LaneKind::Data(0), Counter::Tail), at_least: 1 };
        let head = Need { cell: Cell::new(Rank(2), LaneKind::Credit(0), Counter::Head), at_least: 1 };
        for (needs, phase, peer) in [([tail, head], Phase::Rows, Rank(3)), ([head, tail], Phase::Credit, Rank(2))] {
            let ended = finish(port.wait_any(&needs));
            let told = matches!(ended, Err(Fault::Timeout { phase: of, peer: by, .. }) if (of, by) == (phase, peer));
            assert!(told, "{ended:?}");
        }
    }

    /// Whatever its other roles wait for, a rank that waited for another in vain says so.
    #[test]
    fn a_wait_for_another_rank_ends_with_itself() {
        let board = Rc::new(Board::new(4));
        let awaited = [(Rank(3), LaneKind::Data(0), Counter::Tail), (Rank(2), LaneKind::Credit(0), Counter::Head)];
        let mut ports = awaited.map(|of| (of, Attended::new(Loopback::new(), &board, 7)));
        for _ in 0..2 {
            for ((peer, kind, counter), port) in &mut ports {
                let Err(Fault::Timeout { phase, peer: blamed, .. }) =
                    finish(port.wait(Cell::new(*peer, *kind, *counter), 1))
                else {
                    panic!("nobody ends it")
                };
                assert_eq!((phase, blamed), (counter.phase(), *peer));
            }
        }
    }

    /// Who has said that it is done may go, and what was told to it need not have come there. What was pulled from it must have come here.
    #[test]
    fn a_peer_that_is_done_and_gone_is_forgiven_what_it_was_told_and_not_what_it_gives() {
        let (board, peer, gone) =
            (Rc::new(Board::new(4)), Rank(3), Fault::PeerGone { peer: Rank(3), phase: Phase::Rows });
        for (kind, forgiven) in [(LaneKind::Control, true), (LaneKind::Data(0), true), (LaneKind::Credit(0), false)] {
            let mut inner = Loopback::new();
            let control = LaneId { peer, kind: LaneKind::Control };
            let done = Cell::new(peer, control.kind, Counter::Done);
            finish(inner.publish(control, done, 7)).unwrap();
            let plan = FaultPlan::new().with(Trigger::kind(VerbKind::Flush), 1, Trouble::Fail(gone));
            let mut port = Attended::new(plan.decorate(inner, Rank(0), &opening()), &board, 7);
            let flushed = finish(port.flush(LaneId { peer, kind }, Ticket(1)));
            assert_eq!(flushed, if forgiven { Ok(()) } else { Err(gone) }, "{kind:?}");
            assert_eq!(plan.struck(), 1);
        }
    }
}
