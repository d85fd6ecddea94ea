/*
 * ep_low_send_units.h: how the rows of a low-latency dispatch leave, where all ranks are of one node: as units (F11), which announce themselves.
 *
 *   head      a unit of each rank for each, in every operation: how many rows come
 *   headers   of all rows, in order: put ahead of them
 *   rows      payloads, each at the place of its token
 *   before    choices are looked at before any unit is put: what is put is there, and nobody can take it back
 *
 * Whoever polls a unit sees it whole, so neither fences nor cells announce a row. Its tag is that of the operation, which counts on through all
 * generations: what lies in its place from before has another.
 */
#ifndef EP_LOW_SEND_UNITS_H
#define EP_LOW_SEND_UNITS_H
#include "ep_low_headers.h"

#define EP_LOW_LOOKS_FIRST true

/* Where the row of token goes, at a rank. */
EP_DEV EpAt ep_low_row_place(const EpRank& r, ep_u64 op, ep_u32 rank, ep_u32 token) {
    return ep_low_at(rank, ep_low_unit_row(r.w, ep_planted(r, EP_PLANT_LOW_WRONG_BANK) ? op + 1 : op, r.me, token));
}
/* A row's own header has gone ahead. */
EP_DEV void ep_low_keep_header(const EpRank&, const EpLowSender&, ep_u64, ep_u32, ep_u32, EpChoice) {}

/* A planted fault: a unit that is stored in two parts, first the one with the tag. */
EP_RARE void ep_low_tear(EpAt to, ep_u32 x, ep_u32 y, ep_u32 z, ep_u32 tag) {
    ep_put4(to + 12, tag);
    ep_be_slow();
    ep_put_unit(to, x, y, z, tag);
}

/* Puts the row at hand to the ranks that are free. By all threads. */
EP_DEV void ep_low_put_row(const EpRank& r, const EpLowSender& s) {
    const ep_u32* words = (const ep_u32*)(s.row + r.w.header_bytes);
    const ep_u32 units = (ep_u32)ep_unit_count(r.w.payload_bytes);
    EP_SHORT for (ep_u32 unit = threadIdx.x; unit < units; unit += EP_LOW_THREADS) {
        const ep_u32 x = words[3 * unit], y = words[3 * unit + 1], z = words[3 * unit + 2];
        EP_SHORT for (ep_u32 turn = 1; turn <= r.w.ranks; ++turn) {
            const ep_u32 rank = r.me + turn < r.w.ranks ? r.me + turn : r.me + turn - r.w.ranks;
            if (!ep_low_goes_now(s, rank)) continue;
            if (ep_planted(r, EP_PLANT_LOW_UNITS_TORN)) ep_low_tear(s.place[rank] + unit * EP_UNIT_BYTES, x, y, z, s.tag);
            else ep_put_unit(s.place[rank] + unit * EP_UNIT_BYTES, x, y, z, s.tag);
        }
    }
}
/* It is there when it is there. */
EP_DEV void ep_low_row_was_put(const EpRank&, const EpLowSender&, ep_u64, ep_u32, bool) {}

/* Parts of a header as it is sent ahead: its units. */
EP_DEV ep_u32 ep_low_header_parts(const EpRank& r) { return (ep_u32)ep_unit_count(r.w.header_bytes); }
/* Three words of a token's header. From the fifth word on experts and weights take turns; so unit 1 has the stamp, an expert and its weight, and then
   an even one has an expert, its weight and the next expert, and the odd one behind it the weight of that and one more choice. */
EP_DEV EpUnit ep_low_make_header_part(const EpRank& r, const EpLowDispatchArgs& a, ep_u64 op, bool all, ep_u32 token, ep_u32 part) {
    if (part == 0) return make_int4((int)r.me, (int)token, 0, 0);
    const ep_u32 k = (3 * part - 2) / 2; /* of the second of the two choices that it has words of */
    const EpChoice second = ep_low_choice_to_send(r, a, all, token, k);
    if (part == 1) return make_int4((int)ep_low_stamp(r.generation, op), second.expert, __float_as_int(second.weight), 0);
    const EpChoice first = ep_low_choice_to_send(r, a, all, token, k - 1);
    return part % 2 ? make_int4(__float_as_int(first.weight), second.expert, __float_as_int(second.weight), 0)
                    : make_int4(first.expert, __float_as_int(first.weight), second.expert, 0);
}
EP_DEV void ep_low_put_header_part(const EpRank& r, const EpLowSender& s, ep_u64 op, ep_u32 rank, ep_u32 position, ep_u32 part, EpUnit v) {
    ep_put_unit(ep_low_at(rank, ep_low_unit_header(r.w, op, r.me, position) + part * EP_UNIT_BYTES), (ep_u32)v.x, (ep_u32)v.y, (ep_u32)v.z, s.tag);
}

/* Says to the ranks that are filled now how many rows come. */
EP_DEV void ep_low_say_rows(const EpRank& r, const EpLowSender& s, ep_u64 op) {
    EP_SHORT for (ep_u32 peer = ep_low_served(); peer < r.w.ranks; peer += EP_LOW_THREADS) {
        if (s.state[peer] != EP_PEER_NOW) continue;
        const ep_u64 value = ep_arrival(r.w, op, EP_LOW_DISPATCH, s.rows[peer] + (ep_planted(r, EP_PLANT_LOW_COUNT_OFF_BY_ONE) ? 1 : 0));
        if (!ep_posts(r, peer, EP_LANE_LOW_ROWS, value)) continue;
        ep_put_unit(ep_low_at(peer, ep_low_unit_head(r.w, op, r.me)), (ep_u32)value, (ep_u32)(value >> 32), 0, s.tag);
    }
}
#endif
