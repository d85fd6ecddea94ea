//! A rank's lanes to other nodes: those of the transport, asked again until a verb is through.

use std::sync::{Mutex, MutexGuard, PoisonError};

use ep_core::Fault;
use ep_core::layout::Queues;
use ep_core::port::{LaneId, Offset, Span, Ticket};
use ep_core::topology::Rank;
use ep_core::transport::Lanes;

/// The transport's lanes, one for each queue, and which lanes of roles share a queue.
#[derive(Debug)]
pub(crate) struct Far<L> {
    /// One thread at a time uses them, the rank's; the lock is for the compiler's sake and never waited for.
    lanes: Mutex<L>,
    pub(crate) queues: Queues,
}

/// A verb on a lane of the transport.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Verb {
    Put { from: Span, to: Offset },
    Raise { at: Offset, bits: u64 },
    Flush { upto: Ticket },
}

impl<L: Lanes> Far<L> {
    pub(crate) const fn new(lanes: L, queues: Queues) -> Self {
        Self { lanes: Mutex::new(lanes), queues }
    }

    pub(crate) fn lanes(&self) -> MutexGuard<'_, L> {
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tries a verb on a queue. None: the lane is full, or not through yet. Where there is no ticket to give, it is 0.
    pub(crate) fn attempt(&self, queue: LaneId, verb: Verb) -> Result<Option<Ticket>, Fault> {
        let mut lanes = self.lanes();
        let done = |done: bool| done.then_some(Ticket(0));
        let tried = match verb {
            Verb::Put { from, to } => lanes.put(queue, from, to),
            Verb::Raise { at, bits } => lanes.raise(queue, at, bits).map(done),
            Verb::Flush { upto } => lanes.flush(queue, upto).map(done),
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
