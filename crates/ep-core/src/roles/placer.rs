//! Dispatch by direct placement: rows go to their final place in the receiver's arena where it granted one.

use super::dispatch::{positions, send};
use super::intake::HeaderBytes;
use super::outlet::Staging;
use super::{Attended, Operation, Outgoing};
use crate::error::Fault;
use crate::layout::Block;
use crate::machine::{Machine, Window};
use crate::port::{Cell, Counter, Duty, LaneId, LaneKind, Port, Role, Work};
use crate::ring::Producer;
use crate::topology::Rank;

/// Waits for `peer`'s grant, then places this channel's rows there, or sends them through the ring when it granted
/// nothing.
pub(crate) async fn deliver<M: Machine, W: Window>(
    operation: &Operation<'_, M>,
    outgoing: &Outgoing<'_, W>,
    ring: &mut Producer,
    peer: Rank,
    channel: u16,
) -> Result<(), Fault> {
    let mut port = operation.port(Role::serving(Duty::Placer, peer, channel));
    match operation.note_of(&mut port, peer).await? {
        Some((block, first_row)) => place(operation, port, outgoing, &block, first_row, peer, channel).await,
        None => {
            drop(port);
            let port = operation.port(Role::serving(Duty::Sender, peer, channel));
            send(operation, port, outgoing, ring, peer, channel).await
        }
    }
}

async fn place<M: Machine, W: Window>(
    operation: &Operation<'_, M>,
    mut port: Attended<M::Port>,
    outgoing: &Outgoing<'_, W>,
    block: &Block,
    first_row: u32,
    peer: Rank,
    channel: u16,
) -> Result<(), Fault> {
    let layout = operation.layout;
    let lane = LaneId { peer, kind: LaneKind::Data(channel) };
    let sent = outgoing.plan.sent_to(peer);
    let room = layout.row().header_bytes();
    let mut staging = Staging::new(layout.staging_slots(&operation.rings));
    let mut header = HeaderBytes::new(layout.row());
    let mut scratch = vec![0; layout.row().payload_bytes() as usize];
    for position in positions(sent, outgoing.plan.tokens(), operation.rings.channels, channel) {
        let token = sent[position as usize];
        let (slot, busy) = staging.slot();
        if let Some(ticket) = busy {
            port.flush(lane, ticket).await?;
        }
        let from = layout.staging_slot(peer, &operation.rings, channel.into(), slot).offset;
        outgoing.head(operation, &mut header, peer, token, position);
        let payload = outgoing.x.borrow(token, &mut scratch)?;
        port.write(from, header.as_bytes())?;
        port.write(from.plus(room), payload)?;
        port.charge(Work::Row { bytes: room + payload.len() as u64 });
        let row = first_row + position;
        port.put(lane, from.plus(room).span(payload.len() as u64), block.payload(row).offset).await?;
        let header_span = from.span(header.as_bytes().len() as u64);
        staging.sent(port.put(lane, header_span, block.header(row).offset).await?);
    }
    port.publish(lane, Cell::new(operation.me, lane.kind, Counter::Placed), operation.op).await?;
    match staging.last() {
        Some(ticket) => port.flush(lane, ticket).await,
        None => Ok(()),
    }
}
