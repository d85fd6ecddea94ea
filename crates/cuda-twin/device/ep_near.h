/*
 * ep_near.h: the verbs of ep_verbs.h on the toy. A place is no address: it names a rank and an offset, so what reaches a
 * peer by another way than a verb does not compile here. Puts and gets that leave the window, or lie askew in it, end the
 * program.
 */
#ifndef EP_NEAR_H
#define EP_NEAR_H
#include "ep_rank.h"

namespace toy {

/* The upper 16 bits: 1 + the rank, or kHere for an address of the own memory. The lower 48: the offset. 0: nowhere. */
constexpr std::uint64_t kHere = 0xffffull << 48, kOffset = ~kHere;

/* Where the host says that the window of a rank of another node lies: it takes part, and no store reaches it. */
unsigned char* const kBeyond = (unsigned char*)1;

/* Of all ranks, as the launch knows them. EpRank.windows is not read. */
inline const std::vector<Window>& windows() { return Warp::own().block.windows; }

} /* namespace toy */

class EpAt {
    ep_u64 bits;

public:
    ep_u8* find(ep_u64 bytes) const {
        const ep_u64 offset = bits & toy::kOffset;
        if (bits >= toy::kHere) return (ep_u8*)offset;
        const ep_u64 rank = (bits >> 48) - 1;
        if (rank >= toy::windows().size() || toy::windows()[rank].base == nullptr) toy::broken("no place: %llx", bits);
        const toy::Window& window = toy::windows()[rank];
        if (window.base == toy::kBeyond) toy::broken("a store into the window of rank %llu, of another node", rank);
        const ep_u64 unit = bytes % 16 == 0 ? 16 : bytes % 8 == 0 ? 8 : bytes % 4 == 0 ? 4 : 1;
        if (offset + bytes > window.bytes || offset % unit)
            toy::broken("%llu bytes at %llu of the window of rank %llu", bytes, offset, rank);
        return window.base + offset;
    }

    EpAt() = default;
    explicit EpAt(ep_u64 bits) : bits(bits) {}
    EpAt operator+(ep_u64 bytes) const { return EpAt(bits + bytes); }
    bool is_somewhere() const { return bits != 0; }
    ep_u8* own() const { return find(0); }
    void put(const void* from, ep_u32 bytes) const { toy::Warp::own().put(find(bytes), from, bytes); }
    void raise(ep_u64 value) const { ep_st_release(find(8), value); }
    template <class T> T get() const {
        T v;
        std::memcpy(&v, find(sizeof(T)), sizeof(T));
        return v;
    }
};

#define EP_HAS_UNITS
#include "ep_verbs.h"

#include "ep_far_post.h"

/* ---- places ---- */

EP_DEV bool ep_takes_part(const EpRank&, ep_u32 rank) { return toy::windows()[rank].base != nullptr; }
EP_DEV EpAt ep_at(const EpRank& r, ep_u32 rank, ep_u64 offset) {
    if (ep_is_beyond(r, rank)) toy::broken("rank %u stores into the window of rank %u, of another node", r.me, rank);
    return EpAt((rank + 1ull) << 48) + offset;
}
EP_DEV EpAt ep_here(ep_u64 address) { return EpAt(toy::kHere | address); }
EP_DEV EpAt ep_nowhere() { return EpAt(0); }
EP_DEV bool ep_is_somewhere(EpAt at) { return at.is_somewhere(); }
EP_DEV ep_u8* ep_own(const EpRank& r) { return toy::windows()[r.me].base; }
/* Where a rank's window begins; nowhere where it takes no part. Nothing is stored there where it is of another node. */
EP_DEV EpAt ep_begin(const EpRank& r, ep_u32 rank) {
    return ep_takes_part(r, rank) ? EpAt((rank + 1ull) << 48) : ep_nowhere();
}
EP_DEV ep_u8* ep_own_of(const EpAt* windows, ep_u32 me) { return windows[me].own(); }
EP_DEV EpAt ep_shuffle(EpAt at, ep_u32 lane) { return ep_warp_shuffle(at, lane); }

/* ---- put and get ---- */

