/*
 * ep_reduce.h: reducers of a combine. A reducer core serves channels, one after the other, ascending: the tokens of a contiguous share, each
 * the sum of its bias and of its rows by ascending rank, in f32, rounded to bf16 once. Over several servers a token's rows of each server are
 * summed apart, from zero, and rounded: this server's here, others' by their gatherers (ep_gather.h), from which one row comes. These sums are
 * added by ascending server.
 *
 *   UB      two buffers for addends, one for an addend in f32, one for the sum, one for a server's own sum, one for the rounded sum; headers
 *   waits   for the row of one rank at a time; returners wait for no ring in particular
 */
#ifndef EP_REDUCE_H
#define EP_REDUCE_H
#include "ep_far_send.h"
#include "ep_return.h"

/* Elements of a piece of a sum. */
#define EP_SUM_ELEMENTS 8192u
#define EP_SUM_BYTES (EP_SUM_ELEMENTS * 2)
#define EP_WIDE_BYTES (EP_SUM_ELEMENTS * 4)
#define EP_WEIGHTS_BYTES (EP_TOPK * 4)
#define EP_REDUCE_BYTES (3 * EP_SUM_BYTES + 3 * EP_WIDE_BYTES + 2 * EP_HEAD_BYTES + EP_WEIGHTS_BYTES)
static_assert(EP_REDUCE_BYTES + EP_COMMON_BYTES <= EP_UB_BYTES, "the buffers of reducers");

struct EpSumBuffers {
    EpBytes in[2], wide, sum, part, out, head, note, weights;
    ep_u32 turn;
};

EP_DEV void ep_open_sum(EpSumBuffers& b, const EpBytes& ub) {
    b.in[0] = ub;
    b.in[1] = ub[EP_SUM_BYTES];
    b.out = ub[2 * EP_SUM_BYTES];
    b.wide = ub[3 * EP_SUM_BYTES];
    b.sum = ub[3 * EP_SUM_BYTES + EP_WIDE_BYTES];
    b.part = ub[3 * EP_SUM_BYTES + 2 * EP_WIDE_BYTES];
    b.head = ub[3 * EP_SUM_BYTES + 3 * EP_WIDE_BYTES];
    b.note = ub[3 * EP_SUM_BYTES + 3 * EP_WIDE_BYTES + EP_HEAD_BYTES];
    b.weights = ub[3 * EP_SUM_BYTES + 3 * EP_WIDE_BYTES + 2 * EP_HEAD_BYTES];
    b.turn = 1;
    for (int32_t i = 0; i < 2; ++i) SetFlag<HardEvent::V_MTE2>(i);
    SetFlag<HardEvent::MTE3_V>(0);
    SetFlag<HardEvent::MTE3_S>(0);
    SetFlag<HardEvent::MTE3_S>(1);
}
EP_DEV void ep_close_sum(const EpSumBuffers&) {
    for (int32_t i = 0; i < 2; ++i) WaitFlag<HardEvent::V_MTE2>(i);
    WaitFlag<HardEvent::MTE3_V>(0);
    WaitFlag<HardEvent::MTE3_S>(0);
    WaitFlag<HardEvent::MTE3_S>(1);
    PipeBarrier<PIPE_ALL>();
}

