//! A port: near lanes by copies and by cells in shared memory, far lanes by the transport.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;

use ep_core::machine::Opening;
use ep_core::port::{Cell, LaneId, Need, Offset, Span, Ticket, Work};
use ep_core::transport::Lanes;
use ep_core::{Fault, Nanos, Phase};

use crate::far::Verb;
use crate::pace;
use crate::seat::{Glance, Posted, Seat, Waiting};

/// A role's view of its machine. Every verb but a wait is done when it is first polled, unless it is on a far lane that is full.
#[derive(Debug)]
pub struct Port<L> {
    seat: Arc<Seat<L>>,
    opening: Opening,
}

impl<L: Lanes> Port<L> {
    pub(crate) const fn new(seat: Arc<Seat<L>>, opening: Opening) -> Self {
        Self { seat, opening }
    }

    fn first_met(&self, needs: &[Need]) -> Option<usize> {
        needs.iter().position(|need| self.value(need.cell) >= need.at_least)
    }

    fn value(&self, cell: Cell) -> u64 {
        self.seat.peek(cell, self.opening.generation)
    }

    /// How a wait ends, if it does now.
    #[inline]
    fn look(&self, needs: &[Need], wait: &mut Waiting) -> Option<Result<usize, Fault>> {
        if let Some(met) = self.first_met(needs) {
            return Some(Ok(met));
        }
        self.seat.progress();
        if let Some(lost) = needs.iter().find_map(|need| self.lost(need)) {
            // What it published before it went may have come after the first look.
            self.seat.progress();
            return Some(self.first_met(needs).ok_or(lost));
        }
        let Glance { now, waited } = self.seat.glance(wait)?;
        if now >= self.opening.deadline {
            return Some(Err(self.timeout(needs, waited)));
        }
        self.seat.probe(wait, waited, needs.iter().map(|need| need.cell.writer));
        None
    }

    /// Why a need is not met any more, if that is known.
    fn lost(&self, need: &Need) -> Option<Fault> {
        if self.seat.node.roll().is_gone(need.cell.writer) {
            return Some(need.gone());
        }
        self.seat.broken(need.cell.writer)
    }

    fn timeout(&self, needs: &[Need], waited: Nanos) -> Fault {
        Need::unmet(needs.first().map(|need| (*need, self.value(need.cell))), self.seat.me, waited)
    }
}

impl<L: Lanes> Port<L> {
    /// How a verb on a far lane ends now, if it does.
    fn attempt(&self, lane: LaneId, verb: Verb, wait: &mut Waiting) -> Option<Result<Ticket, Fault>> {
        match self.seat.attempt(lane, verb) {
            Err(fault) => return Some(Err(self.told(fault))),
            Ok(Some(ticket)) => return Some(Ok(ticket)),
            Ok(None) => {}
        }
        let Glance { now, waited } = self.seat.glance(wait)?;
        if now < self.opening.deadline {
            return None;
        }
        let (phase, awaited) = match verb {
            Verb::Flush { upto } => (lane.kind.phase(), upto.0),
            Verb::Put { .. } | Verb::Raise { .. } => (Phase::Credit, 1),
        };
        Some(Err(Fault::Timeout { phase, peer: lane.peer, lane, seen: 0, awaited, waited }))
    }

    /// A fault, after taking in all that has come: whether it matters that a peer is gone depends on what it said before.
    #[cold]
    fn told(&self, fault: Fault) -> Fault {
        self.seat.progress();
        fault
    }

    /// Does a verb on a far lane, as soon as the lane can take it.
    async fn far(&self, lane: LaneId, verb: Verb) -> Result<Ticket, Fault> {
        let mut wait = Waiting::default();
        poll_fn(|context| match self.attempt(lane, verb, &mut wait) {
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
}

impl<L: Lanes> ep_core::Port for Port<L> {
    fn now(&self) -> Nanos {
        self.seat.now()
    }

    fn peek(&self, cell: Cell) -> u64 {
        self.value(cell)
    }

    async fn wait_any(&mut self, needs: &[Need]) -> Result<usize, Fault> {
        let mut wait = Waiting::default();
        poll_fn(|context| match self.look(needs, &mut wait) {
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
        match self.seat.put(lane, from, to) {
            Ok(Posted::Done(ticket)) => Ok(ticket),
            Ok(Posted::Far(verb)) => self.far(lane, verb).await,
            Err(fault) => Err(self.told(fault)),
        }
    }

    async fn get(&mut self, lane: LaneId, from: Span, to: Offset) -> Result<Ticket, Fault> {
        self.seat.get(lane, from, to)
    }

    async fn publish(&mut self, lane: LaneId, cell: Cell, value: u64) -> Result<(), Fault> {
        match self.seat.publish(lane, cell, self.opening.generation, value) {
            Ok(Posted::Done(())) => Ok(()),
            Ok(Posted::Far(verb)) => self.far(lane, verb).await.map(drop),
            Err(fault) => Err(self.told(fault)),
        }
    }

    async fn flush(&mut self, lane: LaneId, upto: Ticket) -> Result<(), Fault> {
        match self.seat.flush(lane, upto) {
            Ok(Posted::Done(())) => Ok(()),
            Ok(Posted::Far(verb)) => self.far(lane, verb).await.map(drop),
            Err(fault) => Err(self.told(fault)),
        }
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
