//! Memory that the adapter reads and writes: the window, and a lane's own words.
//!
//! Adapters and other ranks write these pages, so nobody ever holds a reference to bytes of them: cells are atomics, all
//! else goes through raw pointers. The protocol orders the accesses (rules F3, F5, F9).

use std::any::Any;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use rustix::fs::{SealFlags, fcntl_get_seals, fstat};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

/// Memory that an adapter knows by its address.
#[derive(Debug)]
pub(crate) struct Memory {
    base: NonNull<u8>,
    bytes: usize,
    /// Mapped here. Otherwise it is a device's, and no core touches it.
    mapped: bool,
    /// By which an adapter may register a device's.
    descriptor: Option<OwnedFd>,
    /// What keeps a device's.
    _keeper: Option<Arc<dyn Any + Send + Sync>>,
}

// SAFETY: an address range of the process, which belongs to no thread; it is used through raw pointers and atomics only.
unsafe impl Send for Memory {}
// SAFETY: as above: `&Memory` gives addresses and atomics only.
unsafe impl Sync for Memory {}

impl Memory {
    /// The first `bytes` bytes of a file in memory. One that has not so many, or may lose them, is refused: who touches a page that
    /// is missing ends.
    pub(crate) fn of(file: BorrowedFd<'_>, bytes: usize) -> io::Result<Self> {
        let refuse = |problem: String| Err(io::Error::new(io::ErrorKind::InvalidInput, problem));
        let has = fstat(file)?.st_size;
        if u64::try_from(has).is_ok_and(|has| has < bytes as u64) {
            return refuse(format!("the file has {has} bytes, expected {bytes}"));
        }
        if !fcntl_get_seals(file)?.contains(SealFlags::SHRINK) {
            return refuse("the file may shrink, expected one that is sealed against that".into());
        }
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
        Ok(Self { base, bytes, mapped: true, descriptor: None, _keeper: None })
    }

    /// Memory of a device, which stays for as long as `keeper` is held here; where there is none, its owner keeps it for as long as this lives. A descriptor of it,
    /// where there is one, begins at its first byte.
    pub(crate) fn of_device(
        address: u64,
        bytes: usize,
        descriptor: Option<OwnedFd>,
        keeper: Option<Arc<dyn Any + Send + Sync>>,
    ) -> io::Result<Self> {
        let base = NonNull::new(address as *mut u8).ok_or(io::ErrorKind::InvalidInput)?;
        Ok(Self { base, bytes, mapped: false, descriptor, _keeper: keeper })
    }

    /// Whether it is a device's.
    pub(crate) const fn is_of_device(&self) -> bool {
        !self.mapped
    }

    /// A descriptor of a device's memory.
    pub(crate) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.descriptor.as_ref().map(|file| file.as_fd())
    }

    pub(crate) const fn bytes(&self) -> usize {
        self.bytes
    }

    /// The address, as an adapter knows it.
    pub(crate) fn address(&self) -> u64 {
        self.base.as_ptr() as u64
    }

    /// The eight bytes at `at`; none where no whole and aligned ones lie inside, and in memory of a device.
    pub(crate) fn word(&self, at: u64) -> Option<&AtomicU64> {
        let inside =
            self.mapped && at.is_multiple_of(8) && at.checked_add(8).is_some_and(|end| end <= self.bytes as u64);
        // SAFETY: eight aligned bytes of the mapping (which starts at a page), that live as long as `self` and that this process
        // touches by atomic operations only.
        inside.then(|| unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(at as usize).cast()) })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if !self.mapped {
            return;
        }
        // SAFETY: mapped with this length; nothing borrows from `self` any more, and regions of it end before it does.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use rustix::fs::{MemfdFlags, fcntl_add_seals, ftruncate, memfd_create};

    use super::*;

    #[test]
    fn files_that_may_lose_their_pages_are_refused() {
        let file = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&file, 4096).unwrap();
        let said = |bytes| Memory::of(file.as_fd(), bytes).unwrap_err().to_string();
        assert_eq!(said(4097), "the file has 4096 bytes, expected 4097");
        assert_eq!(said(4096), "the file may shrink, expected one that is sealed against that");
        fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
        assert_eq!(Memory::of(file.as_fd(), 4096).unwrap().bytes(), 4096);
        assert!(Memory::of(std::fs::File::open("/proc/self/exe").unwrap().as_fd(), 1).is_err(), "no file in memory");
    }
}
