/*
 * ep_hca_element.h: elements of mlx5 send queues as an adapter reads them, written from the layout of their bytes alone: all big-endian.
 *
 *   control   modifier 8 | index 16 | opcode 8; queue pair 24 | 2 | segments 6; signature, stream 24 | flags 8; immediate
 *   remote    address 64, key 32, zero 32
 *   then      of a write: segments of data, length 32, key 32, address 64, or 1 << 31 | length and the bytes themselves
 *             of a fetch-add: addend 64, 64 bits unused, and a segment of data for what was there before
 *
 * An element takes one place of 64 bytes here: more segments are refused, as real adapters would not.
 */
#ifndef EP_HCA_ELEMENT_H
#define EP_HCA_ELEMENT_H
#include "ep_near.h"

#define EP_HCA_NOP 0x00u
#define EP_HCA_WRITE 0x08u
#define EP_HCA_FETCH_ADD 0x12u
/* Flags: a completion is asked for; all that there are: fences, that, and the bit of solicited events. */
#define EP_HCA_COMPLETE 0x08u
#define EP_HCA_FLAGS 0x8au
#define EP_HCA_INLINE 0x80000000u

/* Syndromes. */
#define EP_HCA_LOCAL_LENGTH 0x01u
#define EP_HCA_LOCAL_OPERATION 0x02u
#define EP_HCA_LOCAL_PROTECTION 0x04u
#define EP_HCA_FLUSHED 0x05u
#define EP_HCA_REMOTE_INVALID 0x12u
#define EP_HCA_REMOTE_ACCESS 0x13u
#define EP_HCA_RETRIES 0x15u

/* Rights of regions. */
#define EP_HCA_LOCAL_WRITE 1u
#define EP_HCA_REMOTE_WRITE 2u
#define EP_HCA_REMOTE_ATOMIC 8u

/* Own memory, by its address. */
struct EpHcaPart {
    ep_u64 at, bytes;
};

/* What an element asks for: two parts are copied one behind the other, or something is added and what was there goes into the first. */
struct EpHcaElement {
    ep_u32 opcode, flags, is_inline;
    ep_u32 fault; /* a syndrome, or 0 */
    EpHcaPart first, second;
    ep_u64 to, add;
};

EP_DEV ep_u32 ep_hca_big(ep_i32 word) {
    const ep_u32 v = (ep_u32)word;
    return v << 24 | (v & 0xff00u) << 8 | (v >> 8 & 0xff00u) | v >> 24;
}
EP_DEV ep_u64 ep_hca_wide(ep_i32 upper, ep_i32 lower) { return (ep_u64)ep_hca_big(upper) << 32 | ep_hca_big(lower); }

/* Where `bytes` bytes at an address lie that a key allows, among `count` regions; 0 where it does not. */
EP_DEV ep_u64 ep_hca_place(const EpHcaRegion* regions, ep_u32 count, bool is_remote, ep_u32 key, ep_u32 access, ep_u64 address, ep_u64 bytes) {
    for (ep_u32 i = 0; i < count; ++i) {
        const EpHcaRegion& one = regions[i];
        if ((is_remote ? one.remote_key : one.local_key) != key || (one.access & access) != access) continue;
        const ep_u64 offset = address - one.iova;
        if (bytes <= one.bytes && offset <= one.bytes - bytes) return one.base + offset;
    }
    return 0;
}

EP_DEV void ep_hca_fail(EpHcaElement& e, ep_u32 syndrome) {
    if (e.fault == 0) e.fault = syndrome;
}

/* A segment of data. */
EP_DEV EpHcaPart ep_hca_data(const EpHcaQueue& q, const EpHcaRegion* regions, EpUnit segment, ep_u32 access, EpHcaElement& e) {
    const ep_u64 length = ep_hca_big(segment.x), bytes = length == 0 ? 1ull << 31 : length;
    const ep_u64 address = ep_hca_wide(segment.z, segment.w);
    const ep_u64 at = ep_hca_place(regions + q.own, q.own_count, false, ep_hca_big(segment.y), access, address, bytes);
    if (at == 0) ep_hca_fail(e, EP_HCA_LOCAL_PROTECTION);
    return EpHcaPart{at, bytes};
}

