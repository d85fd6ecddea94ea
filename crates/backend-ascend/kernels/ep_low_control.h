/*
 * ep_low_control.h: the control core of a launch of low latency: it alone reports, says for whom this rank waits, and tells that all was received:
 * to ranks of other servers by the cores that post (ep_low_post.h).
 *
 * A rank that waits long says to all for whom; so does one that is waited for, however short it has waited, since ranks wait from different times on.
 * Whoever gives up follows that chain to the one who waits for nobody. Nothing is poisoned: the host says what becomes of a failure. A verdict of
 * throughput mode, or of a rank that recovers, ends the launch.
 */
#ifndef EP_LOW_CONTROL_H
#define EP_LOW_CONTROL_H
#include "ep_low.h"

/* What the control core keeps in a launch. */
struct EpLowWatch {
    ep_u64 foremost; /* of the cores' waits the one nearest to the cause (ep_wait_key); 0 for none */
    ep_u32 waiting;  /* the core that has it */
    bool explained;  /* it is for a rank that waits itself, as all are then */
    ep_u32 serial;   /* words said, ever */
    ep_u32 said;     /* 1 + the rank that this one has last said it waits for, launches before included; 0: none */
};

/* Whom a rank has said that it waits for; itself where nobody. */
EP_DEV ep_u32 ep_low_named(const EpCore& c, ep_u32 rank) {
    const ep_u64 said = ep_peek(c, rank, EP_LANE_WATCH, EP_COUNTER_WAITING);
    const ep_u32 named = (ep_u32)(said & 0xffff);
    return said == 0 || named >= c.launch.r.w.ranks ? rank : named;
}

/* The end of the chain of those who wait for each other, which begins with `first`. */
EP_DEV ep_u32 ep_low_culprit(const EpCore& c, ep_u32 first) {
    ep_u64 seen = 1ull << c.launch.r.me | 1ull << first;
    ep_u32 last = first;
    for (;;) {
        const ep_u32 next = ep_low_named(c, last);
        if ((seen >> next & 1) != 0 || !ep_takes_part(c, next)) return last;
        seen |= 1ull << next;
        last = next;
    }
}

/* Says to all that this rank waits for another; for itself: that it goes on. */
EP_DEV void ep_low_say(EpCore& c, const EpLowArgs& a, EpLowWatch& k, ep_u32 rank) {
    const EpRank& r = c.launch.r;
    ++k.serial;
    k.said = rank == r.me ? 0 : rank + 1;
    ep_store_word(c, EP_LOCAL(c, serial), k.serial, 4);
    ep_store_word(c, EP_LOCAL(c, told), k.said, 8);
    const ep_u64 word = (ep_u64)k.serial << 16 | rank;
    for (ep_u32 other = 0; other < r.w.ranks; ++other)
        if (other != r.me && ep_is_near(c, other) && ep_takes_part(c, other)) ep_publish(c, other, EP_LANE_WATCH, EP_COUNTER_WAITING, word);
    if (r.w.nodes > 1) ep_store_word(c, ep_low_mail_own(c, a, EP_LOW_MAIL_WAITING), word, 8);
}

/* Reports, and stops the rank's cores. */
EP_DEV void ep_low_fail(EpCore& c, ep_u32 status, const EpDetail& detail, ep_u32 culprit) {
    c.failed = true;
    const EpReport report = {0, detail.phase, detail.peer, detail.lane, c.op, detail.seen, detail.awaited, ep_waited(c), detail.field, culprit, 0, 0};
    const uint64_t* words = (const uint64_t*)&report;
    for (ep_u32 i = 1; i < sizeof(EpReport) / 8; ++i) ep_store_word(c, c.launch.r.report + i * 8, words[i], 8);
    ep_store_word(c, c.launch.r.report, (ep_u64)detail.phase << 32 | status, 8);
    ep_store_word(c, EP_LOCAL(c, failed), 1, 4);
}

