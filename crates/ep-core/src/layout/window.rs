//! How a window is cut.

use std::hash::Hasher;

use super::{CELL_BYTES, CountsHeader, LINE_BYTES, Note, RowFormat, SLOT_ALIGN, round_up};
use crate::error::Error;
use crate::port::{Cell, LaneKind, Offset, Span};
use crate::settings::{Rings, Settings};
use crate::shape::Shape;
use crate::topology::{Rank, Topology};

/// A named part of a window.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Region {
    /// What lies there.
    pub name: &'static str,
    /// Where.
    pub span: Span,
}

/// Where everything lies in a window, for one shape, topology and settings: the same on every rank.
#[derive(Clone, Debug)]
pub struct Layout {
    shape: Shape,
    topology: Topology,
    settings: Settings,
    row: RowFormat,
    local_experts: u32,
    pub(super) cells: Offset,
    pub(super) counts: Offset,
    pub(super) counts_outbox: Offset,
    pub(super) notes: Offset,
    pub(super) notes_outbox: Offset,
    pub(super) rings: Offset,
    pub(super) staging: Offset,
    pub(super) pulls: Offset,
    pub(super) arena: Offset,
    window: u64,
}

/// Gets of one token's rows that a reducer keeps in flight, in tokens.
pub(crate) const PULL_DEPTH: u32 = 2;

impl Layout {
    /// Cuts a window.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the ranks do not divide the experts, or the window would exceed 2^63 bytes.
    pub fn new(shape: &Shape, topology: &Topology, settings: &Settings) -> Result<Self, Error> {
        let ranks = u64::from(topology.ranks());
        let local_experts = shape.local_experts(topology.ranks())?;
        let row = RowFormat::new(shape);
        let rings = settings.rings();
        let counts_bytes = counts_bytes(shape, topology);
        let lines = ranks * LaneKind::count(rings.channels) as u64;
        let sizes = [
            2 * lines * LINE_BYTES,
            2 * ranks * counts_bytes,
            counts_bytes,
            2 * ranks * NOTE_BYTES,
            ranks * NOTE_BYTES,
            ranks * rings.slots_in_all() * row.slot_bytes(),
            ranks * u64::from(rings.channels) * u64::from(rings.staging_slots()) * row.slot_bytes(),
            u64::from(rings.channels) * ranks * u64::from(PULL_DEPTH) * row.slot_bytes(),
            settings.arena_bytes(),
        ];
        let mut at = [Offset(0); 9];
        let mut end = 0u64;
        for (place, size) in at.iter_mut().zip(sizes) {
            *place = Offset(end);
            end = size
                .checked_add(SLOT_ALIGN)
                .and_then(|size| end.checked_add(round_up(size - SLOT_ALIGN, SLOT_ALIGN)))
                .filter(|&end| end < 1 << 63)
                .ok_or_else(|| Error::invalid("window", "more than 2^63 bytes", "less than 2^63 bytes"))?;
        }
        let [cells, counts, counts_outbox, notes, notes_outbox, rings, staging, pulls, arena] = at;
        Ok(Self {
            shape: *shape,
            topology: *topology,
            settings: *settings,
            row,
            local_experts,
            cells,
            counts,
            counts_outbox,
            notes,
            notes_outbox,
            rings,
            staging,
            pulls,
            arena,
            window: end,
        })
    }

    /// The shape it was cut for.
    pub const fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The topology it was cut for.
    pub const fn topology(&self) -> &Topology {
        &self.topology
    }

    /// The settings it was cut for.
    pub const fn settings(&self) -> &Settings {
        &self.settings
    }

    /// The format of its rows.
    pub const fn row(&self) -> &RowFormat {
        &self.row
    }

    /// Experts of each rank.
    pub const fn local_experts(&self) -> u32 {
        self.local_experts
    }

    /// The rank that holds `expert`.
    pub const fn rank_of_expert(&self, expert: u32) -> Rank {
        Rank(expert / self.local_experts)
    }

    /// Bytes of one window.
    pub const fn window_bytes(&self) -> u64 {
        self.window
    }

    /// Every region, in order.
    pub fn regions(&self) -> Vec<Region> {
        let starts = [
            ("cells", self.cells),
            ("counts", self.counts),
            ("counts outbox", self.counts_outbox),
            ("notes", self.notes),
            ("notes outbox", self.notes_outbox),
            ("rings", self.rings),
            ("staging", self.staging),
            ("pulls", self.pulls),
            ("arena", self.arena),
        ];
        let ends = starts.iter().skip(1).map(|(_, start)| start.0).chain([self.window]);
        starts.iter().zip(ends).map(|(&(name, start), end)| Region { name, span: start.span(end - start.0) }).collect()
    }

    /// A cell of the own window in the bank of `generation`.
    pub fn cell(&self, cell: Cell, generation: u16) -> Offset {
        let lanes = LaneKind::count(self.settings.rings().channels) as u64;
        let bank = u64::from(generation % 2) * u64::from(self.topology.ranks());
        let line = (bank + u64::from(cell.writer.0)) * lanes + cell.lane.index() as u64;
        self.cells.plus(line * LINE_BYTES + cell.counter.slot() * CELL_BYTES)
    }

    /// Whether this layout has such a cell.
    pub fn has_cell(&self, cell: Cell) -> bool {
        cell.writer.0 < self.topology.ranks()
            && cell.lane.index() < LaneKind::count(self.settings.rings().channels)
            && cell.lane.counters().contains(&cell.counter)
    }

