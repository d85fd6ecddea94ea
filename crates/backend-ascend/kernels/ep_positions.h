/*
 * ep_positions.h: from the router's choices to positions and counts, by all cores of a rank; nothing leaves it. A core serves a contiguous share
 * of the tokens, twice: it counts, tells the cores behind it, and then knows where its rows begin.
 *
 *   UB      choices of a piece of the share, its positions, the counts of the core, and those of another
 *   waits   for the cores before it, which wait for cores before them: the first waits for nobody
 *
 * A row's position is its index among the rows from this rank to that destination, in token order (ep_core::plan).
 */
#ifndef EP_POSITIONS_H
#define EP_POSITIONS_H
#include "ep_share.h"

/* Tokens of a piece: their choices and positions fit. */
#define EP_SHARE_TOKENS 64u
#define EP_SHARE_CHOICES_BYTES (EP_SHARE_TOKENS * EP_TOPK * 8)
#define EP_SHARE_POSITION_BYTES (EP_SHARE_TOKENS * EP_RANKS * 4)
/* Rows to each rank, choices of each expert, and 1 + the first token whose choices are wrong. */
#define EP_MOST_TOLD (EP_MOST_COUNTS + 8)
#define EP_TOLD_BYTES (EP_MOST_TOLD * 4)
#define EP_POSITIONS_BYTES (EP_SHARE_CHOICES_BYTES + EP_SHARE_POSITION_BYTES + 2 * EP_TOLD_BYTES)
static_assert(EP_POSITIONS_BYTES + EP_COMMON_BYTES <= EP_UB_BYTES, "the buffers of cores that find positions");

struct EpPart {
    EpBytes choices, position, told, others;
    ep_u32 begin, end; /* tokens */
    ep_u32 rows[EP_RANKS];
};

EP_DEV LocalTensor<uint32_t> ep_words(const EpBytes& ub) { return ub.ReinterpretCast<uint32_t>(); }
EP_DEV ep_u32 ep_told_words(const EpWindow& w) { return w.ranks + w.experts + 1; }
EP_DEV ep_u64 ep_told_at(const EpCore& c, const EpPositionsArgs& a, ep_u32 core) {
    return a.told + (ep_u64)core * ep_told_words(c.launch.r.w) * 4;
}

EP_DEV void ep_open_share(const EpCore& c, const EpPositionsArgs& a, EpPart& s, const EpBytes& ub) {
    s.choices = ub;
    s.position = ub[EP_SHARE_CHOICES_BYTES];
    s.told = ub[EP_SHARE_CHOICES_BYTES + EP_SHARE_POSITION_BYTES];
    s.others = ub[EP_SHARE_CHOICES_BYTES + EP_SHARE_POSITION_BYTES + EP_TOLD_BYTES];
    const ep_u32 cores = (ep_u32)GetBlockNum();
    s.begin = ep_channel_first(a.tokens, cores, c.number);
    s.end = ep_channel_first(a.tokens, cores, c.number + 1);
    for (ep_u32 i = 0; i < ep_told_words(c.launch.r.w); ++i) ep_words(s.told).SetValue(i, 0u);
}

/* Loads the choices of up to EP_SHARE_TOKENS tokens. Those before were read. */
EP_DEV void ep_load_choices(const EpCore& c, const EpPositionsArgs& a, const EpPart& s, ep_u32 token, ep_u32 tokens) {
    const ep_u32 bytes = c.launch.r.w.topk * 8;
    /* Scalar reads have ended when they are issued: only the copy is to be awaited. */
    ep_load(s.choices, a.topk_idx + (ep_u64)token * bytes, tokens * bytes);
    if (EP_PLANTED(c, CHOICES_FLAG)) return;
    ep_read(c, 0);
}

/* Whether choice k of the token at `at` names the same expert as one before it. */
EP_DEV bool ep_is_repeated(const EpPart& s, ep_u32 at, ep_u32 k, int64_t expert) {
    for (ep_u32 other = 0; other < k; ++other)
        if (s.choices.ReinterpretCast<int64_t>().GetValue(at + other) == expert) return true;
    return false;
}

/* The ranks that a token goes to, as bits. Where `counts`: counts and checks its choices. */
EP_DEV ep_u32 ep_members(const EpCore& c, const EpPositionsArgs& a, const EpPart& s, ep_u32 token, ep_u32 in_piece, bool counts) {
    const EpWindow& w = c.launch.r.w;
    const ep_u32 at = in_piece * w.topk;
    ep_u32 members = 0;
    bool bad = false;
    for (ep_u32 k = 0; k < w.topk; ++k) {
        const int64_t expert = s.choices.ReinterpretCast<int64_t>().GetValue(at + k);
        if (expert == -1) continue;
        if (expert < 0 || expert >= (int64_t)w.experts) {
            bad = true;
            continue;
        }
        if (counts && !a.repeats && !EP_PLANTED(c, REPEATS_TAKEN)) bad |= ep_is_repeated(s, at, k, expert);
        const ep_u32 rank = (ep_u32)expert / w.local_experts;
        if (!ep_takes_part(c, rank) && !EP_PLANTED(c, MASKED_CHOSEN)) continue;
        members |= 1u << rank;
        if (!counts) continue;
        const ep_u32 count = w.ranks + (ep_u32)expert;
        ep_words(s.told).SetValue(count, ep_words(s.told).GetValue(count) + 1);
    }
    const ep_u32 first_bad = w.ranks + w.experts;
    if (bad && counts && !EP_PLANTED(c, BAD_TAKEN) && ep_words(s.told).GetValue(first_bad) == 0) ep_words(s.told).SetValue(first_bad, token + 1);
    return members;
}

