/*
 * ep_far_send.h: how senders fill the rings to other servers: into staging memory, from which a coordinator sends them (ep_coordinate.h).
 *
 * A row goes once to each server that needs it, to this rank's rail peer there, with a mask of the ranks behind its payload and choices that
 * are counted over all experts. Several cores may fill a ring: the slot of a row is its number among the channel's rows to the server, and
 * each core fills every n-th slot. So nobody locks: all find the same numbers from the positions.
 */
#ifndef EP_FAR_SEND_H
#define EP_FAR_SEND_H
#include "ep_coordinate.h"
#include "ep_fill.h"

/* Where the mask of a row lies in a buffer's side, behind the header. */
#define EP_SIDE_MASK EP_HEAD_BYTES
static_assert(EP_SIDE_MASK + 32 <= EP_SIDE_BYTES, "a row's mask");
static_assert(sizeof(EpOpHeader) + EP_NEAR * sizeof(EpShare) <= EP_SIDE_BYTES, "the opening of a ring between servers");

/* The slots of a ring to another server that one core fills. */
struct EpFarRing {
    ep_u32 node, peer, channel, filler, fillers;
    ep_u64 base, head, sent; /* slots ever: before this launch; emptied; free in the staging memory */
    ep_u32 slots;            /* of this launch, with the opening */
    ep_u32 slot;             /* that this core fills next */
    ep_u32 filled;           /* by this core */
    ep_u32 told;             /* of them, to the coordinator */
    bool clear;
};

EP_DEV void ep_far_ring_begin(const EpCore& c, EpFarRing& f, ep_u32 node, ep_u32 channel, ep_u32 filler, ep_u32 fillers, ep_u32 rows) {
    f.node = node;
    f.peer = ep_on_rail(c, node, c.launch.r.me);
    f.channel = channel;
    f.filler = f.slot = filler;
    f.fillers = fillers;
    f.base = ep_fresh<uint64_t>(ep_cursor(c, 0, f.peer, ep_far_track(c.launch.r.w, channel)));
    f.head = f.sent = 0;
    f.slots = rows + 1;
    f.filled = f.told = 0;
    f.clear = false;
}

/* Whether the next slot may be filled: the rings of the launch before are empty, the peer has room, and the staging memory has. */
EP_DEV bool ep_far_ring_has_room(EpCore& c, EpFarRing& f) {
    const EpRank& r = c.launch.r;
    const ep_u32 track = ep_far_track(r.w, f.channel), depth = ep_staging_slots(r.w, c.launch.rings, track);
    const ep_u64 next = f.base + f.slot;
    if (!f.clear) {
        if (c.op > r.first_op && ep_peek(c, f.peer, EP_LANE_CONTROL, EP_COUNTER_DONE) < c.op - 1) return false;
        f.sent = ep_fresh<uint64_t>(ep_mail_of_ring(c, f.node, f.channel, EP_MAIL_SENT));
        if (f.sent < f.base) return false;
        f.clear = true;
    }
    if (next >= f.head + c.far.slots && !EP_PLANTED(c, FAR_UNASKED)) {
        f.head = ep_peek(c, f.peer, ep_lane_credit(track), EP_COUNTER_HEAD);
        if (f.head > f.base + f.slots) {
            ep_refuse(c, f.peer, EP_FIELD_HEAD, f.base + f.slots, f.head);
            return false;
        }
        if (next >= f.head + c.far.slots) return false;
    }
    if (next >= f.sent + depth) f.sent = ep_fresh<uint64_t>(ep_mail_of_ring(c, f.node, f.channel, EP_MAIL_SENT));
    return next < f.sent + depth || EP_PLANTED(c, STAGING_UNASKED);
}

EP_DEV ep_u64 ep_far_ring_slot(const EpCore& c, const EpFarRing& f) {
    const EpRank& r = c.launch.r;
    const ep_u32 track = ep_far_track(r.w, f.channel), depth = ep_staging_slots(r.w, c.launch.rings, track);
    return c.own + ep_staging_slot(r.w, c.launch.rings, f.peer, track, f.slot % depth);
}

EP_DEV void ep_far_ring_push(EpFarRing& f) {
    f.slot += f.fillers;
    ++f.filled;
}

