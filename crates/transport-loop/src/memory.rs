//! Windows of ranks in memory of the host: the one module with unsafe code.
//!
//! Other ranks write these pages, so nobody ever holds a reference to bytes of them: payload is copied between raw pointers,
//! cells are atomics. The protocol orders the accesses (rules F3, F5, F9).

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::AtomicU64;

use ep_core::Fault;
use ep_core::port::{Offset, Span};
use rustix::fs::{Mode, OFlags, SealFlags, fcntl_get_seals, fstat, open};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// A window in the address space of this process.
#[derive(Debug)]
pub(crate) struct Memory {
    base: NonNull<u8>,
    bytes: u64,
}

// SAFETY: an address range of the process, which belongs to no thread; it is used through raw pointers and atomics only.
unsafe impl Send for Memory {}
// SAFETY: as above. Two copies that touch the same bytes at the same time are what the protocol's rules exclude.
unsafe impl Sync for Memory {}

/// The first `bytes` bytes of what the descriptor `number` of another process of this host names, as [`Memory::of`] takes it.
pub(crate) fn of_process(process: u32, number: u32, bytes: u64) -> io::Result<Memory> {
    let path = format!("/proc/{process}/fd/{number}");
    let file = open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    Memory::of(file.as_fd(), bytes)
}

impl Memory {
    /// The first `bytes` bytes of a file in memory. One that has not so many, or may lose them, is refused: who touches a
    /// page that is missing ends.
    pub(crate) fn of(file: BorrowedFd<'_>, bytes: u64) -> io::Result<Self> {
        let refuse = |problem: String| Err(io::Error::new(io::ErrorKind::InvalidInput, problem));
        let has = fstat(file)?.st_size;
        if u64::try_from(has).is_ok_and(|has| has < bytes) {
            return refuse(format!("the file has {has} bytes, expected {bytes}"));
        }
        if !fcntl_get_seals(file)?.contains(SealFlags::SHRINK) {
            return refuse("the file may shrink, expected one that is sealed against that".into());
        }
        let length = usize::try_from(bytes).map_err(|_| io::ErrorKind::OutOfMemory)?;
        // SAFETY: the system chooses a free range of addresses; the pages stay, since the file cannot shrink.
        let base =
            unsafe { mmap(ptr::null_mut(), length, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, file, 0) }?;
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, bytes })
    }

    pub(crate) const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The first byte of a span that lies inside (rule F8).
    fn at(&self, span: Span) -> Result<NonNull<u8>, Fault> {
        span.within(self.bytes)?;
        // SAFETY: the span lies in the mapping.
        Ok(unsafe { self.base.add(span.offset.0 as usize) })
    }

    /// Copies `from` to `to` in another window.
    pub(crate) fn copy(&self, from: Span, target: &Self, to: Offset) -> Result<(), Fault> {
        let (source, sink) = (self.at(from)?, target.at(to.span(from.len))?);
        // SAFETY: both ranges lie in live mappings, as was just checked, and `copy` allows them to overlap. Nobody has a
        // reference to their bytes; the protocol excludes that somebody else writes the one or touches the other.
        unsafe { ptr::copy(source.as_ptr(), sink.as_ptr(), from.len as usize) };
        Ok(())
    }

    /// The cell at `at`; none where no whole and aligned one lies inside.
    pub(crate) fn cell(&self, at: Offset) -> Option<&AtomicU64> {
        let place = at.0.is_multiple_of(8).then(|| self.at(at.span(8)).ok()).flatten()?;
        // SAFETY: eight aligned bytes of the mapping (which starts at a page), that live as long as `self`. Cells lie in a
        // region of their own, which nothing but atomic operations touches.
        Some(unsafe { AtomicU64::from_ptr(place.as_ptr().cast()) })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: mapped by `of` with this length; nothing borrows from `self` any more.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.bytes as usize) };
    }
}
