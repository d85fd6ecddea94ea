/*
 * ep_low_headers.h: what the sending half of the low-latency dispatch says ahead of its rows: their headers, in order, and how many.
 *
 * One block does it, as it needs to look at all choices; so does every block, to know whether they are right.
 */
#ifndef EP_LOW_HEADERS_H
#define EP_LOW_HEADERS_H
#include "ep_low_banks.h"

/* Tokens that the announcing block counts at a time, in words of 32. */
#define EP_LOW_WORDS (EP_LOW_THREADS / 32)

/* Shared memory of the sending half. */
struct EpLowSender {
    EpAt* place;   /* [ranks]: where the row at hand goes, or nowhere */
    ep_u32* state; /* [ranks] */
    ep_u8* row;    /* as it travels */
    /* Of the announcing block: */
    ep_u32* rows;   /* [ranks]: rows to each */
    ep_u32* picks;  /* [ranks]: choices of each rank's experts */
    ep_u32* member; /* [ranks, EP_LOW_WORDS]: tokens that go to each rank, as bits */
    ep_u32* before; /* [ranks, EP_LOW_WORDS]: rows to each rank of the tokens before those of the word */
};
EP_DEV EpLowSender ep_low_sender(const EpRank& r) {
    const ep_u32 ranks = r.w.ranks;
    EpLowSender s;
    s.place = (EpAt*)ep_low_pool(r);
    s.state = (ep_u32*)(s.place + ranks);
    s.rows = s.state + ranks;
    s.picks = s.rows + ranks;
    s.member = s.picks + ranks;
    s.before = s.member + ranks * EP_LOW_WORDS;
    s.row = ep_pool + (ranks * (28 + 8 * EP_LOW_WORDS) + 127) / 128 * 128;
    return s;
}

/* Looks at the choices of `count` tokens from `base` on, a choice a lane: true where one of this lane's is wrong; the least such token
   goes to `wrong`, where it is given. `keeps`: of the announcing block, which notes where the tokens go and, if `counts`, how often. By all
   threads. */
EP_DEV bool ep_low_look_at(const EpRank& r, const EpLowDispatchArgs& a, const EpLowSender& s, ep_u32 base, ep_u32 count, bool keeps,
                           bool counts, ep_u32* wrong) {
    const ep_u32 lane = threadIdx.x % 32, topk = r.w.topk, width = 32 / topk, in_warp = lane / topk;
    bool any = false;
    EP_SHORT for (ep_u32 first = threadIdx.x / 32 * width; first < count; first += EP_LOW_WARPS * width) {
        const ep_u32 token = first + in_warp;
        const bool serves = in_warp < width && token < count;
        const ep_i64 choice = serves ? ((const ep_i64*)a.topk_idx)[(ep_u64)base * topk + token * topk + lane % topk] : -1;
        const ep_u32 expert = (ep_u32)choice;
        const bool names = choice >= 0 && choice < (ep_i64)r.w.experts;
        /* Choices of the same expert by the same token; lanes without one are alone: there are fewer than 2^16 experts and 2^5 tokens. */
        const ep_u32 same = __match_any_sync(EP_FULL, names ? in_warp * r.w.experts + expert : EP_FULL - lane);
        const bool bad = choice < -1 || choice >= (ep_i64)r.w.experts || (a.repeats == 0 && (same & (same - 1)) != 0);
        if (bad && wrong) atomicMin(wrong, base + token);
        any |= bad;
        if (!keeps || !names) continue;
        const ep_u32 rank = ep_rank_of_expert(r.w, expert);
        if (!ep_low_takes_part(rank)) continue;
        atomicOr(s.member + rank * EP_LOW_WORDS + token / 32, 1u << token % 32);
        /* However often an expert is named, it has one result. */
        if (counts && (same & ((1u << lane) - 1)) == 0) atomicAdd(s.picks + rank, 1u);
    }
    return any;
}

/* Whether choice k of a token names an expert that an earlier one has named. */
EP_RARE bool ep_low_is_repeated(const EpRank& r, const EpLowDispatchArgs& a, ep_u32 token, ep_u32 k) {
    const ep_i64* choices = (const ep_i64*)a.topk_idx + (ep_u64)token * r.w.topk;
    for (ep_u32 earlier = 0; earlier < k; ++earlier)
        if (choices[earlier] == choices[k]) return true;
    return false;
}

/* 16 bytes of a token's header: of its beginning, or two choices. Repeated choices, and those of ranks that take no part, are none; `all`:
   there are no such ranks. */
