/* copies.h: DataCopy and DataCopyPad between global memory (GM) and unified buffer (UB). Included by kernel_operator.h. */
#ifndef TWIN_COPIES_H
#define TWIN_COPIES_H

namespace AscendC {

namespace twin_of {

constexpr uint32_t kMostPieces = 4;
constexpr const char* kLoad = "DataCopy (GM to UB)";
constexpr const char* kStore = "DataCopy (UB to GM)";
constexpr const char* kLoadPad = "DataCopyPad (GM to UB)";
constexpr const char* kStorePad = "DataCopyPad (UB to GM)";

/* Pieces of a copy, cut where the seed likes; 8 bytes that are aligned at both ends stay whole. */
template <class Move> std::vector<std::function<void()>> pieces(uint64_t bytes, bool words, const Move& move) {
    std::vector<std::function<void()>> all;
    auto& random = twin::own().machine.random;
    uint64_t from = 0;
    while (from < bytes) {
        uint64_t to = bytes;
        if (all.size() + 1 < kMostPieces && random.once_in(2)) to = from + 1 + random.below(bytes - from);
        if (words) to = std::min(bytes, (to + 7) / 8 * 8);
        all.push_back([=] { move(from, to - from); });
        from = to;
    }
    return all;
}

inline void aligned(uint32_t at) {
    if (at % twin::kBlock) twin::own().fault("alignment", "UB address is %u, allowed: multiples of %u", at, twin::kBlock);
}

/* GM to UB. The bytes up to the next block, `pad`, become undefined. */
inline void load(const char* call, uint32_t ub, uint64_t gm, uint64_t bytes, uint64_t pad) {
    twin::Core& core = twin::own();
    if (bytes == 0) return;
    aligned(ub);
    const unsigned char* from = core.machine.reach(core, call, gm, bytes, false);
    unsigned char* to = core.ub(ub);
    auto moves = pieces(bytes, gm % 8 == 0, [=](uint64_t at, uint64_t n) { std::memcpy(to + at, from + at, n); });
    if (pad) {
        const uint64_t undefined = core.machine.random.next();
        moves.push_back([=] {
            for (uint64_t i = 0; i < pad; ++i) to[bytes + i] = (unsigned char)(undefined >> i % 57);
        });
    }
    core.issue(twin::kMte2, call, {twin::Span{true, true, ub, bytes + pad}, twin::Span{false, false, gm, bytes}}, std::move(moves));
}

/* UB to GM. */
inline void store(const char* call, uint64_t gm, uint32_t ub, uint64_t bytes) {
    twin::Core& core = twin::own();
    if (bytes == 0) return;
    aligned(ub);
    unsigned char* to = core.machine.reach(core, call, gm, bytes, true);
    const unsigned char* from = core.ub(ub);
    auto moves = pieces(bytes, gm % 8 == 0, [=](uint64_t at, uint64_t n) { std::memcpy(to + at, from + at, n); });
    core.machine.befall(core.rank, gm, bytes, moves);
    if (core.machine.network.wants(core, gm, bytes)) {
        moves = {[=, &core] {
            std::memcpy(to, from, 8);
            uint64_t value;
            std::memcpy(&value, from, 8);
            core.machine.network.ring(core, gm, value);
        }};
    }
    core.issue(twin::kMte3, call, {twin::Span{true, false, ub, bytes}, twin::Span{false, true, gm, bytes}}, std::move(moves));
}

/* The device moves whole blocks of 32 bytes and leaves out the rest, in silence: no kernel may mean that. */
template <typename T> uint64_t whole(uint32_t count) {
    const uint64_t bytes = (uint64_t)count * sizeof(T);
    if (bytes % twin::kBlock)
        twin::own().fault("floor", "DataCopy of %llu bytes moves %llu", (unsigned long long)bytes, (unsigned long long)(bytes / 32 * 32));
    return bytes;
}

template <typename T> void check(const DataCopyExtParams& p) {
    if (p.blockCount != 1) twin::own().fault("limits", "blockCount is %u: the twin has copies of one block", p.blockCount);
    if (p.blockLen > 2097151) twin::own().fault("limits", "blockLen is %u, allowed: up to 2097151", p.blockLen);
    if (p.blockLen % sizeof(T)) twin::own().fault("limits", "blockLen is %u, allowed: multiples of %zu", p.blockLen, sizeof(T));
}

inline uint64_t to_block(uint64_t bytes) { return (twin::kBlock - bytes % twin::kBlock) % twin::kBlock; }

}  // namespace twin_of

template <typename T> __aicore__ inline void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const uint32_t count) {
    twin::own().call(twin_of::kLoad);
    const uint64_t bytes = twin_of::whole<T>(count);
    twin_of::load(twin_of::kLoad, dst.check(0, count), src.check(0, count), bytes, 0);
}
template <typename T> __aicore__ inline void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const uint32_t count) {
    twin::own().call(twin_of::kStore);
    const uint64_t bytes = twin_of::whole<T>(count);
    twin_of::store(twin_of::kStore, dst.check(0, count), src.check(0, count), bytes);
}
template <typename T>
__aicore__ inline void DataCopyPad(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyExtParams& params,
                                   const DataCopyPadExtParams<T>& pad) {
    twin::own().call(twin_of::kLoadPad);
    twin_of::check<T>(params);
    if (pad.isPad) twin::own().fault("limits", "the twin pads with undefined bytes only");
    const uint64_t count = params.blockLen / sizeof(T), rest = twin_of::to_block(params.blockLen);
    const uint32_t at = dst.check(0, count);
    dst.check(0, (params.blockLen + rest) / sizeof(T));
    twin_of::load(twin_of::kLoadPad, at, src.check(0, count), params.blockLen, rest);
}
template <typename T>
__aicore__ inline void DataCopyPad(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyExtParams& params) {
    twin::own().call(twin_of::kStorePad);
    twin_of::check<T>(params);
    const uint64_t count = params.blockLen / sizeof(T);
    twin_of::store(twin_of::kStorePad, dst.check(0, count), src.check(0, count), params.blockLen);
}

}  // namespace AscendC

#endif
