/*
 * ep_control.h: the control core of a rank, the first of its coordinators. It alone speaks on the watch and control lanes and writes
 * EpLocal and the report: so every cell and every word has one writer, and no lock is needed.
 *
 * It tells the other ranks that the operation begins, looks at the lines of the rank's cores and at what the other ranks say, finds whom to
 * blame (ep_protocol.h) when time is up, and ends the operation when all cores have done their part. Other cores look at EpLocal.failed.
 *
 * Over several servers a rank hears those of its server and of its rail only. So a rank that waits for one that waits itself tells what that
 * wait comes from, and so on along the way: who is named is who stopped, not who passes on.
 */
#ifndef EP_CONTROL_H
#define EP_CONTROL_H
#include "ep_mail.h"

/* What the control core keeps. */
struct EpControl {
    ep_u64 foremost; /* of the cores' waits the one nearest to the cause (ep_wait_key); 0 for none */
    ep_u32 waiting;  /* the core that has it */
    bool explained;  /* it is for a rank that waits itself, as all are then */
    ep_u64 told;     /* the last wait that the other ranks were told of */
    ep_u64 told_at;  /* when */
    ep_u32 serial;   /* alarms published */
};

EP_DEV void ep_tell(EpCore& c, EpControl& k, ep_u32 verdict, ep_u64 op, ep_u32 phase, ep_u32 whom) {
    const EpRank& r = c.launch.r;
    /* The last serial is kept for a verdict. */
    if (k.serial >= EP_MAX_ALARM_SERIAL - (verdict ? 0 : 1)) return;
    ++k.serial;
    ep_store_word(c, EP_LOCAL(c, serial), k.serial, 4);
    for (ep_u32 other = 0; other < r.w.ranks; ++other)
        if (ep_is_neighbour(c, other))
            ep_announce(c, other, EP_LANE_WATCH, EP_COUNTER_ALARM, ep_alarm(k.serial, verdict, op, phase, whom), EP_MAIL_ALARM);
}

/* What the line of a core says of its wait, or of what it refuses. */
EP_DEV void ep_read_detail(EpDetail& detail, const EpCore& c, ep_u32 core) {
    uint32_t* words = (uint32_t*)&detail;
    for (ep_u32 i = 0; i < sizeof(EpDetail) / 4; ++i) words[i] = ep_fresh<uint32_t>(EP_LINE(c, core, detail) + 4 * i);
}

/* What rank says that it waits for: this rank by what it has told the others. */
struct EpWaitOf {
    const EpCore& c;
    const EpControl& k;
    EP_DEV ep_u32 operator()(ep_u32 rank) const {
        const EpRank& r = c.launch.r;
        if (rank == r.me) return ep_wait_of_key(r.w.ranks, rank, c.op, k.told);
        const ep_u64 alarm = ep_is_neighbour(c, rank) ? ep_peek(c, rank, EP_LANE_WATCH, EP_COUNTER_ALARM) : 0;
        return ep_wait_of_alarm(r.w.ranks, rank, c.op, alarm);
    }
};

/* Reports, stops the rank's cores, and tells the other ranks. */
EP_DEV void ep_fail(EpCore& c, EpControl& k, ep_u32 status, const EpDetail& detail, ep_u32 culprit) {
    const EpRank& r = c.launch.r;
    c.failed = true;
    const EpReport report = {0, detail.phase, detail.peer, detail.lane, c.op, detail.seen, detail.awaited, ep_waited(c), detail.field, culprit, 0, 0};
    const uint64_t* words = (const uint64_t*)&report;
    for (ep_u32 i = 1; i < sizeof(EpReport) / 8; ++i) ep_store_word(c, r.report + i * 8, words[i], 8);
    ep_store_word(c, r.report, (ep_u64)detail.phase << 32 | status, 8);
    ep_store_word(c, EP_LOCAL(c, failed), 1, 4);
    ep_tell(c, k, 1, c.op, detail.phase, culprit);
}

/* Looks at what the other ranks say; whether any of them waits in this operation. A rank's verdict, and another kind of operation, end this
   rank's. */
