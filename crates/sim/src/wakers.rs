//! Wakers of futures that wait in a world.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Wake, Waker};

use ep_core::Rank;

/// Remembers whom to wake, without cloning a waker that is already there.
pub(crate) fn keep_waker(place: &mut Option<Waker>, context: &Context<'_>) {
    match place {
        Some(waker) => waker.clone_from(context.waker()),
        None => *place = Some(context.waker().clone()),
    }
}

/// Ranks whose futures were woken, first come first served. Wakers must be `Send`, hence the lock; everything runs on
/// one thread.
#[derive(Debug)]
pub(crate) struct Woken {
    flags: Vec<AtomicBool>,
    queue: Mutex<VecDeque<u32>>,
    /// Whether the queue has any: asked after every event.
    any: AtomicBool,
}

/// Wakes the future of one rank.
struct RootWaker {
    woken: Arc<Woken>,
    rank: u32,
}

impl Wake for RootWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if !self.woken.flags[self.rank as usize].swap(true, Ordering::Relaxed) {
            self.woken.queue.lock().unwrap_or_else(PoisonError::into_inner).push_back(self.rank);
            self.woken.any.store(true, Ordering::Relaxed);
        }
    }
}

impl Woken {
    /// All ranks, woken in ascending order, and a waker for each.
    pub(crate) fn new(ranks: u32) -> (Arc<Self>, Vec<Waker>) {
        let flags = (0..ranks).map(|_| AtomicBool::new(true)).collect();
        let woken = Arc::new(Self { flags, queue: Mutex::new((0..ranks).collect()), any: AtomicBool::new(true) });
        let waker = |rank| Waker::from(Arc::new(RootWaker { woken: Arc::clone(&woken), rank }));
        let wakers = (0..ranks).map(waker).collect();
        (woken, wakers)
    }

    /// Whether any rank was woken.
    pub(crate) fn any(&self) -> bool {
        self.any.load(Ordering::Relaxed)
    }

    /// The next rank that was woken; it counts as not woken from then on.
    pub(crate) fn next(&self) -> Option<Rank> {
        if !self.any() {
            return None;
        }
        let rank = self.queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
        self.any.store(rank.is_some(), Ordering::Relaxed);
        let rank = rank?;
        self.flags[rank as usize].store(false, Ordering::Relaxed);
        Some(Rank(rank))
    }
}
