/*
 * ep_npu.h: one core of a launch: what it was given, how it reaches memory, and the line by which it tells its rank's control core.
 *
 *   GM        scalar reads go through the core's cache: what others write meanwhile is read by ep_fresh (clean, then read). Everything is
 *             written by copies from the UB, never by scalar stores: copies change the bytes that they name, whatever shares their line
 *   order     a copy has ended when the flag behind it was awaited (ep_landed). The scalar unit issues in the order of the program, so
 *             what it issues after a wait comes after what was waited for
 *   flags     ids 0 and 1 of each event: the two buffers of a role. 2: ep_landed. 3: words. 4: the line of the core
 *   F1 to F10 F1: DataCopyPad names bytes. F3: ep_landed, then the word's own copy, awaited. F4: every cell has one core that writes it.
 *             F6: ep_vain in every spin. F9: reads have ended (MTE2 flag awaited) before credit is published
 */
#ifndef EP_NPU_H
#define EP_NPU_H
#include "kernel_operator.h"

#define EP_HD __aicore__
#define EP_DEV __aicore__ inline

#include "ep_args.h"

using namespace AscendC;

/* Choices of a token, at most: ep_core's limit. EP_NEAR: ranks of a server, at most. EP_RANKS: ranks in all. */
#define EP_TOPK 32u
/* Header and choices of a row, in blocks of the UB. */
#define EP_HEAD_BYTES ((sizeof(EpRowHeader) + EP_TOPK * sizeof(EpChoice) + 31) / 32 * 32)
/* Bytes of the UB that every role has for words (one block) and for its line (two blocks). */
#define EP_COMMON_BYTES 96u
#define EP_UB_BYTES 196608u

/* Whether a fault is planted, in builds for tests. */
#ifdef EP_TEST
#define EP_PLANTED(c, name) ((c).launch.plant == EP_PLANT_##name)
#else
#define EP_PLANTED(c, name) ((void)(c), false)
#endif

struct EpCore {
    EpLaunch launch;
    EpRings far; /* rings between servers, as a ring's cursors take them */
    ep_u64 op, settings;
    ep_u64 mark;  /* of this launch: an operation may have two */
    ep_u64 own;   /* address of the own window */
    ep_u64 began; /* ticks of the system counter */
    ep_u32 number;
    bool failed; /* the rank has failed: every wait ends */
    bool told;   /* the line says that this core waits */
    bool alone;  /* the last look found nothing of a peer that had gone before it */
    ep_u32 idle; /* looks in a row that found nothing */
    LocalTensor<uint64_t> words; /* a block: the source of words that are written to GM */
    LocalTensor<uint64_t> line;  /* the source of the core's line */
};

typedef LocalTensor<uint8_t> EpBytes;

/* ---- global memory ---- */

template <class T> EP_DEV GlobalTensor<T> ep_gm(ep_u64 at) {
    GlobalTensor<T> tensor;
    tensor.SetGlobalBuffer((__gm__ T*)at);
    return tensor;
}

/* A number that nobody writes during the launch. */
template <class T> EP_DEV T ep_at(ep_u64 array, ep_u64 index) { return ep_gm<T>(array).GetValue(index); }

/* A number that others write meanwhile. */
template <class T> EP_DEV T ep_fresh(ep_u64 at) {
    GlobalTensor<T> tensor = ep_gm<T>(at);
    DataCacheCleanAndInvalid<T, CacheLine::SINGLE_CACHE_LINE, DcciDst::CACHELINE_OUT>(tensor);
    return tensor.GetValue(0);
}

/* A struct that nobody writes during the launch. */
template <class T> EP_DEV void ep_load_struct(T& into, ep_u64 at) {
    GlobalTensor<uint32_t> from = ep_gm<uint32_t>(at);
    uint32_t* words = (uint32_t*)&into;
    for (ep_u32 i = 0; i < sizeof(T) / 4; ++i) words[i] = from.GetValue(i);
}

EP_DEV void ep_load(const EpBytes& ub, ep_u64 gm, ep_u32 bytes) {
    if (bytes == 0) return;
    DataCopyPad(ub, ep_gm<uint8_t>(gm), DataCopyExtParams{1, bytes, 0, 0, 0}, DataCopyPadExtParams<uint8_t>{false, 0, 0, 0});
}
EP_DEV void ep_store(ep_u64 gm, const EpBytes& ub, ep_u32 bytes) {
    if (bytes == 0) return;
    DataCopyPad(ep_gm<uint8_t>(gm), ub, DataCopyExtParams{1, bytes, 0, 0, 0});
}
/* The same in whole blocks of 32 bytes: a fault that is planted. */
EP_DEV void ep_store_blocks(ep_u64 gm, const EpBytes& ub, ep_u32 bytes) { DataCopy(ep_gm<uint8_t>(gm), ub, bytes); }

