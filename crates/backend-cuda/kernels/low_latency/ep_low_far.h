/*
 * ep_low_far.h: what low latency sends to ranks of other nodes, where kernels are compiled with lanes between nodes. Every rank has lanes to every other.
 *
 *   staged   blocks write rows into staging memory of the own window: a part for each such rank, laid out as this rank's part of a bank there, and
 *            the headers that a dispatch sends ahead within a node (ep_low_far)
 *   counted  who has staged a row counts it, after a barrier behind all that it consists of; and so does who knows how many there are (EpLowFar.counted)
 *   posted   who counts the last one posts all: headers, rows, and the arrival behind them on the lane of the rows. So nobody waits for a block that has
 *            not begun. These rows have no cells: the arrival says that all are there
 *   F3       a barrier, a fence of the GPU and the count; the poster's fence, and that of the verb
 *   F4       who posts rows has EpLowFar.posting, who says whom this rank waits for EpLow.speaking; Received is posted by the last block
 *   F5       a part is written again when what was put from it was flushed: whoever looks whether a rank's bank is free looks for that, too
 *   F6       a lane that does not go on for a quarter of the time allowed is given up. Its rank was not sent all, as one whose bank was not free in
 *            time: the receiving half tries again, and then fails
 */
#ifndef EP_LOW_FAR_H
#define EP_LOW_FAR_H
#include "ep_low.h"

/* What EpLowFar.counted comes to when all rows are staged, and it is known how many there are. */
#define EP_LOW_TOLD 0x80000000u

#ifdef EP_FAR_H

EP_DEV EpLowFar* ep_low_far_of(const EpRank& r, ep_u32 peer) { return (EpLowFar*)r.cursors + peer; }

/* ---- staging memory ---- */

/* Where what lies `within` this rank's part of peer's bank is staged. */
EP_DEV EpAt ep_low_staged(const EpRank& r, ep_u32 peer, ep_u64 within) { return ep_low_at(r.me, ep_low_far(r.w, r.me, peer) + within); }
EP_DEV EpAt ep_low_staged_row(const EpRank& r, ep_u32 peer, ep_u32 token) { return ep_low_staged(r, peer, token * r.w.low_row_bytes); }
EP_DEV EpAt ep_low_staged_result(const EpRank& r, ep_u32 peer, ep_u32 token) {
    return ep_low_staged(r, peer, (ep_u64)token * r.w.low_columns * r.w.low_result_bytes);
}
EP_DEV EpAt ep_low_staged_head(const EpRank& r, ep_u32 peer, ep_u32 position) {
    return ep_low_at(r.me, ep_low_far_heads(r.w, r.me, peer) + position * r.w.header_bytes);
}

/* ---- one poster a lane ---- */

EP_DEV bool ep_low_try_posting(EpLowFar* far) {
    if (atomicCAS(&far->posting, 0u, 1u) != 0) return false;
    ep_fence_device();
    return true;
}
EP_DEV void ep_low_end_posting(EpLowFar* far) {
    ep_fence_device();
    atomicExch(&far->posting, 0u);
}

EP_DEV void ep_low_begin_speaking(const EpRank& r) {
    while (atomicCAS(&ep_low_state(r)->speaking, 0u, 1u) != 0) ep_nap(100);
    ep_fence_device();
}
EP_DEV void ep_low_end_speaking(const EpRank& r) {
    ep_fence_device();
    atomicExch(&ep_low_state(r)->speaking, 0u);
}

/* Looks whether the puts have read what is staged, if nobody else is at it. */
EP_RARE void ep_low_flush(const EpRank& r, ep_u32 peer) {
    EpLowFar* far = ep_low_far_of(r, peer);
    if (!ep_low_try_posting(far)) return;
    if (far->busy != 0) {
        const ep_u32 status = ep_far_flush(ep_far_lane(r, peer, EP_LANE_LOW_ROWS), far->ticket, 0);
        /* A lane that is broken reads nothing any more. */
        if (status != EP_FAR_TIMEOUT && status != EP_FAR_STALLED) *(volatile ep_u32*)&far->busy = 0;
    }
    ep_low_end_posting(far);
}

/* Whether a part of the staging memory may be written for op: nothing reads it, or everything was posted, and so is there. */
EP_DEV bool ep_low_may_stage(const EpRank& r, ep_u64 op, ep_u32 peer) {
    if (!ep_is_beyond(r, peer) || ep_planted(r, EP_PLANT_LOW_FAR_STAGING_EARLY)) return true;
    EpLowFar* far = ep_low_far_of(r, peer);
    const volatile ep_u32* busy = &far->busy;
    if (*busy != 0 && *(const volatile ep_u64*)&far->posted != op) {
        ep_low_flush(r, peer);
        if (*busy != 0) return false;
    }
    ep_fence_device();
    return true;
}

/* ---- counting and posting ---- */

