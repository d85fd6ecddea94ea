/*
 * ep_dispatch_kernel: direct placement. A row is read once and stored to the final place at every rank that granted one.
 *
 *   launch   any number of blocks, co-resident with those of the other ranks (cooperative); all have the roles of the table `block`. A batch may
 *            take several, one behind the other: each moves some of its lots, which are tokens side by side
 *   memory   shared: where rows go at each rank; for each mover `stages` pieces of a row, as it travels. x in any memory of the own
 *            GPU. At its place a row is codes, scales and header apart (ep_block_...)
 *   roles    block 0 grants: it tells each peer where rows for this rank go. Every block learns the peers' grants. Placers of rows
 *            (movers): bulk load of a piece, then one bulk store for each destination, each by a lane of its own, and one of the
 *            scales where they end the piece; scales of odd sizes are stored word by word, by all lanes. Placers of headers: where
 *            rows carry any. The block that comes last publishes Placed of the launch's lots, each on the track of its number, and
 *            waits for those of the peers. The first launch grants and writes all headers, the last one ends the operation
 *   rules    F3: each lane waits for its bulk stores (wait_group 0), then the barrier and fence of ep_last_block, then release.
 *            F5: a stage is loaded again after wait_group.read and __syncwarp; words that lanes wrote into it, or read, are fenced
 *
 * Where a rank granted nothing, the warps play the roles of the rings (ep_dispatch_ring.h) when they are through with this. Where they are
 * too few for all roles, ep_dispatch_ring_kernel follows on the stream.
 */
#include "ep_dispatch_ring.h"
#if __CUDA_ARCH__ >= 900
#include "ep_bulk.h"
#endif

/* Where this rank's rows go at one rank: the first row's parts; nowhere where nothing was granted. */
struct EpPlace {
    EpAt codes;
    EpAt scales;
    EpAt header;
};
static_assert(sizeof(EpPlace) == EP_PLACE_BYTES, "the host makes room for another EpPlace");

EP_POOL(ep_pool);

/* The first token of a lot. */
EP_DEV ep_u32 ep_lot_first(const EpDispatchArgs& a, ep_u32 lot) { return ep_channel_first(a.ring.tokens, a.lots, lot); }

/* Publishes Placed of the launch's lots; waits for that of the peers. By all threads of the last block. */
EP_DEV void ep_publish_lots(const EpRank& r, const EpDispatchArgs& a) {
    const ep_u32 lots = a.end_lot - a.lot;
    for (ep_u32 i = ep_thread(); i < r.w.ranks * lots; i += ep_threads()) {
        const ep_u32 peer = i / lots, lot = a.lot + i % lots;
        if (peer == r.me || !ep_takes_part(r, peer)) continue;
        ep_fence_sys();
        ep_publish(r, peer, ep_lane_data(ep_own_track(r.w, r.me, lot)), EP_COUNTER_PLACED, ep_op(r));
    }
}
EP_DEV void ep_wait_lots(const EpRank& r, const EpDispatchArgs& a, ep_u64 began) {
    const ep_u32 lots = a.end_lot - a.lot;
    for (ep_u32 i = ep_thread(); i < r.w.ranks * lots; i += ep_threads()) {
        const ep_u32 peer = i / lots, lot = a.lot + i % lots;
        if (peer != r.me && ep_takes_part(r, peer))
            ep_wait(r, peer, ep_lane_data(ep_own_track(r.w, r.me, lot)), EP_COUNTER_PLACED, ep_op(r), EP_PHASE_ROWS, began);
    }
}

/* Whether there is none at some rank, of those that this thread looked at. */
EP_DEV bool ep_learn_places(const EpRank& r, const EpDispatchArgs& a, EpPlace* places, ep_u64 began) {
    const ep_u32* first_at = (const ep_u32*)a.first_at;
    bool rings = false;
    for (ep_u32 peer = threadIdx.x; peer < r.w.ranks; peer += blockDim.x) {
        EpPlace place = {ep_nowhere(), ep_nowhere(), ep_nowhere()};
        EpNote note;
        note.base = a.base;
        note.opening.rows = a.base_rows;
        const bool there = peer == r.me || (ep_takes_part(r, peer) && ep_take_note(r, peer, began, &note));
        if (there && ep_check_block(r, peer, note, ep_block_bytes(r.w, note.opening.rows)) && note.base != EP_NO_BASE) {
            place.codes = ep_at(r, peer, ep_block_codes(r.w, note.base, note.opening.rows, first_at[peer]));
            place.scales = ep_at(r, peer, ep_block_scales(r.w, note.base, note.opening.rows, first_at[peer]));
            place.header = ep_at(r, peer, ep_block_header(r.w, note.base, first_at[peer]));
        }
        places[peer] = place;
        rings |= !ep_is_somewhere(place.codes) && ep_takes_part(r, peer);
    }
    return rings;
}

