/*
 * ep_far.h: the verbs by which a device posts to lanes between nodes: their names, who calls them, and what they order.
 *
 * Written by ep_core::device::headers(); do not edit. A test fails when this file is stale and says how to renew it.
 *
 * A transport that devices drive (ep_core::transport::DeviceTransport) supplies the text that defines the verbs. It
 * includes this, and kernels include it under one name, ep_far_lanes.h. The rules are those of ep_core::port:
 *
 *   F3 signal   what other threads wrote into the source is ordered before the poster's put: they complete their bulk stores, meet it, and
 *               the verb fences. A publish comes after all earlier puts and publishes of the lane
 *   F4 counters one thread posts to a lane; values of a cell never fall
 *   F5 reuse    the source of a put may be read until a flush of its ticket is through
 *   F6 bounded  a verb that cannot go on ends at `until`, by ep_now(), and says why: EP_FAR_...
 *   F8 checked  offsets are checked by the transport: one outside breaks the lane with EP_FAR_REFUSED and touches nothing
 */
#ifndef EP_FAR_H
#define EP_FAR_H
#include "ep_words.h"


/* What became of a verb on a lane between nodes. */
#define EP_FAR_OK 0u /* It is through. */
#define EP_FAR_BROKEN 1u /* The lane has broken: the host knows why. */
#define EP_FAR_TIMEOUT 2u /* The time was up: what was posted is under way. */
#define EP_FAR_STALLED 3u /* The time was up: whoever posts for the device takes nothing. */
#define EP_FAR_GONE 4u /* Whoever posts for the device has ended. */
#define EP_FAR_REFUSED 5u /* What was posted is no verb, or reaches out of the window. */

/* A lane: the address of its state, which the host has made. */
struct EpFar {
    ep_u64 state;
};

/* ---- by the one thread that posts to the lane ---- */

/* Posts a copy of bytes of the own window at `from` to `to` in the peer's; none are a no-op. Its ticket, or that of the last put. */
EP_DEV ep_u32 ep_far_put(EpFar lane, ep_u64 from, ep_u64 to, ep_u64 bytes, ep_u64 until, ep_u64* ticket);
/* Posts that the cell at this offset of the peer's window becomes `bits`. All that was posted is on its way. */
EP_DEV ep_u32 ep_far_publish(EpFar lane, ep_u64 cell, ep_u64 bits, ep_u64 until);
/* Waits until the sources of all puts up to a ticket may be overwritten. */
EP_DEV ep_u32 ep_far_flush(EpFar lane, ep_u64 ticket, ep_u64 until);
/* What is known to be wrong with the lane, without waiting. */
EP_DEV ep_u32 ep_far_poll(EpFar lane);
/* Of a lane of Watch: a number that changes as long as whoever posts for the device goes on. By any thread. */
EP_DEV ep_u64 ep_far_pulse(EpFar lane);

#endif
