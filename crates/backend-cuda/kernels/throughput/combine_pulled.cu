/*
 * ep_combine_pulled_kernel: rows go back by way of outboxes. Whoever has them lays them in the outbox for the rank whose tokens they are; that
 * rank pulls and sums them.
 *
 *   launch   any number of blocks, co-resident with those of the other ranks (cooperative). A block serves channels block, block + blocks, ...
 *   roles    of a block, by the table `block`: reducers pull and sum, a part of a token each (pullers), or return credit (the creditor);
 *            returners lay rows, each every `copiers`-th one for each reader (copiers), or tell the tail (the teller; ep_outbox.h)
 *   memory   y, bias and sums in any memory of the own GPU; the outboxes in the own window. shared: where rows lie, ends of rings, counts, stages
 *   rules    F10: the tail's acquire by one lane, __syncwarp, a fence of the proxies, then gets by the copy engine. F9: what a warp has summed it has
 *            loaded. F5: lanes have read a stage, a fence of the proxies, __syncwarp, then it is loaded again
 */
#include "ep_last_look.h"
#include "ep_offers.h"
#include "ep_outbox.h"
#include "ep_summing.h"

EP_POOL(ep_pool);

/* Where one rank's rows for this rank lie on the channel: in its outbox, or for the own rank where they are. */
struct EpRingSource {
    EpAt payload;
    EpAt weights; /* nowhere where none travel */
    ep_u32 payload_step, weights_step;
    ep_u32 first; /* position of the row in slot 0 */
    ep_u32 slots;
};
static_assert(sizeof(EpRingSource) == EP_RING_SOURCE_BYTES, "the host makes room for another EpRingSource");

EP_DEV ep_u32 ep_slot_of(const EpRingSource& s, ep_i32 position) {
    const ep_u32 index = (ep_u32)position - s.first;
    return index < s.slots ? index : index % s.slots;
}
EP_DEV EpAt ep_source_row(const EpRingSource& s, ep_i32 position) { return s.payload + (ep_u64)ep_slot_of(s, position) * s.payload_step; }

/* What a block knows of its channel. */
struct EpReturned {
    EpOutboxEnd* out;      /* [ranks] */
    EpOutboxEnd* in;       /* [ranks] */
    EpRingSource* sources; /* [ranks] */
    ep_u32* there;         /* [pullers, ranks]: below which position rows are known to be there */
    ep_u32* summed;        /* [pullers]: parts of tokens */
    ep_u32* laid;          /* [copiers, ranks]: rows that are under way to a reader's slots, */
    ep_u32* done;          /* [copiers, ranks]: and that are there */
    ep_u32* log;           /* [copiers, EP_LAID_LOG]: whose rows are under way */
    ep_u32 begin, tokens;  /* the own share */
    ep_u32 parts;          /* of a row, as it is summed */
    ep_u32 track, channel;
    bool wraps; /* some sender may wait for credit */
};

/* Whether rank has rows of source's tokens: the same answer on both. */
EP_DEV bool ep_has_rows_of(const EpRank& r, const EpCombineArgs& a, ep_u32 source, ep_u32 rank) {
    return rank != source && ep_takes_part(r, rank) && ep_takes_part(r, source) && ((const ep_u32*)a.matrix)[source * r.w.ranks + rank] > 0;
}

/* ---- the end that lays ---- */

/* A part of a row for a reader; its weights go with the first. */
EP_DEV EpItem ep_returned_item(const EpRank& r, const EpCombinePulledArgs& a, ep_u8* own, const EpOutbox& box, ep_u32 row, ep_u32 slot, ep_u32 part) {
    const EpCombineArgs& m = a.ring.combine;
    const ep_u32 bytes = (ep_u32)r.w.result_stride, begin = part * a.piece, left = bytes - begin;
    EpItem item;
    item.from = ep_here(m.y + (ep_u64)row * m.y_stride + begin);
    item.tail_from = ep_here(m.own_weights + (ep_u64)row * r.w.topk * 4);
    item.to[0] = own + ep_outbox_codes(box, slot) + begin;
    item.tail_to[0] = own + ep_outbox_head(box, slot);
    item.to[1] = item.tail_to[1] = nullptr;
    item.codes = left < a.piece ? left : a.piece;
    item.tail = part == 0 && m.own_weights ? r.w.topk * 4 : 0;
    item.tail_step = a.bulk_weights ? 0 : 4;
    return item;
}

