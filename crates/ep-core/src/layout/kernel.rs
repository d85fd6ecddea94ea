//! The numbers of a layout as kernels take them: plain structs, the same in Rust and in the C header.

use super::announced::cells_of_writer;
use super::rings::PULL_DEPTH;
use super::window::{NOTE_BYTES, counts_bytes};
use super::{Kind, Layout, SLOT_ALIGN};
use crate::c_struct;
use crate::settings::Rings;

c_struct! {
    /// A [`Layout`] for a kernel: `EpWindow` of the C header. Offsets and sizes in bytes unless said otherwise.
    #[derive(Eq)]
    pub struct KernelWindow = "EpWindow" {
        /// Offset of the cells.
        pub cells: u64,
        /// Offset of the counts messages.
        pub counts: u64,
        /// Offset of the notes.
        pub notes: u64,
        /// Offset of the own notes.
        pub notes_outbox: u64,
        /// Offset of the rings within the node, and of the outbox in operations whose rows are pulled.
        pub near_rings: u64,
        /// Offset of the rings between nodes.
        pub far_rings: u64,
        /// Offset of the staging memory for rings within the node.
        pub near_staging: u64,
        /// Offset of the staging memory for rings between nodes.
        pub far_staging: u64,
        /// Offset of where gets land.
        pub pulls: u64,
        /// Offset of the slots of low latency.
        pub low_slots: u64,
        /// Result slots from one writer's part of them in one bank to the next's.
        pub low_part_slots: u64,
        /// Offset of the memory for units of low latency.
        pub low_units: u64,
        /// From one writer's part of that memory in one bank to the next's.
        pub low_unit_part_bytes: u64,
        /// Offset of the staging memory of low latency.
        pub low_staging: u64,
        /// Offset of the arena.
        pub arena: u64,
        /// Size of the arena.
        pub arena_bytes: u64,
        /// Offset of the cells of pieces.
        pub piece_cells: u64,
        /// Offset of the cells of low-latency rows.
        pub low_cells: u64,
        /// Offset of the headers of low-latency rows that travel ahead of them.
        pub low_heads: u64,
        /// Offset of what low latency stages for ranks of other nodes.
        pub low_far: u64,
        /// Size of the window.
        pub window_bytes: u64,
        /// From one counts message to the next.
        pub counts_bytes: u64,
        /// From one note to the next.
        pub note_bytes: u64,
        /// Header and choices of a row.
        pub header_bytes: u64,
        /// Payload of a dispatched row, up to its last byte of data.
        pub payload_bytes: u64,
        /// Payload of a dispatched row as it travels, padding included.
        pub payload_stride: u64,
        /// From the start of a dispatched row's payload to its scales; from one row's codes to the next's in a block of them.
        pub scales_offset: u64,
        /// Scales of a dispatched row; 0 where it has none.
        pub scales_bytes: u64,
        /// From one row's scales to the next's in a block of dispatched rows.
        pub scales_stride: u64,
        /// Header and payload of a dispatched row as they travel through a ring.
        pub wire_bytes: u64,
        /// Payload of a row of results, which is bf16.
        pub result_bytes: u64,
        /// From one payload to the next in a block of results.
        pub result_stride: u64,
        /// Header and payload of a row of results as they travel through a ring.
        pub result_wire_bytes: u64,
        /// From one ring slot to the next.
        pub slot_bytes: u64,
        /// From one slot where a get lands to the next.
        pub pull_bytes: u64,
        /// The longest ring slot between nodes: a part has so many of them.
        pub far_slot_bytes: u64,
        /// From one row slot of low latency to the next.
        pub low_row_bytes: u64,
        /// From one result slot of low latency to the next.
        pub low_result_bytes: u64,
        /// From one staging slot of low latency to the next.
        pub low_staging_bytes: u64,
        /// Header of a result of low latency; its payload follows.
        pub low_result_header_bytes: u64,
        /// From what is staged for one rank of another node to what is for the next.
        pub low_far_bytes: u64,
        /// Row slots of all rings from one writer of the node.
        pub near_part_slots: u64,
        /// Row slots of all rings from one node.
        pub far_part_slots: u64,
        /// Row slots of the staging memory to one rank of the node.
        pub near_staging_part_slots: u64,
        /// Row slots of the staging memory to one node.
        pub far_staging_part_slots: u64,
        /// Nodes.
        pub nodes: u32,
        /// Ranks in all.
        pub ranks: u32,
        /// Ranks of each node.
        pub ranks_per_node: u32,
        /// Experts in all.
        pub experts: u32,
        /// Experts of each rank.
        pub local_experts: u32,
        /// Choices per token.
        pub topk: u32,
        /// Elements of a row.
        pub hidden: u32,
        /// Most tokens of a rank in low latency.
        pub max_tokens: u32,
        /// Staging slots of low latency.
        pub low_staging_slots: u32,
        /// Cells of one writer's low-latency rows in one bank.
        pub low_cells_of_writer: u32,
        /// Results of one rank for one token of low latency at most.
        pub low_columns: u32,
        /// How dispatched rows travel: `EP_ELEMENT_...`.
        pub element: u32,
        /// Scales of a dispatched row: one for every `EP_SCALE_GROUP` elements of FP8, one of INT8, else 0.
        pub scale_groups: u32,
        /// Channels of the communicator.
        pub channels: u32,
        /// Pulled rows in flight per track and writer.
        pub pull_depth: u32,
        /// Tracks from one rank to one peer.
        pub tracks: u32,
    }
}