/* Counts what is staged for a rank; true for whoever comes last, who posts it. After a barrier. */
EP_DEV bool ep_low_count_staged(const EpRank& r, ep_u32 peer, ep_u32 more, ep_u32 due) {
    ep_fence_device();
    if (atomicAdd(&ep_low_far_of(r, peer)->counted, more) + more != due) return false;
    ep_fence_device();
    return true;
}

/* For the next launch. By all threads of the last block. */
EP_DEV void ep_low_count_anew(const EpRank& r) {
    if (ep_one_node(r)) return;
    EP_SHORT for (ep_u32 peer = threadIdx.x; peer < r.w.ranks; peer += EP_LOW_THREADS) {
        EpLowFar* far = ep_low_far_of(r, peer);
        far->counted = 0;
        *(volatile ep_u32*)&far->status = EP_FAR_OK;
    }
}

/* Slots of a part that lie side by side. */
struct EpLowSpan {
    ep_u32 first, slots;
};
/* A poster finds so many rows at a time: their loads are under way together, where each would take as long as all. */
#define EP_LOW_FOUND 2

/* Says to a rank of another node how many rows come, behind them. By its poster. */
EP_DEV ep_u32 ep_low_post_arrival(const EpRank& r, ep_u64 op, ep_u32 kind, ep_u32 peer, ep_u32 results, ep_u64 until) {
    const ep_u32 counter = op % 2 ? EP_COUNTER_ODD : EP_COUNTER_EVEN;
    const ep_u64 value = ep_arrival(r.w, op, kind, results + (ep_planted(r, EP_PLANT_LOW_COUNT_OFF_BY_ONE) ? 1 : 0));
    if (!ep_posts(r, peer, EP_LANE_LOW_ROWS, value)) return EP_FAR_OK;
    const ep_u64 cell = ep_cell(r.w, r.generation, r.me, EP_LANE_LOW_ROWS, counter);
    return ep_far_publish(ep_far_lane(r, peer, EP_LANE_LOW_ROWS), cell, ep_stamp(r.generation, value), until);
}

/* Posts to a rank of another node what is staged for it: `rows` spans of slots of `bytes` each, ascending, of which those that touch are one put;
   headers, of a dispatch; and the arrival, of so many `results`. By whoever counted the last row. */
template <class F>
EP_DEV void ep_low_post(const EpRank& r, ep_u64 op, ep_u32 kind, ep_u32 peer, ep_u32 rows, ep_u32 results, ep_u64 bytes, F span) {
    EpLowFar* far = ep_low_far_of(r, peer);
    if (!ep_verb(r, EP_LANE_LOW_ROWS << 16 | peer, op)) return;
    const EpFar lane = ep_far_lane(r, peer, EP_LANE_LOW_ROWS);
    const ep_u64 until = ep_now() + r.allowed / 4, from = ep_low_far(r.w, r.me, peer);
    const ep_u64 to = ep_low_part(r.w, ep_planted(r, EP_PLANT_LOW_WRONG_BANK) ? op + 1 : op, r.me);
    while (!ep_low_try_posting(far)) ep_nap(100);
    *(volatile ep_u32*)&far->busy = 1;
    ep_u64 ticket = far->ticket;
    ep_u32 status = EP_FAR_OK;
    if (ep_planted(r, EP_PLANT_LOW_FAR_ARRIVAL_FIRST)) {
        status = ep_low_post_arrival(r, op, kind, peer, results, until);
        ep_be_slow();
    }
    if (kind == EP_LOW_DISPATCH && status == EP_FAR_OK)
        status = ep_far_put(lane, ep_low_far_heads(r.w, r.me, peer), ep_low_head(r.w, op, r.me, 0), rows * r.w.header_bytes, until, &ticket);
    EpLowSpan run = {0, 0};
    EP_SHORT for (ep_u32 base = 0; base <= rows && status == EP_FAR_OK; base += EP_LOW_FOUND) {
        EpLowSpan found[EP_LOW_FOUND];
#pragma unroll
        for (ep_u32 i = 0; i < EP_LOW_FOUND; ++i) found[i] = base + i < rows ? span(base + i) : EpLowSpan{0, 0};
#pragma unroll
        for (ep_u32 i = 0; i < EP_LOW_FOUND; ++i) {
            if (base + i > rows || status != EP_FAR_OK) continue;
            if (base + i < rows && found[i].first == run.first + run.slots) {
                run.slots += found[i].slots;
                continue;
            }
            status = ep_far_put(lane, from + run.first * bytes, to + run.first * bytes, run.slots * bytes, until, &ticket);
            run = found[i];
        }
    }
    if (status == EP_FAR_OK && !ep_planted(r, EP_PLANT_LOW_FAR_ARRIVAL_FIRST))
        status = ep_low_post_arrival(r, op, kind, peer, results, until);
    far->ticket = ticket;
    if (status == EP_FAR_OK) *(volatile ep_u64*)&far->posted = op;
    *(volatile ep_u32*)&far->status = status;
    ep_low_end_posting(far);
    if (status != EP_FAR_OK) ep_low_skip(r, peer);
}