/* Tells the coordinator what lies in the staging memory. */
EP_DEV void ep_far_ring_tell(EpCore& c, EpFarRing& f) {
    if (f.told == f.filled) return;
    ep_landed(c);
    ep_store_word(c, ep_mail_of_ring(c, f.node, f.channel, EP_MAIL_FILLED + f.filler), ep_filled_word(c, f.filled), 8);
    f.told = f.filled;
}

EP_DEV bool ep_far_ring_is_open(const EpFarRing& f) { return f.slot < f.slots; }

EP_DEV bool ep_far_ring_vain(EpCore& c, const EpFarRing& f) {
    if (!f.clear) return ep_vain(c, f.peer, EP_LANE_CONTROL, EP_PHASE_BANK, 0, c.op - 1);
    const ep_u64 next = f.base + f.slot + 1;
    return ep_vain(c, f.peer, ep_lane_credit(ep_far_track(c.launch.r.w, f.channel)), EP_PHASE_CREDIT, f.head,
                   next > c.far.slots ? next - c.far.slots : 0);
}

/* A token's choices, counted over all experts. */
struct EpGlobalChoice {
    const EpCore& c;
    const EpDispatchArgs& a;
    ep_u32 token;
    EP_DEV EpChoice operator()(ep_u32 k) const {
        EpChoice choice = {-1, 0.0f};
        if (a.topk_idx == 0) return choice;
        const ep_u64 at = (ep_u64)token * c.launch.r.w.topk + k;
        choice.expert = (ep_i32)ep_at<int64_t>(a.topk_idx, at);
        if (choice.expert >= 0) choice.weight = a.topk_weights ? ep_at<float>(a.topk_weights, at) : 1.0f;
        return choice;
    }
};

/* The rows of a channel that go to another server. */
struct EpFarShare {
    EpFarRing ring;
    ep_u32 token, row; /* where the next row is looked for, and its number */
};

/* Which ranks of a server a token goes to: a bit for each. */
EP_DEV ep_u32 ep_mask_of(const EpCore& c, const EpDispatchArgs& a, ep_u32 token, ep_u32 node) {
    const EpWindow& w = c.launch.r.w;
    ep_u32 mask = 0;
    for (ep_u32 local = 0; local < w.ranks_per_node; ++local)
        if (ep_at<int32_t>(a.position, (ep_u64)token * w.ranks + node * w.ranks_per_node + local) >= 0) mask |= 1u << local;
    return mask;
}

/* What a sender core fills of the rings of its channel to all other servers, by turns with those of its own (ep_fill_all). */
struct EpFarSend {
    const EpDispatchArgs& a;
    EpFarShare of[EP_PEERS];
    ep_u32 shares;

    EP_DEV void begin(const EpCore& c, ep_u32 channel, ep_u32 filler) {
        const EpRank& r = c.launch.r;
        const ep_u32 channels = c.launch.rings.channels;
        const ep_u32 begin = ep_channel_first(a.tokens, channels, channel), end = ep_channel_first(a.tokens, channels, channel + 1);
        for (ep_u32 node = 0; node < r.w.nodes; ++node) {
            if (node == ep_own_node(c) || !ep_takes_part(c, ep_on_rail(c, node, r.me))) continue;
            EpFarShare& s = of[shares++];
            ep_u32 rows = 0;
            for (ep_u32 token = begin; token < end; ++token) rows += ep_mask_of(c, a, token, node) != 0;
            ep_far_ring_begin(c, s.ring, node, channel, filler, ep_fillers(c), rows);
            s.token = begin;
            s.row = 0;
        }
    }

