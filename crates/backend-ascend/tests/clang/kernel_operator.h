/*
 * kernel_operator.h: the API that the kernels use, declared for clang with what the device's compiler knows and g++ does not: functions of the
 * device and of the host are different, and so are pointers to global memory and to the stack. Nothing of it runs.
 */
#ifndef CLANG_KERNEL_OPERATOR_H
#define CLANG_KERNEL_OPERATOR_H

typedef signed char int8_t;
typedef short int16_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef int int32_t;
typedef unsigned long uint64_t;
typedef long int64_t;

#define __aicore__ __attribute__((device))
#define __global__
#define __gm__ __attribute__((address_space(1)))
#define GM_ADDR __gm__ uint8_t*
#define KERNEL_TASK_TYPE_DEFAULT(type) (void)0

enum pipe_t { PIPE_S, PIPE_V, PIPE_MTE2, PIPE_MTE3, PIPE_ALL };
struct bfloat16_t {
    uint16_t bits;
};
struct half {
    uint16_t bits;
};

namespace AscendC {

enum class TPosition : uint8_t { VECCALC };
enum class HardEvent : uint8_t { MTE2_V, V_MTE2, V_MTE3, MTE3_V, MTE2_MTE3, MTE3_MTE2, S_V, V_S, S_MTE2, MTE2_S, S_MTE3, MTE3_S };
enum class RoundMode : uint8_t { CAST_NONE, CAST_RINT, CAST_TRUNC };
enum class CacheLine : uint64_t { SINGLE_CACHE_LINE, ENTIRE_DATA_CACHE };
enum class DcciDst : uint64_t { CACHELINE_OUT };

template <typename T> class LocalTensor {
    uint32_t at_;

public:
    __aicore__ LocalTensor() {}
    __aicore__ T GetValue(const uint32_t index) const;
    template <typename S> __aicore__ void SetValue(const uint32_t index, const S value) const;
    __aicore__ LocalTensor operator[](const uint32_t offset) const;
    template <typename U> __aicore__ LocalTensor<U> ReinterpretCast() const;
    __aicore__ uint32_t GetSize() const;
};

template <typename T> class GlobalTensor {
    __gm__ T* at_;

public:
    __aicore__ GlobalTensor() {}
    __aicore__ void SetGlobalBuffer(__gm__ T* buffer, uint64_t bufferSize);
    __aicore__ void SetGlobalBuffer(__gm__ T* buffer);
    __aicore__ const __gm__ T* GetPhyAddr() const;
    __aicore__ T GetValue(const uint64_t offset) const;
    __aicore__ void SetValue(const uint64_t offset, T value);
    __aicore__ GlobalTensor operator[](const uint64_t offset) const;
    __aicore__ uint64_t GetSize() const;
};

template <TPosition pos> class TBuf {
    uint32_t at_;

public:
    __aicore__ TBuf() {}
    template <typename T> __aicore__ LocalTensor<T> Get();
};
class TPipe {
public:
    __aicore__ TPipe() {}
    template <TPosition pos> __aicore__ bool InitBuffer(TBuf<pos>& buf, uint32_t len);
};

struct DataCopyExtParams {
    uint16_t blockCount;
    uint32_t blockLen, srcStride, dstStride, rsv;
};
template <typename T> struct DataCopyPadExtParams {
    bool isPad;
    uint8_t leftPadding, rightPadding;
    T paddingValue;
};

__aicore__ int64_t GetBlockIdx();
__aicore__ int64_t GetBlockNum();
__aicore__ int64_t GetSystemCycle();
template <HardEvent event> __aicore__ void SetFlag(int32_t eventID);
template <HardEvent event> __aicore__ void WaitFlag(int32_t eventID);
template <pipe_t pipe> __aicore__ void PipeBarrier();
template <typename T, CacheLine entireType, DcciDst dcciDst> __aicore__ void DataCacheCleanAndInvalid(const GlobalTensor<T>& dst);
template <typename T> __aicore__ void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const uint32_t count);
template <typename T> __aicore__ void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const uint32_t count);
template <typename T>
__aicore__ void DataCopyPad(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyExtParams& params,
                            const DataCopyPadExtParams<T>& pad);
template <typename T> __aicore__ void DataCopyPad(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyExtParams& params);
template <typename T> __aicore__ void Duplicate(const LocalTensor<T>& dst, const T& scalarValue, const int32_t& count);
template <typename T>
__aicore__ void Add(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, const int32_t& count);
template <typename T>
__aicore__ void And(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, const int32_t& count);
template <typename T>
__aicore__ void Max(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, const int32_t& count);
template <typename T>
__aicore__ void Sub(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, const int32_t& count);
template <typename T>
__aicore__ void Mul(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, const int32_t& count);
template <typename T>
__aicore__ void Or(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, const int32_t& count);
template <typename T> __aicore__ void Not(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t& count);
template <typename T> __aicore__ void Adds(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalarValue, const int32_t& count);
template <typename T>
__aicore__ void ShiftRight(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalarValue, const int32_t& count);
template <typename T> __aicore__ void Muls(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalarValue, const int32_t& count);
template <typename T, typename U>
__aicore__ void Cast(const LocalTensor<T>& dst, const LocalTensor<U>& src, const RoundMode& roundMode, const uint32_t count);

}  // namespace AscendC

#endif
