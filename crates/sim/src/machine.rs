//! One rank's simulated machine.

use std::cell::RefCell;
use std::future::poll_fn;
use std::rc::Rc;

use async_trait::async_trait;
use ep_core::machine::{Agreement, Bootstrap, Capabilities, Opening, Proposal};
use ep_core::port::Offset;
use ep_core::{Error, Fault, Layout, Nanos, Rank};

use crate::port::Port;
use crate::world::World;

/// One rank of a simulated cluster; see [`ep_core::machine::Machine`]. It offers `get` within a node.
#[derive(Debug)]
pub struct Machine {
    world: Rc<RefCell<World>>,
    layout: Rc<Layout>,
    bootstrap: Meeting,
    rank: Rank,
}

impl Machine {
    pub(crate) fn new(world: &Rc<RefCell<World>>, layout: &Rc<Layout>, rank: Rank) -> Self {
        let bootstrap = Meeting { world: Rc::clone(world), rank };
        Self { world: Rc::clone(world), layout: Rc::clone(layout), bootstrap, rank }
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
        Capabilities::new(true)
    }

    fn now(&self) -> Nanos {
        self.world.borrow().now()
    }

    fn port(&self, opening: Opening) -> Port {
        let number = self.world.borrow_mut().open(self.rank, opening);
        Port::new(Rc::clone(&self.world), self.rank, number)
    }

    fn window(&self) -> Window {
        Window { world: Rc::clone(&self.world), rank: self.rank }
    }

    /// What is in flight is applied, torn or dropped by the adversary's draw.
    async fn reset(&self) {
        self.world.borrow_mut().reset(self.rank);
    }

    fn bootstrap(&self) -> &dyn Bootstrap {
        &self.bootstrap
    }
}

/// Access to the own window from the rank's main line.
#[derive(Clone, Debug)]
pub struct Window {
    world: Rc<RefCell<World>>,
    rank: Rank,
}

impl ep_core::machine::Window for Window {
    fn read(&self, from: Offset, into: &mut [u8]) -> Result<(), Fault> {
        self.world.borrow_mut().read((self.rank, None), from, into)
    }

    fn write(&self, to: Offset, bytes: &[u8]) -> Result<(), Fault> {
        self.world.borrow_mut().write((self.rank, None), to, bytes)
    }
}

/// The control plane: all ranks are in this process.
#[derive(Debug)]
struct Meeting {
    world: Rc<RefCell<World>>,
    rank: Rank,
}

/// Takes a rank out of the meeting when its future is dropped.
struct Attendance<'a>(&'a Meeting);

impl Drop for Attendance<'_> {
    fn drop(&mut self) {
        if let Ok(mut world) = self.0.world.try_borrow_mut() {
            world.leave(self.0.rank);
        }
    }
}

#[async_trait(?Send)]
impl Bootstrap for Meeting {
    async fn agree(&self, proposal: Proposal, deadline: Nanos) -> Result<Agreement, Error> {
        self.world.borrow_mut().arrive(self.rank, proposal, deadline);
        let _attendance = Attendance(self);
        poll_fn(|context| self.world.borrow_mut().poll_answer(self.rank, context)).await
    }
}
