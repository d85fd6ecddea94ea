//! Memory of other processes.

use std::sync::Arc;

use cudarc::driver::sys;

use super::{Device, DeviceMemory, check};
use crate::error::CudaError;

/// Names a block of a GPU's memory to other processes of this host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemoryHandle([u8; 64]);

impl MemoryHandle {
    /// Its size when it is sent.
    pub const BYTES: usize = 64;

    /// What is sent.
    pub const fn to_bytes(self) -> [u8; Self::BYTES] {
        self.0
    }

    /// What was sent.
    pub const fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        Self(bytes)
    }
}

impl DeviceMemory {
    /// Names it to other processes.
    ///
    /// # Errors
    /// [`CudaError::Driver`], where the system has no memory handles between processes.
    pub fn handle(&self) -> Result<MemoryHandle, CudaError> {
        self.device().bind()?;
        let mut handle = sys::CUipcMemHandle { reserved: [0; MemoryHandle::BYTES] };
        // SAFETY: `handle` is written to; the address is that of a block from cuMemAlloc.
        check("cuIpcGetMemHandle", unsafe { sys::cuIpcGetMemHandle(&raw mut handle, self.address()) })?;
        Ok(MemoryHandle(handle.reserved.map(|byte| byte as u8)))
    }
}

/// A block of another process, mapped for a GPU of this one.
#[derive(Debug)]
pub struct Imported {
    device: Arc<Device>,
    address: u64,
}

impl Imported {
    /// Maps the block that `handle` names, so that `device` reaches it.
    ///
    /// # Errors
    /// [`CudaError::Driver`]: the block is of this process, its GPU is not visible here, or cannot be reached.
    pub fn open(device: &Arc<Device>, handle: MemoryHandle) -> Result<Self, CudaError> {
        device.bind()?;
        let handle = sys::CUipcMemHandle { reserved: handle.0.map(|byte| byte as std::ffi::c_char) };
        let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut address = 0;
        // SAFETY: `address` is written to; the driver checks the handle.
        check("cuIpcOpenMemHandle", unsafe { sys::cuIpcOpenMemHandle_v2(&raw mut address, handle, flags) })?;
        Ok(Self { device: Arc::clone(device), address })
    }

    /// Where kernels of this process see it.
    pub const fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for Imported {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: it was opened here, and no kernel uses it any more.
            unsafe { sys::cuIpcCloseMemHandle(self.address) };
        }
    }
}
