/*
 * ep_layout.h: how rows, messages and cells lie in a window, for kernels.
 *
 * Written by ep_core::layout::c_header(); do not edit. A test fails when this file is stale and says how to renew it.
 *
 * Needs a C++14 compiler (g++, clang++, NVRTC, bisheng) and no other header. Before including it, a device compiler that
 * marks device functions in its own way defines EP_HD to that mark. All offsets are bytes from the start of a window,
 * the same on every rank; all numbers in a window are little-endian.
 */
#ifndef EP_LAYOUT_H
#define EP_LAYOUT_H

#ifndef EP_HD
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define EP_HD __host__ __device__
#else
#define EP_HD
#endif
#endif

/* NVRTC has no __builtin_offsetof; its front end folds this. */
#if defined(__CUDACC_RTC__) && !defined(__builtin_offsetof)
#define __builtin_offsetof(type, field) ((unsigned long)__INTADDR__(&((type*)0)->field))
#endif

typedef int ep_i32;
typedef unsigned int ep_u32;
typedef unsigned long long ep_u64;
typedef float ep_f32;
static_assert(sizeof(ep_u32) == 4 && sizeof(ep_i32) == 4 && sizeof(ep_u64) == 8 && sizeof(ep_f32) == 4, "types");

#define EP_CELL_BYTES 8ull
#define EP_LINE_BYTES 64ull
#define EP_ROW_ALIGN 16ull
#define EP_SLOT_ALIGN 128ull
#define EP_NO_BASE 18446744073709551615ull
#define EP_OPEN_ROOM 4294967295ull
#define EP_MASKED 281474976710655ull
#define EP_UNIT_BYTES 16ull
#define EP_UNIT_DATA 12ull
#define EP_UNIT_TAGS 4294967295ull
#define EP_UNIT_ERA 1073741824ull
#define EP_VALUE_BITS 48u
#define EP_MAX_ALARM_SERIAL 32767u
#define EP_SCALE_GROUP 128u
#define EP_PIECES 32u
#define EP_LANE_WATCH 0u
#define EP_LANE_CONTROL 1u
#define EP_LANE_LOW_ROWS 2u
#define EP_LANE_LOW_DONE 3u
#define EP_ELEMENT_BF16 0u
#define EP_ELEMENT_FP8 1u
#define EP_ELEMENT_FP8_POWER_OF_TWO 2u
#define EP_ELEMENT_FP8_UE8M0 3u
#define EP_ELEMENT_INT8 4u
#define EP_LOW_DISPATCH 0u
#define EP_LOW_PER_CHOICE 1u
#define EP_LOW_PER_RANK 2u
#define EP_KIND_DISPATCH 1u
#define EP_KIND_CACHED_DISPATCH 2u
#define EP_KIND_COMBINE 3u
#define EP_KIND_MEMBERSHIP_DISPATCH 4u
#define EP_COUNTER_ALARM 0u
#define EP_COUNTER_OPENING 1u
#define EP_COUNTER_WAITING 2u
#define EP_COUNTER_COUNTS 0u
#define EP_COUNTER_NOTE 1u
#define EP_COUNTER_DONE 2u
#define EP_COUNTER_TAIL 0u
#define EP_COUNTER_PLACED 1u
#define EP_COUNTER_HEAD 0u
#define EP_COUNTER_EVEN 0u
#define EP_COUNTER_ODD 1u
#define EP_COUNTER_RECEIVED 0u
#define EP_COUNTER_PROBE 7u
#define EP_DUTY_CONTROL 0u
#define EP_DUTY_WATCH 1u
#define EP_DUTY_SENDER 2u
#define EP_DUTY_RECEIVER 3u
#define EP_DUTY_FORWARDER 4u
#define EP_DUTY_PLACER 5u
#define EP_DUTY_COLLECTOR 6u
#define EP_DUTY_RETURNER 7u
#define EP_DUTY_GATHERER 8u
#define EP_DUTY_REDUCER 9u
#define EP_DUTY_COORDINATOR 10u
#define EP_DUTY_PROBE 11u
#define EP_PHASE_BANK 0u
#define EP_PHASE_COUNTS 1u
#define EP_PHASE_NOTE 2u
#define EP_PHASE_OUTBOX 3u
#define EP_PHASE_ROWS 4u
#define EP_PHASE_CREDIT 5u
#define EP_PHASE_PULLED 6u
#define EP_PHASE_ALARM 7u
#define EP_PHASE_RECOVERY 8u
#define EP_PHASE_PROBE 9u
#define EP_PHASE_RESULTS 10u

/* Opens every message and every ring of an operation. */
struct EpOpHeader {
    ep_u64 op; /* Number of the operation. */
    ep_u32 kind; /* Kind. */
    ep_u32 rows; /* Rows that follow: in the ring, or from the sender to the reader in all. */
    ep_u64 settings; /* crate::Layout::hash of shape, topology and the call's rings, plus the number of the dispatch that is replayed, if one is, and what all ranks say alike of a combine (wrapping). */
    ep_u32 first; /* Position of the ring's first row; zero in messages and between nodes. */
    ep_u32 reserved; /* Zero. */
};
static_assert(sizeof(EpOpHeader) == 32, "EpOpHeader");
static_assert(__builtin_offsetof(EpOpHeader, op) == 0, "EpOpHeader.op");
static_assert(__builtin_offsetof(EpOpHeader, kind) == 8, "EpOpHeader.kind");
static_assert(__builtin_offsetof(EpOpHeader, rows) == 12, "EpOpHeader.rows");
static_assert(__builtin_offsetof(EpOpHeader, settings) == 16, "EpOpHeader.settings");
static_assert(__builtin_offsetof(EpOpHeader, first) == 24, "EpOpHeader.first");
static_assert(__builtin_offsetof(EpOpHeader, reserved) == 28, "EpOpHeader.reserved");

