//! Dispatch within a node: sender and receiver of a ring; and the collectors of rows that were placed directly, and of those that stay.

use std::future::poll_fn;
use std::ops::Range;
use std::task::Poll;

use super::intake::HeaderBytes;
use super::outlet::Outlet;
use super::{Attended, Intake, Operation, Outgoing, inlet::Inlet};
use crate::error::Fault;
use crate::layout::{Block, RowHeader};
use crate::machine::{Machine, Window};
use crate::plan::{Exchange, channel_share};
use crate::port::{Cell, Counter, LaneKind, Port};
use crate::ring::{Consumer, Producer};
use crate::topology::Rank;

/// Sends the rows of one channel to `peer`, a rank of the same node, in token order.
pub(crate) async fn send<M: Machine, W: Window>(
    operation: &Operation<'_, M>,
    mut port: Attended<M::Port>,
    outgoing: &Outgoing<'_, W>,
    ring: &mut Producer,
    peer: Rank,
    channel: u32,
) -> Result<(), Fault> {
    let sent = outgoing.plan.sent_to(peer);
    let share = channel_share(sent, outgoing.plan.tokens(), operation.rings.channels, channel);
    let row = operation.layout.row();
    let mut header = HeaderBytes::new(row);
    let mut scratch = vec![0; row.payload_bytes() as usize];
    let mut outlet = Outlet::new(operation, ring, peer, operation.own_track(channel));
    outlet.open(&mut port, share.end - share.start, share.start, &[]).await?;
    for position in share {
        let token = sent[position as usize];
        outgoing.head(operation, &mut header, peer, token, position);
        let payload = outgoing.x.borrow(token, &mut scratch)?;
        outlet.send(&mut port, &[(0, header.as_bytes()), (row.header_bytes(), payload)]).await?;
    }
    outlet.close(&mut port).await
}

/// Takes the rows of `source` that travel on `track` from the ring of `writer`, and puts each at its place.
#[allow(clippy::too_many_arguments)] // What a role works on; each is of another kind.
pub(crate) async fn receive<M: Machine, W: Window>(
    operation: &Operation<'_, M>,
    mut port: Attended<M::Port>,
    intake: &Intake<W>,
    exchange: &Exchange,
    ring: &mut Consumer,
    source: Rank,
    writer: Rank,
    track: u16,
) -> Result<(), Fault> {
    let first_row = exchange.first_row(source, operation.me);
    let rows = exchange.rows(source, operation.me);
    let mut header = HeaderBytes::new(operation.layout.row());
    let room = operation.layout.row().header_bytes();
    let mut inlet = Inlet::new(operation, ring, writer, track);
    let opening = inlet.open(&mut port, &mut []).await?;
    let last = opening.first.saturating_add(opening.rows);
    if last > rows {
        return Err(Fault::Mismatch { field: "rows sent", mine: rows.into(), theirs: last.into(), peer: writer });
    }
    for position in opening.first..last {
        let at = inlet.next(&mut port).await?;
        port.read(at, header.as_mut_bytes())?;
        check_row(operation, &header, source, position)?;
        intake.payload(&port, at.plus(room), first_row + position)?;
        intake.header(&header, first_row + position);
        inlet.release(&mut port).await?;
    }
    inlet.return_credit(&mut port).await
}

/// Waits until `writer` has placed the rows of `source` in `block` and reads their headers.
pub(crate) async fn collect<M: Machine, W: Window>(
    operation: &Operation<'_, M>,
    mut port: Attended<M::Port>,
    intake: &Intake<W>,
    exchange: &Exchange,
    block: &Block,
    source: Rank,
    writer: Rank,
) -> Result<(), Fault> {
    let node = operation.layout.topology().node_of(source);
    for channel in 0..operation.rings.channels {
        let track = operation.layout.near_track(node, channel);
        port.wait(Cell::new(writer, LaneKind::Data(track), Counter::Placed), operation.op).await?;
    }
    let first_row = exchange.first_row(source, operation.me);
    let mut header = HeaderBytes::new(operation.layout.row());
    for position in 0..exchange.rows(source, operation.me) {
        let row = first_row + position;
        port.read(block.header(row).offset, header.as_mut_bytes())?;
        check_row(operation, &header, source, position)?;
        intake.header(&header, row);
    }
    Ok(())
}

/// Rows that stay which are copied before other roles of the rank have a turn: what they send may be on its way meanwhile.
const ROWS_A_TURN: u32 = 16;

/// Copies the rows of one channel that stay on this rank.
pub(crate) async fn keep<M: Machine, W: Window>(
    operation: &Operation<'_, M>,
    mut port: Attended<M::Port>,
    outgoing: &Outgoing<'_, W>,
    intake: &Intake<W>,
    exchange: &Exchange,
    block: Option<&Block>,
    share: Range<u32>,
) -> Result<(), Fault> {
    let me = operation.me;
    let first_row = exchange.first_row(me, me);
    let mut header = HeaderBytes::new(operation.layout.row());
    let mut scratch = vec![0; operation.layout.row().payload_bytes() as usize];
    for position in share.clone() {
        if position > share.start && (position - share.start).is_multiple_of(ROWS_A_TURN) {
            pending_once().await;
        }
        let token = outgoing.plan.sent_to(me)[position as usize];
        outgoing.head(operation, &mut header, me, token, position);
        intake.header(&header, first_row + position);
        intake.own(&mut port, block, first_row + position, outgoing.x.borrow(token, &mut scratch)?)?;
    }
    Ok(())
}

/// Lets all others go on that can.
async fn pending_once() {
    let mut asked = false;
    poll_fn(|context| {
        if std::mem::replace(&mut asked, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// Refuses a row that is not the one due here.
pub(super) fn check_row<M: Machine>(
    operation: &Operation<'_, M>,
    header: &HeaderBytes,
    peer: Rank,
    position: u32,
) -> Result<(), Fault> {
    let due = RowHeader { source_rank: peer.0, source_token: 0, position, op: operation.op as u32 };
    due.compare(&header.header()).map_or(Ok(()), |difference| Err(difference.fault(peer)))
}
