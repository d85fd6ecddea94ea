//! The one protocol suite: what every backend of the expert-parallel protocol must do.
//!
//! A backend implements [`Backend`] and instantiates the suite in one line, as a test target with `harness = false`:
//!
//! ```text
//! ep_conformance::suite!(MyBackend::new());
//! ```
//!
//! Ranks are threads, or whatever the backend makes of them.
//! `suite!(MyBackend::new(), processes: MyProcesses)` runs every case a second time with ranks that are processes
//! ([`processes`]). [`harness::Suite`] runs several backends in one test target, as `crates/sim/tests/conformance` does.
//!
//! Every case has a name, a time limit and the requirements it has beyond the contract's minimum. What a backend lacks
//! it says by [`Backend::lacks`]; such cases are counted as ignored, with the reason, never as passed. The rules F1 to
//! F11 are scripts of verbs ([`script`]), so that a device can execute them with a probe kernel; the others go through
//! [`ep_core::Endpoint`] and are held against [`ep_core::reference`].
//!
//! | environment | meaning |
//! |---|---|
//! | `EP_CASES` | scenarios of the random campaign |
//! | `EP_SEED` | first seed of the campaign; by default it is fixed |
//! | `EP_ZOMBIES` | ranks that are suspended and go on, in each case of them |
//! | `EP_THOROUGH` | 1: tests run as much as CI's campaigns do ([`harness::thorough`]) |
//! | `EP_TIME_FACTOR` | multiplies the time limits |
//!
//! Without the feature `suite` (on by default) only [`workload`], [`case`], [`drive`], [`verify`], [`low_latency`] and [`ring`]
//! are there: batches and routings from a seed, one round of a layer, the comparison with the oracle, and a bare
//! ring.
//!
//! ```
//! use ep_conformance::workload::{RoutingKind, Workload};
//! use ep_core::Shape;
//!
//! let shape = Shape::builder().experts(8).topk(2).hidden(16).max_tokens(4).build()?;
//! let kind: RoutingKind = "grouped:4:2".parse()?;
//! let batches = Workload::new(shape, vec![4, 0, 3, 4]).kind(kind).seed(7).batches()?;
//! assert_eq!(batches[2].topk_idx.len(), 3 * 2);
//! # Ok::<(), ep_core::Error>(())
//! ```
//!
//! # Where to go next
//!
//! - To run it: `cargo test --release -p ep-sim --test conformance -- per-role::campaign`, or another backend's test of that
//!   name.
//! - To add a case or a planted fault: `CONTRIBUTING.md`. The cases are in `src/cases`, a file for each matter.
//! - To compare a layer of your own with the oracle: [`drive`] makes a round, [`verify`] compares it.
#![forbid(unsafe_code)]

#[cfg(feature = "suite")]
mod any;
pub mod arrival;
#[cfg(feature = "suite")]
mod backend;
pub mod by_expert;
pub mod case;
#[cfg(feature = "suite")]
mod cases;
pub mod drive;
#[cfg(feature = "suite")]
pub mod harness;
pub mod low_latency;
#[cfg(feature = "suite")]
pub mod processes;
pub mod ring;
#[cfg(feature = "suite")]
pub mod scenario;
#[cfg(feature = "suite")]
pub mod script;
pub mod verify;
pub mod workload;
#[cfg(feature = "suite")]
pub mod zombie;

#[cfg(feature = "suite")]
pub use backend::{Backend, Requirement, Setup, Travels};

/// Makes the suite of a backend the `main` of a test target; with `processes`, a [`processes::Processes`], every case runs again with
/// ranks that are processes.
#[cfg(feature = "suite")]
#[macro_export]
macro_rules! suite {
    ($backend:expr) => {
        fn main() -> std::process::ExitCode {
            $crate::harness::main($backend)
        }
    };
    ($backend:expr, processes: $processes:expr) => {
        fn main() -> std::process::ExitCode {
            $crate::harness::main_with_processes(|| $backend, || $processes)
        }
    };
}
