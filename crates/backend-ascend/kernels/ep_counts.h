/*
 * ep_counts.h: the exchange of counts, by two cores: the first sender tells every rank what this one will send, the first receiver gathers what
 * the others tell. Over several servers counts go along the rail, and what came along it is passed on within the server. Counts lie in the windows, in a bank for each parity of the operation.
 *
 *   UB      two buffers: numbers of a message, and its header; of the gathering core the sums of choices, too
 *   waits   for no rank in particular: a core looks at all ranks that are still to be told, or to tell
 */
#ifndef EP_COUNTS_H
#define EP_COUNTS_H
#include "ep_mail.h"
#include "ep_rows.h"

static_assert(2 * EP_MOST_COUNTS * 4 <= EP_PIECE_BYTES, "a buffer has room for two parts of a message");
#define EP_GATHER_BYTES (EP_ROWS_BYTES + EP_MOST_COUNTS * 4)
static_assert(EP_GATHER_BYTES + EP_COMMON_BYTES <= EP_UB_BYTES, "the buffers of the core that gathers counts");

/* Whether the peer has read what this rank told it two operations ago. These kernels imply it: who has received all rows of a dispatch has a
   ring's opening from every peer, which had read the counts before. The bank is awaited all the same, as the protocol says. */
EP_DEV bool ep_bank_is_free(const EpCore& c, ep_u32 peer) {
    if (c.op < c.launch.r.first_op + 2) return true;
    return ep_peek(c, peer, EP_LANE_CONTROL, EP_COUNTER_DONE) >= c.op - 2;
}

/* Puts the message that lies in buffer i to a peer, whose bank is free. */
EP_DEV void ep_tell_rank(EpCore& c, const EpBuffers& b, ep_u32 i, ep_u32 peer) {
    const EpRank& r = c.launch.r;
    const ep_u64 at = ep_window(c, peer) + ep_counts(r.w, EP_PLANTED(c, WRONG_BANK) ? c.op + 1 : c.op, r.me);
    ep_store(at, b.side[i], sizeof(EpCountsHeader));
    ep_store(at + sizeof(EpCountsHeader), b.payload[i], (r.w.ranks + r.w.experts) * 4);
    if (!EP_PLANTED(c, COUNTS_EARLY)) ep_landed(c);
    ep_publish(c, peer, EP_LANE_CONTROL, EP_COUNTER_COUNTS, c.op);
}

/* Over several servers: whether what the rail peers tell is there, and whose is not. What came along the rail is passed on in the server. */
EP_DEV bool ep_rail_is_there(const EpCore& c, ep_u32& missing) {
    const EpRank& r = c.launch.r;
    for (ep_u32 node = 0; node < r.w.nodes; ++node) {
        missing = ep_on_rail(c, node, r.me);
        if (missing == r.me || !ep_takes_part(c, missing)) continue;
        if (ep_peek(c, missing, EP_LANE_CONTROL, EP_COUNTER_COUNTS) < c.op) return false;
    }
    return true;
}

/* Passes on to a rank of the server, whose bank is free, what this rank and its rail peers tell. */
EP_DEV void ep_pass_counts(EpCore& c, EpBuffers& b, ep_u32 peer) {
    const EpRank& r = c.launch.r;
    const ep_u32 bytes = (ep_u32)sizeof(EpCountsHeader) + (r.w.ranks + r.w.experts) * 4;
    for (ep_u32 node = 0; node < r.w.nodes; ++node) {
        const ep_u32 source = ep_on_rail(c, node, r.me);
        if (!ep_takes_part(c, source)) continue;
        const ep_u64 at = ep_counts(r.w, c.op, source);
        const ep_u32 i = ep_turn(c, b);
        ep_load(b.payload[i], c.own + at, bytes);
        ep_filled(c, i);
        ep_store(ep_window(c, peer) + at, b.payload[i], bytes);
        ep_turn_over(c, b);
    }
    ep_landed(c);
    ep_publish(c, peer, EP_LANE_CONTROL, EP_COUNTER_COUNTS, c.op);
}

