//! A row on the wire: header, choices, payload.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::{ROW_ALIGN, SLOT_ALIGN, round_up};
use crate::port::{Offset, Span};
use crate::shape::{Element, Shape};

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
///
/// payload, bf16: codes 2 B each
/// payload, FP8:  codes 1 B each, padded to 16 B | scales, f32 or one byte each
/// ```
///
/// Rows have one format on the way to the experts and, where they travel as FP8, another on the way back:
/// [`Self::results`]. Ring slots have room for both. Padding is never looked at.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RowFormat {
    topk: u32,
    hidden: u32,
    element: Element,
    /// Of the longer of the two formats.
    payload_room: u64,
}

impl RowFormat {
    /// The format of a shape's rows in a dispatch.
    pub const fn new(shape: &Shape) -> Self {
        let (there, back) = (shape.row_bytes(), shape.result_bytes());
        let longer = if there > back { there } else { back };
        let payload_room = round_up(longer, ROW_ALIGN);
        Self { topk: shape.topk(), hidden: shape.hidden(), element: shape.element(), payload_room }
    }

    /// The format of the same shape's rows in a combine: bf16.
    pub const fn results(&self) -> Self {
        Self { element: Element::Bf16, ..*self }
    }

    /// Choices in each header.
    pub const fn topk(&self) -> u32 {
        self.topk
    }

    /// How the elements are stored.
    pub const fn element(&self) -> Element {
        self.element
    }

    /// Bytes of header and choices.
    pub const fn header_bytes(&self) -> u64 {
        round_up(size_of::<RowHeader>() as u64 + self.topk as u64 * size_of::<Choice>() as u64, ROW_ALIGN)
    }

    /// Bytes of the payload up to the last that carries data.
    pub const fn payload_bytes(&self) -> u64 {
        self.element.row_bytes(self.hidden)
    }

    /// Bytes of the codes, at the start of the payload.
    pub const fn codes_bytes(&self) -> u64 {
        self.element.codes_bytes(self.hidden)
    }

    /// From the start of the payload to its scales; the end of the payload where it has none.
    pub const fn scales_offset(&self) -> u64 {
        round_up(self.codes_bytes(), ROW_ALIGN)
    }

    /// Bytes of the scales.
    pub const fn scales_bytes(&self) -> u64 {
        self.element.scales_bytes(self.hidden)
    }

    /// Bytes from one payload to the next in a block.
    pub const fn payload_stride(&self) -> u64 {
        round_up(self.payload_bytes(), ROW_ALIGN)
    }

    /// Bytes of header and payload as they travel through a ring.
    pub const fn wire_bytes(&self) -> u64 {
        self.header_bytes() + self.payload_stride()
    }

    /// Bytes of a ring slot that rows may use: [`Self::wire_bytes`] of the longer format, there or back.
    pub const fn slot_room(&self) -> u64 {
        self.header_bytes() + self.payload_room
    }

    /// Bytes from one ring slot to the next.
    pub const fn slot_bytes(&self) -> u64 {
        round_up(self.slot_room(), SLOT_ALIGN)
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
    use crate::quant::Scaling;

    #[test]
    fn sizes_of_deepseek_rows() {
        let row = RowFormat::new(&Shape::builder().build().unwrap());
        assert_eq!((row.header_bytes(), row.payload_stride(), row.slot_bytes()), (80, 14336, 14464));
    }

    /// The format of rows of `hidden` elements, top-8.
    fn format(element: Element, hidden: u32) -> RowFormat {
        RowFormat::new(&Shape::builder().element(element).hidden(hidden).build().unwrap())
    }

    #[test]
    fn scales_follow_the_codes_of_fp8_rows() {
        let places = |element, hidden| {
            let row = format(element, hidden);
            assert_eq!(
                (row.codes_bytes(), row.payload_bytes()),
                (hidden.into(), row.scales_offset() + row.scales_bytes())
            );
            (row.scales_offset(), row.scales_bytes(), row.payload_stride())
        };
        assert_eq!(places(Element::Fp8(Scaling::Exact), 7168), (7168, 224, 7392));
        assert_eq!(places(Element::Fp8(Scaling::PowerOfTwo), 300), (304, 12, 320));
        assert_eq!(places(Element::Fp8(Scaling::Ue8m0), 7168), (7168, 56, 7232));
        assert_eq!(places(Element::Fp8(Scaling::Ue8m0), 1), (16, 1, 32));
    }

    #[test]
    fn bf16_rows_have_no_scales_and_one_format() {
        let row = format(Element::Bf16, 300);
        assert_eq!((row.codes_bytes(), row.scales_offset(), row.scales_bytes()), (600, row.payload_stride(), 0));
        assert_eq!((row.results(), row.slot_room()), (row, row.wire_bytes()));
    }

    #[test]
    fn slots_hold_rows_there_and_back() {
        for (element, hidden) in Element::ALL.into_iter().flat_map(|element| [1, 8, 300, 7168].map(|h| (element, h))) {
            let (there, back) = (format(element, hidden), format(element, hidden).results());
            assert_eq!(back.payload_bytes(), 2 * u64::from(hidden));
            assert_eq!(there.slot_bytes(), back.slot_bytes(), "both go through the same rings");
            assert_eq!(there.slot_room(), there.wire_bytes().max(back.wire_bytes()), "{element}, hidden {hidden}");
        }
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
