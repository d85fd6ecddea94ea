//! Memory of other processes.
//!
//! Closing a mapping waits for all kernels of the context, and other threads launch nothing meanwhile (seen with release 580). Where two
//! communicators of a process work at the same time, a kernel of one may be waiting for a rank whose process waits likewise: nothing
//! moves before the deadline. So a mapping stays open while ranks of this process use its GPU, and is used again where the same block
//! is named again; windows are kept by their owners, too. The last rank to leave closes what is left.

use std::collections::HashMap;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::{Arc, MutexGuard, OnceLock, PoisonError};

use cudarc::driver::sys;

use super::relaxed::Relaxed;
use super::{Device, DeviceMemory, check};
use crate::error::CudaError;

/// Bytes of the driver's own handle.
const RAW: usize = 64;

/// Names a block of a GPU's memory to other processes of this host: the driver's handle, and a number of the process, so that no
/// block of a later process is taken for one that is mapped still.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct MemoryHandle([u8; Self::BYTES]);

impl MemoryHandle {
    /// Its size when it is sent.
    pub(crate) const BYTES: usize = RAW + 8;

    /// What is sent.
    pub(crate) const fn to_bytes(self) -> [u8; Self::BYTES] {
        self.0
    }

    /// What was sent.
    pub(crate) const fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        Self(bytes)
    }
}

/// A number that no other process has, by chance.
fn process() -> u64 {
    static PROCESS: OnceLock<u64> = OnceLock::new();
    *PROCESS.get_or_init(|| RandomState::new().hash_one(std::process::id()))
}

impl DeviceMemory {
    /// Names it to other processes.
    ///
    /// # Errors
    /// [`CudaError::Driver`], where the system has no memory handles between processes.
    pub(crate) fn handle(&self) -> Result<MemoryHandle, CudaError> {
        handle(self.device(), self.address())
    }
}

fn handle(device: &Device, block: u64) -> Result<MemoryHandle, CudaError> {
    device.bind()?;
    let _relaxed = Relaxed::enter();
    let mut handle = sys::CUipcMemHandle { reserved: [0; RAW] };
    // SAFETY: `handle` is written to; the driver refuses what is no block from cuMemAlloc.
    check("cuIpcGetMemHandle", unsafe { sys::cuIpcGetMemHandle(&raw mut handle, block) })?;
    let mut bytes = [0; MemoryHandle::BYTES];
    for (to, from) in bytes.iter_mut().zip(handle.reserved) {
        *to = from as u8;
    }
    bytes[RAW..].copy_from_slice(&process().to_le_bytes());
    Ok(MemoryHandle(bytes))
}

/// A block of a GPU's memory: where it begins, how long it is, and what other processes open it by.
#[cfg(feature = "hca")]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Block {
    pub(crate) base: u64,
    pub(crate) bytes: u64,
    pub(crate) handle: MemoryHandle,
}

#[cfg(feature = "hca")]
impl Device {
    /// The block in which an address lies.
    ///
    /// # Errors
    /// [`CudaError::Driver`], where that is of no block, or of one that has no handle.
    pub(crate) fn block(&self, address: u64) -> Result<Block, CudaError> {
        self.bind()?;
        let (mut base, mut bytes) = (0, 0);
        // SAFETY: both places are written to; the driver checks the address.
        let code = unsafe { sys::cuMemGetAddressRange_v2(&raw mut base, &raw mut bytes, address) };
        check("cuMemGetAddressRange", code)?;
        Ok(Block { base, bytes: bytes as u64, handle: handle(self, base)? })
    }
}

/// Blocks of other processes that are mapped for a GPU of this one.
#[derive(Debug, Default)]
pub(super) struct Imports {
    mapped: HashMap<MemoryHandle, Mapping>,
    /// Ranks of this process whose kernels may run on the GPU.
    ranks: usize,
}

#[derive(Debug)]
struct Mapping {
    address: u64,
    /// [`Imported`]s of it.
    users: usize,
}

impl Imports {
    /// Closes what nobody uses, where no kernel can be waiting for anybody.
    fn sweep(&mut self, device: &Device) {
        if self.ranks > 0 || device.bind().is_err() {
            return;
        }
        self.mapped.retain(|_, mapping| {
            if mapping.users == 0 {
                let _relaxed = Relaxed::enter();
                // SAFETY: it was opened here, and no kernel uses it any more.
                unsafe { sys::cuIpcCloseMemHandle(mapping.address) };
            }
            mapping.users > 0
        });
    }
}

impl Device {
    fn imports(&self) -> MutexGuard<'_, Imports> {
        self.imports.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A rank of this process uses the GPU: its kernels may wait for others.
#[derive(Debug)]
pub(crate) struct Presence(Arc<Device>);

impl Presence {
    pub(crate) fn new(device: &Arc<Device>) -> Self {
        device.imports().ranks += 1;
        #[cfg(target_os = "linux")]
        super::registered::rank_comes();
        Self(Arc::clone(device))
    }
}

impl Drop for Presence {
    fn drop(&mut self) {
        let mut imports = self.0.imports();
        imports.ranks -= 1;
        imports.sweep(&self.0);
        drop(imports);
        #[cfg(target_os = "linux")]
        super::registered::rank_leaves();
    }
}

/// A block of another process, mapped for a GPU of this one.
#[derive(Debug)]
pub(crate) struct Imported {
    device: Arc<Device>,
    handle: MemoryHandle,
    address: u64,
}

impl Imported {
    /// Maps the block that `handle` names, so that `device` reaches it. Waits for no kernel.
    ///
    /// # Errors
    /// [`CudaError::Driver`]: the block is of this process, its GPU is not visible here, or cannot be reached.
    pub(crate) fn open(device: &Arc<Device>, handle: MemoryHandle) -> Result<Self, CudaError> {
        device.bind()?;
        let mut imports = device.imports();
        let address = match imports.mapped.get_mut(&handle) {
            Some(mapping) => {
                mapping.users += 1;
                mapping.address
            }
            None => {
                let address = map(handle)?;
                imports.mapped.insert(handle, Mapping { address, users: 1 });
                address
            }
        };
        drop(imports);
        Ok(Self { device: Arc::clone(device), handle, address })
    }

    /// Where kernels of this process see it.
    pub(crate) const fn address(&self) -> u64 {
        self.address
    }
}

fn map(handle: MemoryHandle) -> Result<u64, CudaError> {
    let _relaxed = Relaxed::enter();
    let mut raw = sys::CUipcMemHandle { reserved: [0; RAW] };
    for (to, from) in raw.reserved.iter_mut().zip(handle.0) {
        *to = from as std::ffi::c_char;
    }
    let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
    let mut address = 0;
    // SAFETY: `address` is written to; the driver checks the handle.
    check("cuIpcOpenMemHandle", unsafe { sys::cuIpcOpenMemHandle_v2(&raw mut address, raw, flags) })?;
    Ok(address)
}

impl Drop for Imported {
    fn drop(&mut self) {
        let mut imports = self.device.imports();
        if let Some(mapping) = imports.mapped.get_mut(&self.handle) {
            mapping.users -= 1;
        }
        imports.sweep(&self.device);
    }
}
