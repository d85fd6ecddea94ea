//! What a rank's ports and its machine share.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::task::Poll;
use std::time::Instant;

use ep_bootstrap::Peers;
use ep_core::port::{Cell, Counter, LaneId, Offset, Scope, Span, Ticket};
use ep_core::topology::Reach;
use ep_core::transport::Lanes;
use ep_core::{Fault, Layout, Nanos, Rank, layout};

use crate::far::{Far, Verb};
use crate::memory::Mapping;
use crate::node::Node;
use crate::pace;

/// Polls of an unmet wait between two looks at the clock, where every rank has a core: a poll is cheaper than a look, which lets
/// no load overtake it either.
const POLLS: u32 = 32;
/// Time between two looks at who is gone.
const LOOK: Nanos = Nanos::from_millis(1);

/// Of an operation's deadline: how long lanes between nodes may take to get rid of what they hold before they are cut. Verdicts
/// are spread in the last eighth.
const DRAIN: u64 = 32;

/// Of an operation's deadline: how long a wait lasts before the transport is asked to find out whether the peer can be reached, and then
/// again. Far longer than waits last where all goes well, and far shorter than a deadline.
const PROBE: u64 = 32;

/// A rank's place at its node. Counters here have one writer, the rank's thread, and are atomic for the compiler's sake.
#[derive(Debug)]
pub(crate) struct Seat<L> {
    pub(crate) me: Rank,
    pub(crate) layout: Layout,
    pub(crate) node: Arc<Node>,
    pub(crate) peers: Peers,
    /// Lanes to other nodes, where there are any.
    pub(crate) far: Option<Far<L>>,
    /// `[ranks]`: how each is reached.
    reach: Box<[Reach]>,
    /// When the clock began.
    origin: Instant,
    counters: Counters,
}

/// Written with every verb: not on lines that other ranks read, whatever lies beside a seat.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Counters {
    /// When to look next at who is gone.
    look_at: AtomicU64,
    /// The last ticket given out near: tickets of a lane ascend when those of all lanes do.
    tickets: AtomicU64,
}

/// A wait, or a verb that is tried again, under way.
#[derive(Debug, Default)]
pub(crate) struct Waiting {
    /// Times that it could not end.
    polls: u32,
    /// When the clock was first looked at.
    since: Option<Nanos>,
    /// After what time the transport was last asked about the peers.
    probed: Nanos,
}

/// What a look at the clock told.
pub(crate) struct Glance {
    pub(crate) now: Nanos,
    pub(crate) waited: Nanos,
}

/// What a verb does on a lane.
pub(crate) enum Posted<T> {
    /// It is near, and done.
    Done(T),
    /// It is far: this verb of the transport does it.
    Far(Verb),
}

impl<L: Lanes> Seat<L> {
    pub(crate) fn new(
        me: Rank,
        layout: Layout,
        node: Arc<Node>,
        peers: Peers,
        far: Option<Far<L>>,
        origin: Instant,
    ) -> Self {
        let topology = layout.topology();
        let reach = topology.all().map(|rank| topology.reach(me, rank)).collect();
        Self { me, layout, node, peers, far, reach, origin, counters: Counters::default() }
    }

