//! Moves tokens to experts and back.
//!
//! In a mixture-of-experts model a router gives each token `topk` experts; the experts live on many accelerators,
//! *ranks*. *Dispatch* sends each token's row to the ranks that hold its experts, *combine* brings the experts' results
//! back and sums them. This crate is the front door: the protocol's API ([`ep_core`], re-exported here), and backends to
//! run it on, chosen by Cargo features at build time and by value at run time.
//!
//! | feature | module | ranks are |
//! |---|---|---|
//! | `sim` (default) | [`sim`] | any number of tasks in one process, under a seeded adversary |
//! | `cli` (default) | | the `moexpress` command line; switch it off for a library without its dependencies |
#![forbid(unsafe_code)]

pub use ep_core::*;

#[cfg(feature = "sim")]
pub use ep_sim as sim;
