//! Lanes: what was posted on them, what has come, and which publishes wait for puts.

use ep_core::port::{LaneId, LaneKind};
use ep_core::{Layout, Nanos, Rank};

use super::pairs::{Key, Pairs};

/// No publish.
const NONE: u32 = u32::MAX;

/// One lane. Small, since a large cluster has millions of them.
#[derive(Debug)]
pub(super) struct Lane {
    /// Puts posted, and puts that have reached the peer: they do so in order. Both wrap.
    pub(super) puts: u32,
    pub(super) reached: u32,
    /// When the last one that reached the peer has entered.
    pub(super) entered: Nanos,
    /// The last tickets of a put and of a get.
    pub(super) put: u64,
    pub(super) get: u64,
    /// The first and last of the publishes that have come before a put that they follow, if any.
    held: [u32; 2],
}

impl Default for Lane {
    fn default() -> Self {
        Self { puts: 0, reached: 0, entered: Nanos(0), put: 0, get: 0, held: [NONE; 2] }
    }
}

impl Lane {
    /// The last ticket given out.
    pub(super) fn issued(&self) -> u64 {
        self.put.max(self.get)
    }

    /// Whether put number `count` has reached the peer.
    pub(super) const fn has_reached(&self, count: u32) -> bool {
        (self.reached.wrapping_sub(count) as i32) >= 0
    }

    /// The first and last of the publishes that have come before a put that they follow.
    pub(super) fn held(&self) -> Option<[u32; 2]> {
        (self.held[0] != NONE).then_some(self.held)
    }

    pub(super) fn set_held(&mut self, held: Option<[u32; 2]>) {
        self.held = held.unwrap_or([NONE; 2]);
    }
}

/// All lanes.
#[derive(Debug)]
pub(super) struct Lanes {
    ranks: u32,
    /// By poster, on each of the two kinds of low latency, and peer.
    lanes: Pairs<Lane, 1>,
}

impl Lanes {
    pub(super) fn new(ranks: u32) -> Self {
        Self { ranks, lanes: Pairs::new(2 * ranks, ranks) }
    }

    /// The number of a lane that the layout has.
    pub(super) fn number(&mut self, layout: &Layout, from: Rank, id: LaneId) -> u32 {
        let (first, key) = self.place(layout, from, id);
        self.lanes.number(first, id.peer, key)
    }

    /// The number of a lane that is about to be published on; none where it is known that nothing else was posted on it.
    pub(super) fn published(&mut self, layout: &Layout, from: Rank, id: LaneId) -> Option<u32> {
        match self.place(layout, from, id) {
            (first, key @ Key::Every(_)) => self.lanes.find(first, id.peer, key),
            (first, key) => Some(self.lanes.number(first, id.peer, key)),
        }
    }

    fn place(&self, layout: &Layout, from: Rank, id: LaneId) -> (Rank, Key) {
        match id.kind {
            LaneKind::LowRows => (from, Key::Every(0)),
            LaneKind::LowDone => (Rank(self.ranks + from.0), Key::Every(0)),
            _ => (from, Key::Some(place(layout, id))),
        }
    }

    pub(super) fn lane(&self, number: u32) -> &Lane {
        self.lanes.get(number)
    }

    pub(super) fn lane_mut(&mut self, number: u32) -> &mut Lane {
        self.lanes.get_mut(number)
    }
}

/// A number of its own for each lane of a rank.
fn place(layout: &Layout, LaneId { peer, kind }: LaneId) -> u64 {
    let lanes = LaneKind::count(layout.tracks()) as u64;
    let before = if kind.is_mailbox() { u64::from(layout.topology().ranks()) } else { u64::from(peer.0) };
    before * lanes + kind.index() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lane_fits_a_cache_line() {
        assert!(size_of::<Lane>() <= 64);
    }
}
