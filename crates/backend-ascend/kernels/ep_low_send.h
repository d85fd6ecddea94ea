/*
 * ep_low_send.h: the sending half of a low-latency dispatch: each token once to every rank that holds one of its experts, into this rank's part of
 * that rank's bank, at the row's position. Every share serves one rank; rows are quantised on the way.
 *
 *   UB      two buffers for rows (ep_rows.h), and those of a quantiser where rows are INT8
 *   waits   for no rank in particular: what goes to ranks whose banks are free is not held up by the others
 */
#ifndef EP_LOW_SEND_H
#define EP_LOW_SEND_H
#include "ep_low.h"
#include "ep_quantize.h"

#define EP_LOW_SEND_BYTES (EP_ROWS_BYTES + EP_QUANT_BYTES)
static_assert(EP_LOW_SEND_BYTES + EP_COMMON_BYTES <= EP_UB_BYTES, "the buffers of senders in low latency");

struct EpLowSender {
    EpBuffers rows;
    EpQuantizer quantizer;
};

/* A core's word: what it had for a rank was not put. */
#define EP_LOW_LEFT 0xffffffffu
/* The same of a rank of another server, and why: EP_LOW_LATE or what comes behind it. */
EP_DEV ep_u32 ep_low_left_for(ep_u32 state) { return EP_LOW_LEFT - state; }
EP_DEV ep_u32 ep_low_why_left(ep_u32 word) { return word >= EP_LOW_LEFT - EP_LOW_GONE ? EP_LOW_LEFT - word : EP_LOW_SENT; }

/* The ranks that a core serves. */
struct EpLowTurns {
    bool done[EP_RANKS];
};

/* A share's rank: another first for every rank, so that not all serve the same. */
EP_DEV ep_u32 ep_low_peer(const EpCore& c, ep_u32 share) { return (share / ep_low_each(c) + c.launch.r.me + 1) % c.launch.r.w.ranks; }
/* A rank's first share. */
EP_DEV ep_u32 ep_low_share(const EpCore& c, ep_u32 peer) {
    const ep_u32 ranks = c.launch.r.w.ranks;
    return (peer + ranks - c.launch.r.me - 1) % ranks * ep_low_each(c);
}

/* Writes a row's header and choices, as all ranks name experts. An expert that is named again gets the row once. */
EP_DEV void ep_low_write_row_header(const EpCore& c, const EpLowArgs& a, const EpBytes& ub, ep_u32 token) {
    const EpWindow& w = c.launch.r.w;
    ep_low_write_header(c, ub, token, 0);
    for (ep_u32 k = 0; k < w.topk; ++k) {
        EpChoice choice = {-1, 0.0f};
        if (ep_low_rank_of(c, a, token, k) < w.ranks && ep_low_first_mention(c, a, token, k) == k) {
            choice.expert = (ep_i32)ep_low_expert(c, a, token, k);
            choice.weight = a.topk_weights ? ep_at<float>(a.topk_weights, (ep_u64)token * w.topk + k) : 1.0f;
        }
        ep_write_choice(ub, k, choice);
    }
}

/* Zeros between the codes of a row and its scale. */
EP_DEV void ep_low_pad(EpCore& c, ep_u64 payload) {
    const EpWindow& w = c.launch.r.w;
    for (ep_u64 at = w.hidden; at < w.scales_offset && !EP_PLANTED(c, LOW_PAD_LEFT); at += 8)
        ep_store_word(c, payload + at, 0, ep_min(w.scales_offset - at, 8));
}

