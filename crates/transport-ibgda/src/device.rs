//! What a transport needs of the device whose kernels post: memory, a way to look at it, and the doorbell's page.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::fmt;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use ep_core::Error;

/// Where memory lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Home {
    /// On the device.
    Device,
    /// On the host, mapped for the device at an address that the host uses, too.
    Host,
}

/// A device whose kernels post. A backend has one for each rank.
///
/// # Safety
/// Memory is as [`Memory`] says. What [`read`](Self::read) and [`write`](Self::write) are given is an address of the device; they touch those
/// bytes and no others. Where [`map_register`](Self::map_register) says that a page lies, a store of the device of eight aligned bytes
/// reaches the page whole.
pub unsafe trait Device: Clone + Send + Sync + fmt::Debug + 'static {
    /// Memory that the device reaches.
    type Memory: Memory;

    /// A number that values of the same device have, and others do not: a page is mapped once for each device.
    fn identity(&self) -> u64;

    /// So many bytes, zero, beginning at a multiple of 64 KiB.
    ///
    /// # Errors
    /// [`Error::Broken`] with what the system refused, [`Error::Unsupported`] where there is none of the kind.
    fn memory(&self, bytes: usize, home: Home) -> Result<Self::Memory, Error>;

    /// Reads bytes at an address of the device. Kernels may run, and are not waited for.
    ///
    /// # Errors
    /// [`Error::Broken`] with what the system refused.
    fn read(&self, address: u64, into: &mut [u8]) -> Result<(), Error>;

    /// Writes bytes at an address of the device. On return they are there for kernels and adapters.
    ///
    /// # Errors
    /// [`Error::Broken`] with what the system refused.
    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), Error>;

    /// Maps a page of an adapter's registers for the device: its address there.
    ///
    /// # Errors
    /// [`Error::Broken`] with what the system refused, and what allows it (NVIDIA: the driver's `PeerMappingOverride`).
    fn map_register(&self, page: NonNull<u8>, bytes: usize) -> Result<u64, Error>;

    /// Ends that. No kernel posts.
    fn unmap_register(&self, page: NonNull<u8>);
}

/// Memory that a device reaches.
///
/// # Safety
/// For as long as the value lives, [`bytes`](Self::bytes) bytes lie at [`address`](Self::address) for the device. They may be registered with
/// an adapter by [`dmabuf`](Self::dmabuf), or by that address where the system's drivers know it.
pub unsafe trait Memory: Send + Sync + fmt::Debug {
    /// Where it lies for the device.
    fn address(&self) -> u64;

    /// Its size.
    fn bytes(&self) -> usize;

    /// By which an adapter may register it, where the driver gives one.
    fn dmabuf(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// The host itself, for devices that are threads of this process: all memory is host memory, and pages lie where they lie.
#[derive(Clone, Copy, Debug, Default)]
pub struct HostDevice;

/// An allocation of the process.
#[derive(Debug)]
pub struct HostMemory {
    base: NonNull<u8>,
    layout: Layout,
}

// SAFETY: an allocation of the process, which belongs to no thread and is used by address.
unsafe impl Send for HostMemory {}
// SAFETY: as above.
unsafe impl Sync for HostMemory {}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout; adapters that reached it have let go, as lanes hold it until then.
        unsafe { dealloc(self.base.as_ptr(), self.layout) };
    }
}

// SAFETY: the allocation lives until the value is dropped, at the same address for all threads.
unsafe impl Memory for HostMemory {
    fn address(&self) -> u64 {
        self.base.as_ptr() as u64
    }

    fn bytes(&self) -> usize {
        self.layout.size()
    }
}

// SAFETY: addresses of the device are those of the process, which `read` and `write` touch by atomics, and a page lies where it lies.
unsafe impl Device for HostDevice {
    type Memory = HostMemory;

    fn identity(&self) -> u64 {
        0
    }

    fn memory(&self, bytes: usize, _: Home) -> Result<HostMemory, Error> {
        let limit = || Error::invalid("bytes of queues", bytes, "1 to what can be addressed");
        let layout = Layout::from_size_align(bytes, 1 << 16).map_err(|_| limit())?;
        if bytes == 0 {
            return Err(limit());
        }
        // SAFETY: the layout has a size.
        let base = unsafe { alloc_zeroed(layout) };
        let Some(base) = NonNull::new(base) else { handle_alloc_error(layout) };
        Ok(HostMemory { base, layout })
    }

    fn read(&self, address: u64, into: &mut [u8]) -> Result<(), Error> {
        if address.is_multiple_of(8) && into.len().is_multiple_of(8) {
            for (at, word) in (address..).step_by(8).zip(into.as_chunks_mut::<8>().0) {
                // SAFETY: the caller's memory, whole aligned words.
                *word = unsafe { AtomicU64::from_ptr(at as *mut u64) }.load(Ordering::Acquire).to_ne_bytes();
            }
            return Ok(());
        }
        for (at, byte) in (address..).zip(into) {
            // SAFETY: the caller's memory.
            *byte = unsafe { AtomicU8::from_ptr(at as *mut u8) }.load(Ordering::Acquire);
        }
        Ok(())
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), Error> {
        if address.is_multiple_of(8) && bytes.len().is_multiple_of(8) {
            for (at, &word) in (address..).step_by(8).zip(bytes.as_chunks::<8>().0) {
                // SAFETY: the caller's memory, whole aligned words.
                unsafe { AtomicU64::from_ptr(at as *mut u64) }.store(u64::from_ne_bytes(word), Ordering::Release);
            }
            return Ok(());
        }
        for (at, &byte) in (address..).zip(bytes) {
            // SAFETY: the caller's memory.
            unsafe { AtomicU8::from_ptr(at as *mut u8) }.store(byte, Ordering::Release);
        }
        Ok(())
    }

    fn map_register(&self, page: NonNull<u8>, _: usize) -> Result<u64, Error> {
        Ok(page.as_ptr() as u64)
    }

    fn unmap_register(&self, _: NonNull<u8>) {}
}
