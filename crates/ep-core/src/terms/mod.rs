//! The words that everything else speaks in: ranks, lanes, cells, roles, times and places. Plain values, which look at nothing
//! above them; the modules that give them their rules publish them.

mod lane;
mod phase;
mod place;
mod rank;
mod role;
mod time;
mod unit;

pub use lane::{Cell, Counter, LaneId, LaneKind, Mail, Scope};
pub use phase::Phase;
pub(crate) use place::round_up;
pub use place::{Offset, ROW_ALIGN, SCALES_ALIGN, SLOT_ALIGN, Span};
pub use rank::{Node, Rank};
pub use role::{Duty, Role};
pub use time::Nanos;
pub use unit::{Tag, UNIT_BYTES, UNIT_DATA, Units, pack_unit, unit_bytes, unit_count, unpack_unit, unpack_units};
