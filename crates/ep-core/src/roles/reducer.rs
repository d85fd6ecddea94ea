//! Combine: the rank whose tokens they are sums what comes back.
//!
//! The sum of a token starts from its bias. On one node the rows of its ranks are added in ascending order; on several,
//! each node's own sum, rounded to bf16 by the node, in ascending order of the nodes. It is rounded once at the end.

use std::cell::RefCell;

use super::dispatch::check_row;
use super::gather::Gather;
use super::inlet::Inlet;
use super::intake::HeaderBytes;
use super::returner::Returns;
use super::{Accumulator, Attended, Operation};
use crate::buffers::{Buffer, HostRows};
use crate::error::Fault;
use crate::layout::PULL_DEPTH;
use crate::machine::{Machine, Window};
use crate::plan::channel_tokens;
use crate::plant::Plant;
use crate::port::{Port, Work};
use crate::ring::Consumer;
use crate::topology::{Node, Rank};

/// What a combine gives back, filled by the reducers of all channels: each token has its own place.
pub(crate) struct Reduction<'a, W: Window> {
    bias: [Option<&'a HostRows<W>>; 2],
    sums: RefCell<Sums>,
}

/// The sums of all tokens.
pub(crate) struct Sums {
    /// `[tokens, hidden]` bf16.
    pub(crate) x: Buffer,
    /// `[tokens, topk]`, or empty.
    pub(crate) topk_weights: Vec<f32>,
}

impl<'a, W: Window> Reduction<'a, W> {
    /// The sums are written to `x`, all of it, and `weights` sums of weights.
    pub(crate) fn new(bias: [Option<&'a HostRows<W>>; 2], x: Buffer, weights: usize) -> Self {
        let sums = Sums { x, topk_weights: vec![0.0; weights] };
        Self { bias, sums: RefCell::new(sums) }
    }

    pub(crate) fn into_sums(self) -> Sums {
        self.sums.into_inner()
    }

    fn store(&self, token: u32, sum: &Accumulator, row_bytes: usize) {
        let mut sums = self.sums.borrow_mut();
        sum.finish(&mut sums.x[token as usize * row_bytes..][..row_bytes]);
        let weights = sum.weights();
        if !sums.topk_weights.is_empty() {
            sums.topk_weights[token as usize * weights.len()..][..weights.len()].copy_from_slice(weights);
        }
    }
}

/// The rings that a reducer empties on one channel.
pub(crate) struct Incoming<'a> {
    /// `[ranks of the node]`, none for the own.
    pub(crate) near: Vec<Option<&'a mut Consumer>>,
    /// `[nodes]`, none for the own and for nodes that take no part.
    pub(crate) far: Vec<Option<&'a mut Consumer>>,
}

/// A reducer at work.
struct Reducer<'a, 'o, M: Machine, W: Window> {
    operation: &'a Operation<'o, M>,
    port: Attended<M::Port>,
    gather: Gather<'a, 'o, M, W>,
    /// `[nodes]`: the rail's inlets, each with its rank.
    rail: Vec<Option<(Inlet<'a, 'o, M>, Rank)>>,
    sum: Accumulator,
    partial: Accumulator,
    header: HeaderBytes,
    row: Vec<u8>,
}

/// Sums the tokens of one channel.
pub(crate) async fn reduce<'a, M: Machine, W: Window>(
    operation: &'a Operation<'_, M>,
    port: Attended<M::Port>,
    returns: &'a Returns<'a, W>,
    reduction: &Reduction<'_, W>,
    incoming: Incoming<'a>,
    channel: u32,
) -> Result<(), Fault> {
    let layout = operation.layout;
    let (shape, row) = (layout.shape(), operation.row());
    let mut reducer = Reducer {
        operation,
        port,
        gather: Gather::new(operation, returns, operation.me, operation.own_track(channel)),
        rail: Vec::new(),
        sum: Accumulator::new(shape.hidden(), shape.topk()),
        partial: Accumulator::new(shape.hidden(), shape.topk()),
        header: HeaderBytes::new(&row),
        row: vec![0; row.payload_bytes() as usize],
    };
    reducer.open(incoming, channel).await?;
    let plan = &returns.routed.plan;
    let range = channel_tokens(plan.tokens(), operation.rings.channels, channel);
    let mut ahead = range.clone();
    for token in range {
        while ahead.start < ahead.end && ahead.start < token + PULL_DEPTH {
            reducer.pull(plan.reached(ahead.start)).await?;
            ahead.start += 1;
        }
        reducer.token(token, plan.reached(token), reduction).await?;
    }
    reducer.close().await
}

