//! Rows and arrays in a device's memory.

use std::any::Any;
use std::marker::PhantomData;
use std::sync::Arc;

use ep_core::Error;
use ep_core::engine::{Extent, Scalar};
use zerocopy::{FromBytes, IntoBytes};

use crate::driver::{Device, Memory};

/// What a launch uses, kept until it has ended.
pub(crate) type Held = Arc<dyn Any + Send + Sync>;

/// `[rows, hidden]` rows in a device's memory, side by side, each as it travels.
#[derive(Debug)]
pub struct Rows {
    memory: Arc<Memory>,
    rows: u32,
    row_bytes: usize,
    /// Codes and scales that a dispatch brought: no results.
    are_dispatched_codes: bool,
}

impl Rows {
    /// Room for so many rows, undefined.
    pub(crate) fn new(device: &Arc<Device>, rows: u32, row_bytes: usize) -> Result<Self, Error> {
        let memory = Arc::new(Memory::new(device, (rows as usize).saturating_mul(row_bytes))?);
        Ok(Self { memory, rows, row_bytes, are_dispatched_codes: false })
    }

    /// The same, of what a dispatch brings.
    pub(crate) fn landing(device: &Arc<Device>, rows: u32, row_bytes: usize, is_coded: bool) -> Result<Self, Error> {
        Ok(Self { are_dispatched_codes: is_coded, ..Self::new(device, rows, row_bytes)? })
    }

    /// Rows that lie in memory of somebody else's.
    ///
    /// # Safety
    /// As [`Memory::lent`], of so many rows.
    pub(super) unsafe fn lent(device: &Arc<Device>, address: u64, rows: u32, row_bytes: usize) -> Self {
        // SAFETY: as the caller promises.
        let memory = unsafe { Memory::lent(device, address, rows as usize * row_bytes) };
        Self { memory: Arc::new(memory), rows, row_bytes, are_dispatched_codes: false }
    }

    pub(crate) fn from_bytes(device: &Arc<Device>, bytes: &[u8], rows: u32, row_bytes: usize) -> Result<Self, Error> {
        if Some(bytes.len()) != (rows as usize).checked_mul(row_bytes) {
            let limit = format_args!("{rows} rows of {row_bytes} bytes");
            return Err(Error::invalid("length of the rows in bytes", bytes.len(), limit));
        }
        let memory = Arc::new(Memory::of(device, bytes)?);
        Ok(Self { memory, rows, row_bytes, are_dispatched_codes: false })
    }

    /// Rows it has room for.
    pub const fn rows(&self) -> u32 {
        self.rows
    }

    /// Bytes of a row, and from one row to the next.
    pub const fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// Whether they lie in memory of somebody else's.
    pub(crate) fn are_lent(&self) -> bool {
        self.memory.is_lent()
    }

    /// Where the first row lies.
    pub fn address(&self) -> u64 {
        self.memory.address()
    }

    /// What a desk checks of them.
    pub(crate) const fn extent(&self) -> Extent {
        Extent { rows: self.rows, row_bytes: self.row_bytes, are_apart: self.are_dispatched_codes }
    }

    /// Refuses rows of another device.
    pub(crate) fn check_home(&self, what: &str, device: &Arc<Device>) -> Result<(), Error> {
        check_home(what, &self.memory, device)
    }

    /// Its memory, to be kept while a launch uses it.
    pub(crate) fn memory(&self) -> Held {
        Arc::clone(&self.memory) as _
    }

    /// Makes the rows from `first` on zeros.
    pub(crate) fn zero_from(&self, first: u32) -> Result<(), Error> {
        let at = first as usize * self.row_bytes;
        Ok(self.memory.fill_part(at, self.rows as usize * self.row_bytes - at, 0)?)
    }

    pub(crate) fn to_vec(&self) -> Result<Vec<u8>, Error> {
        Ok(self.memory.values(0, self.rows as usize * self.row_bytes)?)
    }