/* Posts the rows of a dispatch. Their tokens are in the headers that are staged beside them. */
EP_RARE void ep_low_post_rows(const EpRank& r, ep_u64 op, ep_u32 peer) {
    const ep_u32 rows = ep_low_far_of(r, peer)->rows;
    const ep_u8* heads = ep_low_own(r) + ep_low_far_heads(r.w, r.me, peer);
    ep_low_post(r, op, EP_LOW_DISPATCH, peer, rows, rows, r.w.low_row_bytes, [&](ep_u32 row) {
        return EpLowSpan{((const EpRowHeader*)(heads + row * r.w.header_bytes))->source_token, 1};
    });
}

/* The row of a dispatch is staged for a rank of another node. By one thread, after a barrier. */
EP_DEV void ep_low_staged_one(const EpRank& r, ep_u64 op, ep_u32 peer) {
    if (ep_low_count_staged(r, peer, 1, EP_LOW_TOLD)) ep_low_post_rows(r, op, peer);
}
/* So many there are of a dispatch, and their headers are staged. By one thread, after a barrier. */
EP_DEV void ep_low_staged_all(const EpRank& r, ep_u64 op, ep_u32 peer, ep_u32 rows) {
    ep_low_far_of(r, peer)->rows = rows;
    if (ep_low_count_staged(r, peer, EP_LOW_TOLD - rows, EP_LOW_TOLD)) ep_low_post_rows(r, op, peer);
}

/* A planted fault: what has come counts as read, and is read much later. By all threads. */
EP_DEV void ep_low_receive_early(const EpRank& r, ep_u64 op) {
    if (!ep_planted(r, EP_PLANT_LOW_FAR_RECEIVED_EARLY)) return;
    EP_SHORT for (ep_u32 peer = ep_low_served(); blockIdx.x == 0 && peer < r.w.ranks; peer += EP_LOW_THREADS)
        if (ep_is_beyond(r, peer) && ep_low_takes_part(peer)) ep_low_publish(r, peer, EP_LANE_LOW_DONE, EP_COUNTER_RECEIVED, op);
    /* Longer than the network of kernels for tests takes. */
    EP_SHORT for (ep_u32 i = 0; i < 8; ++i) ep_be_last(r);
}

/* ---- who waits ---- */

/* What is wrong with the lanes to a rank, as far as it is known: EP_FAR_... That of whoever posts, too, once a long wait has
   found out. */
EP_RARE ep_u32 ep_low_far_trouble(const EpRank& r, ep_u32 peer) {
    const ep_u32 poster = ep_ld_relaxed(&ep_low_state(r)->poster);
    if (poster != 0) return poster;
    if (!ep_is_beyond(r, peer)) return EP_FAR_OK;
    const ep_u32 posted = *(const volatile ep_u32*)&ep_low_far_of(r, peer)->status;
    /* A lane that is full is the peer's affair as long as whoever posts goes on. */
    if (posted == EP_FAR_STALLED && ep_far_poster(r) == EP_FAR_OK) return EP_FAR_TIMEOUT;
    if (posted != EP_FAR_OK) return posted;
    const ep_u32 rows = ep_far_poll(ep_far_lane(r, peer, EP_LANE_LOW_ROWS));
    return rows != EP_FAR_OK ? rows : ep_far_trouble(r, peer);
}
/* Whether a wait for a rank is vain for other reasons than time: a lane to it does not go on, or somebody gives up another rank. */
EP_RARE bool ep_low_is_cut(const EpRank& r, ep_u32 peer) { return ep_low_far_trouble(r, peer) != EP_FAR_OK || ep_low_verdict(r) != 0; }

#else

EP_DEV EpAt ep_low_staged_row(const EpRank&, ep_u32, ep_u32) { return ep_nowhere(); }
EP_DEV EpAt ep_low_staged_result(const EpRank&, ep_u32, ep_u32) { return ep_nowhere(); }
EP_DEV EpAt ep_low_staged_head(const EpRank&, ep_u32, ep_u32) { return ep_nowhere(); }
EP_DEV void ep_low_begin_speaking(const EpRank&) {}
EP_DEV void ep_low_end_speaking(const EpRank&) {}
EP_DEV bool ep_low_may_stage(const EpRank&, ep_u64, ep_u32) { return true; }
EP_DEV void ep_low_count_anew(const EpRank&) {}
EP_DEV void ep_low_receive_early(const EpRank&, ep_u64) {}
EP_DEV void ep_low_staged_one(const EpRank&, ep_u64, ep_u32) {}
EP_DEV void ep_low_staged_all(const EpRank&, ep_u64, ep_u32, ep_u32) {}
EP_DEV ep_u32 ep_low_far_trouble(const EpRank&, ep_u32) { return 0; }
EP_DEV bool ep_low_is_cut(const EpRank&, ep_u32) { return false; }

#endif
#endif
