/*
 * ep_low_reduce.h: the receiving half of a low-latency combine: sums what came back for each token of this rank: a row for each choice, weighted, choices
 * ascending; or a row for each rank, ranks ascending. Cores serve tokens by turns.
 *
 *   UB      two headers, and the buffers of sums (ep_fma.h)
 *   waits   for all ranks that owe something, one after the other; nobody waits for this core
 */
#ifndef EP_LOW_REDUCE_H
#define EP_LOW_REDUCE_H
#include "ep_fma.h"
#include "ep_low.h"

#define EP_LOW_REDUCE_BYTES (32 + EP_FMA_BYTES)
static_assert(EP_LOW_REDUCE_BYTES + EP_COMMON_BYTES <= EP_UB_BYTES, "the buffers of reducers in low latency");

/* Rows of results that a rank owes. */
EP_DEV ep_u32 ep_low_owed(const EpCore& c, const EpLowArgs& a, ep_u32 rank) {
    return ep_at<uint32_t>(a.counted, a.kind == EP_LOW_PER_RANK ? rank : c.launch.r.w.ranks + rank);
}

/* Waits for all that is owed. */
EP_DEV bool ep_low_await_results(EpCore& c, const EpLowArgs& a) {
    for (ep_u32 rank = 0; rank < c.launch.r.w.ranks; ++rank) {
        const ep_u32 owed = ep_low_owed(c, a, rank);
        if (rank == c.launch.r.me || owed == 0 || !ep_takes_part(c, rank)) continue;
        ep_u32 rows;
        if (!ep_low_arrived(c, a, rank, rows)) return false;
        if (a.out != 0 && rows != owed) {
            ep_refuse(c, rank, EP_LOW_FIELD_RESULTS, owed, rows);
            return false;
        }
    }
    return true;
}

/* Looks at the header of a result; where its payload lies, or 0. */
EP_DEV ep_u64 ep_low_find_result(EpCore& c, const EpBytes& head, ep_u32 rank, ep_u32 token, ep_u32 column) {
    const EpWindow& w = c.launch.r.w;
    const ep_u64 at = c.own + ep_low_result(w, c.op, rank, token, column);
    ep_load(head, at, sizeof(EpRowHeader));
    ep_read(c, 0);
    ep_u32 theirs;
    if (!ep_low_check(c, head, rank, theirs)) return 0;
    if (theirs != token) {
        ep_refuse(c, rank, EP_LOW_FIELD_ROW_TOKEN, token, theirs);
        return 0;
    }
    return at + w.low_result_header_bytes;
}

/* The results of a token, in the order in which they are added. */
struct EpLowFound {
    ep_u64 row[EP_TOPK];
    float weight[EP_TOPK];
    ep_u32 rows;
};

/* The number of a choice, which names its expert first, among the choices of that expert's rank. */
EP_DEV ep_u32 ep_low_column(const EpCore& c, const EpLowArgs& a, ep_u32 token, ep_u32 first, ep_u32 rank) {
    ep_u32 column = 0;
    for (ep_u32 k = 0; k < first; ++k)
        if (ep_low_rank_of(c, a, token, k) == rank && ep_low_first_mention(c, a, token, k) == k) ++column;
    return column;
}

EP_DEV bool ep_low_find(EpCore& c, const EpLowArgs& a, const EpBytes& head, ep_u32 token, EpLowFound& found) {
    const EpWindow& w = c.launch.r.w;
    found.rows = 0;
    if (a.kind == EP_LOW_PER_RANK) {
        for (ep_u32 rank = 0; rank < w.ranks; ++rank) {
            if (!ep_takes_part(c, rank) || ep_at<int32_t>(a.position, (ep_u64)token * w.ranks + rank) < 0) continue;
            const ep_u64 row = ep_low_find_result(c, head, rank, token, 0);
            if (row == 0) return false;
            found.row[found.rows++] = row;
        }
        return true;
    }
    for (ep_u32 k = 0; k < w.topk; ++k) {
        const ep_u32 rank = ep_low_rank_of(c, a, token, k);
        if (rank == w.ranks || !ep_takes_part(c, rank)) continue;
        const ep_u32 column = ep_low_column(c, a, token, ep_low_first_mention(c, a, token, k), rank);
        const ep_u64 row = ep_low_find_result(c, head, rank, token, column);
        if (row == 0) return false;
        found.weight[found.rows] = ep_at<float>(a.topk_weights, (ep_u64)token * w.topk + k);
        found.row[found.rows++] = row;
    }
    return true;
}

EP_DEV void ep_low_sum(EpCore& c, const EpLowArgs& a, EpFma& b, ep_u32 token, const EpLowFound& found) {
    const ep_u32 hidden = c.launch.r.w.hidden;
    const bool weighs = a.kind == EP_LOW_PER_CHOICE;
    for (ep_u32 at = 0; at < hidden; at += EP_FMA_ELEMENTS) {
        const ep_u32 n = ep_min(hidden - at, EP_FMA_ELEMENTS);
        ep_fma_clear(b, n);
        for (ep_u32 i = 0; i < found.rows; ++i) {
            ep_fma_load(c, b, found.row[i] + (ep_u64)at * 2, n);
            if (weighs) ep_fma_step(c, b, found.weight[i], n);
            else ep_fma_add(b, n);
        }
        if (weighs) ep_fma_settle(c, b, n);
        ep_fma_store(c, b, a.out + token * a.out_stride + (ep_u64)at * 2, n);
    }
}

EP_DEV void ep_low_reduce(EpCore& c, const EpLowArgs& a, const EpBytes& ub) {
    EpFma sum;
    ep_open_fma(sum, ub[32]);
    if (ep_low_await_results(c, a) && a.out != 0)
        for (ep_u32 token = ep_low_worker(c); token < a.tokens; token += ep_low_workers(c)) {
            EpLowFound found;
            if (!ep_low_find(c, a, ub, token, found)) break;
            ep_low_sum(c, a, sum, token, found);
        }
    ep_close_fma();
}

#endif
