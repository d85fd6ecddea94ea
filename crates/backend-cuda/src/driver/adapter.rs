//! What adapters of a network need of a GPU: descriptors of its memory, and their registers mapped for its kernels.

use std::os::fd::{FromRawFd as _, OwnedFd, RawFd};
use std::ptr::NonNull;

use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};

use super::relaxed::Relaxed;
use super::{Device, check};
use crate::error::CudaError;

/// Descriptors name whole pages.
const PAGE: u64 = 4096;
/// `CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER`: kernels of a GPU see what an adapter wrote to its memory in the order in which that came.
const ORDERED_FOR_OWNER: u32 = 100;

impl Device {
    /// Whether its kernels see what an adapter writes to its memory in the order in which it comes: a signal behind its rows.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn orders_writes(&self) -> Result<bool, CudaError> {
        let ordering = self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING)?;
        Ok(ordering >= ORDERED_FOR_OWNER)
    }

    /// Whether the driver gives descriptors of its memory (dmabuf), by which adapters may register it.
    pub fn gives_descriptors(&self) -> bool {
        self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED).unwrap_or(0) != 0
    }

    /// A descriptor of `bytes` bytes of a block of its memory, by which adapters may register them. None where the driver gives none, or none of these.
    pub(crate) fn dmabuf(&self, address: u64, bytes: u64) -> Option<OwnedFd> {
        let whole = [address, bytes].iter().all(|value| value.is_multiple_of(PAGE)) && bytes > 0;
        if !self.gives_descriptors() || !whole {
            return None;
        }
        self.bind().ok()?;
        let mut file: RawFd = -1;
        let kind = sys::CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;
        // SAFETY: the place is a descriptor's; the driver checks the range.
        let code =
            unsafe { sys::cuMemGetHandleForAddressRange((&raw mut file).cast(), address, bytes as usize, kind, 0) };
        match check("cuMemGetHandleForAddressRange", code) {
            // SAFETY: just given out, and nobody else's.
            Ok(()) if file >= 0 => Some(unsafe { OwnedFd::from_raw_fd(file) }),
            Ok(()) => None,
            Err(error) => {
                tracing::debug!(%error, "no descriptor of a GPU's memory");
                None
            }
        }
    }

    /// Maps a page of an adapter's registers: where kernels find it.
    ///
    /// # Errors
    /// [`CudaError::Register`] where the driver does not allow it; [`CudaError::Driver`].
    pub(crate) fn map_register(&self, page: NonNull<u8>, bytes: usize) -> Result<u64, CudaError> {
        self.bind()?;
        let _relaxed = Relaxed::enter();
        let flags =
            sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP | sys::CU_MEMHOSTREGISTER_IOMEMORY;
        // SAFETY: a mapped page of registers, which whoever gives it keeps mapped until `unmap_register`.
        match unsafe { sys::cuMemHostRegister_v2(page.as_ptr().cast(), bytes, flags) } {
            sys::CUresult::CUDA_ERROR_NOT_PERMITTED => return Err(CudaError::Register),
            code => check("cuMemHostRegister", code)?,
        }
        let mut address = 0;
        // SAFETY: just registered, and mapped for the device.
        let code = unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut address, page.as_ptr().cast(), 0) };
        check("cuMemHostGetDevicePointer", code).inspect_err(|_| self.unmap_register(page))?;
        Ok(address)
    }

    /// Ends that. No kernel uses it.
    pub(crate) fn unmap_register(&self, page: NonNull<u8>) {
        let _relaxed = Relaxed::enter();
        let ended = self.bind().and_then(|()| {
            // SAFETY: registered by `map_register`, and used by no kernel any more.
            check("cuMemHostUnregister", unsafe { sys::cuMemHostUnregister(page.as_ptr().cast()) })
        });
        if let Err(error) = ended {
            tracing::warn!(%error, "a page of registers stays mapped");
        }
    }
}
