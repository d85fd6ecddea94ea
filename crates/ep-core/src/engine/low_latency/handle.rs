//! What a low-latency dispatch leaves behind, and operations that were sent and not received.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use super::LowOrder;
use super::flights::Flight;
use crate::engine::Mark;
use crate::layout::LowKind;
use crate::plan::Plan;
use crate::roles::low_latency::{Asked, Faults, Pick, Row};

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

    /// `[tokens, topk]`: the choices of this rank's batch.
    pub fn topk_idx(&self) -> &[i64] {
        &self.inner.routed.topk_idx
    }

    /// How the received rows lie.
    pub fn order(&self) -> LowOrder {
        self.inner.routed.order
    }
}

#[derive(Debug)]
pub(super) struct Inner {
    pub(super) mark: Mark,
    pub(super) routed: Arc<Routed>,
    /// `[ranks]`: received rows of each, a range of `rows`.
    pub(super) sources: Vec<Range<u32>>,
    /// `[ranks]`: tokens that each dispatched, where rows travel as units.
    pub(super) tokens: Vec<u32>,
    pub(super) rows: Vec<Row>,
    pub(super) picks: Vec<Pick>,
}

/// Where this rank's own tokens went.
#[derive(Debug)]
pub(super) struct Routed {
    pub(super) plan: Plan,
    pub(super) topk_idx: Vec<i64>,
    pub(super) topk_weights: Option<Vec<f32>>,
    pub(super) order: LowOrder,
}

/// What it takes to receive an operation that was sent, or to skip it.
#[derive(Debug)]
pub(super) struct Work {
    pub(super) kind: LowKind,
    pub(super) routed: Arc<Routed>,
    /// `[tokens, topk]`: given with a combine.
    pub(super) topk_weights: Option<Vec<f32>>,
    /// What went wrong in sending; the receiving half tries again what it can.
    pub(super) faults: Mutex<Faults>,
}

impl Work {
    /// What this rank asked for, and is owed in a combine.
    pub(super) fn asked(&self) -> Asked<'_> {
        let Routed { plan, topk_idx, .. } = &*self.routed;
        Asked { plan, topk_idx, topk_weights: self.topk_weights.as_deref().unwrap_or_default() }
    }
}

/// A low-latency dispatch that was sent and is to be received. Dropped, it is skipped by the endpoint's next call.
#[derive(Debug)]
pub struct Dispatching {
    pub(super) flight: Flight<Arc<Work>>,
}

/// A low-latency combine that was sent and is to be received. Dropped, it is skipped by the endpoint's next call.
#[derive(Debug)]
pub struct Combining {
    pub(super) flight: Flight<Arc<Work>>,
}
