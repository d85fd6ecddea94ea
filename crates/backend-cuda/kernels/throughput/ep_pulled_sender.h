/*
 * ep_pulled_sender.h: the sending end of a dispatch through outboxes, by warps of one block.
 *
 *   roles    copiers lay payloads into slots, and keep own rows; writers write heads, and what is known of own rows; the teller tells all readers
 *            the tail
 *   rules    slots are filled as far as the slowest reader allows (ep_outbox.h)
 */
#ifndef EP_PULLED_SENDER_H
#define EP_PULLED_SENDER_H
#include "ep_pulled.h"

/* The part `part` of a token's row, to the slot where some other rank wants it, and to the own place. */
EP_DEV EpItem ep_laid_item(const EpRank& r, const EpDispatchPulledArgs& a, const EpPulled& c, ep_u32 index, ep_u32 slot, ep_u32 part, bool wanted,
                           ep_i32 own) {
    const EpDispatchRingArgs& d = a.ring;
    const ep_u32 token = c.begin + index, codes = (ep_u32)r.w.scales_offset, begin = part * a.piece, left = codes - begin;
    const ep_u32 row = own < 0 ? 0 : c.own_row + (ep_u32)own;
    const bool ends = part + 1 == a.pieces;
    EpItem item;
    item.from = ep_here(d.x + (ep_u64)token * d.x_stride + begin);
    item.tail_from = ep_here(d.scales + (ep_u64)token * d.scales_token);
    item.to[0] = wanted ? c.own + ep_outbox_codes(c.box, slot) + begin : nullptr;
    item.to[1] = own >= 0 ? ep_out_codes(r, d, row) + begin : nullptr;
    item.tail_to[0] = wanted ? c.own + ep_outbox_scales(c.box, slot) : nullptr;
    item.tail_to[1] = own >= 0 ? ep_out_scales(r, d, row) : nullptr;
    item.codes = left < a.piece ? left : a.piece;
    item.tail = ends ? (ep_u32)r.w.scales_stride : 0;
    item.tail_step = a.bulk_scales ? 0 : (ep_u32)d.scales_word;
    return item;
}

/* Lays every `copiers`-th token of the share. */
EP_DEV void ep_lay_rows(const EpRank& r, const EpDispatchPulledArgs& a, const EpPulled& c, EpFlow& flow, ep_u32 index) {
    const ep_u32 lane = ep_warp_lane(), ranks = r.w.ranks;
    const ep_i32* positions = (const ep_i32*)a.ring.position;
    const bool few = ranks <= 32;
    ep_i32 next = few && lane < ranks && index < c.tokens ? positions[(ep_u64)(c.begin + index) * ranks + lane] : -1;
    ep_u32 told = 0;
    for (ep_u32 i = index, count = 1; i < c.tokens; i += a.copiers, ++count) {
        ep_i32 mine = next, own = -1;
        bool wanted = false;
        if (few) {
            wanted = __any_sync(EP_FULL, mine >= 0 && lane != r.me);
            own = __shfl_sync(EP_FULL, mine, r.me);
            if (lane < ranks && i + a.copiers < c.tokens) next = positions[(ep_u64)(c.begin + i + a.copiers) * ranks + lane];
        } else {
            for (ep_u32 base = 0; base < ranks; base += 32) {
                mine = base + lane < ranks ? positions[(ep_u64)(c.begin + i) * ranks + base + lane] : -1;
                wanted |= __any_sync(EP_FULL, mine >= 0 && base + lane != r.me);
                if (r.me / 32 == base / 32) own = __shfl_sync(EP_FULL, mine, r.me % 32);
            }
        }
        if (!ep_may_fill(c.limit, i + 1)) {
            ep_flow_drain(flow);
            if (lane == 0) ep_tell_count(c.laid + index, flow.stored);
            if (!ep_await_limit(r, c.limit, i + 1)) break;
        }
        flow.last = wanted || own >= 0 ? flow.last : count;
        const ep_u32 slot = i % c.box.slots;
        for (ep_u32 part = 0; part < a.pieces && (wanted || own >= 0); ++part) {
            if (ep_flow_is_full(flow)) ep_flow_pop(flow);
            EpItem item = ep_laid_item(r, a, c, i, slot, part, wanted, own);
            item.count = part + 1 == a.pieces ? count : count - 1;
            ep_flow_push(flow, item);
        }
        if (flow.stored > told) {
            told = flow.stored;
            if (lane == 0) ep_tell_count(c.laid + index, told);
        }
    }
    ep_flow_drain(flow);
    if (lane == 0) ep_tell_count(c.laid + index, flow.stored);
}

