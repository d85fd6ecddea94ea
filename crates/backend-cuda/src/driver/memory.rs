//! Memory: windows and other long-lived blocks, stream-ordered scratch, host memory that the device writes.
//!
//! While one rank's kernel waits for another rank of the same process, that other rank must be able to go on. `cuMemAlloc`,
//! `cuMemFree` and `cuMemFreeHost` may wait for the whole device, so they are not called between operations: what lives long is
//! *kept* by the device when it is dropped and handed out again, and everything else comes from the stream-ordered pool.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};

use cudarc::driver::sys;

use super::relaxed::Relaxed;
use super::{Device, Stream, check, spare};
use crate::error::CudaError;

/// Memory that was dropped, by size.
#[derive(Debug, Default)]
pub(crate) struct Kept {
    device: BTreeMap<usize, Vec<u64>>,
    mapped: BTreeMap<usize, Vec<(usize, u64)>>,
}

/// Sizes are rounded up so that what is kept fits again.
fn rounded(bytes: usize) -> usize {
    bytes.max(256).next_multiple_of(1 << (bytes.max(256).ilog2().saturating_sub(3)))
}

/// A long-lived block of a GPU's memory, all zero at first.
#[derive(Debug)]
pub struct DeviceMemory {
    device: Arc<Device>,
    address: u64,
    room: usize,
    bytes: usize,
}

impl DeviceMemory {
    /// Takes `bytes` bytes and zeroes them on `stream`.
    ///
    /// # Errors
    /// [`CudaError::Driver`], for want of memory for one.
    pub fn zeroed(stream: &Stream, bytes: usize) -> Result<Self, CudaError> {
        let device = stream.device();
        device.bind()?;
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
        let this = Self { device: Arc::clone(device), address, room, bytes };
        this.zero(stream)?;
        Ok(this)
    }

    /// Zeroes it, on `stream`.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn zero(&self, stream: &Stream) -> Result<(), CudaError> {
        stream.device().bind()?;
        // SAFETY: the range is this block's.
        check("cuMemsetD8Async", unsafe { sys::cuMemsetD8Async(self.address, 0, self.bytes, stream.raw()) })
    }

    /// Where it lies, in the address space of all GPUs that can reach it.
    pub const fn address(&self) -> u64 {
        self.address
    }

    /// Its size.
    pub const fn bytes(&self) -> usize {
        self.bytes
    }
}

impl DeviceMemory {
    /// The GPU.
    pub const fn device(&self) -> &Arc<Device> {
        &self.device
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        let mut kept = self.device.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.device.entry(self.room).or_default().push(self.address);
    }
}

/// Memory of the stream-ordered pool: usable by work that is enqueued after it was taken, given back after what was enqueued
/// when it is dropped. While the stream is captured it is usable at once, and by whatever is made of the capture; who captures
/// keeps it for as long.
#[derive(Debug)]
pub struct Scratch {
    stream: Arc<Stream>,
    address: u64,
    bytes: usize,
    /// Whether it is somebody else's, who gives it back.
    is_foreign: bool,
}

impl Scratch {
    /// Takes `bytes` bytes, at least some: an address is never 0. Undefined at first.
    ///
    /// # Errors
    /// [`CudaError::Driver`], for want of memory for one.
    pub fn new(stream: &Arc<Stream>, bytes: usize) -> Result<Self, CudaError> {
        stream.device().bind()?;
        let room = spare::room(bytes);
        let address = if stream.is_capturing() {
            super::graph::take_beside(stream.device(), room)?
        } else {
            stream.give_back_late();
            match stream.take_spare(room) {
                Some(address) => address,
                None => Self::take(stream, room)?,
            }
        };
        Ok(Self { stream: Arc::clone(stream), address, bytes, is_foreign: false })
    }

    /// Memory of somebody else's, who gives it back.
    ///
    /// # Safety
    /// `bytes` bytes at `address` are of the stream's GPU. They stay, and nobody writes to what work of the stream reads or touches
    /// what it writes, until work that was enqueued while this or a clone of an `Arc` of it lived has ended; and until whatever
    /// was made of a capture of such work is gone.
    pub unsafe fn foreign(stream: &Arc<Stream>, address: u64, bytes: usize) -> Self {
        Self { stream: Arc::clone(stream), address, bytes, is_foreign: true }
    }

