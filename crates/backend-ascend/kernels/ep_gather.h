/*
 * ep_gather.h: gatherers of a combine, on the cores of forwarders. A gatherer sums what the ranks of this server return for the tokens of its
 * rail peer at another server, token by token: ranks ascending, in f32, from zero, rounded to bf16. The sum goes along the rail, one row a token.
 *
 *   UB      as reducers (ep_reduce.h)
 *   waits   for the row of one rank at a time, and for room in the ring along the rail. Rings are served in the same order everywhere: channels
 *           ascending, of a channel by ascending server, so that the first that is not done is being served by all
 */
#ifndef EP_GATHER_H
#define EP_GATHER_H
#include "ep_reduce.h"

/* Where the rows of another rank's tokens went in this server. */
struct EpFanoutPosition {
    const EpCore& c;
    ep_u64 fanout;
    ep_u32 token;
    EP_DEV ep_i32 operator()(ep_u32 rank) const {
        const ep_u32 each = c.launch.r.w.ranks_per_node;
        return ep_at<int32_t>(fanout, (ep_u64)token * each + rank % each);
    }
};

EP_DEV bool ep_reached_here(const EpCore& c, ep_u64 fanout, ep_u32 token) {
    const ep_u32 first = ep_own_node(c) * c.launch.r.w.ranks_per_node;
    for (ep_u32 rank = first; rank < first + c.launch.r.w.ranks_per_node; ++rank)
        if (EpFanoutPosition{c, fanout, token}(rank) >= 0) return true;
    return false;
}

EP_DEV bool ep_gather_await_room(EpCore& c, EpReducer& s) {
    if (ep_far_ring_has_room(c, *s.to)) return true;
    ep_reduce_politely(c, s);
    while (!ep_far_ring_has_room(c, *s.to))
        if (ep_far_ring_vain(c, *s.to)) return false;
    ep_moved(c);
    return true;
}

/* Stores the words of a message into the next slot of the ring. */
EP_DEV void ep_gather_store(const EpCore& c, EpSumBuffers& b, const EpFarRing& to, ep_u32 bytes) {
    ep_written(0);
    ep_store(ep_far_ring_slot(c, to), b.note, bytes);
    SetFlag<HardEvent::MTE3_S>(1);
}

EP_DEV bool ep_gather_open(EpCore& c, EpSumBuffers& b, EpReducer& s) {
    if (!ep_gather_await_room(c, s)) return false;
    const EpOpHeader header = ep_header(c, s.to->slots - 1, 0);
    const uint32_t* words = (const uint32_t*)&header;
    WaitFlag<HardEvent::MTE3_S>(1);
    for (ep_u32 word = 0; word < sizeof(EpOpHeader) / 4; ++word) b.note.ReinterpretCast<uint32_t>().SetValue(word, words[word]);
    ep_gather_store(c, b, *s.to, sizeof(EpOpHeader));
    ep_far_ring_push(*s.to);
    return true;
}

/* Sums a token's rows into the next slot. */
EP_DEV void ep_gather_row(EpCore& c, EpSumBuffers& b, EpReducer& s, ep_u32 token, const EpFound& f, const float* weights) {
    const EpWindow& w = c.launch.r.w;
    const ep_u64 slot = ep_far_ring_slot(c, *s.to);
    WaitFlag<HardEvent::MTE3_S>(1);
    ep_write_row_header(c, b.note, token, s.to->slot - 1);
    for (ep_u32 k = 0; k < w.topk; ++k) ep_write_choice(b.note, k, EpChoice{-1, weights[k]});
    ep_gather_store(c, b, *s.to, (ep_u32)sizeof(EpRowHeader) + w.topk * (ep_u32)sizeof(EpChoice));
    for (ep_u64 at = 0; at < w.result_bytes; at += EP_SUM_BYTES) {
        const ep_u32 bytes = ep_min(w.result_bytes - at, EP_SUM_BYTES);
        ep_clear(c, b.sum, bytes);
        for (ep_u32 i = 0; i < f.rows; ++i) ep_add(c, b, b.sum, f.row[i] + at, bytes, false);
        ep_store_sum(c, b, slot + w.header_bytes + at, bytes);
    }
    ep_far_ring_push(*s.to);
}

EP_DEV void ep_gather_ring(EpCore& c, const EpCombineArgs& a, EpSumBuffers& b, ep_u32 node, ep_u32 channel) {
    const EpRank& r = c.launch.r;
    const ep_u32 source = ep_on_rail(c, node, r.me);
    if (!ep_takes_part(c, source)) return;
    const ep_u64 fanout = ep_at<uint64_t>(a.fanout, node);
    const ep_u32 batch = ep_at<uint32_t>(a.tokens_of, source), channels = c.launch.rings.channels;
    const ep_u32 begin = ep_channel_first(batch, channels, channel), end = ep_channel_first(batch, channels, channel + 1);
    ep_u32 rows = 0;
    for (ep_u32 token = begin; token < end; ++token) rows += ep_reached_here(c, fanout, token);
    EpFarRing to;
    ep_far_ring_begin(c, to, node, channel, 0, 1, rows);
    EpReducer s;
    s.to = &to;
    if (!ep_open_inlets(c, a, b, s, source, channel) || !ep_gather_open(c, b, s)) return;
    for (ep_u32 token = begin; token < end; ++token) {
        if (!ep_reached_here(c, fanout, token)) continue;
        float weights[EP_TOPK] = {};
        EpFound found;
        if (!ep_gather_await_room(c, s)) return;
        if (!ep_find_rows(c, a, b, s, token, EpFanoutPosition{c, fanout, token}, found, weights)) return;
        ep_gather_row(c, b, s, token, found, weights);
        ep_pop_found(c, s, found);
        if (to.filled - to.told >= c.far.chunk) ep_far_ring_tell(c, to);
    }
    ep_far_ring_tell(c, to);
    for (ep_u32 i = 0; i < s.rings; ++i) ep_inlet_close(c, s.from[i]);
}

#endif
