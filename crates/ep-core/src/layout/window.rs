//! How a window is cut.

use std::hash::Hasher;

use super::announced::Announced;
use super::cut::{Cut, Slots};
use super::low_latency::{LowRegions, check_low_rows};
use super::rings::{PULL_DEPTH, far_slot_bytes, pull_bytes};
use super::{CELL_BYTES, CountsHeader, Kind, LINE_BYTES, Note, RowFormat, SLOT_ALIGN, outbox, round_up};
use crate::error::Error;
use crate::ring::Geometry;
use crate::settings::{Placement, Rings, Settings};
use crate::shape::Shape;
use crate::terms::{Cell, Counter, LaneId, LaneKind, Offset, Span};
use crate::topology::{Node, Rank, Topology};

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
    pub(super) notes: Offset,
    pub(super) notes_outbox: Offset,
    pub(super) near_rings: Slots,
    pub(super) far_rings: Slots,
    pub(super) near_staging: Slots,
    pub(super) far_staging: Slots,
    pub(super) pulls: Slots,
    pub(super) low: LowRegions,
    /// Where low latency travels as units.
    pub(super) low_units: Slots,
    pub(super) arena: Offset,
    pub(super) announced: Announced,
    window: u64,
    /// Bytes behind it ([`Layout::followed_by`]).
    behind: u64,
}

impl Layout {
    /// Cuts a window.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the ranks do not divide the experts, when nodes x channels need more than 65536 tracks, when
    /// low latency would need more than 2^31 - 1 rows, or when the window would exceed 2^63 bytes.
    pub fn new(shape: &Shape, topology: &Topology, settings: &Settings) -> Result<Self, Error> {
        let local_experts = shape.local_experts(topology.ranks())?;
        if settings.low_latency() {
            check_low_rows(shape)?;
        }
        settings.check_row_lanes(shape)?;
        let row = RowFormat::new(shape);
        let rings = settings.rings();
        let (nodes, locals) = (u64::from(topology.nodes()), u64::from(topology.ranks_per_node()));
        let (ranks, channels) = (u64::from(topology.ranks()), u64::from(rings.channels));
        let tracks = tracks(topology, settings.channels());
        if tracks > 1 << 16 {
            return Err(Error::invalid("nodes x channels", tracks, "at most 65536 tracks"));
        }
        outbox::check(topology, settings)?;
        let pulled = settings.placement() == Placement::Pulled;
        let far_bytes = Kind::ALL.map(|kind| far_slot_bytes(&row, topology, kind)).into_iter().fold(0, u64::max);
        // One node has no network stage.
        let rails = if nodes > 1 { nodes } else { 0 };
        let mut cut = Cut::new();
        let lines = ranks * LaneKind::count(tracks as u32) as u64 + mailboxes(topology, settings.channels()) as u64;
        let cells = cut.take(Some(2 * lines * LINE_BYTES));
        // Beside the cells: what has to be zeroed lies together.
        let low_units = LowRegions::cut_units(&mut cut, shape, topology, &row, settings);
        let announced = settings.low_latency_announced();
        let low_cells = Announced::cut_cells(&mut cut, shape, topology, announced);
        let counts = cut.take((2 * ranks).checked_mul(counts_bytes(shape, topology)));
        let notes = cut.take(Some(2 * ranks * NOTE_BYTES));
        let notes_outbox = cut.take(Some(ranks * NOTE_BYTES));
        let near = nodes * channels;
        let near_rings = if pulled {
            let base = cut.take(outbox::region_bytes(&row, topology, &rings));
            Slots { base, per_part: 0, bytes: row.slot_bytes() }
        } else {
            let slots = cut.slots(locals, near * u64::from(rings.near.slots), row.slot_bytes());
            // Outboxes of batches without room lie where the rings do: an operation has the ones or the others.
            if let Some(outboxes) = settings.outboxes() {
                let taken = locals.saturating_mul(slots.per_part).saturating_mul(slots.bytes);
                let more = outbox::region_bytes(&row, topology, &outboxes).map(|bytes| bytes.saturating_sub(taken));
                cut.take(more);
            }
            slots
        };
        let far_rings = cut.slots(rails, channels * u64::from(rings.far.slots), far_bytes);
        // What others pull needs no copy on its way.
        let staged = if pulled { 0 } else { near * u64::from(rings.near.staging_slots()) };
        let near_staging = cut.slots(locals, staged, row.slot_bytes());
        let far_staging = cut.slots(rails, channels * u64::from(rings.far.staging_slots()), far_bytes);
        let pulling = nodes * u64::from(settings.channels());
        let pulls = cut.slots(locals, pulling * u64::from(PULL_DEPTH), pull_bytes(&row, topology, settings));
        let low = LowRegions::cut(&mut cut, shape, topology, &row, settings);
        let low_heads = Announced::cut_heads(&mut cut, topology, &row, shape.max_tokens(), announced);
        let arena = cut.take(Some(settings.arena_bytes()));
        let window = window_end(&cut)?;
        Ok(Self {
            shape: *shape,
            topology: *topology,
            settings: *settings,
            row,
            local_experts,
            cells,
            counts,
            notes,
            notes_outbox,
            near_rings,
            far_rings,
            near_staging,
            far_staging,
            pulls,
            low,
            low_units,
            arena,
            announced: Announced::of_roles(low_cells, low_heads, window),
            window,
            behind: 0,
        })
    }

