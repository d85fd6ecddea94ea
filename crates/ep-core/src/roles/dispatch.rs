//! Dispatch through rings: sender and receiver; and the collector of rows that were placed directly.

use super::intake::HeaderBytes;
use super::outlet::Outlet;
use super::{Attended, Intake, Operation, Outgoing, inlet::Inlet};
use crate::error::Fault;
use crate::layout::Block;
use crate::machine::{Machine, Window};
use crate::plan::{Exchange, channel_tokens};
use crate::port::{Cell, Counter, LaneKind, Port};
use crate::ring::{Consumer, Producer};
use crate::topology::Rank;

/// The part of the tokens sent to a rank that one channel serves, as a range of positions.
pub(crate) fn positions(sent: &[u32], tokens: u32, channels: u32, channel: u16) -> std::ops::Range<u32> {
    let range = channel_tokens(tokens, channels, channel.into());
    let cut = |token: u32| sent.partition_point(|&sent| sent < token) as u32;
    cut(range.start)..cut(range.end)
}

/// Sends the rows of one channel to `peer`, in token order.
pub(crate) async fn send<M: Machine, W: Window>(
    operation: &Operation<'_, M>,
    port: Attended<M::Port>,
    outgoing: &Outgoing<'_, W>,
    ring: &mut Producer,
    peer: Rank,
    channel: u16,
) -> Result<(), Fault> {
    let sent = outgoing.plan.sent_to(peer);
    let range = positions(sent, outgoing.plan.tokens(), operation.rings.channels, channel);
    let mut header = HeaderBytes::new(operation.layout.row());
    let mut scratch = vec![0; operation.layout.row().payload_bytes() as usize];
    let mut outlet = Outlet::new(operation, port, ring, peer, channel);
    outlet.open(range.end - range.start, range.start).await?;
    for position in range {
        let token = sent[position as usize];
        outgoing.head(operation, &mut header, peer, token, position);
        outlet.send(header.as_bytes(), outgoing.x.borrow(token, &mut scratch)?).await?;
    }
    outlet.close().await
}

/// Takes the rows of one channel from `peer` and puts each at its place.
pub(crate) async fn receive<M: Machine, W: Window>(
    operation: &Operation<'_, M>,
    mut port: Attended<M::Port>,
    intake: &Intake<W>,
    exchange: &Exchange,
    ring: &mut Consumer,
    peer: Rank,
    channel: u16,
) -> Result<(), Fault> {
    let first_row = exchange.first_row(peer, operation.me);
    let rows = exchange.rows(peer, operation.me);
    let mut header = HeaderBytes::new(operation.layout.row());
    let room = operation.layout.row().header_bytes();
    let mut inlet = Inlet::new(operation, ring, peer, channel);
    let opening = inlet.open(&mut port).await?;
    let last = opening.first.saturating_add(opening.rows);
    if last > rows {
        return Err(Fault::Mismatch { field: "rows sent", mine: rows.into(), theirs: last.into(), peer });
    }
    for position in opening.first..last {
        let at = inlet.next(&mut port).await?;
        port.read(at, header.as_mut_bytes())?;
        check_row(operation, &header, peer, position)?;
        intake.payload(&port, at.plus(room), first_row + position)?;
        intake.header(&header, first_row + position);
        inlet.release(&mut port).await?;
    }
    inlet.return_credit(&mut port).await
}

/// Waits until `peer` has placed its rows in `block` and reads their headers.
pub(crate) async fn collect<M: Machine, W: Window>(
    operation: &Operation<'_, M>,
    mut port: Attended<M::Port>,
    intake: &Intake<W>,
    exchange: &Exchange,
    block: &Block,
    peer: Rank,
) -> Result<(), Fault> {
    for channel in 0..operation.rings.channels as u16 {
        port.wait(Cell::new(peer, LaneKind::Data(channel), Counter::Placed), operation.op).await?;
    }
    let first_row = exchange.first_row(peer, operation.me);
    let mut header = HeaderBytes::new(operation.layout.row());
    for position in 0..exchange.rows(peer, operation.me) {
        let row = first_row + position;
        port.read(block.header(row).offset, header.as_mut_bytes())?;
        check_row(operation, &header, peer, position)?;
        intake.header(&header, row);
    }
    Ok(())
}

/// Refuses a row that is not the one due here.
pub(super) fn check_row<M: Machine>(
    operation: &Operation<'_, M>,
    header: &HeaderBytes,
    peer: Rank,
    position: u32,
) -> Result<(), Fault> {
    let own = header.header();
    operation.agree("operation of a row", operation.op as u32, own.op, peer)?;
    operation.agree("source of a row", peer.0, own.source_rank, peer)?;
    operation.agree("position of a row", position, own.position, peer)
}