/* A counts message: this header, then u32 rows[ranks] (to each rank), then u32 tokens[experts] (for each expert). */
struct EpCountsHeader {
    EpOpHeader opening; /* What operation it belongs to. */
    ep_u32 tokens; /* Tokens of the sender's batch. */
    ep_u32 room; /* Rows for which the sender's arena has room, or OPEN_ROOM. */
    ep_u32 reserved[2]; /* Zero. */
};
static_assert(sizeof(EpCountsHeader) == 48, "EpCountsHeader");
static_assert(__builtin_offsetof(EpCountsHeader, opening) == 0, "EpCountsHeader.opening");
static_assert(__builtin_offsetof(EpCountsHeader, tokens) == 32, "EpCountsHeader.tokens");
static_assert(__builtin_offsetof(EpCountsHeader, room) == 36, "EpCountsHeader.room");
static_assert(__builtin_offsetof(EpCountsHeader, reserved) == 40, "EpCountsHeader.reserved");

/* A note: the receiver's grant of its arena (dispatch), or the offer of rows to pull (combine). */
struct EpNote {
    EpOpHeader opening; /* What operation it belongs to; rows are those of the block. */
    ep_u64 base; /* Offset of the block in the window of the note's sender, or NO_BASE. */
};
static_assert(sizeof(EpNote) == 40, "EpNote");
static_assert(__builtin_offsetof(EpNote, opening) == 0, "EpNote.opening");
static_assert(__builtin_offsetof(EpNote, base) == 32, "EpNote.base");

/* Follows the header slot of a ring between nodes, once for each rank of the receiving node: that rank's part of the rows to come. */
struct EpShare {
    ep_u32 first; /* Position, among the rows from the source to that rank, of the first one that travels on this ring. */
    ep_u32 rows; /* Rows for that rank that travel on this ring. */
};
static_assert(sizeof(EpShare) == 8, "EpShare");
static_assert(__builtin_offsetof(EpShare, first) == 0, "EpShare.first");
static_assert(__builtin_offsetof(EpShare, rows) == 4, "EpShare.rows");

/* Says whose row this is and where it belongs. */
struct EpRowHeader {
    ep_u32 source_rank; /* The rank whose token this is. */
    ep_u32 source_token; /* The token's index in its rank's batch. */
    ep_u32 position; /* The row's index among all rows from that rank to the receiver, in token order. */
    ep_u32 op; /* Low word of the operation. */
};
static_assert(sizeof(EpRowHeader) == 16, "EpRowHeader");
static_assert(__builtin_offsetof(EpRowHeader, source_rank) == 0, "EpRowHeader.source_rank");
static_assert(__builtin_offsetof(EpRowHeader, source_token) == 4, "EpRowHeader.source_token");
static_assert(__builtin_offsetof(EpRowHeader, position) == 8, "EpRowHeader.position");
static_assert(__builtin_offsetof(EpRowHeader, op) == 12, "EpRowHeader.op");

/* One of a row's topk choices, as the receiver sees it. */
struct EpChoice {
    ep_i32 expert; /* Index of the expert on the receiver, or -1 when the choice is dropped or lives elsewhere. */
    ep_f32 weight; /* The router's weight, or 0 where expert is -1. */
};
static_assert(sizeof(EpChoice) == 8, "EpChoice");
static_assert(__builtin_offsetof(EpChoice, expert) == 0, "EpChoice.expert");
static_assert(__builtin_offsetof(EpChoice, weight) == 4, "EpChoice.weight");

/* The header of a low-latency row that travels as units: this unit, and one for each choice. */
struct EpUnitRow {
    ep_u32 source_rank; /* The rank whose token this is. */
    ep_u32 source_token; /* The token's index in its rank's batch. */
    ep_u32 op; /* As of a RowHeader. */
};
static_assert(sizeof(EpUnitRow) == 12, "EpUnitRow");
static_assert(__builtin_offsetof(EpUnitRow, source_rank) == 0, "EpUnitRow.source_rank");
static_assert(__builtin_offsetof(EpUnitRow, source_token) == 4, "EpUnitRow.source_token");
static_assert(__builtin_offsetof(EpUnitRow, op) == 8, "EpUnitRow.op");

/* One of the choices of such a row. */
struct EpUnitChoice {
    ep_i32 expert; /* The expert, of all ranks, or -1 when the choice is dropped. */
    ep_f32 weight; /* The router's weight, or 0 where expert is -1. */
    ep_u32 index; /* The row's index among those that its rank sends to this expert, in token order. */
};
static_assert(sizeof(EpUnitChoice) == 12, "EpUnitChoice");
static_assert(__builtin_offsetof(EpUnitChoice, expert) == 0, "EpUnitChoice.expert");
static_assert(__builtin_offsetof(EpUnitChoice, weight) == 4, "EpUnitChoice.weight");
static_assert(__builtin_offsetof(EpUnitChoice, index) == 8, "EpUnitChoice.index");

