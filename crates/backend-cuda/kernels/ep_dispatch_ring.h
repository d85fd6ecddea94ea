/*
 * ep_dispatch_ring.h: rows for ranks that granted no block go through rings; a batch of any size through rings of any size.
 *
 *   roles    one warp each: sender to a peer on a channel; receiver of a source on a channel (where this rank granted nothing);
 *            keeper of the own rows of a channel. All of them run at the same time
 *   memory   rings in the receivers' windows; x and the received rows in memory of the own GPU
 */
#ifndef EP_DISPATCH_RING_H
#define EP_DISPATCH_RING_H
#include "ep_ring.h"

struct EpDispatchRingArgs {
    EpRings rings;
    ep_u64 x;             /* rows, or their codes, x_stride bytes apart, in units of 16 bytes */
    ep_u64 x_stride;
    ep_u64 scales;        /* of the first token, in x or in a tensor of their own; unused where rows have none */
    ep_u64 scales_token;  /* bytes from one token's scales to the next's */
    ep_u64 scales_word;   /* bytes from one word of 4 bytes to the next: an f32, or 4 UE8M0 */
    ep_u64 position;      /* i32 [tokens, ranks] */
    ep_u64 topk_idx;      /* i64 [tokens, topk], or 0: rows carry no choices */
    ep_u64 topk_weights;  /* f32 [tokens, topk], or 0: weights of 1 */
    ep_u64 first_of;      /* u32 [ranks + 1]: first row of each source */
    ep_u64 out;           /* codes of received rows, scales_offset bytes apart; 0 where rows are placed */
    ep_u64 out_scales;    /* their scales, scales_stride bytes apart; unused where rows have none */
    ep_u64 out_idx;       /* i64 [rows, topk], or 0 */
    ep_u64 out_weights;   /* f32 [rows, topk], or 0 */
    ep_u64 out_token;     /* i32 [rows], or 0 */
    ep_u64 out_rank;      /* i32 [rows], or 0 */
    ep_u32 tokens;
    ep_u32 notes;         /* whether ep_dispatch_kernel has exchanged notes */
};
/* Choice k of a token as destination sees it. */
EP_DEV EpChoice ep_choice(const EpRank& r, const EpDispatchRingArgs& a, ep_u32 destination, ep_u32 token, ep_u32 k) {
    EpChoice choice = {-1, 0.0f};
    if (a.topk_idx == 0) return choice;
    const ep_u64 at = (ep_u64)token * r.w.topk + k;
    const ep_i64 expert = ((const ep_i64*)a.topk_idx)[at] - (ep_i64)destination * r.w.local_experts;
    if (expert >= 0 && expert < (ep_i64)r.w.local_experts) {
        choice.expert = (ep_i32)expert;
        choice.weight = a.topk_weights ? ((const float*)a.topk_weights)[at] : 1.0f;
    }
    return choice;
}

/* Codes and scales of a token's row. By a warp. */
EP_DEV void ep_copy_payload(const EpRank& r, const EpDispatchRingArgs& a, ep_u8* codes, ep_u8* scales, ep_u32 token) {
    ep_copy_row(codes, (const ep_u8*)a.x + (ep_u64)token * a.x_stride, (ep_u32)r.w.scales_offset);
    ep_copy_words(scales, (const ep_u8*)a.scales + (ep_u64)token * a.scales_token, a.scales_word, (ep_u32)r.w.scales_stride);
}

/* Where codes and scales of a received row go. */
EP_DEV ep_u8* ep_out_codes(const EpRank& r, const EpDispatchRingArgs& a, ep_u32 row) {
    return (ep_u8*)a.out + (ep_u64)row * r.w.scales_offset;
}
EP_DEV ep_u8* ep_out_scales(const EpRank& r, const EpDispatchRingArgs& a, ep_u32 row) {
    return (ep_u8*)a.out_scales + (ep_u64)row * r.w.scales_stride;
}

/* The first of this rank's rows for peer among the tokens begin .. end, and how many there are. By a warp. */
EP_DEV void ep_count_share(const EpRank& r, const ep_i32* positions, ep_u32 peer, ep_u32 begin, ep_u32 end, ep_u32* first,
                           ep_u32* rows) {
    *first = *rows = 0;
    for (ep_u32 base = begin; base < end; base += 32) {
        const ep_u32 token = base + threadIdx.x % 32;
        const ep_i32 position = token < end ? positions[(ep_u64)token * r.w.ranks + peer] : -1;
        const ep_u32 votes = __ballot_sync(EP_FULL, position >= 0);
        if (votes && *rows == 0) *first = (ep_u32)__shfl_sync(EP_FULL, position, __ffs(votes) - 1);
        *rows += __popc(votes);
    }
}

