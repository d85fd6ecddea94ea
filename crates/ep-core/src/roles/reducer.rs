//! Combine: the rank whose tokens they are sums the rows that come back.
//!
//! The sum of a token starts from its bias, adds the rows of its ranks in ascending order in f32, and is rounded once.

use std::cell::RefCell;
use std::collections::VecDeque;

use half::bf16;

use super::dispatch::check_row;
use super::inlet::Inlet;
use super::intake::HeaderBytes;
use super::returner::Returns;
use super::{Attended, Operation};
use crate::engine::rows::HostRows;
use crate::error::Fault;
use crate::layout::Block;
use crate::machine::{Machine, Window};
use crate::plan::channel_tokens;
use crate::port::{LaneId, LaneKind, Offset, Port, Ticket, Work};
use crate::ring::Consumer;
use crate::topology::Rank;

/// What a combine gives back, filled by the reducers of all channels: each token has its own place.
pub(crate) struct Reduction<'a, W: Window> {
    bias: [Option<&'a HostRows<W>>; 2],
    sums: RefCell<Sums>,
}

/// The sums of all tokens.
pub(crate) struct Sums {
    /// `[tokens, hidden]` bf16.
    pub(crate) x: Vec<u8>,
    /// `[tokens, topk]`, or empty.
    pub(crate) topk_weights: Vec<f32>,
}

impl<'a, W: Window> Reduction<'a, W> {
    pub(crate) fn new(bias: [Option<&'a HostRows<W>>; 2], rows_bytes: usize, weights: usize) -> Self {
        let sums = Sums { x: vec![0; rows_bytes], topk_weights: vec![0.0; weights] };
        Self { bias, sums: RefCell::new(sums) }
    }

    pub(crate) fn into_sums(self) -> Sums {
        self.sums.into_inner()
    }
}

/// One token's sum on its way.
struct Accumulator {
    sum: Vec<f32>,
    weights: Vec<f32>,
    row: Vec<u8>,
}

impl Accumulator {
    fn new(hidden: usize, topk: usize) -> Self {
        Self { sum: vec![0.0; hidden], weights: vec![0.0; topk], row: vec![0; hidden * 2] }
    }

    fn clear(&mut self) {
        self.sum.fill(0.0);
        self.weights.fill(0.0);
    }

    /// Starts the sum from the bf16 row that lies in `self.row`. Not the same as adding it to 0: -0 stays -0.
    fn start(&mut self) {
        for (sum, value) in self.sum.iter_mut().zip(values(&self.row)) {
            *sum = value;
        }
    }

    /// Adds the bf16 row that lies in `self.row`.
    fn add(&mut self) {
        for (sum, value) in self.sum.iter_mut().zip(values(&self.row)) {
            *sum += value;
        }
    }

    fn add_weights(&mut self, header: &HeaderBytes) {
        for (at, sum) in self.weights.iter_mut().enumerate() {
            *sum += header.choice(at).weight;
        }
    }

    /// Rounds the sum into `into`.
    fn finish(&self, into: &mut [u8]) {
        for (bytes, &sum) in into.chunks_exact_mut(2).zip(&self.sum) {
            bytes.copy_from_slice(&bf16::from_f32(sum).to_le_bytes());
        }
    }
}

/// The elements of a bf16 row.
fn values(row: &[u8]) -> impl Iterator<Item = f32> {
    let (elements, _) = row.as_chunks();
    elements.iter().map(|&bytes| bf16::from_le_bytes(bytes).to_f32())
}

/// How the rows of one rank come back to a reducer.
enum Route<'a, 'o, M: Machine> {
    /// Nothing comes from it.
    None,
    /// They are the rank's own.
    Own,
    /// Through its ring.
    Ring(Inlet<'a, 'o, M>),
    /// Pulled from its window.
    Pull { block: Block, first_row: u32, landing: VecDeque<Ticket> },
}

/// A reducer at work.
struct Reducer<'a, 'o, M: Machine, W: Window> {
    operation: &'a Operation<'o, M>,
    port: Attended<M::Port>,
    returns: &'a Returns<'a, W>,
    channel: u16,
    /// `[ranks]`.
    routes: Vec<Route<'a, 'o, M>>,
    header: HeaderBytes,
    accumulator: Accumulator,
}

/// Sums the tokens of one channel. `rings` are the rings of this channel from each rank `[ranks]`.
pub(crate) async fn reduce<'a, M: Machine, W: Window>(
    operation: &'a Operation<'_, M>,
    port: Attended<M::Port>,
    returns: &'a Returns<'a, W>,
    reduction: &Reduction<'_, W>,
    rings: Vec<Option<&'a mut Consumer>>,
    channel: u16,
) -> Result<(), Fault> {
    let shape = operation.layout.shape();
    let mut reducer = Reducer {
        operation,
        port,
        returns,
        channel,
        routes: Vec::new(),
        header: HeaderBytes::new(operation.layout.row()),
        accumulator: Accumulator::new(shape.hidden() as usize, shape.topk() as usize),
    };
    reducer.open(rings).await?;
    let plan = &returns.handle.inner.plan;
    let range = channel_tokens(plan.tokens(), operation.rings.channels, channel.into());
    let mut ahead = range.clone();
    for token in range {
        while ahead.start < ahead.end && ahead.start < token + crate::layout::PULL_DEPTH {
            reducer.pull(ahead.start).await?;
            ahead.start += 1;
        }
        reducer.sum(token, reduction).await?;
    }
    reducer.close().await
}

