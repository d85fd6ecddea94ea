//! Devices: listing them, opening one, asking it for its ports and addresses.

use std::ffi::{CStr, c_int};
use std::fs;
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::device::Gid;
use crate::error::Error;
use crate::library::Library;
use crate::sys::{self, Zeroed as _};

/// A port of a device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Port {
    pub(crate) device: String,
    /// Counted from 1.
    pub(crate) number: u8,
    pub(crate) state: u32,
    /// The active one, as verbs number it: 1 is 256 bytes, 5 is 4096.
    pub(crate) mtu: u32,
    pub(crate) lid: u16,
    pub(crate) gids: u32,
    /// Bytes of the longest message.
    pub(crate) max_message: u32,
    pub(crate) ethernet: bool,
}

impl Port {
    pub(crate) const fn is_active(&self) -> bool {
        self.state == sys::PORT_ACTIVE
    }
}

/// An opened device.
#[derive(Clone, Debug)]
pub(crate) struct Context(Arc<Opened>);

#[derive(Debug)]
struct Opened {
    library: &'static Library,
    name: String,
    raw: NonNull<sys::Context>,
}

// SAFETY: libibverbs allows any thread to use a context, several at a time too.
unsafe impl Send for Opened {}
// SAFETY: as above.
unsafe impl Sync for Opened {}

impl Drop for Opened {
    fn drop(&mut self) {
        // SAFETY: opened by `Context::open`, and everything made of it has ended: it held this.
        unsafe { (self.library.ibv_close_device)(self.raw.as_ptr()) };
    }
}

/// The devices of this machine, for as long as the list lives.
struct List {
    library: &'static Library,
    raw: NonNull<*mut sys::Device>,
    count: usize,
}

impl List {
    fn new() -> Result<Self, Error> {
        let library = Library::get()?;
        let mut count = 0;
        // SAFETY: the argument is a place for a number.
        let raw = unsafe { (library.ibv_get_device_list)(&mut count) };
        match NonNull::new(raw) {
            Some(raw) => Ok(Self { library, raw, count: count.max(0) as usize }),
            // No module of the kernel: no devices.
            None if io::Error::last_os_error().raw_os_error() == Some(38) => Err(Error::NoDevice),
            None => Err(Error::call("ibv_get_device_list", "this machine", io::Error::last_os_error())),
        }
    }

    fn devices(&self) -> impl Iterator<Item = (String, *mut sys::Device)> + '_ {
        (0..self.count).map(|at| {
            // SAFETY: the list has `count` entries, and lives.
            let device = unsafe { *self.raw.as_ptr().add(at) };
            // SAFETY: of a device of a living list; the name is a string in it.
            let name = unsafe { CStr::from_ptr((self.library.ibv_get_device_name)(device)) };
            (name.to_string_lossy().into_owned(), device)
        })
    }
}

impl Drop for List {
    fn drop(&mut self) {
        // SAFETY: given out by `ibv_get_device_list`, and no device of it is used any more but opened ones, which count for
        // themselves.
        unsafe { (self.library.ibv_free_device_list)(self.raw.as_ptr()) };
    }
}

impl Context {
    /// The names of all devices.
    pub(crate) fn names() -> Result<Vec<String>, Error> {
        Ok(List::new()?.devices().map(|(name, _)| name).collect())
    }

    pub(crate) fn open(name: &str) -> Result<Self, Error> {
        let list = List::new()?;
        let all: Vec<String> = list.devices().map(|(name, _)| name).collect();
        let Some((_, device)) = list.devices().find(|(found, _)| found == name) else {
            return Err(Error::NoSuchDevice { name: name.to_owned(), found: all.join(", ") });
        };
        // SAFETY: a device of a living list.
        let raw = unsafe { (list.library.ibv_open_device)(device) };
        let raw = NonNull::new(raw).ok_or_else(|| Error::call("ibv_open_device", name, io::Error::last_os_error()))?;
        Ok(Self(Arc::new(Opened { library: list.library, name: name.to_owned(), raw })))
    }

    pub(crate) fn name(&self) -> &str {
        &self.0.name
    }

    pub(super) fn library(&self) -> &'static Library {
        self.0.library
    }

    pub(super) fn raw(&self) -> *mut sys::Context {
        self.0.raw.as_ptr()
    }

    /// What a call answered that returns 0 or an error number.
    pub(super) fn outcome(&self, call: &'static str, code: c_int) -> Result<(), Error> {
        // Some providers return -1 and set errno.
        let error = || if code < 0 { io::Error::last_os_error() } else { io::Error::from_raw_os_error(code) };
        if code == 0 { Ok(()) } else { Err(Error::call(call, self.name(), error())) }
    }

    pub(super) fn made<T>(&self, call: &'static str, raw: *mut T) -> Result<NonNull<T>, Error> {
        NonNull::new(raw).ok_or_else(|| Error::call(call, self.name(), io::Error::last_os_error()))
    }

    pub(crate) fn attributes(&self) -> Result<sys::DeviceAttr, Error> {
        let mut attributes = sys::DeviceAttr::zeroed();
        // SAFETY: an opened device and a place for the structure.
        let code = unsafe { (self.0.library.ibv_query_device)(self.raw(), &mut attributes) };
        self.outcome("ibv_query_device", code).map(|()| attributes)
    }

    pub(crate) fn port(&self, number: u8) -> Result<Port, Error> {
        let mut found = sys::PortAttr::zeroed();
        // SAFETY: an opened device and a place for the structure, of which the function fills a part.
        let code = unsafe { (self.0.library.ibv_query_port)(self.raw(), number, &mut found) };
        self.outcome("ibv_query_port", code)?;
        Ok(Port {
            device: self.name().to_owned(),
            number,
            state: found.state,
            mtu: found.active_mtu,
            lid: found.lid,
            gids: found.gid_tbl_len.clamp(0, 255) as u32,
            max_message: found.max_msg_sz,
            ethernet: found.link_layer == sys::LINK_ETHERNET,
        })
    }

    pub(crate) fn ports(&self) -> Result<Vec<Port>, Error> {
        (1..=self.attributes()?.phys_port_cnt).map(|number| self.port(number)).collect()
    }

    /// The addresses of a port; unused places of the table are left out.
    pub(crate) fn gids(&self, port: &Port) -> Result<Vec<Gid>, Error> {
        let mut gids = Vec::new();
        for index in 0..port.gids {
            let mut gid = sys::gid([0; 16]);
            // SAFETY: an opened device and a place for the address.
            let code = unsafe { (self.0.library.ibv_query_gid)(self.raw(), port.number, index as c_int, &mut gid) };
            if code == 0 && sys::bytes_of(&gid) != [0; 16] {
                let routable = self.gid_kind(port, index).is_none_or(|kind| kind.trim() == "RoCE v2");
                gids.push(Gid { index: index as u8, bytes: sys::bytes_of(&gid), routable });
            }
        }
        Ok(gids)
    }

    /// What the kernel says of an address; none where it says nothing.
    fn gid_kind(&self, port: &Port, index: u32) -> Option<String> {
        let (name, number) = (self.name(), port.number);
        fs::read_to_string(format!("/sys/class/infiniband/{name}/ports/{number}/gid_attrs/types/{index}")).ok()
    }
}
