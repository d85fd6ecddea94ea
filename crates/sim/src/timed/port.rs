//! A port of the timed scheduler.

use std::cell::RefCell;
use std::future::poll_fn;
use std::rc::Rc;

use ep_core::port::{Cell, LaneId, Need, Offset, Span, Tag, Ticket, Units, Work};
use ep_core::{Fault, Nanos, Rank};

use super::World;
use crate::verb::begin_and_resume;

/// A role's view of the simulated machine, with a clock of its own.
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

    /// Starts a verb that sees.
    async fn look(&mut self) {
        poll_fn(|context| self.world.borrow_mut().poll_look(self.number, context)).await;
    }

    /// Starts a verb that posts.
    async fn post(&mut self) {
        poll_fn(|context| self.world.borrow_mut().poll_post(self.number, context)).await;
    }
}

impl ep_core::Port for Port {
    fn now(&self) -> Nanos {
        self.world.borrow().clock(self.number)
    }

    fn peek(&self, cell: Cell) -> u64 {
        self.world.borrow_mut().peek(self.number, cell)
    }

    async fn wait_any(&mut self, needs: &[Need]) -> Result<usize, Fault> {
        self.look().await;
        begin_and_resume(
            &self.world,
            |world, context| world.begin_wait(self.number, needs, context),
            |world, context| world.resume_wait(self.number, context),
        )
        .await
    }

    async fn put(&mut self, lane: LaneId, from: Span, to: Offset) -> Result<Ticket, Fault> {
        self.post().await;
        self.world.borrow_mut().put(self.number, lane, from, to)
    }

    async fn get(&mut self, lane: LaneId, from: Span, to: Offset) -> Result<Ticket, Fault> {
        self.post().await;
        self.world.borrow_mut().get(self.number, lane, from, to)
    }

    async fn publish(&mut self, lane: LaneId, cell: Cell, value: u64) -> Result<(), Fault> {
        self.post().await;
        self.world.borrow_mut().publish(self.number, lane, cell, value)
    }

    async fn flush(&mut self, lane: LaneId, upto: Ticket) -> Result<(), Fault> {
        begin_and_resume(
            &self.world,
            |world, context| world.begin_flush(self.number, lane, upto, context),
            |world, context| world.resume_flush(self.number, lane, upto, context),
        )
        .await
    }

    async fn put_units(&mut self, lane: LaneId, from: Span, to: Offset, tag: Tag) -> Result<Ticket, Fault> {
        self.post().await;
        self.world.borrow_mut().put_units(self.number, lane, from, to, tag)
    }

    fn poll_units(&self, units: &Units, into: &mut [u8]) -> Result<bool, Fault> {
        self.world.borrow().poll_units(self.number, units, into)
    }

    async fn wait_units(&mut self, units: &[Units], or: &[Need]) -> Result<usize, Fault> {
        self.look().await;
        begin_and_resume(
            &self.world,
            |world, context| world.begin_wait_units(self.number, units, or, context),
            |world, context| world.resume_wait_units(self.number, context),
        )
        .await
    }

    fn read(&self, from: Offset, into: &mut [u8]) -> Result<(), Fault> {
        self.world.borrow_mut().read(self.rank, from, into)
    }

    fn write(&mut self, to: Offset, bytes: &[u8]) -> Result<(), Fault> {
        self.world.borrow_mut().write(self.rank, to, bytes)
    }

    fn charge(&self, work: Work) {
        self.world.borrow_mut().charge(self.number, work);
    }

    fn only_posts(&mut self, only: bool) {
        self.world.borrow_mut().only_posts(self.number, only);
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        // While a panic unwinds through the world, its books no longer matter.
        if let Ok(mut world) = self.world.try_borrow_mut() {
            world.close(self.number);
        }
    }
}
