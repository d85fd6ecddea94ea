//! Safe handles of what libibverbs gives out. Each keeps alive what it depends on, and ends after what depends on it.

mod completions;
mod context;
mod domain;
mod pair;
mod register;

pub(crate) use completions::Completions;
pub(crate) use context::{Context, Port};
pub(crate) use domain::{Domain, Region};
pub(crate) use pair::{Depths, Path, QueuePair};
