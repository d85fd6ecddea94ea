//! A row on the wire: header, choices, payload. And rows at their final place: a [`Block`].

use std::ops::Range;

use crate::c_struct;
use crate::shape::{Element, Shape};
use crate::terms::{Offset, ROW_ALIGN, SCALES_ALIGN, SLOT_ALIGN, Span, round_up};

c_struct! {
    /// Says whose row this is and where it belongs.
    #[derive(Eq)]
    pub struct RowHeader = "EpRowHeader" {
        /// The rank whose token this is.
        pub source_rank: u32,
        /// The token's index in its rank's batch.
        pub source_token: u32,
        /// The row's index among all rows from that rank to the receiver, in token order.
        pub position: u32,
        /// Low word of the operation.
        pub op: u32,
    }
}

c_struct! {
    /// One of a row's topk choices, as the receiver sees it.
    pub struct Choice = "EpChoice" {
        /// Index of the expert on the receiver, or -1 when the choice is dropped or lives elsewhere.
        pub expert: i32,
        /// The router's weight, or 0 where `expert` is -1.
        pub weight: f32,
    }
}

c_struct! {
    /// The header of a low-latency row that travels as units: this unit, and one for each choice.
    #[derive(Eq)]
    pub struct UnitRow = "EpUnitRow" {
        /// The rank whose token this is.
        pub source_rank: u32,
        /// The token's index in its rank's batch.
        pub source_token: u32,
        /// As of a [`RowHeader`].
        pub op: u32,
    }
}

c_struct! {
    /// One of the choices of such a row.
    pub struct UnitChoice = "EpUnitChoice" {
        /// The expert, of all ranks, or -1 when the choice is dropped.
        pub expert: i32,
        /// The router's weight, or 0 where `expert` is -1.
        pub weight: f32,
        /// The row's index among those that its rank sends to this expert, in token order.
        pub index: u32,
    }
}

impl Choice {
    /// A choice that is not the receiver's.
    pub const NONE: Self = Self { expert: -1, weight: 0.0 };
}

/// Sizes of a row for one shape.
///
/// ```text
/// header: RowHeader 16 B, Choice[topk] 8 B each, padded to 16 B | payload, padded to 16 B | padding to 128 B
///
/// payload, bf16: codes 2 B each
/// payload, FP8:  codes 1 B each, padded to 16 B | scales, f32 or one byte each
/// payload, INT8: codes 1 B each, padded to 16 B | one scale, f32
/// ```
///
/// Rows have one format on the way to the experts and, where they travel as codes, another on the way back:
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

    /// Bytes from one row's codes to the next's in a block.
    pub const fn codes_stride(&self) -> u64 {
        round_up(self.codes_bytes(), ROW_ALIGN)
    }

    /// From the start of the payload to its scales; the end of the payload where it has none.
    pub const fn scales_offset(&self) -> u64 {
        self.codes_stride()
    }

    /// Bytes of the scales.
    pub const fn scales_bytes(&self) -> u64 {
        self.element.scales_bytes(self.hidden)
    }

    /// Bytes from one row's scales to the next's in a block.
    pub const fn scales_stride(&self) -> u64 {
        round_up(self.scales_bytes(), SCALES_ALIGN)
    }

    /// Bytes from one payload to the next where payloads lie in one piece, as they travel.
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

    /// Bytes of the headers and scales of `rows` rows in a block: what lies before their codes.
    const fn heads_bytes(&self, rows: u64) -> u64 {
        round_up(rows * self.header_bytes(), SLOT_ALIGN) + round_up(rows * self.scales_stride(), SLOT_ALIGN)
    }

    /// Bytes of a block of `rows` rows in the arena.
    pub const fn block_bytes(&self, rows: u64) -> u64 {
        self.heads_bytes(rows) + round_up(rows * self.codes_stride(), SLOT_ALIGN)
    }

    /// The block of `rows` rows at `base`.
    pub const fn block(&self, base: Offset, rows: u32) -> Block {
        Block { format: *self, base, room: rows, rows }
    }
}

/// Rows at their final place: all headers, then all scales, then all codes, so that codes and scales are a dense tensor each.
///
/// ```text
/// headers, each padded to 16 B | to 128 B | scales, where rows have some, each padded to 4 B | to 128 B | codes, each padded to 16 B | to 128 B
/// ```
///
/// Codes are last, as they are most of it: of a block with room for more rows than came [what is left](Self::cut) lies in one piece, but for headers and scales.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Block {
    format: RowFormat,
    base: Offset,
    /// Rows that its parts were laid out for.
    room: u32,
    rows: u32,
}

impl Block {
    /// Where it starts.
    pub const fn base(&self) -> Offset {
        self.base
    }

    /// The format of its rows.
    pub const fn format(&self) -> &RowFormat {
        &self.format
    }

    /// How many rows it holds.
    pub const fn rows(&self) -> u32 {
        self.rows
    }

    /// For how many rows its parts were laid out: what others must know to find them.
    pub const fn room(&self) -> u32 {
        self.room
    }

