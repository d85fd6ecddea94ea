/*
 * ep_forward.h: forwarders of a dispatch. A forwarder core serves rings from other servers, one after the other: by ascending channel, and
 * of a channel by ascending server. A row that came along the rail goes to each rank of this server that its mask names: through a ring, or,
 * if it is this rank's own, to its final place.
 *
 *   UB      as receivers: two buffers
 *   waits   for the ring, and for room in the rings of the row at hand. Every rank serves the rings in the same order, receivers wait for
 *           nobody, and senders for no ring in particular: so no circle of waits is closed
 *   fanout  i32 [tokens of the source, ranks of the server], -1 at first: the position that a token's row has at each rank, for the way back
 */
#ifndef EP_FORWARD_H
#define EP_FORWARD_H
#include "ep_far_send.h"
#include "ep_receive.h"

/* The way to one rank of the server. */
struct EpExit {
    EpOutlet to;
    ep_u32 position, left; /* of the next row, and rows to come */
    bool own;
};

struct EpForwarder {
    EpInlet from;
    EpExit exits[EP_NEAR];
    ep_u32 node, source, rows;
};

/* A row that came along the rail. */
struct EpCame {
    EpRowHeader own;
    EpChoice choices[EP_TOPK];
    ep_u32 mask;
};

/* Publishes what is pending: this core is about to wait. */
EP_DEV void ep_forward_politely(EpCore& c, EpForwarder& f) {
    if (EP_PLANTED(c, IMPOLITE)) return;
    for (ep_u32 local = 0; local < c.launch.r.w.ranks_per_node; ++local)
        if (!f.exits[local].own) ep_outlet_publish(c, f.exits[local].to);
    ep_inlet_return(c, f.from);
}

EP_DEV bool ep_forward_await_row(EpCore& c, EpForwarder& f) {
    if (ep_inlet_look(c, f.from)) return true;
    ep_forward_politely(c, f);
    while (!ep_inlet_look(c, f.from))
        if (ep_vain(c, f.from.peer, ep_lane_data(f.from.track), EP_PHASE_ROWS, f.from.ring.tail, f.from.ring.head + 1)) return false;
    ep_moved(c);
    return true;
}

EP_DEV bool ep_forward_await_room(EpCore& c, EpForwarder& f, EpOutlet& to) {
    if (ep_outlet_has_room(c, to)) return true;
    ep_forward_politely(c, f);
    while (!ep_outlet_has_room(c, to))
        if (ep_vain(c, to.peer, ep_lane_credit(to.track), EP_PHASE_CREDIT, to.ring.head, ep_producer_awaits(to.ring, c.launch.rings))) return false;
    ep_moved(c);
    return true;
}

/* Takes the slot that opens the ring, and opens the way to every rank. */
EP_DEV bool ep_forward_open(EpCore& c, const EpDispatchArgs& a, EpBuffers& b, EpForwarder& f, ep_u32 channel) {
    const EpRank& r = c.launch.r;
    const ep_u32 near_first = ep_own_node(c) * r.w.ranks_per_node, opening = sizeof(EpOpHeader) / 4;
    for (ep_u32 local = 0; local < r.w.ranks_per_node; ++local) {
        EpExit& exit = f.exits[local];
        exit.own = near_first + local == r.me;
        ep_outlet_begin(c, exit.to, near_first + local, ep_near_track(r.w, f.node, channel));
    }
    if (!ep_forward_await_row(c, f)) return false;
    const ep_u32 i = ep_turn(c, b);
    ep_load(b.side[i], ep_inlet_slot(c, f.from), (ep_u32)(sizeof(EpOpHeader) + r.w.ranks_per_node * sizeof(EpShare)));
    ep_read(c, i);
    EpOpHeader header;
    uint32_t* words = (uint32_t*)&header;
    LocalTensor<uint32_t> side = b.side[i].ReinterpretCast<uint32_t>();
    for (ep_u32 word = 0; word < opening; ++word) words[word] = side.GetValue(word);
    for (ep_u32 local = 0; local < r.w.ranks_per_node; ++local) {
        f.exits[local].position = side.GetValue(opening + 2 * local);
        f.exits[local].left = side.GetValue(opening + 2 * local + 1);
    }
    ep_turn_over(c, b);
    if (!ep_is_same(c, f.source, ep_compare_headers(ep_header(c, header.rows, header.first), header))) return false;
    ep_inlet_pop(c, f.from);
    f.rows = header.rows;
    for (ep_u32 local = 0; local < r.w.ranks_per_node; ++local) {
        EpExit& exit = f.exits[local];
        if (exit.own) {
            const ep_u32 due = ep_at<uint32_t>(a.first_of, f.source + 1) - ep_at<uint32_t>(a.first_of, f.source);
            if (exit.position <= due && exit.left <= due - exit.position) continue;
            ep_refuse(c, f.source, EP_FIELD_ROWS_SENT, due, (ep_u64)exit.position + exit.left);
            return false;
        }
        while (!ep_outlet_is_clear(c, exit.to))
            if (ep_vain(c, exit.to.peer, EP_LANE_CONTROL, EP_PHASE_BANK, 0, c.op - 1)) return false;
        if (!ep_forward_await_room(c, f, exit.to)) return false;
        ep_put_opening(c, b, exit.to, exit.left, exit.position);
    }
    return true;
}

