//! Slots of rings, of the staging memory behind them, and where pulled rows land.

use super::{Kind, Layout, OpHeader, RowFormat, SLOT_ALIGN, Share, outbox, round_up};
use crate::ring::Geometry;
use crate::settings::{Rings, Settings};
use crate::terms::Span;
use crate::topology::{Rank, Topology};

/// Gets of one token's rows that a reducer keeps in flight, in tokens.
pub(crate) const PULL_DEPTH: u32 = 2;

impl Layout {
    /// A slot of the ring on `track` from `writer`, in the reader's window, when the writer's part is cut as `rings`.
    #[inline]
    pub fn ring_slot(&self, writer: Rank, rings: &Rings, track: u16, slot: u32) -> Span {
        if self.is_far(track) {
            let part = self.topology().node_of(writer).0;
            self.far_rings.slot(part, self.ring_of(track, rings), rings.far.slots, slot, self.far_wire_bytes())
        } else {
            let part = self.topology().local_of(writer);
            self.near_rings.slot(part, self.ring_of(track, rings), rings.near.slots, slot, self.row().slot_room())
        }
    }

    /// A slot of the staging memory for the ring on `track` to `peer`, when the part is cut as `rings`.
    #[inline]
    pub fn staging_slot(&self, peer: Rank, rings: &Rings, track: u16, slot: u32) -> Span {
        let slots = self.staging_slots(rings, track);
        if self.is_far(track) {
            let part = self.topology().node_of(peer).0;
            self.far_staging.slot(part, self.ring_of(track, rings), slots, slot, self.far_wire_bytes())
        } else {
            let part = self.topology().local_of(peer);
            self.near_staging.slot(part, self.ring_of(track, rings), slots, slot, self.row().slot_room())
        }
    }

    /// Staging slots of the ring on `track` when the part is cut as `rings`: what the ring asks for, within the part.
    #[inline]
    pub fn staging_slots(&self, rings: &Rings, track: u16) -> u32 {
        let (asked, part, count) = if self.is_far(track) {
            (rings.far.staging_slots(), &self.far_staging, rings.channels)
        } else {
            (rings.near.staging_slots(), &self.near_staging, rings.channels * self.topology().nodes())
        };
        asked.min((part.per_part / u64::from(count)) as u32)
    }

    /// The geometry of the ring on `track`.
    pub fn geometry(&self, rings: &Rings, track: u16) -> Geometry {
        if self.is_far(track) { rings.far } else { rings.near }
    }

    /// The index of the ring on `track` within its writer's part, when that is cut as `rings`.
    #[inline]
    fn ring_of(&self, track: u16, rings: &Rings) -> u32 {
        let channels = self.settings().channels();
        let (node, channel) = (u32::from(track) / channels, u32::from(track) % channels);
        if self.is_far(track) { channel } else { node * rings.channels + channel }
    }

    /// Bytes of a row between nodes: a dispatched one with one bit for each rank of the node that it goes to, or one of results.
    #[inline]
    pub fn far_wire_bytes(&self) -> u64 {
        (self.row().wire_bytes() + self.mask_bytes()).max(self.row().results().wire_bytes())
    }

    /// From one ring slot between nodes to the next, where what moves are rows of operations of `kind`: of kernels, which put neighbouring slots together, with
    /// what lies between their rows. Roles put each row alone, and take slots for the longer ones: so a dispatch's rings need not be empty when a combine begins.
    #[inline]
    pub fn far_slot_bytes(&self, kind: Kind) -> u64 {
        far_slot_bytes(self.row(), self.topology(), kind)
    }

    /// Bytes of the mask behind a row that travels between nodes.
    pub fn mask_bytes(&self) -> u64 {
        mask_bytes(self.topology())
    }

    /// Where the row that the role of `track` pulls from `writer` lands; `turn` distinguishes gets in flight.
    pub fn pull_slot(&self, track: u16, writer: Rank, turn: u32) -> Span {
        let ring = u32::from(track);
        let part = self.topology().local_of(writer);
        let room = pull_room(self.row(), self.topology(), self.settings());
        self.pulls.slot(part, ring, PULL_DEPTH, turn % PULL_DEPTH, room)
    }
}

/// Bytes that a pulled row needs where it lands: as in a slot of a ring, but an outbox has longer heads.
fn pull_room(row: &RowFormat, topology: &Topology, settings: &Settings) -> u64 {
    let longer = if settings.has_outboxes() { outbox::head_bytes(row, topology) - row.header_bytes() } else { 0 };
    row.slot_room() + longer
}

pub(super) fn pull_bytes(row: &RowFormat, topology: &Topology, settings: &Settings) -> u64 {
    round_up(pull_room(row, topology, settings), SLOT_ALIGN)
}

fn mask_bytes(topology: &Topology) -> u64 {
    u64::from(topology.ranks_per_node().div_ceil(32)) * 4
}

fn far_wire_bytes(row: &RowFormat, topology: &Topology, kind: Kind) -> u64 {
    match kind {
        Kind::Combine => row.results().wire_bytes(),
        Kind::Dispatch | Kind::CachedDispatch | Kind::MembershipDispatch => row.wire_bytes() + mask_bytes(topology),
    }
}

/// A far slot holds a row with its mask, or of results, or the header slot with the first position for each rank of the node.
pub(super) fn far_slot_bytes(row: &RowFormat, topology: &Topology, kind: Kind) -> u64 {
    let shares = size_of::<Share>() as u64 * u64::from(topology.ranks_per_node());
    let opening = size_of::<OpHeader>() as u64 + shares;
    round_up(far_wire_bytes(row, topology, kind).max(opening), SLOT_ALIGN)
}
