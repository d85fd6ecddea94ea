//! A rank's lanes to other nodes: those of the transport, asked again until a verb is through.

use std::sync::{Mutex, MutexGuard, PoisonError};

use ep_core::Fault;
use ep_core::machine::FarLanes;
use ep_core::port::{LaneId, Offset, Span, Ticket};
use ep_core::topology::Rank;
use ep_core::transport::Lanes;

/// The lanes, and how roles share them.
#[derive(Debug)]
pub(crate) struct Far<L> {
    /// One thread at a time uses them, the rank's; the lock is for the compiler's sake and never waited for.
    lanes: Mutex<L>,
    pub(crate) far_lanes: FarLanes,
}

/// A verb on a lane of the transport.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Verb {
    Put { from: Span, to: Offset },
    Raise { at: Offset, bits: u64 },
    Flush { upto: Ticket },
}

impl<L: Lanes> Far<L> {
    pub(crate) const fn new(lanes: L, far_lanes: FarLanes) -> Self {
        Self { lanes: Mutex::new(lanes), far_lanes }
    }

    pub(crate) fn lanes(&self) -> MutexGuard<'_, L> {
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tries a verb. None: the lane is full, or not through yet. Where there is no ticket to give, it is 0.
    pub(crate) fn attempt(&self, lane: LaneId, verb: Verb) -> Result<Option<Ticket>, Fault> {
        let mut lanes = self.lanes();
        let done = |done: bool| done.then_some(Ticket(0));
        let tried = match verb {
            Verb::Put { from, to } => lanes.put(lane, from, to),
            Verb::Raise { at, bits } => lanes.raise(lane, at, bits).map(done),
            Verb::Flush { upto } => lanes.flush(lane, upto).map(done),
        };
        if tried == Ok(None) {
            lanes.progress();
        }
        tried
    }

    pub(crate) fn progress(&self) {
        self.lanes().progress();
    }

    /// Why nothing comes from `peer` any more, if a lane to it broke.
    pub(crate) fn broken(&self, peer: Rank) -> Option<Fault> {
        self.lanes().broken(peer)
    }
}
