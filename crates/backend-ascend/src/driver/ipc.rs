//! Memory that processes of a server share: one exports it by a key, the others import it.

use std::ffi::{c_char, c_void};
use std::ptr;
use std::sync::Arc;

use super::{AscendError, Device, Memory, check};

/// Bytes of a key, with the zero at its end.
pub(crate) const KEY: usize = 65;
/// Of an import: the devices are to reach each other.
pub(crate) const PEER_ACCESS: u64 = 1;

/// What other processes import memory by.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Key(pub(crate) [u8; KEY]);

impl Device {
    /// The number by which others name this process.
    pub(crate) fn process_number(&self) -> Result<i32, AscendError> {
        let table = self.bind()?;
        let mut number = 0;
        // SAFETY: the number is written to.
        check(table, "aclrtDeviceGetBareTgid", unsafe { table.process_number()?(&raw mut number) })?;
        Ok(number)
    }
}

impl Memory {
    /// Lets processes of these numbers import it, until what is returned is dropped.
    pub(crate) fn export(&self, processes: &[i32]) -> Result<Exported, AscendError> {
        let (table, mut key, mut processes) = (self.device().bind()?, [0u8; KEY], processes.to_vec());
        let (at, text) = (self.address() as *mut c_void, key.as_mut_ptr().cast::<c_char>());
        // SAFETY: the memory is of so many bytes, and the key has room for as many as are said.
        check(table, "aclrtIpcMemGetExportKey", unsafe { table.export_memory()?(at, self.bytes(), text, KEY, 0) })?;
        key[KEY - 1] = 0;
        let exported = Exported { device: Arc::clone(self.device()), key: Key(key) };
        // SAFETY: the key ends with zero, and there are so many numbers.
        let code = unsafe { table.allow_import()?(key.as_ptr().cast(), processes.as_mut_ptr(), processes.len()) };
        check(table, "aclrtIpcMemSetImportPid", code)?;
        Ok(exported)
    }
}

/// The key of memory that others may import. It is dropped when all have closed what they imported, and before the memory is given back.
#[derive(Debug)]
pub(crate) struct Exported {
    device: Arc<Device>,
    key: Key,
}

impl Exported {
    /// What others import the memory by.
    pub(crate) const fn key(&self) -> Key {
        self.key
    }
}

impl Drop for Exported {
    fn drop(&mut self) {
        close(&self.device, &self.key);
    }
}

/// Ends the use of a key that this process has exported or imported.
fn close(device: &Device, key: &Key) {
    let Ok(table) = device.bind().or_else(|_| device.bind()) else { return };
    if let Some(close) = table.close_memory {
        // SAFETY: the key ends with zero. Nobody uses by it what it names any more.
        unsafe { close(key.0.as_ptr().cast()) };
    }
}

/// Memory of another process's device. Given back when it is dropped.
#[derive(Debug)]
pub(crate) struct Imported {
    device: Arc<Device>,
    key: Key,
    address: u64,
}

impl Imported {
    /// Imports what a key names; the device reaches it from then on.
    pub(crate) fn open(device: &Arc<Device>, key: Key) -> Result<Self, AscendError> {
        let (table, mut address) = (device.bind()?, ptr::null_mut());
        // SAFETY: the address is written to, and the key ends with zero.
        let code = unsafe { table.import_memory()?(&raw mut address, key.0.as_ptr().cast(), PEER_ACCESS) };
        check(table, "aclrtIpcMemImportByKey", code)?;
        Ok(Self { device: Arc::clone(device), key, address: address as u64 })
    }

    /// Where kernels see it.
    pub(crate) const fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for Imported {
    fn drop(&mut self) {
        close(&self.device, &self.key);
    }
}
