//! Ranks on the Ascend 910B NPUs (Atlas A2) of one server, in both modes, and a CPU twin of them that runs the very same kernels.
//!
//! No NPU has run this yet. Everything is proven on the twin: a device that does what the documents promise and nothing else, hostile by seed.
//!
//! ```
//! use ep_ascend::twin::{Host, Library, Machine};
//! use ep_ascend::{Cluster, Roles};
//! use ep_core::engine::{Combine, Routing};
//! use ep_core::{Endpoint as _, Shape, Topology};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let library = Library::build(&ep_ascend::headers(), &ep_ascend::sources(), &[])?; // by a C++ compiler
//! let twin = Host::install(Machine::new(&library, 7, 2, 2)?, "Ascend910B1")?; // two NPUs; seed 7
//! let shape = Shape::builder().experts(8).topk(2).hidden(64).max_tokens(2).build()?;
//! let few = Roles { senders: 1, coordinators: 1, forwarders: 0, forwarder_coordinators: 0, receivers: 1 };
//! let cluster = Cluster::builder(Topology::new(1, 2)?, library.path()).roles(few).build(&twin.table(), shape)?;
//! let ranks = cluster.run(async |mut ep| {
//!     let x = ep.rows(&[0x80, 0x3f].repeat(2 * 64), 2)?; // two tokens of ones, in bf16
//!     let topk_idx = ep.array(&[0i64, 5, 7, -1])?; // [tokens, topk]; -1: a dropped choice
//!     let got = ep.dispatch(&x, &Routing::TopK { topk_idx, topk_weights: None }).await?;
//!     let back = ep.combine(&got.x, &got.handle, Combine::default()).await?;
//!     ep.bytes(&back.x)
//! });
//! for rank in ranks {
//!     assert_eq!(rank?, [[0x00, 0x40].repeat(64), [0x80, 0x3f].repeat(64)].concat());
//! }
//! assert_eq!(twin.fault(), None);
//! # Ok(())
//! # }
//! ```
//!
//! On NPUs the table is [`driver::Table::open`]'s, and the path that of the kernels which the vendor's compiler has built. Nothing else differs.
//!
//! # The parts
//!
//! ```text
//!   AscendEndpoint   checks, handles, failures                endpoint/   calls of a user
//!        |
//!   one rank on its device: state, parameters, launches       rank
//!        |
//!   driver           devices, memory, streams, launches over a table of functions: ACL's, or the twin's
//!   args             ep_args.h: what a launch is given
//!   kernels/         the roles in AscendC: text for the vendor's compiler and for g++
//!   twin/            kernel_operator.h for g++, the device behind it, and the host's functions over it
//! ```
//!
//! **A launch** is one block on each vector core of each rank, all resident. Cores have roles by their number, as [`Roles`] divides them:
//! senders, coordinators, forwarders, forwarders' coordinators, receivers. In a combine senders return rows and receivers sum them. The first
//! coordinator is the rank's control core: it alone opens and ends the operation, judges who is to blame, and reports. Within one server
//! the other coordinators and the forwarders have nothing to do; between servers they post to RoCE queues and pass rows on.
//!
//! # What must hold
//!
//! - Every cell and every word of the rank's state has one core that writes it; no kernel locks, allocates, adds to global memory or waits without
//!   a deadline; rings have a fixed size, whatever the batch.
//! - A call checks its input, launches its kernels and ends when they have. It never blocks its thread: one thread runs all ranks by turns.
//! - What a launch uses is kept until it has ended, whatever becomes of the call.
//!
//! **Missing**: queues between servers on NPUs (the twin has them), pulls, and a run on an NPU. The repository's `docs/ascend.md` tells role by role what is done.

pub mod args;
mod cluster;
pub mod driver;
mod endpoint;
mod kernels;
mod limits;
mod node;
pub mod probe;
mod rank;
mod roles;
pub mod twin;

pub use cluster::{Builder, Cluster, block_on};
pub use endpoint::{Array, AscendEndpoint, Combining, Dispatching, LowHandle, LowPlaces, Rows};
pub use kernels::{BUILD, build_files, headers, sources};
pub use limits::{MOST_NEAR, MOST_RANKS, check};
pub use roles::Roles;
