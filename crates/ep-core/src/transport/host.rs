//! Lanes between nodes for a backend whose ranks run on CPUs: a network offers [`Transport`], one value a job, and [`Lanes`],
//! one value a rank.
//!
//! A backend reaches the ranks of its own node itself; for the others it takes any transport, and names none. It keeps the
//! contract's clock: verbs here never wait. One that cannot go on now says so, and the backend asks again until it can or
//! the operation's deadline has passed. So a transport needs no thread, no timer and no executor.
//!
//! ```text
//!  build, recover:  open --> offer --(all ranks' offers, by the control plane)--> connect
//!  operations:      put | raise | flush, again while they say "not now";  progress while the rank waits
//!  failure:         drain, again until nothing is under way;  cut when that takes too long
//! ```
//!
//! What rule of the contract a transport must keep: F1 to F5, F7 for lanes that break, F8, F9. How long things take (F6) is the
//! backend's affair, and between nodes there is no `get` (F10).

use std::fmt;
use std::os::fd::BorrowedFd;

use super::DevicePlace;
use crate::error::{Error, Fault};
use crate::layout::{Layout, Queues};
use crate::port::{LaneId, LaneKind, Offset, Scope, Span, Ticket};
use crate::topology::Rank;

/// Where a rank's lanes begin.
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    /// The rank.
    pub me: Rank,
    /// The layout of every rank's window.
    pub layout: &'a Layout,
    /// The rank's window: memory that has a descriptor ([`Layout::window_bytes`] bytes that can be mapped, shared, and
    /// cannot shrink). A transport maps it itself; nobody passes pointers.
    pub window: BorrowedFd<'a>,
}

impl<'a> Place<'a> {
    /// The ranks of other nodes that this one has queues to, with these ([`Queues::between`]).
    pub fn peers(&self, queues: Queues) -> impl Iterator<Item = (Rank, Vec<LaneKind>)> + use<'a> {
        super::peers(self.me, self.layout, queues)
    }
}

/// A network between nodes.
pub trait Transport {
    /// One rank's lanes.
    type Lanes: Lanes;

    /// Which lanes share a queue; the same on all ranks.
    fn far_lanes(&self) -> Queues;

    /// Opens what one rank needs (a device, say) and makes its window known there. Connects nothing yet.
    ///
    /// # Errors
    /// [`Error::Invalid`] and [`Error::Unsupported`], with what was looked for, what was found and what is missing.
    fn open(&self, place: Place<'_>) -> Result<Self::Lanes, Error>;

    /// The same for a rank on a device, for which a thread of the host posts. A window in the device's memory is refused, unless the
    /// transport says otherwise.
    ///
    /// # Errors
    /// As [`open`](Self::open); [`Error::Unsupported`] for the window.
    fn open_for_device(&self, place: DevicePlace<'_>) -> Result<Self::Lanes, Error> {
        self.open(place.on_host("a proxy")?)
    }
}

/// The lanes of one rank to ranks of other nodes: one for each queue, named after the first lane that the queue carries
/// ([`Queues::queue`]). Used by one thread at a time.
///
/// Dropped, they are given up as they are; whoever wants what was accepted to arrive [drains](Self::drain) them first.
///
/// Lanes that pass on to others pass on every method: those with a body say less than the others may know.
pub trait Lanes: Send + fmt::Debug {
    /// Ends all connections, if there are any, and returns what every other rank needs to know to connect anew. From here
    /// until [`connect`](Self::connect) nothing arrives in this rank's window, and its far cells may be zeroed: those of an ended
    /// generation mean nothing.
    ///
    /// # Errors
    /// [`Error::Broken`] with what the system refused.
    fn offer(&mut self) -> Result<Vec<u8>, Error>;

    /// Connects to the ranks whose offers are given: `[ranks]`, none for the own and for those that take no part any more. All
    /// ranks offer before any connects, and all have connected before any posts.
    ///
    /// # Errors
    /// [`Error::Unsupported`] naming the rank whose offer does not fit this one's, [`Error::Broken`] with what the system refused.
    fn connect(&mut self, offers: &[Option<Vec<u8>>]) -> Result<(), Error>;

