/*
 * ep_combine_rows.h: rows that a warp sums, on their way through its shared memory: some parts of rows ahead of what it adds, over the end of a token too.
 *
 *   memory   shared: the warp's desk (EpDesk). A lane fetches what it adds itself, so nobody meets for a part
 *   rules    F9, F10: what was fetched has been read when it was waited for (ep_fetch_wait); then lanes meet, and slots are given back
 *
 * A row's header and weights are fetched along with its first part, and looked at when that has come.
 */
#ifndef EP_COMBINE_ROWS_H
#define EP_COMBINE_ROWS_H
#include "ep_offers.h"
#include "ep_ring.h"
#include "ep_sum.h"

/* What a warp knows of a rank whose rows it brings together. */
struct EpRoute {
    EpInlet ring;
    ep_u32 ahead; /* rows found, not yet given back */
    ep_u32 through_ring;
    /* A token has a row from the rank where any of these of its positions is one: its own, or those of its node, which sends a sum. */
    ep_u32 first, span;
};
static_assert(sizeof(EpRoute) <= EP_ROUTE_BYTES, "the host makes room for another EpRoute");

/* A row of a token. */
struct EpFound {
    EpUnit header; /* that has come, of a row in a ring */
    EpAt row;
    EpAt head;    /* where its header lies; nowhere where it is pulled */
    EpAt weights; /* weights_step bytes apart; or nowhere */
    ep_u32 weights_step;
    ep_u32 rank;
    ep_u32 position; /* among those of its rank */
    ep_u32 reserved[3];
};
static_assert(sizeof(EpFound) == EP_FOUND_BYTES, "the host makes room for another EpFound");

/* A token's rows, ranks ascending. Those from `below` on of which there are `own` have a sum of their own, which is rounded before it is added in their place. */
struct EpTokenRows {
    ep_u32 token, count, own, below;
};
static_assert(sizeof(EpTokenRows) == EP_TOKEN_ROWS_BYTES, "the host makes room for another EpTokenRows");

/* Tokens whose positions lie on a desk. */
#ifdef EP_FAR_H
#define EP_DESK_HELD EP_TEAM_HELD
#else
#define EP_DESK_HELD EP_TOKENS_HELD
#endif

/* Tokens whose rows a warp brings together: those of the own rank (a reducer) or those of a rank of another node (a gatherer). */
struct EpTokens {
    ep_u32 source;           /* whose they are */
    ep_u32 step, first;      /* of a token, from one to the next; the rank that the first one is of */
    const ep_i32* positions; /* of its rows at each rank, -1 where it has none */
    ep_u32 held;             /* the first of those whose positions lie on the desk; EP_FULL for none */
    EpSource own;            /* where the rows of the own rank are */
};

/* What a warp that sums has in shared memory; the warps of a team have the leader's things, routes and positions together. */
struct EpDesk {
    ep_u8* stages;       /* [depth, columns, 512]: parts of rows */
    EpFound* found;      /* [EP_TOKENS_AHEAD, most] */
    EpTokenRows* tokens; /* [EP_TOKENS_AHEAD] */
#ifdef EP_FAR_H
    ep_u8* lead;         /* EP_LEAD_BYTES: what the leader knows (ep_combine_team.h), */
    ep_u8* baton;        /* EP_BATON_BYTES: and says; */
    ep_u32* votes;       /* [ranks]: of the tokens held that have a row from a rank a bit each */
#endif
    EpRoute* routes;     /* [ranks] */
    ep_i32* positions;   /* [EP_DESK_HELD, ranks] */
    float* weights;      /* [EP_TOKENS_AHEAD, most, topk] */
    ep_u32 most;         /* rows of a token */
    ep_u32 topk;
    ep_u32 depth;        /* parts on their way: 2, 4 or 8 */
};

/* Rows that a token has at most: one of each rank of the node, and a sum of each other node. */
EP_DEV ep_u32 ep_most_rows(const EpRank& r) { return r.w.ranks_per_node + r.w.ranks / r.w.ranks_per_node - 1; }

