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

typedef int ep_i32;
typedef unsigned int ep_u32;
typedef unsigned long long ep_u64;
typedef float ep_f32;
static_assert(sizeof(ep_u32) == 4 && sizeof(ep_i32) == 4 && sizeof(ep_u64) == 8 && sizeof(ep_f32) == 4, "types");

#define EP_CELL_BYTES 8ull
#define EP_LINE_BYTES 64ull
#define EP_ROW_ALIGN 16ull
#define EP_SLOT_ALIGN 64ull
#define EP_NO_BASE 18446744073709551615ull
#define EP_MASKED 281474976710655ull
#define EP_VALUE_BITS 48u
#define EP_MAX_ALARM_SERIAL 32767u
#define EP_SCALE_GROUP 128u
#define EP_ELEMENT_BF16 0u
#define EP_ELEMENT_FP8 1u
#define EP_ELEMENT_FP8_POWER_OF_TWO 2u
#define EP_ELEMENT_FP8_UE8M0 3u
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
#define EP_PHASE_BANK 0u
#define EP_PHASE_COUNTS 1u
#define EP_PHASE_NOTE 2u
#define EP_PHASE_ROWS 3u
#define EP_PHASE_CREDIT 4u
#define EP_PHASE_PULLED 5u
#define EP_PHASE_ALARM 6u
#define EP_PHASE_RECOVERY 7u
#define EP_PHASE_PROBE 8u
#define EP_LANE_WATCH 0u
#define EP_LANE_CONTROL 1u
#define EP_LANE_LOW_ROWS 2u
#define EP_LANE_LOW_DONE 3u

/* Opens every message and every ring of an operation. */
struct EpOpHeader {
    ep_u64 op;
    ep_u32 kind;
    ep_u32 rows;
    ep_u64 settings;
    ep_u32 first;
    ep_u32 reserved;
};
static_assert(sizeof(EpOpHeader) == 32, "layout");
static_assert(__builtin_offsetof(EpOpHeader, op) == 0, "layout");
static_assert(__builtin_offsetof(EpOpHeader, kind) == 8, "layout");
static_assert(__builtin_offsetof(EpOpHeader, rows) == 12, "layout");
static_assert(__builtin_offsetof(EpOpHeader, settings) == 16, "layout");
static_assert(__builtin_offsetof(EpOpHeader, first) == 24, "layout");
static_assert(__builtin_offsetof(EpOpHeader, reserved) == 28, "layout");

/* Opens a counts message; ep_u32 rows[ranks] and ep_u32 tokens[experts] follow. */
struct EpCountsHeader {
    EpOpHeader opening;
    ep_u32 tokens;
    ep_u32 reserved[3];
};
static_assert(sizeof(EpCountsHeader) == 48, "layout");
static_assert(__builtin_offsetof(EpCountsHeader, opening) == 0, "layout");
static_assert(__builtin_offsetof(EpCountsHeader, tokens) == 32, "layout");
static_assert(__builtin_offsetof(EpCountsHeader, reserved) == 36, "layout");

/* A grant of the receiver's arena, or an offer of rows to pull. */
struct EpNote {
    EpOpHeader opening;
    ep_u64 base;
};
static_assert(sizeof(EpNote) == 40, "layout");
static_assert(__builtin_offsetof(EpNote, opening) == 0, "layout");
static_assert(__builtin_offsetof(EpNote, base) == 32, "layout");

/* Follows the header slot of a ring between nodes, once for each rank of the receiving node. */
struct EpShare {
    ep_u32 first;
    ep_u32 rows;
};
static_assert(sizeof(EpShare) == 8, "layout");
static_assert(__builtin_offsetof(EpShare, first) == 0, "layout");
static_assert(__builtin_offsetof(EpShare, rows) == 4, "layout");

