//! Places in a window, and how they are aligned.

/// A place in a window, in bytes from its start. The same offset means the same thing on every rank.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Offset(pub u64);

impl Offset {
    /// `len` bytes from here.
    #[inline]
    pub const fn span(self, len: u64) -> Span {
        Span { offset: self, len }
    }

    /// The place `bytes` further on.
    #[inline]
    pub const fn plus(self, bytes: u64) -> Self {
        Self(self.0 + bytes)
    }
}

/// A range of bytes in a window.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Span {
    /// First byte.
    pub offset: Offset,
    /// Length in bytes.
    pub len: u64,
}

impl Span {
    /// One past the last byte, saturating.
    #[inline]
    pub const fn end(self) -> u64 {
        self.offset.0.saturating_add(self.len)
    }
}

/// `value` rounded up to a multiple of `unit`.
pub(crate) const fn round_up(value: u64, unit: u64) -> u64 {
    value.div_ceil(unit) * unit
}

/// Alignment of rows on the wire: what bulk copy engines and DMA need.
pub const ROW_ALIGN: u64 = 16;
/// Alignment of rows' scales in a block: they are read and written in words.
pub const SCALES_ALIGN: u64 = 4;
/// Alignment of ring slots, of blocks in an arena and of regions' parts: a line of a GPU's cache. Rows that
/// lie across such lines take a tenth longer to be dispatched, and up to a third longer to be combined.
pub const SLOT_ALIGN: u64 = 128;
