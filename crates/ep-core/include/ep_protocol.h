/*
 * ep_protocol.h: the rules of the protocol that roles and kernels share: pure arithmetic, without memory and without waiting.
 *
 * What ep_core says in Rust stands here a second time, and a test compares the two: cursors of rings (ep_core::ring), waits and whom to
 * blame (ep_core::blame), which message is refused (ep_core::layout), and how a payload is cut into units (ep_core::port).
 */
#ifndef EP_PROTOCOL_H
#define EP_PROTOCOL_H
#include "ep_state.h"

/* --- Cursors of a ring. Counts run on for the life of the communicator; slots are counted from `origin`, where the ring was empty. A ring
       may be held by every lane of a warp, with the same values. --- */

/* The filling end. */
struct EpProducer {
    ep_u64 origin;
    ep_u64 tail;      /* slots filled, ever */
    ep_u64 published; /* the tail that the consumer was told */
    ep_u64 head;      /* the last head that was seen */
};

/* A ring that is empty, whose counts stand at count; what the consumer has said is still to be looked at. */
EP_HD static inline EpProducer ep_producer_at(ep_u64 count) { return EpProducer{count, count, count, 0}; }

EP_HD static inline bool ep_producer_is_full(const EpProducer& p, const EpRings& r) { return p.tail - p.head >= r.slots; }

/* The head that must be seen before the next slot may be filled. */
EP_HD static inline ep_u64 ep_producer_awaits(const EpProducer& p, const EpRings& r) {
    return p.tail + 1 > r.slots ? p.tail + 1 - r.slots : 0;
}

/* The slot to fill next. Of an operation there are fewer than 2^32: a division of 64 bits takes a GPU half a microsecond. */
EP_HD static inline ep_u32 ep_producer_slot(const EpProducer& p, const EpRings& r) { return (ep_u32)(p.tail - p.origin) % r.slots; }

/* Counts a slot as filled; whether a tail is due. */
EP_HD static inline bool ep_producer_push(EpProducer& p, const EpRings& r) {
    ++p.tail;
    return p.tail - p.published >= r.chunk;
}

/* Takes note of a head; false when it claims rows that were never sent. */
EP_HD static inline bool ep_producer_saw(EpProducer& p, ep_u64 head) {
    if (head > p.tail) return false;
    p.head = head > p.head ? head : p.head;
    return true;
}

/* The emptying end. */
struct EpConsumer {
    ep_u64 origin;
    ep_u64 head;     /* slots read, ever */
    ep_u64 returned; /* the head that the producer was told */
    ep_u64 tail;     /* the last tail that was seen */
};

EP_HD static inline EpConsumer ep_consumer_at(ep_u64 count) { return EpConsumer{count, count, count, count}; }

EP_HD static inline bool ep_consumer_has_row(const EpConsumer& c) { return c.head < c.tail; }

/* The slot to read next. */
EP_HD static inline ep_u32 ep_consumer_slot(const EpConsumer& c, const EpRings& r) { return (ep_u32)(c.head - c.origin) % r.slots; }

/* Counts a slot as read; whether credit is due. */
EP_HD static inline bool ep_consumer_pop(EpConsumer& c, const EpRings& r) {
    ++c.head;
    return c.head - c.returned >= r.credit;
}

/* The highest tail that could be right. */
EP_HD static inline ep_u64 ep_consumer_limit(const EpConsumer& c, const EpRings& r) { return c.head + r.slots; }

/* Takes note of a tail; false when it claims more rows than the ring holds. */
EP_HD static inline bool ep_consumer_saw(EpConsumer& c, const EpRings& r, ep_u64 tail) {
    if (tail > ep_consumer_limit(c, r)) return false;
    c.tail = tail > c.tail ? tail : c.tail;
    return true;
}

/* --- Waits, and whom to blame. At three quarters of the time allowed, or once another rank has, a rank that waits tells all what for: of
       its waits the one nearest to the cause. In the last eighth the ranks give up in turn, lower ranks first. The first names the
       rank that waits for nobody and spreads that verdict, which all take over: so all name the same. --- */

/* A wait of the own rank: larger for waits nearer to the cause, of later operations. Never 0. */
EP_HD static inline ep_u64 ep_wait_key(ep_u64 op, ep_u32 phase, ep_u32 peer) { return op << 20 | (0xfffff - (phase << 16 | peer)); }
EP_HD static inline ep_u64 ep_key_op(ep_u64 key) { return key >> 20; }
EP_HD static inline ep_u32 ep_key_phase(ep_u64 key) { return (0xfffff - (ep_u32)(key & 0xfffff)) >> 16; }
EP_HD static inline ep_u32 ep_key_whom(ep_u64 key) { return (0xfffff - (ep_u32)(key & 0xfffff)) & 0xffff; }
EP_HD static inline ep_u32 ep_key_peer(ep_u64 key) { return ep_key_whom(key) & ~EP_IN_CIRCLE; }

