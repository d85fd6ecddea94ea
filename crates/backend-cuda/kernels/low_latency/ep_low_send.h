/*
 * ep_low_send.h: the sending half of the low-latency dispatch: each token once to every rank that holds one of its experts.
 */
#ifndef EP_LOW_SEND_H
#define EP_LOW_SEND_H
#ifdef EP_FAR_H
#include "ep_low_send_cells.h"
#else
#include "ep_low_send_units.h"
#endif
#include "ep_low_shares.h"
#include "ep_quant.h"
#include "ep_sum.h"

/* The choice of a token that this thread serves: `expert` is -1 where it serves none. */
EP_DEV EpChoice ep_low_load_choice(const EpRank& r, const EpLowDispatchArgs& a, ep_u32 token) {
    const ep_u32 k = ep_low_served();
    EpChoice choice = {-1, 0.0f};
    if (k < r.w.topk && token < a.tokens) {
        const ep_u64 at = (ep_u64)token * r.w.topk + k;
        choice.expert = (ep_i32)((const ep_i64*)a.topk_idx)[at];
        choice.weight = a.topk_weights ? ((const float*)a.topk_weights)[at] : 1.0f;
    }
    return choice;
}

/* Units of 16 bytes of a row that a thread has before it is the row's turn. Between nodes there are registers for one; and rows that are given as
   they travel are made in a call, as inlined they would take one register more than there are where kernels post to adapters. */
#ifdef EP_FAR_H
#define EP_LOW_AHEAD 1u
#define EP_LOW_CODED EP_RARE
#else
#define EP_LOW_AHEAD 2u
#define EP_LOW_CODED EP_DEV
#endif
/* What a thread has of a token before it is that token's turn: its choice, and the first units of the row. */
struct EpLowAhead {
    EpChoice choice;
    int4 v[EP_LOW_AHEAD];
};
/* Units of 16 bytes of a row of x. */
EP_DEV ep_u32 ep_low_columns(const EpRank& r, const EpLowDispatchArgs& a) { return a.x_scales != 0 ? (r.w.hidden + 15) / 16 : (r.w.hidden + 7) / 8; }
EP_DEV EpLowAhead ep_low_load_ahead(const EpRank& r, const EpLowDispatchArgs& a, ep_u32 token) {
    const ep_u32 columns = ep_low_columns(r, a);
    const ep_u8* x = (const ep_u8*)a.x + (ep_u64)token * a.x_stride;
    EpLowAhead ahead;
    ahead.choice = ep_low_load_choice(r, a, token);
#pragma unroll
    for (ep_u32 i = 0; i < EP_LOW_AHEAD; ++i) {
        const ep_u32 at = i * EP_LOW_THREADS + threadIdx.x;
        ahead.v[i] = token < a.tokens && at < columns ? ep_ld16(x + (ep_u64)at * 16) : make_int4(0, 0, 0, 0);
    }
    return ahead;
}

/* Whether a block looks at the choices while the launch waits for what it begins with: where nothing may be put before, one turn is enough, or the block
   has no row to make. A block with a share that tells looks when it counts what is sent, the others while their first row is under way. */
EP_DEV bool ep_low_looks_soon(const EpRank& r, const EpLowDispatchArgs& a) {
    return !ep_low_tells(a, blockIdx.x) && (EP_LOW_LOOKS_FIRST || a.tokens <= EP_LOW_WARPS * (32 / r.w.topk) || blockIdx.x >= a.tokens);
}
/* Brings what the sending half begins with on its way. */
EP_DEV EpLowAhead ep_low_begin(const EpRank& r, const EpLowDispatchArgs& a) {
    const ep_u64 choices = (ep_u64)a.tokens * r.w.topk, at = threadIdx.x * 128ull;
    if (at < choices * sizeof(ep_i64)) ep_prefetch((const ep_u8*)a.topk_idx + at);
    if (ep_low_tells(a, blockIdx.x) && a.topk_weights && at < choices * sizeof(float)) ep_prefetch((const ep_u8*)a.topk_weights + at);
    return ep_low_load_ahead(r, a, blockIdx.x);
}