/* A sum begins with a row's value, or adds it. */
EP_DEV void ep_add(const EpCore& c, EpSumBuffers& b, const EpBytes& into, ep_u64 from, ep_u32 bytes, bool first) {
    const ep_u32 i = b.turn ^= 1, count = bytes / 2;
    if (EP_PLANTED(c, INPUT_REUSED)) PipeBarrier<PIPE_MTE2>();
    else WaitFlag<HardEvent::V_MTE2>((int32_t)i);
    ep_load(b.in[i], from, bytes);
    if (!EP_PLANTED(c, LOADED_FLAG)) {
        SetFlag<HardEvent::MTE2_V>((int32_t)i);
        WaitFlag<HardEvent::MTE2_V>((int32_t)i);
    }
    LocalTensor<float> sum = into.ReinterpretCast<float>(), wide = first ? sum : b.wide.ReinterpretCast<float>();
    Cast(wide, b.in[i].ReinterpretCast<bfloat16_t>(), RoundMode::CAST_NONE, count);
    if (!EP_PLANTED(c, FLAG_MISSING) && !EP_PLANTED(c, INPUT_REUSED)) SetFlag<HardEvent::V_MTE2>((int32_t)i);
    if (!EP_PLANTED(c, VECTOR_BARRIER)) PipeBarrier<PIPE_V>();
    if (!first) Add(sum, sum, wide, (int32_t)count);
    PipeBarrier<PIPE_V>();
    if (EP_PLANTED(c, ROUNDED_TOO_EARLY)) {
        Cast(b.wide.ReinterpretCast<bfloat16_t>(), sum, RoundMode::CAST_RINT, count);
        PipeBarrier<PIPE_V>();
        Cast(sum, b.wide.ReinterpretCast<bfloat16_t>(), RoundMode::CAST_NONE, count);
        PipeBarrier<PIPE_V>();
    }
}

/* Where the current token's rows lie. */
struct EpFound {
    ep_u64 row[EP_NEAR];   /* addresses of payloads, ranks ascending */
    ep_u32 ring[EP_NEAR];  /* the inlets among them */
    ep_u32 rows, rings;
};

/* The rings that a core empties for the tokens of a source on a channel: from each rank of the server, ascending. */
struct EpReducer {
    EpInlet from[EP_NEAR];
    ep_u32 rings;
    ep_u32 source;
    EpInlet rail[EP_PEERS]; /* of a reducer: from the rail peers, ascending */
    ep_u32 rails;
    EpFarRing* to; /* of a gatherer: the ring that it fills */
};

/* Publishes what is pending: this core is about to wait. */
EP_DEV void ep_reduce_politely(EpCore& c, EpReducer& s) {
    if (EP_PLANTED(c, IMPOLITE)) return;
    for (ep_u32 i = 0; i < s.rings; ++i) ep_inlet_return(c, s.from[i]);
    for (ep_u32 i = 0; i < s.rails; ++i) ep_inlet_return(c, s.rail[i]);
    if (s.to) ep_far_ring_tell(c, *s.to);
}

EP_DEV bool ep_await_row(EpCore& c, EpReducer& s, EpInlet& in) {
    if (ep_inlet_look(c, in)) return true;
    ep_reduce_politely(c, s);
    while (!ep_inlet_look(c, in))
        if (ep_vain(c, in.peer, ep_lane_data(in.track), EP_PHASE_ROWS, in.ring.tail, in.ring.head + 1)) return false;
    ep_moved(c);
    return true;
}

/* Reads what the header of a ring's row says, adds its weights to the token's; whether it is the row that is due. */
EP_DEV bool ep_read_head(EpCore& c, EpSumBuffers& b, const EpInlet& in, ep_u32 position, ep_u32 token, float* weights) {
    const ep_u32 topk = c.launch.r.w.topk;
    ep_load(b.head, ep_inlet_slot(c, in), (ep_u32)sizeof(EpRowHeader) + topk * (ep_u32)sizeof(EpChoice));
    ep_read(c, 0);
    ep_u32 whose;
    if (!ep_check_row(c, b.head, in.peer, position, whose)) return false;
    if (whose != token) {
        ep_refuse(c, in.peer, EP_FIELD_ROW_TOKEN, token, whose);
        return false;
    }
    for (ep_u32 k = 0; k < topk && !EP_PLANTED(c, WEIGHTS_LOST); ++k) weights[k] += ep_read_choice(b.head, k).weight;
    return true;
}

/* Finds the rows that this server's ranks have of a token, ranks ascending; waits for those that come through rings. `position(rank)`: of the
   row at a rank, below 0 where it did not go. */
