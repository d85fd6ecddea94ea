/*
 * ep_rows.h: two buffers in turn, by which a role carries rows through the UB in pieces, and headers of rows.
 *
 * Of each buffer: copies to GM that read it have ended when ep_turn has returned; then the scalar unit may write headers into it, and copies
 * from GM may fill it.
 */
#ifndef EP_ROWS_H
#define EP_ROWS_H
#include "ep_rings.h"

/* Numbers of a counts message, at most: they fit into a buffer, with what is read of them a second time. */
#define EP_MOST_COUNTS 4096u
/* Bytes of a piece of a row. */
#define EP_PIECE_BYTES 32768u
/* Bytes of each buffer for what goes beside a payload: a row's header, and what the user learns of it. */
#define EP_SIDE_BYTES 768u
static_assert(EP_HEAD_BYTES <= EP_SIDE_BYTES, "a row's header");
#define EP_ROWS_BYTES (2 * (EP_PIECE_BYTES + EP_SIDE_BYTES))
static_assert(EP_ROWS_BYTES + EP_COMMON_BYTES <= EP_UB_BYTES, "the buffers of senders, receivers and returners");

struct EpBuffers {
    EpBytes payload[2], side[2];
    ep_u32 turn;
};

EP_DEV void ep_open_buffers(const EpCore& c, EpBuffers& b, const EpBytes& ub) {
    for (ep_u32 i = 0; i < 2; ++i) {
        b.payload[i] = ub[i * EP_PIECE_BYTES + (EP_PLANTED(c, UB_ALIGNMENT) ? 16 : 0)];
        b.side[i] = ub[2 * EP_PIECE_BYTES + i * EP_SIDE_BYTES];
        SetFlag<HardEvent::MTE3_S>((int32_t)i);
    }
    b.turn = 1;
}
/* Takes the next buffer: nothing reads it any more. */
EP_DEV ep_u32 ep_turn(const EpCore& c, EpBuffers& b) {
    b.turn ^= 1;
    if (!EP_PLANTED(c, BUFFER_REUSED)) WaitFlag<HardEvent::MTE3_S>((int32_t)b.turn);
    return b.turn;
}
/* All copies out of the buffer were issued. */
EP_DEV void ep_turn_over(const EpCore& c, const EpBuffers& b) {
    if (!EP_PLANTED(c, BUFFER_REUSED)) SetFlag<HardEvent::MTE3_S>((int32_t)b.turn);
}
EP_DEV void ep_close_buffers(const EpCore& c) {
    for (ep_u32 i = 0; i < 2 && !EP_PLANTED(c, FLAG_LEFT); ++i) WaitFlag<HardEvent::MTE3_S>((int32_t)i);
}

EP_DEV ep_u32 ep_min(ep_u64 a, ep_u64 b) { return (ep_u32)(a < b ? a : b); }

/* Copies to GM that are issued next come after what the scalar unit has written to the UB. */
EP_DEV void ep_written(ep_u32 id) {
    SetFlag<HardEvent::S_MTE3>((int32_t)id);
    WaitFlag<HardEvent::S_MTE3>((int32_t)id);
}
/* Copies to GM that are issued next come after copies from GM before. */
EP_DEV void ep_filled(const EpCore& c, ep_u32 id) {
    if (EP_PLANTED(c, FILLED_FLAG)) return;
    SetFlag<HardEvent::MTE2_MTE3>((int32_t)id);
    WaitFlag<HardEvent::MTE2_MTE3>((int32_t)id);
}
/* Copies from GM before have ended. */
EP_DEV void ep_read(const EpCore& c, ep_u32 id) {
    if (EP_PLANTED(c, READ_FLAG)) return;
    SetFlag<HardEvent::MTE2_S>((int32_t)id);
    WaitFlag<HardEvent::MTE2_S>((int32_t)id);
}

/* Copies a row's payload to each of its places among the rows at `out`. */
EP_DEV void ep_scatter(const EpCore& c, EpBuffers& b, ep_u64 out, ep_u64 payload, const ep_u32* places, ep_u32 picks) {
    const EpWindow& w = c.launch.r.w;
    for (ep_u64 at = 0; at < w.payload_bytes; at += EP_PIECE_BYTES) {
        const ep_u32 i = ep_turn(c, b), bytes = ep_min(w.payload_bytes - at, EP_PIECE_BYTES);
        ep_load(b.payload[i], payload + at, bytes);
        ep_filled(c, i);
        for (ep_u32 pick = 0; pick < picks; ++pick) ep_store(out + places[pick] * w.payload_bytes + at, b.payload[i], bytes);
        ep_turn_over(c, b);
    }
}

