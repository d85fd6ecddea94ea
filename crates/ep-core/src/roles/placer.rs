//! Direct placement: rows go to their final place in the receiver's arena where it granted one.

use super::dispatch::send;
use super::intake::HeaderBytes;
use super::outlet::Staging;
use super::{Attended, Operation, Outgoing};
use crate::error::Fault;
use crate::layout::Block;
use crate::machine::{Machine, Window};
use crate::plan::{Exchange, channel_share};
use crate::port::{Cell, Counter, Duty, LaneId, LaneKind, Port, Role, Work};
use crate::ring::Producer;
use crate::topology::Rank;

/// Places rows in the block that one peer granted. The port is lent, as an outlet's.
pub(crate) struct Placer<'a, 'o, M: Machine> {
    operation: &'a Operation<'o, M>,
    block: Block,
    staging: Staging,
    lane: LaneId,
    track: u16,
}

impl<'a, 'o, M: Machine> Placer<'a, 'o, M> {
    pub(crate) fn new(operation: &'a Operation<'o, M>, block: Block, peer: Rank, track: u16) -> Self {
        let staging = Staging::new(operation.staging_slots(track));
        Self { operation, block, staging, lane: LaneId { peer, kind: LaneKind::Data(track) }, track }
    }

    /// Places one row.
    pub(crate) async fn place(
        &mut self,
        port: &mut Attended<M::Port>,
        row: u32,
        header: &[u8],
        payload: &[u8],
    ) -> Result<(), Fault> {
        let Operation { layout, rings, .. } = self.operation;
        let (slot, busy) = self.staging.slot();
        if let Some(ticket) = busy {
            port.flush(self.lane, ticket).await?;
        }
        let from = layout.staging_slot(self.lane.peer, rings, self.track, slot).offset;
        let staged = from.plus(layout.row().header_bytes());
        port.write(from, header)?;
        port.write(staged, payload)?;
        port.charge(Work::Row { bytes: (header.len() + payload.len()) as u64 });
        for (part, to) in self.block.parts(row) {
            port.put(self.lane, staged.plus(part.start as u64).span(part.len() as u64), to).await?;
        }
        let to = self.block.header(row).offset;
        self.staging.sent(port.put(self.lane, from.span(header.len() as u64), to).await?);
        Ok(())
    }

    /// Tells the peer that everything is in place, and waits until the staging memory is not read any more.
    pub(crate) async fn close(&mut self, port: &mut Attended<M::Port>) -> Result<(), Fault> {
        let cell = Cell::new(self.operation.me, self.lane.kind, Counter::Placed);
        port.publish(self.lane, cell, self.operation.op).await?;
        match self.staging.last() {
            Some(ticket) => port.flush(self.lane, ticket).await,
            None => Ok(()),
        }
    }
}

/// Waits for the grant of `peer`, a rank of the same node, then places this channel's rows there, or sends them through
/// the ring when it granted nothing.
pub(crate) async fn deliver<M: Machine, W: Window>(
    operation: &Operation<'_, M>,
    outgoing: &Outgoing<'_, W>,
    exchange: &Exchange,
    ring: &mut Producer,
    peer: Rank,
    channel: u32,
) -> Result<(), Fault> {
    let track = operation.own_track(channel);
    let mut port = operation.port(Role::serving(Duty::Placer, peer, track));
    let Some(block) = operation.note_of(&mut port, peer).await? else {
        drop(port);
        let port = operation.port(Role::serving(Duty::Sender, peer, track));
        return send(operation, port, outgoing, ring, peer, channel).await;
    };
    let sent = outgoing.plan.sent_to(peer);
    let row = operation.layout.row();
    let mut header = HeaderBytes::new(row);
    let mut scratch = vec![0; row.payload_bytes() as usize];
    let mut placer = Placer::new(operation, block, peer, track);
    let first_row = exchange.first_row(operation.me, peer);
    for position in channel_share(sent, outgoing.plan.tokens(), operation.rings.channels, channel) {
        let token = sent[position as usize];
        outgoing.head(operation, &mut header, peer, token, position);
        let payload = outgoing.x.borrow(token, &mut scratch)?;
        placer.place(&mut port, first_row + position, header.as_bytes(), payload).await?;
    }
    placer.close(&mut port).await
}
