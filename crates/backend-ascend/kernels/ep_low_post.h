/*
 * ep_low_post.h: low latency between servers: each coordinator but the first, which is the control core, holds the queues to some ranks of other servers,
 * one a rank. It never waits for one of them: it looks at what is staged for all of them by turns.
 *
 *   rows     what the rank's shares have staged, each a message of its own, in the order in which it was staged
 *   arrival  behind the rows of all shares, a message of 8 bytes on the same queue (ep_roce.h, F3)
 *   control  for whom this rank waits, and what it has received
 *   F5       staging memory is free where all that was posted before this launch is acknowledged: shares wait for that as they do for a bank
 *   UB       64 bytes a queue
 */
#ifndef EP_LOW_POST_H
#define EP_LOW_POST_H
#include "ep_low_send.h"
#include "ep_roce.h"

/* Ranks of other servers, at most. */
#define EP_LOW_FAR EP_RANKS
#define EP_LOW_POST_BYTES (EP_LOW_FAR * EP_QUEUE_UB_BYTES)

struct EpLowPoster {
    EpPoster queue;
    ep_u32 rank;
    ep_u32 posted[EP_LOW_HELPERS]; /* of what each share has staged */
    ep_u32 before;                 /* elements posted before this launch, ever */
    bool free;                     /* all of them are done */
    bool over;                     /* it is known what became of the rank in this half */
    bool stuck;                    /* there is something to post, and no room */
    bool announced;                /* by a fault, too early */
    ep_u64 waiting, received;      /* as it was told last */
};

EP_DEV void ep_low_far_open(EpCore& c, const EpLowArgs& a, EpLowPoster& p, ep_u32 rank, const EpBytes& ub) {
    p.rank = rank;
    ep_queue_open(p.queue, c.launch.queues + (ep_u64)rank * sizeof(EpQueue), ub);
    for (ep_u32 nth = 0; nth < EP_LOW_HELPERS; ++nth) p.posted[nth] = 0;
    p.before = p.queue.head;
    p.free = p.announced = p.stuck = false;
    p.over = a.receives != 0 || (a.to >> rank & 1) == 0;
    p.waiting = ep_fresh<uint64_t>(ep_low_mail_of(c, a, EP_LOW_MAIL_SAID_WAITING, rank));
    p.received = ep_fresh<uint64_t>(ep_low_mail_of(c, a, EP_LOW_MAIL_SAID_RECEIVED, rank));
}

/* Keeps all counts for the next launch. */
EP_DEV void ep_low_far_close(EpCore& c, const EpLowArgs& a, const EpLowPoster& p) {
    ep_queue_close(c, p.queue);
    ep_store_word(c, ep_low_mail_of(c, a, EP_LOW_MAIL_SAID_WAITING, p.rank), p.waiting, 8);
    ep_store_word(c, ep_low_mail_of(c, a, EP_LOW_MAIL_SAID_RECEIVED, p.rank), p.received, 8);
}

/* Whether the card may still do what was posted to a rank: there is time, and the rank has not gone. */
EP_DEV bool ep_low_may_last(const EpCore& c, const EpLowPoster& p) {
    const ep_u64 allowed = c.launch.r.allowed;
    return ep_waited(c) <= allowed + allowed / 4 && !p.queue.broken && ep_fresh<uint32_t>(ep_gone_at(c.launch.r.local, p.rank)) == 0;
}

/* Posts that a cell of the rank's window becomes a value. There is room. */
EP_DEV void ep_low_post_cell(EpCore& c, EpPoster& queue, ep_u32 rank, ep_u32 lane, ep_u32 counter, ep_u64 value) {
    const EpRank& r = c.launch.r;
    ep_queue_publish(c, queue, ep_window(c, rank) + ep_cell(r.w, r.generation, r.me, lane, counter), ep_stamp(r.generation, value));
}

