//! One rank's machine.

use std::ptr::NonNull;
use std::sync::Arc;

use async_trait::async_trait;
use ep_core::machine::{Agreement, Bootstrap, Capabilities, Opening, Proposal};
use ep_core::port::{Offset, Span};
use ep_core::{Error, Fault, Layout, Nanos, Rank};

use crate::port::Port;
use crate::seat::Seat;

/// One CPU rank; see [`ep_core::machine::Machine`]. It offers `get`, and has no lanes between nodes.
///
/// Dropping it leaves: ranks that are threads of the same process are told that this one is gone. Ranks of other processes
/// learn that from the [`Member`](ep_bootstrap::Member), when it is dropped or its process ends.
#[derive(Debug)]
pub struct Machine {
    seat: Arc<Seat>,
    bootstrap: Meeting,
}

impl Machine {
    pub(crate) fn new(seat: Seat) -> Self {
        let seat = Arc::new(seat);
        Self { bootstrap: Meeting(Arc::clone(&seat)), seat }
    }
}

impl ep_core::machine::Machine for Machine {
    type Port = Port;
    type Window = Window;

    fn rank(&self) -> Rank {
        self.seat.me
    }

    fn layout(&self) -> &Layout {
        &self.seat.layout
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::new(true)
    }

    fn now(&self) -> Nanos {
        self.seat.now()
    }

    fn port(&self, opening: Opening) -> Port {
        Port::new(Arc::clone(&self.seat), opening)
    }

    fn window(&self) -> Window {
        Window(Arc::clone(&self.seat))
    }

    /// Copies are done when their verbs return: nothing is under way.
    async fn reset(&self) {}

    async fn reset_peer(&self, _peer: Rank) {}

    fn bootstrap(&self) -> &dyn Bootstrap {
        &self.bootstrap
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.seat.node.roll().strike(self.seat.me);
        self.seat.peers.leave(self.seat.me);
    }
}

/// Access to the own window from the rank's main line. Keeps the window's memory.
#[derive(Clone, Debug)]
pub struct Window(Arc<Seat>);

impl Window {
    /// Where a span of the window lies in this process, for as long as the `Window` or a clone of it lives. Others may read and
    /// write there as the protocol lets them; what a lease covers is its holder's.
    ///
    /// # Errors
    /// [`Fault::OutOfRange`].
    pub fn address(&self, span: Span) -> Result<NonNull<u8>, Fault> {
        self.0.own().at(span)
    }
}

impl ep_core::machine::Window for Window {
    fn read(&self, from: Offset, into: &mut [u8]) -> Result<(), Fault> {
        self.0.own().read(from, into)
    }

    fn write(&self, to: Offset, bytes: &[u8]) -> Result<(), Fault> {
        self.0.own().write(to, bytes)
    }
}

/// The control plane, on the machine's clock.
#[derive(Debug)]
struct Meeting(Arc<Seat>);

#[async_trait(?Send)]
impl Bootstrap for Meeting {
    async fn agree(&self, proposal: Proposal, deadline: Nanos) -> Result<Agreement, Error> {
        let seat = &self.0;
        seat.peers.agree(seat.me, proposal, deadline - seat.now()).await
    }
}
