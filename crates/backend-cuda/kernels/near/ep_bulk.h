/*
 * ep_bulk.h: the bulk copy engine of sm_90: global to shared memory, completing on an mbarrier; shared to global memory,
 * completing in groups of the issuing thread.
 *
 * `ep_bulk_wait_read`: the shared memory may be reused. `ep_bulk_wait`, `ep_bulk_wait_all`: the writes are complete and visible to the
 * issuing thread; only then may a barrier and a release announce them.
 */
#ifndef EP_BULK_H
#define EP_BULK_H
#include "ep_near.h"

EP_DEV ep_u32 ep_shared(const void* p) { return (ep_u32)__cvta_generic_to_shared(p); }

EP_DEV void ep_barrier_init(ep_u64* bar, ep_u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(ep_shared(bar)), "r"(arrivals) : "memory");
}
EP_DEV void ep_barrier_init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
EP_DEV void ep_barrier_wait(ep_u64* bar, ep_u32 parity) {
    ep_u32 done = 0;
    while (!done)
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(ep_shared(bar)), "r"(parity) : "memory");
}
EP_DEV void ep_bulk_expect(ep_u64* bar, ep_u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(ep_shared(bar)), "r"(bytes) : "memory");
}
EP_DEV void ep_bulk_load(void* to, const void* from, ep_u32 bytes, ep_u64* bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(ep_shared(to)),
                 "l"(from), "r"(bytes), "r"(ep_shared(bar)) : "memory");
}
/* Of a peer's window, or of the own memory. What announced it was seen by generic loads: the copy engine's come after those. */
EP_DEV void ep_get_bulk(void* to, EpAt from, ep_u32 bytes, ep_u64* bar) { ep_bulk_load(to, EpNear::of(from), bytes, bar); }
/* To the own memory. */
EP_DEV void ep_bulk_store(void* to, const void* from, ep_u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(ep_shared(from)), "r"(bytes)
                 : "memory");
}
EP_DEV void ep_put_bulk(EpAt to, const void* shared, ep_u32 bytes) { ep_bulk_store(EpNear::of(to), shared, bytes); }
EP_DEV void ep_bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int kPending> EP_DEV void ep_bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
template <int kPending> EP_DEV void ep_bulk_wait() { asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory"); }
EP_DEV void ep_bulk_wait_all() { ep_bulk_wait<0>(); }
/* Ordinary stores to shared memory become visible to the bulk copy engine: by each storing thread, before the barrier. */
EP_DEV void ep_fence_bulk() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
/* What the thread has seen announced may be asked of the bulk copy engine. */
EP_DEV void ep_fence_seen() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
#endif
