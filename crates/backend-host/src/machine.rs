//! One rank's machine.

use std::ptr::NonNull;
use std::sync::Arc;

use ep_core::layout::Queues;
use ep_core::machine::{Bootstrap, Capabilities, Opening};
use ep_core::port::{Offset, Scope, Span};
use ep_core::transport::{Lanes, NoLanes};
use ep_core::{Fault, Layout, Nanos, Rank};

use crate::meeting::{Meeting, Table};
use crate::node::Node;
use crate::port::Port;
use crate::seat::Seat;

/// One CPU rank; see [`ep_core::machine::Machine`]. It offers `get` on near lanes; its lanes between nodes, `L`, are those of a
/// [`Transport`](ep_core::transport::Transport).
///
/// Dropping it leaves, once what it has posted has arrived: ranks that are threads of the same process are told that this one
/// is gone. Ranks of other processes learn that from the [`Member`](ep_bootstrap::Member), when it is dropped or its process
/// ends.
#[derive(Debug)]
pub struct Machine<L: Lanes = NoLanes> {
    seat: Arc<Seat<L>>,
    bootstrap: Meeting<L>,
}

impl<L: Lanes> Machine<L> {
    pub(crate) fn new(seat: Seat<L>, table: Option<Arc<Table>>) -> Self {
        let seat = Arc::new(seat);
        Self { bootstrap: Meeting::new(Arc::clone(&seat), table), seat }
    }
}

impl<L: Lanes> ep_core::machine::Machine for Machine<L> {
    type Port = Port<L>;
    type Window = Window;

    fn rank(&self) -> Rank {
        self.seat.me
    }

    fn layout(&self) -> &Layout {
        &self.seat.layout
    }

    fn capabilities(&self) -> Capabilities {
        let queues = self.seat.far.as_ref().map_or(Queues::PER_ROLE, |far| far.queues);
        Capabilities::new(true).far_lanes(queues).near_puts_done(true)
    }

    fn now(&self) -> Nanos {
        self.seat.now()
    }

    fn port(&self, opening: Opening) -> Port<L> {
        Port::new(Arc::clone(&self.seat), opening)
    }

    fn window(&self) -> Window {
        Window { me: self.seat.me, node: Arc::clone(&self.seat.node) }
    }

    /// Near copies are done when their verbs return; far lanes are drained.
    async fn reset(&self, scope: Scope) {
        self.seat.settle(scope).await;
    }

    fn bootstrap(&self) -> &dyn Bootstrap {
        &self.bootstrap
    }
}

impl<L: Lanes> Drop for Machine<L> {
    fn drop(&mut self) {
        let began = self.seat.now();
        while !std::thread::panicking() && !self.seat.drained(Scope::All, began) {
            std::thread::yield_now();
        }
        self.seat.node.roll().strike(self.seat.me);
        self.seat.peers.leave(self.seat.me);
    }
}

/// Access to the own window from the rank's main line. Keeps the window's memory.
#[derive(Clone, Debug)]
pub struct Window {
    me: Rank,
    node: Arc<Node>,
}

impl Window {
    /// Where a span of the window lies in this process, for as long as the `Window` or a clone of it lives. Others may read and
    /// write there as the protocol lets them; what a lease covers is its holder's.
    ///
    /// # Errors
    /// [`Fault::OutOfRange`].
    pub fn address(&self, span: Span) -> Result<NonNull<u8>, Fault> {
        self.node.own(self.me).at(span)
    }
}

impl ep_core::machine::Window for Window {
    fn read(&self, from: Offset, into: &mut [u8]) -> Result<(), Fault> {
        self.node.own(self.me).read(from, into)
    }

    fn write(&self, to: Offset, bytes: &[u8]) -> Result<(), Fault> {
        self.node.own(self.me).write(to, bytes)
    }
}
