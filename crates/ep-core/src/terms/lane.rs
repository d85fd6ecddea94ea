//! Lanes, and the cells that are published on them.

use std::fmt;

use super::{Phase, Rank};

/// What a lane carries. Rows travel on *tracks*: one for each ring that a rank may fill at a peer, numbered by
/// [`crate::Layout::near_track`] and [`crate::Layout::far_track`]; on one node a track is a channel. Every kind has its
/// own lane to every peer, because a lane has one posting role: its own, or between nodes the coordinator of the queue
/// that it shares with others ([`crate::layout::Queues`]).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum LaneKind {
    /// Alarms of the watching role.
    Watch,
    /// Counts, notes and `done` of the control role.
    Control,
    /// Low latency: rows into the peer's slots, and their arrivals; or, where each row is announced by itself, their headers and arrivals.
    LowRows,
    /// Low latency: what was received.
    LowDone,
    /// Rows of one track, and the tails of its ring.
    Data(u16),
    /// Credit of one track's ring, and gets.
    Credit(u16),
    /// Low latency, where each row is announced by itself: the row, or the results, of this token, and the cell that says that they are there.
    LowRow(u16),
    /// From a rank to itself: what a role and a coordinator of a rail peer tell each other about the ring with that
    /// number ([`crate::Layout::mailbox`]), where lanes between nodes share a queue ([`crate::layout::Queues`]).
    Mailbox(Mail, u16),
}

/// What a mailbox carries.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Mail {
    /// To the coordinator, from the role that fills the ring: what lies in its staging memory.
    Staged = 0,
    /// From the coordinator, to that role: what has left the staging memory.
    Sent = 1,
    /// To the coordinator, from the role that empties the ring which the peer fills: the credit to return.
    Owed = 2,
    /// To the coordinator, from the control role: the last operation whose counts it may send, and the last that is
    /// over.
    Control = 3,
}

impl LaneKind {
    /// Dense index: watch, control, the two of low latency, then data and credit of each track. Mailboxes have a numbering of
    /// their own, and so have the lanes of single rows.
    #[inline]
    pub const fn index(self) -> usize {
        match self {
            Self::Watch => 0,
            Self::Control => 1,
            Self::LowRows => 2,
            Self::LowDone => 3,
            Self::Data(track) => 4 + 2 * track as usize,
            Self::Credit(track) => 5 + 2 * track as usize,
            Self::LowRow(token) => token as usize,
            Self::Mailbox(mail, ring) => 4 * ring as usize + mail as usize,
        }
    }

    /// Whether it leads from a rank to itself.
    #[inline]
    pub const fn is_mailbox(self) -> bool {
        matches!(self, Self::Mailbox(..))
    }

    /// The kind with dense index `index`; no mailbox, and no lane of a single row.
    pub const fn from_index(index: usize) -> Self {
        match index {
            0 => Self::Watch,
            1 => Self::Control,
            2 => Self::LowRows,
            3 => Self::LowDone,
            _ if index.is_multiple_of(2) => Self::Data(((index - 4) / 2) as u16),
            _ => Self::Credit(((index - 5) / 2) as u16),
        }
    }

    /// The counters that are published on lanes of this kind.
    #[inline]
    pub const fn counters(self) -> &'static [Counter] {
        match self {
            Self::Watch => &[Counter::Alarm, Counter::Opening, Counter::Waiting, Counter::Probe],
            Self::Control => &[Counter::Counts, Counter::Note, Counter::Done, Counter::Probe],
            Self::LowRows => &[Counter::Even, Counter::Odd, Counter::Probe],
            Self::LowRow(_) => &[Counter::Even, Counter::Odd],
            Self::LowDone => &[Counter::Received, Counter::Probe],
            Self::Data(_) => &[Counter::Tail, Counter::Placed, Counter::Probe],
            Self::Credit(_) => &[Counter::Head, Counter::Probe],
            Self::Mailbox(Mail::Staged, _) => &[Counter::Tail, Counter::Done, Counter::Probe],
            Self::Mailbox(Mail::Sent, _) => &[Counter::Head, Counter::Probe],
            Self::Mailbox(Mail::Owed, _) => &[Counter::Head, Counter::Done, Counter::Probe],
            Self::Mailbox(Mail::Control, _) => &[Counter::Counts, Counter::Done, Counter::Probe],
        }
    }

    /// What a wait on a lane of this kind is for: what its first counter counts.
    #[inline]
    pub const fn phase(self) -> Phase {
        self.counters()[0].phase()
    }

    /// Lanes from one rank to one peer with `tracks` tracks.
    #[inline]
    pub const fn count(tracks: u32) -> usize {
        4 + 2 * tracks as usize
    }

    /// Mailboxes of a rank, for `rings` rings between nodes.
    #[inline]
    pub const fn mailboxes(rings: u32) -> usize {
        4 * rings as usize
    }
}

/// A path to `peer`, posted to by one role of this rank.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct LaneId {
    /// The rank at the other end.
    pub peer: Rank,
    /// What it carries.
    pub kind: LaneKind,
}

