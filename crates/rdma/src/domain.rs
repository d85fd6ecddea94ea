//! Protection domains, and memory that is registered in them.

use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use crate::device::Device;
use crate::error::Error;
use crate::sys;

/// A protection domain.
#[derive(Clone, Debug)]
pub struct Domain(Arc<OwnedDomain>);

#[derive(Debug)]
struct OwnedDomain {
    device: Device,
    raw: NonNull<sys::Pd>,
}

// SAFETY: libibverbs allows any thread to use a protection domain.
unsafe impl Send for OwnedDomain {}
// SAFETY: as above.
unsafe impl Sync for OwnedDomain {}

impl Drop for OwnedDomain {
    fn drop(&mut self) {
        // SAFETY: made by `Domain::new`; regions and queue pairs of it have ended, as they held it.
        unsafe { (self.device.verbs().functions.ibv_dealloc_pd)(self.raw.as_ptr()) };
    }
}

impl Domain {
    /// One of an adapter.
    ///
    /// # Errors
    /// [`Error::Call`] where the adapter makes none.
    pub fn new(device: &Device) -> Result<Self, Error> {
        // SAFETY: an opened device.
        let raw = unsafe { (device.verbs().functions.ibv_alloc_pd)(device.raw()) };
        Ok(Self(Arc::new(OwnedDomain { device: device.clone(), raw: device.made("ibv_alloc_pd", raw)? })))
    }

    /// The adapter that it is of.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// As the library knows it. It lives as long as `self`.
    pub fn raw(&self) -> *mut sys::Pd {
        self.0.raw.as_ptr()
    }
}

/// How an adapter is shown memory.
#[derive(Clone, Copy, Debug)]
pub enum Way<'a> {
    /// By a descriptor of a device's memory (dmabuf).
    Dmabuf(BorrowedFd<'a>),
    /// By its address: memory of the host, or a device's where a module of the kernel (`nvidia_peermem`) finds the pages.
    Address,
}

/// A part of some memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Part {
    /// Where the memory begins, and with it a descriptor of it.
    pub base: u64,
    /// Where the part begins in it.
    pub offset: u64,
    /// Its length.
    pub bytes: u64,
}

impl Part {
    const fn address(&self) -> u64 {
        self.base + self.offset
    }
}

/// Memory that an adapter may read and write, with keys of its own.
#[derive(Debug)]
pub struct Region {
    raw: NonNull<sys::Mr>,
    domain: Domain,
}

// SAFETY: libibverbs allows any thread to use a region.
unsafe impl Send for Region {}

impl Region {
    /// Registers `part` with the rights `access`, under its own address. Memory may be registered more than once: each region has the order and
    /// the rights that go with its keys.
    ///
    /// # Errors
    /// [`Error::Call`] where the system refuses, [`Error::Symbol`] where the library is too old for such memory or such rights.
    ///
    /// # Safety
    /// The part is memory of this process, or of a device, for as long as the region lives. Whoever else touches it meanwhile does so by atomics or
    /// raw pointers: others may write it at any time.
    pub unsafe fn new(domain: &Domain, part: Part, way: Way<'_>, access: c_uint) -> Result<Self, Error> {
        let (device, pd, address) = (domain.device(), domain.raw(), part.address());
        let functions = &device.verbs().functions;
        let (at, bytes) = (address as *mut c_void, part.bytes as usize);
        let (call, raw) = match way {
            Way::Dmabuf(file) => {
                let register = functions.ibv_reg_dmabuf_mr.ok_or(Error::Symbol { name: "ibv_reg_dmabuf_mr" })?;
                let file = file.as_raw_fd();
                // SAFETY: a living domain and an open file; the kernel refuses a range that the file does not have. The memory outlives the
                // region, by the caller's word.
                ("ibv_reg_dmabuf_mr", unsafe { register(pd, part.offset, bytes, address, file, access as c_int) })
            }
            Way::Address if access & sys::ACCESS_RELAXED_ORDERING != 0 => {
                let register = functions.ibv_reg_mr_iova2.ok_or(Error::Symbol { name: "ibv_reg_mr_iova2" })?;
                // SAFETY: a living domain; the kernel refuses what is no memory that it knows, and what is one outlives the region.
                ("ibv_reg_mr_iova2", unsafe { register(pd, at, bytes, address, access) })
            }
            // SAFETY: as above.
            Way::Address => ("ibv_reg_mr", unsafe { (functions.ibv_reg_mr)(pd, at, bytes, access as c_int) }),
        };
        Ok(Self { raw: device.made(call, raw)?, domain: domain.clone() })
    }

    /// The key by which the own adapter reads and writes it.
    pub fn local_key(&self) -> u32 {
        // SAFETY: the region lives.
        unsafe { self.raw.as_ref().lkey }
    }

    /// The key by which others write it.
    pub fn remote_key(&self) -> u32 {
        // SAFETY: the region lives.
        unsafe { self.raw.as_ref().rkey }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: made by `Region::new`. Queue pairs that used it have been destroyed by whoever owns both.
        unsafe { (self.domain.device().verbs().functions.ibv_dereg_mr)(self.raw.as_ptr()) };
    }
}
