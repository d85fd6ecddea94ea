/*
 * ep_low_send_units.h: how the rows of a low-latency dispatch leave, where all ranks are of one node: as units (F11), which announce themselves.
 *
 *   head      a unit of each rank for each, in every operation: how many rows come
 *   counts    how many rows each expert gets
 *   headers   of all rows, in order: a unit for the row and one for each choice, which says which of this rank's rows for the expert it is
 *   rows      payloads, each at the place of its token, behind all that is put ahead
 *   before    choices are looked at before any unit is put: what is put is there, and nobody can take it back
 *
 * Whoever polls a unit sees it whole, so neither fences nor cells announce a row. Its tag is that of the operation, which counts on through all
 * generations: what lies in its place from before has another.
 */
#ifndef EP_LOW_SEND_UNITS_H
#define EP_LOW_SEND_UNITS_H
#include "ep_low_headers.h"
#include "ep_low_units.h"

#define EP_LOW_LOOKS_FIRST true

/* Where the row of token goes, at a rank. */
EP_DEV EpAt ep_low_row_place(const EpRank& r, ep_u64 op, ep_u32 rank, ep_u32 token) {
    return ep_low_at(rank, ep_low_unit_row(r.w, ep_planted(r, EP_PLANT_LOW_WRONG_BANK) ? op + 1 : op, r.me, token));
}
/* A row's own header has gone ahead. */
EP_DEV void ep_low_keep_header(const EpRank&, const EpLowSender&, ep_u64, ep_u32, ep_u32, EpChoice) {}

/* Puts the row at hand to the ranks that are free. By all threads. */
EP_DEV void ep_low_put_row(const EpRank& r, const EpLowSender& s) {
    const ep_u32* words = (const ep_u32*)(s.row + r.w.header_bytes);
    const ep_u32 units = (ep_u32)ep_unit_count(r.w.payload_bytes);
    EP_SHORT for (ep_u32 unit = threadIdx.x; unit < units; unit += EP_LOW_THREADS) {
        const ep_u32 x = words[3 * unit], y = words[3 * unit + 1], z = words[3 * unit + 2];
        EP_SHORT for (ep_u32 turn = 1; turn <= r.w.ranks; ++turn) {
            const ep_u32 rank = r.me + turn < r.w.ranks ? r.me + turn : r.me + turn - r.w.ranks;
            if (!ep_low_goes_now(s, rank)) continue;
            ep_low_put_unit(s.place[rank] + unit * EP_UNIT_BYTES, x, y, z, s.tag, ep_planted(r, EP_PLANT_LOW_UNITS_TORN));
        }
    }
}
/* It is there when it is there. */
EP_DEV void ep_low_row_was_put(const EpRank&, const EpLowSender&, ep_u64, ep_u32, bool) {}

/* What comes of a token's choice in its header: the expert, its weight, and which of this rank's rows for that expert the row is. Those of the tokens
   until the end of this turn, `words` of them, are counted: less those from this one on. */
EP_DEV EpUnitChoice ep_low_unit_choice(const EpRank& r, const EpLowDispatchArgs& a, const EpLowSender& s, bool all, ep_u32 base, ep_u32 words,
                                       ep_u32 token, ep_u32 k) {
    const EpChoice choice = ep_low_choice_to_send(r, a, all, base + token, k);
    if (choice.expert < 0) return EpUnitChoice{choice.expert, choice.weight, 0};
    const ep_u32 *chosen = s.chosen + choice.expert, word = token / 32;
    ep_u32 index = s.gets[choice.expert] - __popc(chosen[word * r.w.experts] >> token % 32);
    EP_SHORT for (ep_u32 after = word + 1; after < words; ++after) index -= __popc(chosen[after * r.w.experts]);
    return EpUnitChoice{choice.expert, choice.weight, index};
}

/* Says to the ranks that are filled now how many rows come, and how many of them each expert gets. By all threads. */
EP_DEV void ep_low_say_counts(const EpRank& r, const EpLowDispatchArgs& a, const EpLowSender& s, ep_u64 op) {
    const ep_u32 local = r.w.local_experts, units = (ep_u32)ep_unit_count(4ull * local);
    EP_SHORT for (ep_u32 item = threadIdx.x; item < r.w.ranks * units; item += EP_LOW_THREADS) {
        const ep_u32 rank = item / units, first = (item - rank * units) * 3;
        if (s.state[rank] != EP_PEER_NOW) continue;
        const ep_u32* gets = s.gets + rank * local + first;
        ep_put_unit(ep_low_at(rank, ep_low_unit_counts(r.w, op, r.me) + first / 3 * EP_UNIT_BYTES), gets[0], first + 1 < local ? gets[1] : 0,
                    first + 2 < local ? gets[2] : 0, s.tag);
    }
    EP_SHORT for (ep_u32 peer = ep_low_served(); peer < r.w.ranks; peer += EP_LOW_THREADS) {
        if (s.state[peer] != EP_PEER_NOW) continue;
        ep_low_put_head(r, op, EP_LOW_DISPATCH, peer, s.rows[peer], a.tokens, s.tag);
    }
}