/* No wait. */
#define EP_NO_WAIT 0xffffffffu
/* Where ep_wait_op has the operation that is asked about. */
#define EP_WAIT_OP 2048u

/* A wait of rank for peer, in the order of waits: the smaller, the nearer to the cause. its_op: of the operation the low bits that an alarm
   carries; operations that are near op have near numbers. whom: the peer, and EP_IN_CIRCLE or not. A wait for the rank itself was taken back, and
   is none. */
EP_HD static inline ep_u32 ep_wait_word(ep_u32 ranks, ep_u32 rank, ep_u64 op, ep_u32 its_op, ep_u32 phase, ep_u32 whom) {
    const ep_u32 peer = whom & ~EP_IN_CIRCLE;
    if (peer == rank || peer >= ranks) return EP_NO_WAIT;
    return ((its_op + EP_WAIT_OP + 4096 - (ep_u32)(op % 4096)) % 4096) << 20 | phase << 16 | whom;
}
EP_HD static inline ep_u32 ep_wait_op(ep_u32 wait) { return wait >> 20; }
EP_HD static inline ep_u32 ep_wait_peer(ep_u32 wait) { return wait & 0x7fff; }

/* What rank says by its last alarm that it waits for. */
EP_HD static inline ep_u32 ep_wait_of_alarm(ep_u32 ranks, ep_u32 rank, ep_u64 op, ep_u64 alarm) {
    if (ep_alarm_serial(alarm) == 0 || ep_alarm_verdict(alarm)) return EP_NO_WAIT;
    return ep_wait_word(ranks, rank, op, ep_alarm_op(alarm), ep_alarm_phase(alarm), ep_alarm_whom(alarm));
}

/* What the own rank has told the others (a key; 0 for nothing). */
EP_HD static inline ep_u32 ep_wait_of_key(ep_u32 ranks, ep_u32 rank, ep_u64 op, ep_u64 key) {
    return key == 0 ? EP_NO_WAIT : ep_wait_word(ranks, rank, op, (ep_u32)(ep_key_op(key) % 4096), ep_key_phase(key), ep_key_whom(key));
}

/* The key of a wait that a word says, near op. */
EP_HD static inline ep_u64 ep_key_of_wait(ep_u64 op, ep_u32 wait) {
    return ep_wait_key(op + ep_wait_op(wait) - EP_WAIT_OP, wait >> 16 & 15, wait & 0xffff);
}

/* Where not everybody hears everybody: what `wait` of rank me comes from, the wait at the end of those that explain it. Itself, as one in a circle,
   where they come back to where they began. */
template <class F> EP_HD static inline ep_u32 ep_wait_origin(ep_u32 ranks, ep_u32 me, ep_u32 wait, F wait_of) {
    ep_u32 last = wait;
    for (ep_u32 hops = 0; hops < ranks; ++hops) {
        const ep_u32 next = wait_of(ep_wait_peer(last));
        if (next == EP_NO_WAIT) return last;
        if (ep_wait_peer(next) == me) break;
        last = next;
    }
    return wait | EP_IN_CIRCLE;
}

/* Whether one rank hears the alarms of another: the two are of one node, or of one rail. */
EP_HD static inline bool ep_are_neighbours(ep_u32 ranks_per_node, ep_u32 one, ep_u32 other) {
    return one / ranks_per_node == other / ranks_per_node || one % ranks_per_node == other % ranks_per_node;
}

/* Whom to blame when the time of a wait for `awaited` is up: `wait_of(rank)` is what rank waits for, `hears(rank, peer)` whether peer would be
   heard by rank, or here. Waits for ranks that wait for nobody come first, as told by ranks that would have heard it; then waits in a circle, which
   may be one that is not heard here, and hearsay: of ranks that may wait as well. Of several the one nearest to the cause. */
template <class F, class H> EP_HD static inline ep_u32 ep_culprit(ep_u32 ranks, ep_u32 awaited, F wait_of, H hears) {
    ep_u32 root = EP_NO_WAIT, other = EP_NO_WAIT;
    for (ep_u32 rank = 0; rank < ranks; ++rank) {
        const ep_u32 wait = wait_of(rank);
        if (wait == EP_NO_WAIT) continue;
        ep_u32 next = wait;
        for (ep_u32 hops = 0; hops < ranks && next != EP_NO_WAIT && ep_wait_peer(next) != rank; ++hops) next = wait_of(ep_wait_peer(next));
        const bool is_root = wait_of(ep_wait_peer(wait)) == EP_NO_WAIT;
        if (is_root && !(wait & EP_IN_CIRCLE) && hears(rank, ep_wait_peer(wait))) root = wait < root ? wait : root;
        else if (is_root || (next != EP_NO_WAIT && ep_wait_peer(next) == rank)) other = wait < other ? wait : other;
    }
    const ep_u32 cause = root != EP_NO_WAIT ? root : other;
    return cause == EP_NO_WAIT ? awaited : ep_wait_peer(cause);
}
struct EpAllHeard {
    EP_HD bool operator()(ep_u32, ep_u32) const { return true; }
};
/* The same where everybody hears everybody. */
template <class F> EP_HD static inline ep_u32 ep_culprit(ep_u32 ranks, ep_u32 awaited, F wait_of) {
    return ep_culprit(ranks, awaited, wait_of, EpAllHeard{});
}

