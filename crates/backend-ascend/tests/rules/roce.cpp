/*
 * Tiny kernels on the twin's network: `post` writes blocks and counts to another server, `look` watches them come. tests/rules/roce.rs
 * says what each wrong step of `post` must give.
 */
#include "kernel_operator.h"

using namespace AscendC;

namespace {

constexpr uint32_t kBlockBytes = 8192;

/* Steps that are done wrong; 0: none. */
enum Wrong : uint64_t {
    kNothing, kLap, kSourceKey, kTargetKey, kRange, kOverwritten, kShortBell, kEarlyBell, kQueue, kLevel, kUnposted, kJoined, kWordReused,
    kSourceReused, kTwoCores, kNotTaken, kTail, kOpcode, kSources, kRewritten
};

struct Places {
    uint32_t number, depth, level, completion_depth;
    uint64_t elements, doorbell, tail, completions, completions_taken, posted;
    uint64_t from_key, to_key, from, words, to, flag, count, wrong, out;
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

template <class T> T fresh(uint64_t at) {
    GlobalTensor<T> tensor = gm<T>(at);
    DataCacheCleanAndInvalid<T, CacheLine::SINGLE_CACHE_LINE, DcciDst::CACHELINE_OUT>(tensor);
    return tensor.GetValue(0);
}

void store(uint64_t at, const LocalTensor<uint64_t>& from, uint32_t bytes, bool landed = true) {
    SetFlag<HardEvent::S_MTE3>(0);
    WaitFlag<HardEvent::S_MTE3>(0);
    DataCopyPad(gm<uint8_t>(at), from.ReinterpretCast<uint8_t>(), DataCopyExtParams{1, bytes, 0, 0, 0});
    if (!landed) return;
    SetFlag<HardEvent::MTE3_S>(0);
    WaitFlag<HardEvent::MTE3_S>(0);
}

struct Poster {
    Places p;
    TPipe pipe;
    TBuf<TPosition::VECCALC> buf;
    LocalTensor<uint64_t> element, word, block;
    uint32_t head = 0, taken = 0, done = 0;

    explicit Poster(GM_ADDR args) : p(places(args)) {
        pipe.InitBuffer(buf, 128 + kBlockBytes);
        LocalTensor<uint64_t> all = buf.Get<uint64_t>();
        element = all;
        word = all[8];
        block = all[16];
        head = done = (uint32_t)p.posted;
    }
    bool is(Wrong wrong) const { return p.wrong == wrong; }