/* A part of a header, of 16 bytes: the row's own, or two choices of its token. */
struct EpHeaderPart {
    ep_u32 token;
    ep_u32 rank;
    ep_u32 part;
    ep_i32 position; /* of the row; -1 where the rank gets none */
    ep_i64 expert[2];
    float weight[2];
};

/* Parts that a lane has in flight. */
#define EP_HEADER_PARTS 4u

/* A lane's part `item` of those of all ranks of `count` tokens from `token` on. */
EP_DEV EpHeaderPart ep_header_part(const EpRank& r, const EpDispatchArgs& a, ep_u32 token, ep_u32 count, ep_u32 item) {
    const ep_u32 parts = (ep_u32)(r.w.header_bytes / 16), of_token = r.w.ranks * parts, rest = item % of_token;
    EpHeaderPart h = {token + item / of_token, rest / parts, rest % parts, -1, {-1, -1}, {0.0f, 0.0f}};
    if (item < count * of_token) h.position = ((const ep_i32*)a.ring.position)[(ep_u64)h.token * r.w.ranks + h.rank];
    return h;
}

/* Loads the choices of a part, whoever they are for. */
EP_DEV void ep_load_choices(const EpRank& r, const EpDispatchArgs& a, EpHeaderPart& h) {
#pragma unroll
    for (ep_u32 i = 0; i < 2; ++i) {
        const ep_u32 k = 2 * h.part - 2 + i;
        const bool is = h.position >= 0 && h.part > 0 && k < r.w.topk && a.ring.topk_idx != 0;
        const ep_u64 at = (ep_u64)h.token * r.w.topk + k;
        if (is) h.expert[i] = ((const ep_i64*)a.ring.topk_idx)[at];
        if (is) h.weight[i] = a.ring.topk_weights ? ((const float*)a.ring.topk_weights)[at] : 1.0f;
    }
}

/* A choice as it travels to a rank: none where the expert is another's. */
EP_DEV EpChoice ep_header_choice(const EpRank& r, const EpHeaderPart& h, ep_u32 i) {
    const ep_i64 expert = h.expert[i] - (ep_i64)h.rank * r.w.local_experts;
    if (expert < 0 || expert >= (ep_i64)r.w.local_experts) return {-1, 0.0f};
    return {ep_planted(r, EP_PLANT_FOREIGN_CHOICE) ? (ep_i32)r.w.local_experts : (ep_i32)expert, h.weight[i]};
}

/* Puts a part where its row's header lies, if that is anywhere. */
EP_DEV void ep_put_header_part(const EpRank& r, const EpPlace* places, const EpHeaderPart& h) {
    if (h.position < 0 || !ep_is_somewhere(places[h.rank].header)) return;
    EpUnit bytes = ep_unit((int)r.me, (int)h.token, h.position, (int)(ep_u32)ep_op(r));
    if (h.part > 0) {
        const EpChoice first = ep_header_choice(r, h, 0), second = ep_header_choice(r, h, 1);
        bytes = ep_unit(first.expert, __float_as_int(first.weight), second.expert, __float_as_int(second.weight));
    }
    ep_put16(places[h.rank].header + ((ep_u64)h.position * r.w.header_bytes + h.part * 16), bytes);
}

