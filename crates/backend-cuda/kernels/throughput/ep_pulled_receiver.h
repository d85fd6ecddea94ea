/*
 * ep_pulled_receiver.h: the receiving end of a dispatch through outboxes, by warps of one block.
 *
 *   roles    pullers take pieces of whichever source has one; the creditor (ep_outbox.h) tells the senders what has been taken
 *   rules    F10: the tail's acquire by one lane, __syncwarp, then gets of heads and (behind a fence of the proxies) of rows. F8: what a head says
 *            is compared with the counts
 */
#ifndef EP_PULLED_RECEIVER_H
#define EP_PULLED_RECEIVER_H
#include "ep_pulled.h"

/* A piece that a puller takes; and of the slot that a lane has, what its head says. */
struct EpTurn {
    ep_u32 source, first, slots; /* no slots: there is none */
    bool asked;
    EpUnit head;
    ep_i32 position;
};

/* A puller's next piece of a source, as far as there is one. */
EP_DEV EpTurn ep_turn(const EpRank& r, const EpDispatchPulledArgs& a, const EpPulled& c, ep_u32 index, ep_u32 source) {
    EpTurn t;
    t.source = source;
    t.first = c.next[index * r.w.ranks + source] * a.piece_slots;
    const ep_u32 all = c.in[source].slots;
    t.slots = t.first >= all ? 0 : all - t.first < a.piece_slots ? all - t.first : a.piece_slots;
    t.asked = false;
    t.position = -1;
    return t;
}

/* Whether a piece is there; looks at the source's tail where that is not known. Fails the rank where the tail cannot be. By a warp. */
EP_DEV bool ep_is_filled(const EpRank& r, const EpPulled& c, ep_u32 index, const EpTurn& t, bool looks) {
    ep_u32* seen = c.seen + index * r.w.ranks + t.source;
    if (t.slots == 0) return false;
    if (*seen >= t.first + t.slots) return true;
    if (!looks) return false;
    const EpOutboxEnd& end = c.in[t.source];
    ep_u64 tail = 0;
    if (ep_warp_lane() == 0) tail = ep_peek(r, t.source, ep_lane_data(c.track), EP_COUNTER_TAIL);
    tail = __shfl_sync(EP_FULL, tail, 0);
    if (tail > end.base + end.slots) {
        if (ep_warp_lane() == 0) ep_fail_mismatch(r, t.source, EP_FIELD_TAIL, end.base + end.slots, tail);
        return false;
    }
    if (tail < end.base + t.first + t.slots) return false;
    /* All have read it. */
    __syncwarp();
    if (ep_warp_lane() == 0) *seen = (ep_u32)(tail - end.base);
#if __CUDA_ARCH__ >= 900
    ep_fence_seen();
#endif
    __syncwarp();
    return true;
}

/* Asks for the heads of a piece that is there. */
EP_DEV void ep_ask_heads(const EpRank& r, const EpPulled& c, EpTurn& t) {
    const ep_u32 lane = ep_warp_lane();
    t.asked = true;
    if (lane >= t.slots) return;
    const ep_u64 head = ep_outbox_head(c.box, (t.first + lane) % c.box.slots);
    const EpAt at = c.from[t.source].window + head;
    t.head = ep_get16(at);
    t.position = (ep_i32)ep_get4(at + (r.w.header_bytes + 4 * (ep_u64)r.me));
}

/* The first piece that is there, of the sources from turn on; none where none is. By a warp. */
EP_DEV EpTurn ep_find_piece(const EpRank& r, const EpDispatchPulledArgs& a, const EpPulled& c, ep_u32 index, ep_u32& turn, bool looks) {
    EpTurn t;
    for (ep_u32 i = 0; i < c.sources; ++i) {
        t = ep_turn(r, a, c, index, ep_source_of(r, turn));
        if (++turn == c.sources) turn = 0;
        if (ep_is_filled(r, c, index, t, looks)) return t;
    }
    t.slots = 0;
    return t;
}

/* The rare part of a puller's wait, which is for all sources that it has not done with: whether one of them is waited for in vain. By a warp. */
EP_DEV bool ep_pull_is_vain(const EpRank& r, const EpDispatchPulledArgs& a, const EpPulled& c, ep_u32 index, ep_u64 began) {
    bool vain = ep_failed(r);
    const ep_u32 at = ep_lane_data(c.track);
    for (ep_u32 source = ep_warp_lane(); source < r.w.ranks && !vain; source += 32) {
        const EpTurn t = ep_turn(r, a, c, index, source);
        if (t.slots == 0) continue;
        const ep_u64 awaited = c.in[source].base + t.first + t.slots, cell = ep_cell(r.w, r.generation, source, at, EP_COUNTER_TAIL);
        vain |= ep_wait_is_vain(r, source, at, cell, EP_PHASE_ROWS, ep_look(r, cell), awaited, began);
    }
    return ep_warp_any(vain);
}

