/*
 * device.cpp: a device whose threads are those of this process: the far verbs, to be called from Rust.
 */
#include "words.h"

#include "ep_far_lanes.h"

extern "C" {

ep_u64 device_now() { return ep_now(); }

ep_u32 device_put(ep_u64 lane, ep_u64 from, ep_u64 to, ep_u64 bytes, ep_u64 until, ep_u64* ticket) {
    return ep_far_put(EpFar{lane}, from, to, bytes, until, ticket);
}

ep_u32 device_publish(ep_u64 lane, ep_u64 cell, ep_u64 bits, ep_u64 until) {
    return ep_far_publish(EpFar{lane}, cell, bits, until);
}

ep_u32 device_flush(ep_u64 lane, ep_u64 ticket, ep_u64 until) { return ep_far_flush(EpFar{lane}, ticket, until); }

ep_u32 device_poll(ep_u64 lane) { return ep_far_poll(EpFar{lane}); }

ep_u64 device_pulse(ep_u64 lane) { return ep_far_pulse(EpFar{lane}); }

/* So many puts of the same bytes, and a publish behind each `every` of them; then a flush of all. */
ep_u32 device_stream(ep_u64 lane, ep_u64 at, ep_u64 bytes, ep_u64 cell, ep_u64 first, ep_u64 puts, ep_u64 every, ep_u64 until) {
    ep_u64 ticket = 0;
    for (ep_u64 put = 1; put <= puts; ++put) {
        ep_u32 status = ep_far_put(EpFar{lane}, at, at, bytes, until, &ticket);
        if (status == EP_FAR_OK && put % every == 0) status = ep_far_publish(EpFar{lane}, cell, first + put, until);
        if (status != EP_FAR_OK) return status;
    }
    return ep_far_flush(EpFar{lane}, ticket, until);
}
}