/* Writes the headers of every token's rows whose turn it is. Those of several tokens at a time: each part waits for what it is made of. By a warp. */
EP_DEV void ep_write_headers(const EpRank& r, const EpDispatchArgs& a, const EpPlace* places, const EpBlockRole& role) {
    const ep_u32 of_token = r.w.ranks * (ep_u32)(r.w.header_bytes / 16), turn = 32 * EP_HEADER_PARTS;
    const ep_u32 together = of_token < turn ? turn / of_token : 1;
    const ep_u32 first = (ep_block() * role.count + role.index) * together, step = ep_blocks() * role.count * together;
    for (ep_u64 token = first; token < a.ring.tokens; token += step) {
        const ep_u32 left = a.ring.tokens - (ep_u32)token, count = left < together ? left : together;
        for (ep_u32 begin = ep_warp_lane(); begin < count * of_token; begin += turn) {
            EpHeaderPart h[EP_HEADER_PARTS];
#pragma unroll
            for (ep_u32 i = 0; i < EP_HEADER_PARTS; ++i) h[i] = ep_header_part(r, a, (ep_u32)token, count, begin + 32 * i);
#pragma unroll
            for (ep_u32 i = 0; i < EP_HEADER_PARTS; ++i) ep_load_choices(r, a, h[i]);
#pragma unroll
            for (ep_u32 i = 0; i < EP_HEADER_PARTS; ++i) ep_put_header_part(r, places, h[i]);
        }
    }
}

#if __CUDA_ARCH__ >= 900

/* A piece of a row. */
struct EpPiece {
    ep_u32 token;
    ep_u32 begin;  /* in the row's codes */
    ep_u32 codes;  /* bytes of codes */
    ep_u32 scales; /* bytes of scales behind them: all or none, in the last piece. Pieces are cut so that one holds all */
};

EP_DEV EpPiece ep_piece(const EpRank& r, const EpDispatchArgs& a, ep_u32 unit) {
    const ep_u32 token = unit / a.pieces, index = unit % a.pieces, begin = index * a.piece, left = (ep_u32)r.w.scales_offset - begin;
    return {token, begin, left < a.piece ? left : a.piece, index + 1 == a.pieces ? (ep_u32)r.w.scales_stride : 0};
}

/* Starts to bring a piece of a row into shared memory. By all lanes of a warp. */
EP_DEV void ep_load_piece(const EpRank& r, const EpDispatchArgs& a, ep_u32 unit, ep_u8* to, ep_u64* bar) {
    const ep_u32 lane = threadIdx.x % 32;
    const EpPiece piece = ep_piece(r, a, unit);
    const ep_u8* scales = (const ep_u8*)a.ring.scales + (ep_u64)piece.token * a.ring.scales_token;
    if (piece.scales && !a.bulk_scales) {
        ep_u32* at = (ep_u32*)(to + piece.codes);
        for (ep_u32 w = lane; w < piece.scales / 4; w += 32) at[w] = *(const ep_u32*)(scales + w * a.ring.scales_word);
        ep_fence_bulk();
        __syncwarp();
    }
    if (lane == 0) {
        const ep_u32 bulk = a.bulk_scales ? piece.scales : 0;
        ep_bulk_expect(bar, piece.codes + bulk);
        if (piece.codes) ep_bulk_load(to, (const ep_u8*)a.ring.x + (ep_u64)piece.token * a.ring.x_stride + piece.begin, piece.codes, bar);
        if (bulk) ep_bulk_load(to + piece.codes, scales, bulk, bar);
    }
}

/* Where a row goes that belongs at position. */
EP_DEV ep_u32 ep_place(const EpRank& r, ep_i32 position) {
    return ep_planted(r, EP_PLANT_PLACED_OFF_BY_ONE) && position > 0 ? position - 1 : position;
}

/* Stores a piece to up to 32 ranks. Each lane has one: where the first row from here goes at it, and the position of this row, or -1. */
EP_DEV void ep_store_piece(const EpRank& r, const EpPiece& piece, const ep_u8* from, const EpPlace* place, ep_i32 position) {
    const bool there = position >= 0 && ep_is_somewhere(place->codes);
    const ep_u64 row = there ? (ep_u64)ep_place(r, position) : 0;
    const EpAt scales = there ? place->scales + row * r.w.scales_stride : ep_nowhere();
    const bool bulk = piece.scales % 16 == 0;
    if (there && piece.codes) ep_put_bulk(place->codes + (row * r.w.scales_offset + piece.begin), from, piece.codes);
    if (there && piece.scales && bulk) ep_put_bulk(scales, from + piece.codes, piece.scales);
    if (bulk) return;
    for (ep_u32 votes = __ballot_sync(EP_FULL, there); votes; votes &= votes - 1) {
        const EpAt to = ep_shuffle(scales, __ffs(votes) - 1);
        for (ep_u32 w = threadIdx.x % 32; w < piece.scales / 4; w += 32) ep_put4(to + w * 4, ((const ep_u32*)(from + piece.codes))[w]);
    }
    /* The copy engine overwrites what has been read here: it may be a piece without scales, before which no other fence is. */
    ep_fence_bulk();
}