/* Opens a row; EpChoice[topk] follow. */
struct EpRowHeader {
    ep_u32 source_rank;
    ep_u32 source_token;
    ep_u32 position;
    ep_u32 op;
};
static_assert(sizeof(EpRowHeader) == 16, "layout");
static_assert(__builtin_offsetof(EpRowHeader, source_rank) == 0, "layout");
static_assert(__builtin_offsetof(EpRowHeader, source_token) == 4, "layout");
static_assert(__builtin_offsetof(EpRowHeader, position) == 8, "layout");
static_assert(__builtin_offsetof(EpRowHeader, op) == 12, "layout");

/* One of a row's choices; expert is -1 where it is not the receiver's. */
struct EpChoice {
    ep_i32 expert;
    ep_f32 weight;
};
static_assert(sizeof(EpChoice) == 8, "layout");
static_assert(__builtin_offsetof(EpChoice, expert) == 0, "layout");
static_assert(__builtin_offsetof(EpChoice, weight) == 4, "layout");

/* How a window is cut: offsets, sizes and strides in bytes, parts in row slots. */
struct EpWindow {
    ep_u64 cells;
    ep_u64 counts;
    ep_u64 notes;
    ep_u64 notes_outbox;
    ep_u64 near_rings;
    ep_u64 far_rings;
    ep_u64 near_staging;
    ep_u64 far_staging;
    ep_u64 pulls;
    ep_u64 low_rows;
    ep_u64 low_results;
    ep_u64 low_staging;
    ep_u64 arena;
    ep_u64 arena_bytes;
    ep_u64 window_bytes;
    ep_u64 counts_bytes;
    ep_u64 note_bytes;
    ep_u64 header_bytes;
    ep_u64 payload_bytes;
    ep_u64 payload_stride;
    ep_u64 scales_offset;
    ep_u64 scales_bytes;
    ep_u64 scales_stride;
    ep_u64 wire_bytes;
    ep_u64 result_bytes;
    ep_u64 result_stride;
    ep_u64 result_wire_bytes;
    ep_u64 slot_bytes;
    ep_u64 far_wire_bytes;
    ep_u64 far_slot_bytes;
    ep_u64 low_row_bytes;
    ep_u64 low_result_bytes;
    ep_u64 low_staging_bytes;
    ep_u64 low_result_header_bytes;
    ep_u64 near_part_slots;
    ep_u64 far_part_slots;
    ep_u64 near_staging_part_slots;
    ep_u64 far_staging_part_slots;
    ep_u32 nodes;
    ep_u32 ranks;
    ep_u32 ranks_per_node;
    ep_u32 experts;
    ep_u32 local_experts;
    ep_u32 topk;
    ep_u32 hidden;
    ep_u32 max_tokens;
    ep_u32 low_staging_slots;
    ep_u32 element;
    ep_u32 scale_groups;
    ep_u32 channels;
    ep_u32 pull_depth;
    ep_u32 tracks;
};
static_assert(sizeof(EpWindow) == 360, "layout");
static_assert(__builtin_offsetof(EpWindow, cells) == 0, "layout");
static_assert(__builtin_offsetof(EpWindow, counts) == 8, "layout");
static_assert(__builtin_offsetof(EpWindow, notes) == 16, "layout");
static_assert(__builtin_offsetof(EpWindow, notes_outbox) == 24, "layout");
static_assert(__builtin_offsetof(EpWindow, near_rings) == 32, "layout");
static_assert(__builtin_offsetof(EpWindow, far_rings) == 40, "layout");
static_assert(__builtin_offsetof(EpWindow, near_staging) == 48, "layout");
static_assert(__builtin_offsetof(EpWindow, far_staging) == 56, "layout");
static_assert(__builtin_offsetof(EpWindow, pulls) == 64, "layout");
static_assert(__builtin_offsetof(EpWindow, low_rows) == 72, "layout");
static_assert(__builtin_offsetof(EpWindow, low_results) == 80, "layout");
static_assert(__builtin_offsetof(EpWindow, low_staging) == 88, "layout");
static_assert(__builtin_offsetof(EpWindow, arena) == 96, "layout");
static_assert(__builtin_offsetof(EpWindow, arena_bytes) == 104, "layout");
static_assert(__builtin_offsetof(EpWindow, window_bytes) == 112, "layout");
static_assert(__builtin_offsetof(EpWindow, counts_bytes) == 120, "layout");
static_assert(__builtin_offsetof(EpWindow, note_bytes) == 128, "layout");
static_assert(__builtin_offsetof(EpWindow, header_bytes) == 136, "layout");
static_assert(__builtin_offsetof(EpWindow, payload_bytes) == 144, "layout");
static_assert(__builtin_offsetof(EpWindow, payload_stride) == 152, "layout");
static_assert(__builtin_offsetof(EpWindow, scales_offset) == 160, "layout");
static_assert(__builtin_offsetof(EpWindow, scales_bytes) == 168, "layout");
static_assert(__builtin_offsetof(EpWindow, scales_stride) == 176, "layout");
static_assert(__builtin_offsetof(EpWindow, wire_bytes) == 184, "layout");
static_assert(__builtin_offsetof(EpWindow, result_bytes) == 192, "layout");
static_assert(__builtin_offsetof(EpWindow, result_stride) == 200, "layout");
static_assert(__builtin_offsetof(EpWindow, result_wire_bytes) == 208, "layout");
static_assert(__builtin_offsetof(EpWindow, slot_bytes) == 216, "layout");
static_assert(__builtin_offsetof(EpWindow, far_wire_bytes) == 224, "layout");
static_assert(__builtin_offsetof(EpWindow, far_slot_bytes) == 232, "layout");
static_assert(__builtin_offsetof(EpWindow, low_row_bytes) == 240, "layout");
static_assert(__builtin_offsetof(EpWindow, low_result_bytes) == 248, "layout");
static_assert(__builtin_offsetof(EpWindow, low_staging_bytes) == 256, "layout");
static_assert(__builtin_offsetof(EpWindow, low_result_header_bytes) == 264, "layout");
static_assert(__builtin_offsetof(EpWindow, near_part_slots) == 272, "layout");
static_assert(__builtin_offsetof(EpWindow, far_part_slots) == 280, "layout");
static_assert(__builtin_offsetof(EpWindow, near_staging_part_slots) == 288, "layout");
static_assert(__builtin_offsetof(EpWindow, far_staging_part_slots) == 296, "layout");
static_assert(__builtin_offsetof(EpWindow, nodes) == 304, "layout");
static_assert(__builtin_offsetof(EpWindow, ranks) == 308, "layout");
static_assert(__builtin_offsetof(EpWindow, ranks_per_node) == 312, "layout");
static_assert(__builtin_offsetof(EpWindow, experts) == 316, "layout");
static_assert(__builtin_offsetof(EpWindow, local_experts) == 320, "layout");
static_assert(__builtin_offsetof(EpWindow, topk) == 324, "layout");
static_assert(__builtin_offsetof(EpWindow, hidden) == 328, "layout");
static_assert(__builtin_offsetof(EpWindow, max_tokens) == 332, "layout");
static_assert(__builtin_offsetof(EpWindow, low_staging_slots) == 336, "layout");
static_assert(__builtin_offsetof(EpWindow, element) == 340, "layout");
static_assert(__builtin_offsetof(EpWindow, scale_groups) == 344, "layout");
static_assert(__builtin_offsetof(EpWindow, channels) == 348, "layout");
static_assert(__builtin_offsetof(EpWindow, pull_depth) == 352, "layout");
static_assert(__builtin_offsetof(EpWindow, tracks) == 356, "layout");

