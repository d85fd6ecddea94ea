//! What a dispatch leaves behind for combine and cached dispatch.

use std::any::Any;
use std::sync::Arc;

use super::mark::Mark;
use crate::plan::{Exchange, Fanout, Plan};
use crate::settings::Rings;

/// Replays the routing of a dispatch. Cheap to clone; valid in the generation that made it.
#[derive(Clone, Debug)]
pub struct Handle {
    pub(crate) inner: Arc<Inner>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) mark: Mark,
    pub(crate) op: u64,
    pub(crate) rings: Rings,
    /// What this rank sends.
    pub(crate) plan: Arc<Plan>,
    /// What all ranks send each other.
    pub(crate) exchange: Arc<Exchange>,
    /// `[nodes]`: tokens of this rank that went to each node.
    pub(crate) by_node: Vec<Vec<u32>>,
    /// `[nodes]`: rows that came along the rail from each node and were fanned out here.
    pub(crate) fanout: Vec<Fanout>,
    /// Rows received.
    pub(crate) rows: u32,
    /// `[rows]`: token of each received row at its source. Empty where the backend keeps them elsewhere.
    pub(crate) source_token: Vec<u32>,
    /// What a backend with an endpoint of its own keeps with it.
    pub(crate) kept: Option<Arc<dyn Any + Send + Sync>>,
}

/// What a handle is made of by a backend that implements [`Endpoint`](super::Endpoint) itself, on one node.
#[derive(Debug)]
pub struct Replay {
    /// The endpoint's.
    pub mark: Mark,
    /// The dispatch.
    pub op: u64,
    /// Rings of the dispatch.
    pub rings: Rings,
    /// What this rank sent.
    pub plan: Arc<Plan>,
    /// What all ranks sent each other.
    pub exchange: Exchange,
    /// Rows that this rank received.
    pub rows: u32,
    /// Whatever the backend needs to replay the routing.
    pub kept: Arc<dyn Any + Send + Sync>,
}

impl Handle {
    /// A handle of a backend's own.
    pub fn of_backend(replay: Replay) -> Self {
        let Replay { mark, op, rings, plan, exchange, rows, kept } = replay;
        let inner = Inner {
            mark,
            op,
            rings,
            plan,
            exchange: Arc::new(exchange),
            by_node: Vec::new(),
            fanout: Vec::new(),
            rows,
            source_token: Vec::new(),
            kept: Some(kept),
        };
        Self { inner: Arc::new(inner) }
    }

    /// Whose it is.
    pub fn mark(&self) -> &Mark {
        &self.inner.mark
    }

    /// What this rank sent, to be shared with another handle.
    pub fn shared_plan(&self) -> Arc<Plan> {
        Arc::clone(&self.inner.plan)
    }

    /// [`Replay::kept`], to be shared with another handle; none where no backend kept anything.
    pub fn shared_kept(&self) -> Option<Arc<dyn Any + Send + Sync>> {
        self.inner.kept.clone()
    }

    /// What the backend kept in [`Replay::kept`], if it is a `T`.
    pub fn kept<T: Any>(&self) -> Option<&T> {
        self.inner.kept.as_deref()?.downcast_ref()
    }

    /// The dispatch that made it.
    pub fn op(&self) -> u64 {
        self.inner.op
    }

    /// Generation of the communicator it belongs to.
    pub fn generation(&self) -> u16 {
        self.inner.mark.generation()
    }

    /// Rows this rank received.
    pub fn rows(&self) -> u32 {
        self.inner.rows
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

    /// `[rows]`: token of each received row at its source. Empty where the backend keeps them in its machine's memory.
    pub fn source_tokens(&self) -> &[u32] {
        &self.inner.source_token
    }
}
