/*
 * ep_low.h: low latency: what its kernels have in common. The roles are those of ep_core::roles::low_latency; each half of an operation
 * is a launch of its own, whose number, and whose ranks, the host says.
 *
 *   shares   what goes to a rank, or comes from one, is a core's; where there are cores enough, up to four share it. A core may have several shares,
 *            but then nobody shares with it: so no two cores wait for each other
 *   banks    rows may be put once the reader's Received is at least op - 2
 *   arrival  the cell of the bank, Even or Odd: kind and number of rows. Published by the first of a rank's cores when all of them have landed
 *   far      what goes to a rank of another server is staged, and posted by the coordinator that holds the queue to that rank (ep_low_post.h)
 *   words    by which cores of a rank tell each other: ticket of the launch and a number, each with one writer
 *   end      Received = op, published by the control core when all cores have ended (ep_low_control.h)
 */
#ifndef EP_LOW_H
#define EP_LOW_H
#include "ep_mail.h"
#include "ep_rows.h"

/* Cores that share what concerns a rank, at most. */
#define EP_LOW_HELPERS 4u

/* Cores that do not work: the control core, and over several servers those that post (ep_low_post.h). */
EP_DEV ep_u32 ep_low_apart(const EpCore& c) { return c.launch.r.w.nodes > 1 ? c.launch.roles.coordinators : 1; }
EP_DEV ep_u32 ep_low_workers(const EpCore& c) { return (ep_u32)GetBlockNum() - ep_low_apart(c); }
EP_DEV ep_u32 ep_low_worker(const EpCore& c) { return c.number < c.launch.roles.senders ? c.number : c.number - ep_low_apart(c); }
/* Cores that share what concerns a rank. */
EP_DEV ep_u32 ep_low_each(const EpCore& c) {
    const ep_u32 each = ep_low_workers(c) / c.launch.r.w.ranks;
    return each == 0 ? 1 : each > EP_LOW_HELPERS ? EP_LOW_HELPERS : each;
}
EP_DEV ep_u32 ep_low_shares(const EpCore& c) { return c.launch.r.w.ranks * ep_low_each(c); }
/* Of n things the first of share `nth`. */
EP_DEV ep_u32 ep_low_first(const EpCore& c, ep_u32 n, ep_u32 nth) { return (ep_u32)((ep_u64)n * nth / ep_low_each(c)); }

/* ---- words ---- */

EP_DEV ep_u64 ep_low_word_at(const EpLowArgs& a, ep_u32 share) { return a.words + (ep_u64)share * 8; }
EP_DEV void ep_low_tell(EpCore& c, const EpLowArgs& a, ep_u32 share, ep_u32 value) {
    ep_store_word(c, ep_low_word_at(a, share), a.ticket << 32 | value, 8);
}
/* Waits for the word of a core of this rank, which itself ends in time. */
EP_DEV bool ep_low_await_word(EpCore& c, const EpLowArgs& a, ep_u32 share, ep_u32& value) {
    for (;;) {
        const ep_u64 at = ep_low_word_at(a, share);
        const ep_u64 word = EP_PLANTED(c, LOW_STALE_WORD) ? ep_at<uint64_t>(at, 0) : ep_fresh<uint64_t>(at);
        value = (ep_u32)word;
        if (word >> 32 == (a.ticket & 0xffffffff)) return true;
        if (++c.idle % 16 != 0) continue;
        if (ep_fresh<uint32_t>(EP_LOCAL(c, failed)) != 0) c.failed = true;
        else if (ep_waited(c) > c.launch.r.allowed + c.launch.r.allowed / 2) ep_stop(c, EP_STATUS_TIMEOUT, EpDetail{c.launch.r.me, EP_PHASE_ROWS, 0, 0, 0, 0});
        if (c.failed) return false;
    }
}

/* ---- between servers: what cores hand to those that post, and these to them. Every word has one writer ---- */

/* A share: slots that it has staged in this launch. A rank: the launch in which its staging memory is free; what it was told of this rank's waits, and of
   what this rank has received. The rank: what it waits for, and has received; the launch of which nothing more comes. */
