//! The simulator: to be documented.
#![forbid(unsafe_code)]

mod cluster;
mod explore;
mod fault;
mod lane;
mod machine;
mod memory;
mod port;
mod race;
mod violation;
mod world;

pub use cluster::{Builder, Cluster, Outcome, Run};
pub use fault::Fault;
pub use machine::{Machine, Window};
pub use port::Port;
pub use violation::{Access, AccessKind, Awaited, Broken, Race, Report, Violation, Waiting};