/* Mover `index` of the block's. */
EP_DEV void ep_move_rows(const EpRank& r, const EpDispatchArgs& a, const EpPlace* places, ep_u32 index, ep_u8* stages, ep_u64* bars) {
    const ep_u32 lane = threadIdx.x % 32, ranks = r.w.ranks;
    const ep_u32 units = ep_lot_first(a, a.end_lot) * a.pieces, step = gridDim.x * a.movers;
    const ep_u32 first = ep_lot_first(a, a.lot) * a.pieces + blockIdx.x * a.movers + index;
    const ep_i32* positions = (const ep_i32*)a.ring.position;
    const bool few = ranks <= 32;
    ep_u64 unit_in = first; /* 64 bits: may run past the end */
    for (ep_u32 s = 0; s + 1 < a.stages; ++s, unit_in += step)
        if (unit_in < units) ep_load_piece(r, a, (ep_u32)unit_in, stages + s * a.piece, bars + s);
    ep_i32 next = few && lane < ranks && first < units ? positions[(ep_u64)(first / a.pieces) * ranks + lane] : -1;
    ep_u32 stage = 0, parity = 0, stage_in = a.stages - 1;
    for (ep_u64 unit = first; unit < units; unit += step, unit_in += step) {
        const EpPiece piece = ep_piece(r, a, (ep_u32)unit);
        const ep_u8* from = stages + stage * a.piece;
        const ep_i32 mine = next;
        if (few && lane < ranks && unit + step < units)
            next = positions[(ep_u64)((ep_u32)(unit + step) / a.pieces) * ranks + lane];
        ep_barrier_wait(bars + stage, parity);
        if (few) {
            ep_store_piece(r, piece, from, places + lane, mine);
        } else {
            for (ep_u32 base = 0; base < ranks; base += 32) {
                const ep_i32 position = base + lane < ranks ? positions[(ep_u64)piece.token * ranks + base + lane] : -1;
                ep_store_piece(r, piece, from, places + base + lane, position);
            }
        }
        ep_bulk_commit();
        /* The stage that is loaded next was stored one turn ago. */
        ep_bulk_wait_read<1>();
        __syncwarp();
        if (unit_in < units) ep_load_piece(r, a, (ep_u32)unit_in, stages + stage_in * a.piece, bars + stage_in);
        if (++stage == a.stages) { stage = 0; parity ^= 1; }
        if (++stage_in == a.stages) stage_in = 0;
    }
    ep_bulk_wait_all();
}

#else

/* Units of 16 bytes that a lane has in flight: as many as fit into its registers. */
#define EP_HELD 12u

/* Without the bulk copy engine: through registers. */
EP_DEV void ep_move_rows(const EpRank& r, const EpDispatchArgs& a, const EpPlace* places, ep_u32 index, ep_u8*, ep_u64*) {
    const ep_u32 lane = threadIdx.x % 32, ranks = r.w.ranks;
    const ep_u32 codes = (ep_u32)r.w.scales_offset;
    const ep_u32 end = ep_lot_first(a, a.end_lot);
    for (ep_u32 token = ep_lot_first(a, a.lot) + blockIdx.x * a.movers + index; token < end; token += gridDim.x * a.movers) {
        const ep_u8* row = (const ep_u8*)a.ring.x + (ep_u64)token * a.ring.x_stride;
        const ep_i32* positions = (const ep_i32*)a.ring.position + (ep_u64)token * ranks;
        for (ep_u32 begin = lane * 16; begin < codes; begin += 32 * 16 * EP_HELD) {
            int4 held[EP_HELD];
#pragma unroll
            for (ep_u32 i = 0; i < EP_HELD; ++i)
                if (begin + i * 512 < codes) held[i] = ep_ld16(row + begin + i * 512);
            for (ep_u32 rank = 0; rank < ranks; ++rank) {
                if (positions[rank] < 0 || !ep_is_somewhere(places[rank].codes)) continue;
                const EpAt to = places[rank].codes + ((ep_u64)positions[rank] * codes + begin);
#pragma unroll
                for (ep_u32 i = 0; i < EP_HELD; ++i)
                    if (begin + i * 512 < codes) ep_put16(to + i * 512, held[i]);
            }
        }
        const ep_u8* scales = (const ep_u8*)a.ring.scales + (ep_u64)token * a.ring.scales_token;
        for (ep_u32 w = lane; w < (ep_u32)r.w.scales_stride / 4; w += 32)
            for (ep_u32 rank = 0; rank < ranks; ++rank) {
                if (positions[rank] < 0 || !ep_is_somewhere(places[rank].codes)) continue;
                const EpAt to = places[rank].scales + (ep_u64)positions[rank] * r.w.scales_stride;
                ep_put4(to + w * 4, *(const ep_u32*)(scales + w * a.ring.scales_word));
            }
    }
}