EP_DEV ep_u64 ep_low_mail(const EpLowArgs& a, ep_u64 word) { return a.mail + word * 8; }
EP_DEV ep_u64 ep_low_mail_staged(const EpLowArgs& a, ep_u32 share) { return ep_low_mail(a, share); }
EP_DEV ep_u64 ep_low_mail_of(const EpCore& c, const EpLowArgs& a, ep_u32 what, ep_u32 rank) {
    return ep_low_mail(a, (ep_u64)(EP_LOW_HELPERS + what) * c.launch.r.w.ranks + rank);
}
#define EP_LOW_MAIL_FREE 0u
#define EP_LOW_MAIL_SAID_WAITING 1u
#define EP_LOW_MAIL_SAID_RECEIVED 2u
EP_DEV ep_u64 ep_low_mail_own(const EpCore& c, const EpLowArgs& a, ep_u32 what) { return ep_low_mail_of(c, a, 3, what); }
#define EP_LOW_MAIL_WAITING 0u
#define EP_LOW_MAIL_RECEIVED 1u
#define EP_LOW_MAIL_OVER 2u

/* Staging memory for what goes to a rank of another server: laid out as this rank's part of a bank there, so nothing of it is reused within an operation. */
EP_DEV ep_u64 ep_low_staging_of(const EpCore& c, const EpLowArgs& a, ep_u32 peer) {
    const EpWindow& w = c.launch.r.w;
    const ep_u32 before = peer < c.launch.r.me ? peer : peer - w.ranks_per_node;
    return a.staging + (ep_u64)before * w.low_part_slots * w.low_result_bytes;
}
/* The offsets of what a share has staged, in the order in which it has. */
EP_DEV ep_u64 ep_low_list(const EpCore& c, const EpLowArgs& a, ep_u32 share) {
    return a.posts + (ep_u64)share * c.launch.r.w.max_tokens * c.launch.r.w.low_columns * 8;
}

/* ---- banks ---- */

/* A bank that is still read. */
#define EP_LOW_WAITING 0u

/* Whether what was staged before for a rank of another server has been read: the card has acknowledged all that was posted before this launch. What goes to
   a rank that is gone nobody reads. */
EP_DEV bool ep_low_is_free(EpCore& c, const EpLowArgs& a, ep_u32 peer) {
    return ep_is_near(c, peer) || EP_PLANTED(c, LOW_FAR_STAGING_EARLY) || ep_fresh<uint64_t>(ep_low_mail_of(c, a, EP_LOW_MAIL_FREE, peer)) == a.ticket ||
           ep_fresh<uint32_t>(ep_gone_at(c.launch.r.local, peer)) != 0;
}

/* Whether this operation's bank at a rank may be filled: EP_LOW_SENT where it may. `gives_up`: the rest is looked at, too; what the rank did before
   it went is there, so it is looked at first. */
EP_DEV ep_u32 ep_low_bank(EpCore& c, const EpLowArgs& a, ep_u32 peer, bool gives_up) {
    if (peer == c.launch.r.me || EP_PLANTED(c, LOW_BANK_UNASKED)) return EP_LOW_SENT;
    const bool gone = gives_up && ep_fresh<uint32_t>(ep_gone_at(c.launch.r.local, peer)) != 0;
    const ep_u64 seen = ep_peek(c, peer, EP_LANE_LOW_DONE, EP_COUNTER_RECEIVED);
    if (seen == EP_MASKED) return EP_LOW_MASKED;
    if (seen + 2 >= c.op && ep_low_is_free(c, a, peer)) return EP_LOW_SENT;
    if (gone) return EP_LOW_GONE;
    return gives_up && !a.judges && ep_waited(c) >= c.launch.r.allowed ? EP_LOW_LATE : EP_LOW_WAITING;
}

/* Nothing moved: whether the wait is in vain. One that lasts is told to the control core, which judges it. */
EP_DEV bool ep_low_idle(EpCore& c, ep_u32 peer, ep_u32 lane, ep_u32 phase, ep_u64 awaited) {
    if (++c.idle % 16 != 0) return false;
    const EpDetail detail = {peer, phase, lane, 0, 0, awaited};
    if (ep_fresh<uint32_t>(EP_LOCAL(c, failed)) != 0) c.failed = true;
    else if (ep_waited(c) > c.launch.r.allowed + c.launch.r.allowed / 4) ep_stop(c, EP_STATUS_TIMEOUT, detail);
    else if (!c.told && c.idle >= 64) {
        c.told = true;
        ep_write_line(c, EpLine{0, ep_wait_key(c.op, phase, peer), c.mark, 0, 0, detail});
    }
    return c.failed;
}