/* Waits until all copies to GM that this core has issued have ended. */
EP_DEV void ep_landed(const EpCore& c) {
    const int32_t id = EP_PLANTED(c, FLAG_ID) ? 7 : 2;
    SetFlag<HardEvent::MTE3_S>(id);
    if (EP_PLANTED(c, FLAG_TWICE)) SetFlag<HardEvent::MTE3_S>(id);
    WaitFlag<HardEvent::MTE3_S>(id);
}

/* Writes 4 or 8 bytes to GM; they are there on return. */
EP_DEV void ep_store_word(EpCore& c, ep_u64 gm, ep_u64 value, ep_u32 bytes) {
    c.words.SetValue(0, value);
    if (!EP_PLANTED(c, WORD_FLAG)) {
        SetFlag<HardEvent::S_MTE3>(3);
        WaitFlag<HardEvent::S_MTE3>(3);
    }
    ep_store(gm, c.words.ReinterpretCast<uint8_t>(), bytes);
    if (EP_PLANTED(c, WORD_REUSED)) return;
    SetFlag<HardEvent::MTE3_S>(3);
    WaitFlag<HardEvent::MTE3_S>(3);
}

/* ---- time ---- */

EP_DEV ep_u64 ep_waited(const EpCore& c) { return ((ep_u64)GetSystemCycle() - c.began) * (EP_PLANTED(c, TICKS) ? 1 : c.launch.nanos_per_tick); }

/* ---- windows and cells ---- */

EP_DEV ep_u64 ep_window(const EpCore& c, ep_u32 rank) { return ep_at<uint64_t>(c.launch.r.windows, rank); }
EP_DEV bool ep_takes_part(const EpCore& c, ep_u32 rank) { return ep_window(c, rank) != 0; }

/* Raises a cell of a peer. All that it announces has landed. */
EP_DEV void ep_publish(EpCore& c, ep_u32 peer, ep_u32 lane, ep_u32 counter, ep_u64 value) {
    const EpRank& r = c.launch.r;
    const ep_u32 writer = EP_PLANTED(c, WRONG_CELL) ? peer : r.me, generation = EP_PLANTED(c, NO_GENERATION) ? 0 : r.generation;
    const ep_u64 cell = ep_window(c, peer) + ep_cell(r.w, r.generation, writer, lane, counter);
    ep_store_word(c, cell, ep_stamp(generation, value), 8);
}

/* Looks at a cell of the own window. */
EP_DEV ep_u64 ep_peek(const EpCore& c, ep_u32 writer, ep_u32 lane, ep_u32 counter) {
    const EpRank& r = c.launch.r;
    const ep_u64 cell = c.own + ep_cell(r.w, r.generation, writer, lane, counter);
    const ep_u64 bits = EP_PLANTED(c, STALE_CELL) ? ep_at<uint64_t>(cell, 0) : ep_fresh<uint64_t>(cell);
    return ep_value_in(r.generation, bits);
}

/* ---- the rank's own state: EpLocal is written by the control core alone, a line by its core alone ---- */

EP_DEV ep_u64 ep_local_at(const EpCore& c, ep_u64 offset) { return c.launch.r.local + offset; }
#define EP_LOCAL(c, field) ep_local_at(c, __builtin_offsetof(EpLocal, field))
EP_DEV ep_u64 ep_line_at(const EpCore& c, ep_u32 core, ep_u64 offset) { return c.launch.lines + (ep_u64)core * sizeof(EpLine) + offset; }
#define EP_LINE(c, core, field) ep_line_at(c, core, __builtin_offsetof(EpLine, field))

/* Writes the line of this core: what it waits for or refuses, then the word that says so. */
EP_DEV void ep_write_line(EpCore& c, const EpLine& says) {
    LocalTensor<uint32_t> words = c.line.ReinterpretCast<uint32_t>();
    const uint32_t* from = (const uint32_t*)&says;
    for (ep_u32 i = 0; i < sizeof(EpLine) / 4; ++i) words.SetValue(i, from[i]);
    if (!EP_PLANTED(c, LINE_FLAG)) {
        SetFlag<HardEvent::S_MTE3>(4);
        WaitFlag<HardEvent::S_MTE3>(4);
    }
    const ep_u32 head = __builtin_offsetof(EpLine, detail);
    ep_store(ep_line_at(c, c.number, head), c.line[head / 8].ReinterpretCast<uint8_t>(), sizeof(EpLine) - head);
    ep_landed(c);
    ep_store(ep_line_at(c, c.number, 0), c.line.ReinterpretCast<uint8_t>(), head);
    ep_landed(c);
}

/* This core cannot go on: the control core reports it, and tells the other ranks. */
EP_DEV void ep_stop(EpCore& c, ep_u32 status, const EpDetail& detail) {
    if (c.failed) return;
    c.failed = true;
    ep_write_line(c, EpLine{0, 0, c.mark, status, 0, detail});
}

