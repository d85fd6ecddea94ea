/*
 * ep_return_team.h: a returner that is a team (ep_combine_team.h): each warp puts rows of its own.
 *
 *   leader    waits for slots, as many rows ahead as are free, and says so; pushes them
 *   rules     F3: all warps have put their rows when they meet, and the leader pushes behind that
 */
#ifndef EP_RETURN_TEAM_H
#define EP_RETURN_TEAM_H
#include "ep_combine_team.h"

/* Rows of a warp from one meeting to the next, at most. */
#define EP_GIVEN_TOGETHER 4u

/* What the leader says: so many rows go into the ring from its tail on; none where there is no more. */
struct EpGiving {
    EpProducer ring;
    ep_u32 peer, rows;
};
static_assert(sizeof(EpGiving) <= EP_LEAD_BYTES, "the host makes room for another EpGiving");

/* Rows for which there are slots, up to `most`. Where the first goes has been awaited. */
EP_DEV ep_u32 ep_outlet_free(const EpRings& rings, const EpOutlet& o, ep_u32 most) {
    const ep_u64 free = rings.slots - (o.ring.tail - o.ring.head);
    return free < most ? (ep_u32)free : most;
}

EP_DEV void ep_give_in_team(const EpRank& r, const EpCombineRingArgs& a, const EpRole& role, const EpTeam& team, const EpDesk& desk, ep_u64 began) {
    const EpGiven given = ep_given(r, a, role);
    const bool leads = ep_leads(team);
    EpGiving* says = (EpGiving*)desk.lead;
    EpOutlet ring;
    EpAt at;
    bool right = true;
    if (leads) right = ep_begin_giving(r, a, role, given, ring, began);
    for (ep_u32 position = given.begin;;) {
        if (leads) {
            const ep_u32 left = given.end - position, most = EP_GIVEN_TOGETHER * team.warps;
            if (right && left > 0) right = ep_outlet_slot(r, a.rings, ring, began, &at);
            const ep_u32 rows = right ? ep_outlet_free(a.rings, ring, left < most ? left : most) : 0;
            if (ep_warp_lane() == 0) *says = EpGiving{ring.ring, ring.peer, rows};
        }
        ep_team_meet(team.number, team.warps);
        const EpGiving giving = *says;
        if (giving.rows == 0) break;
        for (ep_u32 i = team.member; i < giving.rows; i += team.warps) {
            EpProducer slot = giving.ring;
            slot.tail += i + (ep_planted(r, EP_PLANT_WRONG_SLOT) ? 1 : 0);
            ep_give_row(r, a, given, position + i, ep_at(r, giving.peer, ep_ring_slot(r.w, a.rings, r.me, role.track, ep_producer_slot(slot, a.rings))));
        }
        ep_team_meet(team.number, team.warps);
        position += giving.rows;
        for (ep_u32 i = 0; leads && i < giving.rows; ++i) ep_outlet_push(r, a.rings, ring);
    }
    if (leads && right) ep_outlet_close(r, a.rings, ring);
}
#endif
