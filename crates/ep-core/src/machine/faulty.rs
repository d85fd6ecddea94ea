//! A port that goes wrong on purpose.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use super::{Decorate, LaneClass, Opening, VerbKind};
use crate::error::{Fault, Phase};
use crate::layout::VALUE_BITS;
use crate::port::{Cell, Counter, LaneId, LaneKind, Nanos, Need, Offset, Port, Span, Tag, Ticket, Units, Work};
use crate::topology::Rank;

/// What goes wrong with a verb.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Trouble {
    /// The verb fails with this fault and does nothing. Comes to all verbs but peeks.
    Fail(Fault),
    /// From this verb on, puts, gets and publishes on its lane are accepted and vanish. Comes to these three.
    LoseLane,
    /// The verb is accepted and vanishes. Comes to puts, gets and publishes.
    Lose,
    /// The verb does nothing and ends at the port's deadline with [`Fault::Timeout`]. Comes to verbs that may wait: all
    /// but peeks, reads and writes.
    Stall,
    /// A flush returns at once.
    SkipFlush,
}

impl Trouble {
    /// Whether it can come to verbs of this kind.
    const fn comes_to(self, kind: VerbKind) -> bool {
        match self {
            Self::Fail(_) => !matches!(kind, VerbKind::Peek),
            Self::LoseLane | Self::Lose => matches!(kind, VerbKind::Put | VerbKind::Get | VerbKind::Publish),
            Self::Stall => !matches!(kind, VerbKind::Peek | VerbKind::Read | VerbKind::Write),
            Self::SkipFlush => matches!(kind, VerbKind::Flush),
        }
    }
}

/// Which verbs a trouble counts. What is not set matches everything.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[must_use]
pub struct Trigger {
    kind: Option<VerbKind>,
    lane: Option<LaneClass>,
    peer: Option<Rank>,
}

impl Trigger {
    /// Any verb.
    pub const fn any() -> Self {
        Self { kind: None, lane: None, peer: None }
    }

    /// Verbs of one kind.
    pub const fn kind(kind: VerbKind) -> Self {
        Self { kind: Some(kind), ..Self::any() }
    }

    /// Only verbs on lanes of this class. A wait is on the lane that its first cell is written through.
    pub const fn on_lane(mut self, class: LaneClass) -> Self {
        self.lane = Some(class);
        self
    }

    /// Only verbs that concern this peer: at the other end of the lane.
    pub const fn with_peer(mut self, peer: Rank) -> Self {
        self.peer = Some(peer);
        self
    }

    fn matches(&self, kind: VerbKind, lane: Option<LaneId>) -> bool {
        self.kind.is_none_or(|wanted| wanted == kind)
            && self.lane.is_none_or(|wanted| lane.is_some_and(|lane| LaneClass::of(lane.kind) == wanted))
            && self.peer.is_none_or(|wanted| lane.is_some_and(|lane| lane.peer == wanted))
    }
}

#[derive(Clone, Copy, Debug)]
struct Rule {
    trigger: Trigger,
    nth: u64,
    trouble: Trouble,
    seen: u64,
}

#[derive(Clone, Debug, Default)]
struct State {
    rules: Vec<Rule>,
    lost: BTreeSet<LaneId>,
    struck: u64,
}

/// Which verbs of a rank go wrong, and how. Clones share their counts: verbs are counted over all ports of the plan.
///
/// As a [`Decorate`] it wraps every port of a machine; give each rank a plan of its own.
#[derive(Clone, Debug, Default)]
pub struct FaultPlan {
    state: Arc<Mutex<State>>,
}

impl FaultPlan {
    /// Nothing goes wrong.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds: `trouble` comes to the `nth` verb, counted from 1, that matches `trigger` and that it can come to. Of
    /// several troubles for one verb, the first added comes; all count the verb.
    #[must_use]
    pub fn with(self, trigger: Trigger, nth: u64, trouble: Trouble) -> Self {
        self.locked(|state| state.rules.push(Rule { trigger, nth, trouble, seen: 0 }));
        self
    }

    /// Troubles that have come so far: a test whose trouble never came proves nothing.
    pub fn struck(&self) -> u64 {
        self.locked(|state| state.struck)
    }

