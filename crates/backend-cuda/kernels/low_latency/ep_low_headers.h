/*
 * ep_low_headers.h: the choices of a batch: whether they are right, which all blocks look at, and what rows' headers have of them.
 */
#ifndef EP_LOW_HEADERS_H
#define EP_LOW_HEADERS_H
#include "ep_low_banks.h"

/* Tokens that a block which says headers counts at a time, in words of 32. */
#define EP_LOW_WORDS (EP_LOW_THREADS / 32)

/* Bytes of shared memory that it has for each expert: rows travel as units where all ranks are of one node (ep_low_send_units.h). */
#ifdef EP_FAR_H
#define EP_LOW_EXPERT_BYTES 0
#else
#define EP_LOW_EXPERT_BYTES (4 + 4 * EP_LOW_WORDS)
#endif

/* Shared memory of the sending half. */
struct EpLowSender {
    EpAt* place;   /* [ranks]: where the row at hand goes, or nowhere */
    ep_u32* state; /* [ranks] */
    ep_u8* row;    /* as it travels; its payload lies behind room for a header */
    ep_u32 tag;    /* of units of the operation */
    /* Of a block that says headers: */
    ep_u32* rows;   /* [ranks]: rows to each */
    ep_u32* picks;  /* [ranks]: choices of each rank's experts */
    ep_u32* member; /* [ranks, EP_LOW_WORDS]: tokens that go to each rank, as bits */
    ep_u32* before; /* [ranks, EP_LOW_WORDS]: rows to each rank of the tokens before those of the word */
    /* And where rows travel as units: */
    ep_u32* gets;   /* [experts]: rows of each expert */
    ep_u32* chosen; /* [EP_LOW_WORDS, experts]: tokens that choose each expert, as bits; neighbouring experts lie in neighbouring banks */
};
EP_DEV EpLowSender ep_low_sender(const EpRank& r, ep_u32 tag) {
    const ep_u32 ranks = r.w.ranks;
    EpLowSender s;
    s.tag = tag;
    s.place = (EpAt*)ep_low_pool(r);
    s.state = (ep_u32*)(s.place + ranks);
    s.rows = s.state + ranks;
    s.picks = s.rows + ranks;
    s.member = s.picks + ranks;
    s.before = s.member + ranks * EP_LOW_WORDS;
    s.gets = s.before + ranks * EP_LOW_WORDS;
    s.chosen = s.gets + r.w.experts;
    s.row = ep_pool + (ranks * (28 + 8 * EP_LOW_WORDS) + r.w.experts * EP_LOW_EXPERT_BYTES + 127) / 128 * 128;
    return s;
}

/* Words of the tokens that it counts from `base` on. */
EP_DEV ep_u32 ep_low_words(const EpLowDispatchArgs& a, ep_u32 base) {
    const ep_u32 left = a.tokens - base < EP_LOW_THREADS ? a.tokens - base : EP_LOW_THREADS;
    return (left + 31) / 32;
}
/* Of these tokens nothing is noted yet. */
EP_DEV void ep_low_clear(const EpRank& r, const EpLowSender& s, ep_u32 words) {
    const ep_u32 members = r.w.ranks * EP_LOW_WORDS, all = members + (EP_LOW_EXPERT_BYTES > 0 ? r.w.experts * words : 0);
    EP_SHORT for (ep_u32 i = threadIdx.x; i < all; i += EP_LOW_THREADS) {
        if (i < members) s.member[i] = 0;
        else s.chosen[i - members] = 0;
    }
}
/* And of the batch nothing is counted. */
EP_DEV void ep_low_count_nothing(const EpRank& r, const EpLowDispatchArgs& a, const EpLowSender& s) {
    ep_low_clear(r, s, ep_low_words(a, 0));
    EP_SHORT for (ep_u32 rank = threadIdx.x; rank < r.w.ranks; rank += EP_LOW_THREADS) s.rows[rank] = s.picks[rank] = 0;
    EP_SHORT for (ep_u32 e = threadIdx.x; e < (EP_LOW_EXPERT_BYTES > 0 ? r.w.experts : 0); e += EP_LOW_THREADS) s.gets[e] = 0;
}

/* Whether the row at hand goes to a rank, which is free. */
EP_DEV bool ep_low_goes_now(const EpLowSender& s, ep_u32 rank) { return ep_is_somewhere(s.place[rank]) && s.state[rank] == EP_PEER_NOW; }

/* Whether a share says headers ahead of rows; and how many tokens lie before those whose headers go with it. */
EP_DEV bool ep_low_tells(const EpLowDispatchArgs& a, ep_u32 share) { return share <= a.roles.tells && share + a.roles.tellers > a.roles.tells; }
EP_DEV ep_u32 ep_low_told_before(const EpLowDispatchArgs& a, ep_u32 share) {
    const ep_u32 before = (share + a.roles.tellers - 1 - a.roles.tells) * a.roles.told;
    return before < a.tokens ? before : a.tokens;
}

/* So many ranks or fewer are named by many lanes of a warp at the same time, which would wait for each other. */
#define EP_LOW_FEW_RANKS 8u

/* Whether the token of a lane's choice k has named the expert by an earlier choice: neighbouring lanes have its choices. By a warp. */
EP_DEV bool ep_low_names_again(ep_u32 expert, ep_u32 k, ep_u32 topk) {
    bool again = false;
#pragma unroll 4
    for (ep_u32 back = 1; back < topk; ++back) again |= __shfl_up_sync(EP_FULL, expert, back) == expert && back <= k;
    return again;
}

