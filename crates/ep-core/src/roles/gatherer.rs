//! Combine between nodes: sums what this node's ranks return for a rank of another node on this rail, and sends the sums,
//! rounded, along the rail.

use super::gather::Gather;
use super::intake::HeaderBytes;
use super::outlet::Outlet;
use super::returner::Returns;
use super::{Accumulator, Attended, Operation};
use crate::error::Fault;
use crate::layout::{Choice, PULL_DEPTH, RowHeader};
use crate::machine::{Machine, Window};
use crate::plan::channel_share;
use crate::ring::{Consumer, Producer};
use crate::topology::Rank;

/// Serves the tokens of `source` on one channel. `rings` are those from each rank of the node, none for the own.
pub(crate) async fn gather_for<'a, M: Machine, W: Window>(
    operation: &'a Operation<'_, M>,
    mut port: Attended<M::Port>,
    returns: &'a Returns<'a, W>,
    ring: &'a mut Producer,
    rings: Vec<Option<&'a mut Consumer>>,
    source: Rank,
    channel: u32,
) -> Result<(), Fault> {
    let layout = operation.layout;
    let node = layout.topology().node_of(source);
    let rows = &returns.routed.fanout[node.index()];
    let tokens = returns.routed.exchange.tokens(source);
    let share = channel_share(rows.tokens(), tokens, operation.rings.channels, channel);
    let mut gather = Gather::new(operation, returns, source, layout.near_track(node, channel));
    let mut outlet = Outlet::new(operation, ring, source, layout.far_track(channel));
    let mut sum = Accumulator::new(layout.shape().hidden(), layout.shape().topk());
    let mut header = HeaderBytes::new(&operation.row());
    let mut payload = vec![0; operation.row().payload_bytes() as usize];
    gather.open(&mut port, rings).await?;
    outlet.open(&mut port, share.end - share.start, share.start, &[]).await?;
    let mut ahead = share.start;
    for row in share.clone() {
        while ahead < share.end && ahead < row + PULL_DEPTH {
            gather.pull(&mut port, rows.reached(ahead as usize)).await?;
            ahead += 1;
        }
        let (token, reached) = (rows.tokens()[row as usize], rows.reached(row as usize));
        if !(operation.is_impolite() || gather.is_ready(&port, reached)? && outlet.is_ready(&port)?) {
            gather.return_credit(&mut port).await?;
            outlet.announce(&mut port).await?;
        }
        sum.clear();
        gather.sum(&mut port, &mut sum, token, reached).await?;
        sum.finish(&mut payload);
        let own =
            RowHeader { source_rank: operation.me.0, source_token: token, position: row, op: operation.op as u32 };
        header.set(&own, |at| Choice { expert: -1, weight: sum.weights()[at] });
        outlet.send(&mut port, &[(0, header.as_bytes()), (operation.row().header_bytes(), &payload)]).await?;
    }
    gather.return_credit(&mut port).await?;
    outlet.close(&mut port).await
}
