/*
 * ep_low_receive.h: the receiving half of a low-latency dispatch: rows of all sources to the local experts, packed in order of source and token, whatever
 * the order in which they came. Every share is a part of the rows of one source, by position.
 *
 *   count   each core waits for the sources of its shares, looks at the headers, and tells the rows of each local expert
 *   place   each core adds up what the shares before its own have told, and copies its rows to their experts. What it waits for has nobody to wait for
 *   total   the last core tells the user how many rows each expert has, and of which source
 *   UB      two buffers for rows (ep_rows.h), two tables of local experts, and the segments of all
 */
#ifndef EP_LOW_RECEIVE_H
#define EP_LOW_RECEIVE_H
#include "ep_low.h"

#define EP_LOW_TABLE_BYTES (EP_MOST_COUNTS * 4)
#define EP_LOW_RECEIVE_BYTES (EP_ROWS_BYTES + 2 * EP_LOW_TABLE_BYTES + EP_MOST_COUNTS * 8)
static_assert(EP_LOW_RECEIVE_BYTES + EP_COMMON_BYTES <= EP_UB_BYTES, "the buffers of receivers in low latency");

/* Where a record, and a row's token, lie in a buffer's side, behind the header. */
#define EP_LOW_SIDE_RECORD EP_HEAD_BYTES
#define EP_LOW_SIDE_TOKEN ((EP_LOW_SIDE_RECORD + sizeof(EpLowRow) + EP_TOPK * sizeof(EpLowPick) + 31) / 32 * 32)
static_assert(EP_LOW_SIDE_TOKEN + 32 <= EP_SIDE_BYTES, "what is kept of a row");

typedef LocalTensor<uint32_t> EpLowTable;

struct EpLowReceiver {
    EpBuffers b;
    EpLowTable counts, others; /* of local experts */
    LocalTensor<int64_t> segments;
};

EP_DEV ep_u32 ep_low_source(const EpCore& c, ep_u32 share) { return share / ep_low_each(c); }
EP_DEV ep_u64 ep_low_counts_at(const EpCore& c, const EpLowArgs& a, ep_u32 share) {
    return a.counts + (ep_u64)share * c.launch.r.w.local_experts * 4;
}
EP_DEV void ep_low_clear(const EpCore& c, const EpLowTable& table) {
    for (ep_u32 expert = 0; expert < c.launch.r.w.local_experts; ++expert) table.SetValue(expert, 0u);
}

/* Waits for a source; how many rows it has sent. False where they do not come. */
EP_DEV bool ep_low_rows_of(EpCore& c, const EpLowArgs& a, ep_u32 source, ep_u32& rows) {
    const EpWindow& w = c.launch.r.w;
    rows = 0;
    if (source == c.launch.r.me) {
        rows = ep_at<uint32_t>(a.counted, source);
        return true;
    }
    if (!ep_takes_part(c, source)) return true;
    if (!ep_low_arrived(c, a, source, rows)) return false;
    if (rows > w.max_tokens) ep_refuse(c, source, EP_LOW_FIELD_ROWS, w.max_tokens, rows);
    return !c.failed;
}

/* Loads a row's header; whether it is due, and its token. */
EP_DEV bool ep_low_load_header(EpCore& c, EpLowReceiver& s, ep_u32 i, ep_u32 source, ep_u32 row, ep_u32& token) {
    const EpWindow& w = c.launch.r.w;
    ep_load(s.b.side[i], c.own + ep_low_row(w, c.op, source, row), (ep_u32)sizeof(EpRowHeader) + w.topk * (ep_u32)sizeof(EpChoice));
    ep_read(c, i);
    if (!ep_low_check(c, s.b.side[i], source, token)) return false;
    if (token >= w.max_tokens) ep_refuse(c, source, EP_LOW_FIELD_TOKENS, w.max_tokens, token);
    return !c.failed;
}

/* The local expert of a choice; `local_experts` where it is another rank's. */
EP_DEV ep_u32 ep_low_local(const EpCore& c, const EpChoice& choice) {
    const EpWindow& w = c.launch.r.w;
    const ep_u32 expert = (ep_u32)choice.expert - c.launch.r.me * w.local_experts;
    return choice.expert >= 0 && expert < w.local_experts ? expert : w.local_experts;
}

