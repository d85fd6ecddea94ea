//! Dispatch between nodes: a row travels once along the rail to each node that needs it, and is fanned out there.
//!
//! Roles never wait in a circle: the far sender waits for the forwarder alone, the forwarder for the receivers of its
//! rows, and these for nobody; each track is served in token order everywhere.

use zerocopy::IntoBytes;

use super::intake::HeaderBytes;
use super::outlet::Outlet;
use super::placer::Placer;
use super::{Attended, Intake, Operation, Outgoing, inlet::Inlet};
use crate::error::Fault;
use crate::layout::{Block, Share};
use crate::machine::{Machine, Window};
use crate::plan::{Exchange, Fanout, channel_share};
use crate::plant::Plant;
use crate::port::Port;
use crate::ring::{Consumer, Producer};
use crate::settings::Placement;
use crate::topology::{Node, Rank};

/// Sends the rows of one channel that go to `node`, in token order, to the rank of this rail there.
pub(crate) async fn send_far<M: Machine, W: Window>(
    operation: &Operation<'_, M>,
    mut port: Attended<M::Port>,
    outgoing: &Outgoing<'_, W>,
    tokens: &[u32],
    ring: &mut Producer,
    node: Node,
    channel: u32,
) -> Result<(), Fault> {
    let Operation { layout, me, rings, .. } = operation;
    let (plan, topology) = (outgoing.plan, layout.topology());
    let share_of = |some: &[u32]| channel_share(some, plan.tokens(), rings.channels, channel);
    let shares: Vec<Share> = topology
        .ranks_of(node)
        .map(|rank| share_of(plan.sent_to(rank)))
        .map(|share| (share.start, share.end - share.start + u32::from(operation.plants(Plant::ShareTooLong))))
        .map(|(first, rows)| Share { first, rows })
        .collect();
    let peer = topology.rank_at(node, topology.local_of(*me));
    let (row, range) = (layout.row(), share_of(tokens));
    let mut outlet = Outlet::new(operation, ring, peer, layout.far_track(channel));
    let mut header = HeaderBytes::new(row);
    let mut scratch = vec![0; row.payload_bytes() as usize];
    let mut mask = vec![0u32; layout.mask_bytes() as usize / 4];
    let tokens = &tokens[range.start as usize..range.end as usize];
    let twice: Vec<u32>;
    let tokens = if operation.plants(Plant::SentTwiceToNode) {
        twice = tokens.iter().flat_map(|&token| [token, token]).collect();
        &twice
    } else {
        tokens
    };
    outlet.open(&mut port, tokens.len() as u32, 0, &shares).await?;
    for &token in tokens {
        outgoing.far_head(operation, &mut header, token);
        mask.fill(0);
        for &(rank, _) in plan.reached(token).iter().filter(|(rank, _)| topology.node_of(*rank) == node) {
            let local = topology.local_of(rank);
            mask[local as usize / 32] |= 1 << (local % 32);
        }
        let payload = outgoing.x.borrow(token, &mut scratch)?;
        let parts = [(0, header.as_bytes()), (row.header_bytes(), payload), (row.wire_bytes(), mask.as_bytes())];
        outlet.send(&mut port, &parts).await?;
    }
    outlet.close(&mut port).await
}

/// How rows leave a forwarder for one rank of its node.
enum Exit<'a, 'o, M: Machine> {
    /// They are its own.
    Own,
    /// Through a ring.
    Ring(Outlet<'a, 'o, M>),
    /// To their final place.
    Place(Placer<'a, 'o, M>),
}

/// A forwarder at work on the rows of one source and channel.
pub(crate) struct Forwarder<'a, 'o, M: Machine, W: Window> {
    operation: &'a Operation<'o, M>,
    port: Attended<M::Port>,
    intake: &'a Intake<W>,
    exchange: &'a Exchange,
    source: Rank,
    /// The own block, when rows are placed directly.
    block: Option<&'a Block>,
    /// `[ranks of the node]`.
    exits: Vec<Exit<'a, 'o, M>>,
    /// `[ranks of the node]`: position of the next row for each, and how many are still to come.
    shares: Vec<Share>,
    /// Rows that the rail announced.
    rows: u32,
    /// Where the row at hand went, kept for its memory.
    reached: Vec<(Rank, u32)>,
}

