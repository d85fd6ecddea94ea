//! Combine: rows go back through rings, or are pulled where the experts' output lies in the window.

use super::by_expert;
use super::endpoint::{Combine, Combined, Ready};
use super::handle::Handle;
use super::links::{Ends, Links};
use super::{Engine, HostRows, Started, run};
use crate::error::{Error, Fault};
use crate::layout::{Block, Kind};
use crate::machine::Machine;
use crate::port::{Duty, Port, Role};
use crate::ring::Consumer;
use crate::roles::{
    Control, HeaderBytes, Incoming, Operation, Reduction, Returns, RoleFuture, Sums, beside, gather_for, give_back,
    join, reduce,
};
use crate::topology::{Node, Rank};

impl<M: Machine> Engine<M> {
    pub(super) async fn combine_rows(
        &mut self,
        y: &HostRows<M::Window>,
        handle: &Handle,
        options: Combine<'_, Self>,
    ) -> Result<Combined<Self>, Error> {
        self.desk.ready()?;
        self.desk.check_handle(handle)?;
        let routed = handle.routed()?;
        let bias = options.bias.into_iter().flatten().map(HostRows::extent);
        let weights = options.topk_weights.map(Vec::len);
        let rings = self.desk.check_combine(handle, options.rings, y.extent(), bias, weights)?;
        options.outbox.check()?;
        options.check_remainder(routed.expansion.is_some())?;
        let topk = self.desk.shape().topk();
        let tokens = handle.tokens() as usize;
        let weights = if options.topk_weights.is_some() { tokens * topk as usize } else { 0 };
        let reduction = Reduction::new(options.bias, self.pool.take(tokens * self.result_bytes())?, weights);
        let mut sums = match &routed.expansion {
            Some(expansion) => {
                // As many as came, whatever there is room for.
                let rows = routed.exchange.received(self.desk.me);
                Some((expansion, by_expert::sums(&self.pool, rows, self.result_bytes())?))
            }
            None => None,
        };
        // Only the rows that this machine's peers can reach are offered to them.
        let may_offer = self.machine.capabilities().get && !handle.outboxes();
        let offered = y.block_in(&self.desk.arena).filter(|_| may_offer && sums.is_none());
        let lease = y.lease().filter(|_| offered.is_some());
        lease.inspect(|lease| lease.offer());
        let (steps, ended) = {
            let Started { operation, links, vigil, .. } =
                self.start(Kind::Combine, (rings, options.outbox), handle.op().wrapping_add(options.said_alike()));
            let operation = if handle.outboxes() { operation.in_outboxes() } else { operation };
            let steps = operation.outbox_steps();
            let work = async {
                if let Some((expansion, sums)) = &mut sums {
                    by_expert::reduce(&operation, y, expansion, sums, options.remainder)?;
                }
                let y = sums.as_ref().map_or(y, |(_, sums)| sums);
                let returns = Returns { y, routed, topk_weights: options.topk_weights.map(Vec::as_slice) };
                bring_back(&operation, links, &returns, &reduction, offered.as_ref()).await
            };
            (steps, run(&operation, vigil, work).await)
        };
        self.end(ended)?;
        lease.inspect(|lease| lease.take_back());
        self.count_rows(routed, false);
        steps.inspect(|steps| self.desk.ways.in_outboxes(steps));
        self.desk.ways.combined(handle.rows(), offered.is_some());
        let Sums { x, topk_weights } = reduction.into_sums();
        let x = HostRows::Owned { bytes: x, row_bytes: self.result_bytes() };
        Ok(Combined { x, topk_weights, event: Ready })
    }
}

/// The work of a combine, and the coordinators that post for it.
async fn bring_back<M: Machine>(
    operation: &Operation<'_, M>,
    links: &mut Links,
    returns: &Returns<'_, M::Window>,
    reduction: &Reduction<'_, M::Window>,
    offered: Option<&Block>,
) -> Result<(), Fault> {
    links.cut(operation).await?;
    let coordinators = links.coordinators(operation);
    beside(coordinators, exchange_results(operation, links, returns, reduction, offered)).await
}

/// Control first and last, all movers in between.
async fn exchange_results<M: Machine>(
    operation: &Operation<'_, M>,
    links: &mut Links,
    returns: &Returns<'_, M::Window>,
    reduction: &Reduction<'_, M::Window>,
    offered: Option<&Block>,
) -> Result<(), Fault> {
    let exchange = &returns.routed.exchange;
    let mut control = Control::open(operation);
    if let Some(block) = offered {
        write_headers(operation, control.port(), returns, block)?;
    }
    control.bank().await?;
    control.notes(offered).await?;
    drop(control);
    join(movers(operation, links, returns, reduction, offered.is_none())).await?;
    let mut control = Control::open(operation);
    control.done().await?;
    if offered.is_some() {
        let topology = operation.layout.topology();
        let sources =
            |gate: Rank| topology.all_nodes().map(move |node| topology.rank_at(node, topology.local_of(gate)));
        control.wait_pulled(|peer| sources(peer).any(|source| exchange.rows(source, operation.me) > 0)).await?;
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
    let exchange = &returns.routed.exchange;
    let mut header = HeaderBytes::new(operation.layout.row());
    for source in operation.others() {
        let first_row = exchange.first_row(source, operation.me);
        for position in 0..exchange.rows(source, operation.me) {
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
    let layout = operation.layout;
    let topology = layout.topology();
    let mut roles = Vec::new();
    let mut ends = links.ends();
    let own_node = topology.node_of(operation.me);
    for channel in 0..operation.rings.channels {
        let far = layout.far_track(channel);
        for source in operation.others().filter(|_| through_rings) {
            let track = layout.near_track(topology.node_of(source), channel);
            // What came through this rank itself is gathered here.
            let Some(ring) = ends.out(operation.gate_of(source), track) else { continue };
            let role = Role::serving(Duty::Returner, source, track);
            let port = operation.port(role);
            roles.push(operation.role(role, give_back(operation, port, returns, ring, source, channel)));
        }
        let near_rings = |ends: &mut Ends<'a>, node: Node| -> Vec<Option<&'a mut Consumer>> {
            topology.ranks_of(own_node).map(|rank| ends.inn(rank, layout.near_track(node, channel))).collect()
        };
        for &source in operation.rail {
            let Some(ring) = ends.out(source, far) else { continue };
            let rings = near_rings(&mut ends, topology.node_of(source));
            let role = Role::serving(Duty::Gatherer, source, far);
            let port = operation.port(role);
            roles.push(operation.role(role, gather_for(operation, port, returns, ring, rings, source, channel)));
        }
        let near = near_rings(&mut ends, own_node);
        let rail = |node: Node| topology.rank_at(node, topology.local_of(operation.me));
        let takes_part = |rank: &Rank| operation.rail.contains(rank);
        let far = topology
            .all_nodes()
            .map(|node| Some(rail(node)).filter(takes_part).and_then(|rank| ends.inn(rank, far)))
            .collect();
        let role = Role { duty: Duty::Reducer, peer: None, track: operation.own_track(channel) };
        let port = operation.port(role);
        let incoming = Incoming { near, far };
        roles.push(operation.role(role, reduce(operation, port, returns, reduction, incoming, channel)));
    }
    roles
}