EP_DEV void ep_send(const EpRank& r, const EpDispatchRingArgs& a, ep_u32 peer, ep_u32 channel, ep_u64 began) {
    const ep_u32 lane = threadIdx.x % 32;
    const ep_i32* positions = (const ep_i32*)a.position;
    const ep_u32 begin = ep_channel_first(a.tokens, a.rings.channels, channel);
    const ep_u32 end = ep_channel_first(a.tokens, a.rings.channels, channel + 1);
    ep_u32 first, rows;
    ep_count_share(r, positions, peer, begin, end, &first, &rows);
    EpProducer ring;
    if (!ep_producer_open(r, ring, peer, channel, began)) return;
    ep_u8* at = ep_producer_slot(r, a.rings, ring, began);
    if (at == nullptr) return;
    if (lane == 0) ep_write_opening(r, at, rows, first);
    ep_producer_push(r, a.rings, ring);
    for (ep_u32 base = begin; base < end; base += 32) {
        const ep_i32 mine = base + lane < end ? positions[(ep_u64)(base + lane) * r.w.ranks + peer] : -1;
        for (ep_u32 votes = __ballot_sync(EP_FULL, mine >= 0); votes; votes &= votes - 1) {
            const ep_u32 bit = __ffs(votes) - 1, token = base + bit;
            const ep_i32 position = __shfl_sync(EP_FULL, mine, bit);
            at = ep_producer_slot(r, a.rings, ring, began);
            if (at == nullptr) return;
            const ep_i32 named = ep_planted(r, EP_PLANT_POSITION_OFF_BY_ONE) ? position + 1 : position;
            if (lane == 0) ep_st16(at, make_int4((int)r.me, (int)token, named, (int)(ep_u32)ep_op(r)));
            for (ep_u32 k = lane; k < r.w.topk; k += 32)
                ((EpChoice*)(at + sizeof(EpRowHeader)))[k] = ep_choice(r, a, peer, token, k);
            ep_copy_payload(r, a, at + r.w.header_bytes, at + r.w.header_bytes + r.w.scales_offset, token);
            ep_producer_push(r, a.rings, ring);
        }
    }
    ep_producer_close(r, ring);
}

/* What the user learns of a row, and its payload's place. By a warp. */
EP_DEV void ep_keep(const EpRank& r, const EpDispatchRingArgs& a, ep_u32 row, ep_u32 source, ep_u32 token, ep_u32 k,
                    EpChoice choice) {
    if (k == 0 && a.out_token) {
        ((ep_i32*)a.out_token)[row] = (ep_i32)token;
        ((ep_i32*)a.out_rank)[row] = (ep_i32)source;
    }
    if (a.out_idx && k < r.w.topk) {
        ((ep_i64*)a.out_idx)[(ep_u64)row * r.w.topk + k] = choice.expert;
        ((float*)a.out_weights)[(ep_u64)row * r.w.topk + k] = choice.weight;
    }
}