/* The payload of a token's row that is given as it travels: codes, padding and scales lie side by side in it. `ahead`: the thread's first unit. */
EP_LOW_CODED void ep_low_take_coded(const EpRank& r, const EpLowDispatchArgs& a, ep_u32 token, int4 ahead, ep_u8* payload) {
    const ep_u32 tid = threadIdx.x, columns = ep_low_columns(r, a), hidden = r.w.hidden, end = (ep_u32)r.w.scales_offset;
    const ep_u8 *x = (const ep_u8*)a.x + (ep_u64)token * a.x_stride, *scales = (const ep_u8*)a.x_scales + (ep_u64)token * a.x_scales_row;
    const ep_u32 words = ((ep_u32)r.w.scales_bytes + 3) / 4;
    /* On its way while codes are stored. */
    const ep_u32 first = tid < words ? *(const ep_u32*)(scales + tid * a.x_scales_word) : 0;
    EP_SHORT for (ep_u32 at = tid; at * 16 < end; at += EP_LOW_THREADS) {
        int4 v = at == tid ? ahead : make_int4(0, 0, 0, 0);
        if (at != tid && at < columns) v = ep_ld16(x + (ep_u64)at * 16);
        if (at * 16 + 16 <= hidden) {
            ep_st16(payload + at * 16, v);
            continue;
        }
        /* The last unit may end in padding, which travels as zeros, and in scales. */
        const ep_u32 parts[4] = {(ep_u32)v.x, (ep_u32)v.y, (ep_u32)v.z, (ep_u32)v.w};
#pragma unroll
        for (ep_u32 i = 0; i < 16; ++i)
            if (at * 16 + i < end) payload[at * 16 + i] = at * 16 + i < hidden ? (ep_u8)(parts[i / 4] >> i % 4 * 8) : 0;
    }
    EP_SHORT for (ep_u32 word = tid; word < words; word += EP_LOW_THREADS)
        ((ep_u32*)(payload + end))[word] = word == tid ? first : *(const ep_u32*)(scales + word * a.x_scales_word);
}

/* Makes the payload of a token's row. */
EP_DEV void ep_low_make(const EpRank& r, const EpLowDispatchArgs& a, ep_u32 token, const EpLowAhead& ahead, ep_u8* payload) {
    if (a.x_scales != 0) return ep_low_take_coded(r, a, token, ahead.v[0], payload);
    const ep_u32 tid = threadIdx.x, hidden = r.w.hidden, columns = (hidden + 7) / 8;
    /* Padding between codes and scales travels, as zeros. */
    const ep_u32 all = r.w.element == EP_ELEMENT_BF16 ? columns : (ep_u32)(r.w.scales_offset / 8);
    const ep_u8* x = (const ep_u8*)a.x + (ep_u64)token * a.x_stride;
    EP_SHORT for (ep_u32 base = 0; base < all; base += EP_LOW_THREADS) {
        const ep_u32 at = base + tid;
        int4 v = base == 0 ? ahead.v[0] : ahead.v[EP_LOW_AHEAD - 1];
        if (base >= EP_LOW_AHEAD * EP_LOW_THREADS) v = at < columns ? ep_ld16(x + (ep_u64)at * 16) : make_int4(0, 0, 0, 0);
        if (r.w.element == EP_ELEMENT_BF16) {
            if (at < columns) ep_st16(payload + (ep_u64)at * 16, v);
            continue;
        }
        float e[8] = {ep_low(v.x), ep_high(v.x), ep_low(v.y), ep_high(v.y),
                      ep_low(v.z), ep_high(v.z), ep_low(v.w), ep_high(v.w)};
        float largest = 0.0f;
#pragma unroll
        for (ep_u32 i = 0; i < 8; ++i) {
            if (at * 8 + i >= hidden) e[i] = 0.0f;
            largest = fmaxf(largest, fabsf(e[i]));
        }
        /* 16 threads serve a group. */
#pragma unroll
        for (ep_u32 step = 1; step < EP_SCALE_GROUP / 8; step *= 2)
            largest = fmaxf(largest, __shfl_xor_sync(EP_FULL, largest, step));
        const EpScale scale = ep_scale(r.w.element, largest);
        if (at >= all) continue;
        uint2 codes;
        codes.x = ep_encode_two(__fmul_rn(e[0], scale.multiplier), __fmul_rn(e[1], scale.multiplier)) |
                  ep_encode_two(__fmul_rn(e[2], scale.multiplier), __fmul_rn(e[3], scale.multiplier)) << 16;
        codes.y = ep_encode_two(__fmul_rn(e[4], scale.multiplier), __fmul_rn(e[5], scale.multiplier)) |
                  ep_encode_two(__fmul_rn(e[6], scale.multiplier), __fmul_rn(e[7], scale.multiplier)) << 16;
        *(uint2*)(payload + (ep_u64)at * 8) = codes;
        if (at % (EP_SCALE_GROUP / 8) != 0 || at >= columns) continue;
        const ep_u32 group = at / (EP_SCALE_GROUP / 8);
        ep_u8* scales = payload + r.w.scales_offset;
        if (r.w.element == EP_ELEMENT_FP8_UE8M0) scales[group] = (ep_u8)scale.stored;
        else ((ep_u32*)scales)[group] = scale.stored;
    }
}

