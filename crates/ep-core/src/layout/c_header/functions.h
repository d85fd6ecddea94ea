
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