    /// Accepts a copy of `from` of the own window to `to` in the window of the lane's peer; none when the lane is full now. It may
    /// be kept back until a raise, a flush or [`progress`](Self::progress). A length of zero is a no-op with the ticket of the
    /// last put.
    ///
    /// # Errors
    /// [`Fault::NotOffered`], [`Fault::OutOfRange`], [`Fault::LaneBroken`].
    fn put(&mut self, lane: LaneId, from: Span, to: Offset) -> Result<Option<Ticket>, Fault>;

    /// Accepts that the eight bytes at `at` in the peer's window become `bits`, after all earlier puts and raises of the lane
    /// (F3); false when the lane is full now. Nobody else ever writes them, and `bits` never fall. With it all that was accepted
    /// on the lane is on its way, and arrives though this rank should do nothing more for a while.
    ///
    /// # Errors
    /// As [`put`](Self::put).
    fn raise(&mut self, lane: LaneId, at: Offset, bits: u64) -> Result<bool, Fault>;

    /// Whether the sources of all puts of the lane up to `upto` may be overwritten.
    ///
    /// # Errors
    /// As [`put`](Self::put).
    fn flush(&mut self, lane: LaneId, upto: Ticket) -> Result<bool, Fault>;

    /// A number that is another one when [`flush`](Self::flush) may say something else of a lane to `peer` than before, without a verb of this rank in between: a put has
    /// landed, a lane has broken. So who has many lanes need not ask for each again and again. None: ask.
    fn landed(&self, peer: Rank) -> Option<u64> {
        let _ = peer;
        None
    }

    /// Hands over to the network what was accepted and kept back, and takes in what has come. Called again and again while the
    /// rank waits.
    fn progress(&mut self);

    /// Called from time to time while this rank waits long for `peer`. A transport that learns that a peer is out of reach only by what it
    /// sends itself, sends something now that changes nothing there, unless something is under way already;
    /// [`broken`](Self::broken) tells what became of it. Others need do nothing.
    fn probe(&mut self, peer: Rank) {
        let _ = peer;
    }

    /// Why a lane to `peer` broke, if one did: nothing comes from there any more.
    fn broken(&self, peer: Rank) -> Option<Fault>;

    /// Whether nothing of what was accepted for the lanes of `scope` is under way any more: it has arrived, or its lane is broken
    /// and it never will. Called again until it is so.
    fn drain(&mut self, scope: Scope) -> bool;

    /// Breaks the lanes of `scope` that are not [drained](Self::drain): what they hold never arrives, and draining ends
    /// at once.
    fn cut(&mut self, scope: Scope);

    /// Whether rows travel by copies that the driver of the window's device makes: what holds up its calls in this process holds up rows.
    fn is_copied(&self) -> bool {
        false
    }

    /// Whether they travel by way of pinned memory of the host at both ends, between which and the windows that driver copies them.
    fn is_staged(&self) -> bool {
        false
    }
}

/// No transport: for one node.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoTransport;

/// Lanes that cannot be.
#[derive(Clone, Copy, Debug)]
pub enum NoLanes {}

impl Transport for NoTransport {
    type Lanes = NoLanes;

    fn far_lanes(&self) -> Queues {
        Queues::PER_ROLE
    }

    fn open(&self, place: Place<'_>) -> Result<NoLanes, Error> {
        let nodes = format_args!("{} nodes", place.layout.topology().nodes());
        Err(Error::unsupported(nodes, "a transport between nodes, and none was given; use one node, or give one"))
    }
}

impl Lanes for NoLanes {
    fn offer(&mut self) -> Result<Vec<u8>, Error> {
        match *self {}
    }

    fn connect(&mut self, _: &[Option<Vec<u8>>]) -> Result<(), Error> {
        match *self {}
    }

    fn put(&mut self, _: LaneId, _: Span, _: Offset) -> Result<Option<Ticket>, Fault> {
        match *self {}
    }

    fn raise(&mut self, _: LaneId, _: Offset, _: u64) -> Result<bool, Fault> {
        match *self {}
    }

    fn flush(&mut self, _: LaneId, _: Ticket) -> Result<bool, Fault> {
        match *self {}
    }

    fn progress(&mut self) {
        match *self {}
    }

    fn broken(&self, _: Rank) -> Option<Fault> {
        match *self {}
    }

    fn drain(&mut self, _: Scope) -> bool {
        match *self {}
    }

    fn cut(&mut self, _: Scope) {
        match *self {}
    }
}