impl<'a, 'o, M: Machine, W: Window> Reducer<'a, 'o, M, W> {
    /// Learns how each rank's rows come back, and opens the rings.
    async fn open(&mut self, rings: Vec<Option<&'a mut Consumer>>) -> Result<(), Fault> {
        for (rank, ring) in (0u32..).map(Rank).zip(rings) {
            let route = match ring {
                _ if rank == self.operation.me => Route::Own,
                None => Route::None,
                Some(ring) => match self.operation.note_of(&mut self.port, rank).await? {
                    Some((block, first_row)) => Route::Pull { block, first_row, landing: VecDeque::new() },
                    None => Route::Ring(Inlet::new(self.operation, ring, rank, self.channel)),
                },
            };
            self.routes.push(route);
        }
        for route in &mut self.routes {
            if let Route::Ring(inlet) = route {
                inlet.open(&mut self.port).await?;
            }
        }
        Ok(())
    }

    /// Starts the gets of a token's rows.
    async fn pull(&mut self, token: u32) -> Result<(), Fault> {
        let plan = &self.returns.handle.inner.plan;
        let format = *self.operation.layout.row();
        for &(rank, position) in plan.reached(token) {
            let Route::Pull { block, first_row, landing } = &mut self.routes[rank.index()] else { continue };
            let to = self.operation.layout.pull_slot(self.channel.into(), rank, token).offset;
            let lane = LaneId { peer: rank, kind: LaneKind::Credit(self.channel) };
            let row = *first_row + position;
            let header = block.header(row).offset.span(self.header.as_bytes().len() as u64);
            let payload = block.payload(row).offset.span(format.payload_bytes());
            self.port.get(lane, header, to).await?;
            landing.push_back(self.port.get(lane, payload, to.plus(format.header_bytes())).await?);
        }
        Ok(())
    }

    /// Sums one token.
    async fn sum(&mut self, token: u32, reduction: &Reduction<'_, W>) -> Result<(), Fault> {
        self.accumulator.clear();
        for (at, bias) in reduction.bias.into_iter().flatten().enumerate() {
            bias.read(token, &mut self.accumulator.row)?;
            if at == 0 { self.accumulator.start() } else { self.accumulator.add() }
        }
        let plan = &self.returns.handle.inner.plan;
        for &(rank, position) in plan.reached(token) {
            self.row_of(rank, token, position).await?;
            self.port.charge(Work::Reduce { bytes: self.accumulator.row.len() as u64 });
            self.accumulator.add();
            self.accumulator.add_weights(&self.header);
        }
        let mut sums = reduction.sums.borrow_mut();
        let (row, topk) = (self.accumulator.row.len(), self.accumulator.weights.len());
        self.accumulator.finish(&mut sums.x[token as usize * row..][..row]);
        if !sums.topk_weights.is_empty() {
            sums.topk_weights[token as usize * topk..][..topk].copy_from_slice(&self.accumulator.weights);
        }
        Ok(())
    }

    /// Brings the row of `token` from `rank` into the accumulator's row, and its header.
    async fn row_of(&mut self, rank: Rank, token: u32, position: u32) -> Result<(), Fault> {
        if let Route::Ring(inlet) = &mut self.routes[rank.index()]
            && !inlet.is_ready(&self.port)?
        {
            self.be_polite().await?;
        }
        match &mut self.routes[rank.index()] {
            Route::Own => {
                let row = self.returns.handle.inner.exchange.first_row(rank, rank) + position;
                self.returns.head(self.operation, &mut self.header, row, position);
                self.returns.y.read(row, &mut self.accumulator.row)?;
            }
            Route::Ring(inlet) => {
                let at = inlet.next(&mut self.port).await?;
                self.take(at)?;
                let Route::Ring(inlet) = &mut self.routes[rank.index()] else { return Ok(()) };
                inlet.release(&mut self.port).await?;
            }
            Route::Pull { landing, .. } => {
                let lane = LaneId { peer: rank, kind: LaneKind::Credit(self.channel) };
                let ticket = landing.pop_front().unwrap_or_default();
                self.port.flush(lane, ticket).await?;
                self.take(self.operation.layout.pull_slot(self.channel.into(), rank, token).offset)?;
            }
            Route::None => {
                return self.operation.agree("ranks that return rows of a token", 0, 1, rank);
            }
        }
        check_row(self.operation, &self.header, rank, position)?;
        self.operation.agree("token of a row", token, self.header.header().source_token, rank)
    }

    /// Takes header and payload of a row that lies in the own window.
    fn take(&mut self, at: Offset) -> Result<(), Fault> {
        self.port.read(at, self.header.as_mut_bytes())?;
        self.port.read(at.plus(self.operation.layout.row().header_bytes()), &mut self.accumulator.row)
    }

    /// Returns the credit of all rings: this role is about to wait.
    async fn be_polite(&mut self) -> Result<(), Fault> {
        #[cfg(feature = "plant")]
        if self.operation.plants(crate::plant::Plant::ImpoliteWaiting) {
            return Ok(());
        }
        self.close().await
    }

    async fn close(&mut self) -> Result<(), Fault> {
        for route in &mut self.routes {
            if let Route::Ring(inlet) = route {
                inlet.return_credit(&mut self.port).await?;
            }
        }
        Ok(())
    }
}
