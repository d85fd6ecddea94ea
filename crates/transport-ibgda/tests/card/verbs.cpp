/*
 * verbs.cpp: the verbs as functions that a test calls. `allowed`: nanoseconds that a verb may take; 0: it says at once how it stands.
 */
#include "ep_device.h"
#include "ep_far_lanes.h"

extern "C" {
/* What is called between accesses of the calling thread's verbs, with what. */
void test_meanwhile(void (*step)(void*), void* with) {
    late::meanwhile = step;
    late::of_meanwhile = with;
}
ep_u32 test_put(ep_u64 state, ep_u64 from, ep_u64 to, ep_u64 bytes, ep_u64 allowed, ep_u64* ticket) {
    return ep_far_put({state}, from, to, bytes, ep_now() + allowed, ticket);
}
ep_u32 test_publish(ep_u64 state, ep_u64 cell, ep_u64 bits, ep_u64 allowed) {
    return ep_far_publish({state}, cell, bits, ep_now() + allowed);
}
ep_u32 test_flush(ep_u64 state, ep_u64 ticket, ep_u64 allowed) { return ep_far_flush({state}, ticket, ep_now() + allowed); }
ep_u32 test_poll(ep_u64 state) { return ep_far_poll({state}); }
}