/* Counts what a copier's flow has stored, for whom it was. By a warp. */
EP_DEV void ep_count_stored(const EpFlow& flow, const ep_u32* log, ep_u32* done, ep_u32* counted) {
    if (ep_warp_lane() == 0 && *counted < flow.stored) {
        ep_fence_block();
        for (ep_u32 row = *counted; row < flow.stored; ++row) ep_atomic_add(done + log[row % EP_LAID_LOG], 1u);
    }
    *counted = flow.stored;
}

/* Lays every `copiers`-th row for each reader: one of each in turn, as far as each has room. */
EP_DEV void ep_lay_returned(const EpRank& r, const EpCombinePulledArgs& a, const EpReturned& c, EpFlow& flow, ep_u32 index) {
    const ep_u32 lane = ep_warp_lane(), ranks = r.w.ranks;
    ep_u32 *log = c.log + index * EP_LAID_LOG, *laid = c.laid + index * ranks, *done = c.done + index * ranks;
    ep_u8* own = ep_own(r);
    ep_u32 left = 0, pushed = 0, counted = 0;
    for (ep_u32 rank = 0; rank < ranks; ++rank) left += (c.out[rank].slots + a.copiers - 1 - index) / a.copiers;
    for (ep_u32 spin = 1; left > 0;) {
        bool moved = false;
        for (ep_u32 turn = 1; turn < ranks; ++turn) {
            const ep_u32 reader = r.me + turn < ranks ? r.me + turn : r.me + turn - ranks, next = laid[reader] * a.copiers + index;
            if (next >= c.out[reader].slots || !ep_may_fill(&c.out[reader].limit, next + 1)) continue;
            const EpOutbox box = ep_outbox_to(r.w, a.ring.rings, reader, c.channel);
            const ep_u32 row = c.out[reader].row + next, slot = next % box.slots;
            for (ep_u32 part = 0; part < a.pieces; ++part) {
                if (ep_flow_is_full(flow)) ep_flow_pop(flow);
                EpItem item = ep_returned_item(r, a, own, box, row, slot, part);
                item.count = part + 1 == a.pieces ? pushed + 1 : pushed;
                ep_flow_push(flow, item);
            }
            __syncwarp();
            if (lane == 0) {
                log[pushed % EP_LAID_LOG] = reader;
                ++laid[reader];
            }
            __syncwarp();
            ++pushed;
            moved = true;
            --left;
            ep_count_stored(flow, log, done, &counted);
        }
        if (moved) continue;
        ep_flow_drain(flow);
        ep_count_stored(flow, log, done, &counted);
        if (spin++ % 64 == 0 && ep_warp_any(ep_failed(r))) return;
    }
    ep_flow_drain(flow);
    ep_count_stored(flow, log, done, &counted);
}

/* Rows that all copiers have laid for a reader. By one thread. */
EP_DEV ep_u32 ep_rows_laid(const EpCombinePulledArgs& a, const EpReturned& c, ep_u32 ranks, ep_u32 reader) {
    ep_u32 rows = c.out[reader].slots;
    for (ep_u32 w = 0; w < a.copiers; ++w) {
        const ep_u32 own = ep_count_of(c.done + w * ranks + reader) * a.copiers + w;
        rows = own < rows ? own : rows;
    }
    return rows;
}

/* The teller: each reader has a ring of its own. */
EP_DEV void ep_tell_readers(const EpRank& r, const EpCombinePulledArgs& a, const EpReturned& c, ep_u64 began) {
    const ep_u32 ranks = r.w.ranks, chunk = a.ring.rings.chunk, room = a.window;
    ep_u32 idle = 0;
    for (ep_u32 spin = 1;; ++spin) {
        bool all = true, news = false, vain = ep_turns_end(r, spin, began);
        for (ep_u32 peer = ep_warp_lane(); peer < ranks; peer += 32) {
            EpOutboxEnd& end = c.out[peer];
            if (end.slots == 0 || end.seen == end.slots) continue;
            const ep_u32 taken = end.slots > room || end.told == end.slots ? ep_taken(r, peer, c.track, end, end.told) : 0;
            if (taken == end.slots) end.seen = taken;
            const ep_u32 limit = taken >= end.slots || end.slots - taken <= room ? end.slots : taken + room;
            if (limit > end.limit) ep_tell_word(&end.limit, limit);
            const ep_u32 ready = ep_planted(r, EP_PLANT_TAIL_BEFORE_DATA) ? limit : ep_rows_laid(a, c, ranks, peer);
            news |= ready - end.told >= chunk;
            if (ep_is_due(ready, end.told, chunk, end.slots, idle) || (ready > end.told && ready == limit)) {
                ep_tell_tail(r, peer, c.track, end, ready);
                end.told = ready;
                if (ep_planted(r, EP_PLANT_TAIL_BEFORE_DATA)) ep_be_slow();
            }
            all &= end.seen == end.slots;
            if (spin % 64 != 0 && end.seen < end.slots) continue;
            if (end.told != limit || end.seen == end.slots) {
                ep_unsuspect(r, ep_op(r), EP_PHASE_CREDIT, peer);
            } else {
                const ep_u64 awaited = end.base + taken + 1, cell = ep_cell(r.w, r.generation, peer, ep_lane_credit(c.track), EP_COUNTER_HEAD);
                vain |= ep_wait_is_vain(r, peer, ep_lane_credit(c.track), cell, EP_PHASE_CREDIT, awaited - 1, awaited, began);
            }
        }
        if (__all_sync(EP_FULL, all)) return;
        if (__any_sync(EP_FULL, vain)) return ep_teller_ends(r, began);
        idle = __any_sync(EP_FULL, news) ? 0 : idle + 1;
    }
}

