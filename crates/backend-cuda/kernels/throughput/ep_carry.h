/*
 * ep_carry.h: rows by way of shared memory, whose bytes are all under way at once. By registers a warp has 4 KiB of a row under way, and a batch's first
 * rows, or last ones, take as long as memory answers that often.
 *
 *   roles    each warp of a team by itself
 *   memory   shared: a warp's room. A lane takes out what it has fetched itself, so no lane waits for another
 */
#ifndef EP_CARRY_H
#define EP_CARRY_H
#include "ep_dispatch_ring.h"
#include "ep_team.h"

/* A row's bytes of the own memory. Both places and the length in units of 16. By a warp. */
template <class To> EP_DEV void ep_carry_row(const EpTeam& team, To to, const ep_u8* from, ep_u32 bytes) {
    for (ep_u32 done = 0; done < bytes; done += team.room) {
        const ep_u32 some = bytes - done < team.room ? bytes - done : team.room;
#pragma unroll 4
        for (ep_u32 at = ep_warp_lane() * 16; at < some; at += 512) ep_fetch16(team.hold + at, ep_here((ep_u64)from + done + at));
        ep_fetch_end();
        ep_fetch_wait<0>();
#pragma unroll 4
        for (ep_u32 at = ep_warp_lane() * 16; at < some; at += 512) ep_store16(to + (done + at), *(const EpUnit*)(team.hold + at));
    }
}

/* Codes and scales of a token's row. By a warp. */
template <class To> EP_DEV void ep_carry_payload(const EpRank& r, const EpDispatchRingArgs& a, const EpTeam& team, To codes, To scales, ep_u32 token) {
    ep_carry_row(team, codes, (const ep_u8*)a.x + (ep_u64)token * a.x_stride, (ep_u32)r.w.scales_offset);
    ep_copy_words(scales, (const ep_u8*)a.scales + (ep_u64)token * a.scales_token, a.scales_word, (ep_u32)r.w.scales_stride);
}
#endif
