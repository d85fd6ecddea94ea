//! A port: near lanes by copies and by cells in shared memory.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;

use ep_core::machine::Opening;
use ep_core::port::{Cell, LaneId, LaneKind, Need, Offset, Span, Ticket, Work};
use ep_core::{Fault, Nanos, Phase};

use crate::pace;
use crate::seat::Seat;

/// A role's view of its machine. Every verb but a wait is done when it is first polled.
#[derive(Debug)]
pub struct Port {
    seat: Arc<Seat>,
    opening: Opening,
}

impl Port {
    pub(crate) const fn new(seat: Arc<Seat>, opening: Opening) -> Self {
        Self { seat, opening }
    }

    fn first_met(&self, needs: &[Need]) -> Option<usize> {
        needs.iter().position(|need| self.value(need.cell) >= need.at_least)
    }

    fn value(&self, cell: Cell) -> u64 {
        self.seat.peek(cell, self.opening.generation)
    }

    /// How a wait that began at `since`, or begins now, ends, if it does.
    fn look(&self, needs: &[Need], since: &mut Option<Nanos>) -> Option<Result<usize, Fault>> {
        if let Some(met) = self.first_met(needs) {
            return Some(Ok(met));
        }
        if let Some(need) = needs.iter().find(|need| self.seat.node.roll().is_gone(need.cell.writer)) {
            // What it published before it went may have come after the first look.
            let gone = Fault::PeerGone { peer: need.cell.writer, phase: need.cell.counter.phase() };
            return Some(self.first_met(needs).ok_or(gone));
        }
        let now = self.seat.glance(since.is_none())?;
        let since = *since.get_or_insert(now);
        (now >= self.opening.deadline).then(|| Err(self.timeout(needs, now - since)))
    }

    fn timeout(&self, needs: &[Need], waited: Nanos) -> Fault {
        let Some(&Need { cell, at_least }) = needs.first() else {
            let peer = self.seat.me;
            let lane = LaneId { peer, kind: LaneKind::Watch };
            return Fault::Timeout { phase: Phase::Probe, peer, lane, seen: 0, awaited: 0, waited };
        };
        let (phase, peer) = (cell.counter.phase(), cell.writer);
        let lane = LaneId { peer, kind: cell.lane };
        Fault::Timeout { phase, peer, lane, seen: self.value(cell), awaited: at_least, waited }
    }
}

impl ep_core::Port for Port {
    fn now(&self) -> Nanos {
        self.seat.now()
    }

    fn peek(&self, cell: Cell) -> u64 {
        self.value(cell)
    }

    async fn wait_any(&mut self, needs: &[Need]) -> Result<usize, Fault> {
        let mut since = None;
        poll_fn(|context| match self.look(needs, &mut since) {
            Some(outcome) => {
                pace::stir();
                Poll::Ready(outcome)
            }
            None => {
                context.waker().wake_by_ref();
                Poll::Pending
            }
        })
        .await
    }

    async fn put(&mut self, lane: LaneId, from: Span, to: Offset) -> Result<Ticket, Fault> {
        self.seat.put(lane, from, to)
    }

    async fn get(&mut self, lane: LaneId, from: Span, to: Offset) -> Result<Ticket, Fault> {
        self.seat.get(lane, from, to)
    }

    async fn publish(&mut self, lane: LaneId, cell: Cell, value: u64) -> Result<(), Fault> {
        self.seat.publish(lane, cell, self.opening.generation, value)
    }

    async fn flush(&mut self, lane: LaneId, _upto: Ticket) -> Result<(), Fault> {
        self.seat.flush(lane)
    }

    fn read(&self, from: Offset, into: &mut [u8]) -> Result<(), Fault> {
        self.seat.own().read(from, into)
    }

    fn write(&mut self, to: Offset, bytes: &[u8]) -> Result<(), Fault> {
        self.seat.own().write(to, bytes)
    }

    /// Free: time is real here.
    fn charge(&self, _work: Work) {}
}
