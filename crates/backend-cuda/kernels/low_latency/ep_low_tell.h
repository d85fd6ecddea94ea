/*
 * ep_low_tell.h: what the sending half of the low-latency dispatch says ahead of its rows: their headers, in order, and how many. One block does it.
 */
#ifndef EP_LOW_TELL_H
#define EP_LOW_TELL_H
#ifdef EP_FAR_H
#include "ep_low_send_cells.h"
#else
#include "ep_low_send_units.h"
#endif

/* Counts nothing yet. */
EP_DEV void ep_low_clear(const EpRank& r, const EpLowSender& s) {
    EP_SHORT for (ep_u32 i = threadIdx.x; i < r.w.ranks * EP_LOW_WORDS; i += EP_LOW_THREADS) s.member[i] = 0;
}

/* Finds the rows' order at each rank and puts their headers, and behind them the arrival, to the ranks that are free. `first`: the first
   time; choices are looked at and counted then, too. By all threads of the announcing block; true where choices are wrong: then
   nothing is announced. */
EP_DEV bool ep_low_tell(const EpRank& r, const EpLowDispatchArgs& a, const EpLowSender& s, ep_u64 op, bool first) {
    const ep_u32 tid = threadIdx.x, ranks = r.w.ranks, parts = ep_low_header_parts(r);
    bool bad = false, all = true;
    /* What is put cannot be taken back. Of a batch of one turn all choices are looked at before, below. */
    if (EP_LOW_LOOKS_FIRST && first && a.tokens > EP_LOW_THREADS && ep_low_looks_wrong(r, a, s, nullptr)) return true;
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
        if (__syncthreads_or(EP_LOW_LOOKS_FIRST && bad)) return true;
        EP_SHORT for (ep_u32 item = tid; item < left * parts; item += EP_LOW_THREADS) {
            const ep_u32 token = item / parts, part = item - token * parts, word = token / 32, bit = 1u << token % 32;
            const EpUnit v = ep_low_make_header_part(r, a, op, all, base + token, part);
            EP_SHORT for (ep_u32 rank = 0; rank < ranks; ++rank) {
                const ep_u32 member = s.member[rank * EP_LOW_WORDS + word];
                if (!(member & bit) || s.state[rank] != EP_PEER_NOW) continue;
                const ep_u32 position = s.before[rank * EP_LOW_WORDS + word] + __popc(member & (bit - 1));
                ep_low_put_header_part(r, s, op, rank, position, part, v);
            }
        }
        bad = __syncthreads_or(bad);
    }
    if (bad) return true;
    /* By the threads that have counted the rows. */
    ep_low_say_rows(r, s, op);
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

/* Whether a block looks at the choices while the launch waits for what it begins with: where nothing may be put before, one turn is enough, or the block
   has no row to make. The block with the last share looks when it counts what is sent, the others while their first row is under way. */
EP_DEV bool ep_low_looks_soon(const EpRank& r, const EpLowDispatchArgs& a) {
    return blockIdx.x + 1 != gridDim.x && (EP_LOW_LOOKS_FIRST || a.tokens <= EP_LOW_WARPS * (32 / r.w.topk) || blockIdx.x >= a.tokens);
}
#endif
