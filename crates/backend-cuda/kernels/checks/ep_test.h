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

/* Time that a planted fault leaves the others to be fooled by it, in nanoseconds. */
#define EP_PLANT_PAUSE 60000u
#define EP_POISON (int)0xeeeeeeee

#ifdef EP_TEST

EP_DEV EpTest* ep_test(const EpRank& r) { return (EpTest*)r.test; }
EP_DEV bool ep_planted(const EpRank& r, ep_u32 plant) { return ep_test(r)->plant == plant; }
EP_DEV bool ep_crashed(const EpRank& r) { return ep_ld_relaxed(&ep_test(r)->crashed) != 0; }

EP_DEV void ep_pause(ep_u64 nanoseconds) {
    const ep_u64 began = ep_now();
    while (ep_now() - began < nanoseconds) ep_nap(200);
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
    if (ep_atomic_add(&t->verbs, -1) <= 0 && ep_atomic_exchange(&t->crashed, 1u) == 0) {
        *(volatile ep_u32*)t->host = 1;
        ep_fence_sys();
    }
    return !ep_crashed(r);
}

/* Before a publish; false when it is not to be seen by anybody. */
EP_DEV bool ep_posts(const EpRank& r, ep_u32 peer, ep_u32 lane, ep_u64 value) {
    EpTest* t = ep_test(r);
    if (!ep_verb(r, lane << 16 | peer, value)) return false;
    if (t->late_to != peer || (t->late_lane != EP_FULL && t->late_lane != lane)) return true;
    if (ep_atomic_add(&t->unharmed, -1) > 0) return true;
    if (t->lost) return false;
    ep_pause(t->late);
    return !ep_crashed(r);
}

EP_DEV void ep_event(const EpRank& r, ep_u32 kind, ep_u32 peer, ep_u32 track, ep_u64 count, ep_u64 op) {
    EpTest* t = ep_test(r);
    if (t->events == 0) return;
    const ep_u32 at = ep_atomic_add(&t->count, 1u);
    if (at < t->room) ((EpEvent*)t->events)[at] = EpEvent{kind, peer, track, ep_block(), count, op};
}

/* What lies there has been read. By a warp; units of 16 bytes. */
EP_DEV void ep_poison(const EpRank& r, const ep_u8* at, ep_u32 bytes) {
    if (!ep_test(r)->poison) return;
    for (ep_u32 i = ep_warp_lane() * 16; i < bytes; i += 512)
        *(EpUnit*)(at + i) = ep_unit(EP_POISON, EP_POISON, EP_POISON, EP_POISON);
    ep_warp_meet();
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