/* Puts a token's row to where it goes. */
EP_DEV void ep_low_put_row(EpCore& c, const EpLowArgs& a, EpLowSender& s, ep_u32 token, ep_u64 to) {
    const EpWindow& w = c.launch.r.w;
    EpBuffers& b = s.rows;
    const ep_u64 x = a.x + token * a.x_stride, payload = to + w.header_bytes;
    ep_u32 i = ep_turn(c, b);
    ep_low_write_row_header(c, a, b.side[i], token);
    ep_written(i);
    ep_store(to, b.side[i], (ep_u32)sizeof(EpRowHeader) + w.topk * (ep_u32)sizeof(EpChoice));
    if (w.element == EP_ELEMENT_INT8) {
        ep_turn_over(c, b);
        ep_quantize_row(c, s.quantizer, x, payload);
        return ep_low_pad(c, payload);
    }
    for (ep_u64 at = 0; at < w.payload_bytes; at += EP_PIECE_BYTES) {
        if (at > 0) i = ep_turn(c, b);
        if (at > 0 && EP_PLANTED(c, LOW_FIRST_PIECE)) {
            ep_turn_over(c, b);
            return;
        }
        const ep_u32 bytes = ep_min(w.payload_bytes - at, EP_PIECE_BYTES);
        ep_load(b.payload[i], x + at, bytes);
        ep_filled(c, i);
        if (EP_PLANTED(c, LOW_WHOLE_BLOCKS)) ep_store_blocks(payload + at, b.payload[i], bytes);
        else ep_store(payload + at, b.payload[i], bytes);
        ep_turn_over(c, b);
    }
}

/* Puts a share's rows to a rank; how many. */
EP_DEV ep_u32 ep_low_put_rows(EpCore& c, const EpLowArgs& a, EpLowSender& s, EpLowWay& way) {
    const EpWindow& w = c.launch.r.w;
    for (ep_u32 token = 0; token < a.tokens; ++token) {
        const ep_i32 position = ep_at<int32_t>(a.position, (ep_u64)token * w.ranks + way.peer);
        if (position < 0 || (ep_u32)position % ep_low_each(c) != way.share % ep_low_each(c)) continue;
        const ep_u64 row = ep_low_row(w, ep_low_put_op(c), c.launch.r.me, (ep_u32)position);
        ep_low_put_row(c, a, s, token, way.base + row);
        ep_low_way_push(c, a, way, row);
    }
    return way.put;
}

/* Counts what goes to a rank: rows, and choices of its experts, each expert once a token. */
EP_DEV void ep_low_count(EpCore& c, const EpLowArgs& a, ep_u32 peer) {
    const EpWindow& w = c.launch.r.w;
    ep_u32 rows = 0, picks = 0;
    for (ep_u32 token = 0; token < a.tokens; ++token) {
        if (ep_at<int32_t>(a.position, (ep_u64)token * w.ranks + peer) < 0) continue;
        ++rows;
        for (ep_u32 k = 0; k < w.topk; ++k)
            if (ep_low_rank_of(c, a, token, k) == peer && ep_low_first_mention(c, a, token, k) == k) ++picks;
    }
    ep_store_word(c, a.counted + peer * 4, rows, 4);
    ep_store_word(c, a.counted + (w.ranks + peer) * 4, picks, 4);
}

/* All that this rank has for another in this operation: what `Half` puts (put) by shares, of which each says how many rows; and what it says when all
   of them have landed. */
template <class Half> EP_DEV void ep_low_serve(EpCore& c, const EpLowArgs& a, const Half& half, ep_u32 share, ep_u32 peer) {
    const ep_u32 each = ep_low_each(c), nth = share % each;
    if (EP_PLANTED(c, LOW_TOLD_EARLY) && a.kind == EP_LOW_DISPATCH && peer != c.launch.r.me && ep_is_near(c, peer))
        ep_low_announce(c, a, peer, ep_fresh<uint32_t>(a.counted + peer * 4));
    EpLowWay way = ep_low_way(c, a, peer, share);
    ep_u32 rows = half.put(way);
    ep_landed(c);
    /* The rest is said by the core that posts. */
    if (way.far) {
        ep_low_way_tell(c, a, way);
        return ep_low_tell(c, a, share, rows);
    }
    if (nth != 0) return ep_low_tell(c, a, share, rows);
    for (ep_u32 other = 1; other < each; ++other) {
        ep_u32 more = 0;
        if (!EP_PLANTED(c, LOW_HELPERS_UNAWAITED) && !ep_low_await_word(c, a, share + other, more)) return;
        if (more == EP_LOW_LEFT) return ep_store_word(c, a.state + peer * 4, EP_LOW_LATE, 4);
        rows += more;
    }
    if (peer != c.launch.r.me && (rows > 0 || Half::kAlways)) ep_low_announce(c, a, peer, rows);
    ep_store_word(c, a.state + peer * 4, EP_LOW_SENT, 4);
}