/* The rings of a call; all but channels in rows. */
struct EpRings {
    ep_u32 channels;
    ep_u32 slots;
    ep_u32 chunk;
    ep_u32 credit;
    ep_u32 far_slots;
    ep_u32 far_chunk;
    ep_u32 far_credit;
    ep_u32 reserved;
};
static_assert(sizeof(EpRings) == 32, "layout");
static_assert(__builtin_offsetof(EpRings, channels) == 0, "layout");
static_assert(__builtin_offsetof(EpRings, slots) == 4, "layout");
static_assert(__builtin_offsetof(EpRings, chunk) == 8, "layout");
static_assert(__builtin_offsetof(EpRings, credit) == 12, "layout");
static_assert(__builtin_offsetof(EpRings, far_slots) == 16, "layout");
static_assert(__builtin_offsetof(EpRings, far_chunk) == 20, "layout");
static_assert(__builtin_offsetof(EpRings, far_credit) == 24, "layout");
static_assert(__builtin_offsetof(EpRings, reserved) == 28, "layout");

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

/* --- Slots, w.slot_bytes apart, between nodes w.far_slot_bytes: w.wire_bytes of a dispatched row, with its mask behind
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
        const ep_u64 at = (ep_u64)(writer / w.ranks_per_node) * w.far_part_slots + ring * r.far_slots + slot;
        return w.far_rings + at * w.far_slot_bytes;
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
    const ep_u64 fitting = far ? w.far_staging_part_slots / r.channels
                               : w.near_staging_part_slots / ((ep_u64)r.channels * w.nodes);
    return (ep_u32)(wanted < fitting ? wanted : fitting);
}

/* A slot of the staging memory for the ring on track to peer. */
EP_HD static inline ep_u64 ep_staging_slot(const EpWindow& w, const EpRings& r, ep_u32 peer, ep_u32 track,
                                           ep_u32 slot) {
    const ep_u64 in_part = (ep_u64)ep_ring_of(w, r, track) * ep_staging_slots(w, r, track) + slot;
    if (ep_is_far(w, track)) {
        const ep_u64 at = (ep_u64)(peer / w.ranks_per_node) * w.far_staging_part_slots + in_part;
        return w.far_staging + at * w.far_slot_bytes;
    }
    const ep_u64 at = (ep_u64)(peer % w.ranks_per_node) * w.near_staging_part_slots + in_part;
    return w.near_staging + at * w.slot_bytes;
}

