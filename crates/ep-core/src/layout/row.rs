//! A row on the wire: header, choices, payload.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::{ROW_ALIGN, SLOT_ALIGN, round_up};
use crate::port::{Offset, Span};
use crate::shape::Shape;

/// Says whose row this is and where it belongs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct RowHeader {
    /// The rank whose token this is.
    pub source_rank: u32,
    /// The token's index in its rank's batch.
    pub source_token: u32,
    /// The row's index among all rows from that rank to the receiver, in token order.
    pub position: u32,
    /// Low word of the operation.
    pub op: u32,
}

/// One of a row's topk choices, as the receiver sees it.
#[derive(Clone, Copy, PartialEq, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct Choice {
    /// Index of the expert on the receiver, or -1 when the choice is dropped or lives elsewhere.
    pub expert: i32,
    /// The router's weight, or 0 where `expert` is -1.
    pub weight: f32,
}

impl Choice {
    /// A choice that is not the receiver's.
    pub const NONE: Self = Self { expert: -1, weight: 0.0 };
}

/// Sizes of a row for one shape.
///
/// ```text
/// header: RowHeader 16 B, Choice[topk] 8 B each, padded to 16 B | payload, padded to 16 B | padding to 64 B
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RowFormat {
    topk: u32,
    payload: u64,
}

impl RowFormat {
    /// The format of a shape's rows.
    pub const fn new(shape: &Shape) -> Self {
        Self { topk: shape.topk(), payload: shape.row_bytes() }
    }

    /// Choices in each header.
    pub const fn topk(&self) -> u32 {
        self.topk
    }

    /// Bytes of header and choices.
    pub const fn header_bytes(&self) -> u64 {
        round_up(size_of::<RowHeader>() as u64 + self.topk as u64 * size_of::<Choice>() as u64, ROW_ALIGN)
    }

    /// Bytes of the payload that carry data.
    pub const fn payload_bytes(&self) -> u64 {
        self.payload
    }

    /// Bytes from one payload to the next in a block.
    pub const fn payload_stride(&self) -> u64 {
        round_up(self.payload, ROW_ALIGN)
    }

    /// Bytes of header and payload as they travel through a ring.
    pub const fn wire_bytes(&self) -> u64 {
        self.header_bytes() + self.payload_stride()
    }

    /// Bytes from one ring slot to the next.
    pub const fn slot_bytes(&self) -> u64 {
        round_up(self.wire_bytes(), SLOT_ALIGN)
    }

    /// Bytes of a block of `rows` rows in the arena.
    pub const fn block_bytes(&self, rows: u64) -> u64 {
        round_up(rows * self.payload_stride(), SLOT_ALIGN) + round_up(rows * self.header_bytes(), SLOT_ALIGN)
    }

    /// The block of `rows` rows at `base`.
    pub const fn block(&self, base: Offset, rows: u32) -> Block {
        Block { format: *self, base, rows }
    }
}

/// Rows that lie in an arena: all payloads, then all headers, so that the payloads are one dense tensor.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Block {
    format: RowFormat,
    base: Offset,
    rows: u32,
}

impl Block {
    /// Where it starts.
    pub const fn base(&self) -> Offset {
        self.base
    }

    /// How many rows it holds.
    pub const fn rows(&self) -> u32 {
        self.rows
    }

    /// All its bytes.
    pub const fn span(&self) -> Span {
        self.base.span(self.format.block_bytes(self.rows as u64))
    }

    /// The payload of row `row`, padding included.
    pub const fn payload(&self, row: u32) -> Span {
        let stride = self.format.payload_stride();
        self.base.plus(row as u64 * stride).span(stride)
    }

    /// The header of row `row`.
    pub const fn header(&self, row: u32) -> Span {
        let payloads = round_up(self.rows as u64 * self.format.payload_stride(), SLOT_ALIGN);
        let stride = self.format.header_bytes();
        self.base.plus(payloads + row as u64 * stride).span(stride)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_of_deepseek_rows() {
        let row = RowFormat::new(&Shape::builder().build().unwrap());
        assert_eq!((row.header_bytes(), row.payload_stride(), row.slot_bytes()), (80, 14336, 14464));
    }

    #[test]
    fn odd_rows_are_padded() {
        let row = RowFormat::new(&Shape::builder().hidden(17).topk(3).experts(8).build().unwrap());
        assert_eq!((row.payload_bytes(), row.payload_stride(), row.header_bytes()), (34, 48, 48));
        let block = row.block(Offset(128), 3);
        assert_eq!(block.payload(2).offset, Offset(128 + 96));
        assert_eq!(block.header(0).offset, Offset(128 + 192));
        assert_eq!(block.span().len, 192 + 192);
    }
}
