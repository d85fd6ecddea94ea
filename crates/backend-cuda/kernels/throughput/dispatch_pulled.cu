/*
 * ep_dispatch_pulled_kernel: rows lie once in the outbox of their sender; whoever wants them pulls them to their final place.
 *
 *   launch   any number of blocks, co-resident with those of the other ranks (cooperative). A block serves channels block, block + blocks, ...:
 *            the lowest one that is not done is served on every rank, so no circle of waits runs through channels
 *   roles    of a block, by the table `block`: copiers, writers and the teller (ep_pulled_sender.h), pullers and the creditor (ep_pulled_receiver.h)
 *   memory   x in any memory of the own GPU, received rows as well; the outbox in the own window. shared: ends of rings, counts, stages
 */
#include "ep_last_look.h"
#include "ep_pulled_receiver.h"
#include "ep_pulled_sender.h"

EP_POOL(ep_pool);

/* Takes the notes of all peers, and lets the pullers begin when they say the same. By a warp, once a launch. */
EP_DEV void ep_meet_peers(const EpRank& r, const EpPulled& c, ep_u64 began) {
    bool right = true;
    for (ep_u32 peer = ep_warp_lane(); peer < r.w.ranks; peer += 32) {
        EpNote note;
        if (peer != r.me && ep_takes_part(r, peer)) right &= ep_take_note(r, peer, began, &note);
    }
    if (ep_warp_all(right) && ep_warp_lane() == 0) ep_tell_count(c.met, 1);
}

EP_DEV void ep_begin_channel(const EpRank& r, const EpDispatchPulledArgs& a, EpPulled& c, ep_u32 channel) {
    const ep_u32 ranks = r.w.ranks, channels = a.ring.rings.channels;
    c.channel = channel;
    c.track = ep_own_track(r.w, r.me, channel);
    c.box = ep_outbox(r.w, a.ring.rings, channel);
    c.begin = ep_share_first(a, a.ring.tokens, channel);
    c.tokens = ep_share_first(a, a.ring.tokens, channel + 1) - c.begin;
    c.sources = ranks > 1 ? ranks - 1 : 1;
    const ep_u32* first_of = (const ep_u32*)a.ring.first_of;
    c.own = ep_own(r);
    c.own_row = first_of[r.me];
    for (ep_u32 rank = 0; rank < ranks; ++rank) {
        const ep_u32 tokens = rank != r.me && ep_takes_part(r, rank) ? ((const ep_u32*)a.tokens_of)[rank] : 0;
        const ep_u32 first = ep_channel_first(tokens, channels, channel), slots = ep_channel_first(tokens, channels, channel + 1) - first;
        if (rank % ep_threads() == ep_thread()) {
            c.from[rank] = EpPulledFrom{ep_begin(r, rank), first_of[rank], first_of[rank + 1] - first_of[rank], first, 0};
            c.in[rank] = EpOutboxEnd{*ep_cursor(r, 1, rank, c.track), slots};
            c.out[rank] = EpOutboxEnd{*ep_cursor(r, 0, rank, c.track), rank != r.me ? c.tokens : 0};
        }
    }
    for (ep_u32 i = ep_thread(); i < a.copiers + a.writers; i += ep_threads()) c.laid[i] = 0;
    for (ep_u32 i = ep_thread(); i < a.pullers * ranks; i += ep_threads()) c.pulled[i] = 0;
    if (ep_thread() == 0) *c.limit = 0;
    ep_block_meet();
}

EP_KERNEL(32 * EP_PULLED_WARPS) ep_dispatch_pulled_kernel(EP_GIVEN(EpRank) r, EP_GIVEN(EpDispatchPulledArgs) a) {
    if (ep_block_any(ep_closed(r))) return;
    const ep_u64 began = ep_now();
    const ep_u32 ranks = r.w.ranks, flows = a.copiers + a.pullers;
    const EpBlockRole& role = a.block[ep_warp()];
    EpPulled c;
    EpItem* items = (EpItem*)ep_pool;
    ep_u64* bars = (ep_u64*)(items + flows * (a.stages + 1));
    c.from = (EpPulledFrom*)(bars + flows * a.stages);
    c.out = (EpOutboxEnd*)(c.from + ranks);
    c.in = c.out + ranks;
    c.laid = (ep_u32*)(c.in + ranks);
    c.written = c.laid + a.copiers;
    c.seen = c.written + a.writers;
    c.next = c.seen + a.pullers * ranks;
    c.pulled = c.next + a.pullers * ranks;
    c.log = c.pulled + a.pullers * ranks;
    c.limit = c.log + a.pullers * EP_PULLED_LOG;
    c.met = c.limit + 1;
    ep_u8* stages = ep_pool + ep_round_128((ep_u32)((ep_u8*)(c.met + 1) - ep_pool));
    const bool moves = role.task == EP_TASK_ROWS, sends = role.duty == EP_DUTY_SENDER;
    const ep_u32 number = sends ? role.index : a.copiers + role.index;
    EpFlow flow;
    if (moves)
        flow = ep_flow(stages + (ep_u64)number * a.stages * a.room, items + number * (a.stages + 1), bars + number * a.stages, a.stages, a.room);
    if (ep_block() == 0) ep_send_notes(r, EP_NO_BASE, 0, 0, ep_threads(), began);
    if (ep_thread() == 0) *c.met = 0;
    for (ep_u32 channel = ep_block(); channel < a.ring.rings.channels; channel += ep_blocks()) {
        ep_begin_channel(r, a, c, channel);
        ep_delay(r, EP_LANE_WATCH, (ep_u64)channel << 32 | ep_warp());
        if (moves) ep_flow_restart(flow);
        if (moves && sends) {
            ep_lay_rows(r, a, c, flow, role.index);
        } else if (role.task == EP_TASK_HEADERS) {
            ep_write_heads(r, a, c, role.index);
        } else if (moves) {
            ep_pull_pieces(r, a, c, flow, role.index, began);
        } else if (role.task == EP_TASK_TAIL) {
            ep_tell_readers(r, a, c, began);
        } else {
            if (channel == ep_block()) ep_meet_peers(r, c, began);
            ep_give_credit(r, a.ring.rings, c.in, c.track, began, [&](ep_u32 source) { return ep_slots_pulled(r, a, c, source); });
        }
        ep_block_meet();
        if (role.task == EP_TASK_TAIL) ep_keep_cursors(r, c.out, 0, c.track);
        if (role.task == EP_TASK_CREDIT) ep_end_credit(r, c.in, c.track, began);
        ep_block_meet();
    }
    if (!ep_last_block_has_pulled(r, EP_MEETING_MOVED)) return;
    for (ep_u32 source = ep_thread(); source < ranks; source += ep_threads()) {
        ep_u32* arrived = (ep_u32*)a.arrived + source;
        const ep_u32 due = ((const ep_u32*)a.ring.first_of)[source + 1] - ((const ep_u32*)a.ring.first_of)[source];
        if (source != r.me && ep_takes_part(r, source) && ep_ld_relaxed(arrived) != due) ep_fail_mismatch(r, source, EP_FIELD_ROWS_SENT, due, ep_ld_relaxed(arrived));
        *arrived = 0;
    }
    ep_block_meet();
    if (ep_failed(r)) return;
    ep_say_done(r);
    ep_count_op(r);
}