/* Choice k of a token as destination sees it; none where the batch has no choices. */
EP_DEV EpChoice ep_choice(const EpCore& c, ep_u64 topk_idx, ep_u64 topk_weights, ep_u32 destination, ep_u64 token, ep_u32 k) {
    const EpWindow& w = c.launch.r.w;
    EpChoice choice = {-1, 0.0f};
    if (topk_idx == 0) return choice;
    const int64_t expert = ep_at<int64_t>(topk_idx, token * w.topk + k) - (int64_t)destination * w.local_experts;
    if (expert >= 0 && (expert < (int64_t)w.local_experts || EP_PLANTED(c, EXPERTS_OF_OTHERS))) {
        choice.expert = (ep_i32)expert;
        choice.weight = topk_weights ? ep_at<float>(topk_weights, token * w.topk + k) : 1.0f;
    }
    return choice;
}

/* Writes a row's own header into the UB. */
EP_DEV void ep_write_row_header(const EpCore& c, const EpBytes& ub, ep_u32 token, ep_u32 position) {
    LocalTensor<uint32_t> words = ub.ReinterpretCast<uint32_t>();
    words.SetValue(0, c.launch.r.me);
    words.SetValue(1, token);
    words.SetValue(2, EP_PLANTED(c, POSITION_OFF_BY_ONE) ? position + 1 : position);
    words.SetValue(3, (uint32_t)c.op);
}
EP_DEV void ep_write_choice(const EpBytes& ub, ep_u32 k, const EpChoice& choice) {
    ub[sizeof(EpRowHeader)].ReinterpretCast<int32_t>().SetValue(2 * k, choice.expert);
    ub[sizeof(EpRowHeader)].ReinterpretCast<float>().SetValue(2 * k + 1, choice.weight);
}
EP_DEV EpChoice ep_read_choice(const EpBytes& ub, ep_u32 k) {
    return EpChoice{ub[sizeof(EpRowHeader)].ReinterpretCast<int32_t>().GetValue(2 * k),
                    ub[sizeof(EpRowHeader)].ReinterpretCast<float>().GetValue(2 * k + 1)};
}

/* Reads a row's own header in the UB; whether it is the row that is due. */
EP_DEV bool ep_check_row(EpCore& c, const EpBytes& ub, ep_u32 source, ep_u32 position, ep_u32& token) {
    LocalTensor<uint32_t> words = ub.ReinterpretCast<uint32_t>();
    const EpRowHeader row = {words.GetValue(0), words.GetValue(1), words.GetValue(2), words.GetValue(3)};
    token = row.source_token;
    return ep_is_same(c, source, ep_compare_rows(EpRowHeader{source, 0, position, (ep_u32)c.op}, row));
}

/* Puts the slot that opens an operation's part of a ring. There is room. */
EP_DEV void ep_put_opening(EpCore& c, EpBuffers& b, EpOutlet& o, ep_u32 rows, ep_u32 first) {
    const EpOpHeader header = ep_header(c, rows + (EP_PLANTED(c, ROWS_TOO_MANY) ? 1 : 0), first + (EP_PLANTED(c, WRONG_SHARE) ? 1 : 0));
    const uint32_t* words = (const uint32_t*)&header;
    const ep_u32 i = ep_turn(c, b);
    for (ep_u32 word = 0; word < sizeof(EpOpHeader) / 4; ++word) b.side[i].ReinterpretCast<uint32_t>().SetValue(word, words[word]);
    ep_written(i);
    ep_store(ep_outlet_slot(c, o), b.side[i], sizeof(EpOpHeader));
    ep_turn_over(c, b);
    ep_outlet_push(c, o);
}

/* Takes that slot. A row is there. */
EP_DEV bool ep_take_opening(EpCore& c, EpBuffers& b, EpInlet& in, EpOpHeader& header) {
    const ep_u32 i = ep_turn(c, b);
    ep_load(b.side[i], ep_inlet_slot(c, in), sizeof(EpOpHeader));
    ep_read(c, i);
    uint32_t* words = (uint32_t*)&header;
    for (ep_u32 word = 0; word < sizeof(EpOpHeader) / 4; ++word) words[word] = b.side[i].ReinterpretCast<uint32_t>().GetValue(word);
    ep_turn_over(c, b);
    ep_inlet_pop(c, in);
    return EP_PLANTED(c, HEADER_UNCHECKED) || ep_is_same(c, in.peer, ep_compare_headers(ep_header(c, header.rows, header.first), header));
}

#endif
