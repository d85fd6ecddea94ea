/*
 * ep_mail.h: what the cores of a rank hand to its coordinators, and these to them: counts in the rank's own memory, each with one writer.
 *
 *   a ring to a node     EP_MAIL_FILLED: slots of the staging memory that a filling core has filled in this launch. EP_MAIL_SENT: slots that may be
 *                        filled anew, ever
 *   a ring from a node   EP_MAIL_OWED: slots that have been emptied, ever. EP_MAIL_RETURNED: what of that the coordinator has
 *                        posted, kept between launches
 *   a node               EP_MAIL_ALARM, EP_MAIL_OPENING, EP_MAIL_DONE: what the control core says to the rail peer. EP_MAIL_COUNTS: the operation whose
 *                        counts lie ready
 *   the rank             ep_mail_over: the launch of which nothing more comes
 */
#ifndef EP_MAIL_H
#define EP_MAIL_H
#include "ep_npu.h"

/* Cores that fill a ring between nodes at most. */
#define EP_FILLERS 4u
#define EP_MAIL_FILLED 0u
#define EP_MAIL_SENT EP_FILLERS
#define EP_MAIL_OWED (EP_FILLERS + 1)
#define EP_MAIL_RETURNED (EP_FILLERS + 2)
#define EP_MAIL_RING (EP_FILLERS + 3)
#define EP_MAIL_ALARM 0u
#define EP_MAIL_OPENING 1u
#define EP_MAIL_DONE 2u
#define EP_MAIL_COUNTS 3u
#define EP_MAIL_NODE 4u

/* Of the rings with a node on a channel. */
EP_DEV ep_u64 ep_mail_of_ring(const EpCore& c, ep_u32 node, ep_u32 channel, ep_u32 what) {
    return c.launch.mail + (((ep_u64)node * c.launch.r.w.channels + channel) * EP_MAIL_RING + what) * 8;
}
EP_DEV ep_u64 ep_mail_of_node(const EpCore& c, ep_u32 node, ep_u32 what) {
    const EpWindow& w = c.launch.r.w;
    return c.launch.mail + ((ep_u64)w.nodes * w.channels * EP_MAIL_RING + (ep_u64)node * EP_MAIL_NODE + what) * 8;
}
/* What a coordinator has posted of that, kept between launches. */
EP_DEV ep_u64 ep_mail_of_said(const EpCore& c, ep_u32 node, ep_u32 what) { return ep_mail_of_node(c, c.launch.r.w.nodes + node, what); }
EP_DEV ep_u64 ep_mail_over(const EpCore& c) { return ep_mail_of_node(c, 2 * c.launch.r.w.nodes, 0); }

/* Filled slots count from the start of the launch: its mark stands above them. */
EP_DEV ep_u64 ep_filled_word(const EpCore& c, ep_u32 slots) { return c.mark << 32 | slots; }
EP_DEV ep_u32 ep_filled_in(const EpCore& c, ep_u64 word) { return word >> 32 == (c.mark & 0xffffffff) ? (ep_u32)word : 0; }

EP_DEV ep_u32 ep_node_of(const EpCore& c, ep_u32 rank) { return rank / c.launch.r.w.ranks_per_node; }
EP_DEV ep_u32 ep_own_node(const EpCore& c) { return ep_node_of(c, c.launch.r.me); }
EP_DEV bool ep_is_near(const EpCore& c, ep_u32 rank) { return ep_node_of(c, rank) == ep_own_node(c); }
/* The rank of a node that is on the rail of another rank. */
EP_DEV ep_u32 ep_on_rail(const EpCore& c, ep_u32 node, ep_u32 rank) {
    return node * c.launch.r.w.ranks_per_node + rank % c.launch.r.w.ranks_per_node;
}
/* Ranks that this one has lanes with: those of its server, and of its rail. */
EP_DEV bool ep_is_neighbour(const EpCore& c, ep_u32 rank) {
    const EpRank& r = c.launch.r;
    return rank != r.me && (ep_is_near(c, rank) || rank % r.w.ranks_per_node == r.me % r.w.ranks_per_node) && ep_takes_part(c, rank);
}

/* Raises one of the control core's cells: at a rank of the server itself, at the rail peer by its coordinator. */
EP_DEV void ep_announce(EpCore& c, ep_u32 peer, ep_u32 lane, ep_u32 counter, ep_u64 value, ep_u32 mail) {
    if (ep_is_near(c, peer)) return ep_publish(c, peer, lane, counter, value);
    ep_store_word(c, ep_mail_of_node(c, ep_node_of(c, peer), mail), ep_stamp(c.launch.r.generation, value), 8);
}

/* Where the count of a ring is kept between launches. side: 0 sent, 1 taken. */
EP_DEV ep_u64 ep_cursor(const EpCore& c, ep_u32 side, ep_u32 peer, ep_u32 track) {
    const EpRank& r = c.launch.r;
    return r.cursors + (((ep_u64)side * r.w.ranks + peer) * r.w.tracks + track) * 8;
}

#endif