EP_DEV int4 ep_low_header_part(const EpRank& r, const EpLowDispatchArgs& a, ep_u64 op, bool all, ep_u32 token, ep_u32 part) {
    if (part == 0) return make_int4((int)r.me, (int)token, 0, (int)ep_low_stamp(r.generation, op));
    EpChoice two[2];
#pragma unroll
    for (ep_u32 i = 0; i < 2; ++i) {
        const ep_u32 k = 2 * (part - 1) + i;
        two[i] = EpChoice{-1, 0.0f};
        if (k >= r.w.topk) continue;
        const ep_u64 at = (ep_u64)token * r.w.topk + k;
        const ep_i64 expert = ((const ep_i64*)a.topk_idx)[at];
        const float weight = a.topk_weights ? ((const float*)a.topk_weights)[at] : 1.0f;
        /* Wrong choices are complained about elsewhere. */
        if (expert < 0 || expert >= (ep_i64)r.w.experts) continue;
        if (a.repeats != 0 && ep_low_is_repeated(r, a, token, k)) continue;
        if (all || ep_low_takes_part(ep_rank_of_expert(r.w, (ep_u32)expert))) two[i] = EpChoice{(ep_i32)expert, weight};
    }
    return make_int4(two[0].expert, __float_as_int(two[0].weight), two[1].expert, __float_as_int(two[1].weight));
}

/* Counts nothing yet. */
EP_DEV void ep_low_clear(const EpRank& r, const EpLowSender& s) {
    EP_SHORT for (ep_u32 i = threadIdx.x; i < r.w.ranks * EP_LOW_WORDS; i += EP_LOW_THREADS) s.member[i] = 0;
}

/* Finds the rows' order at each rank and puts their headers, and behind them the arrival, to the ranks that are free. `first`: the first
   time; choices are looked at and counted then, too. By all threads of the announcing block; true where choices are wrong: then
   nothing is announced. */
EP_DEV bool ep_low_tell(const EpRank& r, const EpLowDispatchArgs& a, const EpLowSender& s, ep_u64 op, bool first) {
    const ep_u32 tid = threadIdx.x, ranks = r.w.ranks, parts = (ep_u32)r.w.header_bytes / 16;
    bool bad = false, all = true;
    EP_SHORT for (ep_u32 rank = 0; rank < ranks; ++rank) all &= ep_low_takes_part(rank);
    EP_SHORT for (ep_u32 base = 0; base < a.tokens; base += EP_LOW_THREADS) {
        const ep_u32 left = a.tokens - base < EP_LOW_THREADS ? a.tokens - base : EP_LOW_THREADS, words = (left + 31) / 32;
        if (!first || base > 0) {
            ep_low_clear(r, s);
            __syncthreads();
        }
        bad |= ep_low_look_at(r, a, s, base, left, true, first, nullptr) && first;
        __syncthreads();
        EP_SHORT for (ep_u32 rank = ep_low_served(); rank < ranks; rank += EP_LOW_THREADS) {
            ep_u32 sum = s.rows[rank];
            EP_SHORT for (ep_u32 word = 0; word < words; ++word) {
                s.before[rank * EP_LOW_WORDS + word] = sum;
                sum += __popc(s.member[rank * EP_LOW_WORDS + word]);
            }
            s.rows[rank] = sum;
        }
        __syncthreads();
        EP_SHORT for (ep_u32 item = tid; item < left * parts; item += EP_LOW_THREADS) {
            const ep_u32 token = item / parts, part = item - token * parts, word = token / 32, bit = 1u << token % 32;
            const int4 v = ep_low_header_part(r, a, op, all, base + token, part);
            EP_SHORT for (ep_u32 rank = 0; rank < ranks; ++rank) {
                const ep_u32 member = s.member[rank * EP_LOW_WORDS + word];
                if (!(member & bit) || s.state[rank] != EP_PEER_NOW) continue;
                const ep_u32 position = s.before[rank * EP_LOW_WORDS + word] + __popc(member & (bit - 1));
                const EpAt head = ep_is_beyond(r, rank) ? ep_low_staged_head(r, rank, position)
                                                        : ep_low_at(rank, ep_low_head(r.w, op, r.me, position));
                ep_put16(head + part * 16, v);
            }
        }
        bad = __syncthreads_or(bad);
    }
    if (bad) return true;
    /* By the threads that have counted the rows. */
    ep_low_announce(r, op, EP_LOW_DISPATCH, s.rows, true, s.state);
    EP_SHORT for (ep_u32 rank = ep_low_served(); rank < ranks; rank += EP_LOW_THREADS) {
        if (first) {
            ((ep_u32*)a.routed)[rank] = s.rows[rank];
            ((ep_u32*)a.routed)[ranks + rank] = s.picks[rank];
            ep_low_add((ep_u64*)a.counters + rank, s.rows[rank]);
        }
        s.rows[rank] = 0;
    }
    return false;
}

/* Whether a block looks at the choices while the launch waits for what it begins with: where one turn is enough, or the block has no row to make.
   The block with the last share looks when it counts what is sent, the others while their first row is under way. */
EP_DEV bool ep_low_looks_soon(const EpRank& r, const EpLowDispatchArgs& a) {
    return blockIdx.x + 1 != gridDim.x && (a.tokens <= EP_LOW_WARPS * (32 / r.w.topk) || blockIdx.x >= a.tokens);
}
/* The same at any other time. True where some are wrong; the least such token goes to `wrong`, where it is given, which lies in shared memory. */
EP_RARE bool ep_low_looks_wrong(const EpRank& r, const EpLowDispatchArgs& a, const EpLowSender& s, ep_u32* wrong) {
    return __syncthreads_or(ep_low_look_at(r, a, s, 0, a.tokens, false, false, wrong));
}
#endif