/* ---- arrivals ---- */

EP_DEV ep_u32 ep_low_counter(const EpCore& c) { return c.op % 2 ? EP_COUNTER_ODD : EP_COUNTER_EVEN; }

/* Tells a rank that so many rows of this operation lie in its bank. They have landed. */
EP_DEV void ep_low_announce(EpCore& c, const EpLowArgs& a, ep_u32 peer, ep_u32 rows) {
    ep_publish(c, peer, EP_LANE_LOW_ROWS, ep_low_counter(c), ep_arrival(c.launch.r.w, c.op, a.kind, rows + (EP_PLANTED(c, LOW_ONE_MORE) ? 1 : 0)));
}

/* Says what is wrong with an arrival. */
EP_DEV bool ep_low_is_arrival(EpCore& c, const EpLowArgs& a, ep_u32 source, ep_u64 seen) {
    const EpWindow& w = c.launch.r.w;
    const ep_u64 due = ep_arrival(w, c.op, 0, 0), op = ep_arrival_op(w, seen);
    const ep_u32 kind = ep_arrival_kind(w, seen);
    if (seen == EP_MASKED && !EP_PLANTED(c, LOW_MASK_UNHEARD)) ep_stop(c, EP_STATUS_MASKED, EpDetail{source, EP_PHASE_ROWS, EP_LANE_LOW_ROWS, 0, seen, due});
    else if (kind > EP_LOW_PER_RANK) ep_refuse(c, source, EP_LOW_FIELD_ARRIVAL, due, seen);
    else if (op != c.op) ep_refuse(c, source, EP_LOW_FIELD_OP, c.op, op);
    else if (kind != a.kind && !EP_PLANTED(c, LOW_KIND_UNCHECKED)) ep_refuse(c, source, EP_LOW_FIELD_KIND, a.kind, kind);
    return !c.failed;
}

/* Waits until all rows of a source have come; how many. False where they do not come. */
EP_DEV bool ep_low_arrived(EpCore& c, const EpLowArgs& a, ep_u32 source, ep_u32& rows) {
    const ep_u64 due = ep_arrival(c.launch.r.w, c.op, 0, 0);
    ep_u64 seen;
    while ((seen = ep_peek(c, source, EP_LANE_LOW_ROWS, ep_low_counter(c))) < due) {
        if (EP_PLANTED(c, LOW_ARRIVAL_UNAWAITED)) {
            rows = 0;
            return true;
        }
        if (ep_vain(c, source, EP_LANE_LOW_ROWS, EP_PHASE_ROWS, seen, due)) return false;
    }
    ep_moved(c);
    rows = ep_arrival_rows(c.launch.r.w, seen);
    return ep_low_is_arrival(c, a, source, seen);
}

/* ---- headers ---- */

EP_DEV ep_u32 ep_low_own_stamp(const EpCore& c) {
    return ep_low_stamp(EP_PLANTED(c, LOW_NO_GENERATION) ? 0 : c.launch.r.generation, c.op);
}
/* Where this rank's part of this operation's bank begins is by parity: a fault takes the other. */
EP_DEV ep_u64 ep_low_put_op(const EpCore& c) { return c.op + (EP_PLANTED(c, LOW_WRONG_BANK) ? 1 : 0); }

