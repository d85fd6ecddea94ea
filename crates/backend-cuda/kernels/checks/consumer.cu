/*
 * ep_consumer_kernel: consumes the rows of a low-latency dispatch as they come, and says of each block when it is done: what a GEMM would do, for tests. Its
 * results are the rows.
 *
 *   launch   any number of blocks, beside the receiving half or behind it
 *   memory   EpEarly and its counters; the rows; the results
 *   rules    those of a consumer (ep_low_early.h): one thread acquires, then a barrier; and of who makes results (ep_low_ready.h): a barrier, then one
 *            thread's fence and add. Waits end by the deadline, or when the rows are known not to come
 */
#include "ep_device.h"
#include "ep_args.h"

EP_DEV bool ep_consumer_reaches(const EpConsumerArgs& a, ep_u64 counter, ep_u64 due, ep_u64 began) {
    const EpEarly* early = (const EpEarly*)a.early;
    while (ep_ld_acquire_gpu((const void*)counter) < due) {
        const bool stopped = ep_ld_acquire_gpu(&early->stopped) == early->epoch;
        if (stopped || ep_now() - began > a.allowed) {
            ep_atomic_add((ep_u32*)a.out + (stopped ? 0 : 1), 1u);
            return false;
        }
        ep_nap(100);
    }
    return true;
}

/* Waits for a block of rows; how many there are is known then. By one thread. */
EP_DEV bool ep_consumer_awaits(const EpConsumerArgs& a, ep_u32 at, ep_u64 began) {
    const ep_u64 expected = ep_early_expected_at(a.early, a.experts * a.blocks, at);
    return ep_consumer_reaches(a, expected, ((const EpEarly*)a.early)->epoch, began) &&
           ep_consumer_reaches(a, ep_early_arrived_at(a.early, at), ep_ld_acquire_gpu((const void*)expected), began);
}

EP_KERNEL(256) ep_consumer_kernel(EP_GIVEN(EpConsumerArgs) a) {
    const ep_u64 began = ep_now();
    for (ep_u32 at = ep_block(); at < a.experts * a.blocks; at += ep_blocks()) {
        const bool comes = ep_thread() != 0 || ep_consumer_awaits(a, at, began);
        if (ep_block_any(!comes)) return;
        const ep_u32 expert = at / a.blocks, before = (at - expert * a.blocks) * a.rows;
        const ep_u32 all = ((const volatile ep_u32*)a.expert_counts)[expert], left = all > before ? all - before : 0;
        const ep_u32 rows = left < a.rows ? left : a.rows, first = expert * a.wide + before;
        /* A result that is read too early is one of before. */
        const ep_u64 paused = ep_now();
        while (a.pause > 0 && ep_now() - paused < a.pause) ep_nap(1000);
        for (ep_u32 unit = ep_thread(); unit < rows * a.columns; unit += ep_threads()) {
            const ep_u32 row = first + unit / a.columns, column = unit % a.columns * 16;
            ep_st16((ep_u8*)a.y + row * a.y_stride + column, ep_ld16((const ep_u8*)a.x + row * a.x_stride + column));
        }
        ep_block_meet();
        if (ep_thread() != 0 || rows == 0) continue;
        ep_fence_device();
        /* The low half of a counter, which no count fills. */
        ep_u64 counter = ep_early_ready_at(a.early, a.experts * a.blocks, at);
        if (a.signals != 0) counter = a.signals + 4ull * at;
        ep_atomic_add((ep_u32*)counter, 1u);
    }
}
