//! Memory for rows in a CPU's memory, used again from call to call.
//!
//! Fresh memory is handed to a process page by page, each cleared by the kernel when it is first written: for the results of
//! a dispatch or combine that takes longer than copying them. So the results of a call lie in what earlier ones left, as soon as
//! the user has dropped those.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::room::{NoMemory, zeroed};

/// Bytes at the start of each buffer that debug builds fill with 0xFF before they hand it out: who relies on zeroes, or on
/// what lay there before, is found.
const POISONED: usize = if cfg!(debug_assertions) { 256 << 10 } else { 0 };

/// Buffers that nobody uses now, and how many bytes were out at a time.
///
/// Those out and those kept are together never more bytes than once were out at the same time: a pool does not make a process
/// larger than its user did.
#[derive(Debug, Default)]
struct Shelf {
    /// Ordered by when they came back.
    kept: Vec<Vec<u8>>,
    kept_bytes: usize,
    out_bytes: usize,
    most_bytes: usize,
}

impl Shelf {
    /// The smallest buffer that is large enough, and not more than twice as large as asked for.
    fn take(&mut self, len: usize) -> Option<Vec<u8>> {
        let fits = |bytes: &Vec<u8>| bytes.len() >= len && bytes.len() / 2 <= len;
        let all = self.kept.iter().enumerate().filter(|(_, bytes)| fits(bytes));
        let (at, _) = all.min_by_key(|(_, bytes)| bytes.len())?;
        let bytes = self.kept.remove(at);
        self.kept_bytes -= bytes.len();
        Some(bytes)
    }

    fn lend(&mut self, bytes: usize) {
        self.out_bytes += bytes;
        self.most_bytes = self.most_bytes.max(self.out_bytes);
        self.shrink();
    }

    fn put_back(&mut self, bytes: Vec<u8>) {
        self.out_bytes -= bytes.len();
        self.kept_bytes += bytes.len();
        self.kept.push(bytes);
        self.shrink();
    }

    /// Lets the oldest go while there are too many.
    fn shrink(&mut self) {
        let over = |shelf: &Self| shelf.kept_bytes + shelf.out_bytes > shelf.most_bytes;
        while over(self) && !self.kept.is_empty() {
            self.kept_bytes -= self.kept.remove(0).len();
        }
    }
}

fn lock(shelf: &Mutex<Shelf>) -> MutexGuard<'_, Shelf> {
    shelf.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Hands out [`Buffer`]s. What it keeps goes with it; buffers that are out then stay valid.
#[derive(Debug, Default)]
pub(crate) struct Pool(Arc<Mutex<Shelf>>);

impl Pool {
    /// `len` bytes whose values mean nothing: whoever hands them on writes all that others may look at.
    ///
    /// # Errors
    /// [`NoMemory`].
    pub(crate) fn take(&self, len: usize) -> Result<Buffer, NoMemory> {
        let found = lock(&self.0).take(len);
        let mut bytes = match found {
            Some(bytes) => bytes,
            // A little more than asked for: the next batch is seldom of the very same size. Pages that nobody writes are not taken.
            None => zeroed(len.saturating_add(len / 8)).or_else(|_| zeroed(len))?,
        };
        lock(&self.0).lend(bytes.len());
        let poisoned = len.min(POISONED);
        bytes[..poisoned].fill(0xFF);
        Ok(Buffer { bytes, len, home: Arc::downgrade(&self.0) })
    }
}

/// Bytes in ordinary memory. Of an engine's results: dropped, their memory serves a later call.
pub struct Buffer {
    bytes: Vec<u8>,
    len: usize,
    /// Where it came from; nowhere, if it was made from a `Vec`.
    home: Weak<Mutex<Shelf>>,
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(home) = self.home.upgrade() {
            lock(&home).put_back(std::mem::take(&mut self.bytes));
        }
    }
}

impl From<Vec<u8>> for Buffer {
    fn from(bytes: Vec<u8>) -> Self {
        Self { len: bytes.len(), bytes, home: Weak::new() }
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[..self.len]
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer").field("len", &self.len).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(pool: &Pool) -> usize {
        lock(&pool.0).kept_bytes
    }

    #[test]
    fn a_dropped_buffer_serves_again() {
        let pool = Pool::default();
        let first = pool.take(1000).unwrap();
        let place = first.as_ptr();
        drop(first);
        let second = pool.take(900).unwrap();
        assert_eq!((second.as_ptr(), second.len(), kept(&pool)), (place, 900, 0));
        assert_ne!(pool.take(900).unwrap().as_ptr(), place, "it is out");
    }

    #[test]
    fn no_buffer_is_used_for_much_less_than_it_holds() {
        let pool = Pool::default();
        drop(pool.take(1 << 20).unwrap());
        assert!(pool.take(100).unwrap().bytes.len() < 200);
        // But the large one is gone before more is held than ever was needed at a time.
        drop(pool.take(1 << 20).unwrap());
        let _held = pool.take(1 << 20).unwrap();
        assert_eq!(kept(&pool), 0);
    }

    #[test]
    fn no_more_is_kept_than_was_out_at_a_time() {
        let pool = Pool::default();
        for len in [4000, 1000, 9000, 3000, 70_000, 500] {
            drop(pool.take(len).unwrap());
            let shelf = lock(&pool.0);
            assert!(shelf.kept_bytes <= shelf.most_bytes && shelf.out_bytes == 0, "{shelf:?}");
        }
        let both = [pool.take(50_000).unwrap(), pool.take(60_000).unwrap()];
        drop(both);
        assert!(kept(&pool) >= 110_000);
    }

    /// What earlier results held must not be taken for a new one's.
    #[test]
    #[cfg(debug_assertions)]
    fn stale_bytes_are_poisoned() {
        let pool = Pool::default();
        pool.take(64).unwrap().fill(7);
        assert_eq!(pool.take(64).unwrap()[..], [0xFF; 64]);
    }

    #[test]
    fn buffers_outlive_their_pool() {
        let pool = Pool::default();
        let mut buffer = pool.take(10).unwrap();
        drop(pool);
        buffer.fill(3);
        assert_eq!(buffer[..], [3; 10]);
    }
}