/* Refuses what a peer says. */
EP_DEV void ep_refuse(EpCore& c, ep_u32 peer, ep_u32 field, ep_u64 mine, ep_u64 theirs) {
    ep_stop(c, EP_STATUS_MISMATCH, EpDetail{peer, 0, 0, field, theirs, mine});
}

EP_DEV bool ep_is_same(EpCore& c, ep_u32 peer, const EpDifference& d) {
    if (d.field == EP_SAME) return true;
    ep_refuse(c, peer, d.field, d.mine, d.theirs);
    return false;
}

/* ---- waits ---- */

/* Something moved: what was said of a wait is taken back. */
EP_DEV void ep_moved(EpCore& c) {
    c.idle = 0;
    c.alone = false;
    if (!c.told) return;
    c.told = false;
    ep_write_line(c, EpLine{});
}

/* A look found nothing. Whether the wait is in vain: the rank has failed, or even the time of the slowest verdict is up. A wait that lasts is
   told to the control core. */
EP_DEV bool ep_vain(EpCore& c, ep_u32 peer, ep_u32 lane, ep_u32 phase, ep_u64 seen, ep_u64 awaited) {
    if (c.failed) return true;
    if (++c.idle % 16 != 0) return false;
    const EpDetail detail = {peer, phase, lane, 0, seen, awaited};
    if (ep_fresh<uint32_t>(EP_LOCAL(c, failed)) != 0) {
        c.failed = true;
    } else if (ep_waited(c) > c.launch.r.allowed + c.launch.r.allowed / 4) {
        ep_stop(c, EP_STATUS_TIMEOUT, detail);
    } else if (ep_fresh<uint32_t>(ep_gone_at(c.launch.r.local, peer)) != 0 && !EP_PLANTED(c, GONE_UNHEARD)) {
        /* What the peer did before it went is there. Only a look behind this one can have missed none of it. */
        if (c.alone || EP_PLANTED(c, GONE_AT_ONCE)) ep_stop(c, EP_STATUS_GONE, detail);
        c.alone = true;
        c.idle |= 15;
    } else if (!c.told && c.idle >= 64) {
        c.told = true;
        ep_write_line(c, EpLine{0, ep_wait_key(c.op, phase, peer), c.mark, 0, 0, detail});
    }
    return c.failed;
}

/* ---- messages ---- */

EP_DEV EpOpHeader ep_header(const EpCore& c, ep_u32 rows, ep_u32 first) {
    return EpOpHeader{c.op, c.launch.r.kind, rows, c.settings, first, 0};
}

/* ---- start and end of a core ---- */

/* Learns what the launch is given; whether there is something to do: not on a rank that has failed, nor with parameters of another generation,
   nor where the choices of the batch are wrong, of which the host has not heard yet. The rank may have failed in this very launch, before this core
   came to it: `failed` says so, and players say that they have ended (ep_end_late), or the control core would wait for them.
   `common`: EP_COMMON_BYTES of the UB. */
EP_DEV bool ep_begin(EpCore& c, const EpLaunch& launch, LocalTensor<uint64_t> common) {
    c.launch = launch;
    const EpRank& r = c.launch.r;
    c.far = launch.rings;
    c.far.slots = launch.rings.far_slots;
    c.far.chunk = launch.rings.far_chunk;
    c.far.credit = launch.rings.far_credit;
    c.began = (ep_u64)GetSystemCycle();
    c.number = (ep_u32)GetBlockIdx();
    c.words = common;
    c.line = common[4];
    c.failed = c.told = c.alone = false;
    c.idle = 0;
    c.op = ep_fresh<uint64_t>(EP_LOCAL(c, ops_done)) + 1;
    c.mark = c.op << 1 | (launch.follows && !EP_PLANTED(c, ONE_MARK) ? 0 : 1);
    c.settings = r.settings + (r.replays ? ep_at<uint64_t>(r.plan, 0) : 0);
    c.own = ep_window(c, r.me);
    const bool due = ep_fresh<uint32_t>(EP_LOCAL(c, generation)) == r.generation && ep_fresh<uint32_t>(EP_LOCAL(c, bad_token)) == 0;
    c.failed = due && ep_fresh<uint32_t>(EP_LOCAL(c, failed)) != 0;
    return due && !c.failed;
}

/* This core has done its part of the operation. */
EP_DEV void ep_end(EpCore& c) {
    ep_landed(c);
    ep_store_word(c, EP_LINE(c, c.number, ended), c.mark, 8);
}

/* The same where it had nothing to do: the rank had failed when it came. Lines are cleared before the number of an operation that failed comes again. */
EP_DEV void ep_end_late(EpCore& c) {
    if (c.failed && !EP_PLANTED(c, LATE_UNTOLD)) ep_end(c);
}

#endif