    /// Where the counts message of `writer` for operation `op` lies in the reader's window.
    pub fn counts(&self, op: u64, writer: Rank) -> Span {
        let bytes = counts_bytes(&self.shape, &self.topology);
        let at = (op % 2) * u64::from(self.topology.ranks()) + u64::from(writer.0);
        self.counts.plus(at * bytes).span(bytes)
    }

    /// The source of the own counts messages.
    pub fn counts_outbox(&self) -> Span {
        self.counts_outbox.span(counts_bytes(&self.shape, &self.topology))
    }

    /// Where the note of `writer` for operation `op` lies in the reader's window.
    pub fn note(&self, op: u64, writer: Rank) -> Span {
        let at = (op % 2) * u64::from(self.topology.ranks()) + u64::from(writer.0);
        self.notes.plus(at * NOTE_BYTES).span(NOTE_BYTES)
    }

    /// The source of the own note to `peer`.
    pub fn note_outbox(&self, peer: Rank) -> Span {
        self.notes_outbox.plus(u64::from(peer.0) * NOTE_BYTES).span(NOTE_BYTES)
    }

    /// A slot of the ring `channel` from `writer`, in the reader's window, when the writer's part is cut as `rings`.
    pub fn ring_slot(&self, writer: Rank, rings: &Rings, channel: u32, slot: u32) -> Span {
        let part = u64::from(writer.0) * self.settings.rings().slots_in_all();
        let at = part + u64::from(channel) * u64::from(rings.geometry.slots) + u64::from(slot);
        self.rings.plus(at * self.row.slot_bytes()).span(self.row.slot_room())
    }

    /// A slot of the staging memory for the ring `channel` to `peer`, when the part is cut as `rings`.
    pub fn staging_slot(&self, peer: Rank, rings: &Rings, channel: u32, slot: u32) -> Span {
        let own = self.settings.rings();
        let part = u64::from(peer.0) * u64::from(own.channels) * u64::from(own.staging_slots());
        let at = part + u64::from(channel) * u64::from(self.staging_slots(rings)) + u64::from(slot);
        self.staging.plus(at * self.row.slot_bytes()).span(self.row.slot_room())
    }

    /// Staging slots of each ring when the part is cut as `rings`: what the rings ask for, within the part.
    pub fn staging_slots(&self, rings: &Rings) -> u32 {
        let own = self.settings.rings();
        let fitting = own.channels * own.staging_slots() / rings.channels;
        rings.staging_slots().min(fitting)
    }

    /// Where the row that `channel`'s reducer pulls from `writer` lands; `turn` distinguishes gets in flight.
    pub fn pull_slot(&self, channel: u32, writer: Rank, turn: u32) -> Span {
        let at = (u64::from(channel) * u64::from(self.topology.ranks()) + u64::from(writer.0)) * u64::from(PULL_DEPTH)
            + u64::from(turn % PULL_DEPTH);
        self.pulls.plus(at * self.row.slot_bytes()).span(self.row.slot_room())
    }

    /// The arena.
    pub const fn arena(&self) -> Span {
        self.arena.span(self.settings.arena_bytes())
    }

    /// Refuses rings that this window has no room for.
    ///
    /// # Errors
    /// [`Error::Invalid`].
    pub fn check_rings(&self, rings: &Rings) -> Result<(), Error> {
        rings.check()?;
        let own = self.settings.rings();
        if rings.channels > own.channels {
            return Err(Error::invalid(
                "channels",
                rings.channels,
                format_args!("1 to {} of the communicator", own.channels),
            ));
        }
        if rings.slots_in_all() > own.slots_in_all() {
            return Err(Error::invalid(
                "channels x slots",
                rings.slots_in_all(),
                format_args!("at most {} of the communicator", own.slots_in_all()),
            ));
        }
        if self.staging_slots(rings) == 0 {
            let fitting = own.channels * own.staging_slots();
            return Err(Error::invalid("channels", rings.channels, format_args!("1 to {fitting} staging slots")));
        }
        Ok(())
    }

    /// A number that differs when shape, topology, the window's cut or the call's rings differ (FNV-1a, 64 bits).
    pub fn hash(&self, rings: &Rings) -> u64 {
        let mut hash = Fnv(0xcbf2_9ce4_8422_2325);
        let own = self.settings.rings();
        for value in [
            u64::from(self.shape.experts()),
            u64::from(self.shape.topk()),
            u64::from(self.shape.hidden()),
            u64::from(self.shape.max_tokens()),
            self.shape.element().number().into(),
            u64::from(self.topology.nodes()),
            u64::from(self.topology.ranks_per_node()),
            u64::from(own.channels),
            u64::from(own.geometry.slots),
            u64::from(own.staging_slots()),
            self.settings.placement() as u64,
            self.settings.arena_bytes(),
            u64::from(rings.channels),
            u64::from(rings.geometry.slots),
        ] {
            hash.write_u64(value);
        }
        hash.finish()
    }
}

pub(super) const NOTE_BYTES: u64 = round_up(size_of::<Note>() as u64, SLOT_ALIGN);

pub(super) fn counts_bytes(shape: &Shape, topology: &Topology) -> u64 {
    let numbers = u64::from(topology.ranks()) + u64::from(shape.experts());
    round_up(size_of::<CountsHeader>() as u64 + 4 * numbers, SLOT_ALIGN)
}

/// FNV-1a: stable across machines and versions, as a hash that crosses the wire must be.
struct Fnv(u64);

impl Hasher for Fnv {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }

    fn write_u64(&mut self, value: u64) {
        self.write(&value.to_le_bytes());
    }
}