/* ---- the end that sums ---- */

/* Sums all that is on its way, and says so: nobody waits for this warp then. */
EP_DEV void ep_sum_all(const EpRank& r, const EpCombinePulledArgs& a, const EpReturned& c, EpSumming& s, ep_u32 warp) {
    ep_sum_rest(r, a.ring.combine, s);
    if (ep_warp_lane() == 0 && c.wraps) ep_tell_count(c.summed + warp, s.units);
}

/* Waits until the row at position of a rank's rows is there; false when that will not happen. By a warp, which has nothing on its way. */
EP_DEV bool ep_await_returned(const EpRank& r, const EpReturned& c, ep_u32* there, ep_u32 rank, ep_u32 position, ep_u64 began) {
    const EpOutboxEnd& end = c.in[rank];
    bool right = true;
    /* All lanes have read `there`, and so do the same, before one of them writes it. */
    __syncwarp();
    if (ep_warp_lane() == 0) {
        right = ep_wait(r, rank, ep_lane_data(c.track), EP_COUNTER_TAIL, end.base + (position - end.first) + 1, EP_PHASE_ROWS, began);
        const ep_u64 tail = right ? ep_peek(r, rank, ep_lane_data(c.track), EP_COUNTER_TAIL) : 0;
        if (right && tail > end.base + end.slots) {
            ep_fail_mismatch(r, rank, EP_FIELD_TAIL, end.base + end.slots, tail);
            right = false;
        }
        if (right) there[rank] = end.first + (ep_u32)(tail - end.base);
        if (right && ep_planted(r, EP_PLANT_CREDIT_EARLY)) {
            ep_publish(r, rank, ep_lane_credit(c.track), EP_COUNTER_HEAD, tail);
            ep_be_slow();
        }
    }
    __syncwarp();
    return __shfl_sync(EP_FULL, right, 0);
}

/* Waits until the rows of a token are there that lanes have at `position`, of ranks from `base` on; false when that will not happen. */
EP_DEV bool ep_await_rows(const EpRank& r, const EpCombinePulledArgs& a, const EpReturned& c, EpSumming& s, ep_u32* there, ep_u32 warp, ep_u32 base,
                          ep_i32 position, ep_u64 began) {
    const ep_u32 rank = base + ep_warp_lane();
    ep_u32 missing = __ballot_sync(EP_FULL, position >= 0 && (ep_u32)position >= there[rank]);
    if (missing == 0) return true;
    /* A look before the wait: what is on its way is summed first only where somebody else could wait for this warp. */
    if (missing >> ep_warp_lane() & 1) {
        const EpOutboxEnd& end = c.in[rank];
        const ep_u64 tail = ep_peek(r, rank, ep_lane_data(c.track), EP_COUNTER_TAIL);
        if (tail > end.base && tail <= end.base + end.slots && !ep_planted(r, EP_PLANT_CREDIT_EARLY)) there[rank] = end.first + (ep_u32)(tail - end.base);
    }
    __syncwarp();
    missing = __ballot_sync(EP_FULL, position >= 0 && (ep_u32)position >= there[rank]);
    if (missing != 0) ep_sum_all(r, a, c, s, warp);
    for (; missing; missing &= missing - 1) {
        const ep_u32 lane = __ffs(missing) - 1;
        const ep_u32 due = (ep_u32)__shfl_sync(EP_FULL, position, lane);
        if (due >= there[base + lane] && !ep_await_returned(r, c, there, base + lane, due, began)) return false;
    }
#if __CUDA_ARCH__ >= 900
    ep_fence_seen();
#endif
    __syncwarp();
    return true;
}

