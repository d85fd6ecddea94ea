/*
 * ep_coordinate.h: coordinators between servers. Each but the first, which is the control core, holds the queues to some rail peers, one a peer:
 * all that this rank says to a peer goes through it. It never waits: it looks at the mail of all its peers by turns (ep_mail.h).
 *
 *   rows     the longest prefix of slots that is filled, in messages of up to far_chunk slots side by side; then the tail, a message of its own.
 *            Several cores may fill a ring, each every n-th slot: no lock, and no window of bits
 *   credit   what the core that empties a ring owes
 *   control  alarms, openings, ends of operations; counts and their announcement
 *   UB       64 bytes a queue
 */
#ifndef EP_COORDINATE_H
#define EP_COORDINATE_H
#include "ep_mail.h"
#include "ep_roce.h"

/* Other servers, and channels between servers, at most. */
#define EP_PEERS 3u
#define EP_FAR_CHANNELS 8u
#define EP_COORDINATE_BYTES (EP_PEERS * EP_QUEUE_UB_BYTES)

/* The two rings with a rail peer on a channel. Slots count from the start of the launch, but for `base`, `owed` and `sent`. */
struct EpHandOver {
    ep_u64 base;    /* slots sent before this launch, ever */
    ep_u64 sent;    /* slots that may be filled anew, as was told, ever */
    ep_u64 owed;    /* credit returned, ever */
    ep_u32 put;     /* slots posted */
    ep_u32 seen;    /* the prefix at the last look */
    ep_u32 ticket, upto; /* when so many elements are done, so many slots may be filled anew */
    ep_u32 last_ticket;
};

struct EpPeer {
    EpPoster queue;
    ep_u32 node, rank;
    ep_u64 said[EP_MAIL_NODE]; /* of the mail of the node the words that were posted */
    EpHandOver of[EP_FAR_CHANNELS];
};

/* Cores that fill a ring between nodes: as many senders as there are for each channel. A combine has one gatherer a ring. */
EP_DEV ep_u32 ep_fillers(const EpCore& c) {
    if (c.launch.r.kind == EP_KIND_COMBINE) return 1;
    const ep_u32 each = c.launch.roles.senders / c.launch.rings.channels;
    return each == 0 ? 1 : each > EP_FILLERS ? EP_FILLERS : each;
}

EP_DEV void ep_peer_open(EpCore& c, EpPeer& p, ep_u32 node, const EpBytes& ub) {
    const EpRank& r = c.launch.r;
    p.node = node;
    p.rank = ep_on_rail(c, node, r.me);
    ep_queue_open(p.queue, c.launch.queues + (ep_u64)p.rank * sizeof(EpQueue), ub);
    for (ep_u32 what = 0; what < EP_MAIL_NODE; ++what) p.said[what] = ep_fresh<uint64_t>(ep_mail_of_said(c, node, what));
    for (ep_u32 channel = 0; channel < c.launch.rings.channels; ++channel) {
        EpHandOver& h = p.of[channel];
        h.base = h.sent = ep_fresh<uint64_t>(ep_cursor(c, 0, p.rank, ep_far_track(r.w, channel)));
        h.owed = ep_fresh<uint64_t>(ep_mail_of_ring(c, node, channel, EP_MAIL_RETURNED));
        h.put = h.seen = h.upto = 0;
        h.ticket = h.last_ticket = p.queue.head;
    }
}

/* Keeps all counts for the next launch. */
EP_DEV void ep_peer_close(EpCore& c, EpPeer& p) {
    ep_queue_close(c, p.queue);
    for (ep_u32 what = 0; what < EP_MAIL_NODE; ++what) ep_store_word(c, ep_mail_of_said(c, p.node, what), p.said[what], 8);
    for (ep_u32 channel = 0; channel < c.launch.rings.channels; ++channel) {
        ep_store_word(c, ep_cursor(c, 0, p.rank, ep_far_track(c.launch.r.w, channel)), p.of[channel].base + p.of[channel].put, 8);
        ep_store_word(c, ep_mail_of_ring(c, p.node, channel, EP_MAIL_RETURNED), p.of[channel].owed, 8);
    }
}

/* Posts that a cell of the peer's window becomes a value. There is room. */
EP_DEV void ep_post_cell(EpCore& c, EpPeer& p, ep_u32 lane, ep_u32 counter, ep_u64 bits) {
    const EpRank& r = c.launch.r;
    ep_queue_publish(c, p.queue, ep_window(c, p.rank) + ep_cell(r.w, r.generation, r.me, lane, counter), bits);
}

