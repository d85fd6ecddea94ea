/*
 * ep_play.h: what a core does in a launch, by its number: senders, coordinators, forwarders, forwarders' coordinators, receivers. The first
 * coordinator is the control core. On one server the other coordinators and the forwarders have nothing to do.
 */
#ifndef EP_PLAY_H
#define EP_PLAY_H
#include "ep_control.h"
#include "ep_fill.h"

/* Plays the part of this core. `Kernel` says what the parameters are (Args), how the rings of a channel are filled (fill) and, for the `nth`
   receiver, how those of its channels are emptied (empty), in kEmptyBytes of the UB. */
template <class Kernel> EP_DEV void ep_play(GM_ADDR args) {
    TPipe pipe;
    TBuf<TPosition::VECCALC> common, role;
    pipe.InitBuffer(common, EP_COMMON_BYTES);
    typename Kernel::Args a;
    ep_load_struct(a, (ep_u64)args);
    EpCore c;
    if (!ep_begin(c, a.launch, common.Get<uint64_t>())) {
        /* The operation may come again under the same number: nothing of it has ended. */
        if (EP_PLANTED(c, ENDED_UNBEGUN)) ep_end(c);
        return;
    }
    const EpRoles& roles = c.launch.roles;
    const ep_u32 receivers = roles.senders + roles.coordinators + roles.forwarders + roles.forwarder_coordinators;
    if (c.number == roles.senders) return ep_control(c);
    if (c.number < roles.senders) {
        pipe.InitBuffer(role, EP_PLANTED(c, UB_FULL) ? EP_UB_BYTES : EP_ROWS_BYTES);
        EpBuffers buffers;
        ep_open_buffers(c, buffers, role.Get<uint8_t>());
        for (ep_u32 channel = c.number; channel < c.launch.rings.channels && !c.failed; channel += roles.senders)
            Kernel::fill(c, a, buffers, channel);
        ep_close_buffers(c);
    } else if (c.number >= receivers) {
        pipe.InitBuffer(role, Kernel::kEmptyBytes);
        Kernel::empty(c, a, role.Get<uint8_t>(), c.number - receivers);
    }
    ep_end(c);
}

#endif
