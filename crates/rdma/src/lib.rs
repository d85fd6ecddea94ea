//! What lanes over RDMA adapters share, whoever posts to them: libibverbs in C's layout, adapters and their ports, memory that an adapter knows,
//! and what ranks tell each other before they connect.
//!
//! Two transports stand on it. `ep-roce` posts from the host's cores, through verbs. `ep-ibgda` has kernels post, to queues of mlx5 adapters that
//! it makes by commands of its own. Linux only.
//!
//! # From a library to a connection
//!
//! ```text
//!   Libraries    opened at run time, or a test's table of functions
//!     Verbs        functions of libibverbs that both call
//!       Devices      the adapters of this machine
//!         Device       one of them, opened
//!           Port, Gid    a port, and its best address
//!           Domain       a protection domain
//!             Region       memory with a key: the window's rows, and once more its cells (Share)
//!   Offer        what a rank tells the others
//!     Connection   how a queue pair reaches the other end
//! ```
//!
//! Each value keeps alive what it was made of. What ends a value ends it at the adapter.
//!
//! # What a transport adds
//!
//! Functions that it alone calls are a table of its own, by [`functions!`]. What it alone tells is the last part of its [`Offer`]. Queue pairs,
//! posting and completions are its own.
//!
//! # Declarations
//!
//! [`sys`] is a part of `infiniband/verbs.h`. With the feature `ibverbs` its types and numbers are those of the crate `ibverbs-sys`. Functions
//! are looked up at run time either way, so this crate builds and starts without the library.
#![cfg(target_os = "linux")]

mod connection;
mod device;
mod domain;
mod error;
mod library;
mod offer;
mod port;
mod share;
pub mod sys;

pub use connection::{Connection, Wire, random_psn, within};
pub use device::{Device, Devices};
pub use domain::{Domain, Part, Region, Way};
pub use error::Error;
pub use library::{Libraries, Verbs};
pub use offer::{End, Header, Offer};
pub use port::{Gid, Port};
pub use share::{Share, cells_of};
