//! Protection domains, and memory that is registered in them.

use std::ffi::c_uint;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use super::Context;
use super::register::{Functions, Way};
use crate::error::Error;
use crate::memory::Memory;
use crate::sys;

/// A protection domain.
#[derive(Clone, Debug)]
pub(crate) struct Domain(Arc<OwnedDomain>);

#[derive(Debug)]
struct OwnedDomain {
    context: Context,
    raw: NonNull<sys::Pd>,
}

// SAFETY: libibverbs allows any thread to use a protection domain.
unsafe impl Send for OwnedDomain {}
// SAFETY: as above.
unsafe impl Sync for OwnedDomain {}

impl Domain {
    pub(crate) fn new(context: &Context) -> Result<Self, Error> {
        // SAFETY: an opened device.
        let raw = unsafe { (context.library().ibv_alloc_pd)(context.raw()) };
        Ok(Self(Arc::new(OwnedDomain { context: context.clone(), raw: context.made("ibv_alloc_pd", raw)? })))
    }

    pub(super) fn context(&self) -> &Context {
        &self.0.context
    }

    pub(super) fn raw(&self) -> *mut sys::Pd {
        self.0.raw.as_ptr()
    }
}

impl Drop for OwnedDomain {
    fn drop(&mut self) {
        // SAFETY: made by `Domain::new`; regions and queue pairs of it have ended, as they held it.
        unsafe { (self.context.library().ibv_dealloc_pd)(self.raw.as_ptr()) };
    }
}

/// Memory that the adapter may read and write.
#[derive(Debug)]
pub(crate) struct Region {
    raw: NonNull<sys::Mr>,
    way: Way,
    domain: Domain,
    memory: Arc<Memory>,
}

// SAFETY: libibverbs allows any thread to use a region.
unsafe impl Send for Region {}

impl Region {
    /// Registers all of `memory` with the rights `access`.
    pub(crate) fn new(domain: &Domain, memory: Arc<Memory>, access: c_uint) -> Result<Self, Error> {
        let all = 0..memory.bytes();
        Self::of_part(domain, memory, all, access)
    }

    /// Registers the bytes `part` of `memory`, once more where they are registered already: each has a key of its own, and the
    /// order and rights that go with it.
    ///
    /// # Panics
    /// When the part does not lie inside.
    pub(crate) fn of_part(
        domain: &Domain,
        memory: Arc<Memory>,
        part: Range<usize>,
        access: c_uint,
    ) -> Result<Self, Error> {
        assert!(part.start <= part.end && part.end <= memory.bytes(), "{part:?} of {} bytes", memory.bytes());
        let context = domain.context();
        let functions = Functions::of(context.library());
        // SAFETY: the domain lives, as the region holds it; so does the memory.
        let made = unsafe { functions.register(domain.raw(), &memory, part, access) };
        let (raw, way) = made.map_err(|error| {
            if memory.is_of_device() {
                Error::DeviceMemory { device: context.name().to_owned(), error }
            } else {
                Error::call("ibv_reg_mr", context.name(), error)
            }
        })?;
        Ok(Self { raw, way, domain: domain.clone(), memory })
    }

    /// By which way the adapter reaches it.
    pub(crate) const fn way(&self) -> Way {
        self.way
    }

    pub(crate) fn memory(&self) -> &Memory {
        &self.memory
    }

    pub(crate) fn local_key(&self) -> u32 {
        // SAFETY: the region lives.
        unsafe { self.raw.as_ref().lkey }
    }

    pub(crate) fn remote_key(&self) -> u32 {
        // SAFETY: the region lives.
        unsafe { self.raw.as_ref().rkey }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: made by `Region::new`. Queue pairs that used it have been destroyed by whoever owns both.
        unsafe { (self.domain.context().library().ibv_dereg_mr)(self.raw.as_ptr()) };
    }
}
