//! A [`Stretch`] of addresses, which stays, and the memory of it, which comes and goes piece by piece.
//!
//! None of this waits for kernels (seen with release 580, of H200s: 1 GiB comes in 0.3 ms and goes in 0.5, while kernels run as while none does), where `cuMemFree`
//! does. A piece is freed when nobody has it mapped any more, in any process.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};

use super::relaxed::Relaxed;
use super::{Device, Stream, check};
use crate::error::CudaError;

/// How long memory that nobody has stays: not while the steps of a model come one after the other.
pub(crate) const LINGER: Duration = Duration::from_secs(2);
/// What offsets and sizes of pieces are multiples of.
pub(crate) const PIECE: u64 = 2 << 20;

const DESCRIPTOR: sys::CUmemAllocationHandleType =
    sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// Memory without an address.
#[derive(Debug)]
pub(crate) struct Pages {
    handle: sys::CUmemGenericAllocationHandle,
    bytes: u64,
}

impl Pages {
    /// Takes `bytes` bytes, undefined.
    ///
    /// # Errors
    /// [`CudaError::Driver`], for want of memory for one.
    pub(crate) fn new(device: &Device, bytes: u64) -> Result<Self, CudaError> {
        device.bind()?;
        let _relaxed = Relaxed::enter();
        let (mut handle, about) = (0, about(device));
        // SAFETY: `handle` is written to; `about` is read.
        check("cuMemCreate", unsafe { sys::cuMemCreate(&raw mut handle, bytes as usize, &raw const about, 0) })?;
        Ok(Self { handle, bytes })
    }

    /// What other processes of this host get it by.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub(crate) fn descriptor(&self) -> Result<OwnedFd, CudaError> {
        let _relaxed = Relaxed::enter();
        let mut descriptor: std::ffi::c_int = -1;
        let into = (&raw mut descriptor).cast();
        // SAFETY: for this kind of handle an int is written; the memory is this value's.
        let code = unsafe { sys::cuMemExportToShareableHandle(into, self.handle, DESCRIPTOR, 0) };
        check("cuMemExportToShareableHandle", code)?;
        // SAFETY: the driver has made it for the caller.
        Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
    }

    /// What another process gave, of so many bytes.
    ///
    /// # Errors
    /// [`CudaError::Driver`], where it is no such thing.
    pub(crate) fn given(device: &Device, descriptor: BorrowedFd<'_>, bytes: u64) -> Result<Self, CudaError> {
        device.bind()?;
        let _relaxed = Relaxed::enter();
        let mut handle = 0;
        let given = descriptor.as_raw_fd() as usize as *mut std::ffi::c_void;
        // SAFETY: `handle` is written to; the driver checks the descriptor, and keeps what it needs of it.
        let code = unsafe { sys::cuMemImportFromShareableHandle(&raw mut handle, given, DESCRIPTOR) };
        check("cuMemImportFromShareableHandle", code)?;
        Ok(Self { handle, bytes })
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        let _relaxed = Relaxed::enter();
        // SAFETY: the handle is this value's. The memory lives on where it is mapped.
        unsafe { sys::cuMemRelease(self.handle) };
    }
}

/// Memory of a GPU that other processes may get.
fn about(device: &Device) -> sys::CUmemAllocationProp {
    sys::CUmemAllocationProp {
        type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: DESCRIPTOR,
        location: place(device),
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: 0,
            usage: 0,
            reserved: [0; 4],
        },
    }
}

fn place(device: &Device) -> sys::CUmemLocation {
    // Devices are their ordinals.
    sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device.ordinal() as i32 }
}

/// A range of addresses, parts of which have memory.
#[derive(Debug)]
pub(crate) struct Stretch {
    device: Arc<Device>,
    address: u64,
    bytes: u64,
    /// Bytes of the pieces, by where they begin.
    pieces: Mutex<BTreeMap<u64, u64>>,
    /// Bytes of all of them.
    mapped: Arc<AtomicU64>,
}

impl Stretch {
    /// A range of at least so many bytes, none of which has memory.
    ///
    /// # Errors
    /// [`CudaError::Driver`], where GPU or driver have no such thing, for one.
    pub(crate) fn reserve(device: &Arc<Device>, bytes: u64) -> Result<Self, CudaError> {
        device.bind()?;
        for (attribute, what) in [
            (
                Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
                "memory that is mapped piece by piece",
            ),
            (Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, "memory by descriptors"),
        ] {
            if device.attribute(attribute)? == 0 {
                return Err(CudaError::NoGrowth { problem: format!("GPU {} has no {what}", device.ordinal()) });
            }
        }
        let _relaxed = Relaxed::enter();
        let (mut unit, about) = (0, about(device));
        let which = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        // SAFETY: `unit` is written to; `about` is read.
        let code = unsafe { sys::cuMemGetAllocationGranularity(&raw mut unit, &raw const about, which) };
        check("cuMemGetAllocationGranularity", code)?;
        if unit == 0 || !PIECE.is_multiple_of(unit as u64) {
            return Err(CudaError::NoGrowth { problem: format!("pieces of {unit} bytes do not divide {PIECE}") });
        }
        let too_large = || CudaError::TooLarge { what: "a window", bytes: bytes.to_string() };
        let (bytes, mut address) = (bytes.checked_next_multiple_of(PIECE).ok_or_else(too_large)?, 0);
        // SAFETY: `address` is written to.
        let code = unsafe { sys::cuMemAddressReserve(&raw mut address, bytes as usize, PIECE as usize, 0, 0) };
        check("cuMemAddressReserve", code).map_err(CudaError::into_no_growth)?;
        Ok(Self { device: Arc::clone(device), address, bytes, pieces: Mutex::default(), mapped: Arc::default() })
    }

