/*
 * ep_low_far_results.h: results of the low-latency combine that go to ranks of other nodes (ep_low_far.h).
 */
#ifndef EP_LOW_FAR_RESULTS_H
#define EP_LOW_FAR_RESULTS_H
#include "ep_low_far.h"
#include "ep_low_rows.h"

#ifdef EP_FAR_H

/* Posts the results of a combine. Their tokens, and how many there are of each, are in the records of the dispatch. */
EP_RARE void ep_low_post_results(const EpRank& r, const EpLowCombineArgs& a, ep_u64 op, ep_u32 peer) {
    const ep_u32 *counts = (const ep_u32*)a.records, rows = counts[peer];
    const ep_u32 results = a.kind == EP_LOW_PER_RANK ? rows : counts[r.w.ranks + peer];
    ep_low_post(r, op, a.kind, peer, rows, results, r.w.low_result_bytes, [&](ep_u32 row) {
        const EpLowRow* record = (const EpLowRow*)ep_low_record(r, a.records, peer, row);
        const EpLowPick* picks = (const EpLowPick*)(record + 1);
        ep_u32 slots = a.kind == EP_LOW_PER_RANK ? 1 : 0;
        if (slots == 0) EP_SHORT for (ep_u32 k = 0; k < r.w.topk; ++k) slots += picks[k].row >= 0;
        return EpLowSpan{record->token * (ep_u32)r.w.low_columns, slots};
    });
}

/* All that this rank has for a token is staged for a rank of another node. By one thread, after a barrier. */
EP_DEV void ep_low_staged_result_one(const EpRank& r, const EpLowCombineArgs& a, ep_u64 op, ep_u32 peer) {
    if (ep_low_count_staged(r, peer, 1, ((const ep_u32*)a.records)[peer])) ep_low_post_results(r, a, op, peer);
}

#else

EP_DEV void ep_low_staged_result_one(const EpRank&, const EpLowCombineArgs&, ep_u64, ep_u32) {}

#endif
#endif