EP_DEV bool ep_hear(EpCore& c, EpControl& k) {
    const EpRank& r = c.launch.r;
    bool asked = false;
    for (ep_u32 other = 0; other < r.w.ranks && !c.failed; ++other) {
        if (!ep_is_neighbour(c, other)) continue;
        const ep_u64 alarm = ep_peek(c, other, EP_LANE_WATCH, EP_COUNTER_ALARM);
        EpDetail detail = {};
        detail.peer = other;
        if (ep_alarm_serial(alarm) != 0 && ep_alarm_verdict(alarm) && !EP_PLANTED(c, VERDICT_UNHEARD)) {
            ep_fail(c, k, EP_STATUS_ABORTED, detail, ep_alarm_peer(alarm));
            continue;
        }
        const ep_u32 wait = ep_wait_of_alarm(r.w.ranks, other, c.op, alarm);
        asked |= wait != EP_NO_WAIT && ep_wait_op(wait) == EP_WAIT_OP;
        const ep_u64 opening = ep_peek(c, other, EP_LANE_WATCH, EP_COUNTER_OPENING);
        if (opening >> 3 == c.op && (opening & 7) != r.kind && !EP_PLANTED(c, KIND_UNHEARD)) {
            detail.field = EP_FIELD_KIND;
            detail.awaited = r.kind;
            detail.seen = opening & 7;
            ep_fail(c, k, EP_STATUS_MISMATCH, detail, other);
        }
    }
    return asked;
}

/* A core waits: of all waits the foremost is told. Those for a rank that waits itself come behind the others, which explain them. */
EP_DEV void ep_weigh(const EpCore& c, EpControl& k, ep_u32 core, ep_u64 wait) {
    const bool explained = EpWaitOf{c, k}(ep_key_peer(wait)) != EP_NO_WAIT && !EP_PLANTED(c, EXPLAINED_FIRST);
    if (k.foremost != 0 && (explained != k.explained ? explained : wait <= k.foremost)) return;
    k.foremost = wait;
    k.waiting = core;
    k.explained = explained;
}

/* Looks at the lines of all cores: whether all have ended, but for the coordinators where these need not have (`all`). */
EP_DEV bool ep_look_at_cores(EpCore& c, EpControl& k, bool all_of_them) {
    bool all = true;
    k.foremost = 0;
    for (ep_u32 core = 0; core < (ep_u32)GetBlockNum(); ++core) {
        if (core == c.number) continue;
        /* A core that cannot go on ends, too: what it says is looked at after that. */
        const bool ended = ep_fresh<uint64_t>(EP_LINE(c, core, ended)) == c.mark;
        const bool posts = core > c.number && core < c.number + c.launch.roles.coordinators;
        all &= ended || (posts && !all_of_them);
        if (c.failed || ep_fresh<uint64_t>(EP_LINE(c, core, mark)) != c.mark) continue;
        const ep_u32 status = ep_fresh<uint32_t>(EP_LINE(c, core, status));
        /* Who is gone may have said before whom it gave up. */
        if (status == EP_STATUS_GONE) ep_hear(c, k);
        if (c.failed) continue;
        if (status != 0) {
            EpDetail detail;
            ep_read_detail(detail, c, core);
            ep_fail(c, k, status, detail, detail.peer);
            continue;
        }
        const ep_u64 wait = ep_fresh<uint64_t>(EP_LINE(c, core, wait));
        if (!ended && wait != 0) ep_weigh(c, k, core, wait);
    }
    return all;
}

/* Whether a rank's alarms come to another, or to this one. */
struct EpHears {
    const EpRank& r;
    EP_DEV bool operator()(ep_u32 rank, ep_u32 peer) const {
        const ep_u32 node = r.w.ranks_per_node;
        return ep_are_neighbours(node, r.me, peer) || ep_are_neighbours(node, rank, peer);
    }
};

/* What the other ranks are to be told of the foremost wait: over several servers what it comes from. */
EP_DEV ep_u64 ep_to_tell(const EpCore& c, const EpControl& k) {
    const EpRank& r = c.launch.r;
    if (r.w.nodes == 1 || EP_PLANTED(c, NOT_RELAYED)) return k.foremost;
    const ep_u32 wait = ep_wait_of_key(r.w.ranks, r.me, c.op, k.foremost);
    return ep_key_of_wait(c.op, ep_wait_origin(r.w.ranks, r.me, wait, EpWaitOf{c, k}));
}

