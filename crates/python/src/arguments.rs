//! What calls take of Python, as it comes: tuples on the path of every call, dictionaries where a communicator is made.

use std::sync::Arc;

use moexpress::OutboxUse;
use moexpress::engine::Dispatch;
use moexpress::engine::low_latency::LowOrder;
use pyo3::prelude::*;

use crate::backend::{RawBatch, RawRows, RawScales};
use crate::calls::{RawCombine, RawRouting};
use crate::room::{Given, Owner};

/// The caller's stream, which work of a call comes behind; and whether he waits for it himself: else that stream does. Nothing on CPUs.
pub(crate) type Order = (usize, bool);

/// `(address, rows, scales)`; of scales address and strides.
impl<'py> FromPyObject<'_, 'py> for RawRows {
    type Error = PyErr;

    fn extract(given: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let (address, rows, scales): (usize, u32, Option<(usize, i64, i64)>) = given.extract()?;
        let scales = scales.map(|(address, row, column)| RawScales { address, strides: [row, column] });
        Ok(Self { address, rows, scales })
    }
}

/// `(topk_idx, topk_weights or None)`, or `(in_rank, tokens_per_expert)`.
impl<'py> FromPyObject<'_, 'py> for RawRouting {
    type Error = PyErr;

    fn extract(given: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let (address, other): (usize, Bound<'py, PyAny>) = given.extract()?;
        if let Ok(topk_weights) = other.extract::<Option<usize>>() {
            return Ok(Self::TopK { topk_idx: address, topk_weights });
        }
        Ok(Self::Membership { in_rank: address, tokens_per_expert: other.extract()? })
    }
}

/// How rows of low latency lie: `None`, by expert; `(0, False)`, by source; `(alignment, zero_spare)`, packed.
#[derive(FromPyObject)]
pub(crate) struct RawOrder(u32, bool);

impl From<RawOrder> for LowOrder {
    fn from(RawOrder(alignment, zero_spare): RawOrder) -> Self {
        if alignment == 0 { Self::BySource } else { Self::Packed { alignment, zero_spare } }
    }
}

/// The same for Python.
pub(crate) const fn raw_order(order: LowOrder) -> Option<(u32, bool)> {
    match order {
        LowOrder::ByExpert => None,
        LowOrder::BySource => Some((0, false)),
        LowOrder::Packed { alignment, zero_spare } => Some((alignment, zero_spare)),
    }
}

/// `(x, topk_idx, topk_weights, (repeats, order, waits, most_rows))`: rows of a low-latency batch as they travel where they have scales.
impl<'py> FromPyObject<'_, 'py> for RawBatch {
    type Error = PyErr;

    fn extract(given: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        type Options = (bool, Option<RawOrder>, bool, Option<u32>);
        let (x, topk_idx, topk_weights, (repeats, order, waits, most_rows)): (_, _, _, Options) = given.extract()?;
        let order = order.map_or(LowOrder::ByExpert, LowOrder::from);
        Ok(Self { x, topk_idx, topk_weights, repeats, order, waits, most_rows })
    }
}

/// `[(address, bytes, what keeps them)]`: blocks of the caller's for what a low-latency dispatch brings.
#[derive(FromPyObject)]
pub(crate) struct Room(Vec<(usize, usize, Py<PyAny>)>);

impl From<Room> for Given {
    fn from(Room(blocks): Room) -> Self {
        Self::new(blocks.into_iter().map(|(address, bytes, owner)| (address, bytes, Arc::new(owner) as Owner)))
    }
}

/// `(piece, slots)`, or None: what a call says of outboxes.
#[derive(FromPyObject)]
pub(crate) struct RawOutbox(Option<u32>, Option<u32>);

/// What a call uses of its outboxes.
pub(crate) fn outbox_use(said: Option<RawOutbox>) -> OutboxUse {
    said.map_or(OutboxUse::USUAL, |RawOutbox(piece, slots)| OutboxUse { piece, slots })
}

/// `(topk_weights, bias, outbox, remainder)`: addresses, of biases at most two.
#[derive(FromPyObject)]
pub(crate) struct CombineOptions(Option<usize>, Vec<usize>, Option<RawOutbox>, bool);

impl From<CombineOptions> for RawCombine {
    fn from(CombineOptions(topk_weights, bias, said, remainder): CombineOptions) -> Self {
        let bias = [bias.first().copied(), bias.get(1).copied()];
        Self { topk_weights, bias, outbox: outbox_use(said), remainder }
    }
}

/// `(alignment, by_expert, (worst_rows, zero_spare), device_counts, repeats, outbox)`.
#[derive(FromPyObject)]
pub(crate) struct DispatchOptions(u32, bool, (u32, bool), bool, bool, Option<RawOutbox>);

impl From<DispatchOptions> for Dispatch {
    fn from(options: DispatchOptions) -> Self {
        let DispatchOptions(expert_alignment, by_expert, (worst_rows, zero_spare), device_counts, repeats, said) =
            options;
        Self {
            outbox: outbox_use(said),
            expert_alignment,
            by_expert,
            worst_rows,
            zero_spare,
            device_counts,
            repeats,
            ..Self::default()
        }
    }
}