template <class Position>
EP_DEV bool ep_find_rows(EpCore& c, const EpCombineArgs& a, EpSumBuffers& b, EpReducer& s, ep_u32 token, const Position& position, EpFound& f,
                         float* weights) {
    const EpRank& r = c.launch.r;
    const ep_u32 first = ep_own_node(c) * r.w.ranks_per_node;
    f.rows = f.rings = 0;
    ep_u32 ring = 0;
    for (ep_u32 rank = first; rank < first + r.w.ranks_per_node; ++rank) {
        if (rank != r.me && (ring >= s.rings || s.from[ring].peer != rank)) continue;
        const ep_u32 mine = rank == r.me ? s.rings : ring++;
        const ep_i32 at = position(rank);
        if (at < 0) continue;
        if (rank == r.me) {
            const ep_u64 row = (ep_u64)ep_at<uint32_t>(a.first_of, s.source) + (ep_u32)at;
            f.row[f.rows++] = a.y + row * a.y_stride;
            for (ep_u32 k = 0; a.own_weights && k < r.w.topk; ++k) weights[k] += ep_at<float>(a.own_weights, row * r.w.topk + k);
            continue;
        }
        EpInlet& in = s.from[mine];
        if (!ep_await_row(c, s, in) || !ep_read_head(c, b, in, (ep_u32)at, token, weights)) return false;
        f.row[f.rows++] = ep_inlet_slot(c, in) + r.w.header_bytes;
        f.ring[f.rings++] = mine;
    }
    return true;
}

/* A sum begins as zero. */
EP_DEV void ep_clear(const EpCore& c, const EpBytes& into, ep_u32 bytes) {
    if (EP_PLANTED(c, SUM_NOT_CLEARED)) return;
    Duplicate(into.ReinterpretCast<float>(), 0.0f, (int32_t)(bytes / 2));
    PipeBarrier<PIPE_V>();
}

/* Rounds a sum and stores it. */
EP_DEV void ep_store_sum(const EpCore& c, const EpSumBuffers& b, ep_u64 to, ep_u32 bytes) {
    if (!EP_PLANTED(c, OUT_REUSED)) WaitFlag<HardEvent::MTE3_V>(0);
    Cast(b.out.ReinterpretCast<bfloat16_t>(), b.sum.ReinterpretCast<float>(), EP_PLANTED(c, ROUNDING) ? RoundMode::CAST_NONE : RoundMode::CAST_RINT,
         bytes / 2);
    /* The sum is read before the next one begins. */
    PipeBarrier<PIPE_V>();
    if (!EP_PLANTED(c, SUMMED_FLAG)) {
        SetFlag<HardEvent::V_MTE3>(0);
        WaitFlag<HardEvent::V_MTE3>(0);
    }
    ep_store(to, b.out, bytes);
    if (!EP_PLANTED(c, OUT_REUSED)) SetFlag<HardEvent::MTE3_V>(0);
}

/* Adds this server's rows, summed from zero and rounded. */
EP_DEV void ep_add_part(const EpCore& c, EpSumBuffers& b, const EpFound& f, ep_u64 at, ep_u32 bytes) {
    if (f.rows == 0) return;
    const ep_u32 count = bytes / 2;
    LocalTensor<float> part = b.part.ReinterpretCast<float>(), sum = b.sum.ReinterpretCast<float>();
    ep_clear(c, b.part, bytes);
    for (ep_u32 i = 0; i < f.rows; ++i) ep_add(c, b, b.part, f.row[i] + at, bytes, false);
    if (!EP_PLANTED(c, PART_UNROUNDED)) {
        Cast(b.wide.ReinterpretCast<bfloat16_t>(), part, RoundMode::CAST_RINT, count);
        PipeBarrier<PIPE_V>();
        Cast(part, b.wide.ReinterpretCast<bfloat16_t>(), RoundMode::CAST_NONE, count);
        PipeBarrier<PIPE_V>();
    }
    Add(sum, sum, part, (int32_t)count);
    PipeBarrier<PIPE_V>();
}