    /// Takes note that the window ends behind other regions.
    pub(super) fn end_at(&mut self, cut: &Cut) -> Result<(), Error> {
        self.window = window_end(cut)?;
        Ok(())
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
        self.window + self.behind
    }

    /// The same window with so many bytes behind it, which belong to no role: for whoever carries windows, and has something to tell beside them.
    #[must_use]
    pub fn followed_by(&self, bytes: u64) -> Self {
        Self { behind: self.behind + bytes, ..self.clone() }
    }

    /// Whether all rows lie in the outbox of their sender until they are pulled.
    #[inline]
    pub fn is_pulled(&self) -> bool {
        self.settings.placement() == Placement::Pulled
    }

    /// Every region, in order.
    pub fn regions(&self) -> Vec<Region> {
        let mut starts = vec![
            ("cells", self.cells),
            ("counts", self.counts),
            ("notes", self.notes),
            ("notes outbox", self.notes_outbox),
            (if self.is_pulled() { "outbox" } else { "near rings" }, self.near_rings.base),
            ("far rings", self.far_rings.base),
            ("near staging", self.near_staging.base),
            ("far staging", self.far_staging.base),
            ("pulls", self.pulls.base),
            ("low slots", self.low.slots.base),
            ("low staging", self.low.staging.base),
            ("arena", self.arena),
        ];
        let Announced { pieces, low_cells, low_heads, low_far } = self.announced;
        let of_rows = [("low cells", low_cells), ("low heads", low_heads)];
        if self.settings.low_latency_announced() {
            starts.insert(starts.len() - 1, of_rows[1]);
            starts.insert(1, of_rows[0]);
        }
        if self.settings.low_latency_units() {
            starts.insert(1, ("low units", self.low_units.base));
        }
        if pieces.0 < self.window {
            starts.push(("piece cells", pieces));
            starts.extend(of_rows.into_iter().filter(|_| !self.settings.low_latency_announced()));
            starts.push(("low far staging", low_far));
        }
        if self.behind > 0 {
            starts.push(("behind", Offset(self.window)));
        }
        let ends = starts.iter().skip(1).map(|(_, start)| start.0).chain([self.window_bytes()]);
        starts.iter().zip(ends).map(|(&(name, start), end)| Region { name, span: start.span(end - start.0) }).collect()
    }

    /// What has to be zero before a window is first used: cells and memory for units.
    pub fn zeroed(&self) -> Span {
        self.cells.span(self.counts.0 - self.cells.0)
    }

    /// Tracks from one rank to one peer.
    #[inline]
    pub fn tracks(&self) -> u32 {
        tracks(&self.topology, self.settings.channels()) as u32
    }

