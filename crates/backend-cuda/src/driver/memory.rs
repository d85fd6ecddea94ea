//! Memory that lives long: windows and other blocks of a GPU, host memory that the device writes.
//!
//! While one rank's kernel waits for another rank of the same process, that other rank must be able to go on. `cuMemFree`
//! and `cuMemFreeHost` wait for all kernels of the context, so they are never called: what lives long is *kept* by the device when it is
//! dropped and handed out again, and everything else comes from the stream-ordered pool (`scratch.rs`).

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};

use cudarc::driver::sys;

use super::relaxed::Relaxed;
use super::{Device, Stream, check, range};
use crate::error::CudaError;

/// Memory that was dropped, by size.
#[derive(Debug, Default)]
pub(crate) struct Kept {
    device: BTreeMap<usize, Vec<u64>>,
    mapped: BTreeMap<usize, Vec<(usize, u64)>>,
}

impl Kept {
    /// Blocks of a GPU's memory among it that a request for `bytes` bytes may get.
    #[cfg(feature = "workshop")]
    pub(super) fn blocks_of(&self, bytes: usize) -> usize {
        self.device.get(&rounded(bytes)).map_or(0, Vec::len)
    }

    /// Bytes of a GPU's memory among it.
    pub(super) fn bytes(&self) -> u64 {
        let bytes = |(room, blocks): (&usize, &Vec<u64>)| (*room as u64).saturating_mul(blocks.len() as u64);
        self.device.iter().map(bytes).fold(0, u64::saturating_add)
    }
}

/// Sizes are rounded up so that what is kept fits again. A size that cannot be stays as it is: no memory has it.
fn rounded(bytes: usize) -> usize {
    let unit = 1 << (bytes.max(256).ilog2().saturating_sub(3));
    bytes.max(256).checked_next_multiple_of(unit).unwrap_or(bytes)
}

/// A long-lived block of a GPU's memory, all zero at first.
#[derive(Debug)]
pub(crate) struct DeviceMemory {
    device: Arc<Device>,
    address: u64,
    room: usize,
    bytes: usize,
    /// Never handed out again.
    is_lost: bool,
}

impl DeviceMemory {
    /// Takes `bytes` bytes and zeroes them on `stream`.
    ///
    /// # Errors
    /// [`CudaError::Driver`], for want of memory for one.
    pub(crate) fn zeroed(stream: &Stream, bytes: usize) -> Result<Self, CudaError> {
        let device = stream.device();
        device.bind()?;
        // It may be there by now.
        device.sweep();
        let room = rounded(bytes);
        let kept = {
            let mut kept = device.kept.lock().unwrap_or_else(PoisonError::into_inner);
            kept.device.get_mut(&room).and_then(Vec::pop)
        };
        let address = match kept {
            Some(address) => address,
            None => {
                let _relaxed = Relaxed::enter();
                let mut address = 0;
                // SAFETY: `address` is written to; the context is current.
                check("cuMemAlloc", unsafe { sys::cuMemAlloc_v2(&raw mut address, room) })?;
                address
            }
        };
        let this = Self { device: Arc::clone(device), address, room, bytes, is_lost: false };
        this.zero(stream)?;
        Ok(this)
    }

    /// Zeroes it, on `stream`.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub(crate) fn zero(&self, stream: &Stream) -> Result<(), CudaError> {
        self.fill(stream, 0)
    }

    /// Fills it with a byte, on `stream`.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub(crate) fn fill(&self, stream: &Stream, byte: u8) -> Result<(), CudaError> {
        // SAFETY: all of this block, which stays mapped for as long as the process lives: what is dropped is kept.
        unsafe { stream.fill(self.address, byte, self.bytes) }
    }

    /// Copies `bytes` to byte `at`, after everything enqueued to `stream`. Waits.
    ///
    /// # Errors
    /// [`CudaError::Beyond`] outside of it, with nothing touched; [`CudaError::Driver`]; [`CudaError::Capturing`].
    pub(crate) fn write(&self, stream: &Stream, at: usize, bytes: &[u8]) -> Result<(), CudaError> {
        let to = range(self.address, self.bytes, at, bytes.len())?;
        // SAFETY: the range is this block's.
        unsafe { stream.upload(to, bytes) }
    }

    /// Copies what lies from byte `at` on, after everything enqueued to `stream`. Waits.
    ///
    /// # Errors
    /// As [`DeviceMemory::write`].
    pub(crate) fn read(&self, stream: &Stream, at: usize, into: &mut [u8]) -> Result<(), CudaError> {
        let from = range(self.address, self.bytes, at, into.len())?;
        // SAFETY: the range is this block's.
        unsafe { stream.download(from, into) }
    }

    /// Where it lies, in the address space of all GPUs that can reach it.
    pub(crate) const fn address(&self) -> u64 {
        self.address
    }

    /// Somebody may touch it for as long as the process lives: when it is dropped, nobody else gets it.
    pub(crate) const fn lose(&mut self) {
        self.is_lost = true;
    }

    /// Its size.
    pub(crate) const fn bytes(&self) -> usize {
        self.bytes
    }

    /// The GPU.
    pub(crate) const fn device(&self) -> &Arc<Device> {
        &self.device
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if self.is_lost {
            return;
        }
        let mut kept = self.device.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.device.entry(self.room).or_default().push(self.address);
    }
}