/* Bytes of a desk of so many warps, as the host counts them, for parts of `part` bytes. */
EP_DEV ep_u32 ep_desk_bytes(const EpRank& r, ep_u32 depth, ep_u32 part, ep_u32 warps = 1) {
    const ep_u32 of_token = ep_most_rows(r) * (EP_FOUND_BYTES + r.w.topk * 4) + EP_TOKEN_ROWS_BYTES;
    ep_u32 of_rank = EP_ROUTE_BYTES + EP_DESK_HELD * 4, lead = 0;
#ifdef EP_FAR_H
    of_rank += 4;
    lead = EP_LEAD_BYTES + EP_BATON_BYTES;
#endif
    return (warps * (depth * part + EP_TOKENS_AHEAD * of_token) + lead + r.w.ranks * of_rank + 15) / 16 * 16;
}
/* The desk of the `member`-th of so many warps. */
EP_DEV EpDesk ep_desk(const EpRank& r, ep_u8* memory, ep_u32 depth, ep_u32 part, ep_u32 warps = 1, ep_u32 member = 0) {
    EpDesk desk;
    desk.most = ep_most_rows(r);
    desk.topk = r.w.topk;
    desk.depth = depth;
    desk.stages = memory + member * depth * part;
    EpFound* found = (EpFound*)(memory + warps * depth * part);
    EpTokenRows* tokens = (EpTokenRows*)(found + warps * EP_TOKENS_AHEAD * desk.most);
    ep_u8* rest = (ep_u8*)(tokens + warps * EP_TOKENS_AHEAD);
    desk.found = found + member * EP_TOKENS_AHEAD * desk.most;
    desk.tokens = tokens + member * EP_TOKENS_AHEAD;
#ifdef EP_FAR_H
    desk.lead = rest;
    desk.baton = rest + EP_LEAD_BYTES;
    rest = desk.baton + EP_BATON_BYTES;
#endif
    desk.routes = (EpRoute*)rest;
    desk.positions = (ep_i32*)(rest + r.w.ranks * EP_ROUTE_BYTES);
    ep_u32* words = (ep_u32*)(desk.positions + EP_DESK_HELD * r.w.ranks);
#ifdef EP_FAR_H
    desk.votes = words;
    words += r.w.ranks;
#endif
    desk.weights = (float*)words + member * EP_TOKENS_AHEAD * desk.most * desk.topk;
    return desk;
}

/* Brings the positions of a token and of some beside it to the desk, where they are not there: one wait for all of them. By a warp. */
EP_DEV void ep_hold(EpTokens& t, const EpDesk& desk, ep_u32 token, ep_u32 end) {
    const ep_u32 first = token - token % EP_DESK_HELD;
    if (t.held == first || token >= end) return;
    t.held = first;
    const ep_u32 words = (end - first < EP_DESK_HELD ? end - first : EP_DESK_HELD) * t.step;
    const ep_i32* from = t.positions + (ep_u64)first * t.step;
    ep_warp_meet();
#pragma unroll 1
    for (ep_u32 base = ep_warp_lane(); base < words; base += 32 * 4) {
        ep_i32 some[4];
#pragma unroll
        for (ep_u32 i = 0; i < 4; ++i) some[i] = base + i * 32 < words ? from[base + i * 32] : 0;
#pragma unroll
        for (ep_u32 i = 0; i < 4; ++i)
            if (base + i * 32 < words) desk.positions[base + i * 32] = some[i];
    }
    ep_warp_meet();
}
/* The positions of a token that is held. */
EP_DEV const ep_i32* ep_held(const EpTokens& t, const EpDesk& desk, ep_u32 token) { return desk.positions + token % EP_DESK_HELD * t.step; }

/* The rows of the n-th token, ever. */
EP_DEV EpFound* ep_found(const EpDesk& desk, ep_u32 n) { return desk.found + n % EP_TOKENS_AHEAD * desk.most; }
EP_DEV float* ep_weights(const EpDesk& desk, ep_u32 n) { return desk.weights + n % EP_TOKENS_AHEAD * desk.most * desk.topk; }

/* Where a warp is in the parts of tokens' rows: a part of all rows, then the next part. */
struct EpPart {
    EpTokenRows of;
    ep_u32 row;   /* of those of the part */
    ep_u32 at;    /* the part's first byte; the end of the row where there is no part left */
};

EP_DEV EpPart ep_no_part(ep_u32 bytes) { return EpPart{{0, 0, 0, 0}, 0, bytes}; }

/* The next part; from one of a row to the next it is `step` bytes. */
template <int columns> EP_DEV void ep_next_part(EpPart& p, ep_u32 step = 512 * columns) {
    if (++p.row < p.of.count) return;
    p.row = 0;
    p.at += step;
}

