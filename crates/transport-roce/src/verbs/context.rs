//! Devices: listing them, opening one, asking it for its ports.

use std::io;
use std::ops::Deref;
use std::ptr::NonNull;

use ep_rdma::sys::{self, Zeroed as _};
use ep_rdma::{Device, Devices, Port};

use crate::error::Error;
use crate::library::{Functions, Library};

/// An opened device, and the functions for it.
#[derive(Clone, Debug)]
pub(crate) struct Context {
    library: &'static Library,
    device: Device,
}

impl Context {
    /// The names of all devices.
    pub(crate) fn names() -> Result<Vec<String>, Error> {
        let devices = Devices::of(&Library::get()?.verbs)?.ok_or(Error::NoDevice)?;
        Ok(devices.iter().map(|(name, _)| name).collect())
    }

    pub(crate) fn open(name: &str) -> Result<Self, Error> {
        let library = Library::get()?;
        let devices = Devices::of(&library.verbs)?.ok_or(Error::NoDevice)?;
        let Some((_, device)) = devices.iter().find(|(found, _)| found == name) else {
            let found = devices.iter().map(|(name, _)| name).collect::<Vec<_>>().join(", ");
            return Err(Error::NoSuchDevice { name: name.to_owned(), found });
        };
        // SAFETY: a device of a living list.
        let raw = unsafe { (library.functions.ibv_open_device)(device.as_ptr()) };
        let failed = || ep_rdma::Error::call("ibv_open_device", name, io::Error::last_os_error());
        let raw = NonNull::new(raw).ok_or_else(failed)?;
        // SAFETY: opened just now, by the library that has these functions.
        let device = unsafe { Device::new(&library.verbs, name, raw) };
        Ok(Self { library, device })
    }

    pub(super) const fn functions(&self) -> &'static Functions {
        &self.library.functions
    }

    pub(crate) fn attributes(&self) -> Result<sys::DeviceAttr, Error> {
        let mut attributes = sys::DeviceAttr::zeroed();
        // SAFETY: an opened device and a place for the structure.
        let code = unsafe { (self.functions().ibv_query_device)(self.raw(), &mut attributes) };
        self.outcome("ibv_query_device", code)?;
        Ok(attributes)
    }

    pub(crate) fn ports(&self) -> Result<Vec<Port>, Error> {
        (1..=self.attributes()?.phys_port_cnt).map(|number| Ok(self.port(number)?)).collect()
    }
}

impl Deref for Context {
    type Target = Device;

    fn deref(&self) -> &Device {
        &self.device
    }
}
