/*
 * ep_receive.h: receivers of a dispatch. A receiver core serves channels, one after the other, ascending: first this rank's own rows, then
 * the rings of all ranks of the server, by turns: their own rows, and those that they pass on from other servers. Every row goes to its final
 * place: the first row of its source, and its position.
 *
 *   UB      two buffers: a piece of a payload, and a row's header and what the user learns of it
 *   waits   for nobody in particular: it looks at all rings that still have rows to come
 */
#ifndef EP_RECEIVE_H
#define EP_RECEIVE_H
#include "ep_rows.h"

/* Rows of a ring that are taken before the next ring is looked at. */
#define EP_AT_A_TIME 8u

/* Where what the user learns of a row lies in a buffer's side, behind the header. */
#define EP_LEARNT_IDX EP_HEAD_BYTES
#define EP_LEARNT_WEIGHTS (EP_LEARNT_IDX + EP_TOPK * 8)
#define EP_LEARNT_TOKEN (EP_LEARNT_WEIGHTS + EP_TOPK * 4)
#define EP_LEARNT_RANK (EP_LEARNT_TOKEN + 32)
static_assert(EP_LEARNT_RANK + 32 <= EP_SIDE_BYTES, "what the user learns of a row");

struct EpReceiver {
    EpInlet from;
    ep_u32 source; /* whose rows come: the peer's own, or those that it passes on from another server */
    ep_u32 position, last;
    bool opened, closed;
};

/* Stores what the user learns of a row. Choices were written to the side of buffer i. A cached dispatch tells nothing anew, and a batch
   without choices none. */
EP_DEV void ep_store_learnt(const EpCore& c, const EpDispatchArgs& a, const EpBytes& side, ep_u32 i, ep_u32 source, ep_u32 token, ep_u64 row) {
    const ep_u32 topk = c.launch.r.w.topk;
    side[EP_LEARNT_TOKEN].ReinterpretCast<uint32_t>().SetValue(0, token);
    side[EP_LEARNT_RANK].ReinterpretCast<uint32_t>().SetValue(0, source);
    ep_written(i);
    if (a.out_token) {
        ep_store(a.out_token + row * 4, side[EP_LEARNT_TOKEN], 4);
        ep_store(a.out_rank + row * 4, side[EP_LEARNT_RANK], 4);
    }
    if (a.out_idx) {
        ep_store(a.out_idx + row * topk * 8, side[EP_LEARNT_IDX], topk * 8);
        ep_store(a.out_weights + row * topk * 4, side[EP_LEARNT_WEIGHTS], topk * 4);
    }
}
EP_DEV void ep_learn_choice(const EpBytes& side, ep_u32 k, const EpChoice& choice) {
    side[EP_LEARNT_IDX].ReinterpretCast<int64_t>().SetValue(k, (int64_t)(choice.expert < 0 ? -1 : choice.expert));
    side[EP_LEARNT_WEIGHTS].ReinterpretCast<float>().SetValue(k, choice.expert < 0 ? 0.0f : choice.weight);
}

/* The pieces of a payload from `first` on, GM to GM. */
EP_DEV void ep_carry(const EpCore& c, EpBuffers& b, ep_u64 to, ep_u64 from, ep_u64 first) {
    const ep_u64 all = c.launch.r.w.payload_bytes;
    for (ep_u64 at = first; at < all && !(EP_PLANTED(c, LATER_PIECES) && first > 0); at += EP_PIECE_BYTES) {
        const ep_u32 i = ep_turn(c, b), bytes = ep_min(all - at, EP_PIECE_BYTES);
        ep_load(b.payload[i], from + at, bytes);
        ep_filled(c, i);
        ep_store(to + at, b.payload[i], bytes);
        ep_turn_over(c, b);
    }
}

EP_DEV void ep_keep_own(EpCore& c, const EpDispatchArgs& a, EpBuffers& b, ep_u32 channel) {
    const EpRank& r = c.launch.r;
    const ep_u32 end = ep_channel_first(a.tokens, c.launch.rings.channels, channel + 1);
    const ep_u64 first = ep_at<uint32_t>(a.first_of, r.me);
    for (ep_u32 token = ep_channel_first(a.tokens, c.launch.rings.channels, channel); token < end; ++token) {
        const ep_i32 position = ep_at<int32_t>(a.position, (ep_u64)token * r.w.ranks + r.me);
        if (position < 0) continue;
        const ep_u64 row = first + (ep_u32)position;
        const ep_u32 i = ep_turn(c, b);
        for (ep_u32 k = 0; k < r.w.topk; ++k) ep_learn_choice(b.side[i], k, ep_choice(c, a.topk_idx, a.topk_weights, r.me, token, k));
        ep_store_learnt(c, a, b.side[i], i, r.me, token, row);
        ep_turn_over(c, b);
        ep_carry(c, b, a.out + row * r.w.payload_bytes, a.x + token * a.x_stride, 0);
    }
}