    /// Takes memory on a stream that is not captured.
    pub(super) fn take(stream: &Stream, bytes: usize) -> Result<u64, CudaError> {
        let _relaxed = Relaxed::enter();
        let mut address = 0;
        let pool = stream.device().pool();
        // SAFETY: `address` is written to; the pool lives as long as the process.
        let code = unsafe { sys::cuMemAllocFromPoolAsync(&raw mut address, bytes, pool, stream.raw()) };
        check("cuMemAllocFromPoolAsync", code).map(|()| address)
    }

    /// Takes room for `bytes` and copies them there.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn from_bytes(stream: &Arc<Stream>, bytes: &[u8]) -> Result<Self, CudaError> {
        let this = Self::new(stream, bytes.len())?;
        stream.upload(this.address, bytes)?;
        Ok(this)
    }

    /// Where it lies.
    pub const fn address(&self) -> u64 {
        self.address
    }

    /// Its size.
    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether it is somebody else's.
    pub(crate) const fn is_foreign(&self) -> bool {
        self.is_foreign
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if self.is_foreign {
            return;
        }
        let Some(address) = self.stream.keep_spare(spare::room(self.bytes), self.address) else { return };
        // A capture would take it for its own; and where the capture is another thread's, it may begin at any moment.
        if super::graph::buries() || self.stream.is_capturing() {
            self.stream.late().push(address);
        } else if self.stream.device().bind().is_ok() {
            self.stream.give_back(address);
        }
    }
}

impl Stream {
    /// Gives back memory of the pool, after everything enqueued.
    fn give_back(&self, address: u64) {
        let _relaxed = Relaxed::enter();
        // SAFETY: it came from the pool; work enqueued before may still use it, later work may not, as it is gone.
        unsafe { sys::cuMemFreeAsync(address, self.raw()) };
    }

    /// Gives back what could not be when it was dropped. The stream is not captured.
    pub(super) fn give_back_late(&self) {
        let late = std::mem::take(&mut *self.late());
        late.into_iter().for_each(|address| self.give_back(address));
    }
}

impl Stream {
    /// Copies `bytes` to device memory; they may be changed on return.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn upload(&self, to: u64, bytes: &[u8]) -> Result<(), CudaError> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.must_run("a copy from the host")?;
        // A copy of pageable memory waits inside the driver for what was enqueued before; see `Stream::synchronize`.
        self.synchronize()?;
        let _relaxed = Relaxed::enter();
        // SAFETY: callers name memory of this process with room for the bytes. Bytes of pageable memory are staged, and the
        // synchronisation covers what is not.
        let code = unsafe { sys::cuMemcpyHtoDAsync_v2(to, bytes.as_ptr().cast(), bytes.len(), self.raw()) };
        check("cuMemcpyHtoDAsync", code)?;
        self.synchronize()
    }

    /// Fills device memory with a byte, enqueued.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn fill(&self, at: u64, byte: u8, bytes: usize) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        self.device().bind()?;
        // SAFETY: callers name memory of this process of that size.
        check("cuMemsetD8Async", unsafe { sys::cuMemsetD8Async(at, byte, bytes, self.raw()) })
    }

    /// Copies device memory into `into`, after everything enqueued.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn download(&self, from: u64, into: &mut [u8]) -> Result<(), CudaError> {
        if into.is_empty() {
            return self.synchronize();
        }
        self.must_run("a copy to the host")?;
        // As in `upload`.
        self.synchronize()?;
        let _relaxed = Relaxed::enter();
        // SAFETY: callers name memory of this process of that size; the copy has ended on return.
        let code = unsafe { sys::cuMemcpyDtoHAsync_v2(into.as_mut_ptr().cast(), from, into.len(), self.raw()) };
        check("cuMemcpyDtoHAsync", code)?;
        self.synchronize()
    }

    /// Copies `rows` rows of `width` bytes between device memories with their own strides, enqueued.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn copy_rows(&self, to: (u64, usize), from: (u64, usize), width: usize, rows: usize) -> Result<(), CudaError> {
        if width == 0 || rows == 0 {
            return Ok(());
        }
        self.device().bind()?;
        if to.1 == width && from.1 == width {
            // SAFETY: callers name memory of this process with room.
            let code = unsafe { sys::cuMemcpyDtoDAsync_v2(to.0, from.0, width * rows, self.raw()) };
            return check("cuMemcpyDtoDAsync", code);
        }
        let copy = sys::CUDA_MEMCPY2D {
            srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
            srcDevice: from.0,
            srcPitch: from.1,
            dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
            dstDevice: to.0,
            dstPitch: to.1,
            WidthInBytes: width,
            Height: rows,
            srcXInBytes: 0,
            srcY: 0,
            srcHost: std::ptr::null(),
            srcArray: std::ptr::null_mut(),
            dstXInBytes: 0,
            dstY: 0,
            dstHost: std::ptr::null_mut(),
            dstArray: std::ptr::null_mut(),
        };
        // SAFETY: as above, row by row.
        check("cuMemcpy2DAsync", unsafe { sys::cuMemcpy2DAsync_v2(&raw const copy, self.raw()) })
    }
}