/* Says one of the control core's words, if it is news; whether it was. What a full queue keeps back is still to be said. */
EP_DEV bool ep_say(EpCore& c, EpPeer& p, ep_u32 what, ep_u32 lane, ep_u32 counter) {
    const ep_u64 word = ep_fresh<uint64_t>(ep_mail_of_node(c, p.node, what));
    if (word == p.said[what]) return false;
    if (!ep_queue_has_room(c, p.queue, 2)) return true;
    /* The counts that it announces lie at the same place everywhere. */
    if (what == EP_MAIL_COUNTS) {
        const EpRank& r = c.launch.r;
        const ep_u64 at = ep_counts(r.w, ep_value_in(r.generation, word), r.me);
        const ep_u32 bytes = (ep_u32)sizeof(EpCountsHeader) + (r.w.ranks + r.w.experts) * 4;
        ep_queue_element(c, p.queue, c.own + at, ep_window(c, p.rank) + at, bytes);
    }
    ep_post_cell(c, p, lane, counter, word);
    p.said[what] = word;
    return true;
}

/* Slots that are filled without a gap. */
EP_DEV ep_u32 ep_filled_prefix(const EpCore& c, ep_u32 node, ep_u32 channel) {
    const ep_u32 fillers = ep_fillers(c);
    ep_u32 prefix = ~0u;
    for (ep_u32 filler = 0; filler < fillers; ++filler) {
        const ep_u64 word = ep_fresh<uint64_t>(ep_mail_of_ring(c, node, channel, EP_MAIL_FILLED + filler));
        const ep_u32 upto = ep_filled_in(c, word) * fillers + filler;
        if (EP_PLANTED(c, GAPS_SENT) ? prefix == ~0u || upto > prefix + 1 : upto < prefix) prefix = upto;
    }
    return prefix;
}

/* Sends what lies ready on a channel: slots side by side both here and there, a chunk at most. Less than a chunk goes when no more has come
   since the last look. Whether there was something to send. */
EP_DEV bool ep_send_rows(EpCore& c, EpPeer& p, ep_u32 channel) {
    const EpRank& r = c.launch.r;
    const EpRings& rings = c.launch.rings;
    EpHandOver& h = p.of[channel];
    const ep_u32 filled = ep_filled_prefix(c, p.node, channel), track = ep_far_track(r.w, channel);
    if (filled <= h.put) return false;
    if (filled - h.put < rings.far_chunk && filled != h.seen) {
        h.seen = filled;
        return true;
    }
    if (!ep_queue_has_room(c, p.queue, 2)) return !EP_PLANTED(c, LEFT_UNSENT);
    const ep_u32 depth = ep_staging_slots(r.w, rings, track), from = h.put % depth, to = h.put % rings.far_slots;
    ep_u32 slots = filled - h.put < rings.far_chunk ? filled - h.put : rings.far_chunk;
    if (slots > depth - from) slots = depth - from;
    if (slots > rings.far_slots - to) slots = rings.far_slots - to;
    const ep_u32 lane = ep_lane_data(track), bytes = slots * rings.far_slot_bytes;
    const ep_u64 tail = ep_stamp(r.generation, h.base + h.put + slots);
    if (EP_PLANTED(c, TAIL_FIRST)) ep_post_cell(c, p, lane, EP_COUNTER_TAIL, tail);
    ep_queue_element(c, p.queue, c.own + ep_staging_slot(r.w, rings, p.rank, track, from),
                     ep_window(c, p.rank) + ep_ring_slot(r.w, rings, r.me, track, to), bytes);
    if (!EP_PLANTED(c, TAIL_FIRST)) ep_post_cell(c, p, lane, EP_COUNTER_TAIL, tail);
    h.put += slots;
    h.last_ticket = p.queue.head;
    return true;
}

/* Gives slots back that the card has read. */
EP_DEV bool ep_free_staging(EpCore& c, EpPeer& p, ep_u32 channel) {
    EpHandOver& h = p.of[channel];
    if (h.upto == 0 && h.sent == h.base + h.put) return false;
    if (h.upto == 0) {
        h.upto = h.put;
        h.ticket = h.last_ticket;
    }
    if ((ep_i32)(p.queue.done - h.ticket) < 0) ep_queue_look(c, p.queue);
    if ((ep_i32)(p.queue.done - h.ticket) < 0 && !EP_PLANTED(c, STAGING_EARLY)) return false;
    h.sent = h.base + h.upto;
    h.upto = 0;
    ep_store_word(c, ep_mail_of_ring(c, p.node, channel, EP_MAIL_SENT), h.sent, 8);
    return true;
}