/* Reads what the row in the ring says of itself; whether it is of this operation, and for ranks that have rows to come. */
EP_DEV bool ep_forward_head(EpCore& c, EpBuffers& b, EpForwarder& f, EpCame& came) {
    const EpWindow& w = c.launch.r.w;
    const ep_u64 slot = ep_inlet_slot(c, f.from);
    const ep_u32 i = ep_turn(c, b);
    ep_load(b.side[i], slot, (ep_u32)sizeof(EpRowHeader) + w.topk * (ep_u32)sizeof(EpChoice));
    ep_load(b.side[i][EP_SIDE_MASK], slot + w.wire_bytes, 4);
    ep_read(c, i);
    LocalTensor<uint32_t> words = b.side[i].ReinterpretCast<uint32_t>();
    came.own = EpRowHeader{words.GetValue(0), words.GetValue(1), words.GetValue(2), words.GetValue(3)};
    for (ep_u32 k = 0; k < w.topk; ++k) came.choices[k] = ep_read_choice(b.side[i], k);
    came.mask = b.side[i][EP_SIDE_MASK].ReinterpretCast<uint32_t>().GetValue(0);
    ep_turn_over(c, b);
    if (!ep_is_same(c, f.source, ep_compare_rows(EpRowHeader{f.source, 0, came.own.position, (ep_u32)c.op}, came.own))) return false;
    for (ep_u32 local = 0; local < w.ranks_per_node; ++local)
        if ((came.mask >> local & 1) != 0 && f.exits[local].left == 0) {
            ep_refuse(c, f.source, EP_FIELD_ROWS_SENT, 0, 1);
            return false;
        }
    return true;
}

/* A choice as a rank sees it. */
EP_DEV EpChoice ep_localized(const EpCore& c, const EpChoice& choice, ep_u32 rank) {
    const ep_i32 local = choice.expert - (ep_i32)(rank * c.launch.r.w.local_experts);
    if (choice.expert < 0 || local < 0 || local >= (ep_i32)c.launch.r.w.local_experts) return EpChoice{-1, 0.0f};
    return EpChoice{local, choice.weight};
}

/* Where the payload goes at an exit. What goes beside it is stored here. */
EP_DEV ep_u64 ep_forward_beside(EpCore& c, const EpDispatchArgs& a, EpBuffers& b, const EpForwarder& f, const EpExit& exit, const EpCame& came) {
    const EpWindow& w = c.launch.r.w;
    const ep_u32 i = ep_turn(c, b);
    ep_u64 to;
    if (exit.own) {
        const ep_u64 row = (ep_u64)ep_at<uint32_t>(a.first_of, f.source) + exit.position;
        for (ep_u32 k = 0; k < w.topk; ++k) ep_learn_choice(b.side[i], k, ep_localized(c, came.choices[k], exit.to.peer));
        ep_store_learnt(c, a, b.side[i], i, f.source, came.own.source_token, row);
        to = a.out + row * w.payload_bytes;
    } else {
        LocalTensor<uint32_t> words = b.side[i].ReinterpretCast<uint32_t>();
        words.SetValue(0, f.source);
        words.SetValue(1, came.own.source_token);
        words.SetValue(2, exit.position);
        words.SetValue(3, (uint32_t)c.op);
        for (ep_u32 k = 0; k < w.topk; ++k)
            ep_write_choice(b.side[i], k, EP_PLANTED(c, NOT_LOCALIZED) ? came.choices[k] : ep_localized(c, came.choices[k], exit.to.peer));
        ep_written(i);
        const ep_u64 slot = ep_outlet_slot(c, exit.to);
        ep_store(slot, b.side[i], (ep_u32)sizeof(EpRowHeader) + w.topk * (ep_u32)sizeof(EpChoice));
        to = slot + w.header_bytes;
    }
    ep_turn_over(c, b);
    return to;
}

