/*
 * ep_low_return.h: the sending half of a low-latency combine: the experts' results back to the tokens' ranks, into this rank's part of their banks: a row
 * for each choice, in a column of the token's; or the weighted sum of the token's choices here, choices ascending. Every share is a part of the rows of
 * one rank.
 *
 *   UB      two buffers for rows (ep_rows.h), and those of sums (ep_fma.h)
 */
#ifndef EP_LOW_RETURN_H
#define EP_LOW_RETURN_H
#include "ep_fma.h"
#include "ep_low_send.h"

#define EP_LOW_RETURN_BYTES (EP_ROWS_BYTES + EP_FMA_BYTES)
static_assert(EP_LOW_RETURN_BYTES + EP_COMMON_BYTES <= EP_UB_BYTES, "the buffers of returners in low latency");

struct EpLowReturner {
    EpBuffers b;
    EpFma sum;
};

/* What is kept of a row. */
struct EpLowKept {
    ep_u32 token, picks;
    ep_u32 place[EP_TOPK];
    float weight[EP_TOPK];
};

EP_DEV void ep_low_load_kept(EpCore& c, const EpLowArgs& a, EpLowReturner& s, ep_u32 source, ep_u32 row, EpLowKept& kept) {
    const EpWindow& w = c.launch.r.w;
    const ep_u32 i = ep_turn(c, s.b);
    ep_load(s.b.side[i], ep_low_record(w, a.records, source, row), ep_low_record_bytes(w));
    ep_read(c, i);
    const EpBytes picks = s.b.side[i][sizeof(EpLowRow)];
    kept.token = s.b.side[i].ReinterpretCast<uint32_t>().GetValue(0);
    kept.picks = 0;
    for (ep_u32 k = 0; k < w.topk; ++k) {
        const ep_i32 place = picks.ReinterpretCast<int32_t>().GetValue(2 * k);
        if (place < 0) continue;
        kept.place[kept.picks] = (ep_u32)place;
        kept.weight[kept.picks++] = picks.ReinterpretCast<float>().GetValue(2 * k + 1);
    }
    ep_turn_over(c, s.b);
}

/* Puts the header of a result to its slot. */
EP_DEV void ep_low_put_result_header(EpCore& c, EpLowReturner& s, ep_u64 to, ep_u32 token, ep_u32 column) {
    const ep_u32 i = ep_turn(c, s.b);
    ep_low_write_header(c, s.b.side[i], token, column);
    if (!EP_PLANTED(c, LOW_RESULT_HEADER_FLAG)) ep_written(i);
    ep_store(to, s.b.side[i], sizeof(EpRowHeader));
    ep_turn_over(c, s.b);
}

/* Puts the result of one choice. */
EP_DEV void ep_low_put_choice(EpCore& c, const EpLowArgs& a, EpLowReturner& s, ep_u64 to, ep_u32 place) {
    const ep_u64 all = c.launch.r.w.result_bytes;
    for (ep_u64 at = 0; at < all; at += EP_PIECE_BYTES) {
        const ep_u32 i = ep_turn(c, s.b), bytes = ep_min(all - at, EP_PIECE_BYTES);
        ep_load(s.b.payload[i], a.x + place * a.x_stride + at, bytes);
        ep_filled(c, i);
        ep_store(to + at, s.b.payload[i], bytes);
        ep_turn_over(c, s.b);
    }
}

/* Puts the weighted sum of a token's choices here. */
EP_DEV void ep_low_put_sum(EpCore& c, const EpLowArgs& a, EpLowReturner& s, ep_u64 to, const EpLowKept& kept) {
    const ep_u32 hidden = c.launch.r.w.hidden;
    for (ep_u32 at = 0; at < hidden; at += EP_FMA_ELEMENTS) {
        const ep_u32 n = ep_min(hidden - at, EP_FMA_ELEMENTS);
        ep_fma_clear(s.sum, n);
        for (ep_u32 pick = 0; pick < kept.picks; ++pick) {
            ep_fma_load(c, s.sum, a.x + kept.place[pick] * a.x_stride + (ep_u64)at * 2, n);
            ep_fma_step(c, s.sum, EP_PLANTED(c, LOW_WEIGHTS_LOST) ? 1.0f : kept.weight[pick], n);
        }
        ep_fma_settle(c, s.sum, n);
        ep_fma_store(c, s.sum, to + (ep_u64)at * 2, n);
    }
}

/* The shares of a combine. */
struct EpLowResults {
    /* Who is owed nothing does not wait. */
    static constexpr bool kAlways = false;
    EpCore& c;
    const EpLowArgs& a;
    EpLowReturner& s;
    EP_DEV void count(ep_u32) const {}
    EP_DEV ep_u32 put(EpLowWay& way) const {
        const EpWindow& w = c.launch.r.w;
        const ep_u32 peer = way.peer, nth = way.share % ep_low_each(c);
        const ep_u32 rows = ep_at<uint32_t>(a.records, peer), last = ep_low_first(c, rows, nth + 1);
        for (ep_u32 row = ep_low_first(c, rows, nth); row < last; ++row) {
            EpLowKept kept;
            ep_low_load_kept(c, a, s, peer, row, kept);
            const ep_u32 columns = a.kind == EP_LOW_PER_RANK ? (kept.picks > 0 ? 1 : 0) : kept.picks;
            for (ep_u32 column = 0; column < columns; ++column) {
                const ep_u64 slot = ep_low_result(w, ep_low_put_op(c), c.launch.r.me, kept.token, EP_PLANTED(c, LOW_ONE_COLUMN) ? 0 : column);
                const ep_u64 to = way.base + slot, payload = to + w.low_result_header_bytes;
                ep_low_put_result_header(c, s, to, kept.token, column);
                if (a.kind == EP_LOW_PER_RANK) ep_low_put_sum(c, a, s, payload, kept);
                else ep_low_put_choice(c, a, s, payload, kept.place[column]);
                ep_low_way_push(c, a, way, slot);
            }
        }
        return way.put;
    }
};

EP_DEV void ep_low_return(EpCore& c, const EpLowArgs& a, const EpBytes& ub) {
    EpLowReturner s;
    ep_open_buffers(c, s.b, ub);
    ep_open_fma(s.sum, ub[EP_ROWS_BYTES]);
    ep_low_serve_all(c, a, EpLowResults{c, a, s});
    ep_close_fma();
    ep_close_buffers(c);
}

#endif