    /* The slot that opens the ring: whose positions these rows are. */
    EP_DEV void open(EpCore& c, EpBuffers& b, EpFarShare& s) const {
        const EpWindow& w = c.launch.r.w;
        const ep_u32 channels = c.launch.rings.channels, channel = s.ring.channel;
        const ep_u32 begin = ep_channel_first(a.tokens, channels, channel), end = ep_channel_first(a.tokens, channels, channel + 1);
        const EpOpHeader header = ep_header(c, s.ring.slots - 1, 0);
        const uint32_t* words = (const uint32_t*)&header;
        const ep_u32 i = ep_turn(c, b), opening = sizeof(EpOpHeader) / 4;
        LocalTensor<uint32_t> side = b.side[i].ReinterpretCast<uint32_t>();
        for (ep_u32 word = 0; word < opening; ++word) side.SetValue(word, words[word]);
        for (ep_u32 local = 0; local < w.ranks_per_node; ++local) {
            ep_u32 first = 0, rows = 0;
            for (ep_u32 token = begin; token < end; ++token) {
                const ep_i32 position = ep_at<int32_t>(a.position, (ep_u64)token * w.ranks + s.ring.node * w.ranks_per_node + local);
                if (position >= 0 && rows++ == 0) first = (ep_u32)position;
            }
            side.SetValue(opening + 2 * local, first);
            side.SetValue(opening + 2 * local + 1, rows + (EP_PLANTED(c, SHARE_TOO_LONG) ? 1 : 0));
        }
        ep_written(i);
        ep_store(ep_far_ring_slot(c, s.ring), b.side[i], (ep_u32)(sizeof(EpOpHeader) + w.ranks_per_node * sizeof(EpShare)));
        ep_turn_over(c, b);
    }

    /* The row of the next slot. */
    EP_DEV void put(EpCore& c, EpBuffers& b, EpFarShare& s) const {
        const EpWindow& w = c.launch.r.w;
        const ep_u32 wanted = s.ring.slot - 1;
        ep_u32 mask;
        while ((mask = ep_mask_of(c, a, s.token, s.ring.node)) == 0 || s.row != wanted) {
            s.row += mask != 0;
            ++s.token;
        }
        const ep_u32 token = s.token++;
        ++s.row;
        const ep_u64 slot = ep_far_ring_slot(c, s.ring);
        for (ep_u64 at = 0; at < w.payload_bytes; at += EP_PIECE_BYTES) {
            const ep_u32 i = ep_turn(c, b), bytes = ep_min(w.payload_bytes - at, EP_PIECE_BYTES);
            ep_load(b.payload[i], a.x + token * a.x_stride + at, bytes);
            if (at == 0) {
                b.side[i][EP_SIDE_MASK].ReinterpretCast<uint32_t>().SetValue(0, EP_PLANTED(c, MASK_OF_ALL) ? (1u << w.ranks_per_node) - 1 : mask);
                ep_put_header(c, b, slot, token, wanted, EpGlobalChoice{c, a, token});
                ep_store(slot + w.wire_bytes, b.side[i][EP_SIDE_MASK], 4);
            }
            ep_filled(c, i);
            ep_store(slot + w.header_bytes + at, b.payload[i], bytes);
            ep_turn_over(c, b);
        }
    }

    EP_DEV bool fill(EpCore& c, EpBuffers& b) {
        bool moved = false;
        for (ep_u32 i = 0; i < shares; ++i) {
            EpFarShare& s = of[i];
            for (ep_u32 count = 0; count < EP_ROWS_A_VISIT && ep_far_ring_is_open(s.ring) && ep_far_ring_has_room(c, s.ring); ++count) {
                if (s.ring.slot == 0) open(c, b, s);
                else put(c, b, s);
                ep_far_ring_push(s.ring);
                moved = true;
            }
            ep_far_ring_tell(c, s.ring);
        }
        return moved;
    }
    EP_DEV bool is_open() const {
        for (ep_u32 i = 0; i < shares; ++i)
            if (ep_far_ring_is_open(of[i].ring)) return true;
        return false;
    }
    EP_DEV bool vain(EpCore& c) const {
        for (ep_u32 i = 0; i < shares; ++i)
            if (ep_far_ring_is_open(of[i].ring)) return ep_far_ring_vain(c, of[i].ring);
        return false;
    }
};

/* Calls `serve(node, channel)` for the rings with other servers that the `nth` of so many cores serves: the same order everywhere. */
template <class Serve> EP_DEV void ep_each_far_ring(const EpCore& c, ep_u32 nth, ep_u32 cores, const Serve& serve) {
    const EpWindow& w = c.launch.r.w;
    ep_u32 turn = 0;
    for (ep_u32 channel = 0; channel < c.launch.rings.channels; ++channel)
        for (ep_u32 node = 0; node < w.nodes && !c.failed; ++node)
            if (node != ep_own_node(c) && turn++ % cores == nth) serve(node, channel);
}

#endif
