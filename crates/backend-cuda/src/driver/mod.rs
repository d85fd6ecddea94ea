//! The driver, safely: devices, streams, events, memory, modules. Opened at run time; nothing here panics without it.

mod adapter;
mod copy;
mod deferred;
mod device;
mod graph;
mod ipc;
mod memory;
mod module;
mod moment;
#[cfg(target_os = "linux")]
mod registered;
mod relaxed;
mod scratch;
mod spare;
mod stream;
mod stretch;

use std::ffi::CStr;

use cudarc::driver::sys;

pub(crate) use deferred::Freed;
pub use device::Device;
pub use graph::Graph;
pub(crate) use graph::{Capture, Kept};
#[cfg(feature = "hca")]
pub(crate) use ipc::Block;
pub(crate) use ipc::{Imported, MemoryHandle, Presence};
pub(crate) use memory::{DeviceMemory, Mapped};
pub(crate) use module::{Kernel, Launch, Mode, Module};
pub(crate) use moment::Moment;
#[cfg(target_os = "linux")]
pub(crate) use registered::Registered;
pub use scratch::Scratch;
pub(crate) use stream::Pause;
pub use stream::{Event, Stream};
pub(crate) use stretch::{LINGER, PIECE, Pages, Stretch};

use crate::error::CudaError;

/// Makes an error of what a driver call returned.
fn check(call: &'static str, code: sys::CUresult) -> Result<(), CudaError> {
    if code == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut text = std::ptr::null();
    // SAFETY: the driver is open, as a call of it has returned; it sets `text` to a static string or leaves it null.
    let named = unsafe { sys::cuGetErrorString(code, &raw mut text) };
    let text = if named == sys::CUresult::CUDA_SUCCESS && !text.is_null() {
        // SAFETY: the driver's strings are static and end with zero.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    } else {
        String::new()
    };
    let name = format!("{code:?} ({text})");
    Err(match code {
        sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => CudaError::OutOfMemory { call, code: name },
        _ => CudaError::Driver { call, code: name },
    })
}

/// Where `len` bytes from byte `at` on lie, of memory of `bytes` bytes at `address`.
///
/// # Errors
/// [`CudaError::Beyond`], where they are not all of it.
const fn range(address: u64, bytes: usize, at: usize, len: usize) -> Result<u64, CudaError> {
    match at.checked_add(len) {
        Some(end) if end <= bytes => Ok(address + at as u64),
        _ => Err(CudaError::Beyond { at, len, bytes }),
    }
}

/// Opens the driver and says how many GPUs it shows.
///
/// # Errors
/// [`CudaError::LibraryMissing`] without a driver, [`CudaError::Driver`] where it does not start.
pub fn devices() -> Result<usize, CudaError> {
    // SAFETY: only tries to open libraries by their names.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaError::LibraryMissing {
            library: "libcuda.so.1",
            install: "install NVIDIA's driver, release 580 or later (CUDA 13)",
        });
    }
    // SAFETY: the library is there; flags must be 0.
    check("cuInit", unsafe { sys::cuInit(0) })?;
    let mut count = 0;
    // SAFETY: `count` is written to.
    check("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&raw mut count) })?;
    Ok(usize::try_from(count).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_outside_of_memory_are_refused() {
        for (at, len) in [(0, 0), (0, 64), (60, 4), (64, 0)] {
            assert_eq!(range(0x1000, 64, at, len).ok(), Some(0x1000 + at as u64));
        }
        for (at, len) in [(0, 65), (64, 1), (65, 0), (usize::MAX, 2), (2, usize::MAX)] {
            let said = range(0x1000, 64, at, len).unwrap_err().to_string();
            assert_eq!(said, format!("{len} bytes from byte {at} on lie outside of memory of 64 bytes"));
        }
    }
}