/* Counts the pieces that have been loaded, for whom they were. By a warp. */
EP_DEV void ep_count_pulled(const EpRank& r, const EpPulled& c, const EpFlow& flow, ep_u32 index, ep_u32* counted) {
    if (ep_warp_lane() == 0 && *counted < flow.loaded) {
        ep_fence_block();
        for (ep_u32 piece = *counted; piece < flow.loaded; ++piece)
            ep_atomic_add(c.pulled + index * r.w.ranks + c.log[index * EP_PULLED_LOG + piece % EP_PULLED_LOG], 1u);
    }
    __syncwarp();
    *counted = flow.loaded;
}

/* Whether the head of a lane's slot is the one due. */
EP_DEV bool ep_is_due_head(const EpRank& r, const EpTurn& t, ep_u32 token, ep_u32 rows) {
    if (ep_warp_lane() >= t.slots) return true;
    const EpRowHeader due = {t.source, token, 0, (ep_u32)ep_op(r)};
    const EpRowHeader row = {(ep_u32)t.head.x, (ep_u32)t.head.y, 0, (ep_u32)t.head.w};
    if (!ep_is_same(r, t.source, ep_compare_rows(due, row))) return false;
    if (row.source_token != token) {
        ep_fail_mismatch(r, t.source, EP_FIELD_ROW_TOKEN, token, row.source_token);
        return false;
    }
    if (t.position < 0 || (ep_u32)t.position < rows) return true;
    ep_fail_mismatch(r, t.source, EP_FIELD_ROW_POSITION, rows, (ep_u32)t.position);
    return false;
}

/* What the user learns of the rows of a piece. `mine`: of each lane's slot the position. */
EP_DEV void ep_keep_choices(const EpRank& r, const EpDispatchPulledArgs& a, const EpPulled& c, ep_u32 source, ep_u32 first, ep_u32 token, ep_u32 slots, ep_i32 mine,
                            ep_u32 first_row) {
    const ep_u32 lane = ep_warp_lane(), topk = r.w.topk;
    for (ep_u32 begin = 0; begin < slots * topk; begin += 32) {
        const ep_u32 at = begin + lane, i = at / topk, k = at % topk;
        const ep_i32 position = __shfl_sync(EP_FULL, mine, i % 32);
        if (at >= slots * topk || position < 0) continue;
        EpChoice choice = {-1, 0.0f};
        if (a.ring.out_idx) {
            const EpAt from = c.from[source].window + (ep_outbox_head(c.box, (first + i) % c.box.slots) + sizeof(EpRowHeader) + k * sizeof(EpChoice));
            const ep_i32 expert = (ep_i32)ep_get4(from) - (ep_i32)(r.me * r.w.local_experts);
            if (expert >= 0 && expert < (ep_i32)r.w.local_experts) choice = {expert, ep_float_of(ep_get4(from + 4))};
        }
        ep_keep(r, a.ring, first_row + (ep_u32)position, source, token + i, k, choice);
    }
}

/* Pulls every `pullers`-th piece of each source, of whichever has one: so that nobody waits for credit because another has no rows. Heads of the next
   piece are asked for before the rows of this one, if they are known to be there. */
