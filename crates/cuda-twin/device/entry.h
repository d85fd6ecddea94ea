/*
 * entry.h: how the twin's driver finds a kernel in a module, and runs it: behind the kernel's text.
 */
#ifndef TWIN_ENTRY_H
#define TWIN_ENTRY_H
#include "cuda_words.h"
#include "ep_rank.h"

namespace twin {

/* What a module exports as twin_entry; the driver has the same struct. */
struct Entry {
    const char* kernel;
    unsigned count;          /* of parameters */
    std::size_t bytes[4];    /* of each */
    void (*run)(const toy::Shape& shape, std::uint64_t seed, void* const* parameters);
};

/* The windows of all ranks as the rank sees them; of those that do not take part none. */
inline std::vector<toy::Window> windows(const EpRank& r) {
    std::vector<toy::Window> all;
    for (ep_u32 rank = 0; rank < r.w.ranks; ++rank)
        all.push_back({((unsigned char* const*)r.windows)[rank], r.w.window_bytes});
    return all;
}
template <class T> inline std::vector<toy::Window> windows(const T&) { return {}; }

template <class First, class... Rest> struct Call {
    template <void (*kKernel)(First, Rest...)>
    static void run(const toy::Shape& shape, std::uint64_t seed, void* const* parameters) {
        const auto known = windows(*(const std::decay_t<First>*)parameters[0]);
        toy::launch(shape, seed, known, [&] { call<kKernel>(parameters, std::make_index_sequence<sizeof...(Rest)>()); });
    }
    template <void (*kKernel)(First, Rest...), std::size_t... kAt>
    static void call(void* const* parameters, std::index_sequence<kAt...>) {
        kKernel(*(const std::decay_t<First>*)parameters[0], *(const std::decay_t<Rest>*)parameters[kAt + 1]...);
    }
};
template <class... A> Call<A...> call_of(void (*)(A...));
template <class... A> constexpr Entry entry(const char* name, void (*)(A...), decltype(Entry::run) run) {
    return {name, sizeof...(A), {sizeof(std::decay_t<A>)...}, run};
}

} /* namespace twin */

#define TWIN_ENTRY(name, kernel)                                          \
    extern "C" __attribute__((visibility("default"))) const twin::Entry twin_entry = \
        twin::entry(name, &kernel, &decltype(twin::call_of(&kernel))::run<&kernel>)
#endif