impl KernelWindow {
    /// The fields that arena and rings have no part in: shape and topology say them, and the settings of low latency.
    pub const OF_SHAPE: [&str; 32] = [
        "low_part_slots",
        "low_unit_part_bytes",
        "counts_bytes",
        "note_bytes",
        "header_bytes",
        "payload_bytes",
        "payload_stride",
        "scales_offset",
        "scales_bytes",
        "scales_stride",
        "wire_bytes",
        "result_bytes",
        "result_stride",
        "result_wire_bytes",
        "low_row_bytes",
        "low_result_bytes",
        "low_staging_bytes",
        "low_result_header_bytes",
        "nodes",
        "ranks",
        "ranks_per_node",
        "experts",
        "local_experts",
        "topk",
        "hidden",
        "max_tokens",
        "low_staging_slots",
        "low_cells_of_writer",
        "low_columns",
        "element",
        "scale_groups",
        "pull_depth",
    ];
}

impl From<&Layout> for KernelWindow {
    fn from(layout: &Layout) -> Self {
        let (shape, topology, row) = (layout.shape(), layout.topology(), layout.row());
        let results = row.results();
        Self {
            cells: layout.cells.0,
            counts: layout.counts.0,
            notes: layout.notes.0,
            notes_outbox: layout.notes_outbox.0,
            near_rings: layout.near_rings.base.0,
            far_rings: layout.far_rings.base.0,
            near_staging: layout.near_staging.base.0,
            far_staging: layout.far_staging.base.0,
            pulls: layout.pulls.base.0,
            low_slots: layout.low.slots.base.0,
            low_part_slots: layout.low.slots.per_part,
            low_units: layout.low_units.base.0,
            low_unit_part_bytes: layout.low_units.bytes,
            low_staging: layout.low.staging.base.0,
            arena: layout.arena.0,
            arena_bytes: layout.settings().arena_bytes(),
            piece_cells: layout.announced.pieces.0,
            low_cells: layout.announced.low_cells.0,
            low_heads: layout.announced.low_heads.0,
            low_far: layout.announced.low_far.0,
            window_bytes: layout.window_bytes(),
            counts_bytes: counts_bytes(shape, topology),
            note_bytes: NOTE_BYTES,
            header_bytes: row.header_bytes(),
            payload_bytes: row.payload_bytes(),
            payload_stride: row.payload_stride(),
            scales_offset: row.scales_offset(),
            scales_bytes: row.scales_bytes(),
            scales_stride: row.scales_stride(),
            wire_bytes: row.wire_bytes(),
            result_bytes: results.payload_bytes(),
            result_stride: results.payload_stride(),
            result_wire_bytes: results.wire_bytes(),
            slot_bytes: row.slot_bytes(),
            pull_bytes: layout.pulls.bytes,
            far_slot_bytes: layout.far_rings.bytes,
            low_row_bytes: layout.low.row_bytes,
            low_result_bytes: layout.low.slots.bytes,
            low_staging_bytes: layout.low.staging.bytes,
            low_result_header_bytes: super::RESULT_HEADER,
            low_far_bytes: layout.low_far_bytes(),
            near_part_slots: layout.near_rings.per_part,
            far_part_slots: layout.far_rings.per_part,
            near_staging_part_slots: layout.near_staging.per_part,
            far_staging_part_slots: layout.far_staging.per_part,
            nodes: topology.nodes(),
            ranks: topology.ranks(),
            ranks_per_node: topology.ranks_per_node(),
            experts: shape.experts(),
            local_experts: layout.local_experts(),
            topk: shape.topk(),
            hidden: shape.hidden(),
            max_tokens: shape.max_tokens(),
            low_staging_slots: layout.low_staging_slots(),
            low_cells_of_writer: cells_of_writer(shape) as u32,
            low_columns: layout.low_columns(),
            element: shape.element().number(),
            scale_groups: shape.element().scales(shape.hidden()),
            channels: layout.settings().channels(),
            pull_depth: PULL_DEPTH,
            tracks: layout.tracks(),
        }
    }
}

c_struct! {
    /// The [`Rings`] of a call for a kernel, cut for what it moves: `EpRings` of the C header.
    #[derive(Eq)]
    pub struct KernelRings = "EpRings" {
        /// Rings from each writer to each reader.
        pub channels: u32,
        /// Rows that fit into a ring within a node.
        pub slots: u32,
        /// Rows after which a tail is due.
        pub chunk: u32,
        /// Rows after which credit is due.
        pub credit: u32,
        /// Rows that fit into a ring between nodes.
        pub far_slots: u32,
        /// Rows after which a tail is due there.
        pub far_chunk: u32,
        /// Rows after which credit is due there.
        pub far_credit: u32,
        /// From one of its slots to the next.
        pub far_slot_bytes: u32,
    }
}

impl KernelRings {
    /// Those of an operation of `kind`.
    pub fn new(layout: &Layout, kind: Kind, rings: &Rings) -> Self {
        let Rings { channels, near, far } = *rings;
        Self {
            channels,
            slots: near.slots,
            chunk: near.chunk,
            credit: near.credit,
            far_slots: far.slots,
            far_chunk: far.chunk,
            far_credit: far.credit,
            // Some hundred KiB: a row has 65,536 elements at most.
            far_slot_bytes: layout.far_slot_bytes(kind) as u32,
        }
    }
}

// Kernels index with these strides and assume aligned parts.
const _: () = assert!(NOTE_BYTES.is_multiple_of(SLOT_ALIGN));