/* Counts the share, and tells the cores behind. */
EP_DEV void ep_count_share(EpCore& c, const EpPositionsArgs& a, EpPart& s) {
    const EpWindow& w = c.launch.r.w;
    for (ep_u32 rank = 0; rank < w.ranks; ++rank) s.rows[rank] = 0;
    for (ep_u32 token = s.begin; token < s.end; token += EP_SHARE_TOKENS) {
        const ep_u32 tokens = ep_min(s.end - token, EP_SHARE_TOKENS);
        ep_load_choices(c, a, s, token, tokens);
        for (ep_u32 i = 0; i < tokens; ++i) {
            const ep_u32 members = ep_members(c, a, s, token + i, i, true);
            for (ep_u32 rank = 0; rank < w.ranks; ++rank) s.rows[rank] += members >> rank & 1;
        }
    }
    for (ep_u32 rank = 0; rank < w.ranks; ++rank) ep_words(s.told).SetValue(rank, s.rows[rank]);
    ep_written(0);
    ep_store(ep_told_at(c, a, c.number), s.told, ep_told_words(w) * 4);
    if (!EP_PLANTED(c, TOLD_EARLY)) ep_landed(c);
    ep_share_tell(c, a.ready, a.ticket);
}

/* Waits for what a core before this one tells; `words` of it lie in s.others then. */
EP_DEV bool ep_await_share(EpCore& c, const EpPositionsArgs& a, const EpPart& s, ep_u32 core, ep_u32 words) {
    if (!ep_share_await(c, a.ready, a.ticket, core)) return false;
    ep_load(s.others, ep_told_at(c, a, core), words * 4);
    ep_read(c, 0);
    return true;
}

/* Where the rows of this share begin: s.rows becomes the rows of the shares before. */
EP_DEV bool ep_begin_rows(EpCore& c, const EpPositionsArgs& a, EpPart& s) {
    const EpWindow& w = c.launch.r.w;
    for (ep_u32 rank = 0; rank < w.ranks; ++rank) s.rows[rank] = 0;
    for (ep_u32 core = 0; core < c.number; ++core) {
        if (!ep_await_share(c, a, s, core, w.ranks)) return false;
        for (ep_u32 rank = 0; rank < w.ranks; ++rank) s.rows[rank] += ep_words(s.others).GetValue(rank);
    }
    return true;
}

/* Stores the positions of the share. */
EP_DEV void ep_place_share(EpCore& c, const EpPositionsArgs& a, EpPart& s) {
    const EpWindow& w = c.launch.r.w;
    for (ep_u32 token = s.begin; token < s.end; token += EP_SHARE_TOKENS) {
        const ep_u32 tokens = ep_min(s.end - token, EP_SHARE_TOKENS);
        ep_load_choices(c, a, s, token, tokens);
        for (ep_u32 i = 0; i < tokens; ++i) {
            const ep_u32 members = ep_members(c, a, s, token + i, i, false);
            for (ep_u32 rank = 0; rank < w.ranks; ++rank) {
                const ep_u32 position = members >> rank & 1 ? s.rows[rank]++ : 0xffffffffu;
                ep_words(s.position).SetValue(i * w.ranks + rank, position);
            }
        }
        ep_written(0);
        ep_store(a.position + (ep_u64)token * w.ranks * 4, s.position, tokens * w.ranks * 4);
        /* The next piece overwrites them. */
        if (!EP_PLANTED(c, POSITIONS_REUSED)) ep_landed(c);
    }
}

/* The last core adds up what all have told: the numbers of the counts message, and the first token whose choices are wrong. */
EP_DEV bool ep_total(EpCore& c, const EpPositionsArgs& a, const EpPart& s) {
    const EpWindow& w = c.launch.r.w;
    const ep_u32 words = ep_told_words(w), first_bad = words - 1;
    /* What this core told has landed: its counts are the beginning of the sums. */
    for (ep_u32 core = c.number; core-- > 0; ) {
        if (!ep_await_share(c, a, s, core, words)) return false;
        for (ep_u32 i = 0; i < first_bad; ++i) ep_words(s.told).SetValue(i, ep_words(s.told).GetValue(i) + ep_words(s.others).GetValue(i));
        const ep_u32 bad = ep_words(s.others).GetValue(first_bad);
        if (bad != 0) ep_words(s.told).SetValue(first_bad, bad);
    }
    ep_written(0);
    ep_store(a.numbers, s.told, first_bad * 4);
    ep_landed(c);
    ep_store_word(c, EP_LOCAL(c, bad_token), ep_words(s.told).GetValue(first_bad), 4);
    return true;
}

#endif