/* A rank is given up. In a half that judges, that is a failure; else the receiving half tells. */
EP_DEV void ep_low_give_up(EpCore& c, const EpLowArgs& a, ep_u32 share, ep_u32 peer, ep_u32 state) {
    if (a.judges)
        return ep_stop(c, state == EP_LOW_MASKED ? EP_STATUS_MASKED : EP_STATUS_GONE,
                       EpDetail{peer, EP_PHASE_BANK, EP_LANE_LOW_DONE, 0, 0, c.op - 2});
    if (!ep_is_near(c, peer)) ep_low_tell(c, a, share, ep_low_left_for(state));
    else if (share % ep_low_each(c) == 0) ep_store_word(c, a.state + peer * 4, state, 4);
    else ep_low_tell(c, a, share, EP_LOW_LEFT);
}

/* Serves the ranks of this core's shares as their banks become free. */
template <class Half> EP_DEV void ep_low_serve_all(EpCore& c, const EpLowArgs& a, const Half& half) {
    const ep_u32 workers = ep_low_workers(c), shares = ep_low_shares(c);
    EpLowTurns turns;
    for (ep_u32 share = ep_low_worker(c), i = 0; share < shares; share += workers, ++i) {
        const ep_u32 peer = ep_low_peer(c, share);
        turns.done[i] = (a.to >> peer & 1) == 0;
        if (!turns.done[i] && share % ep_low_each(c) == 0) half.count(peer);
    }
    for (;;) {
        bool moved = false;
        ep_u32 open = c.launch.r.w.ranks;
        const bool gives_up = c.idle % 16 == 15;
        for (ep_u32 share = ep_low_worker(c), i = 0; share < shares && !c.failed; share += workers, ++i) {
            const ep_u32 peer = ep_low_peer(c, share);
            if (turns.done[i]) continue;
            const ep_u32 state = ep_low_bank(c, a, peer, gives_up);
            if (state == EP_LOW_WAITING) {
                open = peer;
                continue;
            }
            turns.done[i] = moved = true;
            if (state == EP_LOW_SENT) ep_low_serve(c, a, half, share, peer);
            else ep_low_give_up(c, a, share, peer, state);
        }
        if (c.failed || open == c.launch.r.w.ranks) return;
        if (moved) ep_moved(c);
        else if (ep_low_idle(c, open, EP_LANE_LOW_DONE, EP_PHASE_BANK, c.op - 2)) return;
    }
}

/* The shares of a dispatch. */
struct EpLowTokens {
    static constexpr bool kAlways = true;
    EpCore& c;
    const EpLowArgs& a;
    EpLowSender& s;
    EP_DEV void count(ep_u32 peer) const { ep_low_count(c, a, peer); }
    EP_DEV ep_u32 put(EpLowWay& way) const { return ep_low_put_rows(c, a, s, way); }
};

EP_DEV void ep_low_send(EpCore& c, const EpLowArgs& a, const EpBytes& ub) {
    EpLowSender s;
    ep_open_buffers(c, s.rows, ub);
    ep_open_quantizer(s.quantizer, ub[EP_ROWS_BYTES]);
    ep_low_serve_all(c, a, EpLowTokens{c, a, s});
    ep_close_quantizer();
    ep_close_buffers(c);
}

#endif