/* When a rank that waits tells the others, how long it is silent between two changes of what it tells, and when it gives up, in nanoseconds of the
   time allowed. Between nodes waits are relayed, and each change may cause the next: without a pause ranks would answer each other without end. */
EP_HD static inline ep_u64 ep_speaks_after(ep_u64 allowed) { return allowed / 4 * 3; }
EP_HD static inline ep_u64 ep_speaks_again_after(ep_u64 allowed) { return allowed / 256; }
/* How long whoever posts for a device may show no sign of life, where a wait is long: then its rank is the cause. It says so before the others give up, if its
   wait began with theirs. */
EP_HD static inline ep_u64 ep_stands_still_after(ep_u64 allowed) { return allowed / 16; }
EP_HD static inline ep_u64 ep_gives_up_after(ep_u64 allowed, ep_u32 ranks, ep_u32 me) {
    return allowed / 8 * 7 + allowed / 8 / ranks * me;
}

/* --- Units: 12 bytes of data and a tag, stored and seen at once (F11). A unit is four words, the tag last. --- */

/* The tag of an operation, by its number among all of the communicator, those of earlier generations included: serial % EP_UNIT_TAGS + 1, which
   needs no division. Never 0. */
EP_HD static inline ep_u32 ep_unit_tag(ep_u64 serial) {
    static_assert(EP_UNIT_TAGS == 0xffffffffull, "all numbers of 32 bits but 0 are tags");
    const ep_u64 once = (serial & EP_UNIT_TAGS) + (serial >> 32), twice = (once & EP_UNIT_TAGS) + (once >> 32);
    return (ep_u32)(twice == EP_UNIT_TAGS ? 0 : twice) + 1;
}
/* The stretch of operations that one belongs to: in the first one of each, a rank clears what it reads units from. */
EP_HD static inline ep_u64 ep_unit_era(ep_u64 serial) { return serial / EP_UNIT_ERA; }

/* Word w (0 to 2) of unit number unit of a payload of whole words; 0 behind its end. */
EP_HD static inline ep_u32 ep_unit_word(const ep_u32* payload, ep_u64 words, ep_u64 unit, ep_u32 w) {
    const ep_u64 at = unit * (EP_UNIT_DATA / 4) + w;
    return at < words ? payload[at] : 0;
}
/* Whether a unit whose last word is this one has come. */
EP_HD static inline bool ep_unit_has_come(ep_u32 last_word, ep_u32 tag) { return last_word == tag; }

/* --- Messages that are refused. --- */

/* A field that differs, and its values; EP_SAME where none does. */
#define EP_SAME 0xffffffffu
struct EpDifference {
    ep_u32 field;
    ep_u64 mine;
    ep_u64 theirs;
};

/* Of the header that opens a message or a ring, against that of the own operation. */
EP_HD static inline EpDifference ep_compare_headers(const EpOpHeader& mine, const EpOpHeader& theirs) {
    if (theirs.op != mine.op) return EpDifference{EP_FIELD_OP, mine.op, theirs.op};
    if (theirs.kind != mine.kind) return EpDifference{EP_FIELD_KIND, mine.kind, theirs.kind};
    if (theirs.settings != mine.settings) return EpDifference{EP_FIELD_SETTINGS, mine.settings, theirs.settings};
    return EpDifference{EP_SAME, 0, 0};
}

/* Of a row's header, against that of the row that is due; its token may be any. */
EP_HD static inline EpDifference ep_compare_rows(const EpRowHeader& due, const EpRowHeader& row) {
    if (row.op != due.op) return EpDifference{EP_FIELD_ROW_OP, due.op, row.op};
    if (row.source_rank != due.source_rank) return EpDifference{EP_FIELD_ROW_SOURCE, due.source_rank, row.source_rank};
    if (row.position != due.position) return EpDifference{EP_FIELD_ROW_POSITION, due.position, row.position};
    return EpDifference{EP_SAME, 0, 0};
}

/* Whether bytes from base on lie in a window; EP_NO_BASE names none. */
EP_HD static inline bool ep_is_within(const EpWindow& w, ep_u64 base, ep_u64 bytes) {
    return base == EP_NO_BASE || (base <= w.window_bytes && bytes <= w.window_bytes - base);
}

#endif
