//! Memory of a device.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::{AscendError, DEVICE_TO_HOST, Device, HOST_TO_DEVICE, MALLOC_HUGE_FIRST, MALLOC_HUGE_FIRST_P2P, check};

/// A block of a device's memory, of undefined bytes at first. Given back when it is dropped: no launch that uses it may be under way then.
#[derive(Debug)]
pub struct Memory {
    device: Arc<Device>,
    address: u64,
    bytes: usize,
    /// Somebody else's, who gives it back.
    is_lent: bool,
}

impl Memory {
    /// Memory of the device that is somebody else's.
    ///
    /// # Safety
    /// So many bytes of the device's memory lie at the address, until this value and all launches that use it are gone.
    pub(crate) unsafe fn lent(device: &Arc<Device>, address: u64, bytes: usize) -> Self {
        Self { device: Arc::clone(device), address, bytes, is_lent: true }
    }

    /// Whether it is somebody else's.
    pub(crate) const fn is_lent(&self) -> bool {
        self.is_lent
    }

    /// Memory of its device alone.
    ///
    /// # Errors
    /// Where there is none left.
    pub fn new(device: &Arc<Device>, bytes: usize) -> Result<Self, AscendError> {
        Self::with(device, bytes, MALLOC_HUGE_FIRST)
    }

    /// Memory that devices reach which have opened this one ([`Device::reach`]): a window.
    ///
    /// # Errors
    /// Where there is none left.
    pub fn of_peers(device: &Arc<Device>, bytes: usize) -> Result<Self, AscendError> {
        Self::with(device, bytes, MALLOC_HUGE_FIRST_P2P)
    }

    fn with(device: &Arc<Device>, bytes: usize, policy: i32) -> Result<Self, AscendError> {
        let table = device.bind()?;
        let mut address = ptr::null_mut();
        // An address of 0 says that there is nothing, so nothing has an address, too.
        // SAFETY: `address` is written to.
        check(table, "aclrtMalloc", unsafe { table.malloc()?(&raw mut address, bytes.max(32), policy) })?;
        Ok(Self { device: Arc::clone(device), address: address as u64, bytes, is_lent: false })
    }

    /// Memory that holds these values.
    ///
    /// # Errors
    /// Where there is none left, or the copy fails.
    pub fn of<T: IntoBytes + Immutable>(device: &Arc<Device>, values: &[T]) -> Result<Self, AscendError> {
        let this = Self::new(device, size_of_val(values))?;
        this.write(0, values.as_bytes())?;
        Ok(this)
    }

    /// Memory of zeros.
    ///
    /// # Errors
    /// As [`Memory::of`].
    pub fn zeroed(device: &Arc<Device>, bytes: usize) -> Result<Self, AscendError> {
        let this = Self::new(device, bytes)?;
        this.fill(0)?;
        Ok(this)
    }

    /// Where it lies.
    pub const fn address(&self) -> u64 {
        self.address
    }

    /// How much it is.
    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whose it is.
    pub const fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Copies bytes of the device out that are no block of this process: what a library left there.
    ///
    /// # Errors
    /// What the table says.
    ///
    /// # Safety
    /// So many bytes of the device's memory lie at the address.
    pub(crate) unsafe fn read_from(device: &Device, address: u64, into: &mut [u8]) -> Result<(), AscendError> {
        let (table, from, to) = (device.bind()?, address as *const c_void, into.as_mut_ptr().cast());
        // SAFETY: as the caller promises; the copy has ended on return.
        check(table, "aclrtMemcpy", unsafe { table.memcpy()?(to, into.len(), from, into.len(), DEVICE_TO_HOST) })
    }

    fn at(&self, at: usize, len: usize) -> Result<*mut c_void, AscendError> {
        match at.checked_add(len) {
            Some(end) if end <= self.bytes => Ok((self.address + at as u64) as *mut c_void),
            _ => Err(AscendError::Beyond { at, len, bytes: self.bytes }),
        }
    }

    /// Copies bytes in, from byte `at` on. Does not wait for launches.
    ///
    /// # Errors
    /// [`AscendError::Beyond`], or what the table says.
    pub fn write(&self, at: usize, bytes: &[u8]) -> Result<(), AscendError> {
        let to = self.at(at, bytes.len())?;
        if bytes.is_empty() {
            return Ok(());
        }
        let (table, from) = (self.device.bind()?, bytes.as_ptr().cast());
        // SAFETY: so many bytes lie at both, and the copy has ended on return.
        check(table, "aclrtMemcpy", unsafe { table.memcpy()?(to, bytes.len(), from, bytes.len(), HOST_TO_DEVICE) })
    }

    /// Copies bytes out, from byte `at` on. Does not wait for launches.
    ///
    /// # Errors
    /// [`AscendError::Beyond`], or what the table says.
    pub fn read(&self, at: usize, into: &mut [u8]) -> Result<(), AscendError> {
        let from = self.at(at, into.len())?;
        if into.is_empty() {
            return Ok(());
        }
        let (table, to) = (self.device.bind()?, into.as_mut_ptr().cast());
        // SAFETY: so many bytes lie at both, and the copy has ended on return.
        check(table, "aclrtMemcpy", unsafe { table.memcpy()?(to, into.len(), from, into.len(), DEVICE_TO_HOST) })
    }

    /// Copies `count` values out, from byte `at` on.
    ///
    /// # Errors
    /// As [`Memory::read`].
    pub fn values<T: FromBytes + IntoBytes + Clone>(&self, at: usize, count: usize) -> Result<Vec<T>, AscendError> {
        let mut values = vec![T::new_zeroed(); count];
        self.read(at, values.as_mut_bytes())?;
        Ok(values)
    }

    /// Fills all of it with a byte.
    ///
    /// # Errors
    /// What the table says.
    pub fn fill(&self, byte: u8) -> Result<(), AscendError> {
        self.fill_part(0, self.bytes, byte)
    }

    /// Fills `len` bytes from byte `at` on with a byte.
    ///
    /// # Errors
    /// [`AscendError::Beyond`], or what the table says.
    pub fn fill_part(&self, at: usize, len: usize, byte: u8) -> Result<(), AscendError> {
        let at = self.at(at, len)?;
        if len == 0 {
            return Ok(());
        }
        let table = self.device.bind()?;
        // SAFETY: so many bytes lie there.
        check(table, "aclrtMemset", unsafe { table.memset()?(at, len, byte.into(), len) })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.is_lent {
            return;
        }
        // A device that answers the second time is still there.
        let Ok(table) = self.device.bind().or_else(|_| self.device.bind()) else { return };
        if let Some(free) = table.free {
            // SAFETY: it was allocated by this table, and nobody uses it any more. What it says when it fails nobody can do anything about.
            unsafe { free(self.address as *mut c_void) };
        }
    }
}
