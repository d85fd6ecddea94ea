//! The calls of one rank, whatever it runs on: raw memory in, tensors and handles out.

use std::any::Any;

use moexpress::engine::low_latency::LowOrder;
use moexpress::engine::{Dispatch, Handle, Stats, Ways};
use moexpress::{Error, Layout, OutboxUse};

use crate::backend::{LowTold, RawBatch, RawRows};
use crate::dlpack::Tensor;
use crate::early::{EarlyOut, RawReady};
use crate::room::{Given, LowRoom};

/// Why a call gave no result.
#[derive(Debug)]
pub(crate) enum Ended {
    /// It failed.
    Failed(Error),
    /// The caller would not wait on.
    Stopped,
}

impl From<Error> for Ended {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

pub(crate) type Answer<T> = Result<T, Ended>;
/// Whether to wait on.
pub(crate) type GoOn<'a> = &'a mut dyn FnMut() -> bool;

/// Where tokens go, in Python's memory.
#[derive(Clone, Debug)]
pub(crate) enum RawRouting {
    /// int64 `[tokens, topk]` and f32 `[tokens, topk]`.
    TopK { topk_idx: usize, topk_weights: Option<usize> },
    /// u8 `[tokens, ranks]`.
    Membership { in_rank: usize, tokens_per_expert: Vec<u32> },
}

/// What a combine takes beside its rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RawCombine {
    /// f32 `[rows, topk]`.
    pub(crate) topk_weights: Option<usize>,
    /// bf16 `[tokens, hidden]` each.
    pub(crate) bias: [Option<usize>; 2],
    /// What it uses of its outboxes.
    pub(crate) outbox: OutboxUse,
    /// Of rows by expert what rounding the sums leaves.
    pub(crate) remainder: bool,
}

/// What a dispatch brought.
pub(crate) struct Dispatched {
    pub(crate) x: Tensor,
    pub(crate) scales: Option<Tensor>,
    pub(crate) rows: u32,
    /// Choices and weights, where they travel.
    pub(crate) choices: Option<(Tensor, Tensor)>,
    pub(crate) source_token: Tensor,
    pub(crate) source_rank: Tensor,
    pub(crate) expert_counts: Vec<u32>,
    /// Rows, and counts of each expert, where they stay in the machine's memory.
    pub(crate) counts: Option<(Tensor, Tensor)>,
    pub(crate) by_expert: Option<ByExpert>,
    pub(crate) handle: Handle,
}

/// Where rows by expert stand. See [`moexpress::engine::ByExpert`].
pub(crate) struct ByExpert {
    pub(crate) experts: Experts,
    pub(crate) slots: Tensor,
    pub(crate) offsets: Tensor,
    pub(crate) weights: Option<Tensor>,
}

/// First slots and rows of experts. See [`moexpress::engine::ExpertSlots`].
pub(crate) enum Experts {
    OnHost(Vec<u32>, Vec<u32>),
    OnDevice(Tensor, Tensor),
}

/// What a combine brought: rows, and the sums of weights where they travelled.
pub(crate) struct Combined {
    pub(crate) x: Tensor,
    pub(crate) topk_weights: Option<Tensor>,
}

/// A handle of low latency, whatever its endpoint is, and what the host knows of its rows.
pub(crate) type AnyLow = (Box<dyn Any + Send + Sync>, LowTold);

/// A rank, whatever it runs on. See [`moexpress::Endpoint`] and [`moexpress::LowLatency`].
///
/// # Safety of its methods
/// Addresses are as [`Backend`](crate::backend::Backend) asks.
pub(crate) trait Calls: Send {
    fn layout(&self) -> &Layout;
    fn mask(&self) -> Vec<u32>;
    fn low_mask(&self) -> Vec<u32>;
    fn stats(&self) -> Stats;
    fn ways(&self) -> Ways;
    /// Bytes that the arena has now, and whether it has grown as far as it can.
    fn arena_bytes(&self) -> u64;
    fn is_arena_full(&self) -> bool;
    fn stream(&self) -> usize;
    unsafe fn follow(&mut self, stream: usize) -> Result<(), Error>;
    unsafe fn lead(&mut self, stream: usize) -> Result<(), Error>;
    unsafe fn ends_behind(&mut self, stream: usize) -> Result<(), Error>;
    unsafe fn lasts(&mut self, stream: usize);
    fn trim(&mut self) -> Result<(), Error>;

    unsafe fn dispatch(
        &mut self,
        x: &RawRows,
        routing: &RawRouting,
        options: &Dispatch,
        go_on: GoOn<'_>,
    ) -> Answer<Dispatched>;
    unsafe fn redispatch(
        &mut self,
        x: &RawRows,
        handle: &Handle,
        outbox: OutboxUse,
        go_on: GoOn<'_>,
    ) -> Answer<Dispatched>;
    /// INT8 rows of bf16 rows.
    unsafe fn quantize(&mut self, x: &RawRows, go_on: GoOn<'_>) -> Answer<Tensor>;
    unsafe fn combine(&mut self, y: &RawRows, handle: &Handle, with: &RawCombine, go_on: GoOn<'_>) -> Answer<Combined>;

    fn early(&mut self, rows: u32, multiprocessors: Option<u32>) -> Result<EarlyOut, Error>;
    unsafe fn send_dispatch(
        &mut self,
        batch: &RawBatch,
        early: Option<&(dyn Any + Send + Sync)>,
        given: Option<Given>,
        go_on: GoOn<'_>,
    ) -> Answer<(Box<dyn Any + Send>, LowRoom)>;
    unsafe fn receive_dispatch(&mut self, sent: &dyn Any, stats: Option<usize>, go_on: GoOn<'_>) -> Answer<AnyLow>;
    unsafe fn send_combine(
        &mut self,
        y: usize,
        handle: &dyn Any,
        topk_weights: Option<usize>,
        ready: Option<&RawReady>,
        go_on: GoOn<'_>,
    ) -> Answer<Box<dyn Any + Send>>;
    unsafe fn receive_combine(&mut self, sent: &dyn Any, into: usize, go_on: GoOn<'_>) -> Answer<()>;
    unsafe fn low_dispatch(
        &mut self,
        batch: &RawBatch,
        along: Option<&dyn Any>,
        stats: Option<usize>,
        given: Option<Given>,
        go_on: GoOn<'_>,
    ) -> Answer<(AnyLow, LowRoom)>;
    /// Bytes of the blocks that are given for rows in that order.
    fn low_sizes(&self, order: LowOrder) -> Result<Vec<usize>, Error>;
    /// The choices of the batch that a handle is of.
    fn low_choices(&mut self, handle: &dyn Any) -> Answer<Tensor>;
    unsafe fn low_combine(
        &mut self,
        y: usize,
        handle: &dyn Any,
        topk_weights: Option<usize>,
        into: usize,
        go_on: GoOn<'_>,
    ) -> Answer<()>;

    fn mask_rank(&mut self, rank: u32, go_on: GoOn<'_>) -> Answer<()>;
    fn recover(&mut self, mask: &[u32], go_on: GoOn<'_>) -> Answer<()>;
}