    /// Where kernels see it.
    pub(crate) const fn address(&self) -> u64 {
        self.address
    }

    /// Bytes of it that have memory, now and when it has been freed.
    #[cfg(feature = "workshop")]
    pub(crate) const fn mapped(&self) -> &Arc<AtomicU64> {
        &self.mapped
    }

    /// Its size.
    pub(crate) const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The GPU whose context it belongs to.
    pub(crate) const fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// The first bytes without memory between bytes `from` and `until`, as many as `bytes`, or the most that there are; and how many.
    pub(crate) fn gap(&self, from: u64, until: u64, bytes: u64) -> (u64, u64) {
        let pieces = self.pieces();
        let taken = pieces.range(from..until).map(|(&at, &len)| (at, at + len)).chain([(until, until)]);
        let (mut free, mut longest) = (from, (from, 0));
        for (at, end) in taken {
            let len = (at - free).min(bytes);
            if len > longest.1 {
                longest = (free, len);
            }
            free = end;
        }
        longest
    }

    /// Fills `bytes` bytes from byte `at` on, which have memory, on `stream`.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub(crate) fn fill(&self, stream: &Stream, at: u64, bytes: u64, byte: u8) -> Result<(), CudaError> {
        let has = self.pieces().get(&at).is_some_and(|&len| bytes <= len);
        if !has {
            return Err(CudaError::Beyond { at: at as usize, len: bytes as usize, bytes: self.bytes as usize });
        }
        // SAFETY: a piece that is mapped; whoever takes it away waits for what was enqueued.
        unsafe { stream.fill(self.address + at, byte, bytes as usize) }
    }

    /// Lets `pages` be the memory from byte `at` on, for the GPUs `reach`.
    ///
    /// # Errors
    /// [`CudaError::Beyond`] outside of the range; [`CudaError::Driver`], where something is there already, for one. Then nothing has changed.
    pub(crate) fn back(&self, at: u64, pages: Pages, reach: &[&Device]) -> Result<(), CudaError> {
        let len = pages.bytes;
        if at.checked_add(len).is_none_or(|end| end > self.bytes) {
            return Err(CudaError::Beyond { at: at as usize, len: len as usize, bytes: self.bytes as usize });
        }
        self.device.bind()?;
        let mut pieces = self.pieces();
        let _relaxed = Relaxed::enter();
        // SAFETY: the addresses are reserved by this value; the driver refuses those that have memory.
        check("cuMemMap", unsafe { sys::cuMemMap(self.address + at, len as usize, 0, pages.handle, 0) })?;
        let flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        let access: Vec<_> =
            reach.iter().map(|device| sys::CUmemAccessDesc { location: place(device), flags }).collect();
        // SAFETY: just mapped; `access` has so many.
        let code = unsafe { sys::cuMemSetAccess(self.address + at, len as usize, access.as_ptr(), access.len()) };
        if let Err(error) = check("cuMemSetAccess", code) {
            // SAFETY: just mapped, and nobody knows of it.
            unsafe { sys::cuMemUnmap(self.address + at, len as usize) };
            return Err(error);
        }
        pieces.insert(at, len);
        self.mapped.fetch_add(len, Ordering::Relaxed);
        Ok(())
    }

    /// Takes away the memory of the piece that begins at byte `at`; of none it does nothing.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    ///
    /// # Safety
    /// Nothing uses the piece, nor will before there is another in its place.
    pub(crate) unsafe fn bare(&self, at: u64) -> Result<(), CudaError> {
        let mut pieces = self.pieces();
        let Some(&len) = pieces.get(&at) else { return Ok(()) };
        self.device.bind()?;
        let _relaxed = Relaxed::enter();
        // SAFETY: a piece that is mapped, of which the caller promises that nothing uses it.
        check("cuMemUnmap", unsafe { sys::cuMemUnmap(self.address + at, len as usize) })?;
        pieces.remove(&at);
        self.mapped.fetch_sub(len, Ordering::Relaxed);
        Ok(())
    }

    /// Takes away the memory of all pieces. Those that stay are named in the log.
    ///
    /// # Safety
    /// As of [`Self::bare`].
    pub(crate) unsafe fn bare_all(&self) -> bool {
        let all: Vec<u64> = self.pieces().keys().copied().collect();
        // All of them, also where one stays.
        // SAFETY: as the caller promises.
        let stay: Vec<CudaError> = all.into_iter().filter_map(|at| unsafe { self.bare(at) }.err()).collect();
        stay.iter().for_each(|error| tracing::warn!(%error, "memory of a window stays mapped"));
        stay.is_empty()
    }

    /// Gives all of it back, addresses as well.
    ///
    /// # Safety
    /// Nothing uses any of it, nor will, this value least of all.
    pub(crate) unsafe fn free(&self) {
        // SAFETY: as the caller promises.
        if unsafe { self.bare_all() } {
            let _relaxed = Relaxed::enter();
            // SAFETY: reserved by this value, and nothing is mapped any more.
            let freed = check("cuMemAddressFree", unsafe { sys::cuMemAddressFree(self.address, self.bytes as usize) });
            freed
                .unwrap_or_else(|error| tracing::warn!(%error, bytes = self.bytes, "addresses of a window stay taken"));
        }
    }

    fn pieces(&self) -> MutexGuard<'_, BTreeMap<u64, u64>> {
        self.pieces.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
