/*
 * Tiny kernels, in pairs: NAME_broken breaks one rule of the device, NAME_kept does the same and keeps it. tests/rules/main.rs says which
 * fault, or which wrong bytes, the broken one must give.
 */
#include "kernel_operator.h"

using namespace AscendC;

namespace {

/* Where things lie. All are of rank 0 unless said otherwise, 4096 bytes each. */
struct Places {
    uint64_t own, window, peer_window, peer_own, far_window, constant, out, nobody;
};

template <class T> GlobalTensor<T> gm(uint64_t at) {
    GlobalTensor<T> tensor;
    tensor.SetGlobalBuffer((__gm__ T*)at);
    return tensor;
}

Places places(GM_ADDR args) {
    Places p;
    uint64_t* words = (uint64_t*)&p;
    for (uint32_t i = 0; i < sizeof p / 8; ++i) words[i] = gm<uint64_t>((uint64_t)args).GetValue(i);
    return p;
}

struct Room {
    TPipe pipe;
    TBuf<TPosition::VECCALC> buf;
    LocalTensor<float> a, b, c;
    explicit Room(uint32_t bytes = 3 * 1024) {
        pipe.InitBuffer(buf, bytes);
        a = buf.Get<float>();
        b = buf.Get<float>()[256];
        c = buf.Get<float>()[512];
    }
};

template <class T> uint64_t fresh(uint64_t at) {
    GlobalTensor<T> tensor = gm<T>(at);
    DataCacheCleanAndInvalid<T, CacheLine::SINGLE_CACHE_LINE, DcciDst::CACHELINE_OUT>(tensor);
    return tensor.GetValue(0);
}

void landed() {
    SetFlag<HardEvent::MTE3_S>(5);
    WaitFlag<HardEvent::MTE3_S>(5);
}

/* Tells the host. */
void say(Room& room, const Places& p, uint32_t index, uint64_t value) {
    LocalTensor<uint64_t> word = room.c.ReinterpretCast<uint64_t>();
    PipeBarrier<PIPE_ALL>();
    word.SetValue(0, value);
    SetFlag<HardEvent::S_MTE3>(4);
    WaitFlag<HardEvent::S_MTE3>(4);
    DataCopyPad(gm<uint64_t>(p.out)[index], word, DataCopyExtParams{1, 8, 0, 0, 0});
    landed();
}

}  // namespace

#define PAIR(name)                                                                                               \
    static void name(GM_ADDR args, bool kept);                                                                   \
    extern "C" __global__ __aicore__ void name##_kept(GM_ADDR args) { name(args, true); }                        \
    extern "C" __global__ __aicore__ void name##_broken(GM_ADDR args) { name(args, false); }                     \
    static void name([[maybe_unused]] GM_ADDR args, [[maybe_unused]] bool kept)

/* ---- order inside a core ---- */

