/*
 * ep_team.h: a role between nodes that several warps of a block play: its team.
 *
 *   leader    the first warp. It alone does what is protocol: opens and closes rings, waits, publishes. What it says to the others lies in shared memory
 *   meetings  one behind what the leader says, one behind what all have done of it. The leader comes to the next meeting whatever happens
 *   rules     F3, F9: what all warps have written, or read, comes before the meeting, and the leader's fence and publish behind it
 */
#ifndef EP_TEAM_H
#define EP_TEAM_H
#include "ep_near.h"

struct EpTeam {
    ep_u32 number; /* in the block */
    ep_u32 member, warps;
    ep_u8* hold; /* shared memory of this warp, for rows on their way (ep_carry.h) */
    ep_u32 room; /* bytes of it, a multiple of 512 for each of its EP_CARRY_STAGES stages */
};

/* That of a warp of the block, whose warps have so many bytes each from `holds` on. */
EP_DEV EpTeam ep_team(ep_u32 warp, ep_u32 warps, ep_u8* holds, ep_u32 room) {
    return EpTeam{warp / warps, warp % warps, warps, holds + warp * room, room};
}
EP_DEV bool ep_leads(const EpTeam& team) { return team.member == 0; }
#endif
