/*
 * ep_dispatch_ring_kernel: a dispatch whose rows go through rings (ep_dispatch_ring.h; between nodes ep_dispatch_far.h, within them also to their places).
 *
 *   launch   enough warps for all roles, co-resident with those of the other ranks (cooperative); between nodes so many for each role as a team has,
 *            and a block has all warps of a team
 *   roles    those of the rings. The block that comes last ends the operation
 *   memory   shared, between nodes: for each team exits of a forwarder, and what its leader says; for each warp room for rows on their way
 *
 * With direct placement on one node it follows ep_dispatch_kernel where that has too few warps for all roles; it ends at once where that left
 * nothing to do.
 */
#include "ep_dispatch_ring.h"
#ifdef EP_FAR_H
#include "ep_dispatch_far.h"

EP_POOL(ep_exits);

/* Opens the operation towards all neighbours: where blocks are granted, those of the node learn of this rank's. By a block. */
EP_DEV void ep_open_all(const EpRank& r, const EpDispatchRingArgs& a, ep_u64 began) {
    if (a.notes) return ep_send_notes(r, a.base, a.base_rows, 0, ep_threads(), began);
    for (ep_u32 peer = ep_thread(); peer < r.w.ranks; peer += ep_threads())
        if (ep_is_neighbour(r, peer)) ep_open(r, peer);
}
#define EP_DISPATCH_RING_WARPS EP_TEAMS_WARPS
#else
#define EP_DISPATCH_RING_WARPS EP_RING_WARPS
#endif

EP_KERNEL(32 * EP_DISPATCH_RING_WARPS) ep_dispatch_ring_kernel(EP_GIVEN(EpRank) r, EP_GIVEN(EpDispatchRingArgs) a) {
    if (ep_block_any(ep_closed(r))) return;
#ifdef EP_FAR_H
    const ep_u64 began = ep_now();
    if (ep_block() == 0) ep_open_all(r, a, began);
    const ep_u32 teams = ep_threads() / 32 / a.team, exits = r.w.ranks_per_node;
    ep_u8* batons = (ep_u8*)((EpExit*)ep_exits + teams * exits);
    const ep_u32 before = teams * (exits * EP_EXIT_BYTES + EP_BATON_BYTES);
    const EpTeam team = ep_team(ep_thread() / 32, a.team, (ep_u8*)ep_exits + (before + 127) / 128 * 128, a.room);
    const ep_u32 number = ep_block() * teams + team.number;
    EpExit* own = (EpExit*)ep_exits + team.number * exits;
    ep_u8* baton = batons + team.number * EP_BATON_BYTES;
    ep_play_far_role(r, a, number, team, own, baton, began);
    ep_play_near_role(r, a, number, team, baton, began);
#else
    if (ep_stays(r, a.ahead) || (a.notes && ep_local(r)->rings == 0)) return;
    const ep_u64 began = ep_now();
    if (ep_block() == 0)
        for (ep_u32 peer = ep_thread(); peer < r.w.ranks; peer += ep_threads())
            if (ep_is_neighbour(r, peer)) ep_open(r, peer);
    ep_play_ring_role(r, a, ep_block() * (ep_threads() / 32) + ep_thread() / 32, began);
#endif
    if (!ep_last_block_goes_on(r, EP_MEETING_MOVED)) return;
    ep_say_done(r);
    ep_count_op(r);
}