/* Where the row that the role of track pulls from writer lands; turn tells gets in flight apart. */
EP_HD static inline ep_u64 ep_pull_slot(const EpWindow& w, ep_u32 track, ep_u32 writer, ep_u32 turn) {
    const ep_u64 part = (ep_u64)w.nodes * w.channels * w.pull_depth;
    const ep_u64 at = writer % w.ranks_per_node * part + (ep_u64)track * w.pull_depth + turn % w.pull_depth;
    return w.pulls + at * w.slot_bytes;
}

/* --- Low latency: fixed slots in two banks; op counts from 1 in each generation. --- */

/* The row at position among those of source, in the receiver's window; w.wire_bytes. */
EP_HD static inline ep_u64 ep_low_row(const EpWindow& w, ep_u64 op, ep_u32 source, ep_u32 position) {
    const ep_u64 part = op % 2 * w.ranks + source;
    return w.low_rows + (part * w.max_tokens + position) * w.low_row_bytes;
}

/* The result in column of token, in the window of the token's rank. */
EP_HD static inline ep_u64 ep_low_result(const EpWindow& w, ep_u64 op, ep_u32 token, ep_u32 column) {
    return w.low_results + (op % 2 * w.max_tokens * w.topk + (ep_u64)token * w.topk + column) * w.low_result_bytes;
}

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

/* --- Blocks of rows at their final place: all codes, then all scales of rows that have some, then all headers. --- */

/* bytes rounded up to EP_SLOT_ALIGN. */
EP_HD static inline ep_u64 ep_slot_aligned(ep_u64 bytes) {
    return (bytes + EP_SLOT_ALIGN - 1) / EP_SLOT_ALIGN * EP_SLOT_ALIGN;
}

/* Bytes of the codes and scales of dispatched rows in a block. */
EP_HD static inline ep_u64 ep_payloads_bytes(const EpWindow& w, ep_u64 rows) {
    return ep_slot_aligned(rows * w.scales_offset) + ep_slot_aligned(rows * w.scales_stride);
}