EP_DEV void ep_put16(EpAt to, EpUnit unit) { to.put(&unit, 16); }
EP_DEV void ep_put4(EpAt to, ep_u32 word) { to.put(&word, 4); }
EP_DEV void ep_put1(EpAt to, ep_u8 byte) { to.put(&byte, 1); }
template <class T> EP_DEV void ep_put_message(EpAt to, const T& message) { to.put(&message, sizeof message); }
/* There is no copy engine. */
EP_DEV void ep_put_bulk(EpAt to, const void* shared, ep_u32 bytes) { to.put(shared, bytes); }
EP_DEV EpUnit ep_get16(EpAt from) { return from.get<EpUnit>(); }
EP_DEV ep_u32 ep_get4(EpAt from) { return from.get<ep_u32>(); }
EP_DEV ep_u8 ep_get1(EpAt from) { return from.get<ep_u8>(); }
EP_DEV EpUnit ep_ld16_put(const void* at) { return ep_ld16(at); }

/* ---- fetch: comes when it likes, at the latest when it is waited for; until then nothing lies where it goes ---- */

EP_DEV void ep_fetch16(void* shared, EpAt from) { toy::Warp::own().fetch((ep_u8*)shared, from.find(16), 16); }
EP_DEV void ep_fetch4(void* shared, EpAt from) { toy::Warp::own().fetch((ep_u8*)shared, from.find(4), 4); }
EP_DEV void ep_fetch_end() { toy::Warp::own().end_fetch(); }
template <int pending> EP_DEV void ep_fetch_wait() { toy::Warp::own().await_fetches(pending); }

/* ---- units: aligned loads and stores of 16 bytes, which processors with AVX and 64-bit Arm make at once ---- */

EP_DEV void ep_put_unit(EpAt to, ep_u32 x, ep_u32 y, ep_u32 z, ep_u32 tag) {
    const ep_u32 unit[4] = {x, y, z, tag};
    to.put(unit, sizeof unit);
}
EP_DEV bool ep_poll_unit(const void* at, ep_u32 tag, ep_u32* data) {
    typedef ep_u32 Four __attribute__((vector_size(16)));
    if ((ep_u64)at % 16) toy::broken("a unit at %llx", (ep_u64)at);
    const Four unit = *(const volatile Four*)at;
    for (int i = 0; i < 3; ++i) data[i] = unit[i];
    if (ep_unit_has_come(unit[3], tag)) return true;
    toy::Warp::own().wait();
    return false;
}

/* ---- publish and peek ---- */

EP_DEV void ep_raise(const EpRank& r, ep_u32 peer, ep_u32 lane, ep_u64 cell, ep_u64 value) {
    if (!ep_posts(r, peer, lane, value)) return;
    if (ep_is_beyond(r, peer)) return ep_far_raise(r, peer, lane, cell, value);
    if (cell % 8 || cell + 8 > toy::windows()[peer].bytes) toy::broken("a cell at %llu of rank %u's window", cell, peer);
    ep_st_release(toy::windows()[peer].base + cell, ep_stamp(r.generation, value));
}
/* As ep_raise, of a cell whose place is at hand; the caller has fenced. */
EP_DEV void ep_raise_fenced(const EpRank& r, ep_u32 peer, ep_u32 lane, EpAt cell, ep_u64 value) {
    if (ep_posts(r, peer, lane, value)) cell.raise(ep_stamp(r.generation, value));
}
EP_DEV void ep_publish(const EpRank& r, ep_u32 peer, ep_u32 lane, ep_u32 counter, ep_u64 value) {
    ep_raise(r, peer, lane, ep_cell(r.w, r.generation, r.me, lane, counter), value);
}
EP_DEV ep_u64 ep_look(const EpRank& r, ep_u64 cell) {
    return ep_value_in(r.generation, ep_ld_acquire(ep_own(r) + cell));
}
EP_DEV ep_u64 ep_peek(const EpRank& r, ep_u32 writer, ep_u32 lane, ep_u32 counter) {
    return ep_look(r, ep_cell(r.w, r.generation, writer, lane, counter));
}

#endif
