//! What a dispatch leaves behind for combine and cached dispatch.

use std::sync::Arc;

use crate::plan::{Exchange, Fanout, Plan};
use crate::settings::Rings;

/// Replays the routing of a dispatch. Cheap to clone; valid in the generation that made it.
#[derive(Clone, Debug)]
pub struct Handle {
    pub(crate) inner: Arc<Inner>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    /// The identity of the endpoint that made it.
    pub(crate) endpoint: Arc<()>,
    pub(crate) op: u64,
    pub(crate) generation: u16,
    pub(crate) rings: Rings,
    /// What this rank sends.
    pub(crate) plan: Arc<Plan>,
    /// What all ranks send each other.
    pub(crate) exchange: Arc<Exchange>,
    /// `[nodes]`: tokens of this rank that went to each node.
    pub(crate) by_node: Vec<Vec<u32>>,
    /// `[nodes]`: rows that came along the rail from each node and were fanned out here.
    pub(crate) fanout: Vec<Fanout>,
    /// `[rows]`: token of each received row at its source.
    pub(crate) source_token: Vec<u32>,
}

impl Handle {
    /// The dispatch that made it.
    pub fn op(&self) -> u64 {
        self.inner.op
    }

    /// Generation of the communicator it belongs to.
    pub fn generation(&self) -> u16 {
        self.inner.generation
    }

    /// Rows this rank received.
    pub fn rows(&self) -> u32 {
        self.inner.source_token.len() as u32
    }

    /// Tokens of this rank's batch.
    pub fn tokens(&self) -> u32 {
        self.inner.plan.tokens()
    }

    /// Rings of the dispatch, which its combine and cached dispatches use unless they say otherwise.
    pub fn rings(&self) -> Rings {
        self.inner.rings
    }

    /// What all ranks sent each other.
    pub fn exchange(&self) -> &Exchange {
        &self.inner.exchange
    }

    /// What this rank sent.
    pub fn plan(&self) -> &Plan {
        &self.inner.plan
    }

    /// `[rows]`: token of each received row at its source.
    pub fn source_tokens(&self) -> &[u32] {
        &self.inner.source_token
    }
}
