//! Waiting without blocking the thread: several ranks may share one.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::{Context, Poll, Waker};

/// Asks again and again, letting other futures of the thread run in between, until there is an answer.
pub(crate) async fn until<T>(mut ask: impl FnMut() -> Option<T>) -> T {
    poll_fn(|context| match ask() {
        Some(answer) => Poll::Ready(answer),
        None => {
            context.waker().wake_by_ref();
            Poll::Pending
        }
    })
    .await
}

/// Runs a future to its end on the calling thread.
pub(crate) fn finish<T>(future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    let mut context = Context::from_waker(Waker::noop());
    loop {
        if let Poll::Ready(value) = future.as_mut().poll(&mut context) {
            return value;
        }
        std::thread::yield_now();
    }
}
