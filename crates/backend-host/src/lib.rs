//! CPU ranks: threads of one process, or processes. Those of a node, one host, reach each other through shared
//! memory; those of different nodes by any [`Transport`](ep_core::transport::Transport).
//!
//! The roles are [`ep_core`]'s own, run by [`ep_core::engine::Engine`]: both modes, all placements, recovery. This
//! crate is the machine beneath them. Linux only.
//!
//! ```
//! use ep_core::engine::{Combine, Routing};
//! use ep_core::{Endpoint as _, Shape, Topology};
//!
//! let shape = Shape::builder().experts(8).topk(2).hidden(4).max_tokens(2).build()?;
//! let cluster = ep_host::Cluster::builder(Topology::new(1, 4)?).build(shape)?;
//! let ranks = cluster.run(async |mut ep| {
//!     let one = [0x80, 0x3f]; // 1.0 in bf16, little-endian
//!     let x = ep.rows(&one.repeat(2 * 4), 2)?;
//!     let topk_idx = ep.array(&[0i64, 5, 7, -1])?; // token 0 to ranks 0 and 2, token 1 to rank 3 only
//!     let got = ep.dispatch(&x, &Routing::TopK { topk_idx, topk_weights: None }).await?;
//!     let back = ep.combine(&got.x, &got.handle, Combine::default()).await?;
//!     ep.bytes(&back.x)
//! })?;
//! for rank in ranks {
//!     let two = [0x00, 0x40];
//!     assert_eq!(rank?, [two.repeat(4), [0x80, 0x3f].repeat(4)].concat());
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Processes, which a launcher started, meet by [`ep_bootstrap`] and then do the same:
//!
//! ```no_run
//! use std::sync::Arc;
//! use ep_bootstrap::{Environment, Member, Secret, Settings};
//! use ep_core::{Endpoint as _, Shape};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let shape = Shape::builder().experts(8).topk(2).hidden(4).build()?;
//! let environment = Environment::detect()?;
//! let member = Arc::new(Member::join(Settings::of(&environment).secret(Secret::detect()?))?);
//! let mut ep = ep_host::Cluster::builder(environment.topology()?).join(shape, &member)?;
//! ep_host::block_on(async { /* dispatch, combine */ });
//! # Ok(())
//! # }
//! ```
//!
//! Several nodes need a transport between them, which the caller passes; each node's ranks run on one host:
//!
//! ```
//! use ep_core::Topology;
//! use ep_core::transport::Transport;
//!
//! fn builder<T: Transport>(network: T) -> Result<ep_host::Builder<T>, ep_core::Error> {
//!     Ok(ep_host::Cluster::builder(Topology::new(2, 4)?).far(network))
//! }
//! ```
//!
//! # Windows
//!
//! A window is a file in memory without a name (`memfd`), sealed so that it keeps its size; the ranks of a node map
//! each other's. Processes pass the descriptors through Unix sockets without a path. So nothing lies in `/dev/shm` or
//! any other folder, and when the last process ends, however it does, the memory is free. Windows are zeroed, and use
//! memory where they are written.
//!
//! A process that was given up may live and still have its neighbours' windows. So a recovery that gives up a rank moves
//! those of the others: each copies its own to a new file, gives it to those who stay, and puts it where the old one
//! lay. Addresses stay, and so does what lies there, but for what another thread of the rank writes meanwhile. It takes the time of
//! a copy, and until the lost process ends twice the memory.
//!
//! # How the rules are kept
//!
//! | rule | by |
//! |---|---|
//! | F1, F2 | a put or get copies exactly its span, and has done so when it returns |
//! | F3, F9, F10 | a cell is published by a release store and seen by an acquire load; on the publisher's side copies come before it, on the reader's after; fences behind gets and alarms let a rank that was given up see so, if it got what was written anew |
//! | F4 | 8-byte stores by the cell's one writer; the layout keeps writers on lines of their own |
//! | F5 | nothing reads a source after its put: a flush returns at once |
//! | F6 | a wait looks at the clock at every 32nd of its polls or, where ranks are more than cores, at every one |
//! | F7 | threads: a rank whose [`Machine`] is dropped, by a panic for instance, is marked as gone. Processes: who waits asks every millisecond the control plane ([`Member::lost`](ep_bootstrap::Member::lost)), which sees connections of dead processes close |
//! | F8 | every span is checked against the window before a byte is touched |
//!
//! On lanes to other nodes the transport keeps F1 to F5, F8 and F9; the clock is looked at here (F6): its verbs say
//! "not now", and are tried again until they are through or the deadline has passed. A lane that breaks is known at
//! once to all who wait for its peer (F7). After a failure the lanes are drained, or cut when that takes longer than
//! a 32nd of the deadline; after each agreement all are connected anew.
//!
//! Payload is copied between raw pointers, never through references into shared memory; one module has all the unsafe
//! code and says why it is sound: because whoever posts verbs keeps the rules. The roles do, and the simulator, which
//! finds every access that nothing orders, is where that is checked. Two copies of a caller's own that touch the same
//! bytes, with no cell published and seen between them, are a data race here as on any machine. So is what a thread still
//! gets whose rank was given up: it is told that before anything is written anew, and does not use what it got.
//!
//! # Waiting
//!
//! The roles of a rank run on its thread, in a busy loop ([`block_on`]). Where the host has a core for each rank, a
//! round in which nothing moves is followed by the next, and by `sched_yield` after some thousand of them; where
//! ranks are more than cores, every such round yields. A rank that waits uses its core.
//!
//! # What is missing
//!
//! Survivors recover by the meeting place: not when it was in the process that died, mostly rank 0's.
//! `moexpress launch` holds it itself, and another launcher can ([`ep_bootstrap::MeetingPlace::hold`]).
//!
//! # Where to go next
//!
//! [`Cluster::builder`] has the options. `cargo run -p ep-host --example ranks` is a whole program, with threads and
//! under a launcher with processes. `docs/benchmarks/near.md` says what lanes and calls cost.
#![cfg(target_os = "linux")]

mod cluster;
mod far;
mod handoff;
mod machine;
mod meeting;
#[cfg_attr(ep_loom, path = "model.rs")]
mod memory;
mod node;
mod pace;
mod port;
mod roll;
mod seat;
mod window;

pub use cluster::{Builder, Cluster};
pub use machine::{Machine, Window};
pub use pace::{block_on, block_on_while};
pub use port::Port;
