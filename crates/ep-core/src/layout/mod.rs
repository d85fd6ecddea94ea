//! Bytes: how rows, messages and cells lie in a window. The one home of every offset.
//!
//! All numbers are little-endian. The window of every rank is cut the same way, in this order ([`Layout::regions`]);
//! every region and every part named below starts at a multiple of 128 bytes:
//!
//! ```text
//! cells     2 generation banks x writers x lanes, one 64-byte line each; then 2 banks x mailboxes, likewise
//! counts    2 operation banks x writers, one counts message each; and one outbox
//! notes     2 operation banks x writers, 128 bytes each; and one outbox per peer
//! rings     writers x (channels x slots) row slots; filled by the writer, emptied by the owner. With pulled placement the
//!           near ones are the outbox instead ([`Outbox`]): filled by the owner, read by its node; and nothing is staged near
//! staging   peers x (channels x staging slots) row slots; the sources of the owner's puts
//! pulls     channels x writers x 2 row slots; where the owner's gets land
//! low ...   slots of low latency and their staging memory ([`Arrival`]); without room unless the settings ask for it
//! arena     blocks of received rows (direct placement) and of experts' output (pulled by combine)
//! cells ... of pieces and of low-latency rows, and headers of these: only for kernels ([`Layout::with_kernels`])
//! ```
//!
//! Who may write what, in the window of rank `o` (the *owner*): rank `w` puts into the parts of *writer* `w` in cells,
//! counts, notes, rings and low slots, and into blocks that `o` granted to it; everything else is written by `o` alone. So no two ranks write the same bytes, and no agreement is
//! needed.
//!
//! *Banks.* Cells have one bank for even and one for odd generations: what a lane of the generation before last still
//! had under way is long gone when its bank is used again. Counts and notes have one bank for even and one for odd
//! operations; a writer fills the bank of operation `op` only when the owner is done with `op - 2`.
//!
//! *Calls' rings.* The window is cut once, for the communicator's rings. A call may ask for others, as long as they fit
//! into each writer's part ([`Layout::check_rings`]): the part is then cut anew from its start, channel by channel. The
//! cut is the writer's alone to change, on empty rings (see [`crate::ring`]).
//!
//! *Mailboxes* are a rank's own affair: no peer knows of them, and kernels keep theirs in shared memory. So the C header does
//! not have them.
//!
//! Kernels get the same numbers from [`KernelWindow`] and [`KernelRings`] and the same arithmetic from the header that
//! [`c_header`] writes.

mod alarm;
mod announced;
mod c_header;
mod cells;
mod cut;
mod kernel;
mod low_latency;
mod messages;
mod outbox;
mod queues;
mod rings;
mod window;

pub use alarm::Alarm;
pub use announced::PIECES;
pub use c_header::c_header;
pub use cells::{CELL_BYTES, LINE_BYTES, VALUE_BITS, generation_of, stamp, value_in};
pub use kernel::{KernelRings, KernelWindow};
pub(crate) use low_latency::RESULT_HEADER;
pub use low_latency::{Arrival, LowKind, MASKED, low_stamp};
pub use messages::{CountsHeader, Difference, Kind, Mismatch, NO_BASE, Note, OPEN_ROOM, OpHeader, Share};
pub use outbox::Outbox;
pub use queues::{Queue, Queues};
pub(crate) use rings::PULL_DEPTH;
pub use window::{Layout, Region};

pub use crate::row::{Block, Choice, RowFormat, RowHeader, UnitChoice, UnitRow};
pub(crate) use crate::terms::round_up;
pub use crate::terms::{ROW_ALIGN, SCALES_ALIGN, SLOT_ALIGN};
