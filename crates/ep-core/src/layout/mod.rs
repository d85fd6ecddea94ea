//! Bytes: how rows, messages and cells lie in a window. The one home of every offset.
//!
//! All numbers are little-endian. The window of every rank is cut the same way:
//!
//! ```text
//! cells     2 generation banks x writers x lanes, one 64-byte line each
//! counts    2 operation banks x writers, one counts message each; and one outbox
//! notes     2 operation banks x writers, 64 bytes each; and one outbox per peer
//! rings     writers x (channels x slots) row slots; filled by the writer, emptied by the owner
//! staging   peers x (channels x staging slots) row slots; the sources of the owner's puts
//! pulls     channels x writers x 2 row slots; where the owner's gets land
//! arena     blocks of received rows (direct placement) and of experts' output (pulled by combine)
//! ```
//!

mod alarm;
mod cells;
mod messages;
mod row;
mod window;

pub use alarm::Alarm;
pub use cells::{CELL_BYTES, LINE_BYTES, VALUE_BITS, generation_of, stamp, value_in};
pub use messages::{CountsHeader, Kind, NO_BASE, Note, OpHeader};
pub use row::{Block, Choice, RowFormat, RowHeader};
pub(crate) use window::PULL_DEPTH;
pub use window::{Layout, Region};

/// `value` rounded up to a multiple of `unit`.
pub(crate) const fn round_up(value: u64, unit: u64) -> u64 {
    value.div_ceil(unit) * unit
}

/// Alignment of rows on the wire: what bulk copy engines and DMA need.
pub const ROW_ALIGN: u64 = 16;
/// Alignment of ring slots and of regions' parts: a cache line.
pub const SLOT_ALIGN: u64 = 64;
