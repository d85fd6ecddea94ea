//! Where a rank's window lies: in memory of the host, or of a device, whose bytes its backend moves.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use ep_core::port::{Offset, Span};
use ep_core::transport::WindowCopies;

use crate::memory::Memory;

#[derive(Debug)]
pub(crate) enum Window {
    Host(Memory),
    Device(Arc<dyn WindowCopies>),
}

impl Window {
    pub(crate) fn bytes(&self) -> u64 {
        match self {
            Self::Host(memory) => memory.bytes(),
            Self::Device(copies) => copies.bytes(),
        }
    }

    /// Copies `from` of `source` to `to` here, after what was copied here before; false where that cannot be.
    pub(crate) fn pull(&self, source: &Self, from: Span, to: Offset) -> bool {
        match (source, self) {
            (Self::Host(source), Self::Host(sink)) => source.copy(from, sink, to).is_ok(),
            (Self::Device(source), Self::Device(sink)) => told(sink.pull(&**source, from, to)),
            // Offers of the one do not fit the other.
            _ => false,
        }
    }

    /// Raises a cell, after all that was copied here before; false where there is none.
    pub(crate) fn raise(&self, at: Offset, bits: u64) -> bool {
        match self {
            Self::Host(memory) => memory.cell(at).is_some_and(|cell| {
                debug_assert!(cell.load(Ordering::Relaxed) <= bits, "the cell at {at:?} would fall");
                cell.store(bits, Ordering::Release);
                true
            }),
            Self::Device(copies) => told(copies.raise(at, bits)),
        }
    }

    /// Returns when all that was copied and raised here is there; false where something went wrong.
    pub(crate) fn finish(&self) -> bool {
        match self {
            Self::Host(_) => true,
            Self::Device(copies) => told(copies.finish()),
        }
    }
}

/// Whether it went well; what went wrong is in the log: a lane that breaks has no room for it.
fn told(done: Result<(), ep_core::Error>) -> bool {
    done.inspect_err(|error| tracing::error!(%error, "the loop cannot move bytes of a device")).is_ok()
}
