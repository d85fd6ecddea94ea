//! One rank's simulated machine.

use std::future::poll_fn;
use std::rc::Rc;

use async_trait::async_trait;
use ep_core::layout::Queues;
use ep_core::machine::{Agreement, Bootstrap, Capabilities, Opening, Proposal};
use ep_core::port::{Offset, Scope};
use ep_core::{Error, Fault, Layout, Nanos, Rank};

use crate::home::Home;
use crate::port::Port;

/// One rank of a simulated cluster; see [`ep_core::machine::Machine`]. It offers `get` and units within a node, and lanes between nodes
/// as [`crate::Builder::far_lanes`] says.
#[derive(Debug)]
pub struct Machine {
    home: Home,
    layout: Rc<Layout>,
    bootstrap: Meeting,
    rank: Rank,
    far_lanes: Queues,
}

impl Machine {
    pub(crate) fn new(home: &Home, layout: &Rc<Layout>, rank: Rank, far_lanes: Queues) -> Self {
        let bootstrap = Meeting { home: home.clone(), rank };
        Self { home: home.clone(), layout: Rc::clone(layout), bootstrap, rank, far_lanes }
    }

    /// The rank computes for `time`: under the timed scheduler, what it does next begins that much later. Free under the
    /// explore scheduler.
    pub fn spend(&self, time: Nanos) {
        self.home.spend(self.rank, time);
    }
}

impl ep_core::machine::Machine for Machine {
    type Port = Port;
    type Window = Window;

    fn rank(&self) -> Rank {
        self.rank
    }

    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::new(true).far_lanes(self.far_lanes).units(true)
    }

    fn now(&self) -> Nanos {
        self.home.now(self.rank)
    }

    fn port(&self, opening: Opening) -> Port {
        self.home.open(self.rank, opening)
    }

    fn window(&self) -> Window {
        Window { home: self.home.clone(), rank: self.rank }
    }

    /// What is in flight is applied, torn or dropped by the adversary's draw. The timed scheduler waits until all has come that the rank
    /// posted, whatever the scope.
    async fn reset(&self, scope: Scope) {
        poll_fn(|context| self.home.poll_reset(self.rank, scope, context)).await;
    }

    fn bootstrap(&self) -> &dyn Bootstrap {
        &self.bootstrap
    }
}

/// Access to the own window from the rank's main line.
#[derive(Clone, Debug)]
pub struct Window {
    home: Home,
    rank: Rank,
}

impl ep_core::machine::Window for Window {
    fn read(&self, from: Offset, into: &mut [u8]) -> Result<(), Fault> {
        self.home.read(self.rank, from, into)
    }

    fn write(&self, to: Offset, bytes: &[u8]) -> Result<(), Fault> {
        self.home.write(self.rank, to, bytes)
    }
}

/// The control plane: all ranks are in this process.
#[derive(Debug)]
struct Meeting {
    home: Home,
    rank: Rank,
}

/// Takes a rank out of the meeting when its future is dropped.
struct Attendance<'a>(&'a Meeting);

impl Drop for Attendance<'_> {
    fn drop(&mut self) {
        self.0.home.leave(self.0.rank);
    }
}

#[async_trait(?Send)]
impl Bootstrap for Meeting {
    async fn agree(&self, proposal: Proposal, deadline: Nanos) -> Result<Agreement, Error> {
        self.home.arrive(self.rank, proposal, deadline);
        let _attendance = Attendance(self);
        poll_fn(|context| self.home.poll_answer(self.rank, context)).await
    }
}
