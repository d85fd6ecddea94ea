//! Ranks that crash, and faults that the suite's cases find.

use std::future::{Future, poll_fn};
use std::task::Poll;

use ep_ascend::args::Plant;

/// Does a rank's work to its end, or until the rank crashes: none then. Where nobody is to learn of it, the endpoint is never dropped.
pub(crate) async fn befall<T>(
    work: impl Future<Output = T>,
    has_crashed: impl Fn() -> bool,
    is_noticed: bool,
) -> Option<T> {
    let mut work = Box::pin(work);
    let done = poll_fn(|context| match work.as_mut().poll(context) {
        _ if has_crashed() => Poll::Ready(None),
        Poll::Ready(value) => Poll::Ready(Some(value)),
        Poll::Pending => Poll::Pending,
    });
    let done = done.await;
    if done.is_none() && !is_noticed {
        std::mem::forget(work);
    }
    done
}

/// Faults of the kernels that cases of the suite find: which must fail of each, and what it must say.
pub(crate) const IN_CASES: [(Plant, &str, &str); 7] = [
    (Plant::ProbePublishedEarly, "f3_who_sees_the_value_sees_the_puts_before_it", "a round's bytes"),
    (Plant::ProbePutShort, "f1_a_put_changes_exactly_the_bytes_named", "the range"),
    (Plant::ProbeFlushedEarly, "far_f5_a_flushed_source_may_be_overwritten", "what was put"),
    (Plant::ProbeUnchecked, "f8_ranges_outside_the_window_are_refused", "bounds"),
    (Plant::ProbeGoneUnheard, "f7_a_lost_peer_fails_only_what_involves_it", "noticed true"),
    (Plant::StaleCell, "f4_cells_never_fall_and_values_may_repeat", "waited"),
    (Plant::LowFarUnsaid, "low_latency_over_nodes_who_leaves_with_its_lost_rank_is_not_blamed", "rank 0 went on"),
];
