//! The expert-parallel protocol.
//!
//! In a mixture-of-experts model a router gives each token `topk` experts; the experts live on many accelerators,
//! *ranks*, grouped in *nodes*. *Dispatch* sends each token's row to the ranks that hold its experts; *combine* brings
//! the experts' results back and sums them. This crate is that protocol, written once for every machine: it does no
//! I/O, has no unsafe code, knows no backend and never reads a clock of its own.
//!
//! # The parts
//!
//! ```text
//!   routing --plan--> who gets which row at which place            bytes of rows, windows, cells: layout
//!      |                                                                        |
//!   Endpoint: dispatch, combine  --engine-->  roles  --verbs-->  Port  <--  Machine, one a rank (a backend's)
//!      |                                        |
//!   reference: what must come out            ring: cursors of bounded buffers
//! ```
//!
//! | module | answers | state, I/O |
//! |---|---|---|
//! | [`shape`], [`topology`], [`settings`] | how large, who is where, how much memory and time: validated once | values |
//! | [`plan`] | which rows go where: counts, positions, prefix sums | pure |
//! | [`layout`] | where everything lies in a window, and the C header that says so to kernels | pure |
//! | [`device`], [`declare`] | the same structs, numbers and rules in C, for kernels | pure |
//! | [`blame`] | who is the culprit of a wait that lasted too long | pure |
//! | [`memory`] | what ranks take of a machine's memory | pure |
//! | [`ring`] | which slot is next, and what must be published when | cursors |
//! | [`port`], [`machine`] | what a machine must do: verbs, and the rules F1 to F11 | the contract |
//! | [`engine`] | [`Endpoint`]: dispatch, combine, recover, over any [`machine::Machine`] | one rank |
//! | [`mod@reference`] | what must come out, bit for bit; shares no code with plan and layout | pure |
//! | [`room`] | memory whose size somebody asked for, or an error | allocates |
//! | [`trace`], [`incident`], [`error`] | what happened, what goes wrong on purpose, why a call failed | values |
//!
//! A module looks only at modules that stand before it here, so each can be read without what follows (a test keeps it so):
//!
//! ```text
//! tools       bf16 vectors declare plant ring
//! the words   terms error room
//! sizes       quant topology shape row settings
//! plans       layout plan blame memory reference
//! machines    port device trace incident machine transport
//! operations  buffers roles engine
//! ```
//!
//! # What holds
//!
//! - Received rows are ordered by (source rank, token), whatever the channels and the order of arrival.
//! - Ring memory is bounded by the settings: a batch of any size goes through.
//! - Every call ends: with its result, or by the deadline with an error that names the culprit.
//! - Bad input is refused before anything moves, with the value and its limit. Nothing panics on input or on a peer.
//! - Sums are canonical: the same bits on every machine.
//!
//! # Order of calls
//!
//! A [`Shape`], a [`Topology`] and [`Settings`] make a [`Layout`], the same on every rank. A backend allocates
//! windows by it and offers a [`machine::Machine`] a rank; [`engine::Engine::new`] makes an [`Endpoint`] of that. All
//! ranks then make the same calls in the same order. A failed call poisons the communicator until
//! [`Endpoint::recover`].
//!
//! ```
//! use ep_core::plan::{Plan, TopK};
//! use ep_core::{Layout, Rank, RankSet, Settings, Shape, Topology};
//!
//! let topology = Topology::new(1, 4)?;
//! let shape = Shape::builder().experts(8).topk(2).hidden(1024).max_tokens(128).build()?;
//! let layout = Layout::new(&shape, &topology, &Settings::auto(&shape, &topology))?;
//! assert_eq!(layout.rank_of_expert(5), Rank(2));
//!
//! // Token 0 chose experts 5 and 4, both of rank 2: one row. Token 1 chose 0 and 5.
//! let routing = TopK { topk_idx: &[5, 4, 0, 5] };
//! let plan = Plan::of_topk(&shape, topology.ranks(), &RankSet::new(), routing)?;
//! assert_eq!(plan.rows(), [1, 0, 2, 0]);
//! assert_eq!(plan.sent_to(Rank(2)), [0, 1], "token 1 is at position 1 of what goes to rank 2");
//! # Ok::<(), ep_core::Error>(())
//! ```
//!
//! # Where to go next
//!
//! - To use it: [`Endpoint`], whose calls are the same on every backend, and a backend: `ep-sim`, `ep-host`,
//!   `ep-cuda`, or the facade `moexpress`. `cargo run -p ep-core --example plan` prints who gets which row, and how a
//!   window is cut.
//! - To write a backend: [`port`] and [`machine`]; for kernels [`device`]. `ARCHITECTURE.md` has the ten steps.
//! - To understand the roles: `docs/protocol.md` draws each of them.
#![forbid(unsafe_code)]

mod bf16;
pub mod blame;
mod buffers;
pub mod declare;
pub mod device;
pub mod engine;
pub mod error;
pub mod incident;
pub mod layout;
pub mod machine;
pub mod memory;
pub mod plan;
pub mod plant;
pub mod port;
pub mod quant;
pub mod reference;
pub mod ring;
mod roles;
pub mod room;
mod row;
pub mod settings;
pub mod shape;
mod terms;
pub mod topology;
pub mod trace;
#[cfg(unix)]
pub mod transport;
mod vectors;

pub use engine::endpoint::Endpoint;
pub use engine::low_latency::LowLatency;
pub use error::{Error, Failure, Fault, LaneCause, Phase};
pub use layout::Layout;
pub use port::{Nanos, Port};
pub use quant::Scaling;
pub use settings::{OutboxUse, Placement, Rings, Settings};
pub use shape::{Element, Shape};
pub use topology::{Node, Rank, RankSet, Topology};
