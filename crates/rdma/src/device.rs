//! Adapters: listing them, opening one, and what its calls answer.

use std::ffi::{CStr, c_int};
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::error::Error;
use crate::library::Verbs;
use crate::sys;

/// The adapters of this machine, for as long as the list lives.
#[derive(Debug)]
pub struct Devices {
    verbs: Verbs,
    raw: NonNull<*mut sys::Device>,
    count: usize,
}

impl Devices {
    /// All of them; none where the kernel has no module for RDMA.
    ///
    /// # Errors
    /// [`Error::Call`] where the system does not tell.
    pub fn of(verbs: &Verbs) -> Result<Option<Self>, Error> {
        let mut count = 0;
        // SAFETY: the argument is a place for a number.
        let raw = unsafe { (verbs.functions.ibv_get_device_list)(&mut count) };
        match NonNull::new(raw) {
            Some(raw) => Ok(Some(Self { verbs: verbs.clone(), raw, count: count.max(0) as usize })),
            None if io::Error::last_os_error().raw_os_error() == Some(38) => Ok(None),
            None => Err(Error::call("ibv_get_device_list", "this machine", io::Error::last_os_error())),
        }
    }

    /// Their names, and each as the library knows it while this list lives.
    pub fn iter(&self) -> impl Iterator<Item = (String, NonNull<sys::Device>)> + '_ {
        (0..self.count).filter_map(|at| {
            // SAFETY: the list has `count` entries, and lives.
            let device = NonNull::new(unsafe { *self.raw.as_ptr().add(at) })?;
            // SAFETY: of a device of a living list; the name is a string in it.
            let name = unsafe { CStr::from_ptr((self.verbs.functions.ibv_get_device_name)(device.as_ptr())) };
            Some((name.to_string_lossy().into_owned(), device))
        })
    }
}

impl Drop for Devices {
    fn drop(&mut self) {
        // SAFETY: given out by `ibv_get_device_list`, and no device of it is used any more but opened ones, which count for themselves.
        unsafe { (self.verbs.functions.ibv_free_device_list)(self.raw.as_ptr()) };
    }
}

/// An opened adapter.
#[derive(Clone, Debug)]
pub struct Device(Arc<Opened>);

#[derive(Debug)]
struct Opened {
    verbs: Verbs,
    name: String,
    raw: NonNull<sys::Context>,
}

// SAFETY: libibverbs allows any thread to use a context, several at a time too.
unsafe impl Send for Opened {}
// SAFETY: as above.
unsafe impl Sync for Opened {}

impl Drop for Opened {
    fn drop(&mut self) {
        // SAFETY: opened, by the word of `Device::new`, and everything made of it has ended: it held this.
        unsafe { (self.verbs.functions.ibv_close_device)(self.raw.as_ptr()) };
    }
}

impl Device {
    /// Takes over what a function that opens adapters returned; it is closed when the last clone ends.
    ///
    /// # Safety
    /// `raw` is an adapter that was opened by the libraries of `verbs`, and nobody else closes it.
    pub unsafe fn new(verbs: &Verbs, name: &str, raw: NonNull<sys::Context>) -> Self {
        Self(Arc::new(Opened { verbs: verbs.clone(), name: name.to_owned(), raw }))
    }

    /// As the system lists it.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    pub(crate) fn verbs(&self) -> &Verbs {
        &self.0.verbs
    }

    /// As the library knows it. It lives as long as `self`.
    pub fn raw(&self) -> *mut sys::Context {
        self.0.raw.as_ptr()
    }

    /// What a call answered that returns 0 or an error number.
    ///
    /// # Errors
    /// [`Error::Call`] for all but 0.
    pub fn outcome(&self, call: &'static str, code: c_int) -> Result<(), Error> {
        // Some providers return -1 and set errno.
        let error = || if code < 0 { io::Error::last_os_error() } else { io::Error::from_raw_os_error(code) };
        if code == 0 { Ok(()) } else { Err(Error::call(call, self.name(), error())) }
    }

    /// What a call answered that returns what it made.
    ///
    /// # Errors
    /// [`Error::Call`] for null.
    pub fn made<T>(&self, call: &'static str, raw: *mut T) -> Result<NonNull<T>, Error> {
        NonNull::new(raw).ok_or_else(|| Error::call(call, self.name(), io::Error::last_os_error()))
    }
}
