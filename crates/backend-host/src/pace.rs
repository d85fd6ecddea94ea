//! The busy loop that a rank's roles run in, and when it lets other threads run.

use std::cell::Cell;
use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};
use std::thread;

/// Rounds in which no wait ended before a rank begins to yield its core, where every rank has one.
const SPIN: u32 = 2000;

/// Whether ranks of this process are, or have been, more than the cores it may use.
static CROWDED: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// Whether something moved on this thread since it was last asked.
    static STIRRED: Cell<bool> = const { Cell::new(false) };
}

/// Notes that a wait on this thread has ended.
#[inline]
pub(crate) fn stir() {
    STIRRED.set(true);
}

/// Notes that `ranks` ranks share the cores that this process may use.
pub(crate) fn expect(ranks: u32) {
    // Where the cores cannot be counted, there may be few.
    let cores = thread::available_parallelism().map_or(1, |cores| cores.get());
    if ranks as usize > cores {
        CROWDED.store(true, Ordering::Relaxed);
    }
}

/// Whether ranks have to take turns on the cores.
#[inline]
pub(crate) fn is_crowded() -> bool {
    CROWDED.load(Ordering::Relaxed)
}

/// Runs a rank to its end on the calling thread, in a busy loop: roles look for what they wait for again and again. A round in
/// which no wait ends yields the core where ranks are more than cores, and else once there have been many of them.
///
/// Any executor that polls again when it is woken serves; this one knows when to yield.
pub fn block_on<T>(rank: impl Future<Output = T>) -> T {
    let mut rank = pin!(rank);
    loop {
        if let Some(value) = block_on_while(rank.as_mut(), || true) {
            return value;
        }
    }
}

/// As [`block_on`], until `go_on` says no: then none. It is asked each time before the rank yields its core. A rank that is dropped
/// then has abandoned its call, which poisons its communicator.
pub fn block_on_while<T>(rank: impl Future<Output = T>, mut go_on: impl FnMut() -> bool) -> Option<T> {
    let mut rank = pin!(rank);
    let mut context = Context::from_waker(Waker::noop());
    let mut idle = 0u32;
    loop {
        STIRRED.set(false);
        // Loom runs another thread only where it is told to.
        #[cfg(ep_loom)]
        loom::thread::yield_now();
        if let Poll::Ready(value) = rank.as_mut().poll(&mut context) {
            return Some(value);
        }
        if STIRRED.get() {
            idle = 0;
        } else if is_crowded() || idle >= SPIN {
            if !go_on() {
                return None;
            }
            thread::yield_now();
        } else {
            idle += 1;
            std::hint::spin_loop();
        }
    }
}