/* Some core waits long: tells the other ranks, and gives up when it is this rank's turn. */
EP_DEV void ep_judge(EpCore& c, EpControl& k, bool asked) {
    const EpRank& r = c.launch.r;
    const ep_u32 peer = ep_key_peer(k.foremost);
    EpDetail detail;
    ep_read_detail(detail, c, k.waiting);
    /* The core may have taken it back meanwhile. */
    if (ep_fresh<uint64_t>(EP_LINE(c, k.waiting, wait)) != k.foremost) return;
    const ep_u64 waited = ep_waited(c), told = ep_to_tell(c, k);
    const bool speaks = asked || waited >= ep_speaks_after(r.allowed), pauses = k.told != 0 && waited - k.told_at < ep_speaks_again_after(r.allowed);
    if (speaks && k.told != told && !pauses && !EP_PLANTED(c, SILENT)) {
        k.told = told;
        k.told_at = waited;
        ep_tell(c, k, 0, ep_key_op(told), ep_key_phase(told), ep_key_whom(told));
    }
    if (waited >= ep_gives_up_after(r.allowed, r.w.ranks, r.me) && !EP_PLANTED(c, NO_DEADLINE))
        ep_fail(c, k, EP_STATUS_TIMEOUT, detail, ep_culprit(r.w.ranks, peer, EpWaitOf{c, k}, EpHears{r}));
}

/* The operation has ended, where no other launch of it follows. Coordinators find its number while they post. */
EP_DEV void ep_end_op(EpCore& c) {
    if (!c.launch.follows) ep_store_word(c, EP_LOCAL(c, ops_done), c.op, 8);
}

/* Ends a launch that went well: takes back what was said of waits. Ends the operation where no other launch of it follows. */
EP_DEV void ep_finish(EpCore& c, EpControl& k) {
    const EpRank& r = c.launch.r;
    for (ep_u32 peer = 0; peer < r.w.ranks && !c.launch.follows; ++peer)
        if (ep_is_neighbour(c, peer)) ep_announce(c, peer, EP_LANE_CONTROL, EP_COUNTER_DONE, c.op, EP_MAIL_DONE);
    if (k.told != 0) ep_tell(c, k, 0, c.op, EP_PHASE_ALARM, r.me);
    if (r.w.nodes == 1) ep_end_op(c);
}

/* Attends to the rank's cores until all have ended, the coordinators too (`all`) or not; whether they have. */
EP_DEV bool ep_attend(EpCore& c, EpControl& k, bool all) {
    const EpRank& r = c.launch.r;
    while (!ep_look_at_cores(c, k, all)) {
        if (!c.failed && !all) {
            const bool asked = ep_hear(c, k);
            if (k.foremost != 0 && !c.failed) ep_judge(c, k, asked);
        }
        /* The other cores end by themselves by then: one that has not is nobody's fault but the device's. */
        if (ep_waited(c) > 2 * r.allowed) {
            if (!c.failed) ep_fail(c, k, EP_STATUS_GONE, EpDetail{r.me, EP_PHASE_ROWS, 0, 0, 0, 0}, r.me);
            return false;
        }
    }
    return true;
}

EP_DEV void ep_control(EpCore& c) {
    const EpRank& r = c.launch.r;
    EpControl k = {};
    k.serial = ep_fresh<uint32_t>(EP_LOCAL(c, serial));
    for (ep_u32 peer = 0; peer < r.w.ranks; ++peer)
        if (ep_is_neighbour(c, peer)) ep_announce(c, peer, EP_LANE_WATCH, EP_COUNTER_OPENING, c.op << 3 | r.kind, EP_MAIL_OPENING);
    const bool right = ep_attend(c, k, false);
    if (right && !c.failed) ep_finish(c, k);
    if (r.w.nodes > 1) {
        /* The coordinators end behind all others: what was said last is theirs to post. */
        ep_store_word(c, ep_mail_over(c), c.mark, 8);
        ep_attend(c, k, true);
        if (right && !c.failed) ep_end_op(c);
    }
    /* The host takes the launch for done when this says so: a core that has crashed reports nothing. */
    if (right && !c.failed) ep_end(c);
}

#endif