/* Sums a token's weights, ranks ascending. By a warp. */
EP_DEV void ep_sum_weights_of(const EpRank& r, const EpCombinePulledArgs& a, const EpReturned& c, ep_u32 token) {
    const ep_u32 topk = r.w.topk;
    const ep_i32* positions = ep_positions(r, a.ring.combine, token);
    for (ep_u32 k = ep_warp_lane(); k < topk; k += 32) {
        float sum = 0.0f;
#pragma unroll 1
        for (ep_u32 rank = 0; rank < r.w.ranks; ++rank) {
            const EpRingSource& s = c.sources[rank];
            if (positions[rank] < 0 || !ep_is_somewhere(s.weights)) continue;
            sum += ep_float_of(ep_get4(s.weights + ((ep_u64)ep_slot_of(s, positions[rank]) * s.weights_step + k * 4)));
        }
        ((float*)a.ring.combine.weights)[(ep_u64)token * topk + k] = sum;
    }
}

/* Sums every `pullers`-th part of the channel's tokens. */
EP_DEV void ep_sum_channel(const EpRank& r, const EpCombinePulledArgs& a, const EpReturned& c, EpSumming& s, ep_u32 warp, ep_u64 began) {
    const ep_u32 lane = ep_warp_lane(), units = c.tokens * c.parts, ranks = r.w.ranks;
    const EpCombineArgs& m = a.ring.combine;
    ep_u32* there = c.there + warp * ranks;
    for (ep_u32 rank = lane; rank < ranks; rank += 32) there[rank] = c.in[rank].slots == 0 ? EP_FULL : c.in[rank].first;
    __syncwarp();
    s.units = 0;
    ep_u32 told = 0;
    const ep_u32 first = warp / c.parts;
    ep_i32 next = lane < ranks && warp < units ? ep_positions(r, m, c.begin + first)[lane] : -1;
    for (ep_u32 unit = warp; unit < units; unit += a.pullers) {
        const ep_u32 token = c.begin + unit / c.parts, part = unit % c.parts;
        EpBatch batch = ep_batch(r, s, token, part);
        for (ep_u32 base = 0; base < ranks; base += 32) {
            const ep_i32 position = base == 0 ? next : base + lane < ranks ? ep_positions(r, m, token)[base + lane] : -1;
            if (base == 0 && lane < ranks && unit + a.pullers < units) next = ep_positions(r, m, c.begin + (unit + a.pullers) / c.parts)[lane];
            if (!ep_await_rows(r, a, c, s, there, warp, base, position, began)) {
                /* Nothing may be on its way to a block that has gone. */
                ep_pull_ends(r, m, s, batch);
                return ep_sum_rest(r, m, s);
            }
            EpAt from = ep_nowhere();
            if (position >= 0) from = ep_source_row(c.sources[base + lane], position);
            ep_pull_rows(s, batch, position >= 0, from);
        }
        ep_pull_ends(r, m, s, batch);
        if (ep_sums_first(s)) ep_sum_oldest(r, m, s);
        if (part == 0 && m.weights) ep_sum_weights_of(r, a, c, token);
        if (!c.wraps || s.units == told) continue;
        told = s.units;
        __syncwarp();
        if (lane == 0) ep_tell_count(c.summed + warp, told);
    }
    ep_sum_rest(r, m, s);
    if (lane == 0) ep_tell_count(c.summed + warp, EP_FULL / a.pullers - 1);
}

/* Rows of a rank that have been summed: those of the tokens that all warps are through with. By one thread. */
EP_DEV ep_u32 ep_rows_summed(const EpRank& r, const EpCombinePulledArgs& a, const EpReturned& c, ep_u32 rank) {
    const ep_u32 units = ep_units_done(c.summed, a.pullers), tokens = units / c.parts;
    EpOutboxEnd& end = c.in[rank];
    if (tokens >= c.tokens) return end.slots;
    ep_u32 rows = end.limit;
    for (; end.seen < tokens; ++end.seen) {
        const ep_i32 position = ep_positions(r, a.ring.combine, c.begin + end.seen)[rank];
        if (position >= 0) rows = (ep_u32)position - end.first + 1;
    }
    return end.limit = rows;
}

/* ---- the channel, the launch ---- */