/* What the line of a core says of its wait, or of what it refuses. */
EP_DEV void ep_low_read_detail(EpDetail& detail, const EpCore& c, ep_u32 core) {
    uint32_t* words = (uint32_t*)&detail;
    for (ep_u32 i = 0; i < sizeof(EpDetail) / 4; ++i) words[i] = ep_fresh<uint32_t>(EP_LINE(c, core, detail) + 4 * i);
}

/* A core waits: of all waits the foremost counts. Those for a rank that waits itself come behind the others, which explain them: two ranks may
   wait for each other, and both for a third. */
EP_DEV void ep_low_weigh(const EpCore& c, EpLowWatch& k, ep_u32 core, ep_u64 wait) {
    const ep_u32 peer = ep_key_peer(wait);
    const bool explained = peer != c.launch.r.me && ep_low_named(c, peer) != peer && !EP_PLANTED(c, LOW_EXPLAINED_FIRST);
    if (k.foremost != 0 && (explained != k.explained ? explained : wait <= k.foremost)) return;
    k.foremost = wait;
    k.waiting = core;
    k.explained = explained;
}

/* Whether it is known of all ranks of other servers what became of what goes there. The cores that post do not end by then: what this rank says of
   waits is theirs to post, too. */
EP_DEV bool ep_low_are_posted(const EpCore& c, const EpLowArgs& a) {
    if (c.launch.r.w.nodes == 1 || a.receives || c.failed || EP_PLANTED(c, LOW_FAR_UNSAID)) return true;
    for (ep_u32 rank = 0; rank < c.launch.r.w.ranks; ++rank)
        if ((a.to >> rank & 1) != 0 && !ep_is_near(c, rank) && ep_takes_part(c, rank) && ep_fresh<uint32_t>(a.state + rank * 4) == 0) return false;
    return true;
}

/* Looks at the lines of all cores: whether all have ended, but for those that post where these need not have. */
EP_DEV bool ep_low_look(EpCore& c, const EpLowArgs& a, EpLowWatch& k, bool all_of_them) {
    bool all = ep_low_are_posted(c, a);
    k.foremost = 0;
    for (ep_u32 core = 0; core < (ep_u32)GetBlockNum(); ++core) {
        if (core == c.number) continue;
        const bool ended = ep_fresh<uint64_t>(EP_LINE(c, core, ended)) == c.mark;
        const bool posts = core > c.number && core < c.number + ep_low_apart(c);
        all &= ended || (posts && !all_of_them);
        if (c.failed || ep_fresh<uint64_t>(EP_LINE(c, core, mark)) != c.mark) continue;
        const ep_u32 status = ep_fresh<uint32_t>(EP_LINE(c, core, status));
        const ep_u64 wait = ep_fresh<uint64_t>(EP_LINE(c, core, wait));
        if (status != 0) {
            EpDetail detail;
            ep_low_read_detail(detail, c, core);
            ep_low_fail(c, status, detail, status == EP_STATUS_TIMEOUT ? ep_low_culprit(c, detail.peer) : detail.peer);
        } else if (!ended && wait != 0) {
            ep_low_weigh(c, k, core, wait);
        }
    }
    return all;
}

/* Listens to the verdicts of ranks that have failed in throughput mode, or recover. */
EP_DEV void ep_low_listen(EpCore& c) {
    for (ep_u32 other = 0; other < c.launch.r.w.ranks && !c.failed; ++other) {
        if (other == c.launch.r.me || !ep_takes_part(c, other) || EP_PLANTED(c, LOW_VERDICT_UNHEARD)) continue;
        const ep_u64 alarm = ep_peek(c, other, EP_LANE_WATCH, EP_COUNTER_ALARM);
        if (ep_alarm_serial(alarm) == 0 || !ep_alarm_verdict(alarm)) continue;
        EpDetail detail = {};
        detail.peer = other;
        ep_low_fail(c, EP_STATUS_ABORTED, detail, ep_alarm_peer(alarm));
    }
}

