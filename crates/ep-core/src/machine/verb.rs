//! Kinds of verbs and lanes, for decorators that count or pick them.

use crate::port::LaneKind;

/// Which verb of a [`super::Port`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
pub enum VerbKind {
    /// `peek`.
    Peek = 0,
    /// `wait_any`.
    Wait = 1,
    /// `put`.
    Put = 2,
    /// `get`.
    Get = 3,
    /// `publish`.
    Publish = 4,
    /// `flush`.
    Flush = 5,
    /// `read`.
    Read = 6,
    /// `write`.
    Write = 7,
}

impl VerbKind {
    /// Every kind, in the order of the discriminants.
    pub const ALL: [Self; 8] =
        [Self::Peek, Self::Wait, Self::Put, Self::Get, Self::Publish, Self::Flush, Self::Read, Self::Write];

    /// Lower-case name, as reports print it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Peek => "peek",
            Self::Wait => "wait",
            Self::Put => "put",
            Self::Get => "get",
            Self::Publish => "publish",
            Self::Flush => "flush",
            Self::Read => "read",
            Self::Write => "write",
        }
    }
}

/// A [`LaneKind`] whatever its channel.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
pub enum LaneClass {
    /// [`LaneKind::Watch`].
    Watch = 0,
    /// [`LaneKind::Control`].
    Control = 1,
    /// [`LaneKind::LowRows`], and [`LaneKind::LowRow`] of any token.
    LowRows = 2,
    /// [`LaneKind::LowDone`].
    LowDone = 3,
    /// [`LaneKind::Data`] of any channel.
    Data = 4,
    /// [`LaneKind::Credit`] of any channel.
    Credit = 5,
    /// [`LaneKind::Mailbox`] of any ring.
    Mailbox = 6,
}

impl LaneClass {
    /// Every class, in the order of the discriminants.
    pub const ALL: [Self; 7] =
        [Self::Watch, Self::Control, Self::LowRows, Self::LowDone, Self::Data, Self::Credit, Self::Mailbox];

    /// The class of a lane.
    pub const fn of(kind: LaneKind) -> Self {
        match kind {
            LaneKind::Watch => Self::Watch,
            LaneKind::Control => Self::Control,
            LaneKind::LowRows | LaneKind::LowRow(_) => Self::LowRows,
            LaneKind::LowDone => Self::LowDone,
            LaneKind::Data(_) => Self::Data,
            LaneKind::Credit(_) => Self::Credit,
            LaneKind::Mailbox(..) => Self::Mailbox,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn discriminants_index_the_lists() {
        assert!(VerbKind::ALL.iter().enumerate().all(|(at, &kind)| kind as usize == at));
        assert!(LaneClass::ALL.iter().enumerate().all(|(at, &class)| class as usize == at));
    }
}