/* Says where a token's row goes, at ranks that are free (ep_low_goes_now). By the warp that addresses, whose lanes have the choices. */
EP_DEV void ep_low_address(const EpRank& r, const EpLowSender& s, ep_u64 op, ep_u32 token, EpChoice choice) {
    const ep_u32 k = ep_low_served();
    EP_SHORT for (ep_u32 rank = k; rank < r.w.ranks; rank += 32) s.place[rank] = ep_nowhere();
    __syncwarp();
    if (k < r.w.topk) {
        const ep_u32 rank = choice.expert >= 0 && choice.expert < (ep_i32)r.w.experts ? ep_rank_of_expert(r.w, (ep_u32)choice.expert) : EP_FULL;
        const bool goes = rank != EP_FULL && ep_low_takes_part(rank);
        if (goes) s.place[rank] = ep_low_row_place(r, op, rank, token);
        else choice = EpChoice{-1, 0.0f};
    }
    ep_low_keep_header(r, s, op, token, k, choice);
    __syncwarp();
}

/* How a share, or a turn of it, has ended: choices are wrong, and nothing was announced; nothing was left to put; there may be more to do; all
   is done, and no share is left. */
#define EP_SHARE_WRONG 0
#define EP_SHARE_NOTHING 1
#define EP_SHARE_MORE 2
#define EP_SHARE_ALL 3

/* Puts the rows of a share's tokens to the ranks that are free, and with a share that tells what is said ahead of them. The first row is made before
   any rank is waited for. `first`: the first time, when that row has been loaded, and choices are looked at unless they were. By all
   threads. */
EP_DEV int ep_low_put_rows(const EpRank& r, const EpLowDispatchArgs& a, const EpLowSender& s, ep_u32 share, ep_u64 op, bool first,
                           bool looked, EpLowAhead ahead, ep_u64 began, int found, ep_u32* taken) {
    const bool addresses = threadIdx.x / 32 == a.roles.addresses;
    EP_SHORT for (ep_u32 token = share;; token += gridDim.x) {
        const bool begins = token == share, is = token < a.tokens;
        if (!is && !begins) return EP_SHARE_MORE;
        if (is) {
            if (!begins || !first) ahead = ep_low_load_ahead(r, a, token);
            ep_delay(r, EP_LANE_LOW_ROWS, token);
            if (addresses) ep_low_address(r, s, op, token, ahead.choice);
            ep_low_make(r, a, token, ahead, s.row + r.w.header_bytes);
        }
        if (begins) {
            if (!ep_low_next(r, op, nullptr, s.state, began, found)) return EP_SHARE_NOTHING;
            if (ep_low_tells(a, share) && ep_low_tell(r, a, s, share, op, first)) return EP_SHARE_WRONG;
            if (!is) return EP_SHARE_MORE;
        }
        if (addresses && ep_planted(r, EP_PLANT_LOW_RAISED_EARLY)) {
            ep_low_row_was_put(r, s, op, token, true);
            ep_be_slow();
        }
        if (!begins) __syncthreads();
        /* What other blocks have begun is looked at while the row is put; those that begin later are looked for once more. */
        *taken = EP_LOW_LOOKS_FIRST ? ep_low_look_at_shares(r) : 0;
        ep_low_put_row(r, s);
        /* While the row is under way. Nothing may be announced of a batch with wrong choices. */
        const bool bad = !EP_LOW_LOOKS_FIRST && begins && first && !looked && ep_low_look_at(r, a, s, 0, a.tokens, false, false, nullptr);
        if (__syncthreads_or(bad)) return EP_SHARE_WRONG;
        if (addresses) ep_low_row_was_put(r, s, op, token, false);
    }
}

