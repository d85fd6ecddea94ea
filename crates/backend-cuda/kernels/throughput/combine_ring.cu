/*
 * ep_combine_ring_kernel: the rings of a rank that has offered no block, or that has more channels than blocks: it gives rows back, and
 * reduces where some of its own come through rings (ep_combine_ring.h). Follows ep_combine_kernel, and ends at once where that left
 * nothing to do.
 *
 *   launch   enough warps for all roles, co-resident with those of the other ranks (cooperative); between nodes so many for each role as a team has,
 *            and a block has all warps of a team
 *   roles    those of the rings, and between nodes gatherers (ep_combine_far.h). The block that comes last ends the operation
 *   memory   shared: where rows lie; a desk for each warp, or for each team (ep_combine_rows.h)
 */
#include "ep_combine_ring.h"
#ifdef EP_FAR_H
#include "ep_combine_far.h"
#include "ep_return_team.h"
#endif

EP_POOL(ep_pool);

#ifdef EP_FAR_H
#define EP_COMBINE_RING_WARPS EP_TEAMS_WARPS
#else
#define EP_COMBINE_RING_WARPS EP_RING_WARPS
#endif

EP_KERNEL(32 * EP_COMBINE_RING_WARPS) ep_combine_ring_kernel(EP_GIVEN(EpRank) r, EP_GIVEN(EpCombineRingArgs) a) {
    if (ep_block_any(ep_closed(r))) return;
    const ep_u32 left = ep_local(r)->rings;
    if (left == 0) return;
    const ep_u64 began = ep_now();
    EpSource* sources = (EpSource*)ep_pool;
    ep_learn_sources(r, a.combine, sources, ep_threads(), began);
    ep_block_meet();
    const ep_u32 ranks = r.w.ranks, in_block = ep_thread() / 32, part = EP_COLUMNS * 512;
#ifdef EP_FAR_H
    const EpTeam team = ep_team(in_block, a.team, 0, 0);
    const ep_u32 number = ep_block() * (ep_threads() / 32 / team.warps) + team.number;
#else
    const ep_u32 number = ep_block() * (ep_threads() / 32) + in_block;
#endif
    if (number < a.role_count) {
        const EpRole role = ((const EpRole*)a.roles)[number];
#ifdef EP_FAR_H
        const ep_u32 bytes = ep_desk_bytes(r, a.depth, part, team.warps);
        const EpDesk desk = ep_desk(r, (ep_u8*)(sources + ranks) + team.number * bytes, a.depth, part, team.warps, team.member);
        if (role.duty == EP_DUTY_REDUCER && left == 1) ep_reduce(r, a, role, team, sources, desk, began);
        if (role.duty == EP_DUTY_GATHERER && ep_takes_part(r, role.peer)) ep_gather(r, a, role, team, sources, desk, began);
        if (ep_returns(r, a, role)) ep_give_in_team(r, a, role, team, desk, began);
#else
        const EpDesk desk = ep_desk(r, (ep_u8*)(sources + ranks) + in_block * ep_desk_bytes(r, a.depth, part), a.depth, part);
        if (role.duty == EP_DUTY_REDUCER && left == 1) ep_reduce<EP_COLUMNS>(r, a, sources, desk, role.channel, began);
        if (ep_returns(r, a, role)) ep_give_back(r, a, role, began);
#endif
    }
    if (!ep_last_block_goes_on(r, EP_MEETING_MOVED)) return;
    ep_end_combine(r, a.combine, began);
}
