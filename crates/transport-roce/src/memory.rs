//! Memory that the adapter reads and writes: the window, and a lane's own words.
//!
//! Adapters and other ranks write these pages, so nobody ever holds a reference to bytes of them: cells are atomics, all
//! else goes through raw pointers. The protocol orders the accesses (rules F3, F5, F9).

use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::AtomicU64;

use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

/// Mapped memory.
#[derive(Debug)]
pub(crate) struct Memory {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: an address range of the process, which belongs to no thread; it is used through raw pointers and atomics only.
unsafe impl Send for Memory {}

impl Memory {
    /// The first `bytes` bytes of a file in memory that has so many and cannot shrink.
    pub(crate) fn of(file: BorrowedFd<'_>, bytes: usize) -> io::Result<Self> {
        // SAFETY: the system chooses a free range of addresses; the pages stay, since the file cannot shrink.
        let base =
            unsafe { mmap(ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, file, 0) }?;
        Self::from_raw(base, bytes)
    }

    /// Zeroed memory of this process alone.
    pub(crate) fn anonymous(bytes: usize) -> io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the system chooses a free range of addresses. Shared, so that a child process copies no page that an
        // adapter writes.
        let base = unsafe { mmap_anonymous(ptr::null_mut(), bytes, protection, MapFlags::SHARED) }?;
        Self::from_raw(base, bytes)
    }

    fn from_raw(base: *mut std::ffi::c_void, bytes: usize) -> io::Result<Self> {
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, bytes })
    }

    pub(crate) const fn bytes(&self) -> usize {
        self.bytes
    }

    /// The address, as an adapter knows it.
    pub(crate) fn address(&self) -> u64 {
        self.base.as_ptr() as u64
    }

    /// The eight bytes at `at`; none where no whole and aligned ones lie inside.
    pub(crate) fn word(&self, at: u64) -> Option<&AtomicU64> {
        let inside = at.is_multiple_of(8) && at.checked_add(8).is_some_and(|end| end <= self.bytes as u64);
        // SAFETY: eight aligned bytes of the mapping (which starts at a page), that live as long as `self` and that this process
        // touches by atomic operations only.
        inside.then(|| unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(at as usize).cast()) })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: mapped with this length; nothing borrows from `self` any more, and regions of it end before it does.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}
