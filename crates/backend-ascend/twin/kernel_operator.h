/*
 * kernel_operator.h: the part of the AscendC API that kernels of this crate use, for g++ on a CPU, on the twin's device (machine.h).
 *
 * Names, signatures and limits are those of the API's documents for the Atlas A2 (vector cores). What they do not allow is a fault here,
 * or does not compile. With the vendor's compiler the vendor's header of this name takes this one's place.
 */
#ifndef TWIN_KERNEL_OPERATOR_H
#define TWIN_KERNEL_OPERATOR_H

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "machine.h"

#define __aicore__
#define __global__ __attribute__((visibility("default"))) /* the library exports kernels, and little else */
#define __gm__
#define __ubuf__
#define GM_ADDR uint8_t*
#define KERNEL_TASK_TYPE_DEFAULT(type) (void)0

enum pipe_t { PIPE_S, PIPE_V, PIPE_MTE2, PIPE_MTE3, PIPE_ALL };

/* Numbers of 16 bits that only instructions of the vector unit read. */
struct bfloat16_t {
    uint16_t bits;
};
struct half {
    uint16_t bits;
};

namespace AscendC {

enum class TPosition : uint8_t { GM, VECIN, VECOUT, VECCALC };
enum class HardEvent : uint8_t { MTE2_V, V_MTE2, V_MTE3, MTE3_V, MTE2_MTE3, MTE3_MTE2, S_V, V_S, S_MTE2, MTE2_S, S_MTE3, MTE3_S };
enum class RoundMode : uint8_t { CAST_NONE, CAST_RINT, CAST_TRUNC };
enum class CacheLine : uint64_t { SINGLE_CACHE_LINE, ENTIRE_DATA_CACHE };
enum class DcciDst : uint64_t { CACHELINE_OUT };

/* ---- tensors ---- */

template <typename T> class LocalTensor {
    uint32_t at_ = 0, bytes_ = 0; /* of the UB */
    template <typename U> friend class LocalTensor;
    template <TPosition> friend class TBuf;

public:
    __aicore__ inline LocalTensor() = default;
    __aicore__ inline T GetValue(const uint32_t index) const {
        T value;
        twin::own().ub_read(check(index, 1), &value, sizeof(T));
        return value;
    }
    template <typename S> __aicore__ inline void SetValue(const uint32_t index, const S value) const {
        const T mine = (T)value;
        twin::own().ub_write(check(index, 1), &mine, sizeof(T));
    }
    __aicore__ inline LocalTensor operator[](const uint32_t offset) const {
        LocalTensor part;
        part.at_ = check(offset, 0);
        part.bytes_ = bytes_ - (part.at_ - at_);
        return part;
    }
    template <typename U> __aicore__ inline LocalTensor<U> ReinterpretCast() const {
        LocalTensor<U> same;
        same.at_ = at_;
        same.bytes_ = bytes_;
        return same;
    }
    __aicore__ inline uint32_t GetSize() const { return bytes_ / sizeof(T); }

    /* Of the twin: where so many elements from index on lie. */
    uint32_t check(uint32_t index, uint64_t count) const {
        if ((uint64_t)index * sizeof(T) + count * sizeof(T) > bytes_)
            twin::own().fault("UB", "elements %u to %llu of a tensor of %u", index, (unsigned long long)(index + count), GetSize());
        return at_ + index * (uint32_t)sizeof(T);
    }
};

template <typename T> class GlobalTensor {
    uint64_t at_ = 0, elements_ = 0;

public:
    __aicore__ inline GlobalTensor() = default;
    __aicore__ inline void SetGlobalBuffer(__gm__ T* buffer, uint64_t bufferSize) {
        at_ = (uint64_t)buffer;
        elements_ = bufferSize;
    }
    __aicore__ inline void SetGlobalBuffer(__gm__ T* buffer) { SetGlobalBuffer(buffer, ~0ull); }
    __aicore__ inline const __gm__ T* GetPhyAddr() const { return (const T*)at_; }
    __aicore__ inline T GetValue(const uint64_t offset) const {
        T value;
        twin::own().cache_read(check(offset, 1), &value, sizeof(T));
        return value;
    }
    __aicore__ inline void SetValue(const uint64_t offset, T value) { twin::own().cache_write(check(offset, 1), &value, sizeof(T)); }
    __aicore__ inline GlobalTensor operator[](const uint64_t offset) const {
        GlobalTensor part;
        part.at_ = check(offset, 0);
        part.elements_ = elements_ == ~0ull ? elements_ : elements_ - offset;
        return part;
    }
    __aicore__ inline uint64_t GetSize() const { return elements_; }

    /* Of the twin: where so many elements from offset on lie. */
    uint64_t check(uint64_t offset, uint64_t count) const {
        if (elements_ != ~0ull && offset + count > elements_)
            twin::own().fault("bounds", "elements %llu to %llu of a tensor of %llu", (unsigned long long)offset,
                              (unsigned long long)(offset + count), (unsigned long long)elements_);
        return at_ + offset * sizeof(T);
    }
};

/* ---- memory of the core ---- */

template <TPosition pos> class TBuf {
    uint32_t at_ = 0, bytes_ = 0;
    friend class TPipe;

public:
    __aicore__ inline TBuf() = default;
    template <typename T> __aicore__ inline LocalTensor<T> Get() {
        LocalTensor<T> all;
        all.at_ = at_;
        all.bytes_ = bytes_;
        return all;
    }
};

class TPipe {
public:
    __aicore__ inline TPipe() = default;
    template <TPosition pos> __aicore__ inline bool InitBuffer(TBuf<pos>& buf, uint32_t len) {
        buf.at_ = twin::own().ub_alloc(len);
        buf.bytes_ = (len + twin::kBlock - 1) / twin::kBlock * twin::kBlock;
        return true;
    }
};

/* ---- who and when ---- */

__aicore__ inline int64_t GetBlockIdx() { return twin::own().number; }
__aicore__ inline int64_t GetBlockNum() { return twin::own().blocks; }
/* 50 MHz. */
__aicore__ inline int64_t GetSystemCycle() {
    twin::own().spin("GetSystemCycle");
    return (int64_t)twin::own().machine.cycles;
}

/* ---- order ---- */

namespace twin_of {
constexpr uint32_t pipe(pipe_t p) {
    return p == PIPE_MTE2 ? twin::kMte2 : p == PIPE_MTE3 ? twin::kMte3 : p == PIPE_V ? twin::kVector : twin::kScalar;
}
constexpr uint32_t from(HardEvent e) {
    switch (e) {
        case HardEvent::MTE2_V: case HardEvent::MTE2_MTE3: case HardEvent::MTE2_S: return twin::kMte2;
        case HardEvent::MTE3_V: case HardEvent::MTE3_MTE2: case HardEvent::MTE3_S: return twin::kMte3;
        case HardEvent::V_MTE2: case HardEvent::V_MTE3: case HardEvent::V_S: return twin::kVector;
        default: return twin::kScalar;
    }
}
constexpr uint32_t to(HardEvent e) {
    switch (e) {
        case HardEvent::V_MTE2: case HardEvent::MTE3_MTE2: case HardEvent::S_MTE2: return twin::kMte2;
        case HardEvent::V_MTE3: case HardEvent::MTE2_MTE3: case HardEvent::S_MTE3: return twin::kMte3;
        case HardEvent::MTE2_V: case HardEvent::MTE3_V: case HardEvent::S_V: return twin::kVector;
        default: return twin::kScalar;
    }
}
}  // namespace twin_of

template <HardEvent event> __aicore__ inline void SetFlag(int32_t eventID) {
    twin::own().call("SetFlag");
    twin::own().set_flag(twin_of::from(event), twin_of::to(event), (uint32_t)event, eventID);
}
template <HardEvent event> __aicore__ inline void WaitFlag(int32_t eventID) {
    twin::own().call("WaitFlag");
    twin::own().wait_flag(twin_of::from(event), twin_of::to(event), (uint32_t)event, eventID);
}
template <pipe_t pipe> __aicore__ inline void PipeBarrier() {
    static_assert(pipe != PIPE_S, "there is no barrier of the scalar pipe");
    twin::own().call("PipeBarrier");
    if constexpr (pipe == PIPE_ALL) twin::own().barrier_all();
    else twin::own().barrier(twin_of::pipe(pipe));
}
template <typename T, CacheLine entireType, DcciDst dcciDst> __aicore__ inline void DataCacheCleanAndInvalid(const GlobalTensor<T>& dst) {
    if constexpr (entireType == CacheLine::ENTIRE_DATA_CACHE) twin::own().cache_clean_all();
    else twin::own().cache_clean((uint64_t)dst.GetPhyAddr());
}

/* ---- copies ---- */

struct DataCopyExtParams {
    uint16_t blockCount = 1;
    uint32_t blockLen = 0, srcStride = 0, dstStride = 0, rsv = 0;
};
template <typename T> struct DataCopyPadExtParams {
    bool isPad = false;
    uint8_t leftPadding = 0, rightPadding = 0;
    T paddingValue{};
};

}  // namespace AscendC

#include "copies.h"
#include "vectors.h"

#endif
