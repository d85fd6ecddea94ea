//! Protection domains, and memory that others may write.

use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use super::Context;
use crate::error::Error;
use crate::sys;

/// A protection domain.
#[derive(Clone, Debug)]
pub(crate) struct Domain(Arc<OwnedDomain>);

#[derive(Debug)]
struct OwnedDomain {
    context: Context,
    raw: NonNull<sys::Opaque>,
    number: u32,
}

// SAFETY: libibverbs allows any thread to use a protection domain.
unsafe impl Send for OwnedDomain {}
// SAFETY: as above.
unsafe impl Sync for OwnedDomain {}

impl Drop for OwnedDomain {
    fn drop(&mut self) {
        // SAFETY: made by `Domain::new`; regions and queue pairs of it have ended, as they held it.
        unsafe { self.context.library().ibv_dealloc_pd()(self.raw.as_ptr()) };
    }
}

impl Domain {
    pub(crate) fn new(context: &Context) -> Result<Self, Error> {
        // SAFETY: an opened device.
        let raw = context.made("ibv_alloc_pd", unsafe { context.library().ibv_alloc_pd()(context.raw()) })?;
        let domain = |number| OwnedDomain { context: context.clone(), raw, number };
        let mut owned = domain(0);
        let mut told = sys::PdNumber::default();
        let part = sys::ObjPart { of: raw.as_ptr().cast(), out: ptr::from_mut(&mut told).cast() };
        let mut asked = sys::Obj { pd: part, ..sys::Obj::NONE };
        // SAFETY: a living domain, and a place for what is told of it.
        let code = unsafe { context.library().mlx5dv_init_obj()(&mut asked, sys::OBJ_PD) };
        context.outcome("mlx5dv_init_obj", code)?;
        owned.number = told.pdn;
        Ok(Self(Arc::new(owned)))
    }

    pub(crate) fn context(&self) -> &Context {
        &self.0.context
    }

    /// As commands name it.
    pub(super) fn number(&self) -> u32 {
        self.0.number
    }

    /// The Ethernet address of a peer, which the system looks up.
    pub(super) fn ethernet_address(&self, attributes: &mut sys::AhAttr) -> Result<[u8; 6], Error> {
        let context = self.context();
        let library = context.library();
        // SAFETY: a living domain, and whose address is wanted.
        let handle = unsafe { library.ibv_create_ah()(self.0.raw.as_ptr(), attributes) };
        let handle = context.made("ibv_create_ah", handle)?;
        let mut told = sys::Ah { av: ptr::null_mut(), comp_mask: 0 };
        let part = sys::ObjPart { of: handle.as_ptr().cast(), out: ptr::from_mut(&mut told).cast() };
        let mut asked = sys::Obj { ah: part, ..sys::Obj::NONE };
        // SAFETY: a living handle, and a place for what is told of it.
        let code = unsafe { library.mlx5dv_init_obj()(&mut asked, sys::OBJ_AH) };
        let address = context.outcome("mlx5dv_init_obj", code).and_then(|()| {
            let vector = context.made("mlx5dv_init_obj", told.av)?;
            // SAFETY: it lies in the handle, which lives.
            Ok(unsafe { vector.as_ref().rmac })
        });
        // SAFETY: made above, and used no more.
        unsafe { library.ibv_destroy_ah()(handle.as_ptr()) };
        address
    }
}

/// How an adapter is shown memory.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Way<'a> {
    /// By a descriptor of the memory.
    Dmabuf(BorrowedFd<'a>),
    /// By its address: host memory, or the device's where a driver (nvidia-peermem) tells the adapter's about it.
    Address,
}

/// A part of memory of the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Part {
    /// Where the memory begins for the device.
    pub(crate) base: u64,
    /// Where the part begins in it.
    pub(crate) offset: u64,
    /// Its length.
    pub(crate) bytes: u64,
}

impl Part {
    pub(crate) const fn address(&self) -> u64 {
        self.base + self.offset
    }
}

/// Memory that adapters may write, with keys of its own.
#[derive(Debug)]
pub(crate) struct Region {
    raw: NonNull<sys::Mr>,
    domain: Domain,
}

// SAFETY: libibverbs allows any thread to use a region.
unsafe impl Send for Region {}

impl Region {
    /// Registers `part` with the rights `access`, at the address that the device has it at. It lives as long as the region.
    pub(crate) fn new(domain: &Domain, part: Part, way: Way<'_>, access: u32) -> Result<Self, Error> {
        let (context, pd, address) = (domain.context(), domain.0.raw.as_ptr(), part.address());
        let library = context.library();
        let (at, bytes) = (address as *mut c_void, part.bytes as usize);
        let missing = |name| Err(Error::Symbol { name });
        let (call, raw) = match way {
            Way::Dmabuf(file) => {
                let Some(register) = library.ibv_reg_dmabuf_mr() else { return missing("ibv_reg_dmabuf_mr") };
                let file = file.as_raw_fd();
                // SAFETY: a living domain and descriptor; the memory lives as long as the region, by the callers' word.
                ("ibv_reg_dmabuf_mr", unsafe { register(pd, part.offset, bytes, address, file, access as c_int) })
            }
            Way::Address if access & sys::ACCESS_RELAXED_ORDERING != 0 => {
                let Some(register) = library.ibv_reg_mr_iova2() else { return missing("ibv_reg_mr_iova2") };
                // SAFETY: as above.
                ("ibv_reg_mr_iova2", unsafe { register(pd, at, bytes, address, access) })
            }
            // SAFETY: as above.
            Way::Address => ("ibv_reg_mr", unsafe { library.ibv_reg_mr()(pd, at, bytes, access as c_int) }),
        };
        Ok(Self { raw: context.made(call, raw)?, domain: domain.clone() })
    }

    /// The key by which the own adapter reads it.
    pub(crate) fn local_key(&self) -> u32 {
        // SAFETY: the region lives.
        unsafe { self.raw.as_ref().lkey }
    }

    /// The key by which others write it.
    pub(crate) fn remote_key(&self) -> u32 {
        // SAFETY: the region lives.
        unsafe { self.raw.as_ref().rkey }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: made by `Region::new`. Queue pairs that used it have been destroyed by whoever owns both.
        unsafe { self.domain.context().library().ibv_dereg_mr()(self.raw.as_ptr()) };
    }
}
