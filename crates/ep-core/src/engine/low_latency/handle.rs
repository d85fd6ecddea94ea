//! What a low-latency dispatch leaves behind, and operations that were sent and not received.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

use crate::engine::Mark;
use crate::plan::Plan;
use crate::roles::low_latency::{Faults, Pick, Row};

/// Says combine where the rows of a low-latency dispatch came from. Cheap to clone.
#[derive(Clone, Debug)]
pub struct LowHandle {
    pub(super) inner: Arc<Inner>,
}

impl LowHandle {
    /// Tokens of this rank's batch.
    pub fn tokens(&self) -> u32 {
        self.inner.routed.plan.tokens()
    }

    /// Whether each rank weighs and sums its own experts' results: the weights were given at dispatch.
    pub fn reduces_per_rank(&self) -> bool {
        self.inner.routed.topk_weights.is_some()
    }
}

#[derive(Debug)]
pub(super) struct Inner {
    pub(super) mark: Mark,
    pub(super) routed: Arc<Routed>,
    /// `[ranks]`: received rows of each, a range of `rows`.
    pub(super) sources: Vec<Range<u32>>,
    pub(super) rows: Vec<Row>,
    pub(super) picks: Vec<Pick>,
}

/// Where this rank's own tokens went.
#[derive(Debug)]
pub(super) struct Routed {
    pub(super) plan: Plan,
    pub(super) topk_idx: Vec<i64>,
    pub(super) topk_weights: Option<Vec<f32>>,
}

/// An operation that was sent.
#[derive(Debug)]
pub(super) struct Sent {
    pub(super) mark: Mark,
    pub(super) op: u64,
    /// What went wrong in sending; the receiving half tries again what it can.
    pub(super) faults: RefCell<Faults>,
}

/// A low-latency dispatch that was sent and is to be received.
#[derive(Debug)]
pub struct Dispatching {
    pub(super) sent: Sent,
    pub(super) routed: Arc<Routed>,
}

/// A low-latency combine that was sent and is to be received.
#[derive(Debug)]
pub struct Combining {
    pub(super) sent: Sent,
    pub(super) routed: Arc<Routed>,
    /// `[tokens, topk]`: given with the combine.
    pub(super) topk_weights: Option<Vec<f32>>,
}