/* A Layout for a kernel: EpWindow of the C header. Offsets and sizes in bytes unless said otherwise. */
struct EpWindow {
    ep_u64 cells; /* Offset of the cells. */
    ep_u64 counts; /* Offset of the counts messages. */
    ep_u64 notes; /* Offset of the notes. */
    ep_u64 notes_outbox; /* Offset of the own notes. */
    ep_u64 near_rings; /* Offset of the rings within the node, and of the outbox in operations whose rows are pulled. */
    ep_u64 far_rings; /* Offset of the rings between nodes. */
    ep_u64 near_staging; /* Offset of the staging memory for rings within the node. */
    ep_u64 far_staging; /* Offset of the staging memory for rings between nodes. */
    ep_u64 pulls; /* Offset of where gets land. */
    ep_u64 low_slots; /* Offset of the slots of low latency. */
    ep_u64 low_part_slots; /* Result slots from one writer's part of them in one bank to the next's. */
    ep_u64 low_units; /* Offset of the memory for units of low latency. */
    ep_u64 low_unit_part_bytes; /* From one writer's part of that memory in one bank to the next's. */
    ep_u64 low_staging; /* Offset of the staging memory of low latency. */
    ep_u64 arena; /* Offset of the arena. */
    ep_u64 arena_bytes; /* Size of the arena. */
    ep_u64 piece_cells; /* Offset of the cells of pieces. */
    ep_u64 low_cells; /* Offset of the cells of low-latency rows. */
    ep_u64 low_heads; /* Offset of the headers of low-latency rows that travel ahead of them. */
    ep_u64 low_far; /* Offset of what low latency stages for ranks of other nodes. */
    ep_u64 window_bytes; /* Size of the window. */
    ep_u64 counts_bytes; /* From one counts message to the next. */
    ep_u64 note_bytes; /* From one note to the next. */
    ep_u64 header_bytes; /* Header and choices of a row. */
    ep_u64 payload_bytes; /* Payload of a dispatched row, up to its last byte of data. */
    ep_u64 payload_stride; /* Payload of a dispatched row as it travels, padding included. */
    ep_u64 scales_offset; /* From the start of a dispatched row's payload to its scales; from one row's codes to the next's in a block of them. */
    ep_u64 scales_bytes; /* Scales of a dispatched row; 0 where it has none. */
    ep_u64 scales_stride; /* From one row's scales to the next's in a block of dispatched rows. */
    ep_u64 wire_bytes; /* Header and payload of a dispatched row as they travel through a ring. */
    ep_u64 result_bytes; /* Payload of a row of results, which is bf16. */
    ep_u64 result_stride; /* From one payload to the next in a block of results. */
    ep_u64 result_wire_bytes; /* Header and payload of a row of results as they travel through a ring. */
    ep_u64 slot_bytes; /* From one ring slot to the next. */
    ep_u64 pull_bytes; /* From one slot where a get lands to the next. */
    ep_u64 far_slot_bytes; /* The longest ring slot between nodes: a part has so many of them. */
    ep_u64 low_row_bytes; /* From one row slot of low latency to the next. */
    ep_u64 low_result_bytes; /* From one result slot of low latency to the next. */
    ep_u64 low_staging_bytes; /* From one staging slot of low latency to the next. */
    ep_u64 low_result_header_bytes; /* Header of a result of low latency; its payload follows. */
    ep_u64 low_far_bytes; /* From what is staged for one rank of another node to what is for the next. */
    ep_u64 near_part_slots; /* Row slots of all rings from one writer of the node. */
    ep_u64 far_part_slots; /* Row slots of all rings from one node. */
    ep_u64 near_staging_part_slots; /* Row slots of the staging memory to one rank of the node. */
    ep_u64 far_staging_part_slots; /* Row slots of the staging memory to one node. */
    ep_u32 nodes; /* Nodes. */
    ep_u32 ranks; /* Ranks in all. */
    ep_u32 ranks_per_node; /* Ranks of each node. */
    ep_u32 experts; /* Experts in all. */
    ep_u32 local_experts; /* Experts of each rank. */
    ep_u32 topk; /* Choices per token. */
    ep_u32 hidden; /* Elements of a row. */
    ep_u32 max_tokens; /* Most tokens of a rank in low latency. */
    ep_u32 low_staging_slots; /* Staging slots of low latency. */
    ep_u32 low_cells_of_writer; /* Cells of one writer's low-latency rows in one bank. */
    ep_u32 low_columns; /* Results of one rank for one token of low latency at most. */
    ep_u32 element; /* How dispatched rows travel: EP_ELEMENT_.... */
    ep_u32 scale_groups; /* Scales of a dispatched row: one for every EP_SCALE_GROUP elements of FP8, one of INT8, else 0. */
    ep_u32 channels; /* Channels of the communicator. */
    ep_u32 pull_depth; /* Pulled rows in flight per track and writer. */
    ep_u32 tracks; /* Tracks from one rank to one peer. */
};
static_assert(sizeof(EpWindow) == 424, "EpWindow");
static_assert(__builtin_offsetof(EpWindow, cells) == 0, "EpWindow.cells");
static_assert(__builtin_offsetof(EpWindow, counts) == 8, "EpWindow.counts");
static_assert(__builtin_offsetof(EpWindow, notes) == 16, "EpWindow.notes");
static_assert(__builtin_offsetof(EpWindow, notes_outbox) == 24, "EpWindow.notes_outbox");
static_assert(__builtin_offsetof(EpWindow, near_rings) == 32, "EpWindow.near_rings");
static_assert(__builtin_offsetof(EpWindow, far_rings) == 40, "EpWindow.far_rings");
static_assert(__builtin_offsetof(EpWindow, near_staging) == 48, "EpWindow.near_staging");
static_assert(__builtin_offsetof(EpWindow, far_staging) == 56, "EpWindow.far_staging");
static_assert(__builtin_offsetof(EpWindow, pulls) == 64, "EpWindow.pulls");
static_assert(__builtin_offsetof(EpWindow, low_slots) == 72, "EpWindow.low_slots");
static_assert(__builtin_offsetof(EpWindow, low_part_slots) == 80, "EpWindow.low_part_slots");
static_assert(__builtin_offsetof(EpWindow, low_units) == 88, "EpWindow.low_units");
static_assert(__builtin_offsetof(EpWindow, low_unit_part_bytes) == 96, "EpWindow.low_unit_part_bytes");
static_assert(__builtin_offsetof(EpWindow, low_staging) == 104, "EpWindow.low_staging");
static_assert(__builtin_offsetof(EpWindow, arena) == 112, "EpWindow.arena");
static_assert(__builtin_offsetof(EpWindow, arena_bytes) == 120, "EpWindow.arena_bytes");
static_assert(__builtin_offsetof(EpWindow, piece_cells) == 128, "EpWindow.piece_cells");
static_assert(__builtin_offsetof(EpWindow, low_cells) == 136, "EpWindow.low_cells");
static_assert(__builtin_offsetof(EpWindow, low_heads) == 144, "EpWindow.low_heads");
static_assert(__builtin_offsetof(EpWindow, low_far) == 152, "EpWindow.low_far");
static_assert(__builtin_offsetof(EpWindow, window_bytes) == 160, "EpWindow.window_bytes");
static_assert(__builtin_offsetof(EpWindow, counts_bytes) == 168, "EpWindow.counts_bytes");
static_assert(__builtin_offsetof(EpWindow, note_bytes) == 176, "EpWindow.note_bytes");
static_assert(__builtin_offsetof(EpWindow, header_bytes) == 184, "EpWindow.header_bytes");
static_assert(__builtin_offsetof(EpWindow, payload_bytes) == 192, "EpWindow.payload_bytes");
static_assert(__builtin_offsetof(EpWindow, payload_stride) == 200, "EpWindow.payload_stride");
static_assert(__builtin_offsetof(EpWindow, scales_offset) == 208, "EpWindow.scales_offset");
static_assert(__builtin_offsetof(EpWindow, scales_bytes) == 216, "EpWindow.scales_bytes");
static_assert(__builtin_offsetof(EpWindow, scales_stride) == 224, "EpWindow.scales_stride");
static_assert(__builtin_offsetof(EpWindow, wire_bytes) == 232, "EpWindow.wire_bytes");
static_assert(__builtin_offsetof(EpWindow, result_bytes) == 240, "EpWindow.result_bytes");
static_assert(__builtin_offsetof(EpWindow, result_stride) == 248, "EpWindow.result_stride");
static_assert(__builtin_offsetof(EpWindow, result_wire_bytes) == 256, "EpWindow.result_wire_bytes");
static_assert(__builtin_offsetof(EpWindow, slot_bytes) == 264, "EpWindow.slot_bytes");
static_assert(__builtin_offsetof(EpWindow, pull_bytes) == 272, "EpWindow.pull_bytes");
static_assert(__builtin_offsetof(EpWindow, far_slot_bytes) == 280, "EpWindow.far_slot_bytes");
static_assert(__builtin_offsetof(EpWindow, low_row_bytes) == 288, "EpWindow.low_row_bytes");
static_assert(__builtin_offsetof(EpWindow, low_result_bytes) == 296, "EpWindow.low_result_bytes");
static_assert(__builtin_offsetof(EpWindow, low_staging_bytes) == 304, "EpWindow.low_staging_bytes");
static_assert(__builtin_offsetof(EpWindow, low_result_header_bytes) == 312, "EpWindow.low_result_header_bytes");
static_assert(__builtin_offsetof(EpWindow, low_far_bytes) == 320, "EpWindow.low_far_bytes");
static_assert(__builtin_offsetof(EpWindow, near_part_slots) == 328, "EpWindow.near_part_slots");
static_assert(__builtin_offsetof(EpWindow, far_part_slots) == 336, "EpWindow.far_part_slots");
static_assert(__builtin_offsetof(EpWindow, near_staging_part_slots) == 344, "EpWindow.near_staging_part_slots");
static_assert(__builtin_offsetof(EpWindow, far_staging_part_slots) == 352, "EpWindow.far_staging_part_slots");
static_assert(__builtin_offsetof(EpWindow, nodes) == 360, "EpWindow.nodes");
static_assert(__builtin_offsetof(EpWindow, ranks) == 364, "EpWindow.ranks");
static_assert(__builtin_offsetof(EpWindow, ranks_per_node) == 368, "EpWindow.ranks_per_node");
static_assert(__builtin_offsetof(EpWindow, experts) == 372, "EpWindow.experts");
static_assert(__builtin_offsetof(EpWindow, local_experts) == 376, "EpWindow.local_experts");
static_assert(__builtin_offsetof(EpWindow, topk) == 380, "EpWindow.topk");
static_assert(__builtin_offsetof(EpWindow, hidden) == 384, "EpWindow.hidden");
static_assert(__builtin_offsetof(EpWindow, max_tokens) == 388, "EpWindow.max_tokens");
static_assert(__builtin_offsetof(EpWindow, low_staging_slots) == 392, "EpWindow.low_staging_slots");
static_assert(__builtin_offsetof(EpWindow, low_cells_of_writer) == 396, "EpWindow.low_cells_of_writer");
static_assert(__builtin_offsetof(EpWindow, low_columns) == 400, "EpWindow.low_columns");
static_assert(__builtin_offsetof(EpWindow, element) == 404, "EpWindow.element");
static_assert(__builtin_offsetof(EpWindow, scale_groups) == 408, "EpWindow.scale_groups");
static_assert(__builtin_offsetof(EpWindow, channels) == 412, "EpWindow.channels");
static_assert(__builtin_offsetof(EpWindow, pull_depth) == 416, "EpWindow.pull_depth");
static_assert(__builtin_offsetof(EpWindow, tracks) == 420, "EpWindow.tracks");