/* Bytes of a block of dispatched rows. */
EP_HD static inline ep_u64 ep_block_bytes(const EpWindow& w, ep_u64 rows) {
    return ep_payloads_bytes(w, rows) + ep_slot_aligned(rows * w.header_bytes);
}

/* The codes of row row in the block at base; w.scales_offset bytes, padding included. */
EP_HD static inline ep_u64 ep_block_codes(const EpWindow& w, ep_u64 base, ep_u32 row) {
    return base + (ep_u64)row * w.scales_offset;
}

/* The scales of row row in the block of rows at base; w.scales_stride bytes, padding included. */
EP_HD static inline ep_u64 ep_block_scales(const EpWindow& w, ep_u64 base, ep_u32 rows, ep_u32 row) {
    return base + ep_slot_aligned((ep_u64)rows * w.scales_offset) + (ep_u64)row * w.scales_stride;
}

/* The header of row row in the block of rows at base. */
EP_HD static inline ep_u64 ep_block_header(const EpWindow& w, ep_u64 base, ep_u32 rows, ep_u32 row) {
    return base + ep_payloads_bytes(w, rows) + (ep_u64)row * w.header_bytes;
}

/* Bytes of a block of results. */
EP_HD static inline ep_u64 ep_results_bytes(const EpWindow& w, ep_u64 rows) {
    return ep_slot_aligned(rows * w.result_stride) + ep_slot_aligned(rows * w.header_bytes);
}

/* The payload of row row in the block of results at base; w.result_stride bytes, padding included. */
EP_HD static inline ep_u64 ep_results_payload(const EpWindow& w, ep_u64 base, ep_u32 row) {
    return base + (ep_u64)row * w.result_stride;
}

/* The header of row row in the block of rows of results at base. */
EP_HD static inline ep_u64 ep_results_header(const EpWindow& w, ep_u64 base, ep_u32 rows, ep_u32 row) {
    return base + ep_slot_aligned((ep_u64)rows * w.result_stride) + (ep_u64)row * w.header_bytes;
}

/* --- Plan. --- */

/* The rank that holds expert. */
EP_HD static inline ep_u32 ep_rank_of_expert(const EpWindow& w, ep_u32 expert) { return expert / w.local_experts; }

/* The first token of channel, of channels; its last is the one before ep_channel_first of the next channel. */
EP_HD static inline ep_u32 ep_channel_first(ep_u32 tokens, ep_u32 channels, ep_u32 channel) {
    return (ep_u32)((ep_u64)tokens * channel / channels);
}

/* --- Alarms: serial 15 bits, verdict 1, op 12, phase 4, peer 16. --- */

/* The value of an alarm cell. serial is 1 to EP_MAX_ALARM_SERIAL, verdict 0 or 1. */
EP_HD static inline ep_u64 ep_alarm(ep_u32 serial, ep_u32 verdict, ep_u64 op, ep_u32 phase, ep_u32 peer) {
    return ((ep_u64)serial << 33) | ((ep_u64)verdict << 32) | (op % 4096 << 20) | ((ep_u64)phase << 16) | peer;
}

/* Fields of an alarm's value; a serial of 0 means that it is none. */
EP_HD static inline ep_u32 ep_alarm_serial(ep_u64 alarm) { return (ep_u32)(alarm >> 33) & EP_MAX_ALARM_SERIAL; }
EP_HD static inline ep_u32 ep_alarm_verdict(ep_u64 alarm) { return (ep_u32)(alarm >> 32) & 1; }
EP_HD static inline ep_u32 ep_alarm_op(ep_u64 alarm) { return (ep_u32)(alarm >> 20) & 4095; }
EP_HD static inline ep_u32 ep_alarm_phase(ep_u64 alarm) { return (ep_u32)(alarm >> 16) & 15; }
EP_HD static inline ep_u32 ep_alarm_peer(ep_u64 alarm) { return (ep_u32)alarm & 0xffff; }

#endif
