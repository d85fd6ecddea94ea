//! The roles that move the rows of a dispatch.

use std::cell::RefCell;

use super::links::{Ends, Links};
use crate::layout::Block;
use crate::machine::Machine;
use crate::plan::{Exchange, Fanout, channel_share};
use crate::port::{Duty, Role};
use crate::roles::{
    Intake, Operation, Outgoing, RoleFuture, collect, deliver, forward, keep, lay, pull, receive, send, send_far,
};
use crate::settings::Placement;
use crate::topology::{Rank, Topology};

/// What the roles of a dispatch work on.
pub(super) struct Movers<'a, 'o, M: Machine> {
    pub(super) operation: &'a Operation<'o, M>,
    pub(super) outgoing: &'a Outgoing<'a, M::Window>,
    pub(super) intake: &'a Intake<M::Window>,
    pub(super) exchange: &'a Exchange,
    /// Where rows land, when they are placed directly.
    pub(super) block: Option<&'a Block>,
    /// `[nodes]`: tokens that go to each node.
    pub(super) by_node: &'a [Vec<u32>],
    /// `[nodes, channels]`: rows that come from each node along the rail, filled by the forwarders.
    pub(super) fanout: &'a [RefCell<Fanout>],
}

impl<'a, 'o, M: Machine> Movers<'a, 'o, M> {
    fn topology(&self) -> &'a Topology {
        self.operation.layout.topology()
    }

    fn channels(&self) -> std::ops::Range<u32> {
        0..self.operation.rings.channels
    }

    /// All roles.
    pub(super) fn roles(&self, links: &'a mut Links) -> Vec<RoleFuture<'a>> {
        let mut roles = Vec::new();
        let mut ends = links.ends();
        for channel in self.channels() {
            if self.operation.pulled {
                roles.push(self.layer(&mut ends, channel));
            }
            for &peer in self.operation.near {
                roles.extend(self.near_sender(&mut ends, peer, channel));
            }
            for &peer in self.operation.rail {
                roles.extend(self.far_sender(&mut ends, peer, channel));
                roles.extend(self.forwarder(&mut ends, peer, channel));
            }
        }
        for source in self.operation.others() {
            self.takers(&mut ends, source, &mut roles);
        }
        // Behind those that others wait for.
        roles.extend(self.channels().filter_map(|channel| self.keeper(channel)));
        roles
    }

    /// The sender of a channel whose rows are pulled: one for all readers.
    fn layer(&self, ends: &mut Ends<'a>, channel: u32) -> RoleFuture<'a> {
        let (operation, outgoing) = (self.operation, self.outgoing);
        let track = operation.own_track(channel);
        let takes_part = |peer: &&Rank| !operation.mask.contains(**peer);
        let readers = operation.near.iter().filter(takes_part).filter_map(|&peer| Some((peer, ends.out(peer, track)?)));
        let readers = readers.collect();
        let role = Role { duty: Duty::Sender, peer: None, track };
        operation.role(role, lay(operation, operation.port(role), outgoing, readers, channel))
    }

    /// The role that copies what stays on this rank of a channel's rows, if any does.
    fn keeper(&self, channel: u32) -> Option<RoleFuture<'a>> {
        let (operation, me) = (self.operation, self.operation.me);
        let plan = self.outgoing.plan;
        let share = channel_share(plan.sent_to(me), plan.tokens(), operation.rings.channels, channel);
        if share.is_empty() {
            return None;
        }
        let role = Role::serving(Duty::Collector, me, operation.own_track(channel));
        let port = operation.port(role);
        let work = keep(operation, port, self.outgoing, self.intake, self.exchange, self.block, share);
        Some(operation.role(role, work))
    }

    fn near_sender(&self, ends: &mut Ends<'a>, peer: Rank, channel: u32) -> Option<RoleFuture<'a>> {
        let (operation, outgoing, exchange) = (self.operation, self.outgoing, self.exchange);
        let track = operation.own_track(channel);
        if operation.pulled {
            return None;
        }
        let ring = ends.out(peer, track)?;
        if operation.layout.settings().placement() == Placement::Direct {
            let role = Role::serving(Duty::Placer, peer, track);
            return Some(operation.role(role, deliver(operation, outgoing, exchange, ring, peer, channel)));
        }
        let role = Role::serving(Duty::Sender, peer, track);
        Some(operation.role(role, send(operation, operation.port(role), outgoing, ring, peer, channel)))
    }

    fn far_sender(&self, ends: &mut Ends<'a>, peer: Rank, channel: u32) -> Option<RoleFuture<'a>> {
        let operation = self.operation;
        let track = operation.layout.far_track(channel);
        let ring = ends.out(peer, track)?;
        let role = Role::serving(Duty::Sender, peer, track);
        let node = self.topology().node_of(peer);
        let tokens = &self.by_node[node.index()];
        let port = operation.port(role);
        Some(operation.role(role, send_far(operation, port, self.outgoing, tokens, ring, node, channel)))
    }

    fn forwarder(&self, ends: &mut Ends<'a>, source: Rank, channel: u32) -> Option<RoleFuture<'a>> {
        let operation = self.operation;
        let (topology, me) = (self.topology(), operation.me);
        let node = topology.node_of(source);
        let ring = ends.inn(source, operation.layout.far_track(channel))?;
        let track = operation.layout.near_track(node, channel);
        let outlets = topology.ranks_of(topology.node_of(me)).map(|rank| ends.out(rank, track)).collect();
        let role = Role::serving(Duty::Forwarder, source, track);
        let port = operation.port(role);
        let slot = &self.fanout[node.index() * operation.rings.channels as usize + channel as usize];
        let work = forward(operation, port, self.intake, self.exchange, self.block, ring, outlets, source, channel);
        Some(operation.role(role, async {
            let rows = work.await?;
            slot.replace(rows);
            Ok(())
        }))
    }

    /// The roles that take the rows of `source` which another rank of this node brings.
    fn takers(&self, ends: &mut Ends<'a>, source: Rank, roles: &mut Vec<RoleFuture<'a>>) {
        let (operation, intake, exchange) = (self.operation, self.intake, self.exchange);
        let writer = operation.gate_of(source);
        if writer == operation.me {
            return;
        }
        let node = self.topology().node_of(source);
        if let Some(block) = self.block {
            let role = Role::serving(Duty::Collector, source, operation.layout.near_track(node, 0));
            let port = operation.port(role);
            roles.push(operation.role(role, collect(operation, port, intake, exchange, block, source, writer)));
            return;
        }
        for channel in self.channels() {
            let track = operation.layout.near_track(node, channel);
            let Some(ring) = ends.inn(writer, track) else { continue };
            let role = Role::serving(Duty::Receiver, source, track);
            let port = operation.port(role);
            if operation.pulled {
                roles.push(operation.role(role, pull(operation, port, intake, exchange, ring, source, channel)));
                continue;
            }
            let work = receive(operation, port, intake, exchange, ring, source, writer, track);
            roles.push(operation.role(role, work));
        }
    }
}
