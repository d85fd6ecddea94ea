//! Moves tokens to experts and back.
//!
//! In a mixture-of-experts model a router gives each token `topk` experts; the experts live on many accelerators,
//! *ranks*. *Dispatch* sends each token's row to the ranks that hold its experts, *combine* brings the experts'
//! results back and sums them. This crate is the front door: the protocol's API ([`ep_core`], re-exported here), and
//! backends to run it on. Features choose what is built; which backend runs is a value that the caller passes.
//!
//! | feature | gives | ranks are |
//! |---|---|---|
//! | `sim` (default) | the module `sim` | any number of tasks in one process, under a seeded adversary |
//! | `host` (default) | the module `host`, on Linux | CPUs: threads of one process, or processes, over shared memory; of several hosts with a transport between them |
//! | `host`, too | the module `far_loop`, on Linux | a transport between nodes of `host` and `cuda` for tests: ranks of one host, at a set rate and latency |
//! | `roce` (default) | the module `roce`, on Linux | the transport between nodes of `host` and `cuda`: RoCE or InfiniBand; building needs neither |
//! | `cuda` (default) | the module `cuda` | on NVIDIA GPUs: of one host, or of several with a transport between them; building needs no CUDA |
//! | `ibgda` (default) | the module `ibgda`, on Linux | the transport between nodes of `cuda` whose kernels post to ConnectX adapters; building needs none |
//! | `ascend` (default) | the module `ascend` | on Ascend NPUs of one server, or on a CPU twin of them, also of several servers; building needs no CANN |
//! | `cli` (default) | the command `moexpress` | switch it off for a library without its dependencies |
//!
//! Four simulated ranks with two experts each, and experts that return what they get, so that a token comes back times
//! the number of ranks it went to:
//!
//! ```
//! use moexpress::engine::{Combine, Routing};
//! use moexpress::{Endpoint, Shape, Topology};
//!
//! # #[cfg(feature = "sim")]
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let shape = Shape::builder().experts(8).topk(2).hidden(4).max_tokens(2).build()?;
//! let cluster = moexpress::sim::Cluster::builder(Topology::new(1, 4)?).seed(7).build(shape)?;
//! let run = cluster.run(async |mut ep| {
//!     let one = [0x80, 0x3f]; // 1.0 in bf16, little-endian
//!     let x = ep.rows(&one.repeat(2 * 4), 2)?;
//!     let topk_idx = ep.array(&[0i64, 5, 7, -1])?; // token 0 to ranks 0 and 2, token 1 to rank 3 only
//!     let got = ep.dispatch(&x, &Routing::TopK { topk_idx, topk_weights: None }).await?;
//!     let back = ep.combine(&got.x, &got.handle, Combine::default()).await?;
//!     ep.bytes(&back.x)
//! })?;
//! for rank in run.finished() {
//!     let two = [0x00, 0x40];
//!     assert_eq!(rank?, [two.repeat(4), [0x80, 0x3f].repeat(4)].concat());
//! }
//! # Ok(())
//! # }
//! # #[cfg(not(feature = "sim"))]
//! # fn main() {}
//! ```
//!
//! # Where to go next
//!
//! - [`Endpoint`] and [`engine`]: the calls, with shapes and errors; [`LowLatency`] for low latency.
//! - The modules of the table above, each of which opens with its manual. Another backend is another `Cluster` in the
//!   example.
//! - `cargo run -p moexpress --example layer`: experts with weights, and a combine.
//! - The command: `moexpress --help`, and README.md.
#![forbid(unsafe_code)]

pub use ep_core::*;

#[cfg(feature = "sim")]
pub use ep_sim as sim;

#[cfg(all(feature = "host", target_os = "linux"))]
pub use ep_host as host;

#[cfg(all(feature = "host", target_os = "linux"))]
pub use ep_loop as far_loop;

#[cfg(all(feature = "roce", target_os = "linux"))]
pub use ep_roce as roce;

#[cfg(feature = "cuda")]
pub use ep_cuda as cuda;

#[cfg(all(feature = "ibgda", target_os = "linux"))]
pub use ep_ibgda as ibgda;

#[cfg(feature = "ascend")]
pub use ep_ascend as ascend;

/// The code in the README compiles and runs.
#[cfg(all(doctest, feature = "sim"))]
#[doc = include_str!("../../../README.md")]
struct Readme;
