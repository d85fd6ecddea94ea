/*
 * ep_pulled.h: what both ends of a dispatch through outboxes know of their channel: ep_pulled_sender.h, ep_pulled_receiver.h.
 */
#ifndef EP_PULLED_H
#define EP_PULLED_H
#include "ep_dispatch_ring.h"
#include "ep_outbox.h"

/* Where the rows of a source come from and go to, in shared memory: asked of the GPU's for each row, it would take longer than the row. */
struct EpPulledFrom {
    EpAt window;
    ep_u32 row, rows; /* the first of its rows here, and how many there are */
    ep_u32 token;     /* the first of its share */
    ep_u32 reserved;
};
static_assert(sizeof(EpPulledFrom) == EP_PULLED_FROM_BYTES, "the host makes room for another EpPulledFrom");

/* What a block knows of its channel. */
struct EpPulled {
    EpOutbox box;
    EpOutboxEnd* out; /* [ranks] */
    EpOutboxEnd* in;  /* [ranks] */
    ep_u32* laid;     /* [copiers]: tokens */
    ep_u32* written;  /* [writers]: heads */
    ep_u32* seen;     /* [pullers, ranks]: slots that a puller knows to be filled; */
    ep_u32* next;     /* [pullers, ranks]: the piece that it takes next; */
    ep_u32* pulled;   /* [pullers, ranks]: pieces that it has loaded; */
    ep_u32* log;      /* [pullers, EP_PULLED_LOG]: and of whom those are that it is loading */
    ep_u32* limit;
    ep_u32* met;      /* 1 when all notes have come, and say the same */
    EpPulledFrom* from; /* [ranks] */
    ep_u8* own;           /* the own window */
    ep_u32 own_row;       /* first of the rows that stay */
    ep_u32 begin, tokens; /* the own share */
    ep_u32 track, channel;
    ep_u32 sources; /* ranks to pull from */
};

/* The rank whose turn it is: from the own one on, so that not all begin with the same. Those that take no part have empty shares. */
EP_DEV ep_u32 ep_source_of(const EpRank& r, ep_u32 turn) {
    const ep_u32 rank = r.me + 1 + turn;
    return rank < r.w.ranks ? rank : rank - r.w.ranks;
}

EP_DEV ep_u32 ep_share_first(const EpDispatchPulledArgs& a, ep_u32 tokens, ep_u32 channel) {
    return ep_channel_first(tokens, a.ring.rings.channels, channel);
}
#endif