/* Returns the credit that is owed on a channel; whether there was some. */
EP_DEV bool ep_send_credit(EpCore& c, EpPeer& p, ep_u32 channel) {
    EpHandOver& h = p.of[channel];
    const ep_u64 owed = ep_fresh<uint64_t>(ep_mail_of_ring(c, p.node, channel, EP_MAIL_OWED));
    if (owed <= h.owed || EP_PLANTED(c, FAR_CREDIT_LOST)) return false;
    if (!ep_queue_has_room(c, p.queue, 1)) return true;
    h.owed = owed;
    ep_post_cell(c, p, ep_lane_credit(ep_far_track(c.launch.r.w, channel)), EP_COUNTER_HEAD, ep_stamp(c.launch.r.generation, owed));
    return true;
}

/* Whether the card may still do what was posted to a peer: there is time, and the peer has not gone. */
EP_DEV bool ep_may_last(const EpCore& c, const EpPeer& p) {
    const ep_u64 allowed = c.launch.r.allowed;
    return ep_waited(c) <= allowed + allowed / 4 && !p.queue.broken && ep_fresh<uint32_t>(ep_gone_at(c.launch.r.local, p.rank)) == 0;
}

/* A turn of a peer; whether there was something to do. A rank that has failed says so, and nothing else. */
EP_DEV bool ep_serve(EpCore& c, EpPeer& p) {
    if (!ep_may_last(c, p)) return false;
    bool moved = ep_say(c, p, EP_MAIL_ALARM, EP_LANE_WATCH, EP_COUNTER_ALARM);
    if (c.failed) return moved;
    moved |= ep_say(c, p, EP_MAIL_OPENING, EP_LANE_WATCH, EP_COUNTER_OPENING);
    moved |= ep_say(c, p, EP_MAIL_COUNTS, EP_LANE_CONTROL, EP_COUNTER_COUNTS);
    for (ep_u32 channel = 0; channel < c.launch.rings.channels; ++channel) {
        moved |= ep_send_credit(c, p, channel);
        moved |= ep_send_rows(c, p, channel);
        moved |= ep_free_staging(c, p, channel);
    }
    return moved;
}

/* Waits until the card has done what was posted, so that the next launch finds the rings' memory free. A peer that is gone, and the end of the
   time allowed, end it. */
EP_DEV void ep_drain(EpCore& c, EpPeer& p) {
    while (p.queue.done != p.queue.head) {
        ep_queue_look(c, p.queue);
        if (!ep_may_last(c, p)) return;
    }
    /* What was told of may lag behind what was posted by two steps. */
    for (ep_u32 channel = 0; channel < c.launch.rings.channels; ++channel)
        while (ep_free_staging(c, p, channel)) {}
}

/* The `nth` of so many coordinators that post. `ub`: EP_COORDINATE_BYTES. */
EP_DEV void ep_coordinate(EpCore& c, const EpBytes& ub, ep_u32 nth, ep_u32 posting) {
    const EpWindow& w = c.launch.r.w;
    EpPeer of[EP_PEERS];
    ep_u32 peers = 0, turn = 0;
    for (ep_u32 node = 0; node < w.nodes; ++node) {
        if (node == ep_own_node(c) || turn++ % posting != nth || !ep_takes_part(c, ep_on_rail(c, node, c.launch.r.me))) continue;
        ep_peer_open(c, of[peers], node, ub[peers * EP_QUEUE_UB_BYTES]);
        ++peers;
    }
    for (;;) {
        /* Asked first: what was handed over before the end is seen below. */
        const bool over = ep_fresh<uint64_t>(ep_mail_over(c)) == c.mark;
        if (ep_fresh<uint32_t>(EP_LOCAL(c, failed)) != 0) c.failed = true;
        bool more = false;
        for (ep_u32 i = 0; i < peers; ++i) more |= ep_serve(c, of[i]);
        if ((over && !more) || ep_waited(c) > 2 * c.launch.r.allowed) break;
    }
    for (ep_u32 i = 0; i < peers; ++i) {
        /* The end of an operation is said behind all else. */
        while (!c.failed && ep_may_last(c, of[i]) && ep_say(c, of[i], EP_MAIL_DONE, EP_LANE_CONTROL, EP_COUNTER_DONE)) {}
        /* A rank that has failed waits, too: until its verdict is there, its queues must not be closed. */
        if (!c.failed || !EP_PLANTED(c, VERDICT_UNPOSTED)) ep_drain(c, of[i]);
        ep_peer_close(c, of[i]);
    }
}

#endif