/* Over several servers: this rank's counts lie in the own window, from which all of it is told. */
EP_DEV void ep_tell_servers(EpCore& c, EpBuffers& b) {
    const EpRank& r = c.launch.r;
    bool told[EP_RANKS];
    for (ep_u32 peer = 0; peer < r.w.ranks; ++peer) told[peer] = !ep_is_neighbour(c, peer);
    for (;;) {
        bool moved = false;
        ep_u32 open = r.w.ranks, missing;
        const bool rail = ep_rail_is_there(c, missing);
        for (ep_u32 peer = r.w.ranks; peer-- > 0; ) {
            if (told[peer]) continue;
            open = peer;
            if (!ep_bank_is_free(c, peer)) continue;
            if (!ep_is_near(c, peer)) ep_announce(c, peer, EP_LANE_CONTROL, EP_COUNTER_COUNTS, c.op, EP_MAIL_COUNTS);
            else if (rail) ep_pass_counts(c, b, peer);
            else continue;
            told[peer] = moved = true;
        }
        if (open == r.w.ranks) return;
        if (moved) ep_moved(c);
        else if (rail ? ep_vain(c, open, EP_LANE_CONTROL, EP_PHASE_BANK, 0, c.op - 2)
                      : ep_vain(c, missing, EP_LANE_CONTROL, EP_PHASE_COUNTS, 0, c.op)) return;
    }
}

EP_DEV void ep_tell_counts(EpCore& c, const EpCountsArgs& a, EpBuffers& b) {
    const EpRank& r = c.launch.r;
    const ep_u32 i = ep_turn(c, b);
    ep_load(b.payload[i], a.numbers, (r.w.ranks + r.w.experts) * 4);
    const EpCountsHeader header = {ep_header(c, 0, 0), a.tokens, 0, {0, 0}};
    const uint32_t* words = (const uint32_t*)&header;
    for (ep_u32 word = 0; word < sizeof(EpCountsHeader) / 4; ++word) b.side[i].ReinterpretCast<uint32_t>().SetValue(word, words[word]);
    ep_written(i);
    ep_filled(c, i);
    if (r.w.nodes > 1) {
        const ep_u64 at = c.own + ep_counts(r.w, c.op, r.me);
        ep_store(at, b.side[i], sizeof(EpCountsHeader));
        ep_store(at + sizeof(EpCountsHeader), b.payload[i], (r.w.ranks + r.w.experts) * 4);
        ep_landed(c);
        ep_turn_over(c, b);
        return ep_tell_servers(c, b);
    }
    bool told[EP_RANKS];
    for (ep_u32 peer = 0; peer < r.w.ranks; ++peer) told[peer] = peer == r.me || !ep_takes_part(c, peer);
    for (;;) {
        bool moved = false;
        ep_u32 open = r.w.ranks;
        for (ep_u32 peer = r.w.ranks; peer-- > 0; ) {
            if (told[peer]) continue;
            open = peer;
            if (!ep_bank_is_free(c, peer)) continue;
            ep_tell_rank(c, b, i, peer);
            told[peer] = moved = true;
        }
        if (open == r.w.ranks) break;
        if (moved) ep_moved(c);
        else if (ep_vain(c, open, EP_LANE_CONTROL, EP_PHASE_BANK, 0, c.op - 2)) break;
    }
    ep_turn_over(c, b);
}

/* What is gathered. */
struct EpGathered {
    LocalTensor<uint32_t> choices; /* received of each local expert */
    ep_u64 rows[EP_RANKS];         /* to each rank, of all sources */
};

/* Reads the header of a rank's message; whether it is of this operation. */
EP_DEV bool ep_read_counts_header(EpCore& c, EpBuffers& b, ep_u32 source, ep_u64 at, ep_u32& tokens) {
    const ep_u32 i = ep_turn(c, b);
    ep_load(b.side[i], at, sizeof(EpCountsHeader));
    ep_read(c, i);
    EpCountsHeader header;
    uint32_t* words = (uint32_t*)&header;
    for (ep_u32 word = 0; word < sizeof(EpCountsHeader) / 4; ++word) words[word] = b.side[i].ReinterpretCast<uint32_t>().GetValue(word);
    ep_turn_over(c, b);
    tokens = header.tokens;
    return EP_PLANTED(c, COUNTS_UNCHECKED) || ep_is_same(c, source, ep_compare_headers(ep_header(c, 0, 0), header.opening));
}

