/*
 * ep_spread.h: rows by expert (ep_core::plan::Expansion), behind the last row of a dispatch and by all cores of a rank; nothing leaves it. A core
 * serves a contiguous share of the received rows, and experts by turns.
 *
 *   padding  the slots between the last row of an expert and the first of the next become zeros
 *   count    the choices of each expert in the share; the cores behind are told
 *   place    behind the choices of the shares before: the slot of each choice, the first slot of each source at each expert, and each row's
 *            payload at the slots of its choices
 *   UB       two buffers for rows (ep_rows.h), choices and slots of a piece of the share, two tables of local experts
 *   waits    for the cores before it (ep_share.h). A dispatch that is replayed has its slots: then it waits for nobody
 */
#ifndef EP_SPREAD_H
#define EP_SPREAD_H
#include "ep_share.h"

/* Rows of a piece of a share. */
#define EP_SPREAD_ROWS 64u
#define EP_SPREAD_CHOICES_BYTES (EP_SPREAD_ROWS * EP_TOPK * 8)
#define EP_SPREAD_SLOTS_BYTES (EP_SPREAD_ROWS * EP_TOPK * 4)
#define EP_SPREAD_TABLE_BYTES (EP_MOST_COUNTS * 4)
#define EP_SPREAD_BYTES (EP_ROWS_BYTES + EP_SPREAD_CHOICES_BYTES + EP_SPREAD_SLOTS_BYTES + 2 * EP_SPREAD_TABLE_BYTES)
static_assert(EP_SPREAD_BYTES + EP_COMMON_BYTES <= EP_UB_BYTES, "the buffers of cores that order rows by expert");

struct EpSpreader {
    EpBuffers b;
    EpBytes choices, slots;
    LocalTensor<uint32_t> next, others; /* of local experts: the next slot; what another core has told */
    ep_u32 begin, end;                  /* rows */
    ep_u32 ended;                       /* EP_SPREAD_... */
};

EP_DEV void ep_open_spreader(const EpCore& c, const EpSpreadArgs& a, EpSpreader& s, const EpBytes& ub) {
    ep_open_buffers(c, s.b, ub);
    s.choices = ub[EP_ROWS_BYTES];
    s.slots = ub[EP_ROWS_BYTES + EP_SPREAD_CHOICES_BYTES];
    s.next = ub[EP_ROWS_BYTES + EP_SPREAD_CHOICES_BYTES + EP_SPREAD_SLOTS_BYTES].ReinterpretCast<uint32_t>();
    s.others = ub[EP_SPREAD_BYTES - EP_SPREAD_TABLE_BYTES].ReinterpretCast<uint32_t>();
    const ep_u32 cores = (ep_u32)GetBlockNum();
    s.begin = ep_channel_first(a.rows, cores, c.number);
    s.end = ep_channel_first(a.rows, cores, c.number + 1);
    s.ended = EP_SPREAD_WELL;
    for (ep_u32 expert = 0; expert < c.launch.r.w.local_experts; ++expert) s.next.SetValue(expert, 0u);
}

EP_DEV ep_u64 ep_spread_told_at(const EpCore& c, const EpSpreadArgs& a, ep_u32 core) {
    return a.told + (ep_u64)core * c.launch.r.w.local_experts * 4;
}

/* ---- padding ---- */