/* The Rings of a call for a kernel, cut for what it moves: EpRings of the C header. */
struct EpRings {
    ep_u32 channels; /* Rings from each writer to each reader. */
    ep_u32 slots; /* Rows that fit into a ring within a node. */
    ep_u32 chunk; /* Rows after which a tail is due. */
    ep_u32 credit; /* Rows after which credit is due. */
    ep_u32 far_slots; /* Rows that fit into a ring between nodes. */
    ep_u32 far_chunk; /* Rows after which a tail is due there. */
    ep_u32 far_credit; /* Rows after which credit is due there. */
    ep_u32 far_slot_bytes; /* From one of its slots to the next. */
};
static_assert(sizeof(EpRings) == 32, "EpRings");
static_assert(__builtin_offsetof(EpRings, channels) == 0, "EpRings.channels");
static_assert(__builtin_offsetof(EpRings, slots) == 4, "EpRings.slots");
static_assert(__builtin_offsetof(EpRings, chunk) == 8, "EpRings.chunk");
static_assert(__builtin_offsetof(EpRings, credit) == 12, "EpRings.credit");
static_assert(__builtin_offsetof(EpRings, far_slots) == 16, "EpRings.far_slots");
static_assert(__builtin_offsetof(EpRings, far_chunk) == 20, "EpRings.far_chunk");
static_assert(__builtin_offsetof(EpRings, far_credit) == 24, "EpRings.far_credit");
static_assert(__builtin_offsetof(EpRings, far_slot_bytes) == 28, "EpRings.far_slot_bytes");

