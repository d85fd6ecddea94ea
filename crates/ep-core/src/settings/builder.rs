//! What a communicator takes by itself, and what differs from that.

use super::{Placement, Rings, Settings};
use crate::error::Error;
use crate::plant::{Before, Planted};
use crate::ring::Geometry;
use crate::row::RowFormat;
use crate::shape::Shape;
use crate::terms::Nanos;
use crate::topology::Topology;

/// Collects what differs from the automatic choice of [`Settings`].
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct SettingsBuilder {
    shape: Shape,
    topology: Topology,
    channels: Option<u32>,
    slots: Option<u32>,
    chunk: Option<u32>,
    credit: Option<u32>,
    far_slots: Option<u32>,
    far_chunk: Option<u32>,
    far_credit: Option<u32>,
    outbox_channels: Option<u32>,
    outbox_slots: Option<u32>,
    placement: Placement,
    arena_bytes: Option<u64>,
    low_latency: bool,
    low_latency_units: bool,
    low_latency_unit_bytes: u64,
    low_latency_announced: bool,
    low_latency_per_choice: bool,
    deadline: Nanos,
    role_warps: Option<u32>,
}

impl Default for SettingsBuilder {
    fn default() -> Self {
        Self {
            shape: Shape::builder().build().expect("the default shape is valid"),
            topology: Topology::new(1, 1).expect("one rank is valid"),
            channels: None,
            slots: None,
            chunk: None,
            credit: None,
            far_slots: None,
            far_chunk: None,
            far_credit: None,
            outbox_channels: None,
            outbox_slots: None,
            placement: Placement::Ring,
            arena_bytes: None,
            low_latency: false,
            low_latency_units: false,
            low_latency_unit_bytes: AUTO_UNIT_BYTES,
            low_latency_announced: false,
            low_latency_per_choice: true,
            deadline: Nanos::from_secs(60),
            role_warps: None,
        }
    }
}

/// Ring memory per writer that the automatic choice aims at, in bytes.
const AUTO_RING_BYTES: u64 = 4 << 20;
/// What the automatic choice aims at where warps of a device play the roles.
struct WarpRings {
    /// Ring memory per writer, in bytes.
    bytes: u64,
    channels: u32,
    slots: u64,
}
const WITHIN_A_NODE: WarpRings = WarpRings { bytes: 64 << 20, channels: 32, slots: 128 };
/// A put is a quarter of a ring, and costs whoever carries it as much as a smaller one (`docs/cuda-tried.md`).
const BETWEEN_NODES: WarpRings = WarpRings { bytes: 96 << 20, channels: 24, slots: AUTO_SLOTS };
/// Rows of a ring at most.
const AUTO_SLOTS: u64 = 256;
/// Outbox that the automatic choice aims at, in bytes, and its channels where rows are pulled: on GPUs a block serves one.
const AUTO_OUTBOX_BYTES: u64 = 64 << 20;
const AUTO_OUTBOX_CHANNELS: u32 = 24;
/// Results of a batch that come as units from other ranks, in bytes: what two GPUs were measured to gain by (`docs/benchmarks/cuda.md`).
const AUTO_UNIT_BYTES: u64 = 480 << 10;
/// Arena that the automatic choice does not exceed, in bytes.
const AUTO_ARENA_BYTES: u64 = 1 << 30;

impl SettingsBuilder {
    pub(super) fn new(shape: Shape, topology: Topology) -> Self {
        Self { shape, topology, ..Self::default() }
    }

    /// For devices whose warps each play one role: so many do. Where rows go through rings, within a node or to others, the automatic choice then has as
    /// many channels as that carries, 1 to 24 between nodes and to 32 on one, and deeper rings. Automatic: a rank's roles share a processor, which one channel fills.
    pub const fn role_warps(mut self, warps: u32) -> Self {
        self.role_warps = Some(warps);
        self
    }

    /// Rings from each writer to each reader, 1 to [`MAX_CHANNELS`](super::MAX_CHANNELS). Automatic: 1, or what [role warps](Self::role_warps) carry; 24 where rows are pulled.
    pub const fn channels(mut self, channels: u32) -> Self {
        self.channels = Some(channels);
        self
    }

    /// Rows of each ring, 1 to [`MAX_SLOTS`](super::MAX_SLOTS). Automatic: 8 to 256 rows, aiming at 4 MiB a writer; with [role warps](Self::role_warps) at 96 MiB between nodes, and 8 to 128
    /// at 64 MiB on one; where
    /// rows are pulled, at an outbox of 64 MiB.
    pub const fn slots(mut self, slots: u32) -> Self {
        self.slots = Some(slots);
        self
    }

