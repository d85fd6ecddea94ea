//! What ports did, as records: for Perfetto, for checkers, for a failing seed's story.

mod perfetto;

pub use perfetto::perfetto;

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use crate::port::{Cell, LaneId, Nanos, Role};
use crate::topology::Rank;

/// One verb of one role.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Record {
    /// When, on the rank's clock.
    pub at: Nanos,
    /// Whose.
    pub rank: Rank,
    /// Which role's.
    pub role: Role,
    /// The operation it works for.
    pub op: u64,
    /// What was done.
    pub verb: Verb,
}

/// A verb with its arguments.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verb {
    /// The port was opened.
    Open,
    /// The port was closed.
    Close,
    /// A wait began, for this cell first.
    Wait {
        /// The first cell waited on.
        cell: Cell,
        /// The value awaited.
        at_least: u64,
    },
    /// The wait ended.
    Woke {
        /// Which need was met, or none when the wait failed.
        index: Option<usize>,
    },
    /// A put was accepted.
    Put {
        /// The lane.
        lane: LaneId,
        /// Where it lands in the peer's window.
        to: u64,
        /// Bytes.
        len: u64,
    },
    /// A get was accepted.
    Get {
        /// The lane.
        lane: LaneId,
        /// Where it comes from in the peer's window.
        from: u64,
        /// Bytes.
        len: u64,
    },
    /// A cell was published.
    Publish {
        /// The lane.
        lane: LaneId,
        /// The cell.
        cell: Cell,
        /// Its new value.
        value: u64,
    },
    /// Units that a role waited for have come.
    Units {
        /// The lane by which they came.
        lane: LaneId,
        /// Bytes of their data.
        len: u64,
        /// How long it waited for them.
        waited: Nanos,
    },
    /// A flush returned.
    Flushed {
        /// The lane.
        lane: LaneId,
    },
}

/// Takes records. Machines that run on one thread share one sink among all ranks.
pub trait Sink {
    /// Takes one record.
    fn record(&self, record: Record);
}

impl<S: Sink + ?Sized> Sink for &S {
    fn record(&self, record: Record) {
        (**self).record(record);
    }
}

impl<S: Sink + ?Sized> Sink for Rc<S> {
    fn record(&self, record: Record) {
        (**self).record(record);
    }
}

impl<S: Sink + ?Sized> Sink for Arc<S> {
    fn record(&self, record: Record) {
        (**self).record(record);
    }
}

/// Keeps everything, in order.
impl Sink for RefCell<Vec<Record>> {
    fn record(&self, record: Record) {
        self.borrow_mut().push(record);
    }
}