PAIR(load_then_scalar) {
    Room room;
    DataCopy(room.a, gm<float>(places(args).own), 64);
    if (kept) {
        SetFlag<HardEvent::MTE2_S>(0);
        WaitFlag<HardEvent::MTE2_S>(0);
    }
    room.a.GetValue(0);
}
PAIR(load_then_vector) {
    Room room;
    DataCopy(room.a, gm<float>(places(args).own), 64);
    if (kept) {
        SetFlag<HardEvent::MTE2_V>(0);
        WaitFlag<HardEvent::MTE2_V>(0);
    }
    Add(room.b, room.a, room.a, 64);
}
PAIR(vector_then_load) {
    Room room;
    Add(room.b, room.a, room.a, 64);
    if (kept) {
        SetFlag<HardEvent::V_MTE2>(0);
        WaitFlag<HardEvent::V_MTE2>(0);
    }
    DataCopy(room.a, gm<float>(places(args).own), 64);
}
PAIR(vector_then_store) {
    Room room;
    Duplicate(room.a, 1.0f, 64);
    if (kept) {
        SetFlag<HardEvent::V_MTE3>(0);
        WaitFlag<HardEvent::V_MTE3>(0);
    }
    DataCopy(gm<float>(places(args).own), room.a, 64);
}
PAIR(store_then_vector) {
    Room room;
    DataCopy(gm<float>(places(args).own), room.a, 64);
    if (kept) {
        SetFlag<HardEvent::MTE3_V>(0);
        WaitFlag<HardEvent::MTE3_V>(0);
    }
    Duplicate(room.a, 1.0f, 64);
}
PAIR(load_then_store) {
    Room room;
    const Places p = places(args);
    DataCopy(room.a, gm<float>(p.own), 64);
    if (kept) {
        SetFlag<HardEvent::MTE2_MTE3>(0);
        WaitFlag<HardEvent::MTE2_MTE3>(0);
    }
    DataCopy(gm<float>(p.window), room.a, 64);
}
PAIR(store_then_load) {
    Room room;
    const Places p = places(args);
    DataCopy(gm<float>(p.window), room.a, 64);
    if (kept) {
        SetFlag<HardEvent::MTE3_MTE2>(0);
        WaitFlag<HardEvent::MTE3_MTE2>(0);
    }
    DataCopy(room.a, gm<float>(p.own), 64);
}
PAIR(scalar_then_store) {
    Room room;
    room.a.SetValue(0, 1.0f);
    if (kept) {
        SetFlag<HardEvent::S_MTE3>(0);
        WaitFlag<HardEvent::S_MTE3>(0);
    }
    DataCopy(gm<float>(places(args).own), room.a, 64);
}
PAIR(scalar_then_vector) {
    Room room;
    room.a.SetValue(0, 1.0f);
    if (kept) {
        SetFlag<HardEvent::S_V>(0);
        WaitFlag<HardEvent::S_V>(0);
    }
    Add(room.b, room.a, room.a, 64);
}
PAIR(vector_then_scalar) {
    Room room;
    Duplicate(room.a, 1.0f, 64);
    if (kept) {
        SetFlag<HardEvent::V_S>(0);
        WaitFlag<HardEvent::V_S>(0);
    }
    room.a.GetValue(0);
}
PAIR(vectors) {
    Room room;
    Duplicate(room.a, 1.0f, 64);
    if (kept) PipeBarrier<PIPE_V>();
    Add(room.b, room.a, room.a, 64);
}
/* Two copies to the same bytes: the later one need not win. */
PAIR(stores) {
    Room room;
    const Places p = places(args);
    DataCopy(gm<float>(p.own), room.a, 64);
    if (kept) PipeBarrier<PIPE_MTE3>();
    DataCopy(gm<float>(p.own), room.b, 64);
}
PAIR(loads) {
    Room room;
    const Places p = places(args);
    DataCopy(room.a, gm<float>(p.own), 64);
    if (kept) PipeBarrier<PIPE_MTE2>();
    DataCopy(room.a, gm<float>(p.window), 64);
}
/* A barrier of one pipe orders no other. */
PAIR(barrier_of_another_pipe) {
    Room room;
    DataCopy(room.a, gm<float>(places(args).own), 64);
    if (kept) PipeBarrier<PIPE_ALL>();
    else PipeBarrier<PIPE_MTE2>();
    Add(room.b, room.a, room.a, 64);
}

/* ---- flags ---- */

PAIR(flag_set_twice) {
    SetFlag<HardEvent::MTE2_S>(0);
    if (kept) WaitFlag<HardEvent::MTE2_S>(0);
    SetFlag<HardEvent::MTE2_S>(0);
    WaitFlag<HardEvent::MTE2_S>(0);
}
PAIR(flag_left) {
    SetFlag<HardEvent::V_MTE3>(1);
    if (kept) WaitFlag<HardEvent::V_MTE3>(1);
}
PAIR(flag_of_the_framework) {
    SetFlag<HardEvent::MTE2_S>(kept ? 5 : 6);
    WaitFlag<HardEvent::MTE2_S>(kept ? 5 : 6);
}
PAIR(flag_never_set) {
    if (kept) SetFlag<HardEvent::V_S>(0);
    WaitFlag<HardEvent::V_S>(0);
}
PAIR(flag_never_set_for_a_pipe) {
    Room room;
    if (kept) SetFlag<HardEvent::MTE2_V>(0);
    WaitFlag<HardEvent::MTE2_V>(0);
    Duplicate(room.a, 1.0f, 64);
}

