//! The simulator: any number of ranks in one process, the very roles of [`ep_core`], and one of two
//! schedulers: an adversary that explores what the rules allow, or a model of time.
//!
//! ```
//! use ep_core::machine::{Machine as _, Opening};
//! use ep_core::port::{Cell, Counter, Duty, LaneId, LaneKind, Need, Port as _, Role};
//! use ep_core::{Rank, Shape, Topology};
//!
//! let shape = Shape::builder().experts(2).topk(1).hidden(64).build()?;
//! let cluster = ep_sim::Cluster::builder(Topology::new(1, 2)?).seed(7).build(shape)?;
//! let run = cluster.run_machines(async |machine: ep_sim::Machine| {
//!     let deadline = machine.now() + machine.layout().settings().deadline();
//!     let mut port = machine.port(Opening { role: Role::new(Duty::Probe), op: 1, generation: 1, deadline });
//!     let (me, peer) = (machine.rank(), Rank(1 - machine.rank().0));
//!     let cell = |writer| Cell::new(writer, LaneKind::Control, Counter::Probe);
//!     port.publish(LaneId { peer, kind: LaneKind::Control }, cell(me), 42).await?;
//!     port.wait_any(&[Need { cell: cell(peer), at_least: 1 }]).await?;
//!     Ok::<u64, ep_core::Fault>(port.peek(cell(peer)))
//! })?;
//! assert_eq!(run.finished(), [Ok(42), Ok(42)]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # A run
//!
//! What follows is about explore, the scheduler of a builder that is told nothing else; *Virtual time* below is about
//! the other. [`Cluster::run_machines`] makes one future per rank from an async closure and polls them, one at a
//! time, until all have ended. Ranks meet in a *world*: a window per rank, the lanes between them, and time. A verb
//! that posts puts an *effect* in flight; effects are delivered later. Everything random derives from the seed: the
//! same cluster runs the same way every time, whether or not races are tracked or verbs recorded.
//!
//! Windows are sparse: memory exists only where it was written. Cells that nobody wrote read zero, other bytes 0xA5.
//!
//! # The adversary
//!
//! It respects the rules F1 to F11 of [`ep_core::port`] and nothing else. At each verb it may park the role. Among the
//! roles that can run and the effects that can be delivered it draws what is next, so that
//!
//! - puts and gets land in any order and, torn, in any pieces; their source is read when they land, at the latest when
//!   their flush returns (F2, F5);
//! - a publish lands after all puts before it on its lane and after the lane's earlier publishes (F3), puts posted
//!   after it perhaps before it;
//! - effects are delivered eagerly or lazily, publishes held back, one rank or some roles of one starved, each as
//!   the *personality* has it that is drawn per seed.
//!
//! So one seed says little and a hundred say much: a test runs a range of seeds.
//!
//! # Time
//!
//! Every rank's clock is the same, starts at 0, and stands still while anything can run. When nothing can, and
//!
//! - no fault has acted: the run ends with [`Violation::Deadlock`], which lists who waits for what. Deadlines, of which
//!   there are always some, do not hide it;
//! - a fault has acted, or a rank waits in its control plane, or [`Builder::deadlines`] is on: time jumps to the next
//!   deadline or to the arrival of the next delayed effect.
//!
//! # Faults
//!
//! [`Incident`]: delayed and lost lanes, crashes that peers learn of or do not, a starved rank. What is in flight when
//! a rank crashes or resets its lanes lands, lands in part, or vanishes; the rules hold for what lands.
//!
//! # Races
//!
//! By vector clocks the world knows which access is ordered after which: by a publish seen, by a flush, by opening
//! and dropping ports, by an agreement of the control plane; nothing else orders. A read or overwrite of bytes that
//! another access is not ordered with is a [`Violation::Race`], right bytes or not, and found whenever the verbs were
//! posted, however they were delivered. What breaks the contract outright, as lowering a cell, is a
//! [`Violation::Rule`]. Tracking costs time and, per clock, a number for each role and transferring lane that runs;
//! large clusters may switch it off ([`Builder::race_tracking`]).
//!
//! # Virtual time
//!
//! [`Builder::timed`] replaces the adversary by a [`Model`]: rates and latencies of links, what copies, sums and
//! verbs cost a role. Then the same roles run in virtual time, in integer nanoseconds, ties broken by order: two runs
//! are the same. It is for figures; rules, races and faults are explore's.
//!
//! ```
//! use ep_core::engine::{Endpoint, Routing};
//! use ep_core::{Shape, Topology};
//! use ep_sim::{Cluster, Model};
//!
//! let shape = Shape::builder().experts(16).topk(2).max_tokens(128).build()?;
//! let builder = Cluster::builder(Topology::new(1, 4)?).timed(Model::h200_node()).elide_payload(true);
//! let run = builder.build(shape)?.run(async |mut ep| {
//!     let x = ep.rows(&vec![0; 128 * ep.shape().row_bytes() as usize], 128)?;
//!     let topk_idx = (0..128).flat_map(|token| [token % 8, 8 + token % 7]).collect();
//!     ep.dispatch(&x, &Routing::TopK { topk_idx, topk_weights: None }).await?;
//!     Ok::<_, ep_core::Error>(ep.now())
//! })?;
//! let ended = run.finished().into_iter().collect::<Result<Vec<_>, _>>()?;
//! assert!(ended.iter().all(|time| (5_000..200_000).contains(&time.0)), "{ended:?}");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! - Every rank has a port out and a port in to the near link and to the far one (its network card), each of which
//!   passes one transfer after the other. Publishes take the latency, behind the puts of their lane, and no room at
//!   the ports.
//! - Every role is a core of its own. What it charges or posts runs its clock ahead; a port's clock is
//!   [`ep_core::Port::now`]. The main line of a rank goes on when the last of its closed ports ended; user code
//!   spends time by [`Machine::spend`].
//! - [`Builder::elide_payload`]: rows take the time of their payload but have none, so that thousands of ranks fit.
//! - Nothing is to come and a rank waits: a deadlock, as under explore. A deadline that others' doings outlast ends its
//!   waits at its time.
//! - Nodes are simulated apart, each with a world of its own. What leaves a node takes the far latency at least, so
//!   all go through time in stretches of that length and tell each other between two. [`Cluster::run_on`] does it on
//!   several threads; what comes out is the same on any number. What is beyond the model takes that latency too: a
//!   rank's agreement with ranks of other nodes, and a reset's question whether all has come there.
//! - [`Builder::record`] keeps every verb with its virtual time, for [`ep_core::trace::perfetto`].
//!
//! # Failing seeds
//!
//! A [`Violation`] names its seed. When a rank's own code panics, the seed, and the violation that came before the
//! panic, are printed to standard error. [`Builder::record`] keeps every verb of the run for a closer look.
//!
//! # Where to go next
//!
//! [`Cluster::builder`] has the options; [`Cluster::run`] gives each rank an [`Endpoint`](ep_core::Endpoint) instead
//! of a bare machine. `cargo run --release -p ep-sim --example ring` is a ring on the machine contract.
//! `docs/benchmarks/timed.md` says how near the model comes to published figures.
#![forbid(unsafe_code)]

mod cluster;
mod explore;
mod footprint;
mod home;
mod machine;
mod meeting;
mod memory;
mod pages;
mod port;
mod timed;
mod verb;
mod violation;
mod wakers;

pub use cluster::{Builder, Cluster, Outcome, Run};
pub use ep_core::incident::Incident;
pub use machine::{Machine, Window};
pub use port::Port;
pub use timed::{Link, Model, ModelBuilder, Rate};
pub use violation::{Access, AccessKind, Awaited, Broken, Race, Report, Violation, Waiting};