    /// The track, between two ranks of a node, that carries rows of `node` (dispatch: that come from it; combine: that
    /// go back to it) on `channel`.
    #[inline]
    pub fn near_track(&self, node: Node, channel: u32) -> u16 {
        (node.0 * self.settings.channels() + channel) as u16
    }

    /// The track, between two ranks of a rail, that `channel` travels on.
    pub fn far_track(&self, channel: u32) -> u16 {
        (self.topology.nodes() * self.settings.channels() + channel) as u16
    }

    /// Whether `track` runs between nodes.
    #[inline]
    pub fn is_far(&self, track: u16) -> bool {
        u32::from(track) >= self.topology.nodes() * self.settings.channels()
    }

    /// The number of the mailboxes for the rings on `channel` with the rank of this rail in `node`; those for the
    /// control lane to that rank have the number of its first channel.
    pub fn mailbox(&self, node: Node, channel: u32) -> u16 {
        self.near_track(node, channel)
    }

    /// A cell of the own window in the bank of `generation`.
    #[inline]
    pub fn cell(&self, cell: Cell, generation: u16) -> Offset {
        let lanes = LaneKind::count(self.tracks()) as u64;
        let (ranks, bank) = (u64::from(self.topology.ranks()), u64::from(generation % 2));
        if let LaneKind::LowRow(token) = cell.lane {
            return self.low_cell(generation, u64::from(cell.counter == Counter::Odd), cell.writer, token.into());
        }
        let line = if cell.lane.is_mailbox() {
            2 * ranks * lanes + bank * self.mailboxes() as u64
        } else {
            (bank * ranks + u64::from(cell.writer.0)) * lanes
        };
        self.cells.plus((line + cell.lane.index() as u64) * LINE_BYTES + cell.counter.slot() * CELL_BYTES)
    }

    /// All cells of the own window that `writer` publishes, its mailboxes left out, in the bank of `generation`.
    pub fn cells_of(&self, writer: Rank, generation: u16) -> Span {
        let lanes = LaneKind::count(self.tracks()) as u64;
        let (ranks, bank) = (u64::from(self.topology.ranks()), u64::from(generation % 2));
        let line = (bank * ranks + u64::from(writer.0)) * lanes;
        self.cells.plus(line * LINE_BYTES).span(lanes * LINE_BYTES)
    }

    /// Whether this layout has such a cell.
    #[inline]
    pub fn has_cell(&self, cell: Cell) -> bool {
        cell.writer.0 < self.topology.ranks()
            && cell.lane.index() < self.lanes_like(cell.lane)
            && cell.lane.counters().contains(&cell.counter)
    }

    /// Whether `from` may have such a lane: mailboxes lead to itself.
    #[inline]
    pub fn has_lane(&self, from: Rank, lane: LaneId) -> bool {
        lane.peer.0 < self.topology.ranks()
            && lane.kind.index() < self.lanes_like(lane.kind)
            && (lane.peer == from || !lane.kind.is_mailbox())
    }

    #[inline]
    fn lanes_like(&self, kind: LaneKind) -> usize {
        match kind {
            LaneKind::Mailbox(..) => self.mailboxes(),
            LaneKind::LowRow(_) => self.row_lanes(),
            _ => LaneKind::count(self.tracks()),
        }
    }

    /// Lanes of single rows from one rank to one peer ([`LaneKind::LowRow`]).
    pub fn row_lanes(&self) -> usize {
        if self.settings.low_latency_announced() { self.shape.max_tokens() as usize } else { 0 }
    }

    /// Mailboxes of a rank.
    #[inline]
    pub fn mailboxes(&self) -> usize {
        mailboxes(&self.topology, self.settings.channels())
    }

    /// Bytes of one counts message.
    pub fn counts_bytes(&self) -> u64 {
        counts_bytes(&self.shape, &self.topology)
    }

    /// Where the counts message of `source` for operation `op` lies in every window, its own included.
    pub fn counts(&self, op: u64, source: Rank) -> Span {
        let rail = self.topology.local_of(source);
        let first = self.rail_counts(op, rail);
        let bytes = self.counts_bytes();
        first.offset.plus(u64::from(self.topology.node_of(source).0) * bytes).span(bytes)
    }

