/*
 * ep_low_rows.h: rows of low latency: how they are shared among blocks, and what a dispatch keeps of them for the combine.
 */
#ifndef EP_LOW_ROWS_H
#define EP_LOW_ROWS_H
#include "ep_low.h"

/* The share of a block in `rows` rows of `columns` units of 16 bytes: units begin .. end, which lie in rows first .. last. */
struct EpShareOfRows {
    ep_u64 begin;
    ep_u64 end;
    ep_u32 first;
    ep_u32 last;
};
EP_DEV EpShareOfRows ep_low_share(ep_u32 rows, ep_u32 columns, ep_u32 block, ep_u32 blocks) {
    EpShareOfRows share;
    const ep_u64 all = (ep_u64)rows * columns;
    if (all * blocks < 1ull << 32) { /* short divisions */
        const ep_u32 begin = (ep_u32)all * block / blocks, end = (ep_u32)all * (block + 1) / blocks;
        share.begin = begin;
        share.end = end;
        share.first = begin / columns;
        share.last = (end + columns - 1) / columns;
        return share;
    }
    share.begin = all * block / blocks;
    share.end = all * (block + 1) / blocks;
    share.first = (ep_u32)(share.begin / columns);
    share.last = (ep_u32)((share.end + columns - 1) / columns);
    return share;
}

/* A *piece* of a row is four units, which are three times 16 bytes: four lanes have a unit each, or three of them 16 bytes. */
EP_DEV ep_u32 ep_low_pieces_of(ep_u64 bytes) { return ((ep_u32)ep_unit_count(bytes) + 3) / 4; }

/* What of a share lies in the `batch` rows from `base` on, counted from the first of these, in parts of a unit. */
struct EpRange {
    ep_u32 begin;
    ep_u32 end;
};
EP_DEV EpRange ep_low_within(const EpShareOfRows& share, ep_u32 base, ep_u32 batch, ep_u32 columns, ep_u32 parts) {
    const ep_u64 origin = (ep_u64)base * columns, after = origin + (ep_u64)batch * columns;
    EpRange range;
    range.begin = parts * (share.begin > origin ? (ep_u32)(share.begin - origin) : 0);
    range.end = parts * (ep_u32)((share.end < after ? share.end : after) - origin);
    return range;
}

/* The source of row `row` of those that are counted in first[ranks + 1]. */
EP_DEV ep_u32 ep_low_source(const ep_u32* first, ep_u32 row) {
    ep_u32 source = 0;
    while (first[source + 1] <= row) ++source;
    return source;
}

/* What the receiver of a dispatch keeps for the combine, of the row at `position` of source: an EpLowRow and EpLowPick[topk].
   In front of all rows: u32 rows[ranks], picks[ranks], tokens[ranks], reserved[ranks]: the rows and choices that came from each rank, and how many
   tokens it had, where rows travel as units. */
struct EpLowRow {
    ep_u32 token;
    ep_u32 reserved;
};
struct EpLowPick {
    ep_i32 row; /* in [local experts, ranks * max_tokens], by source in [ranks * max_tokens], packed in [room]; -1 for a choice of another rank */
    float weight;
};
EP_DEV ep_u64 ep_low_record(const EpRank& r, ep_u64 records, ep_u32 source, ep_u32 position) {
    const ep_u64 at = (ep_u64)source * r.w.max_tokens + position;
    return records + 16ull * r.w.ranks + at * (sizeof(EpLowRow) + r.w.topk * sizeof(EpLowPick));
}
#endif