/// Host memory that kernels write, and that the host polls.
#[derive(Debug)]
pub(crate) struct Mapped {
    device: Arc<Device>,
    host: *mut u8,
    address: u64,
    room: usize,
    bytes: usize,
    /// Never handed out again.
    is_lost: bool,
}

// SAFETY: plain memory, which the host reads and writes as whole words, by volatile accesses.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl Mapped {
    /// Takes `bytes` bytes, all zero.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub(crate) fn zeroed(device: &Arc<Device>, bytes: usize) -> Result<Self, CudaError> {
        device.bind()?;
        let room = rounded(bytes);
        let kept = {
            let mut kept = device.kept.lock().unwrap_or_else(PoisonError::into_inner);
            kept.mapped.get_mut(&room).and_then(Vec::pop)
        };
        let (host, address) = match kept {
            Some((host, address)) => (host as *mut u8, address),
            None => allocate_mapped(room)?,
        };
        // SAFETY: the block has `room` bytes, and nobody else has it: what kernels may still report to is lost, not kept (`RankDevice`).
        unsafe { host.write_bytes(0, room) };
        Ok(Self { device: Arc::clone(device), host, address, room, bytes, is_lost: false })
    }

    /// Kernels may write to it for as long as the process lives: when it is dropped, nobody else gets it.
    pub(crate) const fn lose(&mut self) {
        self.is_lost = true;
    }

    /// Where kernels see it.
    pub(crate) const fn address(&self) -> u64 {
        self.address
    }

    /// Where the host sees it.
    pub(crate) const fn host(&self) -> *mut u8 {
        self.host
    }

    /// Its size.
    pub(crate) const fn bytes(&self) -> usize {
        self.bytes
    }

    /// The word at byte `at`, with acquire ordering.
    ///
    /// # Panics
    /// Outside of it: a programming error.
    pub(crate) fn word(&self, at: usize) -> u32 {
        assert!(at.is_multiple_of(4) && self.bytes >= 4 && at <= self.bytes - 4, "word {at} of {} bytes", self.bytes);
        // SAFETY: in range, aligned, and the device writes words as a whole.
        let value = unsafe { self.host.add(at).cast::<u32>().read_volatile() };
        std::sync::atomic::fence(std::sync::atomic::Ordering::Acquire);
        value
    }

    /// The double word at byte `at`, with acquire ordering.
    ///
    /// # Panics
    /// Outside of it: a programming error.
    pub(crate) fn long(&self, at: usize) -> u64 {
        assert!(at.is_multiple_of(8) && self.bytes >= 8 && at <= self.bytes - 8, "word {at} of {} bytes", self.bytes);
        // SAFETY: in range, aligned, and the device writes words as a whole.
        let value = unsafe { self.host.add(at).cast::<u64>().read_volatile() };
        std::sync::atomic::fence(std::sync::atomic::Ordering::Acquire);
        value
    }

    /// Stores the word at byte `at`, which kernels read, after everything that was done before.
    ///
    /// # Panics
    /// Outside of it: a programming error.
    #[cfg(feature = "hca")]
    pub(crate) fn set_word(&self, at: usize, value: u32) {
        assert!(at.is_multiple_of(4) && self.bytes >= 4 && at <= self.bytes - 4, "word {at} of {} bytes", self.bytes);
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        // SAFETY: in range, aligned, and the device reads words as a whole.
        unsafe { self.host.add(at).cast::<u32>().write_volatile(value) };
    }

    /// Zeroes it. No kernel may be writing to it.
    pub(crate) fn clear(&self) {
        for at in 0..self.bytes / 4 {
            // SAFETY: in range and aligned.
            unsafe { self.host.cast::<u32>().add(at).write_volatile(0) };
        }
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    }
}

fn allocate_mapped(room: usize) -> Result<(*mut u8, u64), CudaError> {
    let _relaxed = Relaxed::enter();
    let mut host = std::ptr::null_mut();
    let flags = sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_PORTABLE;
    // SAFETY: `host` is written to; the context is current.
    check("cuMemHostAlloc", unsafe { sys::cuMemHostAlloc(&raw mut host, room, flags) })?;
    let mut address = 0;
    // SAFETY: `host` is mapped host memory.
    check("cuMemHostGetDevicePointer", unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut address, host, 0) })?;
    Ok((host.cast(), address))
}

impl Drop for Mapped {
    fn drop(&mut self) {
        if self.is_lost {
            return;
        }
        let mut kept = self.device.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.mapped.entry(self.room).or_default().push((self.host as usize, self.address));
    }
}

#[cfg(test)]
mod tests {
    use super::{Kept, rounded};

    #[test]
    fn what_is_kept_counts_by_its_size() {
        let mut kept = Kept::default();
        kept.device.insert(256, vec![1, 2]);
        kept.device.insert(1 << 20, vec![3]);
        assert_eq!(kept.bytes(), 512 + (1 << 20));
    }

    #[test]
    fn sizes_that_cannot_be_do_not_wrap_around() {
        for bytes in [usize::MAX, usize::MAX - 1, usize::MAX / 2 + 2] {
            assert!(rounded(bytes) >= bytes);
        }
    }

    #[test]
    fn kept_sizes_waste_at_most_an_eighth() {
        for bytes in [1, 256, 257, 1000, 4097, (1 << 30) + 1] {
            let room = rounded(bytes);
            assert!(room >= bytes && (bytes < 256 || room <= bytes + bytes / 8 + 1), "{bytes} became {room}");
            assert_eq!(rounded(room), room);
        }
    }
}
