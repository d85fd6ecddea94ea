//! How lanes between nodes plug into a backend whose roles are kernels: a network that a device drives offers
//! [`DeviceTransport`], one value a job, and [`DeviceLanes`], one value a rank.
//!
//! Kernels post by the verbs of `ep_far.h`. Who defines them is the transport: it supplies their text, which the backend
//! puts beside its own headers under one name, and a state for each lane in memory that the device reaches. What
//! becomes of a verb that cannot go on is the verb's affair (F6): it takes a time, and gives a
//! [`FarStatus`](crate::device::FarStatus).
//!
//! ```text
//!  build:           source --> kernels are compiled with it;  open --> offer --(control plane)--> connect
//!  operations:      ep_far_put | ep_far_publish | ep_far_flush, by one posting warp a lane; ep_far_poll | ep_far_pulse
//!  failure:         no kernel runs;  drain, again until nothing is under way;  cut when that takes too long
//!  recover:         offer --> connect: states begin anew
//! ```

use std::any::Any;
use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use super::Place;
use crate::error::{Error, Fault};
use crate::layout::{Layout, Queues};
use crate::port::{LaneId, LaneKind, Offset, Scope, Span};
use crate::topology::Rank;

/// The text with which kernels are compiled so that they post to a transport's lanes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceSource {
    /// Includes `ep_far.h`, and defines what that declares. It is found under the name [`DeviceSource::NAME`].
    pub text: String,
    /// Constants that it is compiled with, and their values.
    pub defines: Vec<(&'static str, String)>,
    /// Bytes of a lane's state, a multiple of 64.
    pub state_bytes: u64,
}

impl DeviceSource {
    /// The name by which kernels include the text, whichever transport it is of.
    pub const NAME: &str = "ep_far_lanes.h";
}

/// Memory of a rank's window, for whoever registers it.
#[derive(Clone, Copy, Debug)]
pub enum WindowMemory<'a> {
    /// Memory of the host that has a descriptor, as in [`Place`].
    File(BorrowedFd<'a>),
    /// Memory of the device. Nothing checks that it is so: adapters read and write wherever this says. Whoever makes this value answers for it.
    Device {
        /// Its address there: of [`Layout::window_bytes`] bytes, which only the device, its driver and adapters touch.
        address: u64,
        /// What keeps the memory: lanes hold it until no adapter knows the memory any more. None where its owner outlives the lanes
        /// anyway.
        keeper: Option<&'a Arc<dyn Any + Send + Sync>>,
        /// By which an adapter may register it, where the driver gives one.
        dmabuf: Option<BorrowedFd<'a>>,
        /// By which the host moves its bytes, where the backend lets it.
        copies: Option<&'a Arc<dyn WindowCopies>>,
    },
}

/// A window in memory of a device, for transports whose host moves the bytes. What is enqueued on one of its [ways](Self::ways) is carried out in its
/// order, and may be under way until [`finish`](Self::finish) returns; ways overtake each other.
pub trait WindowCopies: Any + Send + Sync + fmt::Debug {
    /// [`Layout::window_bytes`].
    fn bytes(&self) -> u64;

    /// How many ways there are, 1 or more.
    fn ways(&self) -> usize {
        1
    }

    /// Copies `from`, a span of the window `source`, to `to` in this one.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a span that leaves a window, and for a window of another kind of device; [`Error::Broken`] with what the driver
    /// refused.
    fn pull(&self, way: usize, source: &dyn WindowCopies, from: Span, to: Offset) -> Result<(), Error>;

    /// Stores `bits` in the cell at `at`, at once, after all that was copied on this way before. It may wait for the next [`mark`](Self::mark).
    ///
    /// # Errors
    /// As [`pull`](Self::pull).
    fn raise(&self, way: usize, at: Offset, bits: u64) -> Result<(), Error>;

    /// A number that [`reached`](Self::reached) gives once all is done that was enqueued on this way so far: sources have been read, and kernels see it.
    /// Numbers of a way rise.
    ///
    /// # Errors
    /// As [`pull`](Self::pull).
    fn mark(&self, way: usize) -> Result<u64, Error>;

    /// The last [`mark`](Self::mark) that was reached; 0 before the first. Waits for nothing, and asks no driver.
    fn reached(&self, way: usize) -> u64;

    /// Returns when all is done.
    ///
    /// # Errors
    /// [`Error::Broken`] with what the driver said.
    fn finish(&self) -> Result<(), Error>;

    /// Pinned memory of the host beside it, for a network that does not reach the window itself: so many bytes, zero, no fewer than the window's.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where the backend has none; [`Error::Broken`] with what the system refused.
    fn mirror(&self, bytes: u64) -> Result<Arc<dyn Mirror>, Error> {
        let _ = bytes;
        Err(Error::unsupported("pinned memory beside a window of a device", "a backend that has it"))
    }

    /// By which other processes of this host [`open`](Self::open) it.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where they cannot; [`Error::Broken`] with what the driver refused.
    fn name(&self) -> Result<Vec<u8>, Error> {
        Err(Error::unsupported("a window of a device for other processes", "ranks that are threads of one process"))
    }

    /// The window of the same size that another process of this host [names](Self::name) so.
    ///
    /// # Errors
    /// As [`name`](Self::name).
    fn open(&self, name: &[u8]) -> Result<Arc<dyn WindowCopies>, Error> {
        let _ = name;
        Err(Error::unsupported("a window of a device of another process", "ranks that are threads of one process"))
    }
}