impl<'a, 'o, M: Machine, W: Window> Reducer<'a, 'o, M, W> {
    async fn open(&mut self, incoming: Incoming<'a>, channel: u32) -> Result<(), Fault> {
        let topology = self.operation.layout.topology();
        self.gather.open(&mut self.port, incoming.near).await?;
        for (node, ring) in topology.all_nodes().zip(incoming.far) {
            let rank = topology.rank_at(node, topology.local_of(self.operation.me));
            let track = self.operation.layout.far_track(channel);
            let mut inlet = ring.map(|ring| (Inlet::new(self.operation, ring, rank, track), rank));
            if let Some((inlet, _)) = &mut inlet {
                inlet.open(&mut self.port, &mut []).await?;
            }
            self.rail.push(inlet);
        }
        Ok(())
    }

    /// The part of a token's ranks that are in `node`.
    fn part_of<'r>(&self, node: Node, reached: &'r [(Rank, u32)]) -> &'r [(Rank, u32)] {
        let topology = self.operation.layout.topology();
        let start = reached.partition_point(|&(rank, _)| topology.node_of(rank) < node);
        let end = reached.partition_point(|&(rank, _)| topology.node_of(rank) <= node);
        &reached[start..end]
    }

    fn own_node(&self) -> Node {
        self.operation.layout.topology().node_of(self.operation.me)
    }

    async fn pull(&mut self, reached: &[(Rank, u32)]) -> Result<(), Fault> {
        let own = self.part_of(self.own_node(), reached);
        self.gather.pull(&mut self.port, own).await
    }

    /// Sums one token.
    async fn token(&mut self, token: u32, reached: &[(Rank, u32)], reduction: &Reduction<'_, W>) -> Result<(), Fault> {
        self.sum.clear();
        for (at, bias) in reduction.bias.into_iter().flatten().enumerate() {
            bias.read(token, &mut self.row)?;
            if at == 0 { self.sum.start(&self.row) } else { self.sum.add(&self.row) }
        }
        let own = self.own_node();
        if !self.gather.is_ready(&self.port, self.part_of(own, reached))? {
            self.be_polite().await?;
        }
        if self.operation.layout.topology().nodes() == 1 {
            self.gather.sum(&mut self.port, &mut self.sum, token, reached).await?;
        } else {
            for node in self.operation.layout.topology().all_nodes() {
                let part = self.part_of(node, reached);
                if node == own {
                    self.own_partial(token, part).await?;
                } else if !part.is_empty() {
                    self.far_partial(token, node).await?;
                }
            }
        }
        reduction.store(token, &self.sum, self.row.len());
        Ok(())
    }

    /// Adds the own node's part, rounded as those of the other nodes are.
    async fn own_partial(&mut self, token: u32, part: &[(Rank, u32)]) -> Result<(), Fault> {
        self.partial.clear();
        self.gather.sum(&mut self.port, &mut self.partial, token, part).await?;
        if !part.is_empty() {
            if self.operation.plants(Plant::PartialNotRounded) {
                self.sum.add_unrounded(&mut self.partial);
                return Ok(());
            }
            self.partial.finish(&mut self.row);
            self.sum.take(&mut self.row);
            self.sum.add_own(self.partial.weights());
        }
        Ok(())
    }

    /// Adds another node's part.
    async fn far_partial(&mut self, token: u32, node: Node) -> Result<(), Fault> {
        let waits = match &mut self.rail[node.index()] {
            Some((inlet, _)) => !inlet.is_ready(&self.port)?,
            None => return self.operation.agree("nodes that return rows of a token", 0, 1, self.operation.me),
        };
        if waits {
            self.be_polite().await?;
        }
        let Some((inlet, rank)) = &mut self.rail[node.index()] else { return Ok(()) };
        let at = inlet.next(&mut self.port).await?;
        self.port.read(at, self.header.as_mut_bytes())?;
        self.port.read(at.plus(self.operation.row().header_bytes()), &mut self.row)?;
        inlet.release(&mut self.port).await?;
        let own = self.header.header();
        check_row(self.operation, &self.header, *rank, own.position)?;
        self.operation.agree("token of a row", token, own.source_token, *rank)?;
        self.port.charge(Work::Reduce { bytes: self.row.len() as u64 });
        self.sum.take(&mut self.row);
        self.sum.add_weights(&self.header);
        Ok(())
    }

    /// Returns the credit of all rings: this role is about to wait.
    async fn be_polite(&mut self) -> Result<(), Fault> {
        if self.operation.is_impolite() {
            return Ok(());
        }
        self.return_credit().await
    }

    async fn close(&mut self) -> Result<(), Fault> {
        self.gather.return_credit(&mut self.port).await?;
        for (inlet, _) in self.rail.iter_mut().flatten() {
            inlet.close(&mut self.port).await?;
        }
        Ok(())
    }

    async fn return_credit(&mut self) -> Result<(), Fault> {
        self.gather.return_credit(&mut self.port).await?;
        for (inlet, _) in self.rail.iter_mut().flatten() {
            inlet.return_credit(&mut self.port).await?;
        }
        Ok(())
    }
}
