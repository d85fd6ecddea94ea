//! The filling end of a ring, with its staging memory.

use zerocopy::IntoBytes;

use super::{Attended, Operation};
use crate::error::Fault;
use crate::layout::{Outbox, Share};
use crate::machine::Machine;
use crate::plant::Plant;
use crate::port::{Cell, Counter, LaneId, LaneKind, Mail, Need, Port, Ticket, Work};
use crate::ring::Producer;
use crate::topology::Rank;

/// Sends rows to one peer through the ring of one track. The port is lent: a forwarder serves several outlets with one.
///
/// Order of calls: [`Outlet::open`], [`Outlet::send`] for each row, [`Outlet::close`].
pub(crate) struct Outlet<'a, 'o, M: Machine> {
    operation: &'a Operation<'o, M>,
    ring: &'a mut Producer,
    staging: Staging,
    lane: LaneId,
    track: u16,
    /// By which its rows are handed to a coordinator, that posts them.
    mailbox: Option<u16>,
    /// Of rows that the peer pulls: where they lie in the own window.
    outbox: Option<Outbox>,
}

/// Which staging slots still wait for a flush.
pub(crate) struct Staging {
    tickets: Vec<Option<Ticket>>,
    next: usize,
}

impl Staging {
    pub(crate) fn new(slots: u32) -> Self {
        Self { tickets: vec![None; slots as usize], next: 0 }
    }

    fn slots(&self) -> u64 {
        self.tickets.len() as u64
    }

    /// The slot to fill next, and the put that must be flushed before.
    pub(crate) fn slot(&mut self) -> (u32, Option<Ticket>) {
        (self.next as u32, self.tickets[self.next].take())
    }

    /// The slot is the source of this put now.
    pub(crate) fn sent(&mut self, ticket: Ticket) {
        self.tickets[self.next] = Some(ticket);
        self.next = (self.next + 1) % self.tickets.len();
    }

    /// The last put whose source has not been flushed.
    pub(crate) fn last(&self) -> Option<Ticket> {
        self.tickets.iter().flatten().max().copied()
    }
}

impl<'a, 'o, M: Machine> Outlet<'a, 'o, M> {
    pub(crate) fn new(operation: &'a Operation<'o, M>, ring: &'a mut Producer, peer: Rank, track: u16) -> Self {
        let lane = LaneId { peer, kind: LaneKind::Data(track) };
        let staging = Staging::new(operation.staging_slots(track));
        let outbox = operation.outbox_to(peer, track);
        Self { operation, ring, staging, lane, track, mailbox: operation.mailbox(lane), outbox }
    }

    /// Sends the header slot that opens this operation's part of the ring. Between nodes the shares of the peer's node
    /// follow. Of rows that are pulled the notes say the same, and both ends know the shares.
    pub(crate) async fn open(
        &mut self,
        port: &mut Attended<M::Port>,
        rows: u32,
        first: u32,
        shares: &[Share],
    ) -> Result<(), Fault> {
        if self.outbox.is_some() {
            return Ok(());
        }
        let header = self.operation.header(rows, first);
        self.send(port, &[(0, header.as_bytes()), (size_of_val(&header) as u64, shares.as_bytes())]).await
    }

    /// Sends one slot, made of parts that lie at ascending places in it.
    pub(crate) async fn send(&mut self, port: &mut Attended<M::Port>, parts: &[(u64, &[u8])]) -> Result<(), Fault> {
        let slot = self.room(port).await?;
        if let Some(outbox) = self.outbox {
            return self.lay(port, &outbox, slot, parts).await;
        }
        let Operation { layout, me, rings, .. } = self.operation;
        let staged = self.staging_slot(port).await?;
        let from = layout.staging_slot(self.lane.peer, rings, self.track, staged).offset;
        let to = layout.ring_slot(*me, rings, self.track, slot).offset;
        if self.operation.plants(Plant::TailBeforeData) {
            self.publish(port, self.ring.tail() + 1).await?;
        }
        let mut len = 0;
        for &(at, bytes) in parts {
            port.write(from.plus(at), bytes)?;
            len = at + bytes.len() as u64;
        }
        port.charge(Work::Row { bytes: len });
        if self.mailbox.is_none() {
            let ticket = port.put(self.lane, from.span(len), to).await?;
            self.staging.sent(ticket);
        }
        match self.ring.push() {
            Some(tail) => self.publish(port, tail).await,
            None => Ok(()),
        }
    }

    /// Lays one row in the outbox: the peer pulls it.
    async fn lay(
        &mut self,
        port: &mut Attended<M::Port>,
        outbox: &Outbox,
        slot: u32,
        parts: &[(u64, &[u8])],
    ) -> Result<(), Fault> {
        if self.operation.plants(Plant::TailBeforeData) {
            self.publish(port, self.ring.tail() + 1).await?;
        }
        let head = self.operation.row().header_bytes();
        for &(at, bytes) in parts {
            let to = match at.checked_sub(head) {
                Some(at) => outbox.codes(slot).offset.plus(at),
                None => outbox.head(slot).offset.plus(at),
            };
            port.write(to, bytes)?;
            port.charge(Work::Row { bytes: bytes.len() as u64 });
        }
        match self.ring.push() {
            Some(tail) => self.publish(port, tail).await,
            None => Ok(()),
        }
    }

