//! Values of cells: 48 bits of count below 16 bits of generation.

/// Bytes of a cell.
pub const CELL_BYTES: u64 = 8;
/// Bytes of a line: cells of one writer's lane and of nobody else (rule F4).
pub const LINE_BYTES: u64 = 64;
/// Bits of a cell's count; the generation lies above them.
pub const VALUE_BITS: u32 = 48;

const VALUE_MASK: u64 = (1 << VALUE_BITS) - 1;

/// The bits that a cell holds for `value` in `generation`. Later generations compare greater.
#[inline]
pub const fn stamp(generation: u16, value: u64) -> u64 {
    debug_assert!(value <= VALUE_MASK);
    (generation as u64) << VALUE_BITS | value
}

/// The count in a cell's bits as `generation` sees it: zero when an earlier generation wrote them.
#[inline]
pub const fn value_in(generation: u16, bits: u64) -> u64 {
    if generation_of(bits) == generation { bits & VALUE_MASK } else { 0 }
}

/// The generation that wrote a cell's bits.
#[inline]
pub const fn generation_of(bits: u64) -> u16 {
    (bits >> VALUE_BITS) as u16
}