/// Which lanes of a rank are stopped, or drained.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Scope {
    /// All.
    All,
    /// Those to one rank.
    Peer(Rank),
    /// Those of low latency to one rank: what throughput mode has under way to it arrives nevertheless.
    LowLatency(Rank),
}

impl Scope {
    /// Whether it has this lane.
    #[inline]
    pub const fn covers(self, lane: LaneId) -> bool {
        match self {
            Self::All => true,
            Self::Peer(peer) => lane.peer.0 == peer.0,
            Self::LowLatency(peer) => {
                lane.peer.0 == peer.0
                    && matches!(lane.kind, LaneKind::LowRows | LaneKind::LowRow(_) | LaneKind::LowDone)
            }
        }
    }
}

impl fmt::Display for LaneId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            LaneKind::Watch => write!(f, "the watch lane of rank {}", self.peer),
            LaneKind::Control => write!(f, "the control lane of rank {}", self.peer),
            LaneKind::LowRows => write!(f, "the low-latency lane of rank {}", self.peer),
            LaneKind::LowRow(token) => write!(f, "the low-latency lane of token {token} of rank {}", self.peer),
            LaneKind::LowDone => write!(f, "the low-latency done lane of rank {}", self.peer),
            LaneKind::Data(c) => write!(f, "data lane {c} of rank {}", self.peer),
            LaneKind::Credit(c) => write!(f, "credit lane {c} of rank {}", self.peer),
            LaneKind::Mailbox(mail, ring) => {
                let what = match mail {
                    Mail::Staged => "staged rows",
                    Mail::Sent => "sent rows",
                    Mail::Owed => "owed credit",
                    Mail::Control => "control",
                };
                write!(f, "the mailbox for {what} {ring} of rank {}", self.peer)
            }
        }
    }
}

/// What a cell counts.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Counter {
    /// Watch lane: the writer's latest [`crate::layout::Alarm`].
    Alarm,
    /// Watch lane: the last operation that the writer has begun, and its kind ([`crate::layout::Kind::opening`]).
    Opening,
    /// Watch lane, low latency: whom the writer waits for: `serial << 16 | rank`, itself when it no longer waits.
    Waiting,
    /// Control lane: the last operation whose counts the writer has put.
    Counts,
    /// Control lane: the last operation whose note (grant or offer) the writer has put.
    Note,
    /// Control lane: the last operation of which the writer has read everything it was given.
    Done,
    /// Data lane: rows and header slots the writer has put into its ring, ever.
    Tail,
    /// Data lane: the last operation whose rows the writer has placed directly.
    Placed,
    /// Credit lane: rows and header slots the writer has consumed from the reader's ring, ever.
    Head,
    /// Low-latency lane: the writer's last [`crate::layout::Arrival`] in the bank of even operations. Lane of a single row: the last of them whose row
    /// is there.
    Even,
    /// The same of odd operations.
    Odd,
    /// Low-latency done lane: the last low-latency operation of which the writer has read everything it was given.
    Received,
    /// Any lane: free for probes and tests.
    Probe,
}

impl Counter {
    /// Every counter.
    pub const ALL: [Self; 13] = [
        Self::Alarm,
        Self::Opening,
        Self::Waiting,
        Self::Counts,
        Self::Note,
        Self::Done,
        Self::Tail,
        Self::Placed,
        Self::Head,
        Self::Even,
        Self::Odd,
        Self::Received,
        Self::Probe,
    ];

    /// Its place in the 64-byte line of its lane, 0 to 7. Counters of different lanes may share a place.
    #[inline]
    pub const fn slot(self) -> u64 {
        match self {
            Self::Alarm | Self::Counts | Self::Tail | Self::Head | Self::Even | Self::Received => 0,
            Self::Opening | Self::Note | Self::Placed | Self::Odd => 1,
            Self::Done | Self::Waiting => 2,
            Self::Probe => 7,
        }
    }

    /// The phase in which a role waits on this counter.
    pub const fn phase(self) -> Phase {
        match self {
            Self::Alarm | Self::Opening | Self::Waiting => Phase::Alarm,
            Self::Counts => Phase::Counts,
            Self::Note => Phase::Note,
            Self::Done | Self::Received => Phase::Bank,
            Self::Tail | Self::Placed | Self::Even | Self::Odd => Phase::Rows,
            Self::Head => Phase::Credit,
            Self::Probe => Phase::Probe,
        }
    }
}

/// A 64-bit counter in the reader's window, written through one lane of `writer`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Cell {
    /// The only rank that publishes to it.
    pub writer: Rank,
    /// The only lane, of the writer to the reader, that it is published on.
    pub lane: LaneKind,
    /// What it counts.
    pub counter: Counter,
}

impl Cell {
    /// The cell of `counter` on the lane `lane` of `writer`.
    #[inline]
    pub const fn new(writer: Rank, lane: LaneKind, counter: Counter) -> Self {
        Self { writer, lane, counter }
    }
}