    fn locked<T>(&self, f: impl FnOnce(&mut State) -> T) -> T {
        f(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Counts a verb and says what goes wrong with it. Allocates only when a lane is lost.
    fn strike(&self, kind: VerbKind, lane: Option<LaneId>) -> Option<Trouble> {
        self.locked(|state| {
            let mut trouble = None;
            let concerned = |rule: &&mut Rule| rule.trouble.comes_to(kind) && rule.trigger.matches(kind, lane);
            for rule in state.rules.iter_mut().filter(concerned) {
                rule.seen += 1;
                if rule.seen == rule.nth && trouble.is_none() {
                    trouble = Some(rule.trouble);
                }
            }
            state.struck += u64::from(trouble.is_some());
            if trouble == Some(Trouble::LoseLane) {
                state.lost.extend(lane);
                return Some(Trouble::Lose);
            }
            let lost = || Trouble::Lose.comes_to(kind) && lane.is_some_and(|lane| state.lost.contains(&lane));
            trouble.or_else(|| lost().then_some(Trouble::Lose))
        })
    }
}

impl Decorate for FaultPlan {
    type Port<P: Port> = Faulty<P>;

    fn decorate<P: Port>(&self, port: P, _rank: Rank, _opening: &Opening) -> Faulty<P> {
        Faulty::new(port, self.clone())
    }
}

/// A port whose verbs go wrong as a [`FaultPlan`] says. It keeps the contract otherwise.
#[derive(Debug)]
pub struct Faulty<P> {
    port: P,
    plan: FaultPlan,
}

/// No cell is ever published with this value: a wait for it lasts to the deadline.
const NEVER: u64 = (1 << VALUE_BITS) - 1;

impl<P: Port> Faulty<P> {
    /// `port`, with the troubles of `plan`.
    pub const fn new(port: P, plan: FaultPlan) -> Self {
        Self { port, plan }
    }

    /// Waits for the port's deadline, or until the peer is known to be gone.
    async fn stall(&mut self, need: Need, phase: Phase) -> Fault {
        let Need { cell, at_least: awaited } = need;
        let started = self.port.now();
        match self.port.wait_any(&[Need { cell, at_least: NEVER }]).await {
            Ok(_) | Err(Fault::Timeout { .. }) => Fault::Timeout {
                phase,
                peer: cell.writer,
                lane: LaneId { peer: cell.writer, kind: cell.lane },
                seen: self.port.peek(cell),
                awaited,
                waited: self.port.now() - started,
            },
            Err(other) => other,
        }
    }

    /// Stalls a verb that posts to `lane`, as if the lane stayed full.
    async fn stall_lane(&mut self, lane: LaneId) -> Fault {
        let cell = Cell::new(lane.peer, lane.kind, Counter::Probe);
        self.stall(Need { cell, at_least: self.port.peek(cell) + 1 }, full_phase(lane.kind)).await
    }
}

/// What a rank waits for whose lane stays full: what the peer must do before the lane drains.
const fn full_phase(kind: LaneKind) -> Phase {
    match kind {
        LaneKind::Watch => Phase::Alarm,
        LaneKind::Control => Phase::Counts,
        LaneKind::Data(_) | LaneKind::LowRows | LaneKind::LowRow(_) | LaneKind::Mailbox(..) => Phase::Credit,
        LaneKind::LowDone => Phase::Bank,
        LaneKind::Credit(_) => Phase::Rows,
    }
}

const fn lane_of(cell: Cell) -> LaneId {
    LaneId { peer: cell.writer, kind: cell.lane }
}

impl<P: Port> Port for Faulty<P> {
    fn now(&self) -> Nanos {
        self.port.now()
    }

    fn peek(&self, cell: Cell) -> u64 {
        self.port.peek(cell)
    }

    async fn wait_any(&mut self, needs: &[Need]) -> Result<usize, Fault> {
        let lane = needs.first().map(|need| lane_of(need.cell));
        match (self.plan.strike(VerbKind::Wait, lane), needs.first()) {
            (Some(Trouble::Fail(fault)), _) => Err(fault),
            (Some(Trouble::Stall), Some(&need)) => Err(self.stall(need, need.cell.counter.phase()).await),
            _ => self.port.wait_any(needs).await,
        }
    }

    async fn put(&mut self, lane: LaneId, from: Span, to: Offset) -> Result<Ticket, Fault> {
        match self.plan.strike(VerbKind::Put, Some(lane)) {
            Some(Trouble::Fail(fault)) => Err(fault),
            Some(Trouble::Stall) => Err(self.stall_lane(lane).await),
            // Length zero moves nothing (F8) and has a ticket that a later flush accepts.
            Some(Trouble::Lose) => self.port.put(lane, from.offset.span(0), to).await,
            _ => self.port.put(lane, from, to).await,
        }
    }

    async fn get(&mut self, lane: LaneId, from: Span, to: Offset) -> Result<Ticket, Fault> {
        match self.plan.strike(VerbKind::Get, Some(lane)) {
            Some(Trouble::Fail(fault)) => Err(fault),
            Some(Trouble::Stall) => Err(self.stall_lane(lane).await),
            Some(Trouble::Lose) => self.port.get(lane, from.offset.span(0), to).await,
            _ => self.port.get(lane, from, to).await,
        }
    }

    async fn publish(&mut self, lane: LaneId, cell: Cell, value: u64) -> Result<(), Fault> {
        match self.plan.strike(VerbKind::Publish, Some(lane)) {
            Some(Trouble::Fail(fault)) => Err(fault),
            Some(Trouble::Stall) => Err(self.stall_lane(lane).await),
            Some(Trouble::Lose) => Ok(()),
            _ => self.port.publish(lane, cell, value).await,
        }
    }

    async fn flush(&mut self, lane: LaneId, upto: Ticket) -> Result<(), Fault> {
        match self.plan.strike(VerbKind::Flush, Some(lane)) {
            Some(Trouble::Fail(fault)) => Err(fault),
            Some(Trouble::Stall) => Err(self.stall_lane(lane).await),
            Some(Trouble::SkipFlush) => Ok(()),
            _ => self.port.flush(lane, upto).await,
        }
    }

    async fn put_units(&mut self, lane: LaneId, from: Span, to: Offset, tag: Tag) -> Result<Ticket, Fault> {
        match self.plan.strike(VerbKind::Put, Some(lane)) {
            Some(Trouble::Fail(fault)) => Err(fault),
            Some(Trouble::Stall) => Err(self.stall_lane(lane).await),
            Some(Trouble::Lose) => self.port.put_units(lane, from.offset.span(0), to, tag).await,
            _ => self.port.put_units(lane, from, to, tag).await,
        }
    }

    fn poll_units(&self, units: &Units, into: &mut [u8]) -> Result<bool, Fault> {
        self.port.poll_units(units, into)
    }

    async fn wait_units(&mut self, units: &[Units], or: &[Need]) -> Result<usize, Fault> {
        let lane = units.first().map(|units| units.lane).or_else(|| or.first().map(|need| lane_of(need.cell)));
        match (self.plan.strike(VerbKind::Wait, lane), lane) {
            (Some(Trouble::Fail(fault)), _) => Err(fault),
            (Some(Trouble::Stall), Some(LaneId { peer, kind })) => {
                let cell = Cell::new(peer, kind, Counter::Probe);
                Err(self.stall(Need { cell, at_least: self.port.peek(cell) + 1 }, kind.phase()).await)
            }
            _ => self.port.wait_units(units, or).await,
        }
    }

    fn read(&self, from: Offset, into: &mut [u8]) -> Result<(), Fault> {
        match self.plan.strike(VerbKind::Read, None) {
            Some(Trouble::Fail(fault)) => Err(fault),
            _ => self.port.read(from, into),
        }
    }

    fn write(&mut self, to: Offset, bytes: &[u8]) -> Result<(), Fault> {
        match self.plan.strike(VerbKind::Write, None) {
            Some(Trouble::Fail(fault)) => Err(fault),
            _ => self.port.write(to, bytes),
        }
    }

    fn charge(&self, work: Work) {
        self.port.charge(work);
    }

    fn only_posts(&mut self, only: bool) {
        self.port.only_posts(only);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::loopback::{DEADLINE, Loopback, PROBE, PROBE_LANE, finish};

    const CREDIT: LaneId = LaneId { peer: Rank(0), kind: LaneKind::Credit(0) };
    const GONE: Fault = Fault::PeerGone { peer: Rank(0), phase: Phase::Probe };

    fn faulty(trigger: Trigger, nth: u64, trouble: Trouble) -> (Faulty<Loopback>, Loopback, FaultPlan) {
        let (port, plan) = (Loopback::new(), FaultPlan::new().with(trigger, nth, trouble));
        (Faulty::new(port.clone(), plan.clone()), port, plan)
    }

    #[test]
    fn only_the_nth_matching_verb_fails() {
        let trigger = Trigger::kind(VerbKind::Put).on_lane(LaneClass::Data).with_peer(Rank(0));
        let (mut port, _, plan) = faulty(trigger, 2, Trouble::Fail(GONE));
        let span = Offset(0).span(8);
        assert!(finish(port.put(PROBE_LANE, span, Offset(64))).is_ok());
        assert!(finish(port.put(CREDIT, span, Offset(64))).is_ok(), "another class of lanes");
        assert!(finish(port.publish(PROBE_LANE, PROBE, 1)).is_ok(), "another kind of verb");
        assert_eq!(plan.struck(), 0);
        assert_eq!(finish(port.put(PROBE_LANE, span, Offset(64))), Err(GONE));
        assert!(finish(port.put(PROBE_LANE, span, Offset(64))).is_ok(), "and none after it");
        assert_eq!(plan.struck(), 1);
    }

    #[test]
    fn a_peer_that_is_not_there_is_never_struck() {
        let (mut port, _, plan) = faulty(Trigger::any().with_peer(Rank(1)), 1, Trouble::Fail(GONE));
        assert!(finish(port.put(PROBE_LANE, Offset(0).span(8), Offset(64))).is_ok());
        assert!(port.write(Offset(0), &[1]).is_ok());
        assert_eq!(plan.struck(), 0);
    }

    #[test]
    fn a_lost_lane_swallows_everything_and_still_flushes() {
        let (mut port, inner, _) = faulty(Trigger::kind(VerbKind::Put), 2, Trouble::LoseLane);
        port.write(Offset(0), &[1, 2, 3, 4]).unwrap();
        finish(port.put(PROBE_LANE, Offset(0).span(1), Offset(10))).unwrap();
        let lost = finish(port.put(PROBE_LANE, Offset(1).span(1), Offset(11))).unwrap();
        finish(port.get(PROBE_LANE, Offset(2).span(1), Offset(12))).unwrap();
        finish(port.publish(PROBE_LANE, PROBE, 5)).unwrap();
        finish(port.put(CREDIT, Offset(3).span(1), Offset(13))).unwrap();
        finish(port.flush(PROBE_LANE, lost)).unwrap();
        let mut bytes = [9; 4];
        port.read(Offset(10), &mut bytes).unwrap();
        assert_eq!(bytes, [1, 0, 0, 4], "before the loss, lost, lost, another lane");
        assert_eq!((port.peek(PROBE), inner.flushed()), (0, Some(lost)));
    }

    #[test]
    fn one_lost_verb_leaves_the_lane() {
        let (mut port, _, _) = faulty(Trigger::kind(VerbKind::Publish), 1, Trouble::Lose);
        finish(port.publish(PROBE_LANE, PROBE, 1)).unwrap();
        assert_eq!(port.peek(PROBE), 0);
        finish(port.publish(PROBE_LANE, PROBE, 2)).unwrap();
        assert_eq!(port.peek(PROBE), 2);
    }

    #[test]
    fn a_stalled_verb_ends_at_the_deadline_and_names_what_it_waited_for() {
        let (mut port, _, _) = faulty(Trigger::kind(VerbKind::Wait), 1, Trouble::Stall);
        finish(port.publish(PROBE_LANE, PROBE, 3)).unwrap();
        let fault = finish(port.wait_any(&[Need { cell: PROBE, at_least: 3 }])).unwrap_err();
        let (phase, lane) = (Phase::Probe, PROBE_LANE);
        let expected = Fault::Timeout { phase, peer: Rank(0), lane, seen: 3, awaited: 3, waited: DEADLINE };
        assert_eq!(fault, expected);

        let (mut port, _, _) = faulty(Trigger::kind(VerbKind::Put), 1, Trouble::Stall);
        let fault = finish(port.put(PROBE_LANE, Offset(0).span(8), Offset(64))).unwrap_err();
        assert!(matches!(fault, Fault::Timeout { phase: Phase::Credit, waited: DEADLINE, .. }), "{fault}");
        assert_eq!(port.now(), DEADLINE);
    }

    #[test]
    fn a_skipped_flush_never_reaches_the_port() {
        let (mut port, inner, _) = faulty(Trigger::kind(VerbKind::Flush), 1, Trouble::SkipFlush);
        finish(port.flush(PROBE_LANE, Ticket(1))).unwrap();
        assert_eq!(inner.flushed(), None);
        finish(port.flush(PROBE_LANE, Ticket(2))).unwrap();
        assert_eq!(inner.flushed(), Some(Ticket(2)));
    }
}
