/*
 * ep_carry.h: rows by way of shared memory, piece by piece: while one is stored, the next ones come. By registers a warp has 4 KiB of a row under way, and
 * each row waits for memory anew.
 *
 *   roles    each warp of a team by itself, rows in turn
 *   memory   shared: a warp's room, of EP_CARRY_STAGES stages. A lane takes out what it has fetched itself, so no lane waits for another
 */
#ifndef EP_CARRY_H
#define EP_CARRY_H
#include "ep_dispatch_ring.h"
#include "ep_team.h"

/* Stores what has come of a row. Its place and length in units of 16. By a warp. */
template <class To> EP_DEV void ep_put_piece(To to, const ep_u8* piece, ep_u32 bytes) {
#pragma unroll 4
    for (ep_u32 at = ep_warp_lane() * 16; at < bytes; at += 512) ep_store16(to + at, *(const EpUnit*)(piece + at));
}

/* Carries those of `rows` rows, each of so many bytes, that are this warp's. from(i): where the i-th lies, in own memory. Then, in the order of i, while its
   bytes come: head(i), and put(i, at, piece, bytes) for each piece, which is the row's from byte `at` on (ep_put_piece). All in units of 16. By a warp. */
template <class From, class Head, class Put>
EP_DEV void ep_carry_rows(const EpTeam& team, ep_u32 rows, ep_u32 bytes, const From& from, const Head& head, const Put& put) {
    const ep_u32 stage = team.room / EP_CARRY_STAGES, pieces = (bytes + stage - 1) / stage;
    const ep_u32 piece = ((bytes + pieces - 1) / pieces + 511) / 512 * 512;
    ep_u32 asked = 0, asks = team.member, asks_at = 0;
    const ep_u8* source = nullptr;
    const auto ask = [&] {
        if (asks < rows) {
            if (asks_at == 0) source = from(asks);
            ep_u8* to = team.hold + asked++ % EP_CARRY_STAGES * stage;
            const ep_u32 some = bytes - asks_at < piece ? bytes - asks_at : piece;
#pragma unroll 4
            for (ep_u32 at = ep_warp_lane() * 16; at < some; at += 512) ep_fetch16(to + at, ep_here((ep_u64)source + asks_at + at));
            asks_at += piece;
            if (asks_at >= bytes) {
                asks_at = 0;
                asks += team.warps;
            }
        }
        ep_fetch_end();
    };
#pragma unroll 1
    for (ep_u32 ahead = 1; ahead < EP_CARRY_STAGES; ++ahead) ask();
    ep_u32 taken = 0;
#pragma unroll 1
    for (ep_u32 i = team.member; i < rows; i += team.warps)
#pragma unroll 1
        for (ep_u32 at = 0; at < bytes; at += piece, ++taken) {
            ask(); /* Into the stage that was stored before. */
            if (at == 0) head(i);
            ep_fetch_wait<EP_CARRY_STAGES - 1>();
            put(i, at, team.hold + taken % EP_CARRY_STAGES * stage, bytes - at < piece ? bytes - at : piece);
        }
}

/* The n-th bit that is set, of more than n. */
EP_DEV ep_u32 ep_nth_bit(ep_u32 bits, ep_u32 n) {
    ep_u32 at = 0;
#pragma unroll
    for (ep_u32 half = 16; half > 0; half /= 2) {
        const ep_u32 below = ep_bits(bits >> at & ((1u << half) - 1));
        if (n < below) continue;
        n -= below;
        at += half;
    }
    return at;
}

/* Where a token's codes lie. */
EP_DEV const ep_u8* ep_codes_of(const EpDispatchRingArgs& a, ep_u32 token) { return (const ep_u8*)a.x + (ep_u64)token * a.x_stride; }
/* Copies a token's scales. By a warp. */
template <class To> EP_DEV void ep_copy_scales(const EpRank& r, const EpDispatchRingArgs& a, To to, ep_u32 token) {
    ep_copy_words(to, (const ep_u8*)a.scales + (ep_u64)token * a.scales_token, a.scales_word, (ep_u32)r.w.scales_stride);
}
#endif