/* Puts the headers of the rows of tokens begin .. end, counted from `base` on, to the ranks that are free. By all threads. */
EP_DEV void ep_low_put_headers(const EpRank& r, const EpLowDispatchArgs& a, const EpLowSender& s, ep_u64 op, bool all, ep_u32 base, ep_u32 begin,
                               ep_u32 end) {
    const ep_u32 parts = 1 + r.w.topk, words = ep_low_words(a, base);
    EP_SHORT for (ep_u32 item = begin * parts + threadIdx.x; item < end * parts; item += EP_LOW_THREADS) {
        const ep_u32 token = item / parts, part = item - token * parts, word = token / 32, bit = 1u << token % 32;
        /* An EpUnitRow. */
        EpUnitChoice v = {(ep_i32)r.me, ep_float_of(base + token), ep_low_stamp(r.generation, op)};
        if (part > 0) v = ep_low_unit_choice(r, a, s, all, base, words, token, part - 1);
        EP_SHORT for (ep_u32 rank = 0; rank < r.w.ranks; ++rank) {
            const ep_u32 member = s.member[rank * EP_LOW_WORDS + word];
            if (!(member & bit) || s.state[rank] != EP_PEER_NOW) continue;
            const ep_u32 position = s.before[rank * EP_LOW_WORDS + word] + __popc(member & (bit - 1));
            const EpAt to = ep_low_at(rank, ep_low_unit_header(r.w, op, r.me, position) + part * EP_UNIT_BYTES);
            ep_put_unit(to, (ep_u32)v.expert, __float_as_uint(v.weight), v.index, s.tag);
        }
    }
}

/* Counts what is noted of `words` words of tokens. By all threads. */
EP_DEV void ep_low_count(const EpRank& r, const EpLowSender& s, ep_u32 words) {
    EP_SHORT for (ep_u32 rank = ep_low_served(); rank < r.w.ranks; rank += EP_LOW_THREADS) {
        ep_u32 sum = s.rows[rank];
        EP_SHORT for (ep_u32 word = 0; word < words; ++word) {
            s.before[rank * EP_LOW_WORDS + word] = sum;
            sum += __popc(s.member[rank * EP_LOW_WORDS + word]);
        }
        s.rows[rank] = sum;
    }
    EP_SHORT for (ep_u32 e = threadIdx.x; e < r.w.experts; e += EP_LOW_THREADS) {
        ep_u32 more = 0;
        EP_SHORT for (ep_u32 word = 0; word < words; ++word) more += __popc(s.chosen[word * r.w.experts + e]);
        s.gets[e] += more;
    }
}

/* Keeps where the tokens of the batch went, for the combine and the user. By all threads. */
EP_DEV void ep_low_keep_routed(const EpRank& r, const EpLowDispatchArgs& a, const EpLowSender& s) {
    EP_SHORT for (ep_u32 rank = EP_LOW_WARPS - 1 - threadIdx.x / 32; rank < r.w.ranks; rank += EP_LOW_WARPS) {
        ep_u32 picks = 0;
        EP_SHORT for (ep_u32 e = threadIdx.x % 32; e < r.w.local_experts; e += 32) picks += s.gets[rank * r.w.local_experts + e];
        picks = __reduce_add_sync(EP_FULL, picks);
        if (threadIdx.x % 32 != 0) continue;
        ((ep_u32*)a.routed)[rank] = s.rows[rank];
        ((ep_u32*)a.routed)[r.w.ranks + rank] = picks;
        ep_low_add((ep_u64*)a.counters + rank, s.rows[rank]);
    }
}

/* Finds the rows' order at each rank and expert and puts, to the ranks that are free, the headers of the share's tokens, and with the last of these
   shares how many rows there are. `first`: the first time; choices are looked at then, too, before anything is put. By all threads of a block that
   has counted nothing; true where choices are wrong. */
EP_DEV bool ep_low_tell(const EpRank& r, const EpLowDispatchArgs& a, const EpLowSender& s, ep_u32 share, ep_u64 op, bool first) {
    const bool counts = share == a.roles.tells;
    const ep_u32 begin = ep_low_told_before(a, share), end = ep_low_told_before(a, share + 1);
    bool all = true;
    EP_SHORT for (ep_u32 rank = 0; rank < r.w.ranks; ++rank) all &= ep_low_takes_part(rank);
    /* Of a batch of one turn all choices are looked at below. */
    if (first && a.tokens > EP_LOW_THREADS && ep_low_looks_wrong(r, a, s, nullptr)) return true;
    if (!first) {
        ep_low_count_nothing(r, a, s);
        __syncthreads();
    }
    EP_SHORT for (ep_u32 base = 0;; base += EP_LOW_THREADS) {
        const ep_u32 left = a.tokens - base < EP_LOW_THREADS ? a.tokens - base : EP_LOW_THREADS, words = ep_low_words(a, base);
        const bool bad = ep_low_look_at(r, a, s, base, left, true, first, nullptr) && first;
        if (__syncthreads_or(bad)) return true;
        ep_low_count(r, s, words);
        __syncthreads();
        const bool last = base + EP_LOW_THREADS >= a.tokens;
        if (last && counts) ep_low_say_counts(r, a, s, op);
        ep_low_put_headers(r, a, s, op, all, base, begin > base ? begin - base : 0, end < base + left ? (end > base ? end - base : 0) : left);
        /* No others' headers lie behind these. */
        if (last || (!counts && base + left >= end)) break;
        __syncthreads();
        ep_low_clear(r, s, ep_low_words(a, base + EP_LOW_THREADS));
        __syncthreads();
    }
    if (first && counts) ep_low_keep_routed(r, a, s);
    return false;
}
#endif