/* The first of some ascending tokens that is not below token: 32 are looked at at a time. By a warp. */
EP_DEV ep_u32 ep_find_token(const ep_i32* tokens, ep_u32 count, ep_u32 token) {
    ep_u32 low = 0;
    while (count > 0) {
        const ep_u32 step = (count + 31) / 32, at = ep_warp_lane() * step;
        const bool below = at < count && (ep_u32)tokens[low + at] < token;
        const ep_u32 votes = __popc(__ballot_sync(EP_FULL, below));
        if (votes == 0) return low;
        const ep_u32 from = (votes - 1) * step + 1, to = votes * step < count ? votes * step : count;
        low += from;
        count = to - from;
    }
    return low;
}

/* The position of the first row that rank got of the own tokens from `token` on; their number where there is none. By a warp. */
EP_DEV ep_u32 ep_find_position(const EpRank& r, const EpCombineArgs& a, ep_u32 rank, ep_u32 token) {
    for (ep_u32 base = token; base < a.tokens; base += 32) {
        const ep_u32 at = base + ep_warp_lane();
        const ep_i32 position = at < a.tokens ? ep_positions(r, a, at)[rank] : -1;
        const ep_u32 votes = __ballot_sync(EP_FULL, position >= 0);
        if (votes) return (ep_u32)__shfl_sync(EP_FULL, position, __ffs(votes) - 1);
    }
    return ((const ep_u32*)a.matrix)[r.me * r.w.ranks + rank];
}

/* Both ends of the rings with a rank. By a warp. */
EP_DEV void ep_begin_rank(const EpRank& r, const EpCombinePulledArgs& a, const EpReturned& c, ep_u32 rank, const ep_u32* weighs) {
    const EpCombineArgs& m = a.ring.combine;
    const ep_u32 channels = a.ring.rings.channels;
    EpOutboxEnd out = {0}, in = {0};
    if (ep_has_rows_of(r, m, rank, r.me)) {
        const ep_u32 row = ((const ep_u32*)m.first_of)[rank], rows = ((const ep_u32*)m.first_of)[rank + 1] - row;
        const ep_i32* tokens = (const ep_i32*)a.ring.source_token + row;
        const ep_u32 batch = ((const ep_u32*)a.ring.tokens_of)[rank];
        out.first = ep_find_token(tokens, rows, ep_channel_first(batch, channels, c.channel));
        out.slots = ep_find_token(tokens, rows, ep_channel_first(batch, channels, c.channel + 1)) - out.first;
        out.row = row + out.first;
    }
    if (ep_has_rows_of(r, m, r.me, rank)) {
        in.first = ep_find_position(r, m, rank, c.begin);
        in.slots = ep_find_position(r, m, rank, c.begin + c.tokens) - in.first;
    }
    if (ep_warp_lane() != 0) return;
    out.base = *ep_cursor(r, 0, rank, c.track);
    in.base = *ep_cursor(r, 1, rank, c.track);
    c.out[rank] = out;
    c.in[rank] = in;
    for (ep_u32 w = 0; w < a.copiers; ++w) c.laid[w * r.w.ranks + rank] = c.done[w * r.w.ranks + rank] = 0;
    EpRingSource source = {ep_nowhere(), ep_nowhere(), (ep_u32)r.w.result_stride, (ep_u32)r.w.header_bytes, in.first, a.ring.rings.slots};
    if (rank == r.me) {
        const ep_u32 first = ((const ep_u32*)m.first_at)[rank];
        source.payload = ep_here(m.y + first * m.y_stride);
        source.payload_step = (ep_u32)m.y_stride;
        source.slots = EP_FULL;
        if (m.own_weights) source.weights = ep_here(m.own_weights + (ep_u64)first * r.w.topk * 4);
        source.weights_step = r.w.topk * 4;
    } else if (in.slots > 0) {
        const EpOutbox box = ep_outbox_to(r.w, a.ring.rings, r.me, c.channel);
        source.payload = ep_at(r, rank, ep_outbox_codes(box, 0));
        if (weighs[rank]) source.weights = ep_at(r, rank, ep_outbox_head(box, 0));
    }
    c.sources[rank] = source;
}