/* Where a share puts what it has for a rank: into the rank's bank; or into staging memory, from which another core posts it. */
struct EpLowWay {
    ep_u64 base; /* the place of the window's first byte */
    ep_u32 peer, share, put;
    bool far;
};
EP_DEV EpLowWay ep_low_way(const EpCore& c, const EpLowArgs& a, ep_u32 peer, ep_u32 share) {
    const EpRank& r = c.launch.r;
    const bool far = !ep_is_near(c, peer);
    const ep_u64 base = far ? ep_low_staging_of(c, a, peer) - ep_low_part(r.w, ep_low_put_op(c), r.me) : ep_window(c, peer);
    return EpLowWay{base, peer, share, 0, far};
}
/* Tells the core that posts what is staged. All of it has landed: the word of the last row's offset was awaited behind it. */
EP_DEV void ep_low_way_tell(EpCore& c, const EpLowArgs& a, const EpLowWay& way) {
    ep_store_word(c, ep_low_mail_staged(a, way.share), a.ticket << 32 | (way.put + (EP_PLANTED(c, LOW_FAR_ONE_MORE) ? 1 : 0)), 8);
}
/* A row was put whose place is `offset` of a window. */
EP_DEV void ep_low_way_push(EpCore& c, const EpLowArgs& a, EpLowWay& way, ep_u64 offset) {
    if (way.far) ep_store_word(c, ep_low_list(c, a, way.share) + (ep_u64)way.put * 8, offset, 8);
    ++way.put;
    if (way.far && way.put % 8 == 0) ep_low_way_tell(c, a, way);
}

/* Writes a header into the UB. `column`: of a result its own; of a row 0. */
EP_DEV void ep_low_write_header(const EpCore& c, const EpBytes& ub, ep_u32 token, ep_u32 column) {
    LocalTensor<uint32_t> words = ub.ReinterpretCast<uint32_t>();
    words.SetValue(0, c.launch.r.me);
    words.SetValue(1, token);
    words.SetValue(2, column);
    words.SetValue(3, ep_low_own_stamp(c));
}

/* Whether a header in the UB is of this generation, operation and source; its token. */
EP_DEV bool ep_low_check(EpCore& c, const EpBytes& ub, ep_u32 source, ep_u32& token) {
    LocalTensor<uint32_t> words = ub.ReinterpretCast<uint32_t>();
    const ep_u32 mine = ep_low_stamp(c.launch.r.generation, c.op), theirs = words.GetValue(3), from = words.GetValue(0);
    token = words.GetValue(1);
    if (mine >> 16 != theirs >> 16) ep_refuse(c, source, EP_LOW_FIELD_ROW_GENERATION, mine >> 16, theirs >> 16);
    else if (mine != theirs) ep_refuse(c, source, EP_LOW_FIELD_ROW_OP, mine & 0xffff, theirs & 0xffff);
    else if (from != source) ep_refuse(c, source, EP_LOW_FIELD_ROW_SOURCE, source, from);
    return !c.failed;
}

/* ---- choices of this rank's own tokens ---- */

EP_DEV int64_t ep_low_expert(const EpCore& c, const EpLowArgs& a, ep_u32 token, ep_u32 k) {
    return ep_at<int64_t>(a.topk_idx, (ep_u64)token * c.launch.r.w.topk + k);
}
/* Where among the token's choices its expert is named first. */
EP_DEV ep_u32 ep_low_first_mention(const EpCore& c, const EpLowArgs& a, ep_u32 token, ep_u32 k) {
    const int64_t expert = ep_low_expert(c, a, token, k);
    ep_u32 first = 0;
    while (ep_low_expert(c, a, token, first) != expert) ++first;
    return first;
}
/* The rank of a choice; none where it is dropped: no expert, or one of a rank that the token does not go to. */
EP_DEV ep_u32 ep_low_rank_of(const EpCore& c, const EpLowArgs& a, ep_u32 token, ep_u32 k) {
    const EpWindow& w = c.launch.r.w;
    const int64_t expert = ep_low_expert(c, a, token, k);
    if (expert < 0) return w.ranks;
    const ep_u32 rank = (ep_u32)expert / w.local_experts;
    return ep_at<int32_t>(a.position, (ep_u64)token * w.ranks + rank) < 0 ? w.ranks : rank;
}

/* ---- what the receiver keeps of rows, for the combine: u32 rows[ranks], u32 picks[ranks], then for each source and row EpLowRow and its picks ---- */

EP_DEV ep_u32 ep_low_record_bytes(const EpWindow& w) { return (ep_u32)sizeof(EpLowRow) + w.topk * (ep_u32)sizeof(EpLowPick); }
EP_DEV ep_u64 ep_low_record(const EpWindow& w, ep_u64 records, ep_u32 source, ep_u32 row) {
    return records + 8ull * w.ranks + ((ep_u64)source * w.max_tokens + row) * ep_low_record_bytes(w);
}

#endif