/* Says one of the control core's words, if it is news; whether it still is. */
EP_DEV bool ep_low_far_say(EpCore& c, const EpLowArgs& a, EpLowPoster& p, ep_u32 what, ep_u64& said, ep_u32 lane, ep_u32 counter) {
    const ep_u64 word = ep_fresh<uint64_t>(ep_low_mail_own(c, a, what));
    if (word == said) return false;
    if (!ep_queue_has_room(c, p.queue, 1)) return true;
    ep_low_post_cell(c, p.queue, p.rank, lane, counter, word);
    said = word;
    return false;
}
EP_DEV bool ep_low_far_speak(EpCore& c, const EpLowArgs& a, EpLowPoster& p) {
    bool more = false;
    if (!EP_PLANTED(c, LOW_FAR_SILENT)) more |= ep_low_far_say(c, a, p, EP_LOW_MAIL_WAITING, p.waiting, EP_LANE_WATCH, EP_COUNTER_WAITING);
    if (!EP_PLANTED(c, LOW_FAR_UNRECEIVED)) more |= ep_low_far_say(c, a, p, EP_LOW_MAIL_RECEIVED, p.received, EP_LANE_LOW_DONE, EP_COUNTER_RECEIVED);
    return more;
}

/* Tells the rank that so many rows of this operation lie in its bank. There is room. */
EP_DEV void ep_low_far_announce(EpCore& c, const EpLowArgs& a, EpLowPoster& p, ep_u32 rows) {
    if (!p.announced) ep_low_post_cell(c, p.queue, p.rank, EP_LANE_LOW_ROWS, ep_low_counter(c), ep_arrival(c.launch.r.w, c.op, a.kind, rows));
    p.announced = true;
}

/* Posts what a share has staged. False where the queue has no room for all. */
EP_DEV bool ep_low_far_rows(EpCore& c, const EpLowArgs& a, EpLowPoster& p, ep_u32 share, ep_u32& posted) {
    const EpRank& r = c.launch.r;
    const ep_u64 word = ep_fresh<uint64_t>(ep_low_mail_staged(a, share)), part = ep_low_part(r.w, ep_low_put_op(c), r.me);
    const ep_u32 staged = word >> 32 == (a.ticket & 0xffffffff) ? (ep_u32)word : 0, before = posted;
    const ep_u32 bytes = (ep_u32)(a.kind == EP_LOW_DISPATCH ? r.w.wire_bytes : r.w.low_result_header_bytes + r.w.result_bytes);
    while (posted < staged && ep_queue_has_room(c, p.queue, 2)) {
        const ep_u64 offset = ep_fresh<uint64_t>(ep_low_list(c, a, share) + (ep_u64)posted * 8);
        ep_queue_element(c, p.queue, ep_low_staging_of(c, a, p.rank) + offset - part, ep_window(c, p.rank) + offset,
                         EP_PLANTED(c, LOW_FAR_CUT) ? r.w.header_bytes : bytes);
        ++posted;
    }
    if (posted != before) ep_queue_ring(c, p.queue);
    return posted == staged;
}

/* Posts what is staged for a rank, and behind all of it the arrival. Whether something is left to post. */
EP_DEV bool ep_low_far_send(EpCore& c, const EpLowArgs& a, EpLowPoster& p) {
    const ep_u32 each = EP_PLANTED(c, LOW_FAR_HELPERS_UNAWAITED) ? 1 : ep_low_each(c), first = ep_low_share(c, p.rank);
    ep_u32 rows = 0, told = 0, state = EP_LOW_SENT;
    for (ep_u32 nth = 0; nth < each; ++nth) {
        /* Asked first: what was staged before the end is seen below. */
        const ep_u64 word = ep_fresh<uint64_t>(ep_low_word_at(a, first + nth));
        if (word >> 32 == (a.ticket & 0xffffffff)) {
            const ep_u32 why = ep_low_why_left((ep_u32)word);
            ++told;
            if (why > state) state = why;
            if (why == EP_LOW_SENT) rows += (ep_u32)word;
        }
    }
    if (EP_PLANTED(c, LOW_FAR_ARRIVAL_FIRST) && told == each && state == EP_LOW_SENT && rows > 0) ep_low_far_announce(c, a, p, rows);
    for (ep_u32 nth = 0; nth < each; ++nth)
        if (!ep_low_far_rows(c, a, p, first + nth, p.posted[nth])) return true;
    if (told < each) return false;
    if (state == EP_LOW_SENT && (rows > 0 || a.kind == EP_LOW_DISPATCH)) {
        if (!ep_queue_has_room(c, p.queue, 1)) return true;
        ep_low_far_announce(c, a, p, rows);
    }
    ep_store_word(c, a.state + p.rank * 4, state, 4);
    p.over = true;
    return false;
}

