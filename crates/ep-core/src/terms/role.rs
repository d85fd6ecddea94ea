//! Roles by name.

use std::fmt;

use super::Rank;

/// What a role does, for traces, errors and logs.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Duty {
    /// Exchanges counts, notes and `done`.
    Control,
    /// Watches and raises alarms.
    Watch,
    /// Dispatch: sends rows to `peer` through a ring.
    Sender,
    /// Dispatch: takes rows of `peer` from a ring.
    Receiver,
    /// Dispatch: takes rows that came along the rail and fans them out within the node.
    Forwarder,
    /// Dispatch: places rows at `peer` directly.
    Placer,
    /// Dispatch: takes in what `peer` placed directly; where `peer` is the rank itself, what stays there.
    Collector,
    /// Combine: returns rows to `peer` through a ring.
    Returner,
    /// Combine: sums the rows of its node that belong to another one, and sends the sums along the rail.
    Gatherer,
    /// Combine: sums the rows that come back.
    Reducer,
    /// Posts to a queue that lanes to `peer`, a rank of another node, share, what the other roles hand over.
    Coordinator,
    /// Runs a script of a test.
    Probe,
}

impl Duty {
    /// Every duty.
    pub const ALL: [Self; 12] = [
        Self::Control,
        Self::Watch,
        Self::Sender,
        Self::Receiver,
        Self::Forwarder,
        Self::Placer,
        Self::Collector,
        Self::Returner,
        Self::Gatherer,
        Self::Reducer,
        Self::Coordinator,
        Self::Probe,
    ];

    /// Its number, as kernels have it: `EP_DUTY_...`.
    pub const fn number(self) -> u32 {
        self as u32
    }

    /// Lower-case name, as traces and logs print it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Control => "control",
            Self::Watch => "watch",
            Self::Sender => "sender",
            Self::Receiver => "receiver",
            Self::Forwarder => "forwarder",
            Self::Placer => "placer",
            Self::Collector => "collector",
            Self::Returner => "returner",
            Self::Gatherer => "gatherer",
            Self::Reducer => "reducer",
            Self::Coordinator => "coordinator",
            Self::Probe => "probe",
        }
    }
}

/// Names one role of one rank: at most one of each runs at a time.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Role {
    /// What it does.
    pub duty: Duty,
    /// The peer it serves, where it serves one.
    pub peer: Option<Rank>,
    /// The track it serves; 0 where there is only one. Of a coordinator: the number of its queue.
    pub track: u16,
}

impl Role {
    /// A role that serves all peers.
    pub const fn new(duty: Duty) -> Self {
        Self { duty, peer: None, track: 0 }
    }

    /// A role that serves `peer` on `track`.
    pub const fn serving(duty: Duty, peer: Rank, track: u16) -> Self {
        Self { duty, peer: Some(peer), track }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.duty.name())?;
        if let Some(peer) = self.peer {
            write!(f, " of rank {peer}")?;
        }
        let what = if self.duty == Duty::Coordinator { "queue" } else { "track" };
        write!(f, ", {what} {}", self.track)
    }
}