    void look() {
        if (!p.completions) {
            done = fresh<uint32_t>(p.tail);
            return;
        }
        for (;;) {
            const uint64_t entry = p.completions + taken % p.completion_depth * 32;
            const uint32_t first = fresh<uint32_t>(entry);
            if ((first >> 7 & 1) == ((taken & p.completion_depth) != 0)) return;
            ++taken;
            done += (uint16_t)((uint16_t)(first >> 16) + 1 - (uint16_t)done);
            if (is(kNotTaken)) continue;
            word.SetValue(0, (uint64_t)(taken & 0xffffff));
            store(p.completions_taken, word, 4);
        }
    }
    void room(uint32_t more) {
        while (head + more - done >= p.depth) look();
    }
    void bell(uint32_t posted) {
        word.SetValue(0, (uint64_t)(is(kQueue) ? p.number + 1 : p.number) | (uint64_t)(uint16_t)(posted + is(kUnposted)) << 32 |
                             (uint64_t)(is(kLevel) ? p.level ^ 1 : p.level) << 48);
        store(p.doorbell, word, is(kShortBell) ? 4 : 8);
    }
    void post(uint64_t from, uint64_t to, uint32_t bytes) {
        const uint32_t depth = is(kLap) ? 2 * p.depth : p.depth;
        LocalTensor<uint32_t> words = element.ReinterpretCast<uint32_t>();
        words.SetValue(0, (is(kOpcode) ? 5u : 3u) | ((head & depth) == 0 ? 1u << 7 : 0u) | 1u << 8);
        words.SetValue(1, bytes);
        words.SetValue(2, 0u);
        words.SetValue(3, is(kSources) ? 0u : 1u << 24);
        words.SetValue(4, 0u);
        words.SetValue(5, (uint32_t)p.to_key ^ (is(kTargetKey) ? 1u : 0u));
        element.SetValue(3, to + (is(kRange) ? 1u << 20 : 0u));
        words.SetValue(8, bytes);
        words.SetValue(9, (uint32_t)p.from_key ^ (is(kSourceKey) ? 1u : 0u));
        element.SetValue(5, from);
        const uint64_t at = p.elements + head % p.depth * 64;
        if (is(kEarlyBell)) {
            bell(head + 1);
            store(at, element, 48);
        } else {
            store(at, element, 48);
            bell(head + 1);
            if (is(kRewritten)) store(at, element, 48);
        }
        ++head;
    }
};

}  // namespace

extern "C" __global__ __aicore__ void post(GM_ADDR args) {
    Poster q(args);
    const Places& p = q.p;
    if (GetBlockIdx() != 0) {
        if (q.is(kTwoCores)) q.bell(q.head);
        return;
    }
    if (q.is(kTail)) {
        q.word.SetValue(0, (uint64_t)0);
        store(p.tail, q.word, 4);
    }
    for (uint64_t i = 0; i < p.count; ++i) {
        if (q.is(kOverwritten)) {
            for (uint32_t word = 0; word < 4; ++word) q.post(p.words, p.flag, 8);
            continue;
        }
        /* Two blocks of memory to send from, by turns. Their messages before have been read. */
        while (!q.is(kSourceReused) && q.head - q.done > (q.is(kJoined) ? 1 : 2)) q.look();
        for (uint32_t at = 0; at < kBlockBytes / 8; at += 127) q.block.SetValue(at, i + 1);
        q.block.SetValue(kBlockBytes / 8 - 1, i + 1);
        const uint64_t from = p.from + i % 2 * kBlockBytes, word = p.words + (q.is(kWordReused) ? 0 : i % p.depth) * 8;
        store(from, q.block, kBlockBytes);
        q.room(2);
        if (q.is(kJoined)) {
            /* The count is the end of the message that it announces. */
            q.post(from, p.to + i * kBlockBytes, kBlockBytes);
            continue;
        }
        q.word.SetValue(0, i + 1);
        store(word, q.word, 8);
        q.post(from, p.to + i * kBlockBytes, kBlockBytes);
        q.post(word, p.flag, 8);
    }
    while (q.done != q.head) q.look();
}

/* Says 1 if every block was whole when it was announced. */
extern "C" __global__ __aicore__ void look(GM_ADDR args) {
    const Places p = places(args);
    TPipe pipe;
    TBuf<TPosition::VECCALC> buf;
    pipe.InitBuffer(buf, 64 + kBlockBytes);
    LocalTensor<uint64_t> word = buf.Get<uint64_t>(), block = word[8];
    uint64_t right = 1;
    if (p.wrong == kOverwritten) return;
    for (uint64_t i = 0; i < p.count; ++i) {
        const uint64_t at = p.to + i * kBlockBytes;
        if (p.wrong == kJoined) while (fresh<uint64_t>(at + kBlockBytes - 8) != i + 1) {}
        else while (fresh<uint64_t>(p.flag) < i + 1) {}
        DataCopyPad(block, gm<uint64_t>(at), DataCopyExtParams{1, kBlockBytes, 0, 0, 0}, DataCopyPadExtParams<uint64_t>{false, 0, 0, 0});
        SetFlag<HardEvent::MTE2_S>(0);
        WaitFlag<HardEvent::MTE2_S>(0);
        for (uint32_t k = 0; k < kBlockBytes / 8; k += 127) right &= block.GetValue(k) == i + 1;
    }
    word.SetValue(0, right);
    store(p.out, word, 8);
}
