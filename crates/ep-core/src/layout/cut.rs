//! Cutting a window into regions, and regions into slots.

use super::SLOT_ALIGN;
use crate::terms::{Offset, Span};

/// Row slots in parts, one part for each rank or node at the other end.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slots {
    pub(super) base: Offset,
    pub(super) per_part: u64,
    pub(super) bytes: u64,
}

impl Slots {
    /// Slot `slot` of the ring `ring` of a part, when its rings have `slots` each: its first `len` bytes.
    #[inline]
    pub(super) fn slot(&self, part: u32, ring: u32, slots: u32, slot: u32, len: u64) -> Span {
        let at = u64::from(part) * self.per_part + u64::from(ring) * u64::from(slots) + u64::from(slot);
        self.base.plus(at * self.bytes).span(len)
    }
}

/// Takes regions from a window one after the other; none once it is larger than any address space.
pub(super) struct Cut {
    end: Option<u64>,
}

impl Cut {
    pub(super) const fn new() -> Self {
        Self { end: Some(0) }
    }

    /// Goes on behind regions of so many bytes in all.
    pub(super) const fn from(end: u64) -> Self {
        Self { end: Some(end) }
    }

    /// Bytes taken in all; none when no window can be as large.
    pub(super) fn end(&self) -> Option<u64> {
        self.end.filter(|&end| end < 1 << 63)
    }

    /// The next region, aligned; none means more than any number of bytes.
    pub(super) fn take(&mut self, bytes: Option<u64>) -> Offset {
        let start = self.end.unwrap_or(0);
        let aligned = bytes.and_then(|bytes| bytes.checked_next_multiple_of(SLOT_ALIGN));
        self.end = self.end.zip(aligned).and_then(|(end, bytes)| end.checked_add(bytes));
        Offset(start)
    }

    /// The next region, of `parts` parts of `per_part` slots of `bytes` bytes.
    pub(super) fn slots(&mut self, parts: u64, per_part: u64, bytes: u64) -> Slots {
        let all = parts.checked_mul(per_part).and_then(|slots| slots.checked_mul(bytes));
        Slots { base: self.take(all), per_part, bytes }
    }
}
