//! Dispatch by way of outboxes: a sender lays each row once in its own window, and the ranks of its node pull what is theirs.
//!
//! A channel's outbox is a ring with several readers: slot `i` holds token `i` of the channel's share, whoever wants it, so all readers
//! see the same tail, and the slowest one's head frees the slots.

use zerocopy::IntoBytes;

use super::inlet::Inlet;
use super::intake::HeaderBytes;
use super::{Attended, Intake, Operation, Outgoing};
use crate::error::Fault;
use crate::layout::{Outbox, RowHeader};
use crate::machine::{Machine, Window};
use crate::plan::{Exchange, channel_tokens};
use crate::plant::Plant;
use crate::port::{Cell, Counter, LaneId, LaneKind, Need, Offset, Port, Work};
use crate::ring::{Consumer, Producer};
use crate::topology::Rank;

/// A ring whose rows all of `readers` take.
struct Broadcast<'a, 'o, M: Machine> {
    operation: &'a Operation<'o, M>,
    readers: Vec<(Rank, &'a mut Producer)>,
    track: u16,
}

impl<M: Machine> Broadcast<'_, '_, M> {
    const fn head(&self, reader: Rank) -> Cell {
        Cell::new(reader, LaneKind::Credit(self.track), Counter::Head)
    }

    /// Waits until all readers have freed the next slot. What is pending is published before.
    async fn room(&mut self, port: &mut Attended<M::Port>) -> Result<u32, Fault> {
        loop {
            let looked_at = if self.operation.plants(Plant::FirstReaderOnly) { 1 } else { self.readers.len() };
            let mut need = None;
            for at in 0..looked_at {
                let head = self.head(self.readers[at].0);
                let (reader, ring) = &mut self.readers[at];
                if ring.slot().is_some() {
                    continue;
                }
                ring.saw_head(port.peek(head)).map_err(|overrun| Fault::Mismatch {
                    field: "head of the ring",
                    mine: overrun.limit,
                    theirs: overrun.seen,
                    peer: *reader,
                })?;
                if ring.slot().is_none() {
                    need = Some(Need { cell: head, at_least: ring.awaited_head() });
                }
            }
            let Some(need) = need else { break };
            if !self.operation.is_impolite() {
                self.announce(port).await?;
            }
            port.wait_any(&[need]).await?;
        }
        let first = self.readers.first();
        Ok(first.map_or(0, |(_, ring)| (ring.index() % u64::from(ring.geometry().slots)) as u32))
    }

    async fn publish(&self, port: &mut Attended<M::Port>, tail: u64, reader: Rank) -> Result<(), Fault> {
        let kind = LaneKind::Data(self.track);
        port.publish(LaneId { peer: reader, kind }, Cell::new(self.operation.me, kind, Counter::Tail), tail).await
    }

    /// The slot is filled.
    async fn push(&mut self, port: &mut Attended<M::Port>) -> Result<(), Fault> {
        for at in 0..self.readers.len() {
            let (reader, ring) = &mut self.readers[at];
            let (reader, due) = (*reader, ring.push_unlooked());
            if let Some(tail) = due {
                self.publish(port, tail, reader).await?;
            }
        }
        Ok(())
    }

    /// Waits until all readers have taken everything: this rank may leave then.
    async fn taken(&mut self, port: &mut Attended<M::Port>) -> Result<(), Fault> {
        for at in 0..self.readers.len() {
            let (reader, tail) = (self.readers[at].0, self.readers[at].1.tail());
            if !self.operation.plants(Plant::OutboxLeftFull) {
                port.wait_any(&[Need { cell: self.head(reader), at_least: tail }]).await?;
            }
            self.readers[at].1.settle();
        }
        Ok(())
    }

