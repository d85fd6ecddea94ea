//! Outboxes: rows that lie at their sender until their readers have pulled them.
//!
//! With [`Placement::Pulled`](crate::Placement::Pulled), and in operations of batches for which an arena has no room
//! ([`SettingsBuilder::outboxes`](crate::settings::SettingsBuilder::outboxes)), the memory that rings within the node have
//! otherwise is the owner's outbox. Nobody else writes there. It is cut anew by every operation:
//!
//! ```text
//! dispatch   channels x | codes[slots] | scales[slots] | heads[slots] | to 128 B      slots: near slots x other ranks
//! combine    readers x channels x | payloads[slots] | heads[slots] | to 128 B         slots: near slots
//!
//! head of a dispatch: RowHeader 16 B, Choice[topk] 8 B each with global experts, padded to 16 B | i32[ranks of the node]: the
//!                     row's position at each, or -1 where it does not go | padding to 16 B
//! head of a combine:  RowHeader 16 B, Choice[topk] 8 B each, padded to 16 B
//! ```
//!
//! All ranks of the node read the slots of a dispatch, one rank those of a combine.

use super::{Kind, Layout, ROW_ALIGN, RowFormat, SLOT_ALIGN, round_up};
use crate::error::Error;
use crate::settings::{OutboxSteps, OutboxUse, Placement, Rings, Settings};
use crate::terms::{Offset, Span};
use crate::topology::{Rank, Topology};

/// Alignment of each outbox, counted from the start of the region.
const OUTBOX_ALIGN: u64 = 128;

/// The most slots of all outboxes of one kind to one reader.
const MAX_OUTBOX_SLOTS: u64 = i32::MAX as u64;

/// The slots of one channel's outbox, in the window of the rank whose rows they hold.
///
/// Offsets of the slots' parts are multiples of 16 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Outbox {
    codes: Offset,
    scales: Offset,
    heads: Offset,
    slots: u32,
    codes_step: u64,
    scales_step: u64,
    head_bytes: u64,
}

impl Outbox {
    /// How many rows it holds.
    pub const fn slots(&self) -> u32 {
        self.slots
    }

    /// The codes of the row in `slot` (a combine: its payload), padding included.
    #[inline]
    pub const fn codes(&self, slot: u32) -> Span {
        self.codes.plus(slot as u64 * self.codes_step).span(self.codes_step)
    }

    /// The scales of the row in `slot`, padding included; of no bytes where rows have none.
    #[inline]
    pub const fn scales(&self, slot: u32) -> Span {
        self.scales.plus(slot as u64 * self.scales_step).span(self.scales_step)
    }

    /// What describes the row in `slot`: header and choices; in a dispatch the positions behind them.
    #[inline]
    pub const fn head(&self, slot: u32) -> Span {
        self.heads.plus(slot as u64 * self.head_bytes).span(self.head_bytes)
    }
}

/// What each slot of an outbox takes.
#[derive(Clone, Copy)]
struct Slot {
    codes: u64,
    scales: u64,
    head: u64,
}

impl Slot {
    /// A slot that several ranks read.
    const fn laid(row: &RowFormat, topology: &Topology) -> Self {
        let scales = round_up(row.scales_stride(), ROW_ALIGN);
        Self { codes: row.scales_offset(), scales, head: head_bytes(row, topology) }
    }

    /// A slot of results, which one rank reads.
    const fn returned(row: &RowFormat) -> Self {
        Self { codes: row.results().payload_stride(), scales: 0, head: row.header_bytes() }
    }

    /// Bytes of an outbox of so many slots; none when no window holds as many.
    fn bytes(self, slots: u64) -> Option<u64> {
        slots.checked_mul(self.codes + self.scales + self.head)?.checked_next_multiple_of(OUTBOX_ALIGN)
    }

