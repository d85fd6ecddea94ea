/*
 * ep_test.h: what kernels built for tests do beside their work: seeded delays, poison, planted faults, incidents, events of rings.
 *
 * Only with EP_TEST. Without it every function here is empty or constant, and EpRank.test is 0.
 *
 *   delays     before verbs, drawn from the seed and from what the verb names: the same verb is delayed alike in every run
 *   poison     what has been read from a slot is overwritten before the slot is given back
 *   plants     a protocol error, made where its name is asked for
 *   incidents  a rank that stops at a verb, publishes on one lane that come late or never, a rank that is slow
 *   events     what both ends of a ring do, in the order in which each end does it
 */
#ifndef EP_TEST_H
#define EP_TEST_H

/* Plants: EpTest.plant. */
#define EP_PLANT_TAIL_BEFORE_DATA 1u
#define EP_PLANT_CREDIT_EARLY 2u
#define EP_PLANT_WRONG_SLOT 3u
#define EP_PLANT_WRONG_BANK 4u
#define EP_PLANT_COUNT_OFF_BY_ONE 5u
#define EP_PLANT_POSITION_OFF_BY_ONE 6u
#define EP_PLANT_PLACED_OFF_BY_ONE 7u
#define EP_PLANT_PLACED_EARLY 8u
#define EP_PLANT_NOT_WAITING_FOR_PULLS 9u
#define EP_PLANT_ROUNDED_TOO_EARLY 10u
#define EP_PLANT_IMPOLITE_WAITING 11u
#define EP_PLANT_LOW_RAISED_EARLY 12u
#define EP_PLANT_LOW_WRONG_BANK 13u
#define EP_PLANT_LOW_COUNT_OFF_BY_ONE 14u
#define EP_PLANT_OFFERED_EARLY 15u

/* Events: EpEvent.kind. */
#define EP_EVENT_FILLS 0u     /* an end opens: count slots were filled before */
#define EP_EVENT_FILLED 1u    /* count slots are filled */
#define EP_EVENT_PUBLISHED 2u /* is about to publish this tail */
#define EP_EVENT_SAW_HEAD 3u
#define EP_EVENT_EMPTIES 4u   /* an end opens: count slots were emptied before */
#define EP_EVENT_SAW_TAIL 5u
#define EP_EVENT_READ 6u      /* count slots have been read */
#define EP_EVENT_CREDITED 7u  /* is about to publish this head */

/* Time that a planted fault leaves the others to be fooled by it, in nanoseconds. */
#define EP_PLANT_PAUSE 60000u
#define EP_POISON (int)0xeeeeeeee

struct EpEvent {
    ep_u32 kind;
    ep_u32 peer;
    ep_u32 track;
    ep_u32 block;
    ep_u64 count;
    ep_u64 op;
};

/* Of one rank, in its device memory. */
struct EpTest {
    ep_u64 seed;         /* of delays; 0: none */
    ep_u64 host;         /* mapped u32: 1 when the rank has crashed */
    ep_u64 events;       /* EpEvent [room]; 0: none */
    ep_u64 late;         /* nanoseconds that publishes to late_to come later */
    ep_u32 room;
    ep_u32 count;        /* events, also those that had no room */
    ep_u32 longest;      /* of a seeded delay, in nanoseconds */
    ep_u32 slow;         /* nanoseconds that every verb takes longer */
    ep_u32 plant;
    ep_u32 poison;
    ep_u32 crashes;      /* whether the rank is to crash, after so many verbs: */
    ep_i32 verbs;
    ep_u32 crashed;
    ep_u32 late_to;      /* a rank; EP_FULL: none */
    ep_u32 late_lane;    /* EP_FULL: all */
    ep_i32 unharmed;     /* publishes there that are in time */
    ep_u32 lost;         /* whether they never come */
    ep_u32 reserved;
};
#ifdef EP_SIZE_TEST
static_assert(sizeof(EpTest) == EP_SIZE_TEST, "EpTest differs from the host's");
static_assert(sizeof(EpEvent) == 32, "EpEvent differs from the host's");
#endif

#ifdef EP_TEST