/* --- Cells: a count of EP_VALUE_BITS bits below 16 bits of generation. --- */

/* The bits of a cell that holds value in generation. Later generations compare greater. */
EP_HD static inline ep_u64 ep_stamp(ep_u32 generation, ep_u64 value) {
    return ((ep_u64)generation << EP_VALUE_BITS) | value;
}

/* The generation that wrote a cell's bits. */
EP_HD static inline ep_u32 ep_generation_of(ep_u64 bits) { return (ep_u32)(bits >> EP_VALUE_BITS); }

/* The count in a cell's bits as generation sees it: 0 when an earlier generation wrote them. */
EP_HD static inline ep_u64 ep_value_in(ep_u32 generation, ep_u64 bits) {
    return ep_generation_of(bits) == generation ? bits & (((ep_u64)1 << EP_VALUE_BITS) - 1) : 0;
}

/* Index of a track's data lane. */
EP_HD static inline ep_u32 ep_lane_data(ep_u32 track) { return 4 + 2 * track; }

/* Index of a track's credit lane. */
EP_HD static inline ep_u32 ep_lane_credit(ep_u32 track) { return 5 + 2 * track; }

/* Lanes from one rank to one peer with so many tracks. */
EP_HD static inline ep_u32 ep_lane_count(ep_u32 tracks) { return 4 + 2 * tracks; }

/* The track within a node that carries rows of node on channel. */
EP_HD static inline ep_u32 ep_near_track(const EpWindow& w, ep_u32 node, ep_u32 channel) {
    return node * w.channels + channel;
}

/* The track within its node that carries a rank's own rows on channel. */
EP_HD static inline ep_u32 ep_own_track(const EpWindow& w, ep_u32 rank, ep_u32 channel) {
    return ep_near_track(w, rank / w.ranks_per_node, channel);
}

/* The track along the rail that channel travels on. */
EP_HD static inline ep_u32 ep_far_track(const EpWindow& w, ep_u32 channel) { return w.nodes * w.channels + channel; }

/* Whether track runs between nodes. */
EP_HD static inline int ep_is_far(const EpWindow& w, ep_u32 track) { return track >= w.nodes * w.channels; }

/* A cell of the own window, written by lane (an index) of writer, in the bank of generation. */
EP_HD static inline ep_u64 ep_cell(const EpWindow& w, ep_u32 generation, ep_u32 writer, ep_u32 lane, ep_u32 counter) {
    const ep_u64 line = ((ep_u64)(generation % 2) * w.ranks + writer) * ep_lane_count(w.tracks) + lane;
    return w.cells + line * EP_LINE_BYTES + counter * EP_CELL_BYTES;
}

/* --- Messages. --- */

/* The counts message of source for operation op, in every window: rail by rail, nodes ascending. */
EP_HD static inline ep_u64 ep_counts(const EpWindow& w, ep_u64 op, ep_u32 source) {
    const ep_u64 rail = op % 2 * w.ranks_per_node + source % w.ranks_per_node;
    return w.counts + (rail * w.nodes + source / w.ranks_per_node) * w.counts_bytes;
}

/* The note of writer for operation op, in the reader's window. */
EP_HD static inline ep_u64 ep_note(const EpWindow& w, ep_u64 op, ep_u32 writer) {
    return w.notes + (op % 2 * w.ranks + writer) * w.note_bytes;
}

/* The source of the own note to peer. */
EP_HD static inline ep_u64 ep_note_outbox(const EpWindow& w, ep_u32 peer) {
    return w.notes_outbox + (ep_u64)peer * w.note_bytes;
}

/* --- Slots, w.slot_bytes apart, between nodes r.far_slot_bytes: w.wire_bytes of a dispatched row, with its mask behind
       it between nodes, or w.result_wire_bytes of a row of results. --- */

/* Index of the ring on track within its writer's part, cut as r. */
EP_HD static inline ep_u32 ep_ring_of(const EpWindow& w, const EpRings& r, ep_u32 track) {
    const ep_u32 channel = track % w.channels;
    return ep_is_far(w, track) ? channel : track / w.channels * r.channels + channel;
}

/* A slot of the ring on track from writer, in the reader's window. */
EP_HD static inline ep_u64 ep_ring_slot(const EpWindow& w, const EpRings& r, ep_u32 writer, ep_u32 track,
                                        ep_u32 slot) {
    const ep_u64 ring = ep_ring_of(w, r, track);
    if (ep_is_far(w, track)) {
        const ep_u64 part = (ep_u64)(writer / w.ranks_per_node) * w.far_part_slots * w.far_slot_bytes;
        return w.far_rings + part + (ring * r.far_slots + slot) * r.far_slot_bytes;
    }
    const ep_u64 at = (ep_u64)(writer % w.ranks_per_node) * w.near_part_slots + ring * r.slots + slot;
    return w.near_rings + at * w.slot_bytes;
}

/* Staging slots of the ring on track: two chunks, at most the ring, within the part. */
EP_HD static inline ep_u32 ep_staging_slots(const EpWindow& w, const EpRings& r, ep_u32 track) {
    const int far = ep_is_far(w, track);
    const ep_u64 two = 2 * (ep_u64)(far ? r.far_chunk : r.chunk);
    const ep_u64 slots = far ? r.far_slots : r.slots;
    const ep_u64 wanted = two < slots ? two : slots;
    /* Fewer than 2^32: divisions of 64 bits are slow on GPUs. */
    const ep_u32 fitting = far ? (ep_u32)w.far_staging_part_slots / r.channels
                               : (ep_u32)w.near_staging_part_slots / (r.channels * w.nodes);
    return (ep_u32)(wanted < fitting ? wanted : fitting);
}

