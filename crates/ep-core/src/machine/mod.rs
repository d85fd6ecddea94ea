//! What a backend provides for one rank: ports for roles, its window, a way to stop everything, and agreement.

use async_trait::async_trait;

use crate::error::{Error, Fault};
use crate::layout::{Layout, Queues};
use crate::port::{Nanos, Offset, Port, Role, Scope};
use crate::topology::{Rank, RankSet};

mod agreement;
mod counted;
mod decorated;
mod faulty;
#[cfg(test)]
pub(crate) mod loopback;
mod traced;
mod verb;

pub use agreement::Assembly;
pub use counted::{Counted, Counts, LaneCounts};
pub use decorated::{Decorate, Decorated};
pub use faulty::{FaultPlan, Faulty, Trigger, Trouble};
pub use traced::{Traced, Tracer};
pub use verb::{LaneClass, VerbKind};

/// What a machine can do beyond the contract's minimum.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Capabilities {
    /// Near lanes offer `get`, so that combine may pull.
    pub get: bool,
    /// Which lanes to ranks of other nodes share a queue, and so a poster.
    pub far_lanes: Queues,
    /// Near puts have been carried out when they return, and flushes of near lanes wait for nothing: a role stages all its rows
    /// in the same place, which stays in the cache.
    pub near_puts_done: bool,
    /// Near lanes carry units: 16 bytes that are stored and seen at once (F11).
    pub units: bool,
}

impl Capabilities {
    /// A machine that offers `get` on near lanes, or does not.
    pub const fn new(get: bool) -> Self {
        Self { get, far_lanes: Queues::PER_ROLE, near_puts_done: false, units: false }
    }

    /// The same with far lanes on these queues.
    #[must_use]
    pub const fn far_lanes(mut self, far_lanes: Queues) -> Self {
        self.far_lanes = far_lanes;
        self
    }

    /// The same with near puts that have been carried out when they return, or have not.
    #[must_use]
    pub const fn near_puts_done(mut self, done: bool) -> Self {
        self.near_puts_done = done;
        self
    }

    /// The same with near lanes that carry units, or do not.
    #[must_use]
    pub const fn units(mut self, units: bool) -> Self {
        self.units = units;
        self
    }
}

/// What a port is opened for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Opening {
    /// The role that will own the port.
    pub role: Role,
    /// The operation it works for.
    pub op: u64,
    /// Generation of the communicator.
    pub generation: u16,
    /// When its waits end, on this rank's clock.
    pub deadline: Nanos,
}

/// Copying access to the own window outside of operations, for memory handed out as a lease.
pub trait Window: Clone {
    /// Copies bytes out of the window.
    ///
    /// # Errors
    /// [`Fault::OutOfRange`].
    fn read(&self, from: Offset, into: &mut [u8]) -> Result<(), Fault>;

    /// Copies bytes into the window.
    ///
    /// # Errors
    /// [`Fault::OutOfRange`].
    fn write(&self, to: Offset, bytes: &[u8]) -> Result<(), Fault>;
}

/// One rank's machine.
///
/// Opening a port orders it after everything this rank did before; dropping it orders what this rank does afterwards
/// after the port's doings. Roles that run at the same time are ordered only by cells.
#[allow(async_fn_in_trait)] // Machines stay on the thread of their rank.
pub trait Machine {
    /// Ports of this machine.
    type Port: Port;
    /// Access to the own window.
    type Window: Window;

    /// The rank this machine is for.
    fn rank(&self) -> Rank;

    /// The layout of every rank's window.
    fn layout(&self) -> &Layout;

    /// What it can do.
    fn capabilities(&self) -> Capabilities;

    /// The time on this rank's clock.
    fn now(&self) -> Nanos;

    /// Opens the port of one role. At most one port is open for a role at a time.
    fn port(&self, opening: Opening) -> Self::Port;

    /// Access to the own window.
    fn window(&self) -> Self::Window;

    /// Stops the lanes of `scope`, of this rank, after a failed operation: on return nothing is read any more from this
    /// window or the user's memory for puts issued on them before, and none of these puts changes a peer's window later.
    async fn reset(&self, scope: Scope);

    /// The control plane.
    fn bootstrap(&self) -> &dyn Bootstrap;
}

/// What a rank proposes when it wants to go on after a failure.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Proposal {
    /// The ranks it gives up on.
    pub mask: RankSet,
    /// Its current generation.
    pub generation: u16,
    /// Its next operation.
    pub op: u64,
}

/// What the survivors agreed on.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Agreement {
    /// All ranks that any survivor gave up on.
    pub mask: RankSet,
    /// The new generation: one more than the highest proposed.
    pub generation: u16,
    /// The next operation: the highest proposed.
    pub op: u64,
}

/// The cold control plane: how ranks meet outside of windows.
#[async_trait(?Send)]
pub trait Bootstrap {
    /// Meets all ranks that no participant gave up on, and agrees with them. A rendezvous: nobody returns before all
    /// have come.
    ///
    /// # Errors
    /// [`Error::Excluded`] when a participant gave up on this rank; [`Error::Failed`] with a timeout naming a rank that
    /// did not come by `deadline`.
    async fn agree(&self, proposal: Proposal, deadline: Nanos) -> Result<Agreement, Error>;
}