#endif

extern "C" __global__ void __launch_bounds__(32 * EP_DISPATCH_WARPS, 1) ep_dispatch_kernel(const __grid_constant__ EpRank r,
                                                                        const __grid_constant__ EpDispatchArgs a) {
    /* Together: a block that runs already may fail meanwhile. */
    if (ep_block_any(ep_closed(r))) return;
    if (ep_stays(r, a.ring.ahead)) return;
    const ep_u64 began = ep_now();
    const ep_u32 tid = threadIdx.x, warp = ep_warp(), ranks = r.w.ranks;
    const bool ends = a.end_lot == a.lots;
    const EpBlockRole& role = a.block[warp];
    ep_u64* bars = (ep_u64*)ep_pool; /* [movers, stages] */
    EpPlace* places = (EpPlace*)(ep_pool + (a.movers * a.stages * 8 + 15) / 16 * 16);
    ep_u8* stages = ep_pool + ep_round_128((a.movers * a.stages * 8 + 15) / 16 * 16 + ranks * sizeof(EpPlace));
#if __CUDA_ARCH__ >= 900
    if (tid < a.movers * a.stages) ep_barrier_init(bars + tid, 1);
    ep_barrier_init_done();
#endif
    if (blockIdx.x == 0 && a.lot == 0) ep_send_notes(r, a.base, a.base_rows, 0, blockDim.x, began);
    const bool rings = __syncthreads_or(ep_learn_places(r, a, places, began));
    if (ep_planted(r, EP_PLANT_PLACED_EARLY)) {
        ep_publish_lots(r, a);
        ep_be_slow();
        __syncthreads();
    }
    if (a.lot > 0 && ep_planted(r, EP_PLANT_LOT_EARLY)) ep_be_slow();
    ep_delay(r, EP_LANE_WATCH, (ep_u64)blockIdx.x << 32 | warp);
    if (role.task == EP_TASK_ROWS)
        ep_move_rows(r, a, places, role.index, stages + (ep_u64)role.index * a.stages * a.piece, bars + role.index * a.stages);
    else if (role.task == EP_TASK_HEADERS)
        ep_write_headers(r, a, places, role);
    const bool plays = rings && ends && a.plays;
    if (plays) {
        /* Told first: a peer whose batch takes several launches sends through rings in its last one, and waits for what is placed before that. */
        if (ep_last_block(r, EP_MEETING_PLACED) && !ep_failed(r)) ep_publish_lots(r, a);
        if (!ep_warp_any(ep_failed(r))) ep_play_ring_role(r, a.ring, blockIdx.x * (blockDim.x / 32) + warp, began);
    }
    if (!ep_last_block_goes_on(r, EP_MEETING_MOVED)) return;
    if (!plays) ep_publish_lots(r, a);
    if (a.base != EP_NO_BASE) ep_wait_lots(r, a, began);
    /* Together: what is launched beside may fail meanwhile. */
    if (ep_block_any(ep_failed(r)) || !ends) return;
    if (!a.plays) {
        if (tid == 0) ep_local(r)->rings = rings;
        if (rings) return;
    }
    ep_say_done(r);
    ep_count_op(r);
}
