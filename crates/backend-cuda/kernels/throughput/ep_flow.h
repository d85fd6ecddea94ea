/*
 * ep_flow.h: rows on their way through a warp's stages of shared memory: from any place that it may get from to places of the own memory.
 *
 *   memory   shared: `stages` stages of the warp, an EpItem and a barrier for each, and one EpItem's room for counts
 *   rules    F5: a stage is loaded again when it has been stored EP_FLOW_LAG items ago, and those stores have read it. What is `stored` is
 *            written: that takes longer, so it is known of the item EP_FLOW_WRITES ago, or once the flow was drained. What is `loaded` has been read
 *            where it came from. Words that lanes write into a stage are fenced for the copy engine
 *
 * A warp calls everything here with all its lanes; the first one speaks to the copy engine. Without one, rows go through registers.
 */
#ifndef EP_FLOW_H
#define EP_FLOW_H
#include "ep_notes.h"
#if __CUDA_ARCH__ >= 900
#include "ep_bulk.h"
#endif

/* Stages whose stores may still be read while further ones are loaded. */
#define EP_FLOW_LAG 2u
/* Stores that may not be written yet. */
#define EP_FLOW_WRITES 8u

/* A part of a row. */
struct EpItem {
    EpAt from;         /* codes */
    EpAt tail_from;    /* what belongs behind them: scales, weights */
    ep_u8* to[2];      /* none, one or two places for the codes, */
    ep_u8* tail_to[2]; /* and for the tail: the first has room for whole units of 16 bytes */
    ep_u32 codes;      /* bytes, in units of 16 */
    ep_u32 tail;       /* bytes, in units of 4 */
    ep_u32 tail_step;  /* 0: the tail lies in one piece, in units of 16 bytes; else from one of its words to the next */
    ep_u32 count;      /* what its owner has done when this is done */
};
static_assert(sizeof(EpItem) == EP_ITEM_BYTES, "the host makes room for another EpItem");

struct EpFlow {
    ep_u8* data;
    EpItem* items;
    ep_u64* bars;
    ep_u32 stages, room; /* stages, and bytes of each */
    ep_u32 out, parity;  /* the stage that is stored next, and the parity of its barrier */
    ep_u32 in_flight;
    ep_u32 loaded, stored; /* counts */
    ep_u32 items_out;      /* items that were stored, */
    ep_u32* counts;        /* [EP_FLOW_WRITES]: and the counts of the last ones */
    ep_u32 last;           /* count of the last item, or of what needed none */
};

EP_DEV EpFlow ep_flow(ep_u8* data, EpItem* items, ep_u64* bars, ep_u32 stages, ep_u32 room) {
    EpFlow f = {data, items, bars, stages, room, 0, 0, 0, 0, 0, 0, (ep_u32*)(items + stages), 0};
#if __CUDA_ARCH__ >= 900
    if (ep_warp_lane() == 0) {
        for (ep_u32 s = 0; s < stages; ++s) ep_barrier_init(bars + s, 1);
        ep_barrier_init_done();
    }
    __syncwarp();
#endif
    return f;
}

/* Counts anew. Nothing is in flight. */
EP_DEV void ep_flow_restart(EpFlow& f) { f.loaded = f.stored = f.items_out = f.last = 0; }

EP_DEV ep_u32 ep_round_16(ep_u32 bytes) { return (bytes + 15) / 16 * 16; }

#if __CUDA_ARCH__ >= 900

EP_DEV bool ep_flow_is_full(const EpFlow& f) { return f.in_flight + EP_FLOW_LAG >= f.stages; }

/* Starts to load an item. The flow is not full. */
EP_DEV void ep_flow_push(EpFlow& f, const EpItem& item) {
    const ep_u32 lane = ep_warp_lane();
    ep_u32 stage = f.out + f.in_flight;
    if (stage >= f.stages) stage -= f.stages;
    ep_u8* to = f.data + stage * f.room;
    if (item.tail && item.tail_step) {
        for (ep_u32 w = lane; w < item.tail / 4; w += 32) ((ep_u32*)(to + item.codes))[w] = ep_get4(item.tail_from + (ep_u64)w * item.tail_step);
        ep_fence_bulk();
        __syncwarp();
    }
    if (lane == 0) {
        f.items[stage] = item;
        const ep_u32 bulk = item.tail_step ? 0 : ep_round_16(item.tail);
        ep_bulk_expect(f.bars + stage, item.codes + bulk);
        if (item.codes) ep_get_bulk(to, item.from, item.codes, f.bars + stage);
        if (bulk) ep_get_bulk(to + item.codes, item.tail_from, bulk, f.bars + stage);
    }
    __syncwarp();
    ++f.in_flight;
    f.last = item.count;
}

