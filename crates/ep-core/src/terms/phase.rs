//! What a rank waits for.

use std::fmt;

/// What a rank was doing for a peer when it waited. In the order in which an operation goes through them: of several
/// ranks that wait for each other, the one in the earliest phase is nearest to the cause.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Phase {
    /// Waiting until a peer is `done` with the operation before last, to reuse its bank.
    Bank = 0,
    /// Waiting for a peer's counts.
    Counts = 1,
    /// Waiting for a peer's note: a grant of its arena, or an offer of its rows.
    Note = 2,
    /// Waiting for the slowest reader of an outbox to free a slot: its other readers wait for rows meanwhile.
    Outbox = 3,
    /// Waiting for a peer's rows: in a ring, or placed directly.
    Rows = 4,
    /// Waiting for a peer to return credit of a ring.
    Credit = 5,
    /// Waiting until a peer has pulled the rows offered to it.
    Pulled = 6,
    /// Waiting for an alarm of a peer.
    Alarm = 7,
    /// Agreeing on how to go on after a failure.
    Recovery = 8,
    /// Waiting for something a test made up.
    Probe = 9,
    /// Waiting until the results of the own experts are ready, which the caller's kernels say.
    Results = 10,
}

impl Phase {
    /// Every phase, by number.
    pub const ALL: [Self; 11] = [
        Self::Bank,
        Self::Counts,
        Self::Note,
        Self::Outbox,
        Self::Rows,
        Self::Credit,
        Self::Pulled,
        Self::Alarm,
        Self::Recovery,
        Self::Probe,
        Self::Results,
    ];

    /// The phase of a number that a cell or a kernel's report holds; [`Self::Probe`] for any other.
    pub const fn of(number: u32) -> Self {
        if (number as usize) < Self::ALL.len() { Self::ALL[number as usize] } else { Self::Probe }
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bank => "the end of the operation before last",
            Self::Counts => "counts",
            Self::Note => "a grant or offer",
            Self::Outbox => "a free slot of an outbox",
            Self::Rows => "rows",
            Self::Credit => "ring credit",
            Self::Pulled => "the pull of offered rows",
            Self::Alarm => "an alarm",
            Self::Recovery => "recovery",
            Self::Probe => "a probe",
            Self::Results => "ready results of its own experts",
        })
    }
}
