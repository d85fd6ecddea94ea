//! How verbs that may wait are polled.

use std::cell::RefCell;
use std::future::poll_fn;
use std::task::{Context, Poll};

/// Begins a verb in its world when it is first polled, and resumes it from then on.
pub(crate) async fn begin_and_resume<W, T>(
    world: &RefCell<W>,
    mut begin: impl FnMut(&mut W, &Context<'_>) -> Poll<T>,
    mut resume: impl FnMut(&mut W, &Context<'_>) -> Poll<T>,
) -> T {
    let mut begun = false;
    poll_fn(|context| {
        let mut world = world.borrow_mut();
        if std::mem::replace(&mut begun, true) { resume(&mut world, context) } else { begin(&mut world, context) }
    })
    .await
}