/// A row that came along the rail.
#[derive(Clone)]
struct Came {
    header: HeaderBytes,
    payload: Vec<u8>,
    /// One bit for each rank of the node.
    mask: Vec<u32>,
}

/// Takes the rows of `source` on one channel from the rail and fans them out. Tells what went where.
#[allow(clippy::too_many_arguments)] // What a role works on; each is of another kind.
pub(crate) async fn forward<'a, 'o, M: Machine, W: Window>(
    operation: &'a Operation<'o, M>,
    port: Attended<M::Port>,
    intake: &'a Intake<W>,
    exchange: &'a Exchange,
    block: Option<&'a Block>,
    ring: &'a mut Consumer,
    outlets: Vec<Option<&'a mut Producer>>,
    source: Rank,
    channel: u32,
) -> Result<Fanout, Fault> {
    let exits = Vec::with_capacity(outlets.len());
    let mut forwarder = Forwarder {
        operation,
        port,
        intake,
        exchange,
        source,
        block,
        exits,
        shares: Vec::new(),
        rows: 0,
        reached: Vec::new(),
    };
    let mut inlet = Inlet::new(operation, ring, source, operation.layout.far_track(channel));
    forwarder.open(&mut inlet, outlets, channel).await?;
    let rows = forwarder.run(&mut inlet).await?;
    forwarder.close(&mut inlet).await?;
    Ok(rows)
}

impl<'a, 'o, M: Machine, W: Window> Forwarder<'a, 'o, M, W> {
    /// Takes the rail's header slot and opens the way to every rank of the node.
    async fn open(
        &mut self,
        inlet: &mut Inlet<'a, 'o, M>,
        outlets: Vec<Option<&'a mut Producer>>,
        channel: u32,
    ) -> Result<(), Fault> {
        let Operation { layout, me, .. } = self.operation;
        let topology = layout.topology();
        let mut shares = vec![Share::default(); topology.ranks_per_node() as usize];
        let opening = inlet.open(&mut self.port, &mut shares).await?;
        self.rows = opening.rows;
        let track = layout.near_track(topology.node_of(self.source), channel);
        let direct = layout.settings().placement() == Placement::Direct;
        for ((rank, ring), share) in topology.ranks_of(topology.node_of(*me)).zip(outlets).zip(&shares) {
            let limit = self.exchange.rows(self.source, rank);
            let last = share.first.saturating_add(share.rows);
            if last > limit {
                let (mine, theirs) = (limit.into(), last.into());
                return Err(Fault::Mismatch { field: "rows sent to a node", mine, theirs, peer: self.source });
            }
            let block = if direct && rank != *me { self.operation.note_of(&mut self.port, rank).await? } else { None };
            let exit = match (ring, block) {
                (None, _) => Exit::Own,
                (Some(_), Some(block)) => Exit::Place(Placer::new(self.operation, block, rank, track)),
                (Some(ring), None) => {
                    let mut outlet = Outlet::new(self.operation, ring, rank, track);
                    outlet.open(&mut self.port, share.rows, share.first, &[]).await?;
                    Exit::Ring(outlet)
                }
            };
            self.exits.push(exit);
        }
        self.shares = shares;
        Ok(())
    }

