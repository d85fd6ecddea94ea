//! What ends of rings write down of what they do.

use ep_core::Rank;

use crate::args;
pub use crate::args::RingStep as Step;

/// One event of one rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RingEvent {
    /// What it did.
    pub step: Option<Step>,
    /// The rank at the other end.
    pub peer: Rank,
    /// The ring.
    pub track: u32,
    /// The block that did it.
    pub block: u32,
    /// Slots, ever: those filled or emptied so far, or the tail or head.
    pub count: u64,
    /// The operation.
    pub op: u64,
}

impl From<&args::Event> for RingEvent {
    fn from(event: &args::Event) -> Self {
        let args::Event { kind, peer, track, block, count, op } = *event;
        Self { step: Step::of(kind), peer: Rank(peer), track, block, count, op }
    }
}