EP_DEV void ep_pull_pieces(const EpRank& r, const EpDispatchPulledArgs& a, const EpPulled& c, EpFlow& flow, ep_u32 index, ep_u64 began) {
    const ep_u32 lane = ep_warp_lane(), codes = (ep_u32)r.w.scales_offset, ranks = r.w.ranks;
    const bool notes = a.ring.out_idx || a.ring.out_token, credits_early = ep_planted(r, EP_PLANT_CREDIT_EARLY);
    ep_u32 left = 0;
    for (ep_u32 rank = 0; rank < ranks; ++rank) {
        const ep_u32 pieces = (c.in[rank].slots + a.piece_slots - 1) / a.piece_slots;
        left += (pieces + a.pullers - 1 - index) / a.pullers;
        if (rank % 32 != lane) continue;
        c.seen[index * ranks + rank] = 0;
        c.next[index * ranks + rank] = index;
    }
    __syncwarp();
    if (left > 0 && !ep_await_limit(r, c.met, 1)) return;
    ep_u32 count = 0, counted = 0, turn = 0, spin = 0;
    EpTurn next;
    next.slots = 0;
    while (left > 0) {
        EpTurn t = next;
        next.slots = 0;
        if (t.slots == 0) t = ep_find_piece(r, a, c, index, turn, true);
        if (t.slots == 0) {
            /* What is in flight is stored first: nobody waits for this warp. */
            ep_flow_drain(flow);
            ep_count_pulled(r, c, flow, index, &counted);
            if (++spin % 64 == 0 && ep_pull_is_vain(r, a, c, index, began)) return;
            continue;
        }
        if (spin > 64 && lane == 0) ep_unsuspect(r, ep_op(r), EP_PHASE_ROWS, t.source);
        spin = 0;
        if (credits_early && lane == 0) {
            ep_publish(r, t.source, ep_lane_credit(c.track), EP_COUNTER_HEAD, c.in[t.source].base + t.first + t.slots);
            ep_be_slow();
        }
        __syncwarp();
        if (!t.asked) ep_ask_heads(r, c, t);
        if (lane == 0) {
            c.next[index * ranks + t.source] += a.pullers;
            c.log[index * EP_PULLED_LOG + count % EP_PULLED_LOG] = t.source;
        }
        __syncwarp();
        --left;
        ++count;
        const EpPulledFrom& from = c.from[t.source];
        const ep_u32 token = from.token + t.first;
        if (!ep_warp_all(ep_is_due_head(r, t, token + lane, from.rows))) {
            /* Nothing may be on its way to a block that has gone. */
            ep_flow_drain(flow);
            return;
        }
        ep_u32 votes = __ballot_sync(EP_FULL, t.position >= 0);
        if (lane == 0 && votes) atomicAdd((ep_u32*)a.arrived + t.source, __popc(votes));
        if (!credits_early) {
            next = ep_find_piece(r, a, c, index, turn, false);
            if (next.slots > 0) ep_ask_heads(r, c, next);
        }
        if (notes) ep_keep_choices(r, a, c, t.source, t.first, token, t.slots, t.position, from.row);
        flow.last = count;
        for (; votes; votes &= votes - 1) {
            const ep_u32 i = __ffs(votes) - 1, slot = (t.first + i) % c.box.slots, row = from.row + (ep_u32)__shfl_sync(EP_FULL, t.position, i);
            for (ep_u32 part = 0; part < a.pieces; ++part) {
                const ep_u32 begin = part * a.piece, rest = codes - begin;
                const bool ends = part + 1 == a.pieces;
                EpItem item;
                item.from = from.window + (ep_outbox_codes(c.box, slot) + begin);
                item.tail_from = from.window + ep_outbox_scales(c.box, slot);
                item.to[0] = item.tail_to[0] = nullptr;
                item.to[1] = ep_out_codes(r, a.ring, row) + begin;
                item.tail_to[1] = ep_out_scales(r, a.ring, row);
                item.codes = rest < a.piece ? rest : a.piece;
                item.tail = ends ? (ep_u32)r.w.scales_stride : 0;
                item.tail_step = 0;
                item.count = ends && (votes & (votes - 1)) == 0 ? count : count - 1;
                if (ep_flow_is_full(flow)) ep_flow_pop(flow);
                ep_flow_push(flow, item);
            }
        }
        /* Pieces without rows count when all before them do. */
        if (flow.in_flight == 0 || count - counted >= EP_PULLED_LOG / 2) ep_flow_drain(flow);
        ep_count_pulled(r, c, flow, index, &counted);
    }
    ep_flow_drain(flow);
    ep_count_pulled(r, c, flow, index, &counted);
}

/* Slots of a source that all pullers are through with. By one thread. */
EP_DEV ep_u32 ep_slots_pulled(const EpRank& r, const EpDispatchPulledArgs& a, const EpPulled& c, ep_u32 source) {
    const ep_u32 all = c.in[source].slots;
    ep_u32 slots = all;
    for (ep_u32 w = 0; w < a.pullers; ++w) {
        const ep_u32 piece = ep_count_of(c.pulled + w * r.w.ranks + source) * a.pullers + w;
        slots = piece * a.piece_slots < slots ? piece * a.piece_slots : slots;
    }
    return slots;
}
#endif