    pub(crate) fn now(&self) -> Nanos {
        Nanos(u64::try_from(self.origin.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }

    /// The own window.
    #[inline]
    pub(crate) fn own(&self) -> &Mapping {
        self.node.own(self.me)
    }

    #[inline]
    fn reach(&self, rank: Rank) -> Reach {
        self.reach.get(rank.index()).copied().unwrap_or(Reach::Far)
    }

    /// The window at the other end of a near lane, for a verb that this rank may do on it; none at that of a far one.
    #[inline]
    fn near(&self, verb: &'static str, lane: LaneId) -> Result<Option<&Mapping>, Fault> {
        let refused = Fault::NotOffered { verb, lane };
        if !self.layout.has_lane(self.me, lane) {
            return Err(refused);
        }
        match self.reach(lane.peer) {
            Reach::Far if self.far.is_some() => Ok(None),
            Reach::Far => Err(refused),
            Reach::Near | Reach::Own => self.node.window(lane.peer).map(Some).ok_or(refused),
        }
    }

    #[inline]
    fn check_presence(&self, lane: LaneId) -> Result<(), Fault> {
        if self.node.roll().is_gone(lane.peer) {
            let phase = lane.kind.phase();
            return Err(Fault::PeerGone { peer: lane.peer, phase });
        }
        Ok(())
    }

    /// Copies into the peer's window: near, it is done on return, so that a flush has nothing to wait for (F5).
    #[inline]
    pub(crate) fn put(&self, lane: LaneId, from: Span, to: Offset) -> Result<Posted<Ticket>, Fault> {
        match self.near("put", lane)? {
            Some(peer) => Ok(Posted::Done(self.transfer(lane, (self.own(), from), (peer, to))?)),
            None => {
                if from.len > 0 {
                    self.check_transfer(lane, from, to)?;
                }
                Ok(Posted::Far(Verb::Put { from, to }))
            }
        }
    }

    /// Copies out of a near peer's window.
    #[inline]
    pub(crate) fn get(&self, lane: LaneId, from: Span, to: Offset) -> Result<Ticket, Fault> {
        let peer = self.near("get", lane)?.ok_or(Fault::NotOffered { verb: "get", lane })?;
        let ticket = self.transfer(lane, (peer, from), (self.own(), to));
        fence(Ordering::Acquire);
        ticket
    }

    fn check_transfer(&self, lane: LaneId, source: Span, sink: Offset) -> Result<(), Fault> {
        let window = self.layout.window_bytes();
        source.within(window)?;
        sink.span(source.len).within(window)?;
        self.check_presence(lane)
    }

    #[inline]
    fn transfer(&self, lane: LaneId, source: (&Mapping, Span), sink: (&Mapping, Offset)) -> Result<Ticket, Fault> {
        let last = self.counters.tickets.load(Ordering::Relaxed);
        if source.1.len == 0 {
            return Ok(Ticket(last));
        }
        if self.node.roll().is_gone(lane.peer) {
            self.check_transfer(lane, source.1, sink.1)?;
        }
        // Refuses ranges outside.
        source.0.copy(source.1, sink.0, sink.1)?;
        self.counters.tickets.store(last + 1, Ordering::Relaxed);
        Ok(Ticket(last + 1))
    }

    /// Raises a cell at the peer, after all that this rank did before on the lane (F3): near by a release store.
    #[inline]
    pub(crate) fn publish(&self, lane: LaneId, cell: Cell, generation: u16, value: u64) -> Result<Posted<()>, Fault> {
        let peer = self.near("publish", lane)?;
        let refused = Fault::NotOffered { verb: "publish", lane };
        let fits = cell.writer == self.me
            && cell.lane == lane.kind
            && value >> layout::VALUE_BITS == 0
            && self.layout.has_cell(cell);
        if !fits {
            return Err(refused);
        }
        let (at, bits) = (self.layout.cell(cell, generation), layout::stamp(generation, value));
        let Some(peer) = peer else {
            self.check_presence(lane)?;
            return Ok(Posted::Far(Verb::Raise { at, bits }));
        };
        let place = peer.cell(at).ok_or(refused)?;
        self.check_presence(lane)?;
        // This rank is the cell's one writer (F4).
        debug_assert!(place.load(Ordering::Relaxed) <= bits, "{cell:?} of rank {} would fall", lane.peer);
        place.store(bits, Ordering::Release);
        if cell.counter == Counter::Alarm {
            // What is written after an alarm is seen after it: whom it gives up may be getting that.
            fence(Ordering::SeqCst);
        }
        Ok(Posted::Done(()))
    }

    /// Near, a flush waits for nothing: puts and gets are done when they return.
    #[inline]
    pub(crate) fn flush(&self, lane: LaneId, upto: Ticket) -> Result<Posted<()>, Fault> {
        Ok(match self.near("flush", lane)? {
            Some(_) => Posted::Done(()),
            None => Posted::Far(Verb::Flush { upto }),
        })
    }

    /// Tries a verb on a far lane; none when it cannot go on now.
    pub(crate) fn attempt(&self, lane: LaneId, verb: Verb) -> Result<Option<Ticket>, Fault> {
        let Some(far) = &self.far else { return Err(Fault::NotOffered { verb: "a far verb", lane }) };
        match far.attempt(far.queues.queue(&self.layout, self.me, lane), verb)? {
            None => self.check_presence(lane).map(|()| None),
            done => Ok(done),
        }
    }

    /// Lets the transport go on.
    pub(crate) fn progress(&self) {
        if let Some(far) = &self.far {
            far.progress();
        }
    }

    /// Why nothing comes from `peer` any more, by what the transport knows.
    pub(crate) fn broken(&self, peer: Rank) -> Option<Fault> {
        let far = self.far.as_ref()?;
        if self.reach(peer) == Reach::Far { far.broken(peer) } else { None }
    }

    /// In a wait that lasts, now and then: has the transport find out whether `peers` can be reached. A rank that only waits sends
    /// nothing of its own that could stay without an answer.
    pub(crate) fn probe(&self, wait: &mut Waiting, waited: Nanos, peers: impl Iterator<Item = Rank>) {
        let Some(far) = &self.far else { return };
        if (waited - wait.probed).0 < self.layout.settings().deadline().0 / PROBE {
            return;
        }
        wait.probed = waited;
        peers.filter(|&peer| self.reach(peer) == Reach::Far).for_each(|peer| far.lanes().probe(peer));
    }

    /// Whether nothing is under way on the lanes of `scope` any more; those that take too long, since `began`, are cut.
    pub(crate) fn drained(&self, scope: Scope, began: Nanos) -> bool {
        let Some(far) = &self.far else { return true };
        let mut lanes = far.lanes();
        // Who is gone takes nothing any more.
        let roll = self.node.roll();
        self.layout.topology().all().filter(|&rank| roll.is_gone(rank)).for_each(|rank| lanes.cut(Scope::Peer(rank)));
        if lanes.drain(scope) {
            return true;
        }
        let limit = Nanos(self.layout.settings().deadline().0 / DRAIN);
        if self.now() - began < limit {
            return false;
        }
        tracing::warn!(rank = self.me.0, ?scope, after = %limit, "cuts lanes that do not get rid of what they hold");
        lanes.cut(scope);
        lanes.drain(scope)
    }

    /// Returns when nothing is under way on the lanes of `scope` any more.
    pub(crate) async fn settle(&self, scope: Scope) {
        let began = self.now();
        poll_fn(|context| {
            if self.drained(scope, began) {
                return Poll::Ready(());
            }
            context.waker().wake_by_ref();
            Poll::Pending
        })
        .await;
    }

    /// The value of a cell of the own window (acquire). One that the layout lacks is never published.
    #[inline]
    pub(crate) fn peek(&self, cell: Cell, generation: u16) -> u64 {
        debug_assert!(self.layout.has_cell(cell), "{cell:?} is not in the layout");
        let place = self.own().cell(self.layout.cell(cell, generation));
        place.map_or(0, |place| layout::value_in(generation, place.load(Ordering::Acquire)))
    }

    /// Looks at the clock, for a wait that was not met: every so often only. The first look is when the wait began, as far as
    /// anybody is told.
    pub(crate) fn glance(&self, wait: &mut Waiting) -> Option<Glance> {
        wait.polls = wait.polls.wrapping_add(1);
        if !pace::is_crowded() && !wait.polls.is_multiple_of(POLLS) {
            return None;
        }
        let now = self.now();
        if now.0 >= self.counters.look_at.load(Ordering::Relaxed) {
            self.counters.look_at.store((now + LOOK).0, Ordering::Relaxed);
            self.peers.lost().iter().for_each(|rank| self.node.roll().strike(rank));
        }
        let since = *wait.since.get_or_insert(now);
        Some(Glance { now, waited: now - since })
    }
}
