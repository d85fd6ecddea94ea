//! The filling end of a ring, with its staging memory.

use super::{Attended, Operation};
use crate::error::Fault;
use crate::layout::OpHeader;
use crate::machine::Machine;
use crate::port::{Cell, Counter, LaneId, LaneKind, Need, Port, Ticket};
use crate::ring::Producer;
use crate::topology::Rank;
use zerocopy::IntoBytes;

/// Sends rows to one peer through the ring of one channel.
///
/// Order of calls: [`Outlet::open`], [`Outlet::send`] for each row, [`Outlet::close`].
pub(crate) struct Outlet<'a, 'o, M: Machine> {
    operation: &'a Operation<'o, M>,
    port: Attended<M::Port>,
    ring: &'a mut Producer,
    staging: Staging,
    peer: Rank,
    channel: u16,
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
    pub(crate) fn new(
        operation: &'a Operation<'o, M>,
        port: Attended<M::Port>,
        ring: &'a mut Producer,
        peer: Rank,
        channel: u16,
    ) -> Self {
        Self {
            operation,
            port,
            ring,
            staging: Staging::new(operation.layout.staging_slots(&operation.rings)),
            peer,
            channel,
        }
    }

    const fn lane(&self) -> LaneId {
        LaneId { peer: self.peer, kind: LaneKind::Data(self.channel) }
    }

    /// Sends the header slot that opens this operation's part of the ring.
    pub(crate) async fn open(&mut self, rows: u32, first: u32) -> Result<(), Fault> {
        let header: OpHeader = self.operation.header(rows, first);
        self.send(header.as_bytes(), &[]).await
    }

    /// Sends one slot: a header, then a payload after the header's room.
    pub(crate) async fn send(&mut self, header: &[u8], payload: &[u8]) -> Result<(), Fault> {
        let slot = self.room().await?;
        let layout = self.operation.layout;
        let (staged, busy) = self.staging.slot();
        if let Some(ticket) = busy {
            self.flush(ticket).await?;
        }
        let from = layout.staging_slot(self.peer, &self.operation.rings, self.channel.into(), staged);
        let to = layout.ring_slot(self.operation.me, &self.operation.rings, self.channel.into(), slot);
        self.port.write(from.offset, header)?;
        let len = if payload.is_empty() {
            header.len() as u64
        } else {
            let room = layout.row().header_bytes();
            self.port.write(from.offset.plus(room), payload)?;
            room + payload.len() as u64
        };
        let from = from.offset.span(len);
        self.charge(len);
        #[cfg(feature = "plant")]
        if self.operation.plants(crate::plant::Plant::TailBeforeData) {
            self.publish(self.ring.tail() + 1).await?;
        }
        let ticket = self.port.put(self.lane(), from, to.offset).await?;
        self.staging.sent(ticket);
        if let Some(tail) = self.ring.push() {
            self.publish(tail).await?;
        }
        Ok(())
    }

    fn charge(&self, bytes: u64) {
        self.port.charge(crate::port::Work::Row { bytes });
    }

    async fn flush(&mut self, ticket: Ticket) -> Result<(), Fault> {
        #[cfg(feature = "plant")]
        if self.operation.plants(crate::plant::Plant::SkippedFlush) {
            return Ok(());
        }
        self.port.flush(self.lane(), ticket).await
    }

    /// Waits, politely, until the ring has a free slot.
    async fn room(&mut self) -> Result<u32, Fault> {
        let head = Cell::new(self.peer, LaneKind::Credit(self.channel), Counter::Head);
        loop {
            if let Some(slot) = self.ring.slot() {
                return Ok(slot);
            }
            let seen = self.port.peek(head);
            self.saw_head(seen)?;
            if self.ring.slot().is_some() {
                continue;
            }
            self.be_polite().await?;
            self.port.wait_any(&[Need { cell: head, at_least: self.ring.awaited_head() }]).await?;
        }
    }

    fn saw_head(&mut self, head: u64) -> Result<(), Fault> {
        self.ring.saw_head(head).map_err(|overrun| Fault::Mismatch {
            field: "head of the ring",
            mine: overrun.limit,
            theirs: overrun.seen,
            peer: self.peer,
        })
    }

    async fn be_polite(&mut self) -> Result<(), Fault> {
        #[cfg(feature = "plant")]
        if self.operation.plants(crate::plant::Plant::ImpoliteWaiting) {
            return Ok(());
        }
        self.announce().await
    }

    /// Publishes the tail of everything sent.
    async fn announce(&mut self) -> Result<(), Fault> {
        match self.ring.pending() {
            Some(tail) => self.publish(tail).await,
            None => Ok(()),
        }
    }

    async fn publish(&mut self, tail: u64) -> Result<(), Fault> {
        let cell = Cell::new(self.operation.me, LaneKind::Data(self.channel), Counter::Tail);
        self.port.publish(self.lane(), cell, tail).await
    }

    /// Publishes what is pending and waits until nothing of the staging memory is read any more.
    pub(crate) async fn close(mut self) -> Result<(), Fault> {
        self.announce().await?;
        match self.staging.last() {
            Some(ticket) => self.flush(ticket).await,
            None => Ok(()),
        }
    }
}
