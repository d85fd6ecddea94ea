//! Lanes: what was posted on them, what has come, and which publishes wait for puts.
//!
//! A lane has two ends: one where its poster is and one where its peer is, which may lie in different partitions.

use std::ops::Range;

use ep_core::port::{LaneId, LaneKind};
use ep_core::topology::MAX_RANKS;
use ep_core::{Layout, Nanos, Rank};

use super::pairs::{Key, Pairs};

/// No publish.
const NONE: u32 = u32::MAX;

/// A lane where it is posted to. Small, since a large cluster has millions of them.
#[derive(Debug, Default)]
pub(super) struct Posted {
    /// Puts; it wraps.
    pub(super) puts: u32,
    /// The last tickets of a put and of a get.
    pub(super) put: u64,
    pub(super) get: u64,
}

impl Posted {
    /// The last ticket given out.
    pub(super) fn issued(&self) -> u64 {
        self.put.max(self.get)
    }
}

/// A lane where it leads to. As small.
#[derive(Debug)]
pub(super) struct Reached {
    /// Puts that have reached the peer: they do so in order. It wraps.
    pub(super) puts: u32,
    /// The first and last of the publishes that have come before a put that they follow, if any.
    held: [u32; 2],
    /// When the last put that reached the peer has entered.
    pub(super) entered: Nanos,
}

impl Default for Reached {
    fn default() -> Self {
        Self { puts: 0, held: [NONE; 2], entered: Nanos(0) }
    }
}

impl Reached {
    /// Whether put number `count` has reached the peer.
    pub(super) const fn has(&self, count: u32) -> bool {
        (self.puts.wrapping_sub(count) as i32) >= 0
    }

    /// The first and last of the publishes that have come before a put that they follow.
    pub(super) fn held(&self) -> Option<[u32; 2]> {
        (self.held[0] != NONE).then_some(self.held)
    }

    pub(super) fn set_held(&mut self, held: Option<[u32; 2]>) {
        self.held = held.unwrap_or([NONE; 2]);
    }
}

/// The ends of lanes that lie in one partition.
#[derive(Debug)]
pub(super) struct Lanes {
    first: u32,
    locals: u32,
    /// By poster, on each of the two kinds of low latency, and peer.
    posted: Pairs<Posted, 1>,
    /// By peer, on each of the two kinds, and poster.
    reached: Pairs<Reached, 1>,
}

impl Lanes {
    /// Those of some of `ranks` ranks.
    pub(super) fn new(of: &Range<u32>, ranks: u32) -> Self {
        let locals = of.end - of.start;
        let (posted, reached) = (Pairs::new(2 * locals, ranks), Pairs::new(2 * locals, ranks));
        Self { first: of.start, locals, posted, reached }
    }

    /// The number of a lane that the layout has, where it is posted to.
    pub(super) fn posted_number(&mut self, layout: &Layout, from: Rank, id: LaneId) -> u32 {
        let (first, key) = self.place(layout, from, id.peer, id.kind);
        self.posted.number(first, id.peer, key)
    }

    /// Its number if anything may have been put on it.
    pub(super) fn published(&mut self, layout: &Layout, from: Rank, id: LaneId) -> Option<u32> {
        match self.place(layout, from, id.peer, id.kind) {
            (first, key @ Key::Every(_)) => self.posted.find(first, id.peer, key),
            (first, key) => Some(self.posted.number(first, id.peer, key)),
        }
    }

    /// The number of a lane that the layout has, where it leads to.
    pub(super) fn reached_number(&mut self, layout: &Layout, from: Rank, id: LaneId) -> u32 {
        let (first, key) = self.place(layout, id.peer, from, id.kind);
        self.reached.number(first, from, key)
    }

    /// Where a lane's end with `side` is found; the other end is with `other`.
    fn place(&self, layout: &Layout, side: Rank, other: Rank, kind: LaneKind) -> (Rank, Key) {
        let local = side.0 - self.first;
        match kind {
            LaneKind::LowRows => (Rank(local), Key::Every(0)),
            LaneKind::LowDone => (Rank(self.locals + local), Key::Every(0)),
            // Mailboxes have a numbering of their own, and so have the lanes of single rows.
            _ => {
                let lanes = LaneKind::count(layout.tracks()) as u64;
                let mailboxes = u64::from(MAX_RANKS) * lanes;
                let rows = mailboxes + layout.mailboxes() as u64;
                let first = match kind {
                    LaneKind::Mailbox(..) => mailboxes,
                    LaneKind::LowRow(_) => rows + u64::from(other.0) * layout.row_lanes() as u64,
                    _ => u64::from(other.0) * lanes,
                };
                (Rank(local), Key::Some(first + kind.index() as u64))
            }
        }
    }

    pub(super) fn posted(&self, number: u32) -> &Posted {
        self.posted.get(number)
    }

    pub(super) fn posted_mut(&mut self, number: u32) -> &mut Posted {
        self.posted.get_mut(number)
    }

    pub(super) fn reached(&self, number: u32) -> &Reached {
        self.reached.get(number)
    }

    pub(super) fn reached_mut(&mut self, number: u32) -> &mut Reached {
        self.reached.get_mut(number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_of_lanes_are_small() {
        assert!(size_of::<Posted>() <= 24 && size_of::<Reached>() <= 24);
    }
}
