/*
 * ep_dispatch_pulled_kernel: rows lie once in the outbox of their sender; whoever wants them pulls them to their final place.
 *
 *   launch   any number of blocks, co-resident with those of the other ranks (cooperative). A block serves channels block, block + blocks, ...:
 *            the lowest one that is not done is served on every rank, so no circle of waits runs through channels
 *   roles    of a block, by the table `block`: senders lay payloads, and keep own rows (copiers), or write heads, and what is known of own
 *            rows (writers), or tell the tail (the teller); receivers pull, or return credit (the creditor; ep_outbox.h)
 *   memory   x in any memory of the own GPU, received rows as well; the outbox in the own window. shared: ends of rings, counts, stages
 *   rules    F10: the tail's acquire by one lane, __syncwarp, then gets of heads and (behind a fence of the proxies) of rows. F8: what a head says
 *            is compared with the counts
 */
#include "ep_dispatch_ring.h"
#include "ep_last_look.h"
#include "ep_outbox.h"

EP_POOL(ep_pool);

/* Where the rows of a source come from and go to, in shared memory: asked of the GPU's for each row, it would take longer than the row. */
struct EpPulledFrom {
    EpAt window;
    ep_u32 row, rows; /* the first of its rows here, and how many there are */
    ep_u32 token;     /* the first of its share */
    ep_u32 reserved;
};
static_assert(sizeof(EpPulledFrom) == EP_PULLED_FROM_BYTES, "the host makes room for another EpPulledFrom");

/* What a block knows of its channel. */
struct EpPulled {
    EpOutbox box;
    EpOutboxEnd* out; /* [ranks] */
    EpOutboxEnd* in;  /* [ranks] */
    ep_u32* laid;     /* [copiers]: tokens */
    ep_u32* written;  /* [writers]: heads */
    ep_u32* seen;     /* [pullers, ranks]: slots that a puller knows to be filled; */
    ep_u32* next;     /* [pullers, ranks]: the piece that it takes next; */
    ep_u32* pulled;   /* [pullers, ranks]: pieces that it has loaded; */
    ep_u32* log;      /* [pullers, EP_PULLED_LOG]: and of whom those are that it is loading */
    ep_u32* limit;
    ep_u32* met;      /* 1 when all notes have come, and say the same */
    EpPulledFrom* from; /* [ranks] */
    ep_u8* own;           /* the own window */
    ep_u32 own_row;       /* first of the rows that stay */
    ep_u32 begin, tokens; /* the own share */
    ep_u32 track, channel;
    ep_u32 sources; /* ranks to pull from */
};

/* The rank whose turn it is: from the own one on, so that not all begin with the same. Those that take no part have empty shares. */
EP_DEV ep_u32 ep_source_of(const EpRank& r, ep_u32 turn) {
    const ep_u32 rank = r.me + 1 + turn;
    return rank < r.w.ranks ? rank : rank - r.w.ranks;
}

EP_DEV ep_u32 ep_share_first(const EpDispatchPulledArgs& a, ep_u32 tokens, ep_u32 channel) {
    return ep_channel_first(tokens, a.ring.rings.channels, channel);
}

