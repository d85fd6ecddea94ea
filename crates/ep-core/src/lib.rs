//! The expert-parallel protocol.
//!
//! In a mixture-of-experts model a router gives each token `topk` experts; the experts live on many accelerators,
//! *ranks*, grouped in *nodes*. *Dispatch* sends each token's row to the ranks that hold its experts; *combine* brings
//! the experts' results back and sums them. This crate is that protocol, written once for every machine: it does no
//! I/O, has no unsafe code, knows no backend and never reads a clock of its own.
#![forbid(unsafe_code)]

pub mod engine;
pub mod error;
pub mod incident;
pub mod layout;
pub mod machine;
pub mod plan;
#[cfg(feature = "plant")]
pub mod plant;
pub mod port;
pub mod quant;
pub mod reference;
pub mod ring;
mod roles;
pub mod settings;
pub mod shape;
pub mod topology;
pub mod trace;

pub use engine::endpoint::Endpoint;
pub use error::{Error, Failure, Fault, Phase};
pub use layout::Layout;
pub use port::{Nanos, Port};
pub use quant::Scaling;
pub use settings::{Placement, Rings, Settings};
pub use shape::{Element, Shape};
pub use topology::{Node, Rank, RankSet, Topology};