    async fn run(&mut self, inlet: &mut Inlet<'a, 'o, M>) -> Result<Fanout, Fault> {
        let Operation { layout, .. } = self.operation;
        let row = layout.row();
        let mut came = Came {
            header: HeaderBytes::new(row),
            payload: vec![0; row.payload_bytes() as usize],
            mask: vec![0u32; layout.mask_bytes() as usize / 4],
        };
        let mut rows = Fanout::default();
        let mut passed = None;
        for _ in 0..self.rows {
            if !inlet.is_ready(&self.port)? {
                self.be_polite(inlet).await?;
            }
            let at = inlet.next(&mut self.port).await?;
            self.port.read(at, came.header.as_mut_bytes())?;
            self.port.read(at.plus(row.header_bytes()), &mut came.payload)?;
            self.port.read(at.plus(row.wire_bytes()), came.mask.as_mut_bytes())?;
            inlet.release(&mut self.port).await?;
            self.check(&came.header)?;
            if self.operation.plants(Plant::ForwardedOutOfOrder) && passed.is_none() {
                passed = Some(came.clone());
                continue;
            }
            self.fan_out(inlet, &came, &mut rows).await?;
            if let Some(before) = passed.take() {
                self.fan_out(inlet, &before, &mut rows).await?;
            }
        }
        if let Some(last) = passed {
            self.fan_out(inlet, &last, &mut rows).await?;
        }
        Ok(rows)
    }

    /// Sends one row to all ranks of the node that it is for.
    async fn fan_out(&mut self, inlet: &mut Inlet<'a, 'o, M>, came: &Came, rows: &mut Fanout) -> Result<(), Fault> {
        self.reached.clear();
        for local in 0..self.exits.len() as u32 {
            if came.mask[local as usize / 32] >> (local % 32) & 1 == 1 {
                let reached = self.leave(inlet, &came.header, &came.payload, local).await?;
                self.reached.push(reached);
            }
        }
        rows.push(came.header.header().source_token, &self.reached);
        Ok(())
    }

    fn check(&self, far: &HeaderBytes) -> Result<(), Fault> {
        let own = far.header();
        self.operation.agree("operation of a row", self.operation.op as u32, own.op, self.source)?;
        self.operation.agree("source of a row", self.source.0, own.source_rank, self.source)
    }

    /// Sends a row to the rank with local index `local`.
    async fn leave(
        &mut self,
        inlet: &mut Inlet<'a, 'o, M>,
        far: &HeaderBytes,
        payload: &[u8],
        local: u32,
    ) -> Result<(Rank, u32), Fault> {
        let Operation { layout, me, .. } = self.operation;
        let topology = layout.topology();
        let rank = topology.rank_at(topology.node_of(*me), local);
        let share = &mut self.shares[local as usize];
        let position = share.first;
        if share.rows == 0 {
            let field = "rows for a rank of a node";
            return Err(Fault::Mismatch { field, mine: 0, theirs: 1, peer: self.source });
        }
        *share = Share { first: position + 1, rows: share.rows - 1 };
        let row = self.exchange.first_row(self.source, rank) + position;
        let mut header = HeaderBytes::new(layout.row());
        header.localize(far, rank, layout.local_experts(), position);
        if let Exit::Ring(outlet) = &mut self.exits[local as usize]
            && !outlet.is_ready(&self.port)?
        {
            self.be_polite(inlet).await?;
        }
        match &mut self.exits[local as usize] {
            Exit::Own => {
                self.intake.own(&mut self.port, self.block, row, payload)?;
                self.intake.header(&header, row);
            }
            Exit::Ring(outlet) => {
                let parts = [(0, header.as_bytes()), (layout.row().header_bytes(), payload)];
                outlet.send(&mut self.port, &parts).await?;
            }
            Exit::Place(placer) => placer.place(&mut self.port, row, header.as_bytes(), payload).await?,
        }
        Ok((rank, position))
    }

    /// Publishes what is pending on all rings: this role is about to wait.
    async fn be_polite(&mut self, inlet: &mut Inlet<'a, 'o, M>) -> Result<(), Fault> {
        if self.operation.is_impolite() {
            return Ok(());
        }
        for exit in &mut self.exits {
            if let Exit::Ring(outlet) = exit {
                outlet.announce(&mut self.port).await?;
            }
        }
        inlet.return_credit(&mut self.port).await
    }

    async fn close(&mut self, inlet: &mut Inlet<'a, 'o, M>) -> Result<(), Fault> {
        inlet.close(&mut self.port).await?;
        for exit in &mut self.exits {
            match exit {
                Exit::Own => {}
                Exit::Ring(outlet) => outlet.close(&mut self.port).await?,
                Exit::Place(placer) => placer.close(&mut self.port).await?,
            }
        }
        Ok(())
    }
}
