//! Combine through rings: the rank that got rows gives them back.

use super::intake::HeaderBytes;
use super::outlet::Outlet;
use super::{Attended, Operation};
use crate::buffers::HostRows;
use crate::error::Fault;
use crate::layout::{Choice, RowHeader};
use crate::machine::{Machine, Window};
use crate::plan::{Routed, channel_share};
use crate::ring::Producer;
use crate::topology::Rank;

/// The rows that go back, and what goes with them.
pub(crate) struct Returns<'a, W: Window> {
    pub(crate) y: &'a HostRows<W>,
    pub(crate) routed: &'a Routed,
    /// `[rows, topk]`, if weights travel back.
    pub(crate) topk_weights: Option<&'a [f32]>,
}

impl<W: Window> Returns<'_, W> {
    /// Fills the header of received row `row`, whose token is `token` of its source and whose position is `position`.
    pub(crate) fn head<M: Machine>(
        &self,
        operation: &Operation<'_, M>,
        header: &mut HeaderBytes,
        row: u32,
        position: u32,
    ) {
        let topk = operation.layout.shape().topk() as usize;
        let own = RowHeader {
            source_rank: operation.me.0,
            source_token: self.routed.source_token[row as usize],
            position,
            op: operation.op as u32,
        };
        header.set(&own, |at| Choice {
            expert: -1,
            weight: self.topk_weights.map_or(0.0, |weights| weights[row as usize * topk + at]),
        });
    }
}

/// Gives the rows that came from `source` on one channel back, in token order: to the rank of this node through which
/// they came.
pub(crate) async fn give_back<M: Machine, W: Window>(
    operation: &Operation<'_, M>,
    mut port: Attended<M::Port>,
    returns: &Returns<'_, W>,
    ring: &mut Producer,
    source: Rank,
    channel: u32,
) -> Result<(), Fault> {
    let Operation { layout, me, rings, .. } = operation;
    let routed = returns.routed;
    let first = routed.exchange.first_row(source, *me);
    let rows = routed.exchange.rows(source, *me);
    let tokens = &routed.source_token[first as usize..(first + rows) as usize];
    let share = channel_share(tokens, routed.exchange.tokens(source), rings.channels, channel);
    let mut header = HeaderBytes::new(&operation.row());
    let mut scratch = vec![0; operation.row().payload_bytes() as usize];
    let track = layout.near_track(layout.topology().node_of(source), channel);
    let mut outlet = Outlet::new(operation, ring, operation.gate_of(source), track);
    outlet.open(&mut port, share.end - share.start, share.start, &[]).await?;
    for position in share {
        returns.head(operation, &mut header, first + position, position);
        let payload = returns.y.borrow(first + position, &mut scratch)?;
        outlet.send(&mut port, &[(0, header.as_bytes()), (operation.row().header_bytes(), payload)]).await?;
    }
    outlet.close(&mut port).await
}
