/*
 * ep_counts_kernel: tells every rank this rank's counts, learns theirs, and gives the host the sizes it must know.
 *
 *   launch   one block of 512 threads, co-resident with those of the other ranks; a warp serves one peer at a time
 *   memory   counts messages and cells of the windows; the exchange in device memory; the same in mapped host memory
 *   rules    F3: a warp's stores, a meeting, one lane's publish. F6: ep_wait. Banks: ep_wait_bank before a peer's counts bank of this operation's
 *            parity is written. Between nodes counts go along the rail first (ep_counts_far.h)
 *
 * Bad choices that ep_positions_kernel found end here, before anything has moved; and so do more rows than there is room for, once
 * all counts are known. What is enqueued behind, before the host knows the counts, hears whether it has room (EpLocal.ahead).
 */
#include "ep_wait.h"

/* Writes this rank's counts to a place. By a warp. */
EP_DEV void ep_write_counts(const EpRank& r, const EpCountsArgs& a, EpAt at) {
    const ep_u32 lane = ep_warp_lane(), ranks = r.w.ranks;
    const EpAt numbers = at + sizeof(EpCountsHeader);
    if (lane == 0) ep_put_message(at, EpCountsHeader{ep_header(r, 0, 0), a.tokens, a.room, {0, 0}});
    const ep_u32 more = ep_planted(r, EP_PLANT_COUNT_OFF_BY_ONE) ? 1 : 0;
    for (ep_u32 i = lane; i < ranks; i += 32) ep_put4(numbers + i * 4, ((const ep_u32*)a.rows)[i] + more);
    for (ep_u32 i = lane; i < r.w.experts; i += 32) {
        const ep_u32 choices = ((const ep_u32*)a.choices)[i], less = ep_planted(r, EP_PLANT_CHOICE_UNTOLD) && choices > 0;
        ep_put4(numbers + (ranks + i) * 4, choices - less);
    }
}

/* Opens the operation towards a peer, and waits until its bank may be written. By a warp. */
EP_DEV bool ep_open_counts(const EpRank& r, ep_u32 peer, ep_u64 began) {
    bool free = true;
    if (ep_warp_lane() == 0 && peer != r.me) {
        ep_open(r, peer);
        free = ep_wait_bank(r, peer, began);
    }
    return ep_warp_shuffle(free, 0);
}

#ifdef EP_FAR_H
#include "ep_counts_far.h"
#else
EP_DEV bool ep_is_on_rail(const EpRank&, ep_u32) { return false; }
EP_DEV bool ep_exchange_along_rail(const EpRank&, const EpCountsArgs&, ep_u64) { return true; }
EP_DEV void ep_pass_on(const EpRank&, ep_u32) {}
#endif

/* Whether rows have no room: here, in the block that what is enqueued behind has, or in the arena of some rank, where no rank says that it does not matter
   (EP_OPEN_ROOM). The counts are all there. By a block. */
EP_DEV bool ep_overflows(const EpRank& r, const EpCountsArgs& a) {
    const ep_u32* matrix = (const ep_u32*)a.matrix;
    bool open = false, more = false;
    for (ep_u32 rank = ep_thread(); rank < r.w.ranks; rank += ep_threads()) {
        ep_u32 room = 0;
        if (ep_takes_part(r, rank)) room = ((const EpCountsHeader*)(ep_own(r) + ep_counts(r.w, ep_op(r), rank)))->room;
        ep_u64 rows = 0;
        for (ep_u32 source = 0; source < r.w.ranks; ++source) rows += matrix[source * r.w.ranks + rank];
        open |= room == EP_OPEN_ROOM;
        more |= rows > room;
    }
    const bool somewhere = ep_block_any(more), any = ep_block_any(open);
    return (somewhere && !any) || ((const ep_u32*)a.first_of)[r.w.ranks] > a.ahead;
}

/* Who puts the counts of source into this window: itself along the rail and within the node, else its gate. */
EP_DEV ep_u32 ep_counts_writer(const EpRank& r, ep_u32 source) {
    const ep_u32 gate = ep_gate(r, source);
    return gate == r.me ? source : gate;
}