/* Counts a share's rows by local expert, and tells. */
EP_DEV bool ep_low_count_share(EpCore& c, const EpLowArgs& a, EpLowReceiver& s, ep_u32 share) {
    const EpWindow& w = c.launch.r.w;
    const ep_u32 source = ep_low_source(c, share), nth = share % ep_low_each(c);
    ep_u32 rows;
    if (!ep_low_rows_of(c, a, source, rows)) return false;
    if (a.out == 0) return true;
    const ep_u32 first = ep_low_first(c, rows, nth), last = ep_low_first(c, rows, nth + 1);
    ep_low_clear(c, s.counts);
    /* The row before says which tokens may follow. */
    ep_u32 least = 0;
    for (ep_u32 row = first > 0 ? first - 1 : 0; row < last; ++row) {
        ep_u32 token;
        const ep_u32 i = ep_turn(c, s.b);
        const bool right = ep_low_load_header(c, s, i, source, row, token);
        if (right && token < least && row >= first) ep_refuse(c, source, EP_LOW_FIELD_LEAST_TOKEN, least, token);
        for (ep_u32 k = 0; k < w.topk && !c.failed && row >= first; ++k) {
            const ep_u32 expert = ep_low_local(c, ep_read_choice(s.b.side[i], k));
            if (expert < w.local_experts) s.counts.SetValue(expert, s.counts.GetValue(expert) + 1);
        }
        ep_turn_over(c, s.b);
        if (c.failed) return false;
        least = token + 1;
    }
    ep_written(0);
    ep_store(ep_low_counts_at(c, a, share), s.counts.ReinterpretCast<uint8_t>(), w.local_experts * 4);
    if (!EP_PLANTED(c, LOW_COUNTS_EARLY)) ep_landed(c);
    ep_low_tell(c, a, share, rows);
    return true;
}

/* Waits for what a share has told: it lies in s.others then. */
EP_DEV bool ep_low_load_counts(EpCore& c, const EpLowArgs& a, EpLowReceiver& s, ep_u32 share, ep_u32& rows) {
    if (!ep_low_await_word(c, a, share, rows)) return false;
    ep_load(s.others.ReinterpretCast<uint8_t>(), ep_low_counts_at(c, a, share), c.launch.r.w.local_experts * 4);
    ep_read(c, 0);
    return true;
}

/* Takes a row: its record, and its payload to its experts, behind the rows in s.counts. */
EP_DEV bool ep_low_take_row(EpCore& c, const EpLowArgs& a, EpLowReceiver& s, ep_u32 source, ep_u32 row) {
    const EpWindow& w = c.launch.r.w;
    const ep_u32 i = ep_turn(c, s.b), wide = w.ranks * w.max_tokens;
    ep_u32 token, places[EP_TOPK], picks = 0;
    const bool right = ep_low_load_header(c, s, i, source, row, token);
    const EpBytes record = s.b.side[i][EP_LOW_SIDE_RECORD], own = s.b.side[i][EP_LOW_SIDE_TOKEN];
    record.ReinterpretCast<uint32_t>().SetValue(0, token);
    record.ReinterpretCast<uint32_t>().SetValue(1, 0u);
    own.ReinterpretCast<uint32_t>().SetValue(0, token);
    for (ep_u32 k = 0; k < w.topk && right; ++k) {
        const EpChoice choice = ep_read_choice(s.b.side[i], k);
        const ep_u32 expert = ep_low_local(c, choice);
        ep_i32 place = -1;
        if (expert < w.local_experts) {
            const ep_u32 before = s.counts.GetValue(expert);
            if (before >= wide) {
                ep_refuse(c, source, EP_LOW_FIELD_EXPERT_ROWS, wide, before + 1);
                break;
            }
            s.counts.SetValue(expert, before + 1);
            place = (ep_i32)(expert * wide + before);
            places[picks++] = (ep_u32)place;
        }
        record[sizeof(EpLowRow)].ReinterpretCast<int32_t>().SetValue(2 * k, place);
        record[sizeof(EpLowRow)].ReinterpretCast<float>().SetValue(2 * k + 1, choice.weight);
    }
    if (!c.failed) {
        ep_written(i);
        ep_store(ep_low_record(w, a.records, source, row), record, ep_low_record_bytes(w));
        for (ep_u32 pick = 0; pick < picks; ++pick) ep_store(a.source_token + (ep_u64)places[pick] * 4, own, 4);
    }
    ep_turn_over(c, s.b);
    if (c.failed) return false;
    ep_scatter(c, s.b, a.out, c.own + ep_low_row(w, c.op, source, row) + w.header_bytes, places, picks);
    return true;
}

