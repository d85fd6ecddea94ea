//! Ranks on NVIDIA GPUs: threads of one process, or processes; over NVLink, and between nodes over any transport of hosts.
//!
//! The roles are kernels. They are compiled by NVRTC when they are first needed and kept on disk; driver and NVRTC
//! are opened at run time, so this crate builds anywhere and says by name what is missing.
//!
//! ```no_run
//! use ep_core::engine::{Combine, Routing};
//! use ep_core::{Endpoint as _, Shape, Topology};
//!
//! let shape = Shape::builder().experts(8).topk(2).hidden(64).max_tokens(2).build()?;
//! let cluster = ep_cuda::Cluster::builder(Topology::new(1, 2)?).build(shape)?; // a rank on each of two GPUs
//! let ranks = cluster.run(async |mut ep| {
//!     let x = ep.rows(&[0x80, 0x3f].repeat(2 * 64), 2)?; // two tokens of ones, in bf16, copied to the GPU
//!     let topk_idx = ep.array(&[0i64, 5, 7, -1])?; // [tokens, topk]; -1: a dropped choice
//!     let got = ep.dispatch(&x, &Routing::TopK { topk_idx, topk_weights: None }).await?;
//!     let back = ep.combine(&got.x, &got.handle, Combine::default()).await?;
//!     ep.bytes(&back.x)
//! })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # What holds
//!
//! - A call checks its input, enqueues its kernels on the rank's stream and ends. The host waits for one thing only,
//!   the counts of a dispatch that is not cached, and with
//!   [`Dispatch::device_counts`](ep_core::engine::Dispatch::device_counts) not even for them.
//! - Results are ordered with the stream ([`CudaEndpoint::stream`]); other streams wait for their events.
//! - No kernel traps and none waits beyond the deadline: one that cannot go on reports ([`ep_core::device::Report`])
//!   and ends, and the next call says what it was. The ranks name the same culprit.
//! - Calls may be captured into CUDA graphs, and replayed any number of times ([`graphs`]).
//!
//! # The parts
//!
//! ```text
//!   CudaEndpoint   checks, handles, failures        endpoint/   calls of a user
//!        |
//!   RankDevice     state, launches                  rank/       one rank on its GPU
//!        |
//!   kernels/       near verbs, throughput, low latency, checks, measurements
//!        |               by ep_args.h, and by ep_core::device's headers: the same structs and numbers on both sides
//!   driver, build  the driver and NVRTC, safely; compiled kernels on disk
//!   far, proxy     lanes between nodes that a thread of the host posts to
//!   posting        what lanes need of a GPU that its kernels post to
//!   hca            adapters that GPUs play, with the feature of that name
//! ```
//!
//! The feature `workshop` publishes what the project's own tests and measurements need of the inside: the kernels' build,
//! times of single kernels, scripts of verbs, and kernels that are built for tests. No product sets it.
//!
//! # Where to go next
//!
//! - [`Cluster::builder`]: ranks as threads; [`Builder::join`]: as processes. [`CudaEndpoint`] has what a GPU adds to
//!   [`ep_core::Endpoint`] and [`ep_core::LowLatency`]: streams, memory of a framework, graphs.
//! - `docs/cuda.md`: how the kernels work, how to build them without a GPU and to check them on one.
//! - `ARCHITECTURE.md`, section 4: by what the rules of the machine contract are kept over NVLink.
//! - `docs/benchmarks/cuda.md`: figures, and which tests ran on which GPUs. `docs/cuda-tried.md`: what bounds them,
//!   what was tried.

// What the project's own programs, tests and measurements see besides.
#[cfg(feature = "workshop")]
pub mod bench;
#[cfg(feature = "workshop")]
pub mod build;
#[cfg(feature = "workshop")]
pub mod checks;
#[cfg(feature = "workshop")]
pub mod probe;

pub mod driver;
#[cfg(feature = "hca")]
pub mod hca;
pub mod proxy;

mod args;
#[cfg(not(feature = "workshop"))]
#[allow(unreachable_pub)] // What the workshop publishes of it.
mod build;
#[cfg(not(feature = "workshop"))]
#[path = "checks/none.rs"]
mod checks;
mod cluster;
mod endpoint;
mod error;
mod far;
mod kernels;
mod members;
mod memory;
mod node;
mod posting;
mod rank;

pub use build::{absent_names as kernels_absent, come_from as kernels_come_from, version as nvrtc_version};
pub use cluster::{Builder, Cluster};
pub use endpoint::graphs;
pub use endpoint::{
    Apart, Array, Combining, CudaEndpoint, DeviceWindow, Dispatching, Early, Event, LowHandle, LowPlaces,
    LowPlacesBySource, LowPlacesPacked, LowScales, Owned, Ready, Rows, ScaleStrides, Signals,
};
#[cfg(feature = "workshop")]
pub use endpoint::{Consumed, CrashFlag};
pub use error::CudaError;
pub use members::{Members, MembersOf};
pub use posting::{PostingGpu, QueueMemory};
