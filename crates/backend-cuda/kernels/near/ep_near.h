/*
 * ep_near.h: the verbs of ep_verbs.h within a node: windows of a node's ranks are mapped into each other, so a put is a store and a cell is a
 * 64-bit word of the reader's window.
 *
 *   F3   a publish is `st.release.sys`. Bulk puts are stores of another proxy: each issuing thread waits for their completion (ep_bulk.h)
 *   F10  gets never take the non-coherent path
 *
 * Only the headers of this folder name EpNear, and so the addresses of windows; a test reads the other kernels for it.
 */
#ifndef EP_NEAR_H
#define EP_NEAR_H
#include "ep_rank.h"

struct EpNear;

/* A place in a rank's window, as an address that only EpNear knows. */
class EpAt {
    friend struct EpNear;
    ep_u64 address;

public:
    EpAt() = default;
    EP_DEV EpAt operator+(ep_u64 bytes) const {
        EpAt at = *this;
        at.address += bytes;
        return at;
    }
};

struct EpNear {
    static EP_DEV EpAt at(ep_u64 address) {
        EpAt at;
        at.address = address;
        return at;
    }
    static EP_DEV ep_u8* of(EpAt at) { return (ep_u8*)at.address; }
    /* Where the windows lie: 0 for ranks that are masked. */
    static EP_DEV const ep_u64* windows(const EpRank& r) { return (const ep_u64*)r.windows; }
};

#define EP_HAS_UNITS
#include "ep_verbs.h"

#include "ep_far_post.h"

/* ---- places ---- */

EP_DEV bool ep_takes_part(const EpRank& r, ep_u32 rank) { return EpNear::windows(r)[rank] != 0; }
EP_DEV EpAt ep_at(const EpRank& r, ep_u32 rank, ep_u64 offset) { return EpNear::at(EpNear::windows(r)[rank] + offset); }
EP_DEV EpAt ep_here(ep_u64 address) { return EpNear::at(address); }
EP_DEV EpAt ep_nowhere() { return EpNear::at(0); }
EP_DEV bool ep_is_somewhere(EpAt at) { return EpNear::of(at) != nullptr; }
/* Where a rank's window begins; nowhere where it takes no part. */
EP_DEV EpAt ep_begin(const EpRank& r, ep_u32 rank) { return EpNear::at(EpNear::windows(r)[rank]); }
/* The own window. */
EP_DEV ep_u8* ep_own(const EpRank& r) { return (ep_u8*)EpNear::windows(r)[r.me]; }

/* The place that a lane of the warp has. By a warp. */
EP_DEV EpAt ep_shuffle(EpAt at, ep_u32 lane) { return EpNear::at(__shfl_sync(EP_FULL, (ep_u64)EpNear::of(at), lane)); }
/* The own window's address, of a table of the windows' beginnings. */
EP_DEV ep_u8* ep_own_of(const EpAt* windows, ep_u32 me) { return EpNear::of(windows[me]); }

/* ---- put and get ---- */

EP_DEV void ep_put16(EpAt to, EpUnit unit) { ep_st16(EpNear::of(to), unit); }
EP_DEV void ep_put4(EpAt to, ep_u32 word) { *(ep_u32*)EpNear::of(to) = word; }
EP_DEV void ep_put1(EpAt to, ep_u8 byte) { *(volatile ep_u8*)EpNear::of(to) = byte; }
template <class T> EP_DEV void ep_put_message(EpAt to, const T& message) { *(T*)EpNear::of(to) = message; }
/* 16 bytes that no kernel writes meanwhile but by rules of this protocol. */
EP_DEV EpUnit ep_get16(EpAt from) {
    EpUnit v;
    asm volatile("ld.relaxed.sys.global.L1::no_allocate.v4.s32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(EpNear::of(from)) : "memory");
    return v;
}
EP_DEV ep_u32 ep_get4(EpAt from) { return *(const volatile ep_u32*)EpNear::of(from); }
EP_DEV ep_u8 ep_get1(EpAt from) { return *(const volatile ep_u8*)EpNear::of(from); }
/* What a peer has put into the own window, read as a get reads. */
EP_DEV EpUnit ep_ld16_put(const void* at) { return ep_get16(EpNear::at((ep_u64)at)); }

/* ---- fetch: what no kernel writes meanwhile but by rules of this protocol. Units past the first cache, words by it: who fetches has seen by an acquire that
   they are there. ---- */

EP_DEV void ep_fetch16(void* shared, EpAt from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((ep_u32)__cvta_generic_to_shared(shared)), "l"(EpNear::of(from)) : "memory");
}
EP_DEV void ep_fetch4(void* shared, EpAt from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"((ep_u32)__cvta_generic_to_shared(shared)), "l"(EpNear::of(from)) : "memory");
}
EP_DEV void ep_fetch_end() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int pending> EP_DEV void ep_fetch_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory"); }

/* ---- units: PTX has single loads and stores of 16 bytes from compute capability 7.0 on ---- */

EP_DEV void ep_put_unit(EpAt to, ep_u32 x, ep_u32 y, ep_u32 z, ep_u32 tag) {
    asm volatile("{ .reg .b128 unit; mov.b128 unit, {%1, %2}; st.relaxed.sys.global.b128 [%0], unit; }" ::"l"(EpNear::of(to)),
                 "l"(x | (ep_u64)y << 32), "l"(z | (ep_u64)tag << 32) : "memory");
}
EP_DEV bool ep_poll_unit(const void* at, ep_u32 tag, ep_u32* data) {
    ep_u64 low, high;
    asm volatile("{ .reg .b128 unit; ld.relaxed.sys.global.b128 unit, [%2]; mov.b128 {%0, %1}, unit; }" : "=l"(low), "=l"(high) : "l"(at) : "memory");
    data[0] = (ep_u32)low;
    data[1] = (ep_u32)(low >> 32);
    data[2] = (ep_u32)high;
    return ep_unit_has_come((ep_u32)(high >> 32), tag);
}

/* ---- publish and peek ---- */

EP_DEV void ep_raise(const EpRank& r, ep_u32 peer, ep_u32 lane, ep_u64 cell, ep_u64 value) {
    if (!ep_posts(r, peer, lane, value)) return;
    if (ep_is_beyond(r, peer)) return ep_far_raise(r, peer, lane, cell, value);
    ep_st_release(EpNear::of(ep_at(r, peer, cell)), ep_stamp(r.generation, value));
}
/* As ep_raise, of a cell whose place is at hand, and without an order of its own: the caller has fenced. */
EP_DEV void ep_raise_fenced(const EpRank& r, ep_u32 peer, ep_u32 lane, EpAt cell, ep_u64 value) {
    if (!ep_posts(r, peer, lane, value)) return;
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(EpNear::of(cell)), "l"(ep_stamp(r.generation, value)) : "memory");
}
EP_DEV void ep_publish(const EpRank& r, ep_u32 peer, ep_u32 lane, ep_u32 counter, ep_u64 value) {
    ep_raise(r, peer, lane, ep_cell(r.w, r.generation, r.me, lane, counter), value);
}
EP_DEV ep_u64 ep_look(const EpRank& r, ep_u64 cell) { return ep_value_in(r.generation, ep_ld_acquire(ep_own(r) + cell)); }
EP_DEV ep_u64 ep_peek(const EpRank& r, ep_u32 writer, ep_u32 lane, ep_u32 counter) {
    return ep_look(r, ep_cell(r.w, r.generation, writer, lane, counter));
}

#endif
