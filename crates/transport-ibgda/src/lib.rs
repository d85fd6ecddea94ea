//! Lanes between nodes that a device drives: kernels write work queue elements of mlx5 adapters (ConnectX) into queues that the adapter reads,
//! and ring its doorbell. No CPU is on the way.
//!
//! [`Ibgda`] is a [`DeviceTransport`](ep_core::transport::DeviceTransport) for any backend whose roles are kernels. `docs/ibgda.md` is for
//! whoever runs it. libibverbs and libmlx5 are opened at run time: this crate builds anywhere, and where a library, an adapter or a
//! capability is missing it says so, with what helps. Linux only.
//!
//! ```no_run
//! use ep_ibgda::{HostDevice, Ibgda, Library, Settings};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let settings = Settings::new().devices(["mlx5_0", "mlx5_1"]).relaxed_ordering(true).ack_timeout(14)?;
//! let transport = Ibgda::new(Library::open()?, HostDevice, settings);
//! # let _ = transport;
//! # Ok(())
//! # }
//! ```
//!
//! # What is where
//!
//! ```text
//!   the device's memory, else the host's            the adapter              the peer's memory
//!   elements     <-- ep_far_put, ep_far_publish
//!   record       <-- the bell                  -->  reads elements,   -->    rows: RDMA writes, in any order
//!   register     <-- the bell                       and rows of              cells: fetch-adds, after all of the
//!   completions  --> ep_far_flush, ep_far_poll <--  the own window           queue pair's earlier writes
//! ```
//!
//! A lane is a queue pair with a completion queue of its own ([`ep_core::layout::Queues`] says which lanes share one). The host makes and connects
//! them by DEVX commands, and does nothing while operations run. What a kernel needs lies in the lane's state (`EpMlx5`).
//!
//! # How the rules are kept
//!
//! | rule | by |
//! |---|---|
//! | F1, F2 | RDMA writes of exactly the span; the adapter checks key and range |
//! | F3 | an 8-byte fetch-add on the rows' own queue pair, or a write ([`Signal`]), into a region without relaxed ordering |
//! | F4 | one thread posts to a lane; a fetch-add adds the difference to what was published last, and a retry by the adapter is executed once |
//! | F5 | the completion of the put's last element, or of a later one of that queue pair |
//! | F6 | waits for room and for completions end at the verb's deadline; a peer that does not answer is noticed by the adapter before |
//! | F7 | an error completion breaks its lane; the host reads why: [`LaneCause`](ep_core::LaneCause) |
//! | F8 | ranges and cells are checked before anything is written; what is refused breaks the lane |
//! | F9 | rows are read before the fence in front of the credit's bell; cells are read with acquire |
//!
//! # Connections
//!
//! Ranks exchange queue pair numbers, first packet numbers, addresses and the window's keys through the control plane. After a failure the
//! survivors make new queue pairs: what was under way on the old ones is gone with them, and cells count from zero again.
//!
//! # Where to go next
//!
//! - [`Settings`] has every option with its default; [`PostingDevice`](ep_core::transport::PostingDevice) is what a backend gives.
//! - `kernels/ep_far_mlx5.h`: what kernels do, step by step.
//! - [`ep_core::transport`]: what any transport must do.
#![cfg(target_os = "linux")]

mod card;
mod command;
mod completion;
mod device;
mod error;
mod lane;
mod lanes;
mod library;
mod offer;
mod settings;
mod state;
mod survey;
mod sys;

pub use device::{HostDevice, HostMemory, Lent};
pub use error::Error;
pub use lanes::{Ibgda, IbgdaLanes};
pub use library::Library;
pub use settings::{Doorbell, Settings, Signal};
pub use state::source;
pub use survey::{Adapter, survey};
