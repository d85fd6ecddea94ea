//! Messages of the control role and the header slot that opens a ring.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// What an operation is. Part of every message that opens one, so that ranks that do different things find out.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u32)]
pub enum Kind {
    /// Dispatch with an exchange of counts.
    Dispatch = 1,
    /// Dispatch along a handle's counts.
    CachedDispatch = 2,
    /// Combine.
    Combine = 3,
    /// Dispatch of a membership: counts are exchanged, rows carry no choices.
    MembershipDispatch = 4,
}

impl Kind {
    /// The value of the cell that says that operation `op` of this kind has begun: `op * 8 + kind`.
    pub const fn opening(self, op: u64) -> u64 {
        op << 3 | self as u64
    }

    /// Lower-case name, as logs print it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Dispatch => "dispatch",
            Self::CachedDispatch => "cached dispatch",
            Self::Combine => "combine",
            Self::MembershipDispatch => "membership dispatch",
        }
    }
}

/// Opens every message and every ring of an operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct OpHeader {
    /// Number of the operation.
    pub op: u64,
    /// [`Kind`].
    pub kind: u32,
    /// Rows that follow: in the ring, or from the sender to the reader in all.
    pub rows: u32,
    /// [`crate::Layout::hash`] of shape, topology and the call's rings, plus the number of the dispatch that is
    /// replayed, if one is (wrapping).
    pub settings: u64,
    /// Position of the ring's first row; zero in messages and between nodes.
    pub first: u32,
    /// Zero.
    pub reserved: u32,
}

/// A counts message: this header, then `u32 rows[ranks]` (to each rank), then `u32 tokens[experts]` (for each expert).
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct CountsHeader {
    /// What operation it belongs to.
    pub opening: OpHeader,
    /// Tokens of the sender's batch.
    pub tokens: u32,
    /// Zero.
    pub reserved: [u32; 3],
}

/// "There is no such place": the rows go through the ring.
pub const NO_BASE: u64 = u64::MAX;

/// A note: the receiver's grant of its arena (dispatch), or the offer of rows to pull (combine).
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct Note {
    /// What operation it belongs to; `rows` are those of the block.
    pub opening: OpHeader,
    /// Offset of the block in the window of the note's sender, or [`NO_BASE`].
    pub base: u64,
}

/// Follows the header slot of a ring between nodes, once for each rank of the receiving node: that rank's part of the
/// rows to come.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct Share {
    /// Position, among the rows from the source to that rank, of the first one that travels on this ring.
    pub first: u32,
    /// Rows for that rank that travel on this ring.
    pub rows: u32,
}