EP_DEV EpTest* ep_test(const EpRank& r) { return (EpTest*)r.test; }
EP_DEV bool ep_planted(const EpRank& r, ep_u32 plant) { return ep_test(r)->plant == plant; }
EP_DEV bool ep_crashed(const EpRank& r) { return ep_ld_relaxed(&ep_test(r)->crashed) != 0; }

EP_DEV void ep_pause(ep_u64 nanoseconds) {
    const ep_u64 began = ep_now();
    while (ep_now() - began < nanoseconds) __nanosleep(200);
}
/* Of a planted fault. */
EP_DEV void ep_be_slow() { ep_pause(EP_PLANT_PAUSE); }
/* The last rank is so slow that the others are through with all that they do on the host. */
EP_DEV void ep_be_last(const EpRank& r) {
    if (r.me + 1 == r.w.ranks) ep_pause(50 * EP_PLANT_PAUSE);
}

/* One verb in four is delayed. */
EP_DEV void ep_delay(const EpRank& r, ep_u32 what, ep_u64 which) {
    const EpTest* t = ep_test(r);
    if (t->slow) ep_pause(t->slow);
    if (t->seed == 0) return;
    ep_u64 z = t->seed + (ep_u64)r.me * 0x9e3779b97f4a7c15ull + (ep_u64)what * 0xd1342543de82ef95ull + which * 0xaf251af3b0f025b5ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    z ^= z >> 31;
    if (z % 4 == 0) ep_pause(z / 4 % t->longest);
}

/* Before a verb; false when the rank does nothing any more. */
EP_DEV bool ep_verb(const EpRank& r, ep_u32 what, ep_u64 which) {
    EpTest* t = ep_test(r);
    ep_delay(r, what, which);
    if (!t->crashes) return true;
    if (atomicSub(&t->verbs, 1) <= 0 && atomicExch(&t->crashed, 1u) == 0) {
        *(volatile ep_u32*)t->host = 1;
        __threadfence_system();
    }
    return !ep_crashed(r);
}

/* Before a publish; false when it is not to be seen by anybody. */
EP_DEV bool ep_posts(const EpRank& r, ep_u32 peer, ep_u32 lane, ep_u64 value) {
    EpTest* t = ep_test(r);
    if (!ep_verb(r, lane << 16 | peer, value)) return false;
    if (t->late_to != peer || (t->late_lane != EP_FULL && t->late_lane != lane)) return true;
    if (atomicSub(&t->unharmed, 1) > 0) return true;
    if (t->lost) return false;
    ep_pause(t->late);
    return !ep_crashed(r);
}

EP_DEV void ep_event(const EpRank& r, ep_u32 kind, ep_u32 peer, ep_u32 track, ep_u64 count, ep_u64 op) {
    EpTest* t = ep_test(r);
    if (t->events == 0) return;
    const ep_u32 at = atomicAdd(&t->count, 1u);
    if (at < t->room) ((EpEvent*)t->events)[at] = EpEvent{kind, peer, track, blockIdx.x, count, op};
}

/* What lies there has been read. By a warp; units of 16 bytes. */
EP_DEV void ep_poison(const EpRank& r, const ep_u8* at, ep_u32 bytes) {
    if (!ep_test(r)->poison) return;
    for (ep_u32 i = threadIdx.x % 32 * 16; i < bytes; i += 512)
        *(int4*)(at + i) = make_int4(EP_POISON, EP_POISON, EP_POISON, EP_POISON);
    __syncwarp();
}

#else

EP_DEV bool ep_planted(const EpRank&, ep_u32) { return false; }
EP_DEV bool ep_crashed(const EpRank&) { return false; }
EP_DEV void ep_be_slow() {}
EP_DEV void ep_be_last(const EpRank&) {}
EP_DEV void ep_delay(const EpRank&, ep_u32, ep_u64) {}
EP_DEV bool ep_verb(const EpRank&, ep_u32, ep_u64) { return true; }
EP_DEV bool ep_posts(const EpRank&, ep_u32, ep_u32, ep_u64) { return true; }
EP_DEV void ep_event(const EpRank&, ep_u32, ep_u32, ep_u32, ep_u64, ep_u64) {}
EP_DEV void ep_poison(const EpRank&, const ep_u8*, ep_u32) {}

#endif
#endif