/* Sends a share of a dispatch: rows, and with one that tells headers. */
EP_DEV int ep_low_send_share(const EpRank& r, const EpLowDispatchArgs& a, const EpLowSender& s, ep_u32 share, ep_u64 op, bool again,
                             bool looked, const EpLowAhead& ahead, ep_u64 early, ep_u64 began) {
    const bool tells = ep_low_tells(a, share);
    if (share >= a.tokens && !tells) return __syncthreads_or(ep_low_look_at_shares(r) == 0) ? EP_SHARE_MORE : EP_SHARE_ALL;
    if (tells) ep_low_count_nothing(r, a, s);
    ep_low_open(r, op, again, s.state);
    int found = ep_low_look(r, op, nullptr, s.state, began, false, &early);
    EP_SHORT for (bool first = !again;; first = false) {
        ep_u32 seen = 0;
        const int end = ep_low_put_rows(r, a, s, share, op, first, looked || tells, ahead, began, found, &seen);
        if (end == EP_SHARE_WRONG) return EP_SHARE_WRONG;
        if (end == EP_SHARE_NOTHING) return EP_SHARE_MORE;
        /* Mostly one meeting of the block says that there is no more to do. Blocks that begin late have begun by now, so the shares are looked at
           here, while the last warp waits until its row is there. */
        const bool taken = seen != 0 || ep_low_look_at_shares(r) != 0, left = ep_low_is_left(r, s.state);
        if (!__syncthreads_or(left || !taken)) return EP_SHARE_ALL;
        ep_low_finish(r, s.state);
        found = EP_FOUND_WAITING;
    }
}

/* The first thing that is wrong of a batch, for whoever gave it. By all threads of one block. */
EP_RARE void ep_low_refuse_choices(const EpRank& r, const EpLowDispatchArgs& a, const EpLowSender& s, ep_u64 op) {
    __shared__ ep_u32 wrong;
    if (threadIdx.x == 0) wrong = EP_FULL;
    __syncthreads();
    ep_low_looks_wrong(r, a, s, &wrong);
    if (threadIdx.x == 0) ep_low_fail(r, op, EP_STATUS_BAD_ROUTING, 0, r.me, r.me, 0, wrong, 0, 0, 0);
}

/* Sends this block's share of a dispatch, if it is `own`, as the first thread knows, and those of blocks that have not begun. True where
   choices are wrong: then nothing is announced. `looked`: choices were looked at, and a thread knows that has found `bad` ones. */
EP_DEV bool ep_low_send_tokens(const EpRank& r, const EpLowDispatchArgs& a, ep_u64 op, ep_u32 tag, bool again, bool own, bool looked, bool bad,
                               EpLowAhead ahead, ep_u64 early, ep_u64 began) {
    const EpLowSender s = ep_low_sender(r, tag);
    ep_u32 share = blockIdx.x;
    int end = EP_SHARE_MORE;
    if (!__syncthreads_and(own && !bad)) {
        share = EP_LOW_NO_SHARE;
        if (__syncthreads_or(bad) || (!looked && !again && ep_low_looks_wrong(r, a, s, nullptr))) end = EP_SHARE_WRONG;
    }
    EP_SHORT for (; end == EP_SHARE_MORE; looked = true) {
        end = ep_low_send_share(r, a, s, share, op, again, looked, ahead, early, began);
        if (end != EP_SHARE_MORE) break;
        share = ep_low_take_another(r);
        if (share == EP_LOW_NO_SHARE) break;
        ahead = ep_low_load_ahead(r, a, share);
    }
    if (end == EP_SHARE_WRONG) {
        if (blockIdx.x == 0) ep_low_refuse_choices(r, a, s, op);
        return true;
    }
    /* The combine and late rows need the choices: the caller's may be others by then. */
    if (a.kept_idx != 0 && !again)
        EP_SHORT for (ep_u64 i = (ep_u64)blockIdx.x * EP_LOW_THREADS + threadIdx.x; i < (ep_u64)a.tokens * r.w.topk; i += (ep_u64)gridDim.x * EP_LOW_THREADS)
            ((ep_i64*)a.kept_idx)[i] = ((const ep_i64*)a.topk_idx)[i];
    return false;
}
#endif