/* Words of 16 bytes of a head: the row's header, two choices each, four positions each. */
EP_DEV EpUnit ep_head_unit(const EpRank& r, const EpDispatchPulledArgs& a, ep_u32 token, ep_u32 unit) {
    const ep_u32 choices = (ep_u32)r.w.header_bytes / 16, topk = r.w.topk, ranks = r.w.ranks;
    if (unit == 0) return ep_row_header(r, token, 0);
    if (unit < choices) {
        EpChoice two[2];
        for (ep_u32 i = 0; i < 2; ++i) {
            const ep_u32 k = 2 * (unit - 1) + i;
            two[i].expert = -1;
            two[i].weight = 0.0f;
            if (k >= topk || a.ring.topk_idx == 0) continue;
            const ep_u64 at = (ep_u64)token * topk + k;
            const ep_i64 expert = ((const ep_i64*)a.ring.topk_idx)[at];
            if (expert < 0) continue;
            two[i].expert = (ep_i32)expert;
            two[i].weight = a.ring.topk_weights ? ((const float*)a.ring.topk_weights)[at] : 1.0f;
        }
        return ep_unit(two[0].expert, __float_as_int(two[0].weight), two[1].expert, __float_as_int(two[1].weight));
    }
    ep_i32 four[4];
    for (ep_u32 i = 0; i < 4; ++i) {
        const ep_u32 rank = 4 * (unit - choices) + i;
        four[i] = rank < ranks ? ((const ep_i32*)a.ring.position)[(ep_u64)token * ranks + rank] : -1;
        if (four[i] >= 0 && ep_planted(r, EP_PLANT_POSITION_OFF_BY_ONE)) ++four[i];
    }
    return ep_unit(four[0], four[1], four[2], four[3]);
}

/* Writes every `writers`-th batch of heads, each of as many as a piece has slots, as far as there is room: a reader may wait for the first of them, as
   its pieces need not be the own ones. And what is known of own rows. */
EP_DEV void ep_write_heads(const EpRank& r, const EpDispatchPulledArgs& a, const EpPulled& c, ep_u32 index) {
    const ep_u32 lane = ep_warp_lane(), units = c.box.head_bytes / 16, topk = r.w.topk, ranks = r.w.ranks;
    const bool notes = a.ring.out_idx || a.ring.out_token;
    ep_u32 count = 0;
    for (ep_u32 begin = index * a.piece_slots; begin < c.tokens; begin += a.writers * a.piece_slots) {
        const ep_u32 left = c.tokens - begin, slots = left < a.piece_slots ? left : a.piece_slots;
        for (ep_u32 from = begin, end = begin + slots; from < end;) {
            if (!ep_await_limit(r, c.limit, ep_planted(r, EP_PLANT_WHOLE_HEADS) ? end : from + 1)) return;
            const ep_u32 limit = ep_warp_shuffle(ep_count_of(c.limit), 0), now = (limit < end ? limit : end) - from;
            for (ep_u32 at = lane; at < now * units; at += 32) {
                const ep_u32 i = from + at / units, unit = at % units;
                ep_st16(c.own + ep_outbox_head(c.box, i % c.box.slots) + unit * 16, ep_head_unit(r, a, c.begin + i, unit));
            }
            for (ep_u32 at = lane; notes && at < now * topk; at += 32) {
                const ep_u32 token = c.begin + from + at / topk, k = at % topk;
                const ep_i32 own = ((const ep_i32*)a.ring.position)[(ep_u64)token * ranks + r.me];
                if (own >= 0) ep_keep(r, a.ring, c.own_row + (ep_u32)own, r.me, token, k, ep_choice(r, a.ring, r.me, token, k));
            }
            from += now;
            count += now;
            __syncwarp();
            if (lane == 0) ep_tell_count(c.written + index, count);
        }
    }
}