/* What a write and a fetch-add need at the peer. */
EP_DEV void ep_hca_target(const EpHcaQueue& q, const EpHcaRegion* regions, EpUnit remote, ep_u32 access, ep_u64 bytes, EpHcaElement& e) {
    if ((q.rights & access) == 0) return ep_hca_fail(e, EP_HCA_REMOTE_INVALID);
    const ep_u64 address = ep_hca_wide(remote.x, remote.y);
    if (access == EP_HCA_REMOTE_ATOMIC && address % 8 != 0) return ep_hca_fail(e, EP_HCA_REMOTE_INVALID);
    if (bytes == 0) return;
    e.to = ep_hca_place(regions + q.peer, q.peer_count, true, ep_hca_big(remote.z), access, address, bytes);
    if (e.to == 0) return ep_hca_fail(e, EP_HCA_REMOTE_ACCESS);
    /* A region need not begin at an address that is as even as its own. */
    if (access == EP_HCA_REMOTE_ATOMIC && e.to % 8 != 0) ep_hca_fail(e, EP_HCA_REMOTE_INVALID);
}

EP_DEV void ep_hca_read_write(const EpHcaQueue& q, const EpHcaRegion* regions, ep_u64 at, const EpUnit* segment, ep_u32 segments, EpHcaElement& e) {
    const ep_u32 first = ep_hca_big(segment[2].x);
    if (segments > 2 && (first & EP_HCA_INLINE) != 0) {
        const ep_u32 bytes = first & ~EP_HCA_INLINE, room = 16 * (segments - 2) - 4;
        if (bytes > room || room - bytes >= 16) return ep_hca_fail(e, EP_HCA_LOCAL_OPERATION);
        e.is_inline = 1;
        e.first = EpHcaPart{at + 36, bytes};
    } else {
        if (segments > 2) e.first = ep_hca_data(q, regions, segment[2], 0, e);
        if (segments > 3) e.second = ep_hca_data(q, regions, segment[3], 0, e);
    }
    const ep_u64 bytes = e.first.bytes + e.second.bytes;
    if (bytes > 1ull << q.log_longest) ep_hca_fail(e, EP_HCA_LOCAL_LENGTH);
    if (e.fault == 0) ep_hca_target(q, regions, segment[1], EP_HCA_REMOTE_WRITE, bytes, e);
}

EP_DEV void ep_hca_read_add(const EpHcaQueue& q, const EpHcaRegion* regions, const EpUnit* segment, EpHcaElement& e) {
    e.add = ep_hca_wide(segment[2].x, segment[2].y);
    e.first = ep_hca_data(q, regions, segment[3], EP_HCA_LOCAL_WRITE, e);
    if (e.first.bytes != 8) e.fault = EP_HCA_LOCAL_OPERATION;
    if (e.fault == 0) ep_hca_target(q, regions, segment[1], EP_HCA_REMOTE_ATOMIC, 8, e);
}

/* Reads an element. Where the peer does not answer, nothing at its side is a fault. */
EP_DEV EpHcaElement ep_hca_read(const EpHcaQueue& q, const EpHcaRegion* regions, ep_u64 index) {
    const ep_u64 at = q.elements + 64 * (index & ((1ull << q.log_elements) - 1));
    EpUnit segment[4];
#pragma unroll
    for (ep_u32 i = 0; i < 4; ++i) segment[i] = ep_ld16_put((const void*)(at + 16 * i));
    const ep_u32 first = ep_hca_big(segment[0].x), second = ep_hca_big(segment[0].y), third = ep_hca_big(segment[0].z);
    const ep_u32 segments = second & 63;
    EpHcaElement e = {};
    e.opcode = first & 255;
    e.flags = third & 255;
    const bool is_next = first >> 8 == (ep_u32)(index & 0xffff) && second >> 8 == q.number;
    const bool is_known = (second & 0xc0) == 0 && segments >= 1 && segments <= 4 && third >> 8 == 0 && (e.flags & ~EP_HCA_FLAGS) == 0;
    if (!is_next || !is_known) e.fault = EP_HCA_LOCAL_OPERATION;
    else if (e.opcode == EP_HCA_NOP) return e;
    else if (segments >= 2 && ep_hca_big(segment[1].w) != 0) e.fault = EP_HCA_LOCAL_OPERATION;
    else if (e.opcode == EP_HCA_WRITE && segments >= 2) ep_hca_read_write(q, regions, at, segment, segments, e);
    else if (e.opcode == EP_HCA_FETCH_ADD && segments == 4) ep_hca_read_add(q, regions, segment, e);
    else e.fault = EP_HCA_LOCAL_OPERATION;
    return e;
}

#endif