/* A turn of a rank; whether there is something left to do. */
EP_DEV bool ep_low_far_serve(EpCore& c, const EpLowArgs& a, EpLowPoster& p) {
    if (!p.over && !p.free) {
        ep_queue_look(c, p.queue);
        p.free = (ep_i32)(p.queue.done - p.before) >= 0;
        if (p.free) ep_store_word(c, ep_low_mail_of(c, a, EP_LOW_MAIL_FREE, p.rank), a.ticket, 8);
    }
    const ep_u32 before = p.queue.head;
    const bool waits = !p.over && ep_low_far_send(c, a, p), speaks = ep_low_far_speak(c, a, p);
    p.stuck = waits && p.queue.head == before;
    if (ep_low_may_last(c, p)) return waits || speaks;
    /* What was not posted in time is left to the receiving half. */
    if (waits) {
        ep_store_word(c, a.state + p.rank * 4, EP_LOW_LATE, 4);
        p.over = true;
    }
    return false;
}

/* Rows for a rank find no room, as its card does not answer: the control core says so where that lasts, as of any wait. */
EP_DEV void ep_low_far_wait(EpCore& c, const EpLowPoster* of, ep_u32 ranks) {
    ep_u32 first = 0;
    while (first < ranks && !of[first].stuck) ++first;
    if (first == ranks) return ep_moved(c);
    if (++c.idle < 64 || c.told || EP_PLANTED(c, LOW_FAR_UNSAID)) return;
    c.told = true;
    const EpDetail detail = {of[first].rank, EP_PHASE_BANK, EP_LANE_LOW_ROWS, 0, 0, 0};
    ep_write_line(c, EpLine{0, ep_wait_key(c.op, EP_PHASE_BANK, of[first].rank), c.mark, 0, 0, detail});
}

EP_DEV void ep_low_post(EpCore& c, const EpLowArgs& a, const EpBytes& ub) {
    const EpWindow& w = c.launch.r.w;
    const ep_u32 posting = c.launch.roles.coordinators - 1, own = c.number - c.launch.roles.senders - 1;
    EpLowPoster of[EP_LOW_FAR];
    ep_u32 ranks = 0, turn = 0;
    for (ep_u32 rank = 0; rank < w.ranks; ++rank) {
        if (ep_is_near(c, rank) || turn++ % posting != own || !ep_takes_part(c, rank)) continue;
        ep_low_far_open(c, a, of[ranks], rank, ub[ranks * EP_QUEUE_UB_BYTES]);
        ++ranks;
    }
    for (;;) {
        /* Asked first: what was handed over before the end is seen below. */
        const bool over = ep_fresh<uint64_t>(ep_low_mail_own(c, a, EP_LOW_MAIL_OVER)) == a.ticket;
        if (ep_fresh<uint32_t>(EP_LOCAL(c, failed)) != 0) c.failed = true;
        bool more = false;
        for (ep_u32 i = 0; i < ranks; ++i) more |= ep_low_far_serve(c, a, of[i]);
        ep_low_far_wait(c, of, ranks);
        if (c.failed || (over && !more) || ep_waited(c) / 2 > c.launch.r.allowed) break;
    }
    for (ep_u32 i = 0; i < ranks; ++i) {
        if (!of[i].over) ep_store_word(c, a.state + of[i].rank * 4, EP_LOW_LATE, 4);
        ep_low_far_close(c, a, of[i]);
    }
}

#endif