/* ---- UB ---- */

PAIR(ub_full) {
    TPipe pipe;
    TBuf<TPosition::VECCALC> first, second;
    pipe.InitBuffer(first, 196608 - 32);
    pipe.InitBuffer(second, kept ? 32 : 33);
}
PAIR(ub_buffers) {
    TPipe pipe;
    TBuf<TPosition::VECCALC> buf;
    for (uint32_t i = 0; i < (kept ? 64 : 65); ++i) pipe.InitBuffer(buf, 32);
}
PAIR(ub_beyond_the_buffer) {
    Room room(3 * 1024);
    TBuf<TPosition::VECCALC> behind;
    room.pipe.InitBuffer(behind, 1024);
    DataCopy(room.c, gm<float>(places(args).own), kept ? 256 : 264);
}
PAIR(ub_pad_beyond_the_buffer) {
    TPipe pipe;
    TBuf<TPosition::VECCALC> buf;
    pipe.InitBuffer(buf, 64);
    LocalTensor<uint8_t> tail = buf.Get<uint8_t>()[32];
    DataCopyPad(tail, gm<uint8_t>(places(args).own), DataCopyExtParams{1, kept ? 31u : 33u, 0, 0, 0}, DataCopyPadExtParams<uint8_t>{});
}
PAIR(ub_alignment) {
    Room room;
    DataCopy(room.a[kept ? 8 : 4], gm<float>(places(args).own), 64);
}
PAIR(vector_alignment) {
    Room room;
    Duplicate(room.a[kept ? 8 : 1], 1.0f, 8);
}

/* ---- copies ---- */

PAIR(floor) {
    Room room;
    if (kept) DataCopyPad(room.a, gm<float>(places(args).own), DataCopyExtParams{1, 36, 0, 0, 0}, DataCopyPadExtParams<float>{});
    else DataCopy(room.a, gm<float>(places(args).own), 9);
}
PAIR(length) {
    Room room;
    DataCopyPad(gm<float>(places(args).own), room.a, DataCopyExtParams{1, kept ? 8u : 6u, 0, 0, 0});
}
PAIR(rounding) {
    Room room;
    Cast(room.a.ReinterpretCast<bfloat16_t>(), room.b, kept ? RoundMode::CAST_RINT : RoundMode::CAST_NONE, 64);
}
/* The rest of the last block is undefined: says whether the bytes behind the copied ones stayed as they were. */
PAIR(pad) {
    Room room;
    const Places p = places(args);
    LocalTensor<uint32_t> words = room.a.ReinterpretCast<uint32_t>();
    for (uint32_t i = 0; i < 8; ++i) words.SetValue(i, 7);
    PipeBarrier<PIPE_ALL>();
    DataCopyPad(words, gm<uint32_t>(p.own), DataCopyExtParams{1, kept ? 32u : 4u, 0, 0, 0}, DataCopyPadExtParams<uint32_t>{});
    PipeBarrier<PIPE_ALL>();
    uint64_t same = kept;
    for (uint32_t i = 1; i < 8 && !kept; ++i) same |= words.GetValue(i) == 7;
    say(room, p, 0, same);
}

/* ---- memory ---- */