/* Stores the oldest item. There is one. */
EP_DEV void ep_flow_pop(EpFlow& f) {
    const ep_u32 lane = ep_warp_lane(), stage = f.out;
    const ep_u8* from = f.data + stage * f.room;
    ep_barrier_wait(f.bars + stage, f.parity);
    const EpItem& item = f.items[stage];
    const ep_u32 codes = item.codes, tail = item.tail, count = item.count;
    const bool words = tail % 16 != 0 && item.tail_to[1];
    if (words) {
        for (ep_u32 w = lane; w < tail / 4; w += 32) ((ep_u32*)item.tail_to[1])[w] = ((const ep_u32*)(from + codes))[w];
        ep_fence_bulk();
        __syncwarp();
    }
    if (lane == 0) {
        for (ep_u32 i = 0; i < 2; ++i) {
            if (codes && item.to[i]) ep_bulk_store(item.to[i], from, codes);
            if (tail && item.tail_to[i] && !(i == 1 && words)) ep_bulk_store(item.tail_to[i], from + codes, ep_round_16(tail));
        }
        ep_bulk_commit();
        ep_bulk_wait_read<EP_FLOW_LAG>();
        ep_bulk_wait<EP_FLOW_WRITES>();
    }
    const ep_u32 written = f.counts[f.items_out % EP_FLOW_WRITES];
    __syncwarp();
    if (lane == 0) f.counts[f.items_out % EP_FLOW_WRITES] = count;
    if (++f.out == f.stages) {
        f.out = 0;
        f.parity ^= 1;
    }
    --f.in_flight;
    f.loaded = count;
    if (f.items_out >= EP_FLOW_WRITES) f.stored = written;
    ++f.items_out;
}

/* Until everything is stored. */
EP_DEV void ep_flow_drain(EpFlow& f) {
    while (f.in_flight > 0) ep_flow_pop(f);
    ep_bulk_wait_all();
    __syncwarp();
    f.loaded = f.stored = f.last;
    f.items_out = 0;
}

#else

/* Units of 16 bytes that a lane has in flight. */
#define EP_FLOW_HELD 3u

EP_DEV bool ep_flow_is_full(const EpFlow&) { return false; }

EP_DEV void ep_flow_push(EpFlow& f, const EpItem& item) {
    const ep_u32 lane = ep_warp_lane();
    for (ep_u32 begin = lane * 16; begin < item.codes; begin += 512 * EP_FLOW_HELD) {
        EpUnit held[EP_FLOW_HELD];
#pragma unroll
        for (ep_u32 i = 0; i < EP_FLOW_HELD; ++i)
            if (begin + i * 512 < item.codes) held[i] = ep_get16(item.from + begin + i * 512);
#pragma unroll
        for (ep_u32 i = 0; i < EP_FLOW_HELD; ++i)
            for (ep_u32 place = 0; place < 2; ++place)
                if (begin + i * 512 < item.codes && item.to[place]) ep_st16(item.to[place] + begin + i * 512, held[i]);
    }
    for (ep_u32 w = lane; w < item.tail / 4; w += 32) {
        const ep_u32 word = ep_get4(item.tail_from + (ep_u64)w * (item.tail_step ? item.tail_step : 4));
        for (ep_u32 place = 0; place < 2; ++place)
            if (item.tail_to[place]) ((ep_u32*)item.tail_to[place])[w] = word;
    }
    __syncwarp();
    f.last = f.loaded = f.stored = item.count;
}

EP_DEV void ep_flow_pop(EpFlow&) {}
EP_DEV void ep_flow_drain(EpFlow& f) { f.loaded = f.stored = f.last; }

#endif
#endif