    /// The block of its first `rows` rows, which lie where they lay, and the bytes behind them that are free then. Of a block with fewer rows
    /// all of it.
    #[must_use]
    pub fn cut(&self, rows: u32) -> (Self, Span) {
        let cut = Self { rows: rows.min(self.rows), ..*self };
        // One of no rows needs no room.
        let cut = if cut.rows == 0 { self.format.block(Offset(0), 0) } else { cut };
        let free = self.span().len - cut.span().len;
        (cut, Offset(self.span().end() - free).span(free))
    }

    /// All its bytes.
    pub const fn span(&self) -> Span {
        let codes = round_up(self.rows as u64 * self.format.codes_stride(), SLOT_ALIGN);
        self.base.span(self.format.heads_bytes(self.room as u64) + codes)
    }

    /// The header of row `row`.
    pub const fn header(&self, row: u32) -> Span {
        let stride = self.format.header_bytes();
        self.base.plus(row as u64 * stride).span(stride)
    }

    /// The scales of row `row`, padding included; of no bytes where rows have none.
    pub const fn scales(&self, row: u32) -> Span {
        let headers = round_up(self.room as u64 * self.format.header_bytes(), SLOT_ALIGN);
        let stride = self.format.scales_stride();
        self.base.plus(headers + row as u64 * stride).span(stride)
    }

    /// The codes of row `row`, padding included.
    pub const fn codes(&self, row: u32) -> Span {
        let stride = self.format.codes_stride();
        self.base.plus(self.format.heads_bytes(self.room as u64) + row as u64 * stride).span(stride)
    }

    /// Where the payload of row `row` lies: for each of its parts, codes and scales if it has some, which bytes of the payload as it
    /// travels they are, and their place.
    pub fn parts(&self, row: u32) -> impl Iterator<Item = (Range<usize>, Offset)> + use<> {
        let [codes, scales, end] =
            [self.format.codes_bytes(), self.format.scales_offset(), self.format.payload_bytes()].map(|at| at as usize);
        let parts = [(0..codes, self.codes(row).offset), (scales.min(end)..end, self.scales(row).offset)];
        parts.into_iter().filter(|(part, _)| !part.is_empty())
    }

    /// Brings row `row` together as it travels: `read` reads its parts into `payload`. Padding between them becomes zero.
    pub(crate) fn gather<E>(
        &self,
        row: u32,
        payload: &mut [u8],
        read: impl Fn(Offset, &mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut end = 0;
        for (part, at) in self.parts(row) {
            payload[end..part.start].fill(0);
            end = part.end;
            read(at, &mut payload[part])?;
        }
        Ok(())
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
    fn scales_follow_the_codes() {
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
        assert_eq!(places(Element::Int8, 300), (304, 4, 320));
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
        assert_eq!(block.header(2).offset, Offset(128 + 96));
        assert_eq!(block.codes(0).offset, Offset(128 + 256));
        assert_eq!(block.span().len, 256 + 256);
        assert_eq!(block.parts(1).collect::<Vec<_>>(), [(0..34, Offset(128 + 256 + 48))]);
    }

    #[test]
    fn codes_and_scales_of_placed_rows_lie_apart() {
        let placed = |element, hidden| {
            let row = format(element, hidden);
            let block = row.block(Offset(0), 3);
            assert_eq!(block.header(0).offset.0, 0);
            let parts = block.parts(2).map(|(part, at)| (part, at.0));
            (row.codes_stride(), row.scales_stride(), parts.collect::<Vec<_>>())
        };
        // Behind headers of 3 x 80 bytes, and scales of 3 x 224.
        let expected = vec![(0..7168, 256 + 768 + 2 * 7168), (7168..7392, 256 + 2 * 224)];
        assert_eq!(placed(Element::Fp8(Scaling::Exact), 7168), (7168, 224, expected));
        let expected = vec![(0..300, 256 + 128 + 608), (304..307, 256 + 8)];
        assert_eq!(placed(Element::Fp8(Scaling::Ue8m0), 300), (304, 4, expected));
    }

    #[test]
    fn a_block_that_is_cut_leaves_its_end() {
        for element in [Element::Bf16, Element::Fp8(Scaling::Exact)] {
            let row = format(element, 7168);
            let block = row.block(Offset(128), 100);
            for rows in [0, 1, 60, 99, 100, 200] {
                let (cut, free) = block.cut(rows);
                assert_eq!((cut.rows(), free.end()), (rows.min(100), block.span().end()));
                if rows == 0 {
                    assert_eq!(free, block.span(), "nothing is kept of a block of no rows");
                    continue;
                }
                assert_eq!((cut.room(), cut.span().end()), (100, free.offset.0));
                let last = cut.rows() - 1;
                let places = |block: &Block| [block.header(last), block.scales(last), block.codes(last)];
                assert_eq!(places(&cut), places(&block));
                assert!(places(&cut).iter().all(|part| part.end() <= free.offset.0));
                let (again, rest) = cut.cut(1);
                assert_eq!((again, rest.end()), (block.cut(1).0, free.offset.0));
            }
        }
    }
}