    /// Publishes the tail of everything that was laid.
    async fn announce(&mut self, port: &mut Attended<M::Port>) -> Result<(), Fault> {
        for at in 0..self.readers.len() {
            let (reader, ring) = &mut self.readers[at];
            let (reader, due) = (*reader, ring.pending());
            if let Some(tail) = due {
                self.publish(port, tail, reader).await?;
            }
        }
        Ok(())
    }
}

/// Lays the rows of one channel for `readers`, all other ranks of the node that take part.
pub(crate) async fn lay<M: Machine, W: Window>(
    operation: &Operation<'_, M>,
    mut port: Attended<M::Port>,
    outgoing: &Outgoing<'_, W>,
    readers: Vec<(Rank, &mut Producer)>,
    channel: u32,
) -> Result<(), Fault> {
    let (layout, me) = (operation.layout, operation.me);
    let outbox = layout.outbox(&operation.rings, channel);
    let row = layout.row();
    let mut header = HeaderBytes::new(row);
    let mut scratch = vec![0; row.payload_bytes() as usize];
    let mut positions = vec![-1i32; layout.topology().ranks_per_node() as usize];
    let mut ring = Broadcast { operation, readers, track: operation.own_track(channel) };
    for token in channel_tokens(outgoing.plan.tokens(), operation.rings.channels, channel) {
        let slot = ring.room(&mut port).await?;
        if operation.plants(Plant::TailBeforeData) {
            for at in 0..ring.readers.len() {
                let (reader, tail) = (ring.readers[at].0, ring.readers[at].1.tail() + 1);
                ring.publish(&mut port, tail, reader).await?;
            }
        }
        let reached = outgoing.plan.reached(token);
        outgoing.far_head(operation, &mut header, token);
        positions.fill(-1);
        for &(rank, position) in reached {
            let off = u32::from(operation.plants(Plant::PositionOffByOne));
            positions[layout.topology().local_of(rank) as usize] = (position + off) as i32;
        }
        let head = outbox.head(slot).offset;
        port.write(head, header.as_bytes())?;
        port.write(head.plus(row.header_bytes()), positions.as_bytes())?;
        if reached.iter().any(|&(rank, _)| rank != me) {
            write_payload(&mut port, &outbox, slot, outgoing.x.borrow(token, &mut scratch)?)?;
        }
        ring.push(&mut port).await?;
    }
    ring.announce(&mut port).await?;
    ring.taken(&mut port).await
}

/// Codes and scales, each at its place.
fn write_payload(port: &mut impl Port, outbox: &Outbox, slot: u32, payload: &[u8]) -> Result<(), Fault> {
    port.charge(Work::Row { bytes: payload.len() as u64 });
    let codes = (outbox.codes(slot).len as usize).min(payload.len());
    port.write(outbox.codes(slot).offset, &payload[..codes])?;
    port.write(outbox.scales(slot).offset, &payload[codes..])
}

/// Pulls the rows of `source` for this rank on one channel, and puts each at its place.
pub(crate) async fn pull<M: Machine, W: Window>(
    operation: &Operation<'_, M>,
    mut port: Attended<M::Port>,
    intake: &Intake<W>,
    exchange: &Exchange,
    ring: &mut Consumer,
    source: Rank,
    channel: u32,
) -> Result<(), Fault> {
    let (layout, me) = (operation.layout, operation.me);
    let (outbox, row) = (layout.outbox(&operation.rings, channel), layout.row());
    let (first_row, rows) = (exchange.first_row(source, me), exchange.rows(source, me));
    let track = operation.own_track(channel);
    let local = layout.topology().local_of(me) as u64;
    let (mut laid, mut own) = (HeaderBytes::new(row), HeaderBytes::new(row));
    operation.note_of(&mut port, source).await?;
    let mut inlet = Inlet::new(operation, ring, source, track);
    let mut due = None;
    for token in channel_tokens(exchange.tokens(source), operation.rings.channels, channel) {
        let slot = inlet.next_slot(&mut port).await?;
        let landing = layout.pull_slot(track, source, slot).offset;
        inlet.pull(&mut port, outbox.head(slot), landing).await?;
        port.read(landing, laid.as_mut_bytes())?;
        let expected = RowHeader { source_rank: source.0, source_token: token, position: 0, op: operation.op as u32 };
        if let Some(difference) = expected.compare(&laid.header()) {
            return Err(difference.fault(source));
        }
        operation.agree("token of a row", token, laid.header().source_token, source)?;
        let position = position_at(&port, landing.plus(row.header_bytes() + 4 * local))?;
        if let Ok(position) = u32::try_from(position) {
            let awaited = due.unwrap_or(position);
            if position != awaited || position >= rows {
                let (mine, theirs) = (awaited.min(rows).into(), position.into());
                return Err(Fault::Mismatch { field: "position of a row", mine, theirs, peer: source });
            }
            due = Some(position + 1);
            let at = landing.plus(layout.outbox_head_bytes());
            for (from, to) in [(outbox.codes(slot), at), (outbox.scales(slot), at.plus(row.scales_offset()))] {
                if from.len > 0 {
                    inlet.pull(&mut port, from, to).await?;
                }
            }
            intake.payload(&port, at, first_row + position)?;
            own.localize(&laid, me, layout.local_experts(), position);
            intake.header(&own, first_row + position);
        }
        inlet.release(&mut port).await?;
    }
    inlet.return_credit(&mut port).await
}

/// A position as a head has it.
fn position_at(port: &impl Port, at: Offset) -> Result<i32, Fault> {
    let mut bytes = [0; 4];
    port.read(at, &mut bytes)?;
    Ok(i32::from_ne_bytes(bytes))
}
