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
#pragma unroll 1
    for (ep_u32 at = ep_warp_lane() * 16; at < bytes; at += 512 * 4) {
        EpUnit held[4];
#pragma unroll
        for (ep_u32 i = 0; i < 4; ++i)
            if (at + i * 512 < bytes) held[i] = *(const EpUnit*)(piece + at + i * 512);
#pragma unroll
        for (ep_u32 i = 0; i < 4; ++i)
            if (at + i * 512 < bytes) ep_store16(to + (at + i * 512), held[i]);
    }
}

/* Of `rows` rows those that are a warp's: how many, and the n-th of them. */
EP_DEV ep_u32 ep_rows_of(const EpTeam& team, ep_u32 rows) { return rows > team.member ? (rows - team.member + team.warps - 1) / team.warps : 0; }
EP_DEV ep_u32 ep_row_of(const EpTeam& team, ep_u32 n) { return team.member + n * team.warps; }

/* Carries those of `rows` rows, each of so many bytes, that are this warp's. from(i): where the i-th lies, in own memory. heads(): is called while the first ones
   come. put(i, at, piece, bytes), in the order of i: stores a piece, which is the row's from byte `at` on (ep_put_piece). All in units of 16. By a warp. */
template <class From, class Heads, class Put>
EP_DEV void ep_carry_rows(const EpTeam& team, ep_u32 rows, ep_u32 bytes, const From& from, const Heads& heads, const Put& put) {
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
    heads();
    ep_u32 taken = 0;
#pragma unroll 1
    for (ep_u32 i = team.member; i < rows; i += team.warps)
#pragma unroll 1
        for (ep_u32 at = 0; at < bytes; at += piece, ++taken) {
            ask(); /* Into the stage that was stored before. */
            ep_fetch_wait<EP_CARRY_STAGES - 1>();
            put(i, at, team.hold + taken % EP_CARRY_STAGES * stage, bytes - at < piece ? bytes - at : piece);
        }
}

/* What goes with a warp's rows, `each` of a row: item(i, k) for the k-th of the i-th row. Lanes serve items, so all rows wait for memory together. By a warp. */
template <class Item> EP_DEV void ep_each_item(const EpTeam& team, ep_u32 rows, ep_u32 each, const Item& item) {
    const ep_u32 items = ep_rows_of(team, rows) * each;
#pragma unroll 2
    for (ep_u32 n = ep_warp_lane(); n < items; n += 32) item(ep_row_of(team, n / each), n % each);
}
/* Words of a warp's rows, `each` of a row: read(i, w) is the w-th of the i-th row, write(i, w, word) takes it. By a warp. */
template <class Read, class Write> EP_DEV void ep_each_word(const EpTeam& team, ep_u32 rows, ep_u32 each, const Read& read, const Write& write) {
    const ep_u32 words = ep_rows_of(team, rows) * each;
#pragma unroll 1
    for (ep_u32 n = ep_warp_lane(); n < words; n += 32 * 4) {
        ep_u32 held[4];
#pragma unroll
        for (ep_u32 j = 0; j < 4; ++j)
            if (n + j * 32 < words) held[j] = read(ep_row_of(team, (n + j * 32) / each), (n + j * 32) % each);
#pragma unroll
        for (ep_u32 j = 0; j < 4; ++j)
            if (n + j * 32 < words) write(ep_row_of(team, (n + j * 32) / each), (n + j * 32) % each, held[j]);
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

/* Where a token's codes lie; and the w-th word of its scales. */
EP_DEV const ep_u8* ep_codes_of(const EpDispatchRingArgs& a, ep_u32 token) { return (const ep_u8*)a.x + (ep_u64)token * a.x_stride; }
EP_DEV ep_u32 ep_scale_of(const EpDispatchRingArgs& a, ep_u32 token, ep_u32 w) {
    return *(const volatile ep_u32*)((const ep_u8*)a.scales + (ep_u64)token * a.scales_token + w * a.scales_word);
}
#endif