impl Device {
    /// Fills memory of this GPU with a byte, enqueued to a stream by the driver's handle.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    ///
    /// # Safety
    /// The stream is of this GPU and lives; nobody else uses the memory until this has ended.
    pub(crate) unsafe fn fill_on(&self, stream: usize, at: u64, byte: u8, bytes: usize) -> Result<(), CudaError> {
        self.bind()?;
        // SAFETY: as the caller promises.
        check("cuMemsetD8Async", unsafe { sys::cuMemsetD8Async(at, byte, bytes, stream as sys::CUstream) })
    }
}

/// Host memory that kernels write, and that the host polls.
#[derive(Debug)]
pub struct Mapped {
    device: Arc<Device>,
    host: *mut u8,
    address: u64,
    room: usize,
    bytes: usize,
}

// SAFETY: plain memory, only touched through volatile and atomic accesses.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl Mapped {
    /// Takes `bytes` bytes, all zero.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn zeroed(device: &Arc<Device>, bytes: usize) -> Result<Self, CudaError> {
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
        // SAFETY: the block has `room` bytes and no kernel uses it any more.
        unsafe { host.write_bytes(0, room) };
        Ok(Self { device: Arc::clone(device), host, address, room, bytes })
    }

    /// Where kernels see it.
    pub const fn address(&self) -> u64 {
        self.address
    }

    /// Its size.
    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    /// The word at byte `at`, with acquire ordering.
    ///
    /// # Panics
    /// Outside of it: a programming error.
    pub fn word(&self, at: usize) -> u32 {
        assert!(at.is_multiple_of(4) && at + 4 <= self.bytes, "word {at} of {} bytes", self.bytes);
        // SAFETY: in range, aligned, and the device writes words as a whole.
        let value = unsafe { self.host.add(at).cast::<u32>().read_volatile() };
        std::sync::atomic::fence(std::sync::atomic::Ordering::Acquire);
        value
    }

    /// The double word at byte `at`, with acquire ordering.
    ///
    /// # Panics
    /// Outside of it: a programming error.
    pub fn long(&self, at: usize) -> u64 {
        assert!(at.is_multiple_of(8) && at + 8 <= self.bytes, "word {at} of {} bytes", self.bytes);
        // SAFETY: in range, aligned, and the device writes words as a whole.
        let value = unsafe { self.host.add(at).cast::<u64>().read_volatile() };
        std::sync::atomic::fence(std::sync::atomic::Ordering::Acquire);
        value
    }

    /// Zeroes it. No kernel may be writing to it.
    pub fn clear(&self) {
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
        let mut kept = self.device.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.mapped.entry(self.room).or_default().push((self.host as usize, self.address));
    }
}

#[cfg(test)]
mod tests {
    use super::rounded;

    #[test]
    fn kept_sizes_waste_at_most_an_eighth() {
        for bytes in [1, 256, 257, 1000, 4097, (1 << 30) + 1] {
            let room = rounded(bytes);
            assert!(room >= bytes && (bytes < 256 || room <= bytes + bytes / 8 + 1), "{bytes} became {room}");
            assert_eq!(rounded(room), room);
        }
    }
}
