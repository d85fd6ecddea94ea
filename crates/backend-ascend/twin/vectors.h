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

template <typename T> constexpr bool kAdds = std::is_same_v<T, float> || std::is_same_v<T, int32_t> || std::is_same_v<T, int16_t>;

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
    twin::own().call("Add");
    static_assert(twin_of::kAdds<T>, "Add takes float, int32_t and int16_t here, and never bfloat16_t");
    const twin::Span to = twin_of::span(dst, (uint32_t)count, true), a = twin_of::span(src0, (uint32_t)count, false),
                     b = twin_of::span(src1, (uint32_t)count, false);
    T *out = twin_of::at<T>(to), *left = twin_of::at<T>(a), *right = twin_of::at<T>(b);
    twin_of::issue("Add", {to, a, b}, [=, n = count] {
        for (int32_t i = 0; i < n; ++i) out[i] = left[i] + right[i];
    });
}

template <typename T, typename U>
__aicore__ inline void Cast(const LocalTensor<T>& dst, const LocalTensor<U>& src, const RoundMode& roundMode, const uint32_t count) {
    twin::own().call("Cast");
    constexpr bool widens = std::is_same_v<U, bfloat16_t> && std::is_same_v<T, float>;
    constexpr bool rounds = std::is_same_v<U, float> && std::is_same_v<T, bfloat16_t>;
    static_assert(widens || rounds, "Cast is between bfloat16_t and float here");
    if (roundMode != (widens ? RoundMode::CAST_NONE : RoundMode::CAST_RINT))
        twin::own().fault("limits", "Cast with a mode of rounding that these types do not have");
    const twin::Span to = twin_of::span(dst, count, true), from = twin_of::span(src, count, false);
    T* out = twin_of::at<T>(to);
    const U* in = twin_of::at<U>(from);
    twin_of::issue("Cast", {to, from}, [=] {
        for (uint32_t i = 0; i < count; ++i) {
            if constexpr (widens) out[i] = twin_of::widened(in[i]);
            else out[i] = twin_of::rounded(in[i]);
        }
    });
}

}  // namespace AscendC

#endif
