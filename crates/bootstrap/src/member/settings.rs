//! How a rank joins.

use std::time::{Duration, Instant};

use ep_core::Rank;

use super::check_world;
use crate::environment::Environment;
use crate::error::Error;
use crate::identity::Identity;
use crate::secret::Secret;

/// How a rank joins: who it is, where the ranks meet, what they have in common.
#[derive(Clone, Debug)]
pub struct Settings {
    pub(crate) rank: Rank,
    pub(crate) world: u32,
    pub(crate) address: String,
    pub(crate) secret: Option<Secret>,
    pub(crate) identity: Identity,
    pub(crate) within: Duration,
    pub(crate) origin: Instant,
    pub(crate) held_elsewhere: bool,
}

impl Settings {
    /// Rank `rank` of `world`, to meet at `address`, `host:port`. No secret, nothing in common, 60 seconds.
    pub fn new(rank: Rank, world: u32, address: impl Into<String>) -> Self {
        Self {
            rank,
            world,
            address: address.into(),
            secret: None,
            identity: Identity::new(),
            within: Duration::from_secs(60),
            origin: Instant::now(),
            held_elsewhere: false,
        }
    }

    /// The place that a launcher gave this process.
    pub fn of(environment: &Environment) -> Self {
        Self::new(environment.rank, environment.world, environment.address())
            .held_elsewhere(environment.meeting_place.is_some())
    }

    /// Whether the meeting place is in a process that is no rank ([`MeetingPlace::hold`](crate::MeetingPlace::hold)), so that rank 0
    /// enters it as all do. All ranks say the same. Otherwise rank 0 opens it.
    #[must_use]
    pub fn held_elsewhere(self, held_elsewhere: bool) -> Self {
        Self { held_elsewhere, ..self }
    }

    /// With the job's secret, if there is one. Without, the ranks meet on loopback addresses only.
    #[must_use]
    pub fn secret(self, secret: Option<Secret>) -> Self {
        Self { secret, ..self }
    }

    /// With what all ranks must have in common.
    #[must_use]
    pub fn identity(self, identity: Identity) -> Self {
        Self { identity, ..self }
    }

    /// With so much time until all ranks have joined.
    #[must_use]
    pub fn within(self, within: Duration) -> Self {
        Self { within, ..self }
    }

    /// With a clock that began at `origin`, so that deadlines of agreements and those of a machine are on one clock.
    #[must_use]
    pub fn origin(self, origin: Instant) -> Self {
        Self { origin, ..self }
    }

    pub(super) fn check(&self) -> Result<(), Error> {
        check_world(self.rank, self.world)
    }
}
