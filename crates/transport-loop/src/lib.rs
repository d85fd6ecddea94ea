//! Lanes between nodes without a network: a [`Transport`](ep_core::transport::Transport) between the windows of ranks that
//! are threads of one process, or [processes of one host](Loop::between_processes), by copies, at a set rate and latency.
//!
//! [`Loop`] is for tests, and for whoever develops or plans without a network card: several nodes run on one machine, as
//! fast as the network that they are to have. Linux only.
//!
//! ```
//! use std::time::Duration;
//! use ep_core::{Rank, Topology};
//! use ep_loop::Loop;
//!
//! # fn main() -> Result<(), ep_core::Error> {
//! // A card of 50 GB/s for each rank, and 2 us from one to another.
//! let network = Loop::new().bytes_per_second(50_000_000_000)?.latency(Duration::from_micros(2))?;
//! let faults = network.clone();
//! // ep_host::Cluster::builder(Topology::new(2, 4)?).far(network) ... and later, from any thread:
//! faults.lose(Rank(0), Rank(4));
//! # Ok(())
//! # }
//! ```
//!
//! # The model
//!
//! Each rank has a card with one way out and one way in, both of the set rate. What a rank posts leaves in the order in
//! which it was accepted, one after the other. It has arrived when its last byte has left, the latency has passed, and
//! the receiver's way in had time for its bytes. A publish counts as eight bytes. Nothing is added for packets.
//!
//! ```text
//!   leaves  = max(now, way out is free) + bytes / rate
//!   arrives = max(leaves + latency, way in is free + bytes / rate)
//! ```
//!
//! The copies themselves take a core's time: a rate beyond what the cores copy is not reached.
//!
//! # Who carries
//!
//! Among threads there is nobody else. A rank that makes [`progress`](ep_core::transport::Lanes::progress) carries out what is due on the
//! lanes that lead from it and on those that lead to it. So what was posted arrives by the time at which somebody who
//! waits could see it, though the rank that posted it does nothing more.
//!
//! Among processes only the one that posted can carry. A CPU rank does so when it raises a cell; what is not due yet, a thread of its
//! process carries later. A GPU's proxy makes progress all the time.
//!
//! # How the rules are kept
//!
//! | rule | by |
//! |---|---|
//! | F1, F2 | a copy of exactly the span, when it is due |
//! | F3 | a lane carries out its verbs in order, each not before the one ahead of it; a publish is a release store |
//! | F4 | 8-byte stores |
//! | F5 | a flush is through when the copy has been made |
//! | F7 | a lane whose peer is gone, or that was [lost](Loop::lose), breaks and says why; the others go on |
//! | F8 | spans are checked when a verb is accepted |
//! | F9 | the reads of a rank come before its publish of the credit, which is carried out later |
//!
//! Windows lie in memory of the host, or all in memory of devices whose backend moves the bytes
//! ([`WindowCopies`](ep_core::transport::WindowCopies)): then a lane's verbs are asked of it in their order, and have ended before a flush is
//! through.
//!
//! # Faults
//!
//! [`Loop::lose`] and [`Loop::delay`] plant them, at any time and from any thread, for one direction between two ranks.
//! What is lost is noticed as on a network: by the poster, when no answer has come for the
//! [answer timeout](Loop::answer_timeout).
//!
//! # Where to go next
//!
//! - `docs/loop.md`: the command line, what was measured, what it does not model.
//! - [`ep_core::transport`]: what any transport must do.
#![cfg(target_os = "linux")]

mod carrier;
mod end;
mod gate;
mod lane;
mod lanes;
mod memory;
mod network;
mod offer;
mod pace;
#[cfg(test)]
mod tests;
mod window;

pub use lanes::LoopLanes;
pub use network::Loop;