/* A slot of the staging memory for the ring on track to peer. */
EP_HD static inline ep_u64 ep_staging_slot(const EpWindow& w, const EpRings& r, ep_u32 peer, ep_u32 track,
                                           ep_u32 slot) {
    const ep_u64 in_part = (ep_u64)ep_ring_of(w, r, track) * ep_staging_slots(w, r, track) + slot;
    if (ep_is_far(w, track)) {
        const ep_u64 part = (ep_u64)(peer / w.ranks_per_node) * w.far_staging_part_slots * w.far_slot_bytes;
        return w.far_staging + part + in_part * r.far_slot_bytes;
    }
    const ep_u64 at = (ep_u64)(peer % w.ranks_per_node) * w.near_staging_part_slots + in_part;
    return w.near_staging + at * w.slot_bytes;
}

/* Where the row that the role of track pulls from writer lands; turn tells gets in flight apart. */
EP_HD static inline ep_u64 ep_pull_slot(const EpWindow& w, ep_u32 track, ep_u32 writer, ep_u32 turn) {
    const ep_u64 part = (ep_u64)w.nodes * w.channels * w.pull_depth;
    const ep_u64 at = writer % w.ranks_per_node * part + (ep_u64)track * w.pull_depth + turn % w.pull_depth;
    return w.pulls + at * w.pull_bytes;
}

/* --- Outboxes: rows of this rank that the ranks of its node pull; at w.near_rings where the placement is Pulled. --- */

/* The slots of one outbox, in the window of the rank whose rows they hold. */
struct EpOutbox {
    ep_u64 codes;
    ep_u64 scales;
    ep_u64 heads;
    ep_u32 slots;
    ep_u32 head_bytes;
    ep_u64 codes_step;
    ep_u64 scales_step;
};

/* bytes rounded up to align. */
EP_HD static inline ep_u64 ep_aligned(ep_u64 bytes, ep_u64 align) { return (bytes + align - 1) / align * align; }

/* The outbox number index of those with such slots. */
EP_HD static inline EpOutbox ep_outbox_at(const EpWindow& w, ep_u64 index, ep_u32 slots, ep_u64 codes_step,
                                          ep_u64 scales_step, ep_u32 head_bytes) {
    const ep_u64 bytes = ep_aligned(slots * (codes_step + scales_step + head_bytes), 128);
    EpOutbox o;
    o.codes = w.near_rings + index * bytes;
    o.scales = o.codes + slots * codes_step;
    o.heads = o.scales + slots * scales_step;
    o.slots = slots;
    o.head_bytes = head_bytes;
    o.codes_step = codes_step;
    o.scales_step = scales_step;
    return o;
}

/* The outbox of a dispatch on channel, which all ranks of the node read. A head has the position at each behind its
   choices: ep_i32, -1 where the row does not go. */
EP_HD static inline EpOutbox ep_outbox(const EpWindow& w, const EpRings& r, ep_u32 channel) {
    const ep_u32 others = w.ranks_per_node > 1 ? w.ranks_per_node - 1 : 1;
    const ep_u32 head_bytes = (ep_u32)ep_aligned(w.header_bytes + 4 * (ep_u64)w.ranks_per_node, EP_ROW_ALIGN);
    return ep_outbox_at(w, channel, r.slots * others, w.scales_offset, ep_aligned(w.scales_stride, EP_ROW_ALIGN),
                        head_bytes);
}

/* The outbox of a combine for peer, a rank, on channel: payloads at codes, no scales. */
EP_HD static inline EpOutbox ep_outbox_to(const EpWindow& w, const EpRings& r, ep_u32 peer, ep_u32 channel) {
    const ep_u64 index = (ep_u64)(peer % w.ranks_per_node) * r.channels + channel;
    EpOutbox o = ep_outbox_at(w, index, r.slots, w.result_stride, 0, (ep_u32)w.header_bytes);
    o.scales = 0;
    return o;
}

/* Codes (a combine: payload), scales and head of the row in slot, in the window of the outbox's owner. */
EP_HD static inline ep_u64 ep_outbox_codes(const EpOutbox& o, ep_u32 slot) { return o.codes + slot * o.codes_step; }
EP_HD static inline ep_u64 ep_outbox_scales(const EpOutbox& o, ep_u32 slot) { return o.scales + slot * o.scales_step; }
EP_HD static inline ep_u64 ep_outbox_head(const EpOutbox& o, ep_u32 slot) {
    return o.heads + (ep_u64)slot * o.head_bytes;
}

/* --- Low latency: fixed slots in two banks; op counts from 1 in each generation. --- */

/* All that writer puts into this rank's slots in an operation: rows, or results. */
EP_HD static inline ep_u64 ep_low_part(const EpWindow& w, ep_u64 op, ep_u32 writer) {
    return w.low_slots + (op % 2 * w.ranks + writer) * w.low_part_slots * w.low_result_bytes;
}

/* The row at position among those of source, in the receiver's window; w.wire_bytes. */
EP_HD static inline ep_u64 ep_low_row(const EpWindow& w, ep_u64 op, ep_u32 source, ep_u32 position) {
    return ep_low_part(w, op, source) + (ep_u64)position * w.low_row_bytes;
}

/* The result in column of those that writer has for token, in the window of the token's rank. */
EP_HD static inline ep_u64 ep_low_result(const EpWindow& w, ep_u64 op, ep_u32 writer, ep_u32 token, ep_u32 column) {
    return ep_low_part(w, op, writer) + ((ep_u64)token * w.low_columns + column) * w.low_result_bytes;
}

/* What the header of a row or a result has as its op. */
EP_HD static inline ep_u32 ep_low_stamp(ep_u32 generation, ep_u64 op) { return generation << 16 | (ep_u32)(op & 0xffff); }

