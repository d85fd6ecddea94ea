/*
 * ep_wait.h: waits for a cell, and what opens an operation towards a peer: header, note, opening, bank.
 */
#ifndef EP_WAIT_H
#define EP_WAIT_H
#include "ep_fail.h"

/* The rare part of a wait for a cell: has anybody given up, does the peer do something else, is it gone, is time up? */
EP_DEV_APART bool ep_wait_is_vain(const EpRank& r, ep_u32 writer, ep_u32 lane, ep_u64 cell, ep_u32 phase, ep_u64 seen,
                                  ep_u64 awaited, ep_u64 began) {
    if (ep_failed(r)) return true;
    const ep_u64 op = ep_op(r);
    /* Looked at first: who is gone, or whose lanes have broken, may have delivered before, or have said why it goes. */
    const bool gone = ep_is_gone(r, writer);
    ep_u32 trouble = ep_far_trouble(r, writer);
    if (gone && ep_look(r, cell) >= awaited) return false;
    const ep_u64 waited = ep_now() - began;
    const ep_u64 turn = ep_gives_up_after(r.allowed, r.w.ranks, r.me);
    bool asked = waited >= ep_speaks_after(r.allowed);
    ep_u32 status = gone ? EP_STATUS_GONE : waited < turn ? 0 : EP_STATUS_TIMEOUT, peer = writer, culprit = writer, field = 0;
    /* What the others say: who is the cause, or that they wait themselves. */
    const auto hear = [&] {
        for (ep_u32 other = 0; other < r.w.ranks; ++other) {
            if (other == r.me || !ep_takes_part(r, other)) continue;
            const ep_u64 alarm = ep_peek(r, other, EP_LANE_WATCH, EP_COUNTER_ALARM);
            /* Of any operation: who fails in the one before delivers nothing in this one. */
            if (ep_alarm_ends(alarm, op, r.me)) {
                status = EP_STATUS_ABORTED;
                peer = other;
                culprit = ep_alarm_peer(alarm);
            } else {
                const ep_u32 wait = ep_wait_of(r, other, op);
                asked |= wait != EP_NO_WAIT && ep_wait_op(wait) == EP_WAIT_OP;
            }
        }
    };
    hear();
    const ep_u64 opening = ep_peek(r, writer, EP_LANE_WATCH, EP_COUNTER_OPENING);
    if (opening >> 3 == op && (opening & 7) != r.kind) {
        status = EP_STATUS_MISMATCH;
        field = EP_FIELD_KIND;
        awaited = r.kind;
        seen = opening & 7;
    }
    if ((status == 0 || status == EP_STATUS_TIMEOUT) && trouble == 0 && asked) {
        /* Where nothing that this rank posts leaves, whoever it waits for waits for it. */
        trouble = ep_far_poster(r);
        if (trouble != 0) {
            status = 0;
            peer = ep_far_watched(r);
            lane = EP_LANE_WATCH;
        } else if (status == EP_STATUS_TIMEOUT) {
            /* That may have taken long, and who posts may have gone on because the others have given this rank up. */
            hear();
        }
    }
    if (status == 0 && trouble != 0) {
        /* As above: lanes to a rank break when it leaves. */
        if (ep_look(r, cell) >= awaited) return false;
        status = EP_STATUS_LANE;
        field = trouble;
        culprit = ep_far_culprit(r, writer, trouble);
    }
    if (status == 0) {
        if (asked) ep_suspect(r, op, phase, writer);
        return false;
    }
    if (status == EP_STATUS_TIMEOUT) {
        /* A rank that looks late has not told the others that it waits: else who waits for it would make it the cause. */
        const ep_u32 told = ep_wait_of(r, r.me, op);
        const ep_u32 own = told != EP_NO_WAIT ? told : ep_wait_of_key(r.w.ranks, r.me, op, ep_wait_key(op, phase, writer));
        culprit = ep_culprit(r.w.ranks, writer, [&](ep_u32 rank) { return rank == r.me ? own : ep_wait_of(r, rank, op); },
                             [&](ep_u32 rank, ep_u32 peer) {
                                 const ep_u32 node = r.w.ranks_per_node;
                                 return ep_are_neighbours(node, r.me, peer) || ep_are_neighbours(node, rank, peer);
                             });
    }
    ep_fail(r, status, phase, peer, culprit, lane, seen, awaited, waited, field);
    return true;
}

EP_DEV bool ep_wait(const EpRank& r, ep_u32 writer, ep_u32 lane, ep_u32 counter, ep_u64 at_least, ep_u32 phase,
                    ep_u64 began) {
    if (!ep_verb(r, lane << 16 | counter << 12 | writer, at_least)) return false;
    const ep_u64 cell = ep_cell(r.w, r.generation, writer, lane, counter);
    for (ep_u32 spin = 1;; ++spin) {
        const ep_u64 seen = ep_look(r, cell);
        if (seen >= at_least) {
            if (spin > 64) ep_unsuspect(r, ep_op(r), phase, writer);
            return true;
        }
        if (spin % 64 == 0 && ep_wait_is_vain(r, writer, lane, cell, phase, seen, at_least, began)) return false;
#ifdef EP_FAR_H
        /* Hundreds of warps that look without a pause hold up what the driver copies between nodes, twentyfold. */
        if (spin > 16) ep_nap(100);
#endif
    }
}

/* ---- messages ---- */

EP_DEV EpOpHeader ep_header(const EpRank& r, ep_u32 rows, ep_u32 first) {
    EpOpHeader h;
    h.op = ep_op(r);
    h.kind = r.kind;
    h.rows = rows;
    h.settings = ep_settings(r);
    h.first = first;
    h.reserved = 0;
    return h;
}

/* Refuses what differs, of a message of peer. */
EP_DEV bool ep_is_same(const EpRank& r, ep_u32 peer, const EpDifference& d) {
    if (d.field == EP_SAME) return true;
    ep_fail_mismatch(r, peer, d.field, d.mine, d.theirs);
    return false;
}

/* Refuses a message of another operation. */
EP_DEV bool ep_check_header(const EpRank& r, const EpOpHeader& h, ep_u32 peer) {
    return ep_is_same(r, peer, ep_compare_headers(ep_header(r, h.rows, h.first), h));
}

/* The note of peer, by one thread; false when it does not come. */
EP_DEV bool ep_take_note(const EpRank& r, ep_u32 peer, ep_u64 began, EpNote* into) {
    if (!ep_wait(r, peer, EP_LANE_CONTROL, EP_COUNTER_NOTE, ep_op(r), EP_PHASE_NOTE, began)) return false;
    *into = *(const EpNote*)(ep_own(r) + ep_note(r.w, ep_op(r), peer));
    return ep_check_header(r, into->opening, peer);
}

/* Tells a neighbour number and kind of the operation that begins. By one thread for each rank. */
EP_DEV void ep_open(const EpRank& r, ep_u32 peer) {
    const bool far = ep_is_beyond(r, peer);
    if (far) ep_begin_speaking(r);
    ep_publish(r, peer, EP_LANE_WATCH, EP_COUNTER_OPENING, ep_op(r) << 3 | r.kind);
    if (far) ep_end_speaking(r);
}

/* Waits until peer is done with the operation before last: the bank of this one may be written. */
EP_DEV bool ep_wait_bank(const EpRank& r, ep_u32 peer, ep_u64 began) {
    const ep_u64 op = ep_op(r);
    if (op < r.first_op + 2) return true;
    return ep_wait(r, peer, EP_LANE_CONTROL, EP_COUNTER_DONE, op - 2, EP_PHASE_BANK, began);
}

#endif
