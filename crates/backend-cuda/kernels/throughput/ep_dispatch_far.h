/*
 * ep_dispatch_far.h: a row crosses the network once to each node that needs it, along the rail, and is fanned out there.
 *
 *   roles    a team each: far sender (ep_send_far.h), forwarder (ep_forward.h)
 *   memory   rings between nodes and within; shared: for each team exits of a forwarder, and what its leader says
 *   rules    no circle of waits: the far sender waits for the forwarder, the forwarder for receivers, and these for nobody. A forwarder reads a row in its
 *            slot, and returns the slot when all have it. Where a rank of its node granted a block it places the row there (ep_place_far.h), and
 *            waits for that rank no more
 */
#ifndef EP_DISPATCH_FAR_H
#define EP_DISPATCH_FAR_H
#include "ep_forward.h"
#include "ep_send_far.h"

/* The roles of rings between nodes: the `number`-th of all that the launch has, if it is one. `exits` and `baton` are the team's. */
EP_DEV void ep_play_far_role(const EpRank& r, const EpDispatchRingArgs& a, ep_u32 number, const EpTeam& team, EpExit* exits, void* baton, ep_u64 began) {
    if (number >= a.role_count) return;
    const EpRole role = ((const EpRole*)a.roles)[number];
    if (!ep_takes_part(r, role.peer)) return;
    if (role.duty == EP_DUTY_SENDER && ep_is_beyond(r, role.peer)) ep_send_far(r, a, role, team, baton, began);
    if (role.duty == EP_DUTY_FORWARDER) ep_forward(r, a, role, team, exits, baton, began);
}
#endif
