//! Combine within a node: brings the rows that a node's ranks return for one source together, token by token.

use std::collections::VecDeque;

use super::dispatch::check_row;
use super::inlet::Inlet;
use super::intake::HeaderBytes;
use super::returner::Returns;
use super::{Accumulator, Attended, Operation};
use crate::error::Fault;
use crate::layout::Block;
use crate::machine::{Machine, Window};
use crate::port::{LaneId, LaneKind, Offset, Port, Ticket, Work};
use crate::ring::Consumer;
use crate::topology::Rank;

/// How the rows of one rank come back.
enum Route<'a, 'o, M: Machine> {
    /// None come: it takes no part.
    Absent,
    /// They are the own rank's.
    Own,
    /// Through its ring.
    Ring(Inlet<'a, 'o, M>),
    /// Pulled from its window.
    Pull { block: Block, landing: VecDeque<Ticket> },
}

/// Gathers on one track: rows of the node's ranks for tokens of `source`. The port is lent, as an inlet's.
///
/// Order of calls: [`Gather::open`]; for every token [`Gather::pull`], ahead of its turn, and [`Gather::sum`];
/// [`Gather::close`].
pub(crate) struct Gather<'a, 'o, M: Machine, W: Window> {
    operation: &'a Operation<'o, M>,
    returns: &'a Returns<'a, W>,
    source: Rank,
    track: u16,
    /// `[ranks of the node]`.
    routes: Vec<Route<'a, 'o, M>>,
    header: HeaderBytes,
    row: Vec<u8>,
    /// Tokens pulled and summed so far.
    pulled: u32,
    summed: u32,
}

impl<'a, 'o, M: Machine, W: Window> Gather<'a, 'o, M, W> {
    pub(crate) fn new(operation: &'a Operation<'o, M>, returns: &'a Returns<'a, W>, source: Rank, track: u16) -> Self {
        let row = operation.row();
        Self {
            operation,
            returns,
            source,
            track,
            routes: Vec::new(),
            header: HeaderBytes::new(&row),
            row: vec![0; row.payload_bytes() as usize],
            pulled: 0,
            summed: 0,
        }
    }

    /// Learns how each rank's rows come back, and opens the rings. `rings` are `[ranks of the node]`, none for the own.
    pub(crate) async fn open(
        &mut self,
        port: &mut Attended<M::Port>,
        rings: Vec<Option<&'a mut Consumer>>,
    ) -> Result<(), Fault> {
        let topology = self.operation.layout.topology();
        for (rank, ring) in topology.ranks_of(topology.node_of(self.operation.me)).zip(rings) {
            let route = match ring {
                _ if rank == self.operation.me => Route::Own,
                None => Route::Absent,
                Some(_) if self.operation.mask.contains(rank) => Route::Absent,
                Some(ring) => match self.operation.note_of(port, rank).await? {
                    Some(block) => Route::Pull { block, landing: VecDeque::new() },
                    None => Route::Ring(Inlet::new(self.operation, ring, rank, self.track)),
                },
            };
            self.routes.push(route);
        }
        for route in &mut self.routes {
            if let Route::Ring(inlet) = route {
                inlet.open(port, &mut []).await?;
            }
        }
        Ok(())
    }

    fn route(&mut self, rank: Rank) -> &mut Route<'a, 'o, M> {
        &mut self.routes[self.operation.layout.topology().local_of(rank) as usize]
    }

    /// Starts the gets of the rows of the next token; `reached` are the node's ranks that got it, with positions. At most
    /// [`crate::layout::PULL_DEPTH`] tokens ahead of [`Gather::sum`].
    pub(crate) async fn pull(&mut self, port: &mut Attended<M::Port>, reached: &[(Rank, u32)]) -> Result<(), Fault> {
        let (layout, format) = (self.operation.layout, self.operation.row());
        let turn = self.pulled;
        self.pulled += 1;
        for &(rank, position) in reached {
            let row = self.returns.routed.exchange.first_row(self.source, rank) + position;
            let lane = LaneId { peer: rank, kind: LaneKind::Credit(self.track) };
            let to = layout.pull_slot(self.track, rank, turn).offset;
            let header_bytes = self.header.as_bytes().len() as u64;
            let Route::Pull { block, landing } = self.route(rank) else { continue };
            let header = block.header(row).offset.span(header_bytes);
            let payload = block.codes(row).offset.span(format.payload_bytes());
            port.get(lane, header, to).await?;
            landing.push_back(port.get(lane, payload, to.plus(format.header_bytes())).await?);
        }
        Ok(())
    }

    /// Adds the rows of the next token, ranks ascending.
    pub(crate) async fn sum(
        &mut self,
        port: &mut Attended<M::Port>,
        into: &mut Accumulator,
        token: u32,
        reached: &[(Rank, u32)],
    ) -> Result<(), Fault> {
        for &(rank, position) in reached {
            let own = self.take(port, rank, position).await?;
            check_row(self.operation, &self.header, rank, position)?;
            self.operation.agree("token of a row", token, self.header.header().source_token, rank)?;
            port.charge(Work::Reduce { bytes: self.row.len() as u64 });
            match own {
                Some(row) => into.add(self.returns.y.borrow(row, &mut self.row)?),
                None => into.take(&mut self.row),
            }
            into.add_weights(&self.header);
        }
        self.summed += 1;
        Ok(())
    }

    /// Whether the next row of each of these ranks can be had without waiting.
    pub(crate) fn is_ready(&mut self, port: &Attended<M::Port>, reached: &[(Rank, u32)]) -> Result<bool, Fault> {
        for &(rank, _) in reached {
            if let Route::Ring(inlet) = self.route(rank)
                && !inlet.is_ready(port)?
            {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Brings header and payload of a rank's next row. Of the own rank's only the header: the payload may lie in ordinary memory,
    /// in the row that is returned.
    async fn take(&mut self, port: &mut Attended<M::Port>, rank: Rank, position: u32) -> Result<Option<u32>, Fault> {
        let (track, turn) = (self.track, self.summed);
        match self.route(rank) {
            Route::Absent => {
                self.operation.agree("ranks that return rows of a token", 0, 1, rank)?;
            }
            Route::Own => {
                let row = self.returns.routed.exchange.first_row(self.source, rank) + position;
                self.returns.head(self.operation, &mut self.header, row, position);
                return Ok(Some(row));
            }
            Route::Ring(inlet) => {
                let at = inlet.next(port).await?;
                self.read(port, at)?;
                if let Route::Ring(inlet) = self.route(rank) {
                    inlet.release(port).await?;
                }
            }
            Route::Pull { landing, .. } => {
                let ticket = landing.pop_front().unwrap_or_default();
                port.flush(LaneId { peer: rank, kind: LaneKind::Credit(track) }, ticket).await?;
                self.read(port, self.operation.layout.pull_slot(track, rank, turn).offset)?;
            }
        }
        Ok(None)
    }

    fn read(&mut self, port: &Attended<M::Port>, at: Offset) -> Result<(), Fault> {
        port.read(at, self.header.as_mut_bytes())?;
        port.read(at.plus(self.operation.row().header_bytes()), &mut self.row)
    }

    /// Returns the credit that is pending on all rings.
    pub(crate) async fn return_credit(&mut self, port: &mut Attended<M::Port>) -> Result<(), Fault> {
        for route in &mut self.routes {
            if let Route::Ring(inlet) = route {
                inlet.return_credit(port).await?;
            }
        }
        Ok(())
    }
}
