/*
 * ep_play.h: what a core does in a launch, by its number: senders, coordinators, forwarders, forwarders' coordinators, receivers. The first
 * coordinator is the control core. On one server the other coordinators and the forwarders have nothing to do. Credit between servers goes by
 * the queue that the rows go by, which has one poster: so the forwarders' coordinators have nothing to do.
 */
#ifndef EP_PLAY_H
#define EP_PLAY_H
#include "ep_control.h"
#include "ep_coordinate.h"
#include "ep_fill.h"

/* Plays the part of this core. `Kernel` says what the parameters are (Args), how the rings of a channel are filled (fill) and, for the `nth`
   receiver, how those of its channels are emptied (empty), in kEmptyBytes of the UB; for the `nth` forwarder, how what goes between servers is
   passed on (pass), in kPassBytes. */
template <class Kernel> EP_DEV void ep_play(GM_ADDR args) {
    TPipe pipe;
    TBuf<TPosition::VECCALC> common, role;
    pipe.InitBuffer(common, EP_COMMON_BYTES);
    typename Kernel::Args a;
    ep_load_struct(a, (ep_u64)args);
    EpCore c;
    if (!ep_begin(c, a.launch, common.Get<uint64_t>())) {
        /* The operation may come again under the same number: nothing of it has ended. What the control core says is the host's to read. */
        if (EP_PLANTED(c, ENDED_UNBEGUN)) ep_end(c);
        else if (c.number != c.launch.roles.senders) ep_end_late(c);
        return;
    }
    const EpRoles& roles = c.launch.roles;
    const ep_u32 forwarders = roles.senders + roles.coordinators;
    const ep_u32 receivers = forwarders + roles.forwarders + roles.forwarder_coordinators;
    const bool far = c.launch.r.w.nodes > 1;
    if (c.number == roles.senders) return ep_control(c);
    if (c.number < roles.senders) {
        pipe.InitBuffer(role, EP_PLANTED(c, UB_FULL) ? EP_UB_BYTES : EP_ROWS_BYTES);
        EpBuffers buffers;
        ep_open_buffers(c, buffers, role.Get<uint8_t>());
        /* Where there are more cores than channels, several fill the rings of a channel to other servers. */
        const ep_u32 channels = c.launch.rings.channels, each = far ? ep_fillers(c) : 1;
        const ep_u32 step = each > 1 ? channels : roles.senders;
        if (c.number < step * each)
            for (ep_u32 channel = c.number % step; channel < channels && !c.failed; channel += step)
                Kernel::fill(c, a, buffers, channel, c.number / step);
        ep_close_buffers(c);
    } else if (far && c.number < forwarders) {
        pipe.InitBuffer(role, EP_COORDINATE_BYTES);
        ep_coordinate(c, role.Get<uint8_t>(), c.number - roles.senders - 1, roles.coordinators - 1);
    } else if (far && c.number >= forwarders && c.number < forwarders + roles.forwarders) {
        pipe.InitBuffer(role, Kernel::kPassBytes);
        Kernel::pass(c, a, role.Get<uint8_t>(), c.number - forwarders);
    } else if (c.number >= receivers) {
        pipe.InitBuffer(role, Kernel::kEmptyBytes);
        Kernel::empty(c, a, role.Get<uint8_t>(), c.number - receivers);
    }
    ep_end(c);
}

#endif