/* Takes the numbers of a rank, which lie at `numbers`; 0: it is masked, and all are zero. */
EP_DEV void ep_take_counts(EpCore& c, const EpCountsArgs& a, EpBuffers& b, EpGathered& g, ep_u32 source, ep_u64 numbers, ep_u32 tokens) {
    const EpWindow& w = c.launch.r.w;
    const ep_u32 i = ep_turn(c, b), owner = EP_PLANTED(c, COUNTS_OF_OTHERS) ? (c.launch.r.me + 1) % w.ranks : c.launch.r.me;
    LocalTensor<uint32_t> rows = b.payload[i].ReinterpretCast<uint32_t>(), choices = b.payload[i][EP_MOST_COUNTS * 4].ReinterpretCast<uint32_t>();
    if (numbers) {
        ep_load(b.payload[i], numbers, w.ranks * 4);
        ep_load(b.payload[i][EP_MOST_COUNTS * 4], numbers + (w.ranks + owner * w.local_experts) * 4, w.local_experts * 4);
        if (!EP_PLANTED(c, COUNTS_FLAG)) {
            ep_read(c, i);
            ep_filled(c, i);
        }
        for (ep_u32 rank = 0; rank < w.ranks; ++rank) g.rows[rank] += rows.GetValue(rank);
        for (ep_u32 expert = 0; expert < w.local_experts; ++expert) {
            const ep_u32 before = g.choices.GetValue(expert), more = choices.GetValue(expert);
            g.choices.SetValue(expert, before + more < before ? 0xffffffffu : before + more);
        }
    } else if (!EP_PLANTED(c, MASKED_COUNTED)) {
        for (ep_u32 rank = 0; rank < w.ranks; ++rank) rows.SetValue(rank, 0u);
        ep_written(i);
    }
    ep_store(a.matrix + (ep_u64)source * w.ranks * 4, b.payload[i], w.ranks * 4);
    ep_turn_over(c, b);
    ep_store_word(c, a.tokens_of + source * 4, tokens, 4);
}

/* From whom this rank learns what a source tells: itself where they are neighbours, else the rank of this server on its rail. */
EP_DEV ep_u32 ep_teller(const EpCore& c, ep_u32 source) { return ep_is_neighbour(c, source) ? source : ep_on_rail(c, ep_own_node(c), source); }

/* Takes what has come of a rank; whether something has. */
EP_DEV bool ep_look_for_counts(EpCore& c, const EpCountsArgs& a, EpBuffers& b, EpGathered& g, ep_u32 source) {
    const EpRank& r = c.launch.r;
    if (source == r.me) {
        ep_take_counts(c, a, b, g, source, a.numbers, a.tokens);
    } else if (!ep_takes_part(c, source)) {
        ep_take_counts(c, a, b, g, source, 0, 0);
    } else {
        if (ep_peek(c, ep_teller(c, source), EP_LANE_CONTROL, EP_COUNTER_COUNTS) < c.op) return false;
        const ep_u64 at = c.own + ep_counts(r.w, c.op, source);
        ep_u32 tokens;
        if (!ep_read_counts_header(c, b, source, at, tokens)) return false;
        ep_take_counts(c, a, b, g, source, at + sizeof(EpCountsHeader), tokens);
    }
    return true;
}

/* Refuses more rows than can be numbered, and more than there is room for here. */
EP_DEV void ep_check_totals(EpCore& c, const EpCountsArgs& a, const EpGathered& g) {
    const EpRank& r = c.launch.r;
    for (ep_u32 rank = 0; rank < r.w.ranks; ++rank)
        if (g.rows[rank] >= 1ull << 31) ep_refuse(c, r.me, EP_FIELD_ROWS_TOO_MANY, 31, 32);
    if (a.bound != 0 && g.rows[r.me] > a.bound && !EP_PLANTED(c, BOUND_UNHEEDED)) ep_refuse(c, r.me, EP_FIELD_WORST_ROWS, a.bound, g.rows[r.me]);
}

/* `ub`: EP_GATHER_BYTES. */
EP_DEV void ep_gather_counts(EpCore& c, const EpCountsArgs& a, EpBuffers& b, const EpBytes& ub) {
    const EpWindow& w = c.launch.r.w;
    EpGathered g;
    g.choices = ub[EP_ROWS_BYTES].ReinterpretCast<uint32_t>();
    bool there[EP_RANKS];
    for (ep_u32 source = 0; source < w.ranks; ++source) {
        there[source] = false;
        g.rows[source] = 0;
    }
    for (ep_u32 expert = 0; expert < w.local_experts; ++expert) g.choices.SetValue(expert, 0u);
    for (;;) {
        bool moved = false;
        ep_u32 open = w.ranks;
        for (ep_u32 source = w.ranks; source-- > 0; ) {
            if (there[source]) continue;
            there[source] = ep_look_for_counts(c, a, b, g, source);
            if (there[source]) moved = true;
            else open = source;
            if (c.failed) return;
        }
        if (open == w.ranks) break;
        if (moved) ep_moved(c);
        else if (ep_vain(c, ep_teller(c, open), EP_LANE_CONTROL, EP_PHASE_COUNTS, 0, c.op)) return;
    }
    ep_written(0);
    ep_store(a.arrived, ub[EP_ROWS_BYTES], w.local_experts * 4);
    ep_check_totals(c, a, g);
}

#endif