/* Where the sums of other servers for the current token lie, by server; 0 where none comes. */
struct EpParts {
    ep_u64 row[EP_PEERS + 1];
};

EP_DEV void ep_sum_token(EpCore& c, const EpCombineArgs& a, EpSumBuffers& b, ep_u32 token, const EpFound& f, const EpParts& parts) {
    const EpWindow& w = c.launch.r.w;
    for (ep_u64 at = 0; at < w.result_bytes; at += EP_SUM_BYTES) {
        const ep_u32 bytes = ep_min(w.result_bytes - at, EP_SUM_BYTES);
        if (a.bias[0]) ep_add(c, b, b.sum, a.bias[0] + token * a.bias_stride + at, bytes, true);
        else ep_clear(c, b.sum, bytes);
        if (a.bias[1]) ep_add(c, b, b.sum, a.bias[1] + token * a.bias_stride + at, bytes, false);
        for (ep_u32 i = 0; i < f.rows && w.nodes == 1; ++i) ep_add(c, b, b.sum, f.row[i] + at, bytes, false);
        for (ep_u32 node = 0; node < w.nodes && w.nodes > 1; ++node) {
            if (node == ep_own_node(c)) ep_add_part(c, b, f, at, bytes);
            else if (parts.row[node]) ep_add(c, b, b.sum, parts.row[node] + at, bytes, false);
        }
        ep_store_sum(c, b, a.out + token * a.out_stride + at, bytes);
    }
}

EP_DEV void ep_store_weights(const EpCore& c, const EpCombineArgs& a, const EpSumBuffers& b, ep_u32 token, const float* weights) {
    const ep_u32 topk = c.launch.r.w.topk;
    WaitFlag<HardEvent::MTE3_S>(0);
    for (ep_u32 k = 0; k < topk; ++k) b.weights.ReinterpretCast<float>().SetValue(k, weights[k]);
    ep_written(0);
    ep_store(a.weights + (ep_u64)token * topk * 4, b.weights, topk * 4);
    SetFlag<HardEvent::MTE3_S>(0);
}

/* Takes the slot that opens a ring; the rows that it announces. */
EP_DEV bool ep_open_inlet(EpCore& c, EpSumBuffers& b, EpReducer& s, EpInlet& in) {
    if (!ep_await_row(c, s, in)) return false;
    ep_load(b.head, ep_inlet_slot(c, in), sizeof(EpOpHeader));
    ep_read(c, 0);
    EpOpHeader header;
    uint32_t* words = (uint32_t*)&header;
    for (ep_u32 word = 0; word < sizeof(EpOpHeader) / 4; ++word) words[word] = b.head.ReinterpretCast<uint32_t>().GetValue(word);
    if (!ep_is_same(c, in.peer, ep_compare_headers(ep_header(c, header.rows, header.first), header))) return false;
    ep_inlet_pop(c, in);
    return true;
}

/* Opens the rings from the ranks of the server that have rows of a source. */
EP_DEV bool ep_open_inlets(EpCore& c, const EpCombineArgs& a, EpSumBuffers& b, EpReducer& s, ep_u32 source, ep_u32 channel) {
    const EpRank& r = c.launch.r;
    s.rings = s.rails = 0;
    s.source = source;
    for (ep_u32 rank = 0; rank < r.w.ranks; ++rank)
        if (rank != r.me && ep_is_near(c, rank) && ep_gives_back(c, a, source, rank))
            ep_inlet_begin(c, s.from[s.rings++], rank, ep_own_track(r.w, source, channel));
    for (ep_u32 i = 0; i < s.rings; ++i)
        if (!ep_open_inlet(c, b, s, s.from[i])) return false;
    return true;
}