PAIR(bounds) {
    Room room;
    const Places p = places(args);
    DataCopy(room.a, gm<float>(p.own)[kept ? 960 : 968], 64);
}
PAIR(nobody) {
    const Places p = places(args);
    gm<uint32_t>(kept ? p.own : p.nobody).GetValue(0);
}
PAIR(scalar_alignment) {
    const Places p = places(args);
    gm<uint64_t>(p.own + (kept ? 8 : 4)).GetValue(0);
}
PAIR(reach_of_a_group) {
    Room room;
    const Places p = places(args);
    DataCopy(gm<float>(kept ? p.peer_window : p.far_window), room.a, 64);
}
PAIR(reach_of_what_is_no_window) {
    Room room;
    const Places p = places(args);
    DataCopy(room.a, gm<float>(kept ? p.peer_window : p.peer_own), 64);
}
PAIR(constant) {
    Room room;
    const Places p = places(args);
    DataCopy(gm<float>(kept ? p.own : p.constant), room.a, 64);
}

/* ---- cache ---- */

PAIR(scalar_store_not_cleaned) {
    GlobalTensor<uint32_t> word = gm<uint32_t>(places(args).own);
    word.SetValue(0, 1);
    if (kept) DataCacheCleanAndInvalid<uint32_t, CacheLine::SINGLE_CACHE_LINE, DcciDst::CACHELINE_OUT>(word);
}
/* Core 0 looks at a word that core 1 stores to, 200 times at most; says whether it has seen it. */
PAIR(stale_line) {
    Room room;
    const Places p = places(args);
    if (GetBlockIdx() == 1) {
        room.a.ReinterpretCast<uint32_t>().SetValue(0, 77);
        SetFlag<HardEvent::S_MTE3>(0);
        WaitFlag<HardEvent::S_MTE3>(0);
        DataCopyPad(gm<uint32_t>(p.window), room.a.ReinterpretCast<uint32_t>(), DataCopyExtParams{1, 4, 0, 0, 0});
        return;
    }
    uint64_t seen = 0;
    for (uint32_t i = 0; i < 2000 && seen != 77; ++i) seen = kept ? fresh<uint32_t>(p.window) : gm<uint32_t>(p.window).GetValue(0);
    say(room, p, 0, seen == 77);
}
/* Two cores store to words of one line, or of two. */
PAIR(shared_line) {
    const Places p = places(args);
    const uint64_t at = (uint64_t)GetBlockIdx() * (kept ? 64 : 8);
    GlobalTensor<uint64_t> word = gm<uint64_t>(p.out + at);
    word.SetValue(0, 1);
    DataCacheCleanAndInvalid<uint64_t, CacheLine::SINGLE_CACHE_LINE, DcciDst::CACHELINE_OUT>(word);
}

/* ---- between cores ---- */

/* Core 0 copies data and then a word that announces it; core 1 waits for the word, and says whether all data is there. */
PAIR(announced) {
    Room room;
    const Places p = places(args);
    LocalTensor<uint32_t> words = room.a.ReinterpretCast<uint32_t>(), word = room.b.ReinterpretCast<uint32_t>();
    if (GetBlockIdx() == 0) {
        for (uint32_t i = 0; i < 256; ++i) words.SetValue(i, 5);
        word.SetValue(0, 123456);
        SetFlag<HardEvent::S_MTE3>(0);
        WaitFlag<HardEvent::S_MTE3>(0);
        DataCopy(gm<uint32_t>(p.window), words, 256);
        if (kept) landed();
        DataCopyPad(gm<uint32_t>(p.window)[512], word, DataCopyExtParams{1, 4, 0, 0, 0});
        return;
    }
    while (fresh<uint32_t>(p.window + 2048) != 123456) {}
    DataCopy(words, gm<uint32_t>(p.window), 256);
    SetFlag<HardEvent::MTE2_S>(0);
    WaitFlag<HardEvent::MTE2_S>(0);
    uint64_t all = 1;
    for (uint32_t i = 0; i < 256; ++i) all &= words.GetValue(i) == 5;
    say(room, p, 0, all);
}

/* Spins for ever, or for a while. */
PAIR(spin) {
    const int64_t began = GetSystemCycle();
    while (GetSystemCycle() - began < 1000 || !kept) {}
}