    /// The counts messages of all ranks with local index `rail`, nodes ascending.
    pub fn rail_counts(&self, op: u64, rail: u32) -> Span {
        let bytes = self.counts_bytes() * u64::from(self.topology.nodes());
        let at = (op % 2) * u64::from(self.topology.ranks_per_node()) + u64::from(rail);
        self.counts.plus(at * bytes).span(bytes)
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
            let limit = format!("1 to {} of the communicator", own.channels);
            return Err(Error::invalid("channels", rings.channels, limit));
        }
        let slots = |rings: &Rings, geometry: Geometry| u64::from(rings.channels) * u64::from(geometry.slots);
        for (what, asked, room) in [
            ("channels x slots", slots(rings, rings.near), slots(&own, own.near)),
            ("channels x far slots", slots(rings, rings.far), slots(&own, own.far)),
        ] {
            if asked > room {
                return Err(Error::invalid(what, asked, format_args!("at most {room} of the communicator")));
            }
        }
        Ok(())
    }

    /// What ranks must have alike that start together: a number that differs when [`hash`](Self::hash) of the communicator's own rings does, or the time
    /// that operations are allowed. By that all ranks know when the others give up.
    pub fn hash_at_start(&self) -> u64 {
        let mut hash = Fnv(self.hash(&self.settings.rings()));
        hash.write_u64(self.settings.deadline().0);
        hash.finish()
    }

    /// A number that differs when shape, topology, the window's cut or the call's rings differ (FNV-1a, 64 bits).
    pub fn hash(&self, rings: &Rings) -> u64 {
        let mut hash = Fnv(0xcbf2_9ce4_8422_2325);
        let (own, outboxes) = (self.settings.rings(), self.settings.outboxes());
        for value in [
            u64::from(self.shape.experts()),
            u64::from(self.shape.topk()),
            u64::from(self.shape.hidden()),
            u64::from(self.shape.max_tokens()),
            self.shape.element().number().into(),
            u64::from(self.topology.nodes()),
            u64::from(self.topology.ranks_per_node()),
            u64::from(own.channels),
            u64::from(own.near.slots),
            u64::from(own.near.staging_slots()),
            u64::from(own.far.slots),
            u64::from(own.far.staging_slots()),
            self.settings.placement() as u64,
            u64::from(self.settings.low_latency())
                + u64::from(self.settings.low_latency_units())
                + 2 * u64::from(self.settings.low_latency_announced())
                + 8 * u64::from(self.settings.low_latency_per_choice()),
            self.settings.low_latency_unit_bytes(),
            self.settings.arena_bytes(),
            outboxes.map_or(0, |outboxes| u64::from(outboxes.channels)),
            outboxes.map_or(0, |outboxes| u64::from(outboxes.near.slots)),
            u64::from(rings.channels),
            u64::from(rings.near.slots),
            u64::from(rings.far.slots),
        ] {
            hash.write_u64(value);
        }
        hash.finish()
    }
}

fn window_end(cut: &Cut) -> Result<u64, Error> {
    cut.end().ok_or_else(|| Error::invalid("window", "more than 2^63 bytes", "less than 2^63 bytes"))
}

pub(super) const NOTE_BYTES: u64 = round_up(size_of::<Note>() as u64, SLOT_ALIGN);

pub(super) fn counts_bytes(shape: &Shape, topology: &Topology) -> u64 {
    let numbers = u64::from(topology.ranks()) + u64::from(shape.experts());
    round_up(size_of::<CountsHeader>() as u64 + 4 * numbers, SLOT_ALIGN)
}

/// Tracks from one rank to one peer: for each node and channel one within the node, for each channel one along the rail.
#[inline]
fn tracks(topology: &Topology, channels: u32) -> u64 {
    let nodes = u64::from(topology.nodes());
    u64::from(channels) * if nodes > 1 { nodes + 1 } else { 1 }
}

/// One node has no network stage.
#[inline]
fn mailboxes(topology: &Topology, channels: u32) -> usize {
    if topology.nodes() > 1 { LaneKind::mailboxes(topology.nodes() * channels) } else { 0 }
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
