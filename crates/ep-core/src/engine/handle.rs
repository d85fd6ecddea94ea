//! What a dispatch leaves behind for combine and cached dispatch.

use std::any::Any;
use std::borrow::Cow;
use std::fmt::Debug;
use std::sync::Arc;

use super::mark::Mark;
use crate::error::Error;
use crate::plan::{Exchange, Fanout, Plan, Routed};
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
    pub(crate) outboxes: bool,
    pub(crate) tokens: u32,
    /// Rows received, or made room for.
    pub(crate) rows: u32,
    pub(crate) routing: Routing,
}

/// Where the routing is that a handle replays.
#[derive(Debug)]
pub(crate) enum Routing {
    /// With the handle.
    Here(Routed),
    /// In a machine's memory, kept by its backend.
    Kept(Arc<dyn Kept>),
}

/// What a backend with an endpoint of its own keeps with a handle, in its machine's memory: enough to replay the routing, and to
/// tell the host of it when the host asks.
pub trait Kept: Any + Debug + Send + Sync {
    /// Tokens that this rank sent, and rows that it received or made room for.
    fn size(&self) -> (u32, u32);

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

    /// Rows by expert that the dispatch brought, or made room for; none where it brought them by source.
    fn slots(&self) -> Option<u32> {
        None
    }

    /// As [`Handle::fanout`].
    ///
    /// # Errors
    /// As [`Kept::plan`]; [`Error::Unsupported`] where the host is not told.
    fn fanout(&self) -> Result<Vec<Fanout>, Error> {
        Err(Error::unsupported("what passed through this rank from other nodes", "a backend that tells the host of it"))
    }
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
    /// Whether its rows went through outboxes because some arena had no room.
    pub outboxes: bool,
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
        let Replay { mark, op, rings, outboxes, tokens, rows, kept } = replay;
        Self { inner: Arc::new(Inner { mark, op, rings, outboxes, tokens, rows, routing: Routing::Kept(kept) }) }
    }

    /// Whose it is.
    pub fn mark(&self) -> &Mark {
        &self.inner.mark
    }

    /// [`Replay::kept`], to be shared with another handle.
    ///
    /// # Errors
    /// [`Error::Invalid`] where no backend kept anything.
    pub fn shared_kept(&self) -> Result<Arc<dyn Kept>, Error> {
        match &self.inner.routing {
            Routing::Kept(kept) => Ok(Arc::clone(kept)),
            Routing::Here(_) => Err(foreign()),
        }
    }

    /// What the backend kept in [`Replay::kept`]. It goes by numbers of its own: a handle that says others is somebody's own making.
    ///
    /// # Errors
    /// [`Error::Invalid`] where that is no `T`, or of other numbers of tokens and rows than the handle's.
    pub fn kept<T: Kept>(&self) -> Result<&T, Error> {
        let Routing::Kept(kept) = &self.inner.routing else { return Err(foreign()) };
        let any: &dyn Any = &**kept;
        let is_whole = kept.size() == (self.tokens(), self.rows());
        any.downcast_ref().filter(|_| is_whole).ok_or_else(foreign)
    }

    /// The routing, where it is with the handle.
    pub(crate) fn routed(&self) -> Result<&Routed, Error> {
        match &self.inner.routing {
            Routing::Here(routed) => Ok(routed),
            // Whoever made it himself, with the mark of one of ours.
            Routing::Kept(_) => Err(foreign()),
        }
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
    /// that was given.
    pub fn rows(&self) -> u32 {
        self.inner.rows
    }

    /// Rows by expert that this rank received, padding included ([`super::Dispatch::by_expert`]), or made room for where their number stayed in the
    /// machine's memory; none where rows are by source.
    pub fn slots(&self) -> Option<u32> {
        match &self.inner.routing {
            Routing::Here(routed) => routed.expansion.as_ref().map(|expansion| expansion.rows()),
            Routing::Kept(kept) => kept.slots(),
        }
    }

    /// Rows of results that a combine takes, at least: [`Handle::slots`], or [`Handle::rows`].
    pub fn result_rows(&self) -> u32 {
        self.slots().unwrap_or(self.rows())
    }

    /// Tokens of this rank's batch.
    pub fn tokens(&self) -> u32 {
        self.inner.tokens
    }

    /// Rings of the dispatch, which its combine and cached dispatches use unless they say otherwise.
    pub fn rings(&self) -> Rings {
        self.inner.rings
    }

    /// Whether some arena had no room for the batch, so that its rows went through outboxes, as those of all calls along this handle do.
    pub fn outboxes(&self) -> bool {
        self.inner.outboxes
    }

    /// What all ranks sent each other. Where a backend keeps it in its machine's memory, it is fetched at the first request:
    /// what was enqueued is waited for.
    ///
    /// # Errors
    /// When it cannot be fetched.
    pub fn exchange(&self) -> Result<Arc<Exchange>, Error> {
        match &self.inner.routing {
            Routing::Here(routed) => Ok(Arc::clone(&routed.exchange)),
            Routing::Kept(kept) => kept.exchange(),
        }
    }

    /// What this rank sent. Fetched as [`Handle::exchange`].
    ///
    /// # Errors
    /// When it cannot be fetched.
    pub fn plan(&self) -> Result<Arc<Plan>, Error> {
        match &self.inner.routing {
            Routing::Here(routed) => Ok(Arc::clone(&routed.plan)),
            Routing::Kept(kept) => kept.plan(),
        }
    }

    /// `[nodes]`: the rows that came along the rail from each node and were fanned out by this rank; none from its own node. Fetched as
    /// [`Handle::exchange`].
    ///
    /// # Errors
    /// When it cannot be fetched; [`Error::Unsupported`] where the backend does not tell.
    pub fn fanout(&self) -> Result<Cow<'_, [Fanout]>, Error> {
        match &self.inner.routing {
            Routing::Here(routed) => Ok(Cow::Borrowed(&routed.fanout)),
            Routing::Kept(kept) => kept.fanout().map(Cow::Owned),
        }
    }
}

fn foreign() -> Error {
    Error::invalid("handle", "of another backend", "one that this endpoint's dispatch gave")
}
