//! Messages of the control role and the header slot that opens a ring.

use super::RowHeader;
use crate::error::Fault;
use crate::topology::Rank;
use crate::{c_enum, c_struct};

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
    /// Every kind.
    pub const ALL: [Self; 4] = [Self::Dispatch, Self::CachedDispatch, Self::Combine, Self::MembershipDispatch];

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

c_struct! {
    /// Opens every message and every ring of an operation.
    #[derive(Eq)]
    pub struct OpHeader = "EpOpHeader" {
        /// Number of the operation.
        pub op: u64,
        /// [`Kind`].
        pub kind: u32,
        /// Rows that follow: in the ring, or from the sender to the reader in all.
        pub rows: u32,
        /// [`crate::Layout::hash`] of shape, topology and the call's rings, plus the number of the dispatch that is
        /// replayed, if one is, and what all ranks say alike of a combine (wrapping).
        pub settings: u64,
        /// Position of the ring's first row; zero in messages and between nodes.
        pub first: u32,
        /// Zero.
        pub reserved: u32,
    }
}

c_struct! {
    /// A counts message: this header, then `u32 rows[ranks]` (to each rank), then `u32 tokens[experts]` (for each expert).
    #[derive(Eq)]
    pub struct CountsHeader = "EpCountsHeader" {
        /// What operation it belongs to.
        pub opening: OpHeader,
        /// Tokens of the sender's batch.
        pub tokens: u32,
        /// Rows for which the sender's arena has room, or [`OPEN_ROOM`].
        pub room: u32,
        /// Zero.
        pub reserved: [u32; 2],
    }
}

/// In place of a room: a note will say. Then no rank's rows go through outboxes.
pub const OPEN_ROOM: u32 = u32::MAX;

/// "There is no such place": the rows go through the ring.
pub const NO_BASE: u64 = u64::MAX;

c_struct! {
    /// A note: the receiver's grant of its arena (dispatch), or the offer of rows to pull (combine).
    #[derive(Eq)]
    pub struct Note = "EpNote" {
        /// What operation it belongs to; `rows` are those of the block.
        pub opening: OpHeader,
        /// Offset of the block in the window of the note's sender, or [`NO_BASE`].
        pub base: u64,
    }
}

c_struct! {
    /// Follows the header slot of a ring between nodes, once for each rank of the receiving node: that rank's part of the
    /// rows to come.
    #[derive(Eq)]
    pub struct Share = "EpShare" {
        /// Position, among the rows from the source to that rank, of the first one that travels on this ring.
        pub first: u32,
        /// Rows for that rank that travel on this ring.
        pub rows: u32,
    }
}

c_enum! {
    /// Fields of messages and counters in which two ranks may differ, as errors name them; in kernels EpReport.field.
    pub enum Mismatch = "EP_FIELD" {
        /// number of the operation
        Op = 0,
        /// kind of the operation
        Kind = 1,
        /// hash of shape, settings, options and replayed dispatch
        Settings = 2,
        /// rows sent
        RowsSent = 3,
        /// operation of a row
        RowOp = 4,
        /// source of a row
        RowSource = 5,
        /// position of a row
        RowPosition = 6,
        /// rows to one rank, as a power of two
        RowsTooMany = 7,
        /// end of a block in the window
        Block = 8,
        /// head of the ring
        Head = 9,
        /// tail of the ring
        Tail = 10,
        /// token of a row
        RowToken = 11,
        /// worst-case rows
        WorstRows = 12,
        /// generation of a replayed graph
        Generation = 13,
        /// choices of an expert
        Choices = 14,
        /// local experts of the choices received
        LocalExpert = 15,
        /// rows by expert
        Slots = 16,
        /// most tokens of a batch (max_tokens, as counts stay on the device)
        Tokens = 17,
    }
}

/// A field that is not what it must be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Difference {
    /// Which.
    pub field: Mismatch,
    /// What it must be.
    pub mine: u64,
    /// What the peer says.
    pub theirs: u64,
}

impl Difference {
    /// The first of `fields` (which, mine, theirs) that differs.
    fn first(fields: [(Mismatch, u64, u64); 3]) -> Option<Self> {
        let differs = |(field, mine, theirs)| (mine != theirs).then_some(Self { field, mine, theirs });
        fields.into_iter().find_map(differs)
    }

    /// The fault that it is, of a message of `peer`.
    pub fn fault(self, peer: Rank) -> Fault {
        Fault::Mismatch { field: self.field.name(), mine: self.mine, theirs: self.theirs, peer }
    }
}

impl OpHeader {
    /// What makes a peer's header that of another operation; rows and position may be any.
    pub fn compare(&self, theirs: &Self) -> Option<Difference> {
        Difference::first([
            (Mismatch::Op, self.op, theirs.op),
            (Mismatch::Kind, self.kind.into(), theirs.kind.into()),
            (Mismatch::Settings, self.settings, theirs.settings),
        ])
    }
}

impl RowHeader {
    /// What makes `row` another row than this one, which is due; its token may be any.
    pub fn compare(&self, row: &Self) -> Option<Difference> {
        Difference::first([
            (Mismatch::RowOp, self.op.into(), row.op.into()),
            (Mismatch::RowSource, self.source_rank.into(), row.source_rank.into()),
            (Mismatch::RowPosition, self.position.into(), row.position.into()),
        ])
    }
}
