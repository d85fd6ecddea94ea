/*
 * ep_low_play.h: what a core does in a launch of low latency, by its number: the first coordinator is the control core, over several servers the
 * other coordinators post, all others work alike.
 */
#ifndef EP_LOW_PLAY_H
#define EP_LOW_PLAY_H
#include "ep_low_control.h"
#include "ep_low_post.h"

/* Plays the part of this core. `Half` says what the others do (work), in kBytes of the UB. */
template <class Half> EP_DEV void ep_low_play(GM_ADDR args) {
    TPipe pipe;
    TBuf<TPosition::VECCALC> common, role;
    pipe.InitBuffer(common, EP_COMMON_BYTES);
    EpLowArgs a;
    ep_load_struct(a, (ep_u64)args);
    EpCore c;
    const bool begins = ep_begin(c, a.launch, common.Get<uint64_t>());
    c.op = a.op;
    c.mark = a.ticket;
    if (!begins) return ep_end_late(c);
    if (c.number == c.launch.roles.senders) return ep_low_control(c, a);
    if (c.number > c.launch.roles.senders && c.number < c.launch.roles.senders + ep_low_apart(c)) {
        pipe.InitBuffer(role, EP_LOW_POST_BYTES);
        ep_low_post(c, a, role.Get<uint8_t>());
    } else {
        pipe.InitBuffer(role, Half::kBytes);
        Half::work(c, a, role.Get<uint8_t>());
    }
    ep_end(c);
}

#endif
