//! A port of the explore scheduler.

use std::cell::RefCell;
use std::rc::Rc;

use ep_core::port::{Cell, LaneId, Need, Offset, Span, Tag, Ticket, Units, Work};
use ep_core::{Fault, Nanos, Rank};

use super::World;
use crate::verb::begin_and_resume;

/// A role's view of the simulated machine. At every verb the adversary may let others run first.
///
/// Dropping the future of a verb takes the role out of its wait; effects that were posted stay in flight.
#[derive(Debug)]
pub(crate) struct Port {
    world: Rc<RefCell<World>>,
    rank: Rank,
    number: u32,
}

impl Port {
    pub(crate) fn new(world: Rc<RefCell<World>>, rank: Rank, number: u32) -> Self {
        Self { world, rank, number }
    }

    /// Takes the role out of its wait when a verb ends or is dropped half-way.
    fn verb(&self) -> Verb<'_> {
        Verb { world: &self.world, number: self.number }
    }

    /// Starts a verb: the adversary may park the role here.
    async fn turn(&mut self) {
        let _verb = self.verb();
        begin_and_resume(
            &self.world,
            |world, context| world.begin(self.number, context),
            |world, context| world.resume(self.number, context),
        )
        .await;
    }
}

/// A verb that may wait.
struct Verb<'a> {
    world: &'a RefCell<World>,
    number: u32,
}

impl Drop for Verb<'_> {
    fn drop(&mut self) {
        if let Ok(mut world) = self.world.try_borrow_mut() {
            world.end(self.number);
        }
    }
}

impl ep_core::Port for Port {
    fn now(&self) -> Nanos {
        self.world.borrow().now()
    }

    fn peek(&self, cell: Cell) -> u64 {
        self.world.borrow_mut().peek(self.number, cell)
    }

    async fn wait_any(&mut self, needs: &[Need]) -> Result<usize, Fault> {
        self.turn().await;
        let _verb = self.verb();
        begin_and_resume(
            &self.world,
            |world, context| world.begin_wait(self.number, needs, context),
            |world, context| world.resume_wait(self.number, needs, context),
        )
        .await
    }

    async fn put(&mut self, lane: LaneId, from: Span, to: Offset) -> Result<Ticket, Fault> {
        self.turn().await;
        self.world.borrow_mut().put(self.number, lane, from, to)
    }

    async fn get(&mut self, lane: LaneId, from: Span, to: Offset) -> Result<Ticket, Fault> {
        self.turn().await;
        self.world.borrow_mut().get(self.number, lane, from, to)
    }

    async fn publish(&mut self, lane: LaneId, cell: Cell, value: u64) -> Result<(), Fault> {
        self.turn().await;
        self.world.borrow_mut().publish(self.number, lane, cell, value)
    }

    async fn flush(&mut self, lane: LaneId, upto: Ticket) -> Result<(), Fault> {
        self.turn().await;
        let _verb = self.verb();
        begin_and_resume(
            &self.world,
            |world, context| world.begin_flush(self.number, lane, upto, context),
            |world, context| world.resume_flush(self.number, lane, upto, context),
        )
        .await
    }

    async fn put_units(&mut self, lane: LaneId, from: Span, to: Offset, tag: Tag) -> Result<Ticket, Fault> {
        self.turn().await;
        self.world.borrow_mut().put_units(self.number, lane, from, to, tag)
    }

    fn poll_units(&self, units: &Units, into: &mut [u8]) -> Result<bool, Fault> {
        self.world.borrow_mut().poll_units(self.number, units, into)
    }

    async fn wait_units(&mut self, units: &[Units], or: &[Need]) -> Result<usize, Fault> {
        self.turn().await;
        let _verb = self.verb();
        begin_and_resume(
            &self.world,
            |world, context| world.begin_wait_units(self.number, units, or, context),
            |world, context| world.resume_wait_units(self.number, units, or, context),
        )
        .await
    }

    fn read(&self, from: Offset, into: &mut [u8]) -> Result<(), Fault> {
        self.world.borrow_mut().read((self.rank, Some(self.number)), from, into)
    }

    fn write(&mut self, to: Offset, bytes: &[u8]) -> Result<(), Fault> {
        self.world.borrow_mut().write((self.rank, Some(self.number)), to, bytes)
    }

    /// Free: explore time passes only when nothing can run.
    fn charge(&self, _work: Work) {}
}

impl Drop for Port {
    fn drop(&mut self) {
        // While a panic unwinds through the world, its books no longer matter.
        if let Ok(mut world) = self.world.try_borrow_mut() {
            world.close(self.number);
        }
    }
}
