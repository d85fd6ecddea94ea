/*
 * ep_send.h: senders of a dispatch. A sender core serves channels, one after the other, ascending: the rows of a contiguous share of the
 * tokens, to all ranks of the server (ep_fill.h), and to the rail peers of other servers (ep_far_send.h).
 */
#ifndef EP_SEND_H
#define EP_SEND_H
#include "ep_far_send.h"

/* A token's choices as a destination sees them. */
struct EpSentChoice {
    const EpCore& c;
    const EpDispatchArgs& a;
    ep_u32 destination, token;
    EP_DEV EpChoice operator()(ep_u32 k) const { return ep_choice(c, a.topk_idx, a.topk_weights, destination, token, k); }
};

/* Puts the next token of a stream. There is one. */
struct EpSend {
    const EpDispatchArgs& a;
    EP_DEV void operator()(EpCore& c, EpBuffers& b, EpStream& s) const {
        const EpWindow& w = c.launch.r.w;
        ep_i32 position;
        while ((position = ep_at<int32_t>(a.position, (ep_u64)s.next * w.ranks + s.to.peer)) < 0) ++s.next;
        const ep_u32 token = s.next++;
        ep_put_row(c, b, s, token, (ep_u32)position, EpSentChoice{c, a, s.to.peer, token}, a.x + token * a.x_stride, w.payload_bytes);
    }
};

/* The part of a channel's rows that a core sends: all to the ranks of the server, if it is the first of the channel's cores, and its share of
   those to other servers. */
EP_DEV void ep_send_channel(EpCore& c, const EpDispatchArgs& a, EpBuffers& b, ep_u32 channel, ep_u32 filler) {
    const EpRank& r = c.launch.r;
    const ep_u32 channels = c.launch.rings.channels;
    const ep_u32 begin = ep_channel_first(a.tokens, channels, channel), end = ep_channel_first(a.tokens, channels, channel + 1);
    EpStream of[EP_STREAMS];
    ep_u32 streams = 0;
    for (ep_u32 peer = 0; peer < r.w.ranks && filler == 0; ++peer) {
        if (peer == r.me || !ep_is_near(c, peer) || !ep_takes_part(c, peer)) continue;
        ep_u32 first = 0, rows = 0;
        for (ep_u32 token = begin; token < end; ++token) {
            const ep_i32 position = ep_at<int32_t>(a.position, (ep_u64)token * r.w.ranks + peer);
            if (position >= 0 && rows++ == 0) first = (ep_u32)position;
        }
        ep_stream_begin(c, of[streams++], peer, ep_own_track(r.w, r.me, channel), begin, first, rows);
    }
    EpFarSend far = {a, {}, 0};
    far.begin(c, channel, filler);
    ep_fill_all(c, b, of, streams, EpSend{a}, far);
}

#endif