/* Of a reducer: whether a server has rows of a token of this rank. */
EP_DEV bool ep_reaches(const EpCore& c, const EpCombineArgs& a, ep_u32 token, ep_u32 node) {
    const EpWindow& w = c.launch.r.w;
    for (ep_u32 local = 0; local < w.ranks_per_node; ++local)
        if (ep_at<int32_t>(a.position, (ep_u64)token * w.ranks + node * w.ranks_per_node + local) >= 0) return true;
    return false;
}

/* Waits for the sums of other servers. `taken`: how many have come of each. */
EP_DEV bool ep_find_parts(EpCore& c, const EpCombineArgs& a, EpSumBuffers& b, EpReducer& s, ep_u32 token, ep_u32* taken, EpParts& parts,
                          float* weights) {
    for (ep_u32 node = 0; node <= EP_PEERS; ++node) parts.row[node] = 0;
    for (ep_u32 i = 0; i < s.rails; ++i) {
        EpInlet& in = s.rail[i];
        const ep_u32 node = ep_node_of(c, in.peer);
        if (!ep_reaches(c, a, token, node)) continue;
        if (!ep_await_row(c, s, in) || !ep_read_head(c, b, in, taken[i], token, weights)) return false;
        ++taken[i];
        parts.row[node] = ep_inlet_slot(c, in) + c.launch.r.w.header_bytes;
    }
    return true;
}

/* Where the rows of a rank's own tokens went. */
struct EpOwnPosition {
    const EpCore& c;
    const EpCombineArgs& a;
    ep_u32 token;
    EP_DEV ep_i32 operator()(ep_u32 rank) const { return ep_at<int32_t>(a.position, (ep_u64)token * c.launch.r.w.ranks + rank); }
};

/* The slots of the current token have been read. */
EP_DEV void ep_pop_found(EpCore& c, EpReducer& s, const EpFound& found) {
    ep_read(c, 1);
    for (ep_u32 i = 0; i < found.rings; ++i) ep_inlet_pop(c, s.from[found.ring[i]]);
}

EP_DEV void ep_reduce_channel(EpCore& c, const EpCombineArgs& a, EpSumBuffers& b, ep_u32 channel) {
    const EpRank& r = c.launch.r;
    const ep_u32 channels = c.launch.rings.channels, end = ep_channel_first(a.tokens, channels, channel + 1);
    EpReducer s;
    s.to = nullptr;
    if (!ep_open_inlets(c, a, b, s, r.me, channel)) return;
    for (ep_u32 node = 0; node < r.w.nodes; ++node) {
        const ep_u32 rail = ep_on_rail(c, node, r.me);
        if (node == ep_own_node(c) || !ep_takes_part(c, rail)) continue;
        ep_inlet_begin(c, s.rail[s.rails++], rail, ep_far_track(r.w, channel));
    }
    for (ep_u32 i = 0; i < s.rails; ++i)
        if (!ep_open_inlet(c, b, s, s.rail[i])) return;
    ep_u32 taken[EP_PEERS] = {};
    for (ep_u32 token = ep_channel_first(a.tokens, channels, channel); token < end; ++token) {
        float weights[EP_TOPK] = {};
        EpFound found;
        EpParts parts;
        if (!ep_find_rows(c, a, b, s, token, EpOwnPosition{c, a, token}, found, weights)) return;
        if (!ep_find_parts(c, a, b, s, token, taken, parts, weights)) return;
        ep_sum_token(c, a, b, token, found, parts);
        if (a.weights) ep_store_weights(c, a, b, token, weights);
        ep_pop_found(c, s, found);
        for (ep_u32 i = 0; i < s.rails; ++i)
            if (parts.row[ep_node_of(c, s.rail[i].peer)]) ep_inlet_pop(c, s.rail[i]);
    }
    for (ep_u32 i = 0; i < s.rings; ++i) ep_inlet_close(c, s.from[i]);
    for (ep_u32 i = 0; i < s.rails; ++i) ep_inlet_close(c, s.rail[i]);
}

#endif