/* A staging slot. */
EP_HD static inline ep_u64 ep_low_staging(const EpWindow& w, ep_u32 slot) {
    return w.low_staging + (ep_u64)slot * w.low_staging_bytes;
}

/* The most rows that one rank sends another in one operation. */
EP_HD static inline ep_u64 ep_low_limit(const EpWindow& w) { return (ep_u64)w.max_tokens * w.topk; }

/* The value that says that all rows of an operation have been put; kind is EP_LOW_... */
EP_HD static inline ep_u64 ep_arrival(const EpWindow& w, ep_u64 op, ep_u32 kind, ep_u32 rows) {
    return (op * 4 + kind) * (ep_low_limit(w) + 1) + rows;
}

/* Fields of such a value; it belongs to op when it is at least ep_arrival(w, op, 0, 0). */
EP_HD static inline ep_u64 ep_arrival_op(const EpWindow& w, ep_u64 value) { return value / (ep_low_limit(w) + 1) / 4; }
EP_HD static inline ep_u32 ep_arrival_kind(const EpWindow& w, ep_u64 value) {
    return (ep_u32)(value / (ep_low_limit(w) + 1) % 4);
}
EP_HD static inline ep_u32 ep_arrival_rows(const EpWindow& w, ep_u64 value) {
    return (ep_u32)(value % (ep_low_limit(w) + 1));
}

/* --- Low latency as units: 12 bytes of data and a tag, which come at once (F11). --- */

/* Units that bytes of data take, and the memory that these take. */
EP_HD static inline ep_u64 ep_unit_count(ep_u64 bytes) { return (bytes + EP_UNIT_DATA - 1) / EP_UNIT_DATA; }
EP_HD static inline ep_u64 ep_unit_bytes(ep_u64 bytes) { return ep_unit_count(bytes) * EP_UNIT_BYTES; }

/* All memory for units that writer puts in operation op, in which it first says what comes. */
EP_HD static inline ep_u64 ep_low_unit_head(const EpWindow& w, ep_u64 op, ep_u32 writer) {
    return w.low_units + (op % 2 * w.ranks + writer) * w.low_unit_part_bytes;
}

/* Of a dispatch: the units by which it says how many rows each expert gets, u32 [local experts]; those of the header of its row at position, an EpUnitRow
   and topk EpUnitChoice; and those of the payload of its row of token. */
EP_HD static inline ep_u64 ep_low_unit_counts(const EpWindow& w, ep_u64 op, ep_u32 writer) { return ep_low_unit_head(w, op, writer) + EP_UNIT_BYTES; }
EP_HD static inline ep_u64 ep_low_unit_header(const EpWindow& w, ep_u64 op, ep_u32 writer, ep_u32 position) {
    return ep_low_unit_counts(w, op, writer) + ep_unit_bytes(4ull * w.local_experts) + (ep_u64)position * (1 + w.topk) * EP_UNIT_BYTES;
}
EP_HD static inline ep_u64 ep_low_unit_row(const EpWindow& w, ep_u64 op, ep_u32 writer, ep_u32 token) {
    return ep_low_unit_header(w, op, writer, w.max_tokens) + token * ep_unit_bytes(w.payload_bytes);
}

/* The units of the result in column of those that writer has for token. */
EP_HD static inline ep_u64 ep_low_unit_result(const EpWindow& w, ep_u64 op, ep_u32 writer, ep_u32 token, ep_u32 column) {
    return ep_low_unit_head(w, op, writer) + EP_UNIT_BYTES + ((ep_u64)token * w.low_columns + column) * ep_unit_bytes(w.result_bytes);
}

/* --- What kernels announce piece by piece, or row by row. --- */

/* The cell that says that a piece of writer's rows for this rank is there, in the bank of generation. */
EP_HD static inline ep_u64 ep_piece_cell(const EpWindow& w, ep_u32 generation, ep_u32 writer, ep_u32 piece) {
    const ep_u64 line = (ep_u64)(generation % 2) * w.ranks + writer;
    return w.piece_cells + (line * EP_PIECES + piece) * EP_CELL_BYTES;
}

/* The cell of writer's row of token: a row of a dispatch, or all that it has for the token in a combine. */
EP_HD static inline ep_u64 ep_low_cell(const EpWindow& w, ep_u32 generation, ep_u64 op, ep_u32 writer, ep_u32 token) {
    const ep_u64 bank = generation % 2 * 2 + op % 2;
    return w.low_cells + ((bank * w.ranks + writer) * w.low_cells_of_writer + token) * EP_CELL_BYTES;
}

/* The header of the row at position among those of source; w.header_bytes. The row lies in the slot of its token. */
EP_HD static inline ep_u64 ep_low_head(const EpWindow& w, ep_u64 op, ep_u32 source, ep_u32 position) {
    return w.low_heads + ((op % 2 * w.ranks + source) * w.max_tokens + position) * w.header_bytes;
}

/* Where rank me stages in its own window what it has for peer, a rank of another node: laid out as its ep_low_part there. */
EP_HD static inline ep_u64 ep_low_far(const EpWindow& w, ep_u32 me, ep_u32 peer) {
    return w.low_far + (peer < me ? peer : peer - w.ranks_per_node) * w.low_far_bytes;
}

/* And the headers of these rows, as they lie at ep_low_head there. */
EP_HD static inline ep_u64 ep_low_far_heads(const EpWindow& w, ep_u32 me, ep_u32 peer) {
    return ep_low_far(w, me, peer) + w.low_part_slots * w.low_result_bytes;
}

/* --- Blocks of rows at their final place: all headers, then all scales of rows that have some, then all codes. --- */

/* bytes rounded up to EP_SLOT_ALIGN. */
EP_HD static inline ep_u64 ep_slot_aligned(ep_u64 bytes) {
    return (bytes + EP_SLOT_ALIGN - 1) / EP_SLOT_ALIGN * EP_SLOT_ALIGN;
}

