//! Safe handles of what libibverbs gives out. Each keeps alive what it depends on, and ends after what depends on it.

mod completions;
mod context;
mod pair;
mod region;

pub(crate) use completions::Completions;
pub(crate) use context::Context;
pub(crate) use pair::{Atomics, Depths, Queue, QueuePair};
pub(crate) use region::Region;