/* Looks at the choices of `count` tokens from `base` on, a choice a lane: true where one of this lane's is wrong; the least such token
   goes to `wrong`, where it is given. `keeps`: of a block that says headers, which notes where the tokens go and, if `counts`, how often. By all
   threads. */
#ifdef EP_FAR_H
/* (Kernels that post have no registers for more at a time.) */
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
#else
EP_DEV bool ep_low_look_at(const EpRank& r, const EpLowDispatchArgs& a, const EpLowSender& s, ep_u32 base, ep_u32 count, bool keeps,
                           bool counts, ep_u32* wrong) {
    const ep_u32 lane = threadIdx.x % 32, topk = r.w.topk, width = 32 / topk, in_warp = lane / topk, k = lane - in_warp * topk;
    const ep_u32 step = EP_LOW_WARPS * width, warps_first = threadIdx.x / 32 * width;
    const ep_i64* choices = (const ep_i64*)a.topk_idx + (ep_u64)base * topk + lane;
    const ep_u32 end = in_warp < width && in_warp < count ? count - in_warp : 0; /* tokens of a warp's first lanes that this lane serves for */
    ep_i64 next = warps_first < end ? choices[warps_first * topk] : -1;
    bool any = false;
    EP_SHORT for (ep_u32 first = warps_first; first < count; first += step) {
        const ep_u32 token = first + in_warp;
        const ep_i64 choice = next;
        /* On its way while this one is looked at. */
        next = first + step < end ? choices[(first + step) * topk] : -1;
        const ep_u32 expert = (ep_u32)choice;
        const bool names = choice >= 0 && choice < (ep_i64)r.w.experts;
        const bool again = (a.repeats == 0 || (keeps && EP_LOW_EXPERT_BYTES == 0)) && ep_low_names_again(expert, k, topk) && names;
        const bool bad = choice < -1 || choice >= (ep_i64)r.w.experts || (a.repeats == 0 && again);
        if (bad && wrong) atomicMin(wrong, base + token);
        any |= bad;
        if (!keeps) continue;
        const ep_u32 rank = names ? ep_rank_of_expert(r.w, expert) : EP_FULL;
        const bool goes = names && ep_low_takes_part(rank);
        /* Then one lane says so for its token. */
        if (r.w.ranks <= EP_LOW_FEW_RANKS) {
            EP_SHORT for (ep_u32 few = 0; few < r.w.ranks; ++few) {
                const ep_u32 votes = __ballot_sync(EP_FULL, goes && rank == few) >> (lane - k);
                if (k == 0 && (topk == 32 ? votes : votes & ((1u << topk) - 1)) != 0) atomicOr(s.member + few * EP_LOW_WORDS + token / 32, 1u << token % 32);
            }
        } else if (goes) {
            atomicOr(s.member + rank * EP_LOW_WORDS + token / 32, 1u << token % 32);
        }
        if (!goes) continue;
        /* However often an expert is named, it has one result. */
        if (EP_LOW_EXPERT_BYTES > 0) atomicOr(s.chosen + token / 32 * r.w.experts + expert, 1u << token % 32);
        else if (counts && !again) atomicAdd(s.picks + rank, 1u);
    }
    return any;
}
#endif

/* Whether choice k of a token names an expert that an earlier one has named. */
EP_RARE bool ep_low_is_repeated(const EpRank& r, const EpLowDispatchArgs& a, ep_u32 token, ep_u32 k) {
    const ep_i64* choices = (const ep_i64*)a.topk_idx + (ep_u64)token * r.w.topk;
    for (ep_u32 earlier = 0; earlier < k; ++earlier)
        if (choices[earlier] == choices[k]) return true;
    return false;
}

/* Choice k of a token as its header has it. Repeated choices, and those of ranks that take no part, are none; `all`: there are no such ranks. */
EP_DEV EpChoice ep_low_choice_to_send(const EpRank& r, const EpLowDispatchArgs& a, bool all, ep_u32 token, ep_u32 k) {
    const EpChoice none = {-1, 0.0f};
    if (k >= r.w.topk) return none;
    const ep_u64 at = (ep_u64)token * r.w.topk + k;
    const ep_i64 expert = ((const ep_i64*)a.topk_idx)[at];
    const float weight = a.topk_weights ? ((const float*)a.topk_weights)[at] : 1.0f;
    /* Wrong choices are complained about elsewhere. */
    if (expert < 0 || expert >= (ep_i64)r.w.experts) return none;
    if (a.repeats != 0 && ep_low_is_repeated(r, a, token, k)) return none;
    return all || ep_low_takes_part(ep_rank_of_expert(r.w, (ep_u32)expert)) ? EpChoice{(ep_i32)expert, weight} : none;
}

/* The same at any other time. True where some are wrong; the least such token goes to `wrong`, where it is given, which lies in shared memory. */
EP_RARE bool ep_low_looks_wrong(const EpRank& r, const EpLowDispatchArgs& a, const EpLowSender& s, ep_u32* wrong) {
    return __syncthreads_or(ep_low_look_at(r, a, s, 0, a.tokens, false, false, wrong));
}
#endif
