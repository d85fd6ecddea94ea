//! [`HostRows`]: rows in a CPU's memory, owned or leased from the window.

use std::fmt;
use std::ops::Range;

use super::{Arena, Buffer, Extent, Lease, Pool};
use crate::error::{Error, Fault};
use crate::layout::{Block, RowFormat};
use crate::machine::Window;
use crate::port::Offset;
use crate::room::{NoMemory, zeroed};

/// `[rows, hidden]` rows of equal size: the buffer type of engines whose roles run on a CPU.
pub enum HostRows<W: Window> {
    /// In ordinary memory, dense, each in one piece as it travels.
    Owned {
        /// The rows' bytes.
        bytes: Buffer,
        /// Bytes of one row; not 0.
        row_bytes: usize,
    },
    /// FP8 rows of a dispatch in ordinary memory, codes and scales apart.
    Apart {
        /// The block.
        bytes: Buffer,
        /// Where they lie: offsets are those in `bytes`. What is in its headers is undefined.
        block: Block,
    },
    /// In the arena of the own window.
    Leased(Lease<W>),
}

impl<W: Window> HostRows<W> {
    pub(crate) fn zeroed(rows: u32, row_bytes: usize) -> Result<Self, NoMemory> {
        Ok(Self::Owned { bytes: zeroed((rows as usize).saturating_mul(row_bytes))?.into(), row_bytes })
    }

    /// Room for `rows` rows of a dispatch that are to be written, in memory of `pool`.
    pub(crate) fn landing(pool: &Pool, rows: u32, format: &RowFormat) -> Result<Self, NoMemory> {
        if format.scales_bytes() > 0 {
            let block = format.block(Offset(0), rows);
            return Ok(Self::Apart { bytes: pool.take(format.block_bytes(rows.into()) as usize)?, block });
        }
        let row_bytes = format.payload_bytes() as usize;
        Ok(Self::Owned { bytes: pool.take((rows as usize).saturating_mul(row_bytes))?, row_bytes })
    }

    pub(crate) fn from_bytes(pool: &Pool, bytes: &[u8], rows: u32, row_bytes: usize) -> Result<Self, Error> {
        if Some(bytes.len()) != (rows as usize).checked_mul(row_bytes) {
            return Err(Error::invalid(
                "length of the rows in bytes",
                bytes.len(),
                format_args!("{rows} rows of {row_bytes} bytes"),
            ));
        }
        let mut own = pool.take(bytes.len())?;
        own.copy_from_slice(bytes);
        Ok(Self::Owned { bytes: own, row_bytes })
    }

    /// Rows it has room for.
    pub fn rows(&self) -> u32 {
        match self {
            // Of rows of no bytes, which nobody here makes, there are none.
            Self::Owned { bytes, row_bytes } => {
                bytes.len().checked_div(*row_bytes).map_or(0, |rows| u32::try_from(rows).unwrap_or(u32::MAX))
            }
            Self::Apart { block, .. } => block.rows(),
            Self::Leased(lease) => lease.rows(),
        }
    }

    /// Bytes of one row as it travels.
    pub fn row_bytes(&self) -> usize {
        match self {
            Self::Owned { row_bytes, .. } => *row_bytes,
            Self::Apart { block, .. } => block.format().payload_bytes() as usize,
            Self::Leased(lease) => lease.row_bytes(),
        }
    }

    /// What a desk checks of them.
    pub fn extent(&self) -> Extent {
        Extent { rows: self.rows(), row_bytes: self.row_bytes(), are_apart: self.are_apart() }
    }

    /// Whether the rows' scales lie apart from their codes: rows that a dispatch brought.
    pub fn are_apart(&self) -> bool {
        match self {
            Self::Owned { .. } => false,
            Self::Apart { .. } => true,
            Self::Leased(lease) => lease.place().1.format().scales_bytes() > 0,
        }
    }

    /// Whether the rows lie in the arena of the window.
    pub const fn is_leased(&self) -> bool {
        matches!(self, Self::Leased(_))
    }

    /// Copies row `row`, as it travels, into `into`, which is one row long.
    ///
    /// # Errors
    /// [`Fault::OutOfRange`] beyond the last row, or where `into` has another length.
    pub fn read(&self, row: u32, into: &mut [u8]) -> Result<(), Fault> {
        self.check_length(into.len())?;
        match self {
            Self::Owned { .. } => {
                into.copy_from_slice(self.borrow(row, &mut [])?);
                Ok(())
            }
            Self::Apart { bytes, block } => {
                check_row(block, row)?;
                block.gather(row, into, |at, into| {
                    let (at, len) = (at.0 as usize, into.len());
                    let end = at.saturating_add(len);
                    into.copy_from_slice(bytes.get(at..end).ok_or_else(|| beyond(at, len, bytes.len()))?);
                    Ok(())
                })
            }
            Self::Leased(lease) => lease.read(row, into),
        }
    }

    /// Copies `bytes`, one row as it travels, into row `row`.
    ///
    /// # Errors
    /// [`Fault::OutOfRange`] beyond the last row, or where `bytes` have another length.
    pub fn write(&mut self, row: u32, bytes: &[u8]) -> Result<(), Fault> {
        self.check_length(bytes.len())?;
        match self {
            Self::Leased(lease) => lease.write(row, bytes),
            _ => self.fill(row, |part, into| {
                into.copy_from_slice(&bytes[part]);
                Ok(())
            }),
        }
    }

