//! [`HostRows`]: rows in a CPU's memory, owned or leased from the window.

use std::fmt;

use crate::engine::arena::{Arena, Lease};
use crate::engine::pool::{Buffer, Pool};
use crate::error::{Error, Fault};
use crate::layout::Block;
use crate::machine::Window;

/// `[rows, hidden]` rows of equal size: the buffer type of engines whose roles run on a CPU.
pub enum HostRows<W: Window> {
    /// In ordinary memory, dense.
    Owned {
        /// The rows' bytes.
        bytes: Buffer,
        /// Bytes of one row; not 0.
        row_bytes: usize,
    },
    /// In the arena of the own window.
    Leased(Lease<W>),
}

impl<W: Window> HostRows<W> {
    pub(crate) fn zeroed(rows: u32, row_bytes: usize) -> Self {
        Self::Owned { bytes: vec![0; rows as usize * row_bytes].into(), row_bytes }
    }

    /// Room for `rows` rows that are to be written, in memory of `pool`.
    pub(crate) fn of_pool(pool: &Pool, rows: u32, row_bytes: usize) -> Self {
        Self::Owned { bytes: pool.take(rows as usize * row_bytes), row_bytes }
    }

    pub(crate) fn from_bytes(pool: &Pool, bytes: &[u8], rows: u32, row_bytes: usize) -> Result<Self, Error> {
        if bytes.len() != rows as usize * row_bytes {
            return Err(Error::invalid(
                "length of the rows in bytes",
                bytes.len(),
                format_args!("{rows} rows of {row_bytes} bytes"),
            ));
        }
        let mut own = pool.take(bytes.len());
        own.copy_from_slice(bytes);
        Ok(Self::Owned { bytes: own, row_bytes })
    }

    /// Rows it has room for.
    pub fn rows(&self) -> u32 {
        match self {
            Self::Owned { bytes, row_bytes } => (bytes.len() / row_bytes) as u32,
            Self::Leased(lease) => lease.rows(),
        }
    }

    /// Bytes of one row.
    pub const fn row_bytes(&self) -> usize {
        match self {
            Self::Owned { row_bytes, .. } => *row_bytes,
            Self::Leased(lease) => lease.row_bytes(),
        }
    }

    /// Whether the rows lie in the arena of the window.
    pub const fn is_leased(&self) -> bool {
        matches!(self, Self::Leased(_))
    }

    /// Copies row `row` into `into`, which is one row long.
    ///
    /// # Errors
    /// [`Fault::OutOfRange`] beyond the last row.
    pub fn read(&self, row: u32, into: &mut [u8]) -> Result<(), Fault> {
        match self {
            Self::Owned { .. } => into.copy_from_slice(self.borrow(row, &mut [])?),
            Self::Leased(lease) => lease.read(row, into)?,
        }
        Ok(())
    }

    /// Copies `bytes`, one row, into row `row`.
    ///
    /// # Errors
    /// [`Fault::OutOfRange`] beyond the last row.
    pub fn write(&mut self, row: u32, bytes: &[u8]) -> Result<(), Fault> {
        match self {
            Self::Owned { .. } => self.slot(row)?.copy_from_slice(bytes),
            Self::Leased(lease) => lease.write(row, bytes)?,
        }
        Ok(())
    }

    /// All rows, dense.
    pub(crate) fn to_vec(&self) -> Result<Vec<u8>, Error> {
        match self {
            Self::Owned { bytes, .. } => Ok(bytes.to_vec()),
            Self::Leased(lease) => {
                let mut bytes = vec![0; lease.rows() as usize * lease.row_bytes()];
                for (row, into) in (0u32..).zip(bytes.chunks_exact_mut(lease.row_bytes())) {
                    lease.read(row, into).map_err(|fault| Error::invalid("row of a lease", row, fault))?;
                }
                Ok(bytes)
            }
        }
    }

    /// Copies dense rows in, from row `first` on.
    pub(crate) fn store(&mut self, first: u32, bytes: &[u8]) -> Result<(), Error> {
        let (size, room) = (self.row_bytes(), self.rows());
        let rows = bytes.len() / size;
        if !bytes.len().is_multiple_of(size) {
            return Err(Error::invalid(
                "length of the rows in bytes",
                bytes.len(),
                format_args!("a multiple of {size}"),
            ));
        }
        if first as usize + rows > room as usize {
            let last = first as usize + rows;
            return Err(Error::invalid(
                "last row to store",
                last,
                format_args!("at most the {room} rows of the buffer"),
            ));
        }
        for (row, bytes) in (first..).zip(bytes.chunks_exact(size)) {
            self.write(row, bytes).map_err(|fault| Error::invalid("row to store", row, fault))?;
        }
        Ok(())
    }

    /// Row `row` where it lies, or copied into `scratch` when it lies in the window.
    pub(crate) fn borrow<'a>(&'a self, row: u32, scratch: &'a mut [u8]) -> Result<&'a [u8], Fault> {
        match self {
            Self::Owned { bytes, row_bytes } => {
                let at = row as usize * row_bytes;
                bytes.get(at..at + row_bytes).ok_or_else(|| beyond(at, *row_bytes, bytes.len()))
            }
            Self::Leased(lease) => {
                lease.read(row, scratch)?;
                Ok(scratch)
            }
        }
    }

    /// Row `row` of ordinary memory, to be filled.
    pub(crate) fn slot(&mut self, row: u32) -> Result<&mut [u8], Fault> {
        match self {
            Self::Owned { bytes, row_bytes } => {
                let (at, len) = (row as usize * *row_bytes, bytes.len());
                bytes.get_mut(at..at + *row_bytes).ok_or_else(|| beyond(at, *row_bytes, len))
            }
            Self::Leased(_) => Err(beyond(0, 0, 0)),
        }
    }

    /// The lease, when the rows lie in the window.
    pub const fn lease(&self) -> Option<&Lease<W>> {
        match self {
            Self::Owned { .. } => None,
            Self::Leased(lease) => Some(lease),
        }
    }

    /// The block it leases from `arena`, if it does.
    pub(crate) fn block_in(&self, arena: &Arena) -> Option<Block> {
        match self {
            Self::Owned { .. } => None,
            Self::Leased(lease) => lease.block_in(arena),
        }
    }
}

impl<W: Window> fmt::Debug for HostRows<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostRows")
            .field("rows", &self.rows())
            .field("row_bytes", &self.row_bytes())
            .field("leased", &self.is_leased())
            .finish()
    }
}

const fn beyond(at: usize, len: usize, limit: usize) -> Fault {
    Fault::OutOfRange { start: at as u64, end: (at + len) as u64, window: limit as u64 }
}