EP_DEV void ep_receive(const EpRank& r, const EpDispatchRingArgs& a, ep_u32 source, ep_u32 channel, ep_u64 began) {
    const ep_u32 lane = threadIdx.x % 32;
    const ep_u32* first_of = (const ep_u32*)a.first_of;
    const ep_u32 due = first_of[source + 1] - first_of[source];
    EpConsumer ring;
    ep_consumer_open(r, ring, source, channel);
    if (lane == 0) ep_consumer_begin(r, ring);
    ep_u32 position = 0, last = 0;
    for (bool opened = false; !opened || position < last; ) {
        bool there = true;
        if (lane == 0 && !ep_consumer_look(r, a.rings, ring)) {
            if (!ep_planted(r, EP_PLANT_IMPOLITE_WAITING)) ep_consumer_return(r, ring);
            there = ep_consumer_await(r, a.rings, ring, began);
        }
        if (!__shfl_sync(EP_FULL, there, 0)) return;
        if (lane == 0) ep_consumer_plant(r, ring);
        __syncwarp();
        const ep_u8* at = ep_consumer_slot(r, a.rings, ring);
        if (!opened) {
            bool right = true;
            if (lane == 0) {
                const EpOpHeader h = ep_read_opening(at);
                right = ep_check_header(r, h, source);
                position = h.first;
                last = h.first + h.rows;
                if (right && (last > due || last < position)) {
                    ep_fail_mismatch(r, source, EP_FIELD_ROWS_SENT, due, last);
                    right = false;
                }
            }
            position = __shfl_sync(EP_FULL, position, 0);
            last = __shfl_sync(EP_FULL, last, 0);
            if (!__shfl_sync(EP_FULL, right, 0)) return;
            opened = true;
        } else {
            ep_u32 token = 0;
            bool right = true;
            if (lane == 0) right = ep_check_row(r, at, source, position, &token);
            if (!__shfl_sync(EP_FULL, right, 0)) return;
            token = __shfl_sync(EP_FULL, token, 0);
            const ep_u32 row = first_of[source] + position;
            for (ep_u32 k = lane; k < r.w.topk; k += 32)
                ep_keep(r, a, row, source, token, k, ((const volatile EpChoice*)(at + sizeof(EpRowHeader)))[k].expert < 0
                        ? EpChoice{-1, 0.0f}
                        : EpChoice{((const volatile EpChoice*)(at + sizeof(EpRowHeader)))[k].expert,
                                   ((const volatile EpChoice*)(at + sizeof(EpRowHeader)))[k].weight});
            const ep_u8* payload = at + r.w.header_bytes;
            ep_copy_row(ep_out_codes(r, a, row), payload, (ep_u32)r.w.scales_offset);
            ep_copy_words(ep_out_scales(r, a, row), payload + r.w.scales_offset, 4, (ep_u32)r.w.scales_stride);
            ++position;
        }
        __syncwarp();
        ep_poison(r, at, (ep_u32)(r.w.header_bytes + r.w.payload_stride));
        /* Only lane 0 posts; all lanes count. */
        ++ring.head;
        if (lane == 0) ep_event(r, EP_EVENT_READ, source, ring.track, ring.head, ep_op(r));
        if (ring.head - ring.returned >= a.rings.credit) {
            if (lane == 0) ep_consumer_return(r, ring);
            ring.returned = ring.head;
        }
    }
    if (lane == 0) ep_consumer_close(r, ring);
}

/* The own rows of a channel. */
EP_DEV void ep_keep_own(const EpRank& r, const EpDispatchRingArgs& a, ep_u32 channel) {
    const ep_u32 lane = threadIdx.x % 32, first = ((const ep_u32*)a.first_of)[r.me];
    const ep_u32 end = ep_channel_first(a.tokens, a.rings.channels, channel + 1);
    for (ep_u32 token = ep_channel_first(a.tokens, a.rings.channels, channel); token < end; ++token) {
        const ep_i32 position = ((const ep_i32*)a.position)[(ep_u64)token * r.w.ranks + r.me];
        if (position < 0) continue;
        const ep_u32 row = first + (ep_u32)position;
        for (ep_u32 k = lane; k < r.w.topk; k += 32) ep_keep(r, a, row, r.me, token, k, ep_choice(r, a, r.me, token, k));
        ep_copy_payload(r, a, ep_out_codes(r, a, row), ep_out_scales(r, a, row), token);
    }
}

/* Whether peer wants rows through the ring. Its note has come, if it sent any. */
EP_DEV bool ep_through_ring(const EpRank& r, const EpDispatchRingArgs& a, ep_u32 peer) {
    return !a.notes || ((const volatile EpNote*)(ep_own(r) + ep_note(r.w, ep_op(r), peer)))->base == EP_NO_BASE;
}

/* The roles of the rings: that of warp `warp` of all that the launch has. */
EP_DEV void ep_play_ring_role(const EpRank& r, const EpDispatchRingArgs& a, ep_u32 warp, ep_u64 began) {
    const ep_u32 ranks = r.w.ranks, channels = a.rings.channels;
    /* Sender and receiver of the same pair are neighbours. */
    const ep_u32 channel = warp / (2 * ranks), peer = warp / 2 % ranks;
    if (channel >= channels || !ep_takes_part(r, peer)) return;
    if (peer == r.me) {
        if (warp % 2 == 0 && a.out) ep_keep_own(r, a, channel);
    } else if (warp % 2 == 0) {
        if (ep_through_ring(r, a, peer)) ep_send(r, a, peer, channel, began);
    } else if (a.out) {
        ep_receive(r, a, peer, channel, began);
    }
}
#endif