/* Takes the row that lies in the ring. */
EP_DEV bool ep_take_row(EpCore& c, const EpDispatchArgs& a, EpBuffers& b, EpReceiver& s) {
    const EpWindow& w = c.launch.r.w;
    const ep_u64 slot = ep_inlet_slot(c, s.from);
    const ep_u32 i = ep_turn(c, b), bytes = ep_min(w.payload_bytes, EP_PIECE_BYTES);
    if (EP_PLANTED(c, CREDIT_EARLY)) ep_inlet_pop(c, s.from);
    ep_load(b.side[i], slot, (ep_u32)sizeof(EpRowHeader) + w.topk * (ep_u32)sizeof(EpChoice));
    ep_load(b.payload[i], slot + w.header_bytes, bytes);
    ep_read(c, i);
    ep_u32 token;
    const bool right = ep_check_row(c, b.side[i], s.source, s.position, token);
    const ep_u64 row = (ep_u64)ep_at<uint32_t>(a.first_of, s.source) + s.position;
    if (right) {
        for (ep_u32 k = 0; k < w.topk; ++k) ep_learn_choice(b.side[i], k, ep_read_choice(b.side[i], k));
        ep_store_learnt(c, a, b.side[i], i, s.source, token, row);
        const ep_u64 out = a.out + (row + (EP_PLANTED(c, BEYOND_THE_ROWS) ? 1 : 0)) * w.payload_bytes;
        if (EP_PLANTED(c, WHOLE_BLOCKS)) ep_store_blocks(out, b.payload[i], bytes);
        else ep_store(out, b.payload[i], bytes);
    }
    ep_turn_over(c, b);
    if (!right) return false;
    if (w.payload_bytes > bytes) {
        ep_carry(c, b, a.out + row * w.payload_bytes, slot + w.header_bytes, bytes);
        /* The last loads of the slot. */
        ep_read(c, 0);
    }
    ++s.position;
    if (!EP_PLANTED(c, CREDIT_EARLY)) ep_inlet_pop(c, s.from);
    return true;
}

/* Takes what lies in a ring; whether something did. */
EP_DEV bool ep_visit(EpCore& c, const EpDispatchArgs& a, EpBuffers& b, EpReceiver& s) {
    const ep_u32 source = s.source;
    bool moved = false;
    if (!s.opened) {
        EpOpHeader header;
        if (!ep_inlet_look(c, s.from) || !ep_take_opening(c, b, s.from, header)) return false;
        const ep_u32 due = ep_at<uint32_t>(a.first_of, source + 1) - ep_at<uint32_t>(a.first_of, source);
        if (header.first > due || header.rows > due - header.first) {
            ep_refuse(c, s.from.peer, EP_FIELD_ROWS_SENT, due, (ep_u64)header.first + header.rows);
            return false;
        }
        s.opened = moved = true;
        s.position = header.first;
        s.last = header.first + header.rows;
    }
    for (ep_u32 taken = 0; taken < EP_AT_A_TIME && s.position < s.last && ep_inlet_look(c, s.from); ++taken) {
        if (!ep_take_row(c, a, b, s)) return false;
        moved = true;
    }
    if (s.position == s.last) {
        ep_inlet_close(c, s.from);
        s.closed = true;
    }
    return moved;
}

EP_DEV void ep_receive_channel(EpCore& c, const EpDispatchArgs& a, EpBuffers& b, ep_u32 channel) {
    const EpRank& r = c.launch.r;
    EpReceiver of[EP_STREAMS];
    ep_u32 sources = 0;
    for (ep_u32 source = 0; source < r.w.ranks; ++source) {
        const ep_u32 peer = ep_on_rail(c, ep_own_node(c), source);
        if (peer != r.me && ep_takes_part(c, source)) {
            EpReceiver& s = of[sources++];
            s.source = source;
            s.position = s.last = 0;
            s.opened = s.closed = false;
            ep_inlet_begin(c, s.from, peer, ep_own_track(r.w, source, channel));
        }
    }
    ep_keep_own(c, a, b, channel);
    for (;;) {
        bool moved = false;
        ep_u32 open = sources;
        for (ep_u32 i = sources; i-- > 0; ) {
            if (!of[i].closed) moved |= ep_visit(c, a, b, of[i]);
            if (!of[i].closed) open = i;
            if (c.failed) return;
        }
        if (open == sources) return;
        if (moved) {
            ep_moved(c);
            continue;
        }
        for (ep_u32 i = 0; i < sources; ++i)
            if (!EP_PLANTED(c, IMPOLITE)) ep_inlet_return(c, of[i].from);
        const EpInlet& in = of[open].from;
        if (ep_vain(c, in.peer, ep_lane_data(in.track), EP_PHASE_ROWS, in.ring.tail, in.ring.head + 1)) return;
    }
}

#endif
