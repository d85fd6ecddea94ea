//! The twin: an emulated device on one CPU thread, for kernels that g++ compiled.
//!
//! [`Library::build`] compiles the twin and kernels into a library and loads it. A [`Machine`] of it has the memory and the cores of all ranks.
//! The host allocates, writes, launches and runs; the order is that of streams: a rank's launches one after the other, ranks beside each
//! other. Everything that the device does not promise is drawn from the seed, so a seed replays exactly ([`Machine::history`]).
//!
//! A kernel that breaks a rule of the device ends the run with [`TwinError::Fault`], which names the rule, the call, rank and core:
//!
//! | rule | broken by |
//! |---|---|
//! | `order` | bytes that an earlier instruction of the core still reads or writes, with no flag or barrier between |
//! | `flags` | a flag set twice, or left set at the end; an event id beyond 5 |
//! | `hang` | a flag that is waited for and never set |
//! | `UB` | more than 192 KiB or 64 buffers; an access beyond its buffer |
//! | `alignment` | a UB address off a block of 32 bytes; a scalar that is not aligned |
//! | `floor` | a `DataCopy` of bytes that are no multiple of 32 |
//! | `limits` | a length, count or rounding mode that the API does not allow |
//! | `bounds` | global memory that nobody owns, or that was given back |
//! | `reach` | memory of another rank that is no window, of another group, or of a device that was not opened |
//! | `roce` | an element, a key or a doorbell of a queue that is wrong, or comes too early; two cores that post to one queue |
//! | `cache` | a scalar write that no clean has brought to memory when the kernel ends |
//!
//! A call of the host that is wrong is a fault, too, of the rule `calls` ([`Session::fault`]).
//!
//! A [`Host`] puts the functions of a [`Table`](crate::driver::Table) over a machine: endpoints run on it as on devices.
//!
//! Wrong order between cores and ranks is no fault by itself: stale or overwritten bytes are what a kernel then sees.

mod compile;
mod host;
mod kept;
mod library;
mod machine;
mod network;
mod shared;

pub use host::{Host, Session};
pub use library::Library;
pub use machine::{Machine, Reach};
pub use network::QueueView;

/// What went wrong on a twin.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum TwinError {
    /// There is no compiler, or it refuses the text.
    #[error("the twin needs a C++17 compiler (g++, clang++ or $CXX): {0}")]
    Compiler(String),
    /// The library that was built cannot be used.
    #[error("the twin's library: {0}")]
    Library(String),
    /// A value that the machine does not take.
    #[error("{0}")]
    Invalid(String),
    /// A rule of the device was broken.
    #[error("{0}")]
    Fault(String),
    /// The kernels did not end in so many turns of the scheduler.
    #[error("watchdog: the kernels have not ended after {0} turns")]
    Watchdog(u64),
}
