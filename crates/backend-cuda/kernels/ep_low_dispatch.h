/*
 * ep_low_dispatch.h: what both halves of the low-latency dispatch share: parameters, and where their shared memory begins.
 */
#ifndef EP_LOW_DISPATCH_H
#define EP_LOW_DISPATCH_H
#include "ep_low.h"

struct EpLowDispatchArgs {
    ep_u64 x;             /* bf16 [tokens, hidden], rows x_stride bytes apart */
    ep_u64 x_stride;
    ep_u64 topk_idx;      /* i64 [tokens, topk]: experts over all ranks, or -1 */
    ep_u64 topk_weights;  /* f32 [tokens, topk], or 0: weights of 1 */
    ep_u64 routed;        /* out, of the sender: u32 [2, ranks]: rows to each rank, choices of its experts; 0 for masked ranks */
    ep_u64 out;           /* out: [local experts, ranks * max_tokens] rows, out_stride bytes apart: as they travelled, or codes alone */
    ep_u64 out_stride;
    ep_u64 expert_counts; /* out: i32 [local experts] */
    ep_u64 segments;      /* out: i64 [local experts, ranks]: first << 32 | rows */
    ep_u64 source_token;  /* out: i32 [local experts, ranks * max_tokens] */
    ep_u64 records;       /* out: what the combine needs, see ep_low_record */
    ep_u64 counters;      /* u64 [4 * ranks + local experts + 1], added to: rows of dispatches sent, received; of combines; of
                             experts; operations */
    ep_u64 scales;        /* out: scales of their own, or 0 where they follow the codes in out; words of 4 bytes: an f32, or 4 UE8M0 */
    ep_u64 scales_expert; /* bytes from one expert's scales to the next's */
    ep_u64 scales_row;    /* bytes from one row's scales to the next's */
    ep_u64 scales_word;   /* bytes from one word to the next */
    ep_u64 kept_idx;      /* out, of the sender: i64 [tokens, topk], topk_idx as it was; or 0 */
    ep_u64 stats;         /* i32 [local experts], to which expert_counts are added; or 0 */
    ep_u32 tokens;
    ep_u32 phases;
    ep_u32 in_flight;     /* operations that were sent and not received when it was enqueued */
    ep_u32 reserved;
};
EP_CHECK_ARGS(EpLowDispatchArgs);

/* Shared memory: the windows' addresses, u64 [ranks], then that of either half. */
EP_DEV ep_u8* ep_low_pool(const EpRank& r) { return ep_pool + r.w.ranks * 8; }
#endif
