//! Which ranks are known to be gone.

#[cfg(not(ep_loom))]
use std::sync::atomic::{AtomicBool, Ordering};

use ep_core::Rank;
#[cfg(ep_loom)]
use loom::sync::atomic::{AtomicBool, Ordering};

/// Flags that only ever rise. Ranks that are threads share one; each process has its own.
#[derive(Debug)]
pub(crate) struct Roll {
    /// Whether any flag is up.
    any: AtomicBool,
    gone: Box<[AtomicBool]>,
}

impl Roll {
    pub(crate) fn new(ranks: u32) -> Self {
        Self { any: AtomicBool::new(false), gone: (0..ranks).map(|_| AtomicBool::new(false)).collect() }
    }

    /// Notes that `rank` does nothing any more. Who learns of it sees all that the rank did before.
    pub(crate) fn strike(&self, rank: Rank) {
        if let Some(gone) = self.gone.get(rank.index()) {
            gone.store(true, Ordering::Release);
            self.any.store(true, Ordering::Release);
        }
    }

    /// Whether `rank` is known to be gone. Looks at one flag for all as long as nobody is.
    pub(crate) fn is_gone(&self, rank: Rank) -> bool {
        self.any.load(Ordering::Acquire) && self.gone.get(rank.index()).is_some_and(|gone| gone.load(Ordering::Acquire))
    }
}
