//! The host as a device whose kernels post.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use ep_core::Error;
use ep_core::transport::{Home, PostingDevice, PostingMemory};

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

// The allocation lives until the value is dropped, at the same address for all threads.
impl PostingMemory for HostMemory {
    fn address(&self) -> u64 {
        self.base.as_ptr() as u64
    }

    fn bytes(&self) -> usize {
        self.layout.size()
    }
}

// Addresses of the device are those of the process, which `read` and `write` touch by atomics, and a page lies where it lies.
impl PostingDevice for HostDevice {
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