    /// Copies dense rows in, from row `first` on.
    pub(crate) fn store(&self, first: u32, bytes: &[u8]) -> Result<(), Error> {
        if self.row_bytes == 0 || !bytes.len().is_multiple_of(self.row_bytes) {
            let limit = format_args!("a multiple of {}", self.row_bytes);
            return Err(Error::invalid("length of the rows in bytes", bytes.len(), limit));
        }
        let last = first as usize + bytes.len() / self.row_bytes;
        if last > self.rows as usize {
            let limit = format_args!("at most the {} rows of the buffer", self.rows);
            return Err(Error::invalid("last row to store", last, limit));
        }
        Ok(self.memory.write(first as usize * self.row_bytes, bytes)?)
    }
}

/// Numbers in a device's memory.
#[derive(Debug)]
pub struct Array<T> {
    memory: Arc<Memory>,
    len: usize,
    of: PhantomData<T>,
}

impl<T> Clone for Array<T> {
    fn clone(&self) -> Self {
        Self { memory: Arc::clone(&self.memory), len: self.len, of: PhantomData }
    }
}

impl<T: Scalar> Array<T> {
    /// Room for `len` numbers, of this byte all over.
    pub(crate) fn filled(device: &Arc<Device>, len: usize, byte: u8) -> Result<Self, Error> {
        let memory = Memory::new(device, len.saturating_mul(size_of::<T>()))?;
        memory.fill(byte)?;
        Ok(Self { memory: Arc::new(memory), len, of: PhantomData })
    }

    /// Numbers that lie in memory of somebody else's.
    ///
    /// # Safety
    /// As [`Memory::lent`], of so many numbers.
    pub(super) unsafe fn lent(device: &Arc<Device>, address: u64, len: usize) -> Self {
        // SAFETY: as the caller promises.
        let memory = unsafe { Memory::lent(device, address, len * size_of::<T>()) };
        Self { memory: Arc::new(memory), len, of: PhantomData }
    }

    pub(crate) fn from_values(device: &Arc<Device>, values: &[T]) -> Result<Self, Error> {
        Ok(Self { memory: Arc::new(Memory::of(device, values)?), len: values.len(), of: PhantomData })
    }

    /// Fills all of them with a byte.
    pub(crate) fn fill(&self, byte: u8) -> Result<(), Error> {
        Ok(self.memory.fill(byte)?)
    }

    /// Writes `values` over the first ones.
    pub(crate) fn write(&self, values: &[T]) -> Result<(), Error> {
        Ok(self.memory.write(0, values.as_bytes())?)
    }

    pub(crate) fn to_vec(&self) -> Result<Vec<T>, Error> {
        let bytes = self.memory.values::<u8>(0, self.len * size_of::<T>())?;
        let mut values = vec![T::new_zeroed(); self.len];
        for (value, bytes) in values.iter_mut().zip(bytes.chunks_exact(size_of::<T>())) {
            if let Ok(read) = T::read_from_bytes(bytes) {
                *value = read;
            }
        }
        Ok(values)
    }

    /// The first `count` of them.
    pub(crate) fn first(&self, count: usize) -> Result<Vec<T>, Error>
    where
        T: FromBytes + IntoBytes + Clone,
    {
        Ok(self.memory.values(0, count)?)
    }

    /// Refuses numbers of another device.
    pub(crate) fn check_home(&self, what: &str, device: &Arc<Device>) -> Result<(), Error> {
        check_home(what, &self.memory, device)
    }

    /// Its memory, to be kept while a launch uses it.
    pub(crate) fn memory(&self) -> Held {
        Arc::clone(&self.memory) as _
    }

    /// Numbers in it.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds none.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where it lies.
    pub fn address(&self) -> u64 {
        self.memory.address()
    }
}

fn check_home(what: &str, memory: &Memory, device: &Arc<Device>) -> Result<(), Error> {
    if Arc::ptr_eq(memory.device(), device) {
        return Ok(());
    }
    Err(Error::invalid(what, "of another endpoint", "one of this endpoint"))
}