    /// Rows after which the producer publishes its tail, 1 to slots. Automatic: a quarter of the slots.
    pub const fn chunk(mut self, chunk: u32) -> Self {
        self.chunk = Some(chunk);
        self
    }

    /// Rows after which the consumer returns credit, 1 to slots. Automatic: a quarter of the slots.
    pub const fn credit(mut self, credit: u32) -> Self {
        self.credit = Some(credit);
        self
    }

    /// Rows of each ring between nodes, 1 to [`MAX_SLOTS`](super::MAX_SLOTS). Automatic: as within a node.
    pub const fn far_slots(mut self, slots: u32) -> Self {
        self.far_slots = Some(slots);
        self
    }

    /// Rows after which a far producer publishes its tail, 1 to its slots. Automatic: a quarter of the slots.
    pub const fn far_chunk(mut self, chunk: u32) -> Self {
        self.far_chunk = Some(chunk);
        self
    }

    /// Rows after which a far consumer returns credit, 1 to its slots. Automatic: a quarter of the slots.
    pub const fn far_credit(mut self, credit: u32) -> Self {
        self.far_credit = Some(credit);
        self
    }

    /// Where the rows of a dispatch land. Automatic: rings.
    pub const fn placement(mut self, placement: Placement) -> Self {
        self.placement = placement;
        self
    }

    /// With direct placement on one node, whose machine offers [gets](crate::machine::Capabilities::get): a batch goes through
    /// outboxes of so many channels, 1 to [`MAX_CHANNELS`](super::MAX_CHANNELS), where some rank has no room in its arena for its rows and for as
    /// many results; and so do all calls along its handle. Automatic: none, rows without room go through rings.
    pub const fn outboxes(mut self, channels: u32) -> Self {
        self.outbox_channels = Some(channels);
        self
    }

    /// Rows of each of these outboxes for each other rank, 1 to [`MAX_SLOTS`](super::MAX_SLOTS). Automatic: 8 to 256, aiming at 64 MiB in all.
    pub const fn outbox_slots(mut self, slots: u32) -> Self {
        self.outbox_slots = Some(slots);
        self
    }

    /// Bytes of the arena. Automatic: none with rings and pulled rows; with direct placement room for two worst-case batches of
    /// `max_tokens` a rank, at most 1 GiB.
    pub const fn arena_bytes(mut self, bytes: u64) -> Self {
        self.arena_bytes = Some(bytes);
        self
    }

    /// Room in each window for low latency: slots for `max_tokens` rows of every rank, and for their results, twice.
    /// Automatic: none.
    pub const fn low_latency(mut self, low_latency: bool) -> Self {
        self.low_latency = low_latency;
        self
    }

    /// Whether rows of low latency, their counts and the results of [small batches](Self::low_latency_unit_bytes) travel as units with a tag, which
    /// announce themselves, instead of behind an arrival. For machines whose near lanes carry units; one node only. Automatic: no.
    pub const fn low_latency_units(mut self, units: bool) -> Self {
        self.low_latency_units = units;
        self
    }

    /// Where low latency travels as units: results for a rank's tokens do up to so many bytes from other ranks, if each rank has a like share of them.
    /// Those of larger batches, whose time is that of their bytes, lie in slots, and are announced. Automatic: 480 KiB.
    pub const fn low_latency_unit_bytes(mut self, bytes: u64) -> Self {
        self.low_latency_unit_bytes = bytes;
        self
    }

    /// Whether, within a node, each row of low latency that lies in a slot is announced by itself, and how many come is said ahead of them: a receiver
    /// takes each as it comes, for a publish more for each. Between nodes there is one announcement behind all, in any case. Automatic: no.
    pub const fn low_latency_announced(mut self, announced: bool) -> Self {
        self.low_latency_announced = announced;
        self
    }

    /// Whether there is room for combines of low latency that bring back a row a choice. Without, a window takes room for a row a rank alone,
    /// and such combines are refused. Automatic: yes.
    pub const fn low_latency_per_choice(mut self, has: bool) -> Self {
        self.low_latency_per_choice = has;
        self
    }

    /// How long one operation may take. Automatic: 60 s.
    pub const fn deadline(mut self, deadline: Nanos) -> Self {
        self.deadline = deadline;
        self
    }