/* Fetches headers and weights of the n-th token's rows, as a part of the next fetch that ends. A lane fetches what it looks at. */
EP_DEV void ep_fetch_heads(const EpRank& r, const EpDesk& desk, ep_u32 n, ep_u32 rows, bool weights) {
    EpFound* found = ep_found(desk, n);
#pragma unroll 1
    for (ep_u32 i = ep_warp_lane(); i < rows; i += 32)
        if (ep_is_somewhere(found[i].head)) ep_fetch16(&found[i].header, found[i].head);
    if (!weights) return;
#pragma unroll 1
    for (ep_u32 i = 0; i < rows; ++i) {
        float* to = ep_weights(desk, n) + i * desk.topk;
#pragma unroll 1
        for (ep_u32 k = ep_warp_lane(); k < desk.topk; k += 32) {
            if (ep_is_somewhere(found[i].weights)) ep_fetch4(to + k, found[i].weights + k * found[i].weights_step);
            else to[k] = 0.0f;
        }
    }
}

/* Where a lane's units of the so-many-th part lie. */
template <int columns> EP_DEV ep_u8* ep_stage(const EpDesk& desk, ep_u32 number) {
    return desk.stages + (number & (desk.depth - 1)) * (512 * columns) + ep_warp_lane() * 16;
}

/* Fetches a part of a row of the n-th token, the `number`-th of all. One row of none is an empty fetch. */
template <int columns> EP_DEV void ep_fetch_part(const EpDesk& desk, ep_u32 n, const EpPart& p, ep_u32 bytes, ep_u32 number) {
    if (p.of.count > 0) {
        /* The rows that have a sum of their own come first. */
        const ep_u32 row = p.row < p.of.own ? p.of.below + p.row : p.row - p.of.own < p.of.below ? p.row - p.of.own : p.row;
        const ep_u32 at = p.at + ep_warp_lane() * 16;
        const EpAt from = ep_found(desk, n)[row].row + at;
        ep_u8* to = ep_stage<columns>(desk, number);
#pragma unroll
        for (int i = 0; i < columns; ++i)
            if (at + i * 512 < bytes) ep_fetch16(to + i * 512, from + i * 512);
    }
    ep_fetch_end();
}

/* Waits until the oldest of so many parts has come: where a desk is full, for no other. */
EP_DEV void ep_await_part(ep_u32 in_flight) {
    switch (in_flight) {
    case 8: return ep_fetch_wait<7>();
    case 4: return ep_fetch_wait<3>();
    case 2: return ep_fetch_wait<1>();
    default: return ep_fetch_wait<0>();
    }
}

template <int columns> EP_DEV void ep_sums_clear(EpSums<columns>& sums) {
#pragma unroll
    for (int i = 0; i < columns; ++i) ep_sum_clear(sums.of[i]);
}
template <int columns> EP_DEV void ep_sums_add(EpSums<columns>& sums, const EpUnit (&held)[columns]) {
#pragma unroll
    for (int i = 0; i < columns; ++i) ep_sum_add(sums.of[i], held[i]);
}

/* Adds a part of a row that has come. A sum of all rows begins with what `start` does to it; that of `own` ones at zero. */
template <int columns, class Start>
EP_DEV void ep_add_part(const EpDesk& desk, const EpPart& p, ep_u32 number, EpSums<columns>& sums, EpUnit (&own)[columns], Start start) {
    if (p.row == 0) {
        ep_sums_clear(sums);
        if (p.of.own == 0) start(sums);
    }
    if (p.of.count == 0) return;
    const ep_u8* from = ep_stage<columns>(desk, number);
    EpUnit held[columns];
#pragma unroll
    for (int i = 0; i < columns; ++i) held[i] = ep_ld16(from + i * 512);
    ep_sums_add(sums, held);
    if (p.row + 1 == p.of.own) {
#pragma unroll
        for (int i = 0; i < columns; ++i) own[i] = ep_sum_round(sums.of[i]);
        ep_sums_clear(sums);
        start(sums);
    }
    if (p.of.own > 0 && p.row + 1 == p.of.own + p.of.below) ep_sums_add(sums, own);
}

/* The sum of the n-th token's weights of choice k, in the order of its rows' sum, unrounded. */
EP_DEV float ep_add_weights(const EpRank&, const EpDesk& desk, ep_u32 n, const EpTokenRows& rows, ep_u32 k) {
    const float* weights = ep_weights(desk, n) + k;
    float sum = 0.0f, own = 0.0f;
#pragma unroll 1
    for (ep_u32 i = 0; i < rows.count; ++i) {
        const float weight = weights[i * desk.topk];
        if (i - rows.below >= rows.own) sum += weight;
        else own += weight;
        if (rows.own > 0 && i + 1 == rows.below + rows.own) sum += own;
    }
    return sum;
}
#endif
