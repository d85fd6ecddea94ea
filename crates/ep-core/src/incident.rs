//! What may go wrong around a communicator, in words that every backend with fault injection understands.

use crate::port::{LaneKind, Nanos};
use crate::topology::Rank;

/// One thing that goes wrong. Tearing, reordering and late delivery are none: machines do that always.
///
/// `kind: None` means all lanes from `from` to `to`. Effects (puts, gets, publishes) are counted over all the lanes
/// that an incident names, in the order in which they are posted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Incident {
    /// Every effect after the first `after` ones arrives no earlier than `by` after it was posted.
    Delay {
        /// The posting rank.
        from: Rank,
        /// The rank at the other end.
        to: Rank,
        /// The lane, or all.
        kind: Option<LaneKind>,
        /// How long after posting.
        by: Nanos,
        /// Effects that pass unharmed.
        after: u64,
    },
    /// Puts and publishes after the first `after` effects vanish, and their poster notices nothing: flush returns.
    /// Gets never complete.
    LoseLane {
        /// The posting rank.
        from: Rank,
        /// The rank at the other end.
        to: Rank,
        /// The lane, or all.
        kind: Option<LaneKind>,
        /// Effects that pass unharmed.
        after: u64,
    },
    /// The rank stops for ever at the verb after the first `after` ones; what it has in flight lands or vanishes.
    Crash {
        /// The rank.
        rank: Rank,
        /// Verbs it still does.
        after: u64,
        /// Whether its peers learn of it: then waits on it and posts to it end at once with
        /// [`crate::Fault::PeerGone`], else only at the deadline.
        noticed: bool,
    },
    /// The rank's process ends once its user's code has: what it posted still arrives, then its peers learn that it is gone,
    /// as of a noticed crash.
    Exit {
        /// The rank.
        rank: Rank,
    },
    /// The rank is suspended at the verb after the first `after` ones, and goes on once the others have agreed to go on without it: a
    /// *zombie*. What it had posted lands before or after that. Where nobody gives it up, it goes on when nobody else has anything
    /// left to do.
    Suspend {
        /// The rank.
        rank: Rank,
        /// Verbs that it does before.
        after: u64,
    },
    /// The rank runs (almost) only when nothing else can.
    Starve {
        /// The rank.
        rank: Rank,
    },
}

impl Incident {
    /// The ranks that it names.
    pub const fn ranks(&self) -> [Rank; 2] {
        match *self {
            Self::Delay { from, to, .. } | Self::LoseLane { from, to, .. } => [from, to],
            Self::Crash { rank, .. } | Self::Suspend { rank, .. } | Self::Exit { rank } | Self::Starve { rank } => {
                [rank, rank]
            }
        }
    }
}