    pub(super) fn chosen(&self) -> Settings {
        let row = RowFormat::new(&self.shape);
        let nodes = self.topology.nodes();
        // Low latency on one node has no use for rings.
        let uses_rings = nodes > 1 || (self.placement == Placement::Ring && !self.low_latency);
        let warps = self.role_warps.filter(|_| uses_rings);
        let of_warps = if nodes > 1 { BETWEEN_NODES } else { WITHIN_A_NODE };
        let (usual, bytes, parts) = match (self.placement, warps) {
            (Placement::Pulled, _) => (AUTO_OUTBOX_CHANNELS, AUTO_OUTBOX_BYTES, self.topology.ranks_per_node()),
            (_, None) => (1, AUTO_RING_BYTES, nodes),
            (_, Some(warps)) => {
                let carried = warps / self.topology.dispatch_roles();
                (carried.clamp(1, of_warps.channels), of_warps.bytes, 1)
            }
        };
        let most = if warps.is_some() { of_warps.slots } else { AUTO_SLOTS };
        let fitting = |bytes: u64, channels: u32, parts: u32| {
            let each = bytes / (row.slot_bytes() * u64::from(channels.max(1)));
            (each / u64::from(parts)).clamp(8, most) as u32
        };
        let channels = self.channels.unwrap_or(usual);
        let slots = self.slots.unwrap_or_else(|| fitting(bytes, channels, parts));
        let outboxes = self.outbox_channels.map(|channels| {
            let readers = self.topology.ranks_per_node();
            let slots = self.outbox_slots.unwrap_or_else(|| fitting(AUTO_OUTBOX_BYTES, channels, readers));
            let step = (slots / 4).max(1);
            Rings::uniform(channels, Geometry { slots, chunk: step, credit: step })
        });
        let far_slots = self.far_slots.unwrap_or(slots);
        let (step, far_step) = ((slots / 4).max(1), (far_slots / 4).max(1));
        let worst_rows = u64::from(self.topology.ranks()) * u64::from(self.shape.max_tokens());
        let arena = match self.placement {
            Placement::Ring | Placement::Pulled => 0,
            Placement::Direct => {
                (row.block_bytes(worst_rows) + row.results().block_bytes(worst_rows)).min(AUTO_ARENA_BYTES)
            }
        };
        Settings {
            rings: Rings {
                channels,
                near: Geometry { slots, chunk: self.chunk.unwrap_or(step), credit: self.credit.unwrap_or(step) },
                far: Geometry {
                    slots: far_slots,
                    chunk: self.far_chunk.unwrap_or(far_step),
                    credit: self.far_credit.unwrap_or(far_step),
                },
            },
            outboxes,
            placement: self.placement,
            arena_bytes: self.arena_bytes.unwrap_or(arena),
            low_latency: self.low_latency,
            low_latency_units: self.low_latency_units,
            low_latency_unit_bytes: self.low_latency_unit_bytes,
            low_latency_announced: self.low_latency_announced,
            low_latency_per_choice: self.low_latency_per_choice,
            deadline: self.deadline,
            planted: Planted::default(),
            before: Before::default(),
        }
    }

    /// Completes what was not set and checks everything.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the first value outside its limits.
    pub fn build(self) -> Result<Settings, Error> {
        let settings = self.chosen();
        settings.rings.check()?;
        settings.placement.check(&self.topology)?;
        if let Some(outboxes) = settings.outboxes {
            outboxes.check()?;
            if settings.placement != Placement::Direct {
                return Err(Error::invalid("outboxes", outboxes.channels, "only with direct placement"));
            }
            if self.topology.nodes() > 1 {
                return Err(Error::invalid("nodes", self.topology.nodes(), "1 with outboxes"));
            }
        }
        if settings.low_latency_units && !settings.low_latency {
            return Err(Error::invalid("low latency as units", true, "only with low_latency(true)"));
        }
        if settings.low_latency_announced && !settings.low_latency {
            return Err(Error::invalid("low latency whose rows are announced", true, "only with low_latency(true)"));
        }
        settings.check_row_lanes(&self.shape)?;
        if settings.low_latency_units && self.topology.nodes() > 1 {
            return Err(Error::invalid("nodes", self.topology.nodes(), "1 with low latency as units"));
        }
        if settings.deadline == Nanos(0) {
            return Err(Error::invalid("deadline", settings.deadline, "more than 0 ns"));
        }
        Ok(settings)
    }
}
