//! Lanes between nodes over RoCEv2 or InfiniBand: reliable connections, posted by the host's cores.
//!
//! [`Roce`] is a [`Transport`](ep_core::transport::Transport) for any backend where CPUs post: those of CPU ranks, or a thread of the host for each
//! rank on a GPU. `docs/roce.md` is for whoever runs it. libibverbs is opened when the first rank opens its lanes: this crate builds anywhere, and
//! where the library or a device is missing it says so, with what to install. Linux only.
//!
//! ```no_run
//! use ep_core::{Shape, Topology};
//! use ep_roce::{Roce, Settings};
//!
//! # fn main() -> Result<(), ep_core::Error> {
//! let settings = Settings::new().devices("10.9.0.1/10.9.0.2".parse()?).ack_timeout(14)?;
//! let transport = Roce::new(settings);
//! # let _ = transport;
//! // ep_host::Cluster::builder(Topology::new(2, 4)?).far(transport) ...
//! # Ok(())
//! # }
//! ```
//!
//! # What a lane is
//!
//! A queue pair; lanes of roles that share one are one lane here ([`ep_core::layout::Queues`]). A rank has three to each
//! rank of its rail (watch, control, and one for rows and credit: a coordinator posts there), two more with low latency;
//! or as [`Settings::far_lanes`] says.
//!
//! # How the rules are kept
//!
//! | rule | by |
//! |---|---|
//! | F1, F2 | RDMA writes of exactly the span; the adapter checks key and range |
//! | F3 | one of three [`Signal`]s on the rows' own queue pair |
//! | F4 | a lane is one poster's; a fetch-add adds the difference to what was raised last, and a retry by the adapter is executed once |
//! | F5 | the completion of the request or of a later one on that queue pair |
//! | F7 | an error completion breaks its lane, and says why: [`LaneCause`](ep_core::LaneCause). The queue pair is destroyed |
//! | F8 | ranges and alignment are checked before anything is posted |
//! | F9 | rows are copied out before credit is posted; cells are read with acquire |
//!
//! # Posting
//!
//! Puts are gathered, up to sixteen, and posted as one chain with one doorbell: at a publish, a flush, or when the
//! rank waits. Only a chain's last request is signalled. Short writes travel inside their requests. A lane counts
//! what it has under way: when its queue is full, the poster is told to come again, so that nothing is ever refused
//! or lost.
//!
//! # Connections
//!
//! Ranks exchange queue pair numbers, first packet numbers, addresses and the window's key through the control plane
//! ([`Offer`]). After a failure the survivors make new queue pairs. What was under way on the old ones is gone with
//! them.
//!
//! # Where to go next
//!
//! - [`Settings`] has every option with its default; [`Choices`] says how devices are named.
//! - `docs/roce.md`: setting up, what errors mean, and how to try it without an adapter (`ci/roce`).
//! - [`ep_core::transport`]: what any transport must do.
#![cfg(target_os = "linux")]

mod account;
mod device;
mod error;
mod lane;
mod lanes;
mod library;
mod memory;
mod offer;
mod settings;
mod verbs;

pub use device::{Choice, Choices};
pub use error::Error;
pub use lanes::{Roce, RoceLanes};
pub use offer::{Offer, Raising};
pub use settings::{Settings, Signal};
