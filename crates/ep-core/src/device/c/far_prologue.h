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