EP_DEV void ep_spread_padding(EpCore& c, const EpSpreadArgs& a, EpSpreader& s) {
    const EpWindow& w = c.launch.r.w;
    const ep_u32 i = ep_turn(c, s.b), widest = ep_min(w.payload_bytes, EP_PIECE_BYTES);
    Duplicate(s.b.payload[i].ReinterpretCast<float>(), 0.0f, (int32_t)((widest + 3) / 4));
    if (!EP_PLANTED(c, ZEROS_FLAG)) {
        SetFlag<HardEvent::V_MTE3>(0);
        WaitFlag<HardEvent::V_MTE3>(0);
    }
    for (ep_u32 expert = c.number; expert < w.local_experts && !EP_PLANTED(c, PADDING_LEFT); expert += (ep_u32)GetBlockNum()) {
        const ep_u32 end = ep_at<uint32_t>(a.first, expert + 1);
        for (ep_u32 slot = ep_at<uint32_t>(a.first, expert) + ep_at<uint32_t>(a.counts, expert); slot < end; ++slot)
            for (ep_u64 at = 0; at < w.payload_bytes; at += EP_PIECE_BYTES)
                ep_store(a.out + slot * w.payload_bytes + at, s.b.payload[i], ep_min(w.payload_bytes - at, EP_PIECE_BYTES));
    }
    ep_turn_over(c, s.b);
}

/* ---- count ---- */

/* Loads the choices of up to EP_SPREAD_ROWS rows. */
EP_DEV void ep_spread_load_choices(const EpCore& c, const EpSpreadArgs& a, const EpSpreader& s, ep_u32 row, ep_u32 rows) {
    const ep_u32 bytes = c.launch.r.w.topk * 8;
    ep_load(s.choices, a.topk_idx + (ep_u64)row * bytes, rows * bytes);
    ep_read(c, 0);
}

/* Counts the share's choices by expert, and tells the cores behind. */
EP_DEV bool ep_spread_count(EpCore& c, const EpSpreadArgs& a, EpSpreader& s) {
    const EpWindow& w = c.launch.r.w;
    for (ep_u32 row = s.begin; row < s.end; row += EP_SPREAD_ROWS) {
        const ep_u32 rows = ep_min(s.end - row, EP_SPREAD_ROWS);
        ep_spread_load_choices(c, a, s, row, rows);
        for (ep_u32 at = 0; at < rows * w.topk; ++at) {
            const int64_t expert = s.choices.ReinterpretCast<int64_t>().GetValue(at);
            if (expert < 0) continue;
            if (expert >= (int64_t)w.local_experts) {
                s.ended = EP_SPREAD_OTHER_CHOICES;
                return false;
            }
            s.next.SetValue((ep_u32)expert, s.next.GetValue((ep_u32)expert) + 1);
        }
    }
    ep_written(0);
    ep_store(ep_spread_told_at(c, a, c.number), s.next.ReinterpretCast<uint8_t>(), w.local_experts * 4);
    if (!EP_PLANTED(c, SPREAD_TOLD_EARLY)) ep_landed(c);
    ep_share_tell(c, a.ready, a.ticket);
    return true;
}

/* ---- place ---- */

/* Where the choices of this share begin: behind those of the shares before. */
EP_DEV bool ep_spread_begin(EpCore& c, const EpSpreadArgs& a, EpSpreader& s) {
    const ep_u32 local = c.launch.r.w.local_experts;
    for (ep_u32 expert = 0; expert < local; ++expert) s.next.SetValue(expert, ep_at<uint32_t>(a.first, expert));
    for (ep_u32 core = 0; core < c.number && !EP_PLANTED(c, SPREAD_UNSHARED); ++core) {
        if (!ep_share_await(c, a.ready, a.ticket, core)) {
            s.ended = EP_SPREAD_LATE;
            return false;
        }
        ep_load(s.others.ReinterpretCast<uint8_t>(), ep_spread_told_at(c, a, core), local * 4);
        ep_read(c, 0);
        for (ep_u32 expert = 0; expert < local; ++expert) s.next.SetValue(expert, s.next.GetValue(expert) + s.others.GetValue(expert));
    }
    return true;
}

/* The sources whose first row is `row` begin at these slots. */
EP_DEV void ep_spread_store_offsets(EpCore& c, const EpSpreadArgs& a, const EpSpreader& s, ep_u32 row) {
    const EpWindow& w = c.launch.r.w;
    for (ep_u32 source = 0; source < w.ranks; ++source) {
        if (ep_at<uint32_t>(a.first_of, source) != row) continue;
        ep_written(0);
        ep_store(a.offsets + (ep_u64)source * w.local_experts * 4, s.next.ReinterpretCast<uint8_t>(), w.local_experts * 4);
        /* The next choice changes them. */
        if (!EP_PLANTED(c, OFFSETS_REUSED)) ep_landed(c);
    }
}