/* Places a share's rows. */
EP_DEV bool ep_low_place_share(EpCore& c, const EpLowArgs& a, EpLowReceiver& s, ep_u32 share) {
    const ep_u32 source = ep_low_source(c, share), nth = share % ep_low_each(c), local = c.launch.r.w.local_experts;
    ep_low_clear(c, s.counts);
    ep_u32 rows = 0;
    for (ep_u32 before = 0; before < share && !EP_PLANTED(c, LOW_SHARES_UNAWAITED); ++before) {
        if (!ep_low_load_counts(c, a, s, before, rows)) return false;
        for (ep_u32 expert = 0; expert < local; ++expert)
            s.counts.SetValue(expert, s.counts.GetValue(expert) + s.others.GetValue(expert));
    }
    if (!ep_low_await_word(c, a, share, rows)) return false;
    const ep_u32 last = ep_low_first(c, rows, nth + 1);
    for (ep_u32 row = ep_low_first(c, rows, nth); row < last; ++row)
        if (!ep_low_take_row(c, a, s, source, row)) return false;
    return true;
}

/* Tells the user what came, and keeps for the combine how many rows and choices of each source. */
EP_DEV bool ep_low_total(EpCore& c, const EpLowArgs& a, EpLowReceiver& s) {
    const EpWindow& w = c.launch.r.w;
    const ep_u32 each = ep_low_each(c);
    ep_low_clear(c, s.counts);
    for (ep_u32 source = 0; source < w.ranks; ++source) {
        ep_u32 rows = 0, picks = 0;
        for (ep_u32 expert = 0; expert < w.local_experts; ++expert)
            s.segments.SetValue(expert * w.ranks + source, (int64_t)((ep_u64)s.counts.GetValue(expert) << 32));
        for (ep_u32 nth = 0; nth < each; ++nth) {
            if (!ep_low_load_counts(c, a, s, source * each + nth, rows)) return false;
            for (ep_u32 expert = 0; expert < w.local_experts; ++expert) {
                const ep_u32 more = s.others.GetValue(expert), at = expert * w.ranks + source;
                picks += more;
                s.counts.SetValue(expert, s.counts.GetValue(expert) + more);
                s.segments.SetValue(at, s.segments.GetValue(at) + (int64_t)more);
            }
        }
        ep_store_word(c, a.records + source * 4, rows, 4);
        ep_store_word(c, a.records + (w.ranks + source) * 4, picks, 4);
    }
    ep_written(0);
    ep_store(a.expert_counts, s.counts.ReinterpretCast<uint8_t>(), w.local_experts * 4);
    ep_store(a.segments, s.segments.ReinterpretCast<uint8_t>(), w.local_experts * w.ranks * 8);
    return true;
}

EP_DEV void ep_low_receive(EpCore& c, const EpLowArgs& a, const EpBytes& ub) {
    EpLowReceiver s;
    ep_open_buffers(c, s.b, ub);
    s.counts = ub[EP_ROWS_BYTES].ReinterpretCast<uint32_t>();
    s.others = ub[EP_ROWS_BYTES + EP_LOW_TABLE_BYTES].ReinterpretCast<uint32_t>();
    s.segments = ub[EP_ROWS_BYTES + 2 * EP_LOW_TABLE_BYTES].ReinterpretCast<int64_t>();
    const ep_u32 workers = ep_low_workers(c), shares = ep_low_shares(c), own = ep_low_worker(c);
    bool right = true;
    for (ep_u32 share = own; share < shares && right; share += workers) {
        right = ep_low_count_share(c, a, s, share);
        /* The counts before were stored. */
        ep_landed(c);
    }
    for (ep_u32 share = own; share < shares && right && a.out != 0; share += workers) right = ep_low_place_share(c, a, s, share);
    if (right && a.out != 0 && own + 1 == workers) ep_low_total(c, a, s);
    ep_close_buffers(c);
}

#endif
