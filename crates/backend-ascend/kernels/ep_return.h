/*
 * ep_return.h: returners of a combine. A returner core serves channels, one after the other, ascending: the rows that this rank holds of the
 * tokens of all sources' channels, each source's in token order (ep_fill.h).
 */
#ifndef EP_RETURN_H
#define EP_RETURN_H
#include "ep_fill.h"

/* The first of some ascending tokens that is not below token. */
EP_DEV ep_u32 ep_partition(ep_u64 tokens, ep_u64 first, ep_u32 count, ep_u32 token) {
    ep_u32 low = 0;
    while (low < count) {
        const ep_u32 middle = (low + count) / 2;
        if ((ep_u32)ep_at<int32_t>(tokens, first + middle) < token) low = middle + 1;
        else count = middle;
    }
    return low;
}

/* Whether rank has rows of source, which it must give back: the same answer at both ends of a ring. (Where both are one, none is asked.) */
EP_DEV bool ep_gives_back(const EpCore& c, const EpCombineArgs& a, ep_u32 source, ep_u32 rank) {
    return ep_takes_part(c, rank) && ep_at<uint32_t>(a.matrix, source * c.launch.r.w.ranks + rank) > 0;
}

/* A row's weights, without choices. */
struct EpReturnedChoice {
    const EpCore& c;
    const EpCombineArgs& a;
    ep_u64 row;
    EP_DEV EpChoice operator()(ep_u32 k) const {
        return EpChoice{-1, a.own_weights ? ep_at<float>(a.own_weights, row * c.launch.r.w.topk + k) : 0.0f};
    }
};

/* Puts the next row of a stream. There is one. */
struct EpReturn {
    const EpCombineArgs& a;
    EP_DEV void operator()(EpCore& c, EpBuffers& b, EpStream& s) const {
        const ep_u32 position = s.next++;
        const ep_u64 row = (ep_u64)ep_at<uint32_t>(a.first_of, s.source) + position;
        const ep_u32 token = (ep_u32)ep_at<int32_t>(a.source_token, row);
        ep_put_row(c, b, s, token, position, EpReturnedChoice{c, a, row}, a.y + row * a.y_stride, c.launch.r.w.result_bytes);
    }
};

EP_DEV void ep_return_channel(EpCore& c, const EpCombineArgs& a, EpBuffers& b, ep_u32 channel) {
    const EpRank& r = c.launch.r;
    const ep_u32 channels = c.launch.rings.channels;
    EpStream of[EP_STREAMS];
    ep_u32 streams = 0;
    for (ep_u32 source = 0; source < r.w.ranks; ++source) {
        /* Rows of another server go back through the rank of this one that is on their rail. */
        const ep_u32 to = ep_on_rail(c, ep_own_node(c), source);
        if (to == r.me || !ep_takes_part(c, source) || !ep_gives_back(c, a, source, r.me)) continue;
        const ep_u64 first = ep_at<uint32_t>(a.first_of, source);
        const ep_u32 rows = ep_at<uint32_t>(a.first_of, source + 1) - (ep_u32)first, batch = ep_at<uint32_t>(a.tokens_of, source);
        const ep_u32 begin = ep_partition(a.source_token, first, rows, ep_channel_first(batch, channels, channel));
        const ep_u32 end = ep_partition(a.source_token, first, rows, ep_channel_first(batch, channels, channel + 1));
        ep_stream_begin(c, of[streams], to, ep_own_track(r.w, source, channel), begin, begin, end - begin);
        of[streams++].source = source;
    }
    EpNoMore none;
    ep_fill_all(c, b, of, streams, EpReturn{a}, none);
}

#endif
