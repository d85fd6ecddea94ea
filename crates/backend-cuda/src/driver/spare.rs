//! Memory of the pool that a stream was done with, for its next request: asking the driver takes longer than a small call.

use std::collections::VecDeque;
use std::sync::{MutexGuard, PoisonError};

use super::Stream;

/// Up to so many bytes a request is rounded up to a power of two.
const SMALL: usize = 4 << 20;
/// The smallest.
const LEAST: usize = 256;
/// So many of each small size are kept.
const OF_EACH: usize = 8;
/// So many larger ones are kept: results of two calls under way, which are of one size in a model.
const LARGE: usize = 2;

/// What a stream keeps.
#[derive(Debug, Default)]
pub(super) struct Spare {
    /// By the logarithm of their size.
    small: [Vec<u64>; SMALL.ilog2() as usize + 1],
    /// Sizes and addresses; the last to come last.
    large: VecDeque<(usize, u64)>,
}

impl Spare {
    fn take(&mut self, room: usize) -> Option<u64> {
        if room <= SMALL {
            return self.small[room.ilog2() as usize].pop();
        }
        let at = self.large.iter().position(|&(size, _)| size == room)?;
        self.large.remove(at).map(|(_, address)| address)
    }

    /// Keeps it. What is to be given back instead.
    fn keep(&mut self, room: usize, address: u64) -> Option<u64> {
        if room > SMALL {
            self.large.push_back((room, address));
            return if self.large.len() > LARGE { self.large.pop_front().map(|(_, address)| address) } else { None };
        }
        let kept = &mut self.small[room.ilog2() as usize];
        if kept.len() == OF_EACH {
            return Some(address);
        }
        kept.push(address);
        None
    }
}

/// What a request for `bytes` bytes takes.
pub(super) fn room(bytes: usize) -> usize {
    if bytes <= SMALL { bytes.max(LEAST).next_power_of_two() } else { bytes }
}

impl Stream {
    fn spare(&self) -> MutexGuard<'_, Spare> {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Memory of this size that was kept.
    pub(super) fn take_spare(&self, room: usize) -> Option<u64> {
        self.spare().take(room)
    }

    /// Keeps memory that work of this stream was done with when it was enqueued. What is to be given back instead.
    pub(super) fn keep_spare(&self, room: usize, address: u64) -> Option<u64> {
        self.spare().keep(room, address)
    }

    /// All of it.
    pub(super) fn drain_spare(&self) -> Vec<u64> {
        let Spare { small, large } = std::mem::take(&mut *self.spare());
        small.into_iter().flatten().chain(large.into_iter().map(|(_, address)| address)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::{LARGE, OF_EACH, SMALL, Spare, room};

    #[test]
    fn memory_of_a_size_comes_back() {
        let mut spare = Spare::default();
        assert_eq!((room(0), room(257), room(SMALL), room(SMALL + 1)), (256, 512, SMALL, SMALL + 1));
        for bytes in [1, 300, SMALL, SMALL + 1, 1 << 30] {
            assert_eq!(spare.keep(room(bytes), bytes as u64), None);
            assert_eq!(spare.take(room(bytes) + 7 * SMALL), None, "another size");
            assert_eq!(spare.take(room(bytes)), Some(bytes as u64));
            assert_eq!(spare.take(room(bytes)), None);
        }
    }

    #[test]
    fn little_is_kept() {
        let mut spare = Spare::default();
        let over = (0..20).filter_map(|at| spare.keep(512, at)).count();
        assert_eq!(over, 20 - OF_EACH);
        // Of the large ones the oldest goes.
        let over: Vec<u64> = (0..5).filter_map(|at| spare.keep(SMALL + at as usize + 1, at)).collect();
        assert_eq!(over, (0..5 - LARGE as u64).collect::<Vec<_>>());
    }
}
