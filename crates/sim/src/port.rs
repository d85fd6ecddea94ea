//! A simulated port: of the one scheduler or the other.

use ep_core::port::{Cell, LaneId, Need, Offset, Span, Tag, Ticket, Units, Work};
use ep_core::{Fault, Nanos};

use crate::{explore, timed};

/// A role's view of the simulated machine. At every verb the scheduler may let others run first.
///
/// Dropping the future of a verb takes the role out of its wait; effects that were posted stay in flight.
#[derive(Debug)]
pub struct Port(pub(crate) Of);

/// Whose port it is.
#[derive(Debug)]
pub(crate) enum Of {
    Explore(explore::Port),
    Timed(timed::Port),
}

impl ep_core::Port for Port {
    fn now(&self) -> Nanos {
        match &self.0 {
            Of::Explore(port) => port.now(),
            Of::Timed(port) => port.now(),
        }
    }

    fn peek(&self, cell: Cell) -> u64 {
        match &self.0 {
            Of::Explore(port) => port.peek(cell),
            Of::Timed(port) => port.peek(cell),
        }
    }

    async fn wait_any(&mut self, needs: &[Need]) -> Result<usize, Fault> {
        match &mut self.0 {
            Of::Explore(port) => port.wait_any(needs).await,
            Of::Timed(port) => port.wait_any(needs).await,
        }
    }

    async fn put(&mut self, lane: LaneId, from: Span, to: Offset) -> Result<Ticket, Fault> {
        match &mut self.0 {
            Of::Explore(port) => port.put(lane, from, to).await,
            Of::Timed(port) => port.put(lane, from, to).await,
        }
    }

    async fn get(&mut self, lane: LaneId, from: Span, to: Offset) -> Result<Ticket, Fault> {
        match &mut self.0 {
            Of::Explore(port) => port.get(lane, from, to).await,
            Of::Timed(port) => port.get(lane, from, to).await,
        }
    }

    async fn publish(&mut self, lane: LaneId, cell: Cell, value: u64) -> Result<(), Fault> {
        match &mut self.0 {
            Of::Explore(port) => port.publish(lane, cell, value).await,
            Of::Timed(port) => port.publish(lane, cell, value).await,
        }
    }

    async fn flush(&mut self, lane: LaneId, upto: Ticket) -> Result<(), Fault> {
        match &mut self.0 {
            Of::Explore(port) => port.flush(lane, upto).await,
            Of::Timed(port) => port.flush(lane, upto).await,
        }
    }

    async fn put_units(&mut self, lane: LaneId, from: Span, to: Offset, tag: Tag) -> Result<Ticket, Fault> {
        match &mut self.0 {
            Of::Explore(port) => port.put_units(lane, from, to, tag).await,
            Of::Timed(port) => port.put_units(lane, from, to, tag).await,
        }
    }

    fn poll_units(&self, units: &Units, into: &mut [u8]) -> Result<bool, Fault> {
        match &self.0 {
            Of::Explore(port) => port.poll_units(units, into),
            Of::Timed(port) => port.poll_units(units, into),
        }
    }

    async fn wait_units(&mut self, units: &[Units], or: &[Need]) -> Result<usize, Fault> {
        match &mut self.0 {
            Of::Explore(port) => port.wait_units(units, or).await,
            Of::Timed(port) => port.wait_units(units, or).await,
        }
    }

    fn read(&self, from: Offset, into: &mut [u8]) -> Result<(), Fault> {
        match &self.0 {
            Of::Explore(port) => port.read(from, into),
            Of::Timed(port) => port.read(from, into),
        }
    }

    fn write(&mut self, to: Offset, bytes: &[u8]) -> Result<(), Fault> {
        match &mut self.0 {
            Of::Explore(port) => port.write(to, bytes),
            Of::Timed(port) => port.write(to, bytes),
        }
    }

    /// Free under the explore scheduler: there time passes only when nothing can run.
    fn charge(&self, work: Work) {
        match &self.0 {
            Of::Explore(port) => port.charge(work),
            Of::Timed(port) => port.charge(work),
        }
    }

    fn only_posts(&mut self, only: bool) {
        if let Of::Timed(port) = &mut self.0 {
            port.only_posts(only);
        }
    }
}
