//! A device.

use std::ffi::CStr;
use std::ptr;
use std::sync::Arc;

use super::table::HBM;
use super::{AscendError, REPEATED_INITIALIZE, Table, check};

/// A device of a table.
#[derive(Debug)]
pub struct Device {
    table: Table,
    ordinal: u32,
}

impl Device {
    /// How many devices a table shows. Opens it for the process.
    ///
    /// # Errors
    /// Where it does not start.
    pub fn count(table: &Table) -> Result<u32, AscendError> {
        // SAFETY: no configuration is named. Another user of the process may have been first.
        let code = unsafe { table.init()?(ptr::null()) };
        if code != REPEATED_INITIALIZE {
            check(table, "aclInit", code)?;
        }
        let mut count = 0;
        // SAFETY: `count` is written to.
        check(table, "aclrtGetDeviceCount", unsafe { table.device_count()?(&raw mut count) })?;
        Ok(count)
    }

    /// Opens a device.
    ///
    /// # Errors
    /// [`AscendError::NoSuchDevice`], or what the table says.
    pub fn open(table: &Table, ordinal: u32) -> Result<Arc<Self>, AscendError> {
        let present = Self::count(table)?;
        if ordinal >= present {
            return Err(AscendError::NoSuchDevice { ordinal, present });
        }
        let this = Arc::new(Self { table: *table, ordinal });
        this.bind()?;
        Ok(this)
    }

    /// Its number.
    pub const fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// The functions that drive it.
    pub const fn table(&self) -> &Table {
        &self.table
    }

    /// Makes it the calling thread's device.
    pub(super) fn bind(&self) -> Result<&Table, AscendError> {
        // SAFETY: any number may be given.
        check(&self.table, "aclrtSetDevice", unsafe { self.table.set_device()?(self.ordinal as i32) })?;
        Ok(&self.table)
    }

    /// What it calls itself, such as `Ascend910B1`.
    ///
    /// # Errors
    /// What the table says.
    pub fn soc(&self) -> Result<String, AscendError> {
        let table = self.bind()?;
        // SAFETY: the function takes nothing.
        let name = unsafe { table.soc_name()?() };
        if name.is_null() {
            return Ok(String::new());
        }
        // SAFETY: the library's strings are static and end with zero.
        Ok(unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned())
    }

    /// Bytes of memory that it has left.
    ///
    /// # Errors
    /// What the table says.
    pub fn left(&self) -> Result<u64, AscendError> {
        let table = self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: both numbers are written to.
        check(table, "aclrtGetMemInfo", unsafe { table.memory_info()?(HBM, &raw mut free, &raw mut total) })?;
        Ok(free as u64)
    }

    /// Lets it reach the memory of another device that is allocated for peers.
    ///
    /// # Errors
    /// [`AscendError::NoPeerAccess`], or what the table says.
    pub fn reach(&self, peer: &Self) -> Result<(), AscendError> {
        if peer.ordinal == self.ordinal {
            return Ok(());
        }
        let table = self.bind()?;
        let mut can = 0;
        let (from, to) = (self.ordinal, peer.ordinal);
        // SAFETY: `can` is written to.
        let code = unsafe { table.can_access_peer()?(&raw mut can, from as i32, to as i32) };
        check(table, "aclrtDeviceCanAccessPeer", code)?;
        if can != 1 {
            return Err(AscendError::NoPeerAccess { from, to });
        }
        // SAFETY: flags must be 0.
        let code = unsafe { table.enable_peer_access()?(to as i32, 0) };
        check(table, "aclrtDeviceEnablePeerAccess", code)
    }
}