/* Bytes of the headers and scales of dispatched rows in a block. */
EP_HD static inline ep_u64 ep_heads_bytes(const EpWindow& w, ep_u64 rows) {
    return ep_slot_aligned(rows * w.header_bytes) + ep_slot_aligned(rows * w.scales_stride);
}

/* Bytes of a block of dispatched rows. */
EP_HD static inline ep_u64 ep_block_bytes(const EpWindow& w, ep_u64 rows) {
    return ep_heads_bytes(w, rows) + ep_slot_aligned(rows * w.scales_offset);
}

/* The header of row row in a block at base; w.header_bytes. */
EP_HD static inline ep_u64 ep_block_header(const EpWindow& w, ep_u64 base, ep_u32 row) {
    return base + (ep_u64)row * w.header_bytes;
}

/* The scales of row row in the block of rows at base; w.scales_stride bytes, padding included. */
EP_HD static inline ep_u64 ep_block_scales(const EpWindow& w, ep_u64 base, ep_u32 rows, ep_u32 row) {
    return base + ep_slot_aligned((ep_u64)rows * w.header_bytes) + (ep_u64)row * w.scales_stride;
}

/* The codes of row row in the block of rows at base; w.scales_offset bytes, padding included. */
EP_HD static inline ep_u64 ep_block_codes(const EpWindow& w, ep_u64 base, ep_u32 rows, ep_u32 row) {
    return base + ep_heads_bytes(w, rows) + (ep_u64)row * w.scales_offset;
}

/* Bytes of a block of results. */
EP_HD static inline ep_u64 ep_results_bytes(const EpWindow& w, ep_u64 rows) {
    return ep_slot_aligned(rows * w.result_stride) + ep_slot_aligned(rows * w.header_bytes);
}

/* The header of row row in a block of results at base. */
EP_HD static inline ep_u64 ep_results_header(const EpWindow& w, ep_u64 base, ep_u32 row) {
    return base + (ep_u64)row * w.header_bytes;
}

/* The payload of row row in the block of rows of results at base; w.result_stride bytes, padding included. */
EP_HD static inline ep_u64 ep_results_payload(const EpWindow& w, ep_u64 base, ep_u32 rows, ep_u32 row) {
    return base + ep_slot_aligned((ep_u64)rows * w.header_bytes) + (ep_u64)row * w.result_stride;
}

/* --- Plan. --- */

/* The rank that holds expert. */
EP_HD static inline ep_u32 ep_rank_of_expert(const EpWindow& w, ep_u32 expert) { return expert / w.local_experts; }

/* The first token of channel, of channels; its last is the one before ep_channel_first of the next channel. */
EP_HD static inline ep_u32 ep_channel_first(ep_u32 tokens, ep_u32 channels, ep_u32 channel) {
    return (ep_u32)((ep_u64)tokens * channel / channels);
}

/* --- Alarms: serial 15 bits, verdict 1, op 12, phase 4, peer 16. --- */

/* Set beside the peer of a wait that is in a circle: the peer waits itself, for what leads back to who says so. And beside that of a verdict whose
   sender has recovered without that peer. */
#define EP_IN_CIRCLE 0x8000u
/* The value of an alarm cell. serial is 1 to EP_MAX_ALARM_SERIAL, verdict 0 or 1. */
EP_HD static inline ep_u64 ep_alarm(ep_u32 serial, ep_u32 verdict, ep_u64 op, ep_u32 phase, ep_u32 peer) {
    return ((ep_u64)serial << 33) | ((ep_u64)verdict << 32) | (op % 4096 << 20) | ((ep_u64)phase << 16) | peer;
}

/* Fields of an alarm's value; a serial of 0 means that it is none. */
EP_HD static inline ep_u32 ep_alarm_serial(ep_u64 alarm) { return (ep_u32)(alarm >> 33) & EP_MAX_ALARM_SERIAL; }
EP_HD static inline ep_u32 ep_alarm_verdict(ep_u64 alarm) { return (ep_u32)(alarm >> 32) & 1; }
EP_HD static inline ep_u32 ep_alarm_op(ep_u64 alarm) { return (ep_u32)(alarm >> 20) & 4095; }
EP_HD static inline ep_u32 ep_alarm_phase(ep_u64 alarm) { return (ep_u32)(alarm >> 16) & 15; }
/* The peer, and whether it waits in a circle (EP_IN_CIRCLE). */
EP_HD static inline ep_u32 ep_alarm_whom(ep_u64 alarm) { return (ep_u32)alarm & 0xffff; }
EP_HD static inline ep_u32 ep_alarm_peer(ep_u64 alarm) { return (ep_u32)alarm & 0x7fff; }
/* The value of an alarm by which a rank leaves peer, with which it has come through all operations before op. */
EP_HD static inline ep_u64 ep_alarm_of_leaving(ep_u64 op, ep_u32 phase, ep_u32 peer) {
    return ep_alarm(EP_MAX_ALARM_SERIAL, 1, op, phase, peer | EP_IN_CIRCLE);
}
/* Whether an alarm is such a one, for rank me. */
EP_HD static inline bool ep_alarm_leaves(ep_u64 alarm, ep_u32 me) {
    return ep_alarm_serial(alarm) != 0 && ep_alarm_verdict(alarm) && ep_alarm_whom(alarm) == (me | EP_IN_CIRCLE);
}
/* Whether an alarm ends operation op of rank me: a verdict, but for one of who leaves me and has come through op. */
EP_HD static inline bool ep_alarm_ends(ep_u64 alarm, ep_u64 op, ep_u32 me) {
    const ep_u32 ahead = (ep_alarm_op(alarm) + 4096u - (ep_u32)(op % 4096)) % 4096;
    const bool came_through = ahead > 0 && ahead < 2048;
    return ep_alarm_serial(alarm) != 0 && ep_alarm_verdict(alarm) && !(ep_alarm_leaves(alarm, me) && came_through);
}

#endif