    /// Waits for a free slot of the staging memory.
    async fn staging_slot(&mut self, port: &mut Attended<M::Port>) -> Result<u32, Fault> {
        if self.mailbox.is_some() {
            let slots = self.staging.slots();
            self.left(port, (self.ring.tail() + 1).saturating_sub(slots)).await?;
            return Ok((self.ring.index() % slots) as u32);
        }
        let (slot, busy) = self.staging.slot();
        if let Some(ticket) = busy {
            self.flush(port, ticket).await?;
        }
        Ok(slot)
    }

    /// Waits until the coordinator has freed the staging memory of the first `count` slots, ever. It frees only what was
    /// handed over.
    async fn left(&mut self, port: &mut Attended<M::Port>, count: u64) -> Result<(), Fault> {
        if self.operation.plants(Plant::SkippedFlush) {
            return Ok(());
        }
        let Some(mailbox) = self.mailbox else { return Ok(()) };
        let (_, sent) = self.operation.mail(Mail::Sent, mailbox, Counter::Head);
        if port.peek(sent) < count {
            self.be_polite(port).await?;
            port.wait(sent, count).await?;
        }
        Ok(())
    }

    async fn flush(&self, port: &mut Attended<M::Port>, ticket: Ticket) -> Result<(), Fault> {
        if self.operation.plants(Plant::SkippedFlush) {
            return Ok(());
        }
        port.flush(self.lane, ticket).await
    }

    const fn head(&self) -> Cell {
        Cell::new(self.lane.peer, LaneKind::Credit(self.track), Counter::Head)
    }

    /// Whether a slot can be filled without waiting.
    pub(crate) fn is_ready(&mut self, port: &Attended<M::Port>) -> Result<bool, Fault> {
        if self.ring.slot().is_none() {
            let seen = port.peek(self.head());
            self.ring.saw_head(seen).map_err(|overrun| Fault::Mismatch {
                field: "head of the ring",
                mine: overrun.limit,
                theirs: overrun.seen,
                peer: self.lane.peer,
            })?;
        }
        Ok(self.ring.slot().is_some())
    }

    /// Waits until the ring has a free slot. What is pending on this outlet is published before; a role with several
    /// rings publishes what is pending on the others itself.
    async fn room(&mut self, port: &mut Attended<M::Port>) -> Result<u32, Fault> {
        while !self.is_ready(port)? {
            self.be_polite(port).await?;
            let at_least = self.ring.awaited_head();
            port.wait_any(&[Need { cell: self.head(), at_least }]).await?;
        }
        Ok(self.ring.slot().unwrap_or_default())
    }

    async fn be_polite(&mut self, port: &mut Attended<M::Port>) -> Result<(), Fault> {
        if self.operation.is_impolite() {
            return Ok(());
        }
        self.announce(port).await
    }

    /// Publishes the tail of everything sent.
    pub(crate) async fn announce(&mut self, port: &mut Attended<M::Port>) -> Result<(), Fault> {
        match self.ring.pending() {
            Some(tail) => self.publish(port, tail).await,
            None => Ok(()),
        }
    }

    async fn publish(&self, port: &mut Attended<M::Port>, tail: u64) -> Result<(), Fault> {
        if self.mailbox.is_some() && self.operation.plants(Plant::SecondPoster) {
            let cell = Cell::new(self.operation.me, self.lane.kind, Counter::Probe);
            port.publish(self.lane, cell, tail).await?;
        }
        let (lane, cell) = match self.mailbox {
            Some(mailbox) => self.operation.mail(Mail::Staged, mailbox, Counter::Tail),
            None => (self.lane, Cell::new(self.operation.me, self.lane.kind, Counter::Tail)),
        };
        port.publish(lane, cell, tail).await
    }

    /// Publishes what is pending and waits until nothing of the staging memory, or of the outbox, is read any more.
    pub(crate) async fn close(&mut self, port: &mut Attended<M::Port>) -> Result<(), Fault> {
        self.announce(port).await?;
        if self.outbox.is_some() {
            // This rank may leave when everything has been pulled.
            let at_least = self.ring.tail();
            port.wait_any(&[Need { cell: self.head(), at_least }]).await?;
            self.ring.settle();
            return Ok(());
        }
        if let Some(mailbox) = self.mailbox {
            let (lane, cell) = self.operation.mail(Mail::Staged, mailbox, Counter::Done);
            port.publish(lane, cell, self.operation.op).await?;
            return self.left(port, self.ring.tail()).await;
        }
        match self.staging.last() {
            Some(ticket) => self.flush(port, ticket).await,
            None => Ok(()),
        }
    }
}