/* The slots of a piece's choices. False where an expert has more choices than the ranks told each other: then there is no room for them. */
EP_DEV bool ep_spread_find_slots(EpCore& c, const EpSpreadArgs& a, EpSpreader& s, ep_u32 row, ep_u32 rows) {
    const ep_u32 topk = c.launch.r.w.topk;
    ep_spread_load_choices(c, a, s, row, rows);
    for (ep_u32 i = 0; i < rows; ++i) {
        ep_spread_store_offsets(c, a, s, row + i);
        for (ep_u32 at = i * topk; at < (i + 1) * topk; ++at) {
            const int64_t expert = s.choices.ReinterpretCast<int64_t>().GetValue(at);
            ep_u32 slot = 0xffffffffu;
            if (expert >= 0) {
                slot = s.next.GetValue((ep_u32)expert);
                if (slot >= ep_at<uint32_t>(a.first, (ep_u32)expert) + ep_at<uint32_t>(a.counts, (ep_u32)expert)) {
                    s.ended = EP_SPREAD_OTHER_CHOICES;
                    return false;
                }
                s.next.SetValue((ep_u32)expert, slot + 1);
            }
            s.slots.ReinterpretCast<uint32_t>().SetValue(at, slot);
        }
    }
    ep_written(0);
    ep_store(a.slots + (ep_u64)row * topk * 4, s.slots, rows * topk * 4);
    return true;
}

/* Copies a row to the slots of its choices. `at`: the first of these in s.slots. */
EP_DEV void ep_spread_row(EpCore& c, const EpSpreadArgs& a, EpSpreader& s, ep_u32 row, ep_u32 at) {
    const EpWindow& w = c.launch.r.w;
    ep_u32 places[EP_TOPK], picks = 0;
    for (ep_u32 k = 0; k < w.topk; ++k) {
        const ep_u32 slot = s.slots.ReinterpretCast<uint32_t>().GetValue(at + k);
        if (slot != 0xffffffffu) places[picks++] = slot;
    }
    ep_scatter(c, s.b, a.out, a.x + row * w.payload_bytes, places, picks);
}

/* Places the rows of the share. */
EP_DEV void ep_spread_place(EpCore& c, const EpSpreadArgs& a, EpSpreader& s) {
    const ep_u32 topk = c.launch.r.w.topk;
    for (ep_u32 row = s.begin; row < s.end; row += EP_SPREAD_ROWS) {
        const ep_u32 rows = ep_min(s.end - row, EP_SPREAD_ROWS);
        if (a.known) {
            ep_load(s.slots, a.slots + (ep_u64)row * topk * 4, rows * topk * 4);
            ep_read(c, 0);
        } else if (!ep_spread_find_slots(c, a, s, row, rows)) {
            return;
        }
        for (ep_u32 i = 0; i < rows; ++i) ep_spread_row(c, a, s, row + i, i * topk);
        /* The next piece overwrites the slots. (After many rows the turns of the buffers imply that they are stored.) */
        if (!EP_PLANTED(c, SLOTS_REUSED)) ep_landed(c);
    }
    /* Sources behind the last row. */
    if (!a.known && c.number + 1 == (ep_u32)GetBlockNum()) ep_spread_store_offsets(c, a, s, a.rows);
}

EP_DEV void ep_spread(EpCore& c, const EpSpreadArgs& a, EpSpreader& s) {
    ep_spread_padding(c, a, s);
    if (!a.known && (!ep_spread_count(c, a, s) || !ep_spread_begin(c, a, s))) return;
    ep_spread_place(c, a, s);
}

#endif