    /// Makes the rows from `first` on zeros.
    pub(crate) fn zero_from(&mut self, first: u32) -> Result<(), Error> {
        let zeros = zeroed(self.row_bytes())?;
        for row in first..self.rows() {
            self.write(row, &zeros).map_err(|fault| Error::invalid("row to make zeros", row, fault))?;
        }
        Ok(())
    }

    fn check_length(&self, len: usize) -> Result<(), Fault> {
        let row = self.row_bytes();
        if len == row { Ok(()) } else { Err(beyond(0, len, row)) }
    }

    /// All rows, dense, each as it travels.
    pub(crate) fn to_vec(&self) -> Result<Vec<u8>, Error> {
        if let Self::Owned { bytes, .. } = self {
            return Ok(bytes.to_vec());
        }
        let row_bytes = self.row_bytes();
        let mut bytes = zeroed(self.rows() as usize * row_bytes)?;
        for (row, into) in (0u32..).zip(bytes.chunks_exact_mut(row_bytes.max(1))) {
            self.read(row, into).map_err(|fault| Error::invalid("row to copy", row, fault))?;
        }
        Ok(bytes)
    }

    /// Copies dense rows in, from row `first` on.
    pub(crate) fn store(&mut self, first: u32, bytes: &[u8]) -> Result<(), Error> {
        let (size, room) = (self.row_bytes(), self.rows());
        if size == 0 || !bytes.len().is_multiple_of(size) {
            return Err(Error::invalid(
                "length of the rows in bytes",
                bytes.len(),
                format_args!("a multiple of {size}"),
            ));
        }
        let last = first as usize + bytes.len() / size;
        if last > room as usize {
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

    /// Row `row` as it travels: where it lies, or copied into `scratch` when it lies in the window or apart.
    pub(crate) fn borrow<'a>(&'a self, row: u32, scratch: &'a mut [u8]) -> Result<&'a [u8], Fault> {
        match self {
            Self::Owned { bytes, row_bytes } => {
                let at = row as usize * row_bytes;
                bytes.get(at..at + row_bytes).ok_or_else(|| beyond(at, *row_bytes, bytes.len()))
            }
            _ => {
                self.read(row, scratch)?;
                Ok(scratch)
            }
        }
    }

    /// Fills row `row` of ordinary memory: `with` is given the places of its parts, and which bytes they are of the row as it travels.
    pub(crate) fn fill(
        &mut self,
        row: u32,
        mut with: impl FnMut(Range<usize>, &mut [u8]) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        match self {
            Self::Owned { bytes, row_bytes } => {
                let (at, len, size) = (row as usize * *row_bytes, bytes.len(), *row_bytes);
                with(0..size, bytes.get_mut(at..at + size).ok_or_else(|| beyond(at, size, len))?)
            }
            Self::Apart { bytes, block } => {
                check_row(block, row)?;
                let all = bytes.len();
                block.parts(row).try_for_each(|(part, at)| {
                    let (at, len) = (at.0 as usize, part.len());
                    let into = bytes.get_mut(at..at.saturating_add(len));
                    with(part, into.ok_or_else(|| beyond(at, len, all))?)
                })
            }
            Self::Leased(_) => Err(beyond(0, 0, 0)),
        }
    }

    /// The lease, when the rows lie in the window.
    pub const fn lease(&self) -> Option<&Lease<W>> {
        match self {
            Self::Owned { .. } | Self::Apart { .. } => None,
            Self::Leased(lease) => Some(lease),
        }
    }

    /// The block it leases from `arena`, if it does.
    pub(crate) fn block_in(&self, arena: &Arena) -> Option<Block> {
        self.lease().and_then(|lease| lease.block_in(arena))
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

/// Refuses a row that `block` does not have.
fn check_row(block: &Block, row: u32) -> Result<(), Fault> {
    let codes = block.codes(row);
    if row < block.rows() { Ok(()) } else { Err(Fault::out_of_range(codes, block.codes(block.rows()).offset.0)) }
}

const fn beyond(at: usize, len: usize, limit: usize) -> Fault {
    Fault::OutOfRange { start: at as u64, end: at.saturating_add(len) as u64, window: limit as u64 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::loopback::LoopbackMachine;
    use crate::{Element, Scaling, Shape};

    type Rows = HostRows<<LoopbackMachine as crate::machine::Machine>::Window>;

    /// Whoever makes rows of his own may say anything of them: that is an error, and no panic.
    #[test]
    fn rows_that_cannot_be_are_refused() {
        let mut nothing = Rows::Owned { bytes: vec![0; 8].into(), row_bytes: 0 };
        assert_eq!(nothing.rows(), 0);
        assert!(nothing.store(0, &[0; 4]).is_err());
        let shape = Shape::builder().hidden(256).topk(1).element(Element::Fp8(Scaling::Exact)).build().unwrap();
        let block = RowFormat::new(&shape).block(Offset(0), 4);
        let mut short = Rows::Apart { bytes: vec![0; 16].into(), block };
        let mut row = vec![0; short.row_bytes()];
        assert!(matches!(short.read(0, &mut row), Err(Fault::OutOfRange { .. })));
        assert!(matches!(short.write(0, &row), Err(Fault::OutOfRange { .. })));
        let mut dense = Rows::Owned { bytes: vec![0; 8].into(), row_bytes: 4 };
        assert!(matches!(dense.read(0, &mut [0; 3]), Err(Fault::OutOfRange { .. })));
        assert!(matches!(dense.write(1, &[0; 5]), Err(Fault::OutOfRange { .. })));
        assert!(dense.store(1, &[1; 8]).is_err() && dense.store(1, &[1; 4]).is_ok());
    }
}