/* Heads below which all are written. By one thread. */
EP_DEV ep_u32 ep_heads_written(const EpDispatchPulledArgs& a, const EpPulled& c) {
    ep_u32 heads = EP_FULL;
    for (ep_u32 w = 0; w < a.writers; ++w) {
        const ep_u32 own = ep_count_of(c.written + w), batches = own / a.piece_slots * a.writers + w;
        const ep_u32 below = batches * a.piece_slots + own % a.piece_slots;
        heads = below < heads ? below : heads;
    }
    return heads;
}

/* The teller: all readers have the same tail, and the slowest one's head counts. */
EP_DEV void ep_tell_readers(const EpRank& r, const EpDispatchPulledArgs& a, const EpPulled& c, ep_u64 began) {
    const ep_u32 lane = ep_warp_lane(), ranks = r.w.ranks, chunk = a.ring.rings.chunk;
    ep_u32 told = 0, idle = 0, before = 0;
    for (ep_u32 spin = 1;; ++spin) {
        ep_u32 freed = EP_FULL, slowest = r.me;
        /* Where there is room for all, nobody's head is waited for before the end. */
        const bool looks = c.tokens > a.window || told == c.tokens;
        for (ep_u32 peer = lane; looks && peer < ranks; peer += 32) {
            if (peer == r.me || !ep_takes_part(r, peer)) continue;
            if (ep_planted(r, EP_PLANT_FIRST_READER) && peer != (r.me == 0 ? 1 : 0)) continue;
            const ep_u32 taken = ep_taken(r, peer, c.track, c.out[peer], told);
            if (taken < freed) {
                freed = taken;
                slowest = peer;
            }
        }
        const ep_u32 least = __reduce_min_sync(EP_FULL, freed);
        const ep_u32 limit = least >= c.tokens || c.tokens - least <= a.window ? c.tokens : least + a.window;
        if (lane == 0 && limit > *c.limit) ep_tell_word(c.limit, limit);
        ep_u32 ready = ep_units_done(c.laid, a.copiers);
        const ep_u32 heads = ep_heads_written(a, c);
        ready = heads < ready ? heads : ready;
        ready = ready < c.tokens ? ready : c.tokens;
        if (ep_planted(r, EP_PLANT_TAIL_BEFORE_DATA)) ready = limit;
        /* Lanes may have seen different counts; what one has seen, all tell. */
        __syncwarp();
        ready = __shfl_sync(EP_FULL, ready, 0);
        idle = ready > before ? 0 : idle + 1;
        before = ready;
        if (ep_is_due(ready, told, chunk, c.tokens, idle) || (ready > told && ready == limit)) {
            for (ep_u32 peer = lane; peer < ranks; peer += 32)
                if (peer != r.me && ep_takes_part(r, peer)) ep_tell_tail(r, peer, c.track, c.out[peer], ready);
            told = ready;
            if (ep_planted(r, EP_PLANT_TAIL_BEFORE_DATA)) ep_be_slow();
        }
        const bool done = looks && told == c.tokens && least >= c.tokens;
        bool vain = !done && ep_turns_end(r, spin, began);
        for (ep_u32 peer = lane; (done || spin % 64 == 0) && peer < ranks; peer += 32) {
            if (peer == r.me || !ep_takes_part(r, peer)) continue;
            if (done || told != limit || freed != least || peer != slowest) {
                ep_unsuspect(r, ep_op(r), EP_PHASE_OUTBOX, peer);
                continue;
            }
            const ep_u64 awaited = c.out[peer].base + least + 1, cell = ep_cell(r.w, r.generation, peer, ep_lane_credit(c.track), EP_COUNTER_HEAD);
            vain |= ep_wait_is_vain(r, peer, ep_lane_credit(c.track), cell, EP_PHASE_OUTBOX, awaited - 1, awaited, began);
        }
        if (done) return;
        if (__any_sync(EP_FULL, vain)) return ep_teller_ends(r, began);
    }
}
#endif