/* ---- the sending end ---- */

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
        for (ep_u32 peer = lane; peer < ranks && (c.tokens > a.window || told == c.tokens); peer += 32) {
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
        if (lane == 0 && limit > *c.limit) *(volatile ep_u32*)c.limit = limit;
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
        const bool done = told == c.tokens && least >= c.tokens;
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

/* ---- the receiving end ---- */

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
        for (ep_u32 piece = *counted; piece < flow.loaded; ++piece) {
            volatile ep_u32* done = c.pulled + index * r.w.ranks + c.log[index * EP_PULLED_LOG + piece % EP_PULLED_LOG];
            *done = *done + 1;
        }
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

/* ---- the channel, the launch ---- */

/* Takes the notes of all peers, and lets the pullers begin when they say the same. By a warp, once a launch. */
EP_DEV void ep_meet_peers(const EpRank& r, const EpPulled& c, ep_u64 began) {
    bool right = true;
    for (ep_u32 peer = ep_warp_lane(); peer < r.w.ranks; peer += 32) {
        EpNote note;
        if (peer != r.me && ep_takes_part(r, peer)) right &= ep_take_note(r, peer, began, &note);
    }
    if (ep_warp_all(right) && ep_warp_lane() == 0) ep_tell_count(c.met, 1);
}

EP_DEV void ep_begin_channel(const EpRank& r, const EpDispatchPulledArgs& a, EpPulled& c, ep_u32 channel) {
    const ep_u32 ranks = r.w.ranks, channels = a.ring.rings.channels;
    c.channel = channel;
    c.track = ep_own_track(r.w, r.me, channel);
    c.box = ep_outbox(r.w, a.ring.rings, channel);
    c.begin = ep_share_first(a, a.ring.tokens, channel);
    c.tokens = ep_share_first(a, a.ring.tokens, channel + 1) - c.begin;
    c.sources = ranks > 1 ? ranks - 1 : 1;
    const ep_u32* first_of = (const ep_u32*)a.ring.first_of;
    c.own = ep_own(r);
    c.own_row = first_of[r.me];
    for (ep_u32 rank = 0; rank < ranks; ++rank) {
        const ep_u32 tokens = rank != r.me && ep_takes_part(r, rank) ? ((const ep_u32*)a.tokens_of)[rank] : 0;
        const ep_u32 first = ep_channel_first(tokens, channels, channel), slots = ep_channel_first(tokens, channels, channel + 1) - first;
        if (rank % ep_threads() == ep_thread()) {
            c.from[rank] = EpPulledFrom{ep_begin(r, rank), first_of[rank], first_of[rank + 1] - first_of[rank], first, 0};
            c.in[rank] = EpOutboxEnd{*ep_cursor(r, 1, rank, c.track), slots};
            c.out[rank] = EpOutboxEnd{*ep_cursor(r, 0, rank, c.track), rank != r.me ? c.tokens : 0};
        }
    }
    for (ep_u32 i = ep_thread(); i < a.copiers + a.writers; i += ep_threads()) c.laid[i] = 0;
    for (ep_u32 i = ep_thread(); i < a.pullers * ranks; i += ep_threads()) c.pulled[i] = 0;
    if (ep_thread() == 0) *c.limit = 0;
    ep_block_meet();
}

EP_KERNEL(32 * EP_PULLED_WARPS) ep_dispatch_pulled_kernel(EP_GIVEN(EpRank) r, EP_GIVEN(EpDispatchPulledArgs) a) {
    if (ep_block_any(ep_closed(r))) return;
    const ep_u64 began = ep_now();
    const ep_u32 ranks = r.w.ranks, flows = a.copiers + a.pullers;
    const EpBlockRole& role = a.block[ep_warp()];
    EpPulled c;
    EpItem* items = (EpItem*)ep_pool;
    ep_u64* bars = (ep_u64*)(items + flows * (a.stages + 1));
    c.from = (EpPulledFrom*)(bars + flows * a.stages);
    c.out = (EpOutboxEnd*)(c.from + ranks);
    c.in = c.out + ranks;
    c.laid = (ep_u32*)(c.in + ranks);
    c.written = c.laid + a.copiers;
    c.seen = c.written + a.writers;
    c.next = c.seen + a.pullers * ranks;
    c.pulled = c.next + a.pullers * ranks;
    c.log = c.pulled + a.pullers * ranks;
    c.limit = c.log + a.pullers * EP_PULLED_LOG;
    c.met = c.limit + 1;
    ep_u8* stages = ep_pool + ep_round_128((ep_u32)((ep_u8*)(c.met + 1) - ep_pool));
    const bool moves = role.task == EP_TASK_ROWS, sends = role.duty == EP_DUTY_SENDER;
    const ep_u32 number = sends ? role.index : a.copiers + role.index;
    EpFlow flow;
    if (moves)
        flow = ep_flow(stages + (ep_u64)number * a.stages * a.room, items + number * (a.stages + 1), bars + number * a.stages, a.stages, a.room);
    if (ep_block() == 0) ep_send_notes(r, EP_NO_BASE, 0, 0, ep_threads(), began);
    if (ep_thread() == 0) *c.met = 0;
    for (ep_u32 channel = ep_block(); channel < a.ring.rings.channels; channel += ep_blocks()) {
        ep_begin_channel(r, a, c, channel);
        ep_delay(r, EP_LANE_WATCH, (ep_u64)channel << 32 | ep_warp());
        if (moves) ep_flow_restart(flow);
        if (moves && sends) {
            ep_lay_rows(r, a, c, flow, role.index);
        } else if (role.task == EP_TASK_HEADERS) {
            ep_write_heads(r, a, c, role.index);
        } else if (moves) {
            ep_pull_pieces(r, a, c, flow, role.index, began);
        } else if (role.task == EP_TASK_TAIL) {
            ep_tell_readers(r, a, c, began);
        } else {
            if (channel == ep_block()) ep_meet_peers(r, c, began);
            ep_give_credit(r, a.ring.rings, c.in, c.track, began, [&](ep_u32 source) { return ep_slots_pulled(r, a, c, source); });
        }
        ep_block_meet();
        if (role.task == EP_TASK_TAIL) ep_keep_cursors(r, c.out, 0, c.track);
        if (role.task == EP_TASK_CREDIT) ep_keep_cursors(r, c.in, 1, c.track);
        ep_block_meet();
    }
    if (!ep_last_block_has_pulled(r, EP_MEETING_MOVED)) return;
    for (ep_u32 source = ep_thread(); source < ranks; source += ep_threads()) {
        ep_u32* arrived = (ep_u32*)a.arrived + source;
        const ep_u32 due = ((const ep_u32*)a.ring.first_of)[source + 1] - ((const ep_u32*)a.ring.first_of)[source];
        if (source != r.me && ep_takes_part(r, source) && ep_ld_relaxed(arrived) != due) ep_fail_mismatch(r, source, EP_FIELD_ROWS_SENT, due, ep_ld_relaxed(arrived));
        *arrived = 0;
    }
    ep_block_meet();
    if (ep_failed(r)) return;
    ep_say_done(r);
    ep_count_op(r);
}
