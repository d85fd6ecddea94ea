//! The host as a device whose kernels post.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use ep_core::Error;
use ep_core::transport::{Home, PostingDevice, PostingMemory, Ranges};

/// What the process has given.
static GIVEN: Ranges = Ranges::new();

/// The host itself, for devices that are threads of this process: all memory is host memory, and pages lie where they lie.
#[derive(Clone, Copy, Debug, Default)]
pub struct HostDevice;

impl HostDevice {
    /// Reads memory of the process that others may write: whole aligned words stay whole.
    ///
    /// # Safety
    /// The bytes live meanwhile, and all who touch them do so by atomics, or are devices.
    pub unsafe fn load(address: u64, into: &mut [u8]) {
        if address.is_multiple_of(8) && into.len().is_multiple_of(8) {
            for (at, word) in (address..).step_by(8).zip(into.as_chunks_mut::<8>().0) {
                // SAFETY: as the caller says, an aligned word.
                *word = unsafe { AtomicU64::from_ptr(at as *mut u64) }.load(Ordering::Acquire).to_ne_bytes();
            }
            return;
        }
        for (at, byte) in (address..).zip(into) {
            // SAFETY: as the caller says.
            *byte = unsafe { AtomicU8::from_ptr(at as *mut u8) }.load(Ordering::Acquire);
        }
    }

    /// Writes memory of the process that others may read: whole aligned words stay whole.
    ///
    /// # Safety
    /// As of [`HostDevice::load`].
    pub unsafe fn store(address: u64, bytes: &[u8]) {
        if address.is_multiple_of(8) && bytes.len().is_multiple_of(8) {
            for (at, &word) in (address..).step_by(8).zip(bytes.as_chunks::<8>().0) {
                // SAFETY: as the caller says, an aligned word.
                unsafe { AtomicU64::from_ptr(at as *mut u64) }.store(u64::from_ne_bytes(word), Ordering::Release);
            }
            return;
        }
        for (at, &byte) in (address..).zip(bytes) {
            // SAFETY: as the caller says.
            unsafe { AtomicU8::from_ptr(at as *mut u8) }.store(byte, Ordering::Release);
        }
    }
}

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
        GIVEN.remove(self.base.as_ptr() as u64);
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

// Addresses of the device are those of the process. `read` and `write` touch what it has given, by atomics; a page lies where it lies.
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
        GIVEN.add(base.as_ptr() as u64, bytes as u64);
        Ok(HostMemory { base, layout })
    }

    fn read(&self, address: u64, into: &mut [u8]) -> Result<(), Error> {
        GIVEN.within(address, into.len(), || {
            // SAFETY: memory that was given and stays meanwhile; who uses it by its address does so by atomics.
            unsafe { Self::load(address, into) };
            Ok(())
        })
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), Error> {
        GIVEN.within(address, bytes.len(), || {
            // SAFETY: as above.
            unsafe { Self::store(address, bytes) };
            Ok(())
        })
    }

    fn map_register(&self, page: NonNull<u8>, _: usize) -> Result<u64, Error> {
        Ok(page.as_ptr() as u64)
    }

    fn unmap_register(&self, _: NonNull<u8>) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_memory_that_it_gave_is_looked_at() {
        let memory = HostDevice.memory(64, Home::Host).unwrap();
        let at = memory.address();
        HostDevice.write(at + 56, &[7; 8]).unwrap();
        let mut bytes = [0; 9];
        HostDevice.read(at + 55, &mut bytes).unwrap();
        assert_eq!(bytes, [0, 7, 7, 7, 7, 7, 7, 7, 7]);
        let own = [0u8; 8];
        for address in [at + 57, at - 1, own.as_ptr() as u64, 0] {
            assert!(HostDevice.read(address, &mut bytes[..8]).is_err() && HostDevice.write(address, &own).is_err());
        }
        drop(memory);
        assert!(HostDevice.read(at, &mut bytes).is_err(), "given back");
    }
}
