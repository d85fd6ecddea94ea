//! The emptying end of a ring.

use zerocopy::{FromZeros, IntoBytes};

use super::{Attended, Operation};
use crate::error::Fault;
use crate::layout::{OpHeader, Outbox, Share};
use crate::machine::Machine;
use crate::plant::Plant;
use crate::port::{Cell, Counter, LaneId, LaneKind, Mail, Need, Offset, Port, Span};
use crate::ring::Consumer;
use crate::topology::Rank;

/// Takes rows of one peer from the ring of one track. The port is lent: a reducer serves several inlets with one.
///
/// Order of calls: [`Inlet::open`], then [`Inlet::next`] and [`Inlet::release`] for each row, [`Inlet::close`].
pub(crate) struct Inlet<'a, 'o, M: Machine> {
    operation: &'a Operation<'o, M>,
    ring: &'a mut Consumer,
    peer: Rank,
    track: u16,
    /// By which its credit is handed to a coordinator.
    mailbox: Option<u16>,
    /// Of rows that are pulled: where they lie in the peer's window.
    outbox: Option<Outbox>,
}

impl<'a, 'o, M: Machine> Inlet<'a, 'o, M> {
    pub(crate) fn new(operation: &'a Operation<'o, M>, ring: &'a mut Consumer, peer: Rank, track: u16) -> Self {
        let mailbox = operation.mailbox(LaneId { peer, kind: LaneKind::Credit(track) });
        let outbox = operation.outbox_to(operation.me, track);
        Self { operation, ring, peer, track, mailbox, outbox }
    }

    /// Takes the header slot of this operation and checks that the peer runs the same one. Between nodes it also fills
    /// `shares`, one for each rank of the own node. Of rows that are pulled the note has said so.
    pub(crate) async fn open(&mut self, port: &mut Attended<M::Port>, shares: &mut [Share]) -> Result<OpHeader, Fault> {
        if self.outbox.is_some() {
            return Ok(self.operation.header(0, 0));
        }
        let at = self.next(port).await?;
        let mut header = OpHeader::new_zeroed();
        port.read(at, header.as_mut_bytes())?;
        port.read(at.plus(size_of_val(&header) as u64), shares.as_mut_bytes())?;
        self.release(port).await?;
        self.operation.check(&header, self.peer)?;
        Ok(header)
    }

    /// Whether the next row can be had without waiting.
    pub(crate) fn is_ready(&mut self, port: &Attended<M::Port>) -> Result<bool, Fault> {
        if self.ring.slot().is_none() {
            self.look(port)?;
        }
        Ok(self.ring.slot().is_some())
    }

    /// Waits for the next row, pulls it where it lies at the peer, and says where it lies in the own window. The credit pending on
    /// this inlet is published before waiting; a role with several inlets publishes that of the others itself.
    pub(crate) async fn next(&mut self, port: &mut Attended<M::Port>) -> Result<Offset, Fault> {
        let slot = self.next_slot(port).await?;
        let Operation { layout, rings, .. } = self.operation;
        let Some(outbox) = self.outbox else { return Ok(layout.ring_slot(self.peer, rings, self.track, slot).offset) };
        let row = self.operation.row();
        let landing = layout.pull_slot(self.track, self.peer, slot).offset;
        self.pull(port, outbox.head(slot).offset.span(row.header_bytes()), landing).await?;
        let payload = outbox.codes(slot).offset.span(row.payload_bytes());
        self.pull(port, payload, landing.plus(row.header_bytes())).await?;
        Ok(landing)
    }

    /// Brings bytes of the peer's window to the own.
    pub(crate) async fn pull(&self, port: &mut Attended<M::Port>, from: Span, to: Offset) -> Result<(), Fault> {
        let lane = LaneId { peer: self.peer, kind: LaneKind::Credit(self.track) };
        let ticket = port.get(lane, from, to).await?;
        port.flush(lane, ticket).await
    }

    /// Waits for the next row, and says in which slot it is.
    pub(crate) async fn next_slot(&mut self, port: &mut Attended<M::Port>) -> Result<u32, Fault> {
        while !self.is_ready(port)? {
            self.be_polite(port).await?;
            let at_least = self.ring.awaited_tail();
            port.wait_any(&[Need { cell: self.tail(), at_least }]).await?;
        }
        let slot = self.ring.slot().unwrap_or_default();
        if self.operation.plants(Plant::CreditOneRowEarly) {
            self.publish(port, self.ring.head() + 1).await?;
        }
        Ok(slot)
    }

    /// The row has been read: its slot may be filled again.
    pub(crate) async fn release(&mut self, port: &mut Attended<M::Port>) -> Result<(), Fault> {
        match self.ring.pop() {
            Some(head) => self.publish(port, head).await,
            None => Ok(()),
        }
    }

    /// Returns the credit that is still pending.
    pub(crate) async fn return_credit(&mut self, port: &mut Attended<M::Port>) -> Result<(), Fault> {
        match self.ring.pending() {
            Some(head) => self.publish(port, head).await,
            None => Ok(()),
        }
    }

    /// Returns the credit that is still pending; there will be no more.
    pub(crate) async fn close(&mut self, port: &mut Attended<M::Port>) -> Result<(), Fault> {
        self.return_credit(port).await?;
        let Some(mailbox) = self.mailbox else { return Ok(()) };
        let (lane, cell) = self.operation.mail(Mail::Owed, mailbox, Counter::Done);
        port.publish(lane, cell, self.operation.op).await
    }

    async fn be_polite(&mut self, port: &mut Attended<M::Port>) -> Result<(), Fault> {
        if self.operation.is_impolite() {
            return Ok(());
        }
        self.return_credit(port).await
    }

    const fn tail(&self) -> Cell {
        Cell::new(self.peer, LaneKind::Data(self.track), Counter::Tail)
    }

    fn look(&mut self, port: &Attended<M::Port>) -> Result<(), Fault> {
        self.ring.saw_tail(port.peek(self.tail())).map_err(|overrun| Fault::Mismatch {
            field: "tail of the ring",
            mine: overrun.limit,
            theirs: overrun.seen,
            peer: self.peer,
        })
    }

    async fn publish(&mut self, port: &mut Attended<M::Port>, head: u64) -> Result<(), Fault> {
        let kind = LaneKind::Credit(self.track);
        if self.mailbox.is_some() && self.operation.plants(Plant::SecondPosterOfCredit) {
            let cell = Cell::new(self.operation.me, kind, Counter::Head);
            return port.publish(LaneId { peer: self.peer, kind }, cell, head).await;
        }
        let (lane, cell) = match self.mailbox {
            Some(mailbox) => self.operation.mail(Mail::Owed, mailbox, Counter::Head),
            None => (LaneId { peer: self.peer, kind }, Cell::new(self.operation.me, kind, Counter::Head)),
        };
        port.publish(lane, cell, head).await?;
        if self.operation.plants(Plant::CellLowered) {
            port.publish(lane, cell, head.saturating_sub(1)).await?;
        }
        Ok(())
    }
}
