//! Combine: rows go back through rings, or are pulled where the experts' output lies in the window.

use super::endpoint::{Combine, Combined, Ready};
use super::handle::Handle;
use super::{Engine, HostRows, Links, Started, cut_rings, run};
use crate::error::{Error, Fault};
use crate::layout::{Block, Kind};
use crate::machine::Machine;
use crate::port::{Duty, Port, Role};
use crate::roles::{Control, HeaderBytes, Operation, Reduction, Returns, RoleFuture, Sums, give_back, join, reduce};
use crate::topology::Rank;

impl<M: Machine> Engine<M> {
    pub(super) async fn combine_rows(
        &mut self,
        y: &HostRows<M::Window>,
        handle: &Handle,
        options: Combine<'_, Self>,
    ) -> Result<Combined<Self>, Error> {
        self.ready()?;
        self.check_handle(handle)?;
        let rings = options.rings.unwrap_or(handle.rings());
        self.layout.check_rings(&rings)?;
        self.check_rows("y", y, handle.rows())?;
        for bias in options.bias.into_iter().flatten() {
            self.check_rows("bias", bias, handle.tokens())?;
        }
        let topk = self.shape().topk();
        if let Some(weights) = options.topk_weights {
            let expected = handle.rows() as usize * topk as usize;
            if weights.len() < expected {
                let limit = format!("{} rows x topk {topk} = {expected}", handle.rows());
                return Err(Error::invalid("length of topk_weights", weights.len(), limit));
            }
        }
        let returns = Returns { y, handle, topk_weights: options.topk_weights.map(Vec::as_slice) };
        let tokens = handle.tokens() as usize;
        let weights = if options.topk_weights.is_some() { tokens * topk as usize } else { 0 };
        let reduction = Reduction::new(options.bias, tokens * self.row_bytes(), weights);
        // Only the rows that this machine's peers can reach are offered to them.
        let offered = y.block_in(&self.arena).filter(|_| self.machine.capabilities().get);
        let lease = y.lease().filter(|_| offered.is_some());
        lease.inspect(|lease| lease.offer());
        let ended = {
            let Started { operation, links, vigil, .. } = self.start(Kind::Combine, rings, Some(handle));
            run(&operation, vigil, bring_back(&operation, links, &returns, &reduction, offered.as_ref())).await
        };
        self.end(ended)?;
        lease.inspect(|lease| lease.take_back());
        let (me, exchange) = (self.me, handle.exchange());
        self.count_rows(|to| exchange.rows(to, me), |from| exchange.rows(me, from));
        let Sums { x, topk_weights } = reduction.into_sums();
        let x = HostRows::Owned { bytes: x, row_bytes: self.row_bytes() };
        Ok(Combined { x, topk_weights, event: Ready })
    }
}

/// The work of a combine.
async fn bring_back<M: Machine>(
    operation: &Operation<'_, M>,
    links: &mut Links,
    returns: &Returns<'_, M::Window>,
    reduction: &Reduction<'_, M::Window>,
    offered: Option<&Block>,
) -> Result<(), Fault> {
    let exchange = returns.handle.exchange();
    cut_rings(operation, links).await?;
    let mut control = Control::open(operation);
    if let Some(block) = offered {
        write_headers(operation, control.port(), returns, block)?;
    }
    control.bank().await?;
    control.notes(offered, |peer| exchange.first_row(peer, operation.me)).await?;
    drop(control);
    join(movers(operation, links, returns, reduction, offered.is_none())).await?;
    let mut control = Control::open(operation);
    control.done().await?;
    if offered.is_some() {
        control.wait_pulled(|peer| exchange.rows(peer, operation.me) > 0).await?;
    }
    Ok(())
}

/// Writes into the offered block what travels with its rows.
fn write_headers<M: Machine>(
    operation: &Operation<'_, M>,
    port: &mut impl Port,
    returns: &Returns<'_, M::Window>,
    block: &Block,
) -> Result<(), Fault> {
    let exchange = returns.handle.exchange();
    let mut header = HeaderBytes::new(operation.layout.row());
    for &peer in operation.peers {
        let first_row = exchange.first_row(peer, operation.me);
        for position in 0..exchange.rows(peer, operation.me) {
            returns.head(operation, &mut header, first_row + position, position);
            port.write(block.header(first_row + position).offset, header.as_bytes())?;
        }
    }
    Ok(())
}

/// The roles that give rows back and those that sum what comes back.
fn movers<'a, M: Machine>(
    operation: &'a Operation<'_, M>,
    links: &'a mut Links,
    returns: &'a Returns<'a, M::Window>,
    reduction: &'a Reduction<'a, M::Window>,
    through_rings: bool,
) -> Vec<RoleFuture<'a>> {
    let channels = operation.rings.channels as usize;
    let takes_part = |rank: &Rank| operation.peers.contains(rank);
    let mut roles = Vec::new();
    if through_rings {
        for (peer, rings) in (0u32..).map(Rank).zip(&mut links.out).filter(|(rank, _)| takes_part(rank)) {
            for (channel, ring) in (0u16..).zip(rings.iter_mut().take(channels)) {
                let role = Role::serving(Duty::Returner, peer, channel);
                let port = operation.port(role);
                roles.push(operation.role(role, give_back(operation, port, returns, ring, peer, channel)));
            }
        }
    }
    let mut by_channel: Vec<Vec<_>> = (0..channels).map(|_| Vec::new()).collect();
    for (rank, rings) in (0u32..).map(Rank).zip(&mut links.inn) {
        for (inlets, ring) in by_channel.iter_mut().zip(rings) {
            inlets.push(takes_part(&rank).then_some(ring));
        }
    }
    for (channel, inlets) in (0u16..).zip(by_channel) {
        let role = Role { duty: Duty::Reducer, peer: None, channel };
        let port = operation.port(role);
        roles.push(operation.role(role, reduce(operation, port, returns, reduction, inlets, channel)));
    }
    roles
}