EP_KERNEL(EP_COUNTS_THREADS) ep_counts_kernel(EP_GIVEN(EpRank) r, EP_GIVEN(EpCountsArgs) a) {
    if (ep_block_any(ep_closed(r))) return;
    if (ep_thread() == 0) ep_local(r)->ahead = 0;
    const ep_u64 began = ep_now(), op = ep_op(r);
    const ep_u32 tid = ep_thread(), lane = ep_warp_lane(), warp = tid / 32, warps = EP_COUNTS_THREADS / 32;
    const ep_u32 ranks = r.w.ranks, experts = r.w.experts, local = r.w.local_experts;
    const ep_u32 bad = ep_local(r)->bad_token;
    if (bad != 0) {
        ep_block_meet();
        if (tid == 0) {
            ep_local(r)->bad_token = 0;
            if (a.refuses) ep_report(r, op, EP_STATUS_BAD_ROUTING, 0, r.me, r.me, 0, bad - 1, 0, 0, 0);
            else ep_fail(r, EP_STATUS_BAD_ROUTING, 0, r.me, r.me, 0, bad - 1, 0, 0, 0);
        }
        for (ep_u32 e = tid; e < experts; e += EP_COUNTS_THREADS) ((ep_u32*)a.choices)[e] = 0;
        return;
    }
    const ep_u32* choices = (const ep_u32*)a.choices;
    const bool speaks = ep_exchange_along_rail(r, a, began);
    for (ep_u32 peer = warp; speaks && peer < ranks; peer += warps) {
        if (!ep_takes_part(r, peer) || ep_is_beyond(r, peer) || !ep_open_counts(r, peer, began)) continue;
        ep_write_counts(r, a, ep_at(r, peer, ep_counts(r.w, ep_planted(r, EP_PLANT_WRONG_BANK) ? op + 1 : op, r.me)));
        if (peer != r.me) ep_pass_on(r, peer);
        ep_warp_meet();
        if (lane == 0) {
            ep_fence_sys();
            ep_publish(r, peer, EP_LANE_CONTROL, EP_COUNTER_COUNTS, op);
        }
    }
    ep_block_meet();
    ep_u32* matrix = (ep_u32*)a.matrix;
    volatile ep_u32* host = a.host ? (volatile ep_u32*)a.host + 4 : nullptr;
    for (ep_u32 source = warp; source < ranks; source += warps) {
        bool there = true;
        if (ep_takes_part(r, source)) {
            const ep_u8* at = ep_own(r) + ep_counts(r.w, op, source);
            if (lane == 0) {
                there = ep_wait(r, ep_counts_writer(r, source), EP_LANE_CONTROL, EP_COUNTER_COUNTS, op, EP_PHASE_COUNTS, began) &&
                        ep_check_header(r, ((const EpCountsHeader*)at)->opening, source);
                if (there) {
                    const ep_u32 tokens = ((const EpCountsHeader*)at)->tokens;
                    if (host) host[source] = tokens;
                    if (host) host[ranks + ranks * ranks + local + source] = ((const EpCountsHeader*)at)->room;
                    ((ep_u32*)a.tokens_of)[source] = tokens;
                    if (a.rail_tokens != 0 && tokens > a.rail_tokens && ep_is_on_rail(r, source)) {
                        ep_fail_mismatch(r, source, EP_FIELD_TOKENS, a.rail_tokens, tokens);
                        there = false;
                    }
                }
            }
            there = ep_warp_shuffle(there, 0);
            ep_warp_meet();
            const ep_u32* numbers = (const ep_u32*)(at + sizeof(EpCountsHeader));
            if (there)
                for (ep_u32 i = lane; i < ranks; i += 32) {
                    const ep_u32 sent = numbers[i];
                    matrix[source * ranks + i] = sent;
                    if (host) host[ranks + source * ranks + i] = sent;
                }
        } else {
            if (lane == 0) {
                ((ep_u32*)a.tokens_of)[source] = 0;
                if (host) host[source] = 0;
                if (host) host[ranks + ranks * ranks + local + source] = 0;
            }
            for (ep_u32 i = lane; i < ranks; i += 32) {
                matrix[source * ranks + i] = 0;
                if (host) host[ranks + source * ranks + i] = 0;
            }
        }
    }
    if (ep_block_any(ep_failed(r))) return;
    /* Prefix sums. */
    for (ep_u32 dst = tid; dst <= ranks; dst += EP_COUNTS_THREADS) {
        ep_u64 sum = 0;
        if (dst < ranks) {
            for (ep_u32 source = 0; source < r.me; ++source) sum += matrix[source * ranks + dst];
            ((ep_u32*)a.first_at)[dst] = (ep_u32)sum;
            for (ep_u32 source = r.me; source < ranks; ++source) sum += matrix[source * ranks + dst];
            if (sum >= 1ull << 31) ep_fail_mismatch(r, r.me, EP_FIELD_ROWS_TOO_MANY, 31, 32);
        }
        sum = 0;
        for (ep_u32 source = 0; source < dst; ++source) sum += matrix[source * ranks + r.me];
        ((ep_u32*)a.first_of)[dst] = (ep_u32)sum;
        if (dst == ranks && a.bound != 0 && sum > a.bound) ep_fail_mismatch(r, r.me, EP_FIELD_WORST_ROWS, a.bound, sum);
        if (dst == ranks && a.received) *(ep_u32*)a.received = (ep_u32)sum;
    }
    if (ep_block_any(ep_failed(r))) return;
    /* Choices of the own experts, of all sources; saturating. */
    for (ep_u32 e = tid; e < local; e += EP_COUNTS_THREADS) {
        ep_u64 sum = 0;
        for (ep_u32 source = 0; source < ranks; ++source)
            if (ep_takes_part(r, source)) {
                const ep_u8* at = ep_own(r) + ep_counts(r.w, op, source) + sizeof(EpCountsHeader);
                sum += ((const ep_u32*)at)[ranks + r.me * local + e];
            }
        if (sum > 0xffffffffull) sum = 0xffffffffull;
        if (host) host[ranks + ranks * ranks + e] = (ep_u32)sum;
        ((ep_u32*)a.arrived)[e] = (ep_u32)sum;
        if (r.tally) ((ep_u64*)r.tally)[4 * ranks + e] += sum;
        if (a.of_expert) {
            const ep_u64 up = (sum + a.alignment - 1) / a.alignment * a.alignment;
            ((ep_u32*)a.of_expert)[e] = up < 1ull << 32 ? (ep_u32)up : 0xffffffffu / a.alignment * a.alignment;
        }
    }
    for (ep_u32 e = tid; e < experts; e += EP_COUNTS_THREADS) {
        ((ep_u32*)a.chosen)[e] = choices[e];
        ((ep_u32*)a.choices)[e] = 0;
    }
    if (tid == 0) ((EpPlan*)r.plan)->op = op;
    const bool ahead = a.ahead != 0 && (ep_planted(r, EP_PLANT_AHEAD_WITHOUT_ROOM) || !ep_overflows(r, a));
    ep_block_meet();
    if (tid == 0 && host && !ep_failed(r)) {
        ep_local(r)->ahead = ahead;
        host[2 * ranks + ranks * ranks + local] = ahead;
        ((volatile ep_u64*)a.host)[1] = op;
        ep_fence_sys();
        ep_st_release((void*)a.host, a.ticket);
    }
}