/* Keeps where the row went. */
EP_DEV void ep_keep_fanout(const EpCore& c, const EpDispatchArgs& a, EpBuffers& b, const EpForwarder& f, const EpCame& came) {
    const EpWindow& w = c.launch.r.w;
    const ep_u64 fanout = a.fanout ? ep_at<uint64_t>(a.fanout, f.node) : 0;
    if (fanout == 0) return;
    const ep_u32 i = ep_turn(c, b);
    for (ep_u32 local = 0; local < w.ranks_per_node; ++local)
        b.side[i].ReinterpretCast<int32_t>().SetValue(local, (came.mask >> local & 1) != 0 ? (int32_t)f.exits[local].position : -1);
    ep_written(i);
    ep_store(fanout + (ep_u64)came.own.source_token * w.ranks_per_node * 4, b.side[i], w.ranks_per_node * 4);
    ep_turn_over(c, b);
}

/* Takes the row that lies in the ring, and sends it where it goes. */
EP_DEV bool ep_forward_row(EpCore& c, const EpDispatchArgs& a, EpBuffers& b, EpForwarder& f) {
    const EpWindow& w = c.launch.r.w;
    EpCame came;
    if (!ep_forward_head(c, b, f, came)) return false;
    ep_u64 to[EP_NEAR];
    for (ep_u32 local = 0; local < w.ranks_per_node; ++local) {
        if ((came.mask >> local & 1) == 0) continue;
        EpExit& exit = f.exits[local];
        if (!exit.own && !ep_forward_await_room(c, f, exit.to)) return false;
        to[local] = ep_forward_beside(c, a, b, f, exit, came);
    }
    ep_keep_fanout(c, a, b, f, came);
    const ep_u64 from = ep_inlet_slot(c, f.from) + w.header_bytes;
    for (ep_u64 at = 0; at < w.payload_bytes; at += EP_PIECE_BYTES) {
        const ep_u32 i = ep_turn(c, b), bytes = ep_min(w.payload_bytes - at, EP_PIECE_BYTES);
        ep_load(b.payload[i], from + at, bytes);
        ep_filled(c, i);
        for (ep_u32 local = 0; local < w.ranks_per_node; ++local)
            if ((came.mask >> local & 1) != 0) ep_store(to[local] + at, b.payload[i], bytes);
        ep_turn_over(c, b);
    }
    for (ep_u32 local = 0; local < w.ranks_per_node; ++local) {
        if ((came.mask >> local & 1) == 0) continue;
        EpExit& exit = f.exits[local];
        ++exit.position;
        --exit.left;
        if (!exit.own) ep_outlet_push(c, exit.to);
    }
    /* The last loads of the slot. */
    ep_read(c, 0);
    ep_inlet_pop(c, f.from);
    return true;
}

EP_DEV void ep_forward_ring(EpCore& c, const EpDispatchArgs& a, EpBuffers& b, ep_u32 node, ep_u32 channel) {
    const EpWindow& w = c.launch.r.w;
    EpForwarder f;
    f.node = node;
    f.source = ep_on_rail(c, node, c.launch.r.me);
    if (!ep_takes_part(c, f.source)) return;
    ep_inlet_begin(c, f.from, f.source, ep_far_track(w, channel));
    if (!ep_forward_open(c, a, b, f, channel)) return;
    for (ep_u32 row = 0; row < f.rows; ++row)
        if (!ep_forward_await_row(c, f) || !ep_forward_row(c, a, b, f)) return;
    ep_inlet_close(c, f.from);
    for (ep_u32 local = 0; local < w.ranks_per_node; ++local)
        if (!f.exits[local].own) ep_outlet_close(c, f.exits[local].to);
}

#endif
