/* vectors.h: instructions of the vector unit, by count. Included by kernel_operator.h. */
#ifndef TWIN_VECTORS_H
#define TWIN_VECTORS_H

namespace AscendC {

namespace twin_of {

inline float widened(bfloat16_t value) {
    const uint32_t bits = (uint32_t)value.bits << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}
/* To the nearest, ties to even. */
inline bfloat16_t rounded(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if (value != value) return bfloat16_t{0x7fff};
    return bfloat16_t{(uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

template <typename T> twin::Span span(const LocalTensor<T>& tensor, uint32_t count, bool writes) {
    const uint32_t at = tensor.check(0, count);
    aligned(at);
    return twin::Span{true, writes, at, (uint64_t)count * sizeof(T)};
}

template <typename T> T* at(const twin::Span& span) { return (T*)(void*)twin::own().ub((uint32_t)span.at); }

inline void issue(const char* call, std::vector<twin::Span> spans, std::function<void()> work) {
    twin::own().issue(twin::kVector, call, std::move(spans), {std::move(work)});
}

/* float, int32_t and int16_t: what arithmetic takes here; never bfloat16_t. */
template <typename T> constexpr bool kAdds = std::is_same_v<T, float> || std::is_same_v<T, int32_t> || std::is_same_v<T, int16_t>;

template <typename T, typename F>
void issue_binary(const char* call, const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, int32_t count, F each) {
    twin::own().call(call);
    const twin::Span to = span(dst, (uint32_t)count, true), a = span(src0, (uint32_t)count, false), b = span(src1, (uint32_t)count, false);
    T *out = at<T>(to), *left = at<T>(a), *right = at<T>(b);
    issue(call, {to, a, b}, [=] {
        for (int32_t i = 0; i < count; ++i) out[i] = each(left[i], right[i]);
    });
}

/* What a number becomes that its new type does not hold: nothing is promised. */
constexpr int kNotHeld = 0x55;

/* Integers up to 2048 are halves. */
inline half halved(int16_t value) {
    const uint32_t sign = value < 0 ? 0x8000 : 0, size = (uint32_t)(value < 0 ? -value : value);
    if (size > 2048) return half{kNotHeld};
    if (size == 0) return half{0};
    uint32_t power = 0;
    while (size >> (power + 1)) ++power;
    return half{(uint16_t)(sign | (power + 15) << 10 | ((size << 10 >> power) & 0x3ff))};
}
inline float widened(half value) {
    const int power = value.bits >> 10 & 31, rest = value.bits & 0x3ff;
    const float size = power == 0 ? std::ldexp((float)rest, -24) : power == 31 ? INFINITY : std::ldexp((float)(rest + 1024), power - 25);
    return value.bits >> 15 ? -size : size;
}
/* To the nearest, ties to even, or towards zero. */
template <typename T> T whole(float value, RoundMode mode) {
    const float near = mode == RoundMode::CAST_TRUNC ? std::trunc(value) : std::nearbyint(value);
    const bool held = near >= (float)std::numeric_limits<T>::min() && near <= (float)std::numeric_limits<T>::max();
    return held ? (T)near : (T)kNotHeld;
}

/* The conversions that kernels use, and whether the device has their mode of rounding. */
inline bool has_mode(float, bfloat16_t, RoundMode mode) { return mode == RoundMode::CAST_NONE; }
inline bool has_mode(bfloat16_t, float, RoundMode mode) { return mode != RoundMode::CAST_NONE; }
inline bool has_mode(int16_t, float, RoundMode mode) { return mode != RoundMode::CAST_NONE; }
inline bool has_mode(half, int16_t, RoundMode) { return true; }
inline bool has_mode(int8_t, half, RoundMode) { return true; }
inline void convert(float& to, bfloat16_t from, RoundMode) { to = widened(from); }
inline void convert(bfloat16_t& to, float from, RoundMode) { to = rounded(from); }
inline void convert(int16_t& to, float from, RoundMode mode) { to = whole<int16_t>(from, mode); }
inline void convert(half& to, int16_t from, RoundMode) { to = halved(from); }
inline void convert(int8_t& to, half from, RoundMode mode) { to = whole<int8_t>(widened(from), mode); }

}  // namespace twin_of

template <typename T> __aicore__ inline void Duplicate(const LocalTensor<T>& dst, const T& scalarValue, const int32_t& count) {
    twin::own().call("Duplicate");
    const twin::Span to = twin_of::span(dst, (uint32_t)count, true);
    T* out = twin_of::at<T>(to);
    const T value = scalarValue;
    twin_of::issue("Duplicate", {to}, [=, n = count] { std::fill_n(out, n, value); });
}

template <typename T>
__aicore__ inline void Add(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, const int32_t& count) {
    static_assert(twin_of::kAdds<T>, "Add takes float, int32_t and int16_t here, and never bfloat16_t");
    twin_of::issue_binary("Add", dst, src0, src1, count, [](T a, T b) { return (T)(a + b); });
}

template <typename T>
__aicore__ inline void Max(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, const int32_t& count) {
    static_assert(twin_of::kAdds<T>, "Max takes float, int32_t and int16_t here, and never bfloat16_t");
    twin_of::issue_binary("Max", dst, src0, src1, count, [](T a, T b) { return a > b ? a : b; });
}

template <typename T>
__aicore__ inline void And(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, const int32_t& count) {
    static_assert(std::is_same_v<T, int16_t> || std::is_same_v<T, uint16_t>, "And takes int16_t and uint16_t");
    twin_of::issue_binary("And", dst, src0, src1, count, [](T a, T b) { return (T)(a & b); });
}

template <typename T>
__aicore__ inline void Muls(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalarValue, const int32_t& count) {
    static_assert(twin_of::kAdds<T>, "Muls takes float, int32_t and int16_t here, and never bfloat16_t");
    twin_of::issue_binary("Muls", dst, src, src, count, [by = scalarValue](T a, T) { return (T)(a * by); });
}

template <typename T>
__aicore__ inline void Sub(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, const int32_t& count) {
    static_assert(twin_of::kAdds<T>, "Sub takes float, int32_t and int16_t here, and never bfloat16_t");
    twin_of::issue_binary("Sub", dst, src0, src1, count, [](T a, T b) { return (T)(a - b); });
}

template <typename T>
__aicore__ inline void Mul(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, const int32_t& count) {
    static_assert(twin_of::kAdds<T>, "Mul takes float, int32_t and int16_t here, and never bfloat16_t");
    twin_of::issue_binary("Mul", dst, src0, src1, count, [](T a, T b) { return (T)(a * b); });
}

template <typename T> __aicore__ inline void Adds(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalarValue, const int32_t& count) {
    static_assert(twin_of::kAdds<T>, "Adds takes float, int32_t and int16_t here, and never bfloat16_t");
    twin_of::issue_binary("Adds", dst, src, src, count, [by = scalarValue](T a, T) { return (T)(a + by); });
}

template <typename T>
__aicore__ inline void Or(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, const int32_t& count) {
    static_assert(std::is_same_v<T, int16_t> || std::is_same_v<T, uint16_t>, "Or takes int16_t and uint16_t");
    twin_of::issue_binary("Or", dst, src0, src1, count, [](T a, T b) { return (T)(a | b); });
}

template <typename T> __aicore__ inline void Not(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t& count) {
    static_assert(std::is_same_v<T, int16_t> || std::is_same_v<T, uint16_t>, "Not takes int16_t and uint16_t");
    twin_of::issue_binary("Not", dst, src, src, count, [](T a, T) { return (T)~a; });
}

/* Of a signed type the sign comes in, of an unsigned one zeros. */
template <typename T>
__aicore__ inline void ShiftRight(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalarValue, const int32_t& count) {
    static_assert(std::is_same_v<T, int32_t> || std::is_same_v<T, uint32_t>, "ShiftRight takes int32_t and uint32_t here");
    if ((uint32_t)scalarValue > 32) twin::own().fault("limits", "ShiftRight by %u, at most 32", (uint32_t)scalarValue);
    twin_of::issue_binary("ShiftRight", dst, src, src, count, [by = scalarValue](T a, T) { return (T)(a >> by); });
}

template <typename T, typename U>
__aicore__ inline void Cast(const LocalTensor<T>& dst, const LocalTensor<U>& src, const RoundMode& roundMode, const uint32_t count) {
    twin::own().call("Cast");
    if (!twin_of::has_mode(T{}, U{}, roundMode))
        twin::own().fault("limits", "Cast with a mode of rounding that these types do not have");
    const twin::Span to = twin_of::span(dst, count, true), from = twin_of::span(src, count, false);
    T* out = twin_of::at<T>(to);
    const U* in = twin_of::at<U>(from);
    twin_of::issue("Cast", {to, from}, [=, mode = roundMode] {
        for (uint32_t i = 0; i < count; ++i) twin_of::convert(out[i], in[i], mode);
    });
}

}  // namespace AscendC

#endif
