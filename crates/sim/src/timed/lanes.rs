//! Lanes: what was posted on them, what has come, and which publishes wait for puts.

use ep_core::Rank;
use ep_core::port::{LaneId, LaneKind};
use ep_core::{Layout, Nanos};

use super::agenda::Class;
use super::pairs::{Key, Pairs, low_latency};

/// No cell, or no publish.
const NONE: u32 = u32::MAX;

/// One lane: one cache line, since a large cluster has millions of them.
#[derive(Debug)]
pub(super) struct Lane {
    pub(super) from: Rank,
    pub(super) to: Rank,
    pub(super) kind: LaneKind,
    pub(super) class: Class,
    /// The bank of the cells whose numbers it knows.
    bank: u8,
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
    /// The numbers of the first two cells of its line at the peer.
    cells: [u32; 2],
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

    /// The number of the cell in place `slot` of its line, if it was published before.
    pub(super) fn cell(&self, bank: u8, slot: u64) -> Option<u32> {
        let number = *self.cells.get(slot as usize)?;
        (self.bank == bank && number != NONE).then_some(number)
    }

    /// Remembers the number of a cell of its line.
    pub(super) fn know_cell(&mut self, bank: u8, slot: u64, number: u32) {
        if self.bank != bank {
            (self.bank, self.cells) = (bank, [NONE; 2]);
        }
        if let Some(place) = self.cells.get_mut(slot as usize) {
            *place = number;
        }
    }
}

/// All lanes, made when they are first posted to.
#[derive(Debug)]
pub(super) struct Lanes {
    /// By poster and peer.
    numbers: Pairs<2>,
    lanes: Vec<Lane>,
}

impl Lanes {
    pub(super) fn new(ranks: u32) -> Self {
        Self { numbers: Pairs::new(ranks, ranks), lanes: Vec::new() }
    }

    /// The number of a lane that the layout has.
    pub(super) fn number(&mut self, layout: &Layout, from: Rank, id: LaneId, class: Class) -> u32 {
        let key = low_latency(id.kind).map_or_else(|| Key::Other(place(layout, id)), Key::Row);
        self.numbers.get(from, id.peer, key).unwrap_or_else(|| {
            let number = self.lanes.len() as u32;
            self.lanes.push(Lane {
                from,
                to: id.peer,
                kind: id.kind,
                class,
                bank: 0,
                puts: 0,
                reached: 0,
                entered: Nanos(0),
                put: 0,
                get: 0,
                held: [NONE; 2],
                cells: [NONE; 2],
            });
            self.numbers.set(from, id.peer, key, number);
            number
        })
    }

    pub(super) fn lane(&self, number: u32) -> &Lane {
        &self.lanes[number as usize]
    }

    pub(super) fn lane_mut(&mut self, number: u32) -> &mut Lane {
        &mut self.lanes[number as usize]
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
    fn a_lane_is_one_cache_line() {
        assert_eq!(size_of::<Lane>(), 64);
    }
}
