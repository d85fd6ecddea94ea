//! What happens: a role's time has come, a transfer leaves or reaches its target, a publish arrives.

use ep_core::Rank;
use ep_core::port::LaneId;

/// Which of a rank's two links.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Class {
    Near,
    Far,
}

/// A cell to be raised, or units that are there once the puts before have entered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Notice {
    pub(super) from: Rank,
    /// The lane of the puts that come before, where it leads to, or [`Notice::NO_LANE`] where it never had any.
    pub(super) lane: u32,
    /// Its number, or [`Notice::UNITS`].
    pub(super) cell: u32,
    /// How many puts of the lane come before.
    pub(super) after: u32,
    /// What it is raised to; or the number of the put of units.
    pub(super) bits: u64,
}

impl Notice {
    pub(super) const NO_LANE: u32 = u32::MAX;
    /// No cell.
    pub(super) const UNITS: u32 = u32::MAX;
}

/// Something that happens. It lies on the agenda itself: nobody has to look elsewhere for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Event {
    /// A port has spent the time up to its own clock.
    Resume(u32),
    /// The bytes of a put or get are handed to the port of the rank that has them. A [`super::links::Flight`] from then on.
    Leave { from: Rank, to: Rank, class: Class, get: bool, lane: u32, ticket: u64, bytes: u64 },
    /// The bytes of a put to another partition are handed to the port of its rank.
    LeaveAbroad { from: Rank, lane: LaneId, ticket: u64, bytes: u64 },
    /// The first byte of a put from another partition comes.
    Enter { from: Rank, to: Rank, lane: u32, bytes: u64 },
    /// The first transfer on its way from the rank begins to reach its target. Only the first one is on the agenda.
    Reach(Rank, Class),
    /// A publish arrives.
    Arrive(Notice),
    /// The puts that a publish follows have entered.
    Raise(Notice),
    /// All that reached another rank from this one has entered, if nothing more was posted.
    Settled(Rank),
    /// Something seldom, which lies elsewhere.
    Matter(u32),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_events_are_a_cache_line() {
        assert_eq!(size_of::<Event>(), 32);
    }
}
