//! Memory that the device and the proxy reach.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use ep_core::Error;

/// Memory that a device and the host reach, as words of 64 bits.
///
/// # Safety
/// For as long as the value lives, [`host`](Self::host) is the first of [`bytes`](Self::bytes) bytes, aligned to 64, that the host
/// may read and write, and the device reaches the same bytes at [`device`](Self::device). They are zero at first. Both touch
/// them as whole aligned words only, the host by atomics.
pub unsafe trait Reached: Send + Sync + fmt::Debug {
    /// Where it lies for the host.
    fn host(&self) -> NonNull<u8>;

    /// Where it lies for the device.
    fn device(&self) -> u64;

    /// Its size.
    fn bytes(&self) -> usize;

    /// Where the device finds the state of a lane that was written for byte `at`: there, unless states lie in memory of the device.
    fn state(&self, at: usize) -> u64 {
        self.device() + at as u64
    }

    /// Writes the state of the lane whose FIFO begins at byte `at`. The device alone uses it then, and no kernel posts meanwhile.
    ///
    /// # Errors
    /// [`Error::Broken`] with what the system refused.
    fn write_state(&self, at: usize, words: [u64; STATE_WORDS]) -> Result<(), Error>
    where
        Self: Sized,
    {
        (at..).step_by(8).zip(words).for_each(|(at, value)| word(self, at).store(value, Ordering::Release));
        Ok(())
    }
}

/// Words of a lane's state.
pub const STATE_WORDS: usize = 8;

/// The word at byte `at`.
///
/// # Panics
/// Outside of it, or between words: a programming error.
pub(super) fn word<M: Reached>(memory: &M, at: usize) -> &AtomicU64 {
    assert!(at.is_multiple_of(8) && at < memory.bytes() && memory.bytes() - at >= 8, "word {at} of {}", memory.bytes());
    // SAFETY: eight aligned bytes of the memory, which lives as long as the reference; the host touches them by atomics only,
    // the device as whole words.
    unsafe { AtomicU64::from_ptr(memory.host().as_ptr().add(at).cast()) }
}

/// Memory of this process, for devices that are threads of it.
#[derive(Debug)]
pub struct HostMemory {
    base: NonNull<u8>,
    layout: Layout,
}

impl HostMemory {
    /// So many bytes, all zero.
    ///
    /// # Errors
    /// [`Error::Invalid`] for none, and for more than can be addressed.
    pub fn new(bytes: usize) -> Result<Self, Error> {
        let limit = || Error::invalid("bytes of FIFOs", bytes, "1 to what can be addressed");
        let layout = Layout::from_size_align(bytes, 4096).map_err(|_| limit())?;
        if bytes == 0 {
            return Err(limit());
        }
        // SAFETY: the layout has a size.
        let base = unsafe { alloc_zeroed(layout) };
        let Some(base) = NonNull::new(base) else { handle_alloc_error(layout) };
        Ok(Self { base, layout })
    }
}

// SAFETY: an allocation of the process, which belongs to no thread and is used through atomics and by address.
unsafe impl Send for HostMemory {}
// SAFETY: as above.
unsafe impl Sync for HostMemory {}

// SAFETY: the allocation lives until the value is dropped, has a page's alignment, and its address is the same for all threads.
unsafe impl Reached for HostMemory {
    fn host(&self) -> NonNull<u8> {
        self.base
    }

    fn device(&self) -> u64 {
        self.base.as_ptr() as u64
    }

    fn bytes(&self) -> usize {
        self.layout.size()
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // SAFETY: allocated by `new` with this layout; whoever reached it has ended, by the word of `ProxyLanes`' users.
        unsafe { dealloc(self.base.as_ptr(), self.layout) };
    }
}