/// Memory of the host beside a window in memory of a device: its first bytes are a copy of the window's, as of when they were copied.
///
/// Copies and [`raise`](Self::raise) are carried out in the order in which they are asked for, and may be under way until
/// [`finish`](Self::finish) returns. A network writes to this memory at any time: nobody has references to its bytes.
pub trait Mirror: Send + Sync + fmt::Debug {
    /// By which a transport maps it: it can be shared, and cannot shrink.
    fn file(&self) -> BorrowedFd<'_>;

    /// Copies a span of the window here.
    ///
    /// # Errors
    /// As [`WindowCopies::pull`].
    fn fetch(&self, span: Span) -> Result<(), Error>;

    /// Copies a span from here to the window.
    ///
    /// # Errors
    /// As [`WindowCopies::pull`].
    fn store(&self, span: Span) -> Result<(), Error>;

    /// Stores `bits` in the window's cell at `at`, at once, after all that was copied before.
    ///
    /// # Errors
    /// As [`WindowCopies::pull`].
    fn raise(&self, at: Offset, bits: u64) -> Result<(), Error>;

    /// Returns when all is done: what was fetched is here, and kernels see what was stored.
    ///
    /// # Errors
    /// [`Error::Broken`] with what the driver said.
    fn finish(&self) -> Result<(), Error>;

    /// The eight bytes at `at` here, with acquire ordering.
    ///
    /// # Errors
    /// [`Error::Invalid`] where no whole and aligned ones lie inside.
    fn word(&self, at: Offset) -> Result<u64, Error>;

    /// Stores them, with release ordering.
    ///
    /// # Errors
    /// As [`word`](Self::word).
    fn set_word(&self, at: Offset, bits: u64) -> Result<(), Error>;
}

/// Where the lanes of a rank on a device begin.
#[derive(Clone, Copy, Debug)]
pub struct DevicePlace<'a> {
    /// The rank.
    pub me: Rank,
    /// The layout of every rank's window.
    pub layout: &'a Layout,
    /// The rank's window.
    pub window: WindowMemory<'a>,
}

impl<'a> DevicePlace<'a> {
    /// The ranks of other nodes that this one has queues to, with these ([`Queues::between`]).
    pub fn peers(&self, queues: Queues) -> impl Iterator<Item = (Rank, Vec<LaneKind>)> + use<'a> {
        super::peers(self.me, self.layout, queues)
    }

    /// The same for a transport of hosts.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where the window is memory of the device, naming the transport.
    pub fn on_host(&self, transport: impl fmt::Display) -> Result<Place<'a>, Error> {
        let Self { me, layout, window } = *self;
        match window {
            WindowMemory::File(window) => Ok(Place { me, layout, window }),
            WindowMemory::Device { .. } => Err(Error::unsupported(
                format_args!("a window in device memory over {transport}"),
                "a window that is a file in memory, which the device maps",
            )),
        }
    }
}

/// A network between nodes that a device drives.
pub trait DeviceTransport {
    /// One rank's lanes.
    type Lanes: DeviceLanes;

    /// Which lanes share a queue; the same on all ranks. Each queue has one posting warp.
    fn far_lanes(&self) -> Queues;

    /// What kernels are compiled with. The same for all ranks of a job, and a part of the key of whatever is compiled with it.
    fn source(&self) -> DeviceSource;

    /// Opens what one rank needs, makes its window known there and makes its lanes' states. Connects nothing yet.
    ///
    /// # Errors
    /// As [`Transport::open`](super::Transport::open).
    fn open(&self, place: DevicePlace<'_>) -> Result<Self::Lanes, Error>;
}

/// The lanes of one rank on a device to ranks of other nodes, one for each queue. The host holds them; kernels post.
///
/// No kernel that posts may run during [`offer`](Self::offer), [`connect`](Self::connect) and after the value was dropped.
pub trait DeviceLanes: Send + fmt::Debug {
    /// As [`Lanes::offer`](super::Lanes::offer). The states of all lanes begin anew: tickets count from the first again.
    ///
    /// # Errors
    /// [`Error::Broken`] with what the system refused.
    fn offer(&mut self) -> Result<Vec<u8>, Error>;

    /// As [`Lanes::connect`](super::Lanes::connect).
    ///
    /// # Errors
    /// [`Error::Unsupported`] naming the rank whose offer does not fit this one's, [`Error::Broken`] with what the system refused.
    fn connect(&mut self, offers: &[Option<Vec<u8>>]) -> Result<(), Error>;

    /// Where the state of a queue lies for the device: what makes an `EpFar` of kernels. It stays there for as long as this
    /// value lives. None where this rank has no such queue.
    fn state(&self, lane: LaneId) -> Option<u64>;

    /// As [`Lanes::probe`](super::Lanes::probe), for who waits long for `peer`. Lanes that a thread of the host posts to do it by
    /// themselves; those that kernels post to have no way.
    fn probe(&mut self, peer: Rank) {
        let _ = peer;
    }

    /// Why a lane to `peer` broke, if one did. A kernel is told [`FarStatus`](crate::device::FarStatus) only.
    fn broken(&self, peer: Rank) -> Option<Fault>;

    /// Whether nothing of what kernels posted on the lanes of `scope` is under way any more. Called again until it is so.
    fn drain(&mut self, scope: Scope) -> bool;

    /// Breaks the lanes of `scope` that are not [drained](Self::drain).
    fn cut(&mut self, scope: Scope);

    /// As [`Lanes::is_copied`](super::Lanes::is_copied).
    fn is_copied(&self) -> bool {
        false
    }

    /// As [`Lanes::is_staged`](super::Lanes::is_staged).
    fn is_staged(&self) -> bool {
        false
    }
}