EP_KERNEL(32 * EP_PULLED_WARPS) ep_combine_pulled_kernel(EP_GIVEN(EpRank) r, EP_GIVEN(EpCombinePulledArgs) a) {
    if (ep_block_any(ep_closed(r))) return;
    const ep_u64 began = ep_now();
    const EpCombineArgs& m = a.ring.combine;
    const ep_u32 warp = ep_warp(), warps = ep_threads() / 32, ranks = r.w.ranks, channels = a.ring.rings.channels;
    const EpBlockRole& role = a.block[warp];
    const bool moves = role.task == EP_TASK_ROWS, lays = moves && role.duty == EP_DUTY_RETURNER, pulls = moves && !lays;
    const ep_u32 index = role.index;
    EpReturned c;
    EpItem* items = (EpItem*)ep_pool;
    EpBatch* batches = (EpBatch*)(items + a.copiers * (a.stages + 1));
    ep_u64* bars = (ep_u64*)(batches + a.pullers * a.sums.stages);
    c.out = (EpOutboxEnd*)(bars + a.copiers * a.stages + a.pullers * a.sums.stages);
    c.in = c.out + ranks;
    c.sources = (EpRingSource*)(c.in + ranks);
    c.there = (ep_u32*)(c.sources + ranks);
    c.summed = c.there + a.pullers * ranks;
    c.laid = c.summed + a.pullers;
    c.done = c.laid + a.copiers * ranks;
    c.log = c.done + a.copiers * ranks;
    ep_u32* weighs = c.log + a.copiers * EP_LAID_LOG; /* [ranks]: whether a rank's rows bring weights */
    ep_u8* stages = ep_pool + ep_round_128((ep_u32)((ep_u8*)(weighs + ranks) - ep_pool));
    ep_u8* sums = stages + (ep_u64)a.copiers * a.stages * a.piece_room;
    EpFlow flow;
    EpSumming summing = {};
    if (lays)
        flow = ep_flow(stages + (ep_u64)index * a.stages * a.piece_room, items + index * (a.stages + 1), bars + index * a.stages, a.stages, a.piece_room);
    if (pulls)
        summing = ep_summing(a.sums, sums + (ep_u64)index * ep_summing_bytes(a.sums), batches + index * a.sums.stages,
                             bars + a.copiers * a.stages + index * a.sums.stages);
    if (ep_block() == 0) ep_send_notes(r, EP_NO_BASE, 0, m.own_weights ? EP_OFFERS_WEIGHTS : 0, ep_threads(), began);
    bool right = true;
    for (ep_u32 peer = ep_thread(); peer < ranks; peer += ep_threads()) {
        EpNote note;
        note.opening.first = 0;
        if (peer != r.me && ep_takes_part(r, peer)) right &= ep_take_note(r, peer, began, &note);
        weighs[peer] = note.opening.first & EP_OFFERS_WEIGHTS;
    }
    if (!ep_block_any(!right))
        for (ep_u32 channel = ep_block(); channel < channels; channel += ep_blocks()) {
            c.channel = channel;
            c.track = ep_own_track(r.w, r.me, channel);
            c.begin = ep_channel_first(m.tokens, channels, channel);
            c.tokens = ep_channel_first(m.tokens, channels, channel + 1) - c.begin;
            c.parts = ((ep_u32)r.w.result_stride + a.sums.part - 1) / a.sums.part;
            for (ep_u32 rank = warp; rank < ranks; rank += warps) ep_begin_rank(r, a, c, rank, weighs);
            if (pulls && ep_warp_lane() == 0) c.summed[index] = 0;
            ep_block_meet();
            c.wraps = false;
            const ep_u32 sure = ep_planted(r, EP_PLANT_ALL_SLOTS_FILLED) ? a.ring.rings.slots : a.least_window;
            for (ep_u32 rank = 0; rank < ranks; ++rank) c.wraps |= c.in[rank].slots > sure;
            ep_delay(r, EP_LANE_CONTROL, (ep_u64)channel << 32 | warp);
            if (lays) ep_flow_restart(flow);
            if (pulls) ep_sum_channel(r, a, c, summing, index, began);
            else if (lays) ep_lay_returned(r, a, c, flow, index);
            else if (role.task == EP_TASK_TAIL) ep_tell_readers(r, a, c, began);
            else ep_give_credit(r, a.ring.rings, c.in, c.track, began, [&](ep_u32 rank) { return ep_rows_summed(r, a, c, rank); });
            ep_block_meet();
            if (role.task == EP_TASK_TAIL) ep_keep_cursors(r, c.out, 0, c.track);
            if (role.task == EP_TASK_CREDIT) ep_end_credit(r, c.in, c.track, began);
            ep_block_meet();
        }
    if (!ep_last_block_has_pulled(r, EP_MEETING_MOVED)) return;
    ep_say_done(r);
    ep_count_op(r);
}
