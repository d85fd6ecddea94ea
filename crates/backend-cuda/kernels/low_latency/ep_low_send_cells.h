/*
 * ep_low_send_cells.h: how the rows of a low-latency dispatch leave, where there are several nodes: into slots. A row within the node is announced by
 * a cell of its own; those of other nodes are staged and counted (ep_low_far.h). Headers go ahead, with the arrival behind them.
 */
#ifndef EP_LOW_SEND_CELLS_H
#define EP_LOW_SEND_CELLS_H
#include "ep_low_headers.h"

/* Choices are looked at while the first row is under way: nothing is announced before that. */
#define EP_LOW_LOOKS_FIRST false

/* Where the row of token goes, at a rank: to the slot of its token. */
EP_DEV EpAt ep_low_row_place(const EpRank& r, ep_u64 op, ep_u32 rank, ep_u32 token) {
    return ep_is_beyond(r, rank)
               ? ep_low_staged_row(r, rank, token)
               : ep_low_at(rank, ep_low_row(r.w, ep_planted(r, EP_PLANT_LOW_WRONG_BANK) ? op + 1 : op, r.me, token));
}
/* Choice k of the row's own header, and its beginning. */
EP_DEV void ep_low_keep_header(const EpRank& r, const EpLowSender& s, ep_u64 op, ep_u32 token, ep_u32 k, EpChoice choice) {
    if (k < r.w.topk) ((EpChoice*)(s.row + sizeof(EpRowHeader)))[k] = choice;
    if (k == 31) ep_st16(s.row, make_int4((int)r.me, (int)token, 0, (int)ep_low_stamp(r.generation, op)));
}

/* Puts the row at hand to the ranks that are free. By all threads. */
EP_DEV void ep_low_put_row(const EpRank& r, const EpLowSender& s) {
    const ep_u32 units = (ep_u32)(r.w.wire_bytes / 16);
    EP_SHORT for (ep_u32 unit = threadIdx.x; unit < units; unit += EP_LOW_THREADS) {
        const int4 v = ep_ld16(s.row + (ep_u64)unit * 16);
        EP_SHORT for (ep_u32 turn = 1; turn <= r.w.ranks; ++turn) {
            const ep_u32 rank = r.me + turn < r.w.ranks ? r.me + turn : r.me + turn - r.w.ranks;
            if (ep_low_goes_now(s, rank)) ep_put16(s.place[rank] + (ep_u64)unit * 16, v);
        }
    }
}
/* Says that it is where it goes, and counts it where it is staged. `early`: a planted fault, within the node. By the warp that addresses, after a barrier. */
EP_DEV void ep_low_row_was_put(const EpRank& r, const EpLowSender& s, ep_u64 op, ep_u32 token, bool early) {
    EP_SHORT for (ep_u32 rank = ep_low_served(); rank < r.w.ranks; rank += 32) {
        if (!ep_low_goes_now(s, rank)) continue;
        if (!ep_is_beyond(r, rank)) ep_low_raise(r, op, rank, token);
        else if (!early) ep_low_staged_one(r, op, rank);
    }
}

/* Says to the ranks that are filled now how many rows come. Their headers lie before that: after a barrier. By all threads. */
EP_DEV void ep_low_announce(const EpRank& r, const EpLowSender& s, ep_u64 op) {
    EP_SHORT for (ep_u32 peer = ep_low_served(); peer < r.w.ranks; peer += EP_LOW_THREADS) {
        if (s.state[peer] != EP_PEER_NOW) continue;
        if (ep_is_beyond(r, peer)) {
            ep_low_staged_all(r, op, peer, s.rows[peer]);
            continue;
        }
        ep_fence_sys();
        ep_low_arrive(r, op, EP_LOW_DISPATCH, peer, s.rows[peer]);
    }
}

/* 16 bytes of a header as it is sent ahead: its beginning, or two choices. */
EP_DEV EpUnit ep_low_make_header_part(const EpRank& r, const EpLowDispatchArgs& a, ep_u64 op, bool all, ep_u32 token, ep_u32 part) {
    if (part == 0) return make_int4((int)r.me, (int)token, 0, (int)ep_low_stamp(r.generation, op));
    const EpChoice first = ep_low_choice_to_send(r, a, all, token, 2 * part - 2), second = ep_low_choice_to_send(r, a, all, token, 2 * part - 1);
    return make_int4(first.expert, __float_as_int(first.weight), second.expert, __float_as_int(second.weight));
}

/* Finds the rows' order at each rank and puts their headers, and behind them the arrival, to the ranks that are free. `first`: the first
   time; choices are looked at and counted then, too. By all threads of the block with the only share that tells; true where choices are wrong: then
   nothing is announced. */
EP_DEV bool ep_low_tell(const EpRank& r, const EpLowDispatchArgs& a, const EpLowSender& s, ep_u32, ep_u64 op, bool first) {
    const ep_u32 tid = threadIdx.x, ranks = r.w.ranks, parts = (ep_u32)r.w.header_bytes / 16;
    bool bad = false, all = true;
    EP_SHORT for (ep_u32 rank = 0; rank < ranks; ++rank) all &= ep_low_takes_part(rank);
    EP_SHORT for (ep_u32 base = 0; base < a.tokens; base += EP_LOW_THREADS) {
        const ep_u32 left = a.tokens - base < EP_LOW_THREADS ? a.tokens - base : EP_LOW_THREADS, words = (left + 31) / 32;
        if (!first || base > 0) {
            ep_low_clear(r, s, words);
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
            const EpUnit v = ep_low_make_header_part(r, a, op, all, base + token, part);
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
    ep_low_announce(r, s, op);
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
#endif
