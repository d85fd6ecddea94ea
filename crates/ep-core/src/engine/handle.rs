//! What a dispatch leaves behind for combine and cached dispatch.

use std::any::Any;
use std::fmt::Debug;
use std::sync::Arc;

use super::mark::Mark;
use crate::error::Error;
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
    pub(crate) tokens: u32,
    /// What this rank sends. Of nothing where a backend keeps it.
    pub(crate) plan: Arc<Plan>,
    /// What all ranks send each other. Of nothing where a backend keeps it.
    pub(crate) exchange: Arc<Exchange>,
    /// `[nodes]`: tokens of this rank that went to each node.
    pub(crate) by_node: Vec<Vec<u32>>,
    /// `[nodes]`: rows that came along the rail from each node and were fanned out here.
    pub(crate) fanout: Vec<Fanout>,
    /// Rows received, or made room for.
    pub(crate) rows: u32,
    /// `[rows]`: token of each received row at its source. Empty where the backend keeps them elsewhere.
    pub(crate) source_token: Vec<u32>,
    /// What a backend with an endpoint of its own keeps with it.
    pub(crate) kept: Option<Arc<dyn Kept>>,
}

/// What a backend with an endpoint of its own keeps with a handle, in its machine's memory: enough to replay the routing, and to
/// tell the host of it when the host asks.
pub trait Kept: Any + Debug + Send + Sync {
    /// What this rank sent.
    ///
    /// # Errors
    /// When the memory is gone, or cannot be read now.
    fn plan(&self) -> Result<Arc<Plan>, Error>;

    /// What all ranks sent each other.
    ///
    /// # Errors
    /// As [`Kept::plan`].
    fn exchange(&self) -> Result<Arc<Exchange>, Error>;
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
    /// Tokens of this rank's batch.
    pub tokens: u32,
    /// Rows that this rank received, or made room for where only the machine knows how many.
    pub rows: u32,
    /// Replays the routing.
    pub kept: Arc<dyn Kept>,
}

impl Handle {
    /// A handle of a backend's own.
    pub fn of_backend(replay: Replay) -> Self {
        let Replay { mark, op, rings, tokens, rows, kept } = replay;
        let inner = Inner {
            mark,
            op,
            rings,
            tokens,
            plan: Arc::default(),
            exchange: Arc::default(),
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

    /// [`Replay::kept`], to be shared with another handle; none where no backend kept anything.
    pub fn shared_kept(&self) -> Option<Arc<dyn Kept>> {
        self.inner.kept.clone()
    }

    /// What the backend kept in [`Replay::kept`], if it is a `T`.
    pub fn kept<T: Kept>(&self) -> Option<&T> {
        let kept: &dyn Any = self.inner.kept.as_deref()?;
        kept.downcast_ref()
    }

    /// The dispatch that made it. Of dispatches that a graph replays, and of those behind them, what the host knew of the number.
    pub fn op(&self) -> u64 {
        self.inner.op
    }

    /// Generation of the communicator it belongs to.
    pub fn generation(&self) -> u16 {
        self.inner.mark.generation()
    }

    /// Rows this rank received; where their number stayed in the machine's memory ([`super::Dispatch::device_counts`]), the bound
    /// that was given. A combine takes at least so many.
    pub fn rows(&self) -> u32 {
        self.inner.rows
    }

    /// Tokens of this rank's batch.
    pub fn tokens(&self) -> u32 {
        self.inner.tokens
    }

    /// Rings of the dispatch, which its combine and cached dispatches use unless they say otherwise.
    pub fn rings(&self) -> Rings {
        self.inner.rings
    }

    /// What all ranks sent each other. Where a backend keeps it in its machine's memory, it is fetched at the first request:
    /// what was enqueued is waited for.
    ///
    /// # Errors
    /// When it cannot be fetched.
    pub fn exchange(&self) -> Result<Arc<Exchange>, Error> {
        self.inner.kept.as_ref().map_or_else(|| Ok(Arc::clone(&self.inner.exchange)), |kept| kept.exchange())
    }

    /// What this rank sent. Fetched as [`Handle::exchange`].
    ///
    /// # Errors
    /// When it cannot be fetched.
    pub fn plan(&self) -> Result<Arc<Plan>, Error> {
        self.inner.kept.as_ref().map_or_else(|| Ok(Arc::clone(&self.inner.plan)), |kept| kept.plan())
    }

    /// `[rows]`: token of each received row at its source. Empty where the backend keeps them in its machine's memory.
    pub fn source_tokens(&self) -> &[u32] {
        &self.inner.source_token
    }
}
