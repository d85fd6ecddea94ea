//! What every backend must do.
//!
//! [`workload`] makes batches and routings from a seed; [`verify`] holds what ranks observed against
//! [`ep_core::reference`].
//!
//! ```
//! use ep_conformance::workload::{RoutingKind, Workload};
//! use ep_core::Shape;
//!
//! let shape = Shape::builder().experts(8).topk(2).hidden(16).max_tokens(4).build()?;
//! let kind: RoutingKind = "grouped:4:2".parse()?;
//! let batches = Workload::new(shape, vec![4, 0, 3, 4]).kind(kind).seed(7).batches()?;
//! assert_eq!(batches[2].topk_idx.len(), 3 * 2);
//! # Ok::<(), ep_core::Error>(())
//! ```
#![forbid(unsafe_code)]

pub mod verify;
pub mod workload;