    /// The outbox number `index` of those that begin at `base`.
    fn outbox(self, base: Offset, index: u64, slots: u64) -> Outbox {
        let bytes = self.bytes(slots).expect("the layout holds all its outboxes");
        let codes = base.plus(index * bytes);
        let scales = codes.plus(slots * self.codes);
        Outbox {
            codes,
            scales,
            heads: scales.plus(slots * self.scales),
            slots: slots as u32,
            codes_step: self.codes,
            scales_step: self.scales,
            head_bytes: self.head,
        }
    }
}

impl Layout {
    /// Bytes of the head of a row that several ranks read.
    pub fn outbox_head_bytes(&self) -> u64 {
        head_bytes(self.row(), self.topology())
    }
}

/// Bytes of a head that several ranks read.
pub(super) const fn head_bytes(row: &RowFormat, topology: &Topology) -> u64 {
    round_up(row.header_bytes() + 4 * topology.ranks_per_node() as u64, ROW_ALIGN)
}

/// Slots of a channel's outbox in a dispatch: as many as its rings to the other ranks of the node would have.
const fn laid_slots(rings: &Rings, topology: &Topology) -> u64 {
    let others = topology.ranks_per_node() - 1;
    rings.near.slots as u64 * if others > 1 { others as u64 } else { 1 }
}

/// Bytes of the region that holds all outboxes that are cut as `rings`, and as every call's rings that fit.
///
/// A call's rings have at most as many channels, and at most as many slots in all. But each of its outboxes is padded:
/// so there is room for the padding of them all.
pub(super) fn region_bytes(row: &RowFormat, topology: &Topology, rings: &Rings) -> Option<u64> {
    let (readers, channels) = (u64::from(topology.ranks_per_node()), u64::from(rings.channels));
    let laid = Slot::laid(row, topology).bytes(laid_slots(rings, topology))?.checked_mul(channels)?;
    let returned = Slot::returned(row).bytes(rings.near.slots.into())?.checked_mul(readers * channels)?;
    laid.max(returned).checked_add(readers * channels * OUTBOX_ALIGN)
}

/// Refuses what cannot be pulled: a topology of several nodes, and more slots than a position counts.
pub(super) fn check(topology: &Topology, settings: &Settings) -> Result<(), Error> {
    settings.placement().check(topology)?;
    let rings = match settings.placement() {
        Placement::Pulled => settings.rings(),
        Placement::Ring | Placement::Direct => match settings.outboxes() {
            Some(outboxes) => outboxes,
            None => return Ok(()),
        },
    };
    let slots = u64::from(rings.channels) * laid_slots(&rings, topology);
    if slots > MAX_OUTBOX_SLOTS {
        return Err(Error::invalid("channels x outbox slots", slots, "at most 2147483647"));
    }
    Ok(())
}

const _: () = assert!(OUTBOX_ALIGN.is_multiple_of(SLOT_ALIGN));

impl Layout {
    /// Where this rank lays the rows of a dispatch on `channel`, when the call has `rings`.
    #[inline]
    pub fn outbox(&self, rings: &Rings, channel: u32) -> Outbox {
        let slots = laid_slots(rings, self.topology());
        Slot::laid(self.row(), self.topology()).outbox(self.near_rings.base, channel.into(), slots)
    }

    /// Where this rank lays the results of a combine for `peer` on `channel`, when the call has `rings`.
    #[inline]
    pub fn outbox_to(&self, rings: &Rings, peer: Rank, channel: u32) -> Outbox {
        let reader = self.topology().local_of(peer);
        let index = u64::from(reader) * u64::from(rings.channels) + u64::from(channel);
        Slot::returned(self.row()).outbox(self.near_rings.base, index, rings.near.slots.into())
    }

    /// What a call of `kind` with `rings` uses of each of its outboxes.
    pub fn outbox_steps(&self, kind: Kind, rings: &Rings, used: OutboxUse) -> OutboxSteps {
        let readers = if kind == Kind::Combine { 1 } else { self.topology().ranks_per_node() - 1 };
        used.of(rings.near, readers)
    }

    /// From the start of a head that several ranks read to the position at the rank with local index `local`.
    #[inline]
    pub fn position_in_head(&self, local: u32) -> u64 {
        self.row().header_bytes() + 4 * u64::from(local)
    }
}
