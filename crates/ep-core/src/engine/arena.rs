//! The arena of a window: blocks granted to peers, or filled by the experts for peers to pull; and leases of them.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::error::Fault;
use crate::layout::{Block, RowFormat, SLOT_ALIGN};
use crate::machine::Window;
use crate::port::{Offset, Span};

/// Free and taken ranges of an arena: first fit, neighbours merged.
#[derive(Debug)]
struct Free {
    ranges: Vec<Span>,
}

impl Free {
    fn take(&mut self, len: u64) -> Option<Offset> {
        let at = self.ranges.iter().position(|range| range.len >= len)?;
        let range = &mut self.ranges[at];
        let taken = range.offset;
        *range = taken.plus(len).span(range.len - len);
        if range.len == 0 {
            self.ranges.remove(at);
        }
        Some(taken)
    }

    fn give(&mut self, span: Span) {
        let at = self.ranges.partition_point(|range| range.offset < span.offset);
        self.ranges.insert(at, span);
        if at + 1 < self.ranges.len() && self.ranges[at].end() == self.ranges[at + 1].offset.0 {
            self.ranges[at].len += self.ranges.remove(at + 1).len;
        }
        if at > 0 && self.ranges[at - 1].end() == self.ranges[at].offset.0 {
            self.ranges[at - 1].len += self.ranges.remove(at).len;
        }
    }
}

/// Hands out blocks of the arena.
#[derive(Clone, Debug)]
pub(crate) struct Arena {
    free: Arc<Mutex<Free>>,
}

impl Arena {
    pub(crate) fn new(span: Span) -> Self {
        let start = span.offset.0.next_multiple_of(SLOT_ALIGN);
        let len = span.end().saturating_sub(start) / SLOT_ALIGN * SLOT_ALIGN;
        let ranges = if len > 0 { vec![Offset(start).span(len)] } else { Vec::new() };
        Self { free: Arc::new(Mutex::new(Free { ranges })) }
    }

    /// A block of `rows` rows, or none when there is no room. A block of no rows needs no room.
    pub(crate) fn take(&self, format: &RowFormat, rows: u32) -> Option<Block> {
        let len = format.block_bytes(u64::from(rows));
        let base = if len == 0 { Offset(0) } else { self.free().take(len)? };
        Some(format.block(base, rows))
    }

    /// Makes a block's memory available again.
    pub(crate) fn give(&self, block: &Block) {
        if block.span().len > 0 {
            self.free().give(block.span());
        }
    }

    /// Whether both hand out the same memory.
    pub(crate) fn same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.free, &other.free)
    }

    fn free(&self) -> MutexGuard<'_, Free> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Rows in the arena, held by the user. Dropping it makes the memory grantable again.
pub struct Lease<W> {
    arena: Arena,
    block: Block,
    row_bytes: u64,
    window: W,
}

impl<W: Window> Lease<W> {
    pub(crate) fn new(arena: &Arena, block: Block, row_bytes: u64, window: W) -> Self {
        Self { arena: arena.clone(), block, row_bytes, window }
    }

    pub(crate) fn block_in(&self, arena: &Arena) -> Option<Block> {
        self.arena.same(arena).then_some(self.block)
    }

    /// Rows it holds.
    pub fn rows(&self) -> u32 {
        self.block.rows()
    }

    /// Bytes of one row.
    pub const fn row_bytes(&self) -> usize {
        self.row_bytes as usize
    }

    /// Copies row `row` out.
    ///
    /// # Errors
    /// [`Fault::OutOfRange`].
    pub fn read(&self, row: u32, into: &mut [u8]) -> Result<(), Fault> {
        self.check(row)?;
        self.window.read(self.block.payload(row).offset, &mut into[..self.row_bytes as usize])
    }

    /// Copies row `row` in.
    ///
    /// # Errors
    /// [`Fault::OutOfRange`].
    pub fn write(&mut self, row: u32, bytes: &[u8]) -> Result<(), Fault> {
        self.check(row)?;
        self.window.write(self.block.payload(row).offset, &bytes[..self.row_bytes as usize])
    }

    const fn check(&self, row: u32) -> Result<(), Fault> {
        if row < self.block.rows() {
            Ok(())
        } else {
            Err(Fault::out_of_range(self.block.payload(row), self.block.span().end()))
        }
    }
}

impl<W> fmt::Debug for Lease<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease").field("block", &self.block).finish_non_exhaustive()
    }
}

impl<W> Drop for Lease<W> {
    fn drop(&mut self) {
        self.arena.give(&self.block);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::Shape;

    #[test]
    fn what_is_given_back_is_one_piece_again() {
        let format = RowFormat::new(&Shape::builder().hidden(32).topk(1).build().unwrap());
        let arena = Arena::new(Offset(64).span(10 * format.block_bytes(1)));
        let blocks: Vec<_> = (0..10).map(|_| arena.take(&format, 1).unwrap()).collect();
        assert!(arena.take(&format, 1).is_none());
        for at in [3, 5, 4, 0, 9, 1, 2, 8, 6, 7] {
            arena.give(&blocks[at]);
        }
        assert_eq!(arena.free().ranges.len(), 1);
        assert!(arena.take(&format, 0).is_some());
    }
}