/* Whether some rank has said that it waits for this one: it follows what this one says when it gives up, which may be soon. */
EP_DEV bool ep_low_is_asked(const EpCore& c) {
    const EpRank& r = c.launch.r;
    if (EP_PLANTED(c, LOW_ASKED_TOO_EARLY) && ep_waited(c) < r.allowed / 2) return false;
    for (ep_u32 other = 0; other < r.w.ranks; ++other)
        if (other != r.me && ep_takes_part(c, other) && ep_low_named(c, other) == r.me) return true;
    return false;
}

/* Some core waits: says for whom, when it waits long or when this rank is waited for, and gives up when time is up. */
EP_DEV void ep_low_judge(EpCore& c, const EpLowArgs& a, EpLowWatch& k) {
    const EpRank& r = c.launch.r;
    const ep_u64 waited = ep_waited(c);
    const ep_u32 peer = ep_key_peer(k.foremost);
    const bool is_news = k.said != peer + 1 && peer != r.me;
    if (is_news && (waited >= r.allowed / 4 * 3 || ep_low_is_asked(c)) && !EP_PLANTED(c, LOW_SILENT)) ep_low_say(c, a, k, peer);
    if (!a.judges || waited < r.allowed || EP_PLANTED(c, LOW_NO_DEADLINE)) return;
    EpDetail detail;
    ep_low_read_detail(detail, c, k.waiting);
    /* The core may have taken it back meanwhile. */
    if (ep_fresh<uint64_t>(EP_LINE(c, k.waiting, wait)) == k.foremost) ep_low_fail(c, EP_STATUS_TIMEOUT, detail, ep_low_culprit(c, peer));
}

/* Tells all ranks that this one has read what they gave it. */
EP_DEV void ep_low_received(EpCore& c, const EpLowArgs& a) {
    const EpRank& r = c.launch.r;
    for (ep_u32 peer = 0; peer < r.w.ranks; ++peer)
        if (peer != r.me && ep_is_near(c, peer) && ep_takes_part(c, peer)) ep_publish(c, peer, EP_LANE_LOW_DONE, EP_COUNTER_RECEIVED, c.op);
    if (r.w.nodes > 1) ep_store_word(c, ep_low_mail_own(c, a, EP_LOW_MAIL_RECEIVED), c.op, 8);
}

/* Attends to the rank's cores until all have ended, those that post too (`all`) or not; whether they have. */
EP_DEV bool ep_low_attend(EpCore& c, const EpLowArgs& a, EpLowWatch& k, bool all) {
    while (!ep_low_look(c, a, k, all)) {
        if (!c.failed && !all) ep_low_listen(c);
        if (!c.failed && !all && k.foremost != 0) ep_low_judge(c, a, k);
        /* The other cores end by themselves by then: one that has not is nobody's fault but the device's. */
        if (ep_waited(c) / 2 > c.launch.r.allowed) {
            if (!c.failed) ep_low_fail(c, EP_STATUS_GONE, EpDetail{c.launch.r.me, EP_PHASE_ROWS, 0, 0, 0, 0}, c.launch.r.me);
            return false;
        }
    }
    return true;
}

EP_DEV void ep_low_control(EpCore& c, const EpLowArgs& a) {
    EpLowWatch k = {};
    k.serial = ep_fresh<uint32_t>(EP_LOCAL(c, serial));
    k.said = (ep_u32)ep_fresh<uint64_t>(EP_LOCAL(c, told));
    if (a.receives && EP_PLANTED(c, LOW_RECEIVED_EARLY)) ep_low_received(c, a);
    const bool ended = ep_low_attend(c, a, k, false);
    if (ended && !c.failed) {
        if (a.receives) ep_low_received(c, a);
        if (k.said != 0) ep_low_say(c, a, k, c.launch.r.me);
    }
    if (c.launch.r.w.nodes > 1) {
        /* What was said last is theirs to post. */
        ep_store_word(c, ep_low_mail_own(c, a, EP_LOW_MAIL_OVER), a.ticket, 8);
        if (!ep_low_attend(c, a, k, true)) return;
    }
    if (ended && !c.failed) ep_store_word(c, a.done, a.ticket, 8);
}

#endif
