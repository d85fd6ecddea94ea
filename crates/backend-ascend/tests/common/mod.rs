//! Ranks that crash.

use std::future::{Future, poll_fn};
use std::task::Poll;

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
