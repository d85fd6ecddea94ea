//! How much of its outboxes a call uses, and in which steps: each rank's own affair.

use crate::error::Error;
use crate::ring::Geometry;

/// The most rows that a reader takes of an outbox at a time: a row for each lane of a GPU's warp. So no rank fills fewer slots than
/// this, if it has as many ([`OutboxSteps::window`]).
pub const MOST_PIECE: u32 = 32;

/// Rows that a reader takes at a time where a call does not say: what was measured (`docs/cuda-tried.md`).
const USUAL_PIECE: u32 = 8;

/// What a call says of the outboxes that its rows go through, if they do. It concerns no other call.
///
/// Ranks may say different things. A [`piece`](Self::piece) is a step of the rank that takes it, and nobody waits for the other's. How many
/// [`slots`](Self::slots) are filled decides the rank whose outbox it is; its readers find them where they would be otherwise.
///
/// ```
/// use ep_core::OutboxUse;
/// use ep_core::ring::Geometry;
///
/// let ring = Geometry { slots: 96, chunk: 24, credit: 24 };
/// let call = OutboxUse { piece: Some(16), slots: Some(64) };
/// let steps = call.of(ring, 1);
/// assert_eq!((steps.piece, steps.chunk, steps.credit, steps.window), (16, 16, 16, 64));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct OutboxUse {
    /// Rows handed over at a time: that a reader takes at once, and after which tails and credit are told. At least 1; more than
    /// [`MOST_PIECE`], or than an outbox holds, count as that. Absent: 8, and the communicator's steps of tails and credit.
    pub piece: Option<u32>,
    /// Rows for each reader that lie in this rank's outbox at a time, on each channel. At least 1; more than there are slots count as all,
    /// and what comes to less than [`MOST_PIECE`] rows in an outbox counts as so many, or as all. Absent: all.
    pub slots: Option<u32>,
}

/// What a call uses of an outbox, in rows.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct OutboxSteps {
    /// That a reader takes at once.
    pub piece: u32,
    /// After which a tail is due.
    pub chunk: u32,
    /// After which credit is due.
    pub credit: u32,
    /// That lie there at a time, of all readers: at least any rank's [`piece`](Self::piece), so that one which waits for a whole piece gets it.
    pub window: u32,
}

impl OutboxUse {
    /// All of an outbox, in the usual steps: that of calls that say nothing.
    pub const USUAL: Self = Self { piece: None, slots: None };

    /// Refuses steps and rings of no rows.
    ///
    /// # Errors
    /// [`Error::Invalid`].
    pub fn check(&self) -> Result<(), Error> {
        for (what, value) in [("outbox piece", self.piece), ("outbox slots", self.slots)] {
            if value == Some(0) {
                return Err(Error::invalid(what, 0, "1 or more"));
            }
        }
        Ok(())
    }

    /// What it comes to in an outbox that `readers` ranks read, with as many slots for each as `ring` has.
    pub fn of(&self, ring: Geometry, readers: u32) -> OutboxSteps {
        let readers = readers.max(1);
        let slots = ring.slots.saturating_mul(readers);
        let held = |piece: u32| piece.min(MOST_PIECE).min(slots);
        let step = |usual: u32| self.piece.map_or(usual, held);
        let window = self.slots.map_or(slots, |each| each.saturating_mul(readers));
        OutboxSteps {
            piece: held(self.piece.unwrap_or(USUAL_PIECE)),
            chunk: step(ring.chunk),
            credit: step(ring.credit),
            window: window.clamp(least_window(slots), slots),
        }
    }
}

/// Slots that any rank fills at a time at least, of an outbox of so many.
pub fn least_window(slots: u32) -> u32 {
    slots.min(MOST_PIECE)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RING: Geometry = Geometry { slots: 96, chunk: 24, credit: 12 };

    fn used(piece: Option<u32>, slots: Option<u32>) -> OutboxUse {
        OutboxUse { piece, slots }
    }

    #[test]
    fn a_call_that_says_nothing_uses_all() {
        let steps = |readers| OutboxUse::default().of(RING, readers);
        assert_eq!(steps(1), OutboxSteps { piece: 8, chunk: 24, credit: 12, window: 96 });
        assert_eq!(steps(7).window, 7 * 96);
        assert_eq!(steps(0).window, 96, "of a rank alone");
    }

    #[test]
    fn what_an_outbox_does_not_hold_is_cut() {
        for (piece, slots, expected) in
            [(1, 1, (1, 32)), (24, 33, (24, 33)), (36, 256, (32, 96)), (u32::MAX, u32::MAX, (32, 96))]
        {
            let steps = used(Some(piece), Some(slots)).of(RING, 1);
            assert_eq!((steps.piece, steps.window), expected, "{piece} {slots}");
            assert_eq!((steps.chunk, steps.credit), (steps.piece, steps.piece));
        }
        assert_eq!(used(None, Some(20)).of(RING, 3).window, 60, "so many for each reader");
        assert_eq!(used(None, Some(u32::MAX)).of(RING, 3).window, 288);
        let small = Geometry { slots: 3, chunk: 2, credit: 1 };
        assert_eq!(used(Some(8), Some(1)).of(small, 1), OutboxSteps { piece: 3, chunk: 3, credit: 3, window: 3 });
    }

    /// What makes it harmless that ranks say different things.
    #[test]
    fn every_window_holds_every_piece() {
        let said = [None, Some(1), Some(3), Some(8), Some(31), Some(32), Some(33), Some(1000)];
        for slots in 1..=80 {
            for readers in [1, 2, 7] {
                let ring = Geometry { slots, chunk: 1, credit: 1 };
                let all: Vec<_> = said.iter().flat_map(|&a| said.map(|b| used(a, b).of(ring, readers))).collect();
                let most = all.iter().map(|steps| steps.piece.max(steps.chunk).max(steps.credit)).max().unwrap();
                assert!(all.iter().all(|steps| steps.window >= most && steps.piece >= 1), "{slots} {readers}");
                assert!(all.iter().all(|steps| steps.window >= least_window(slots * readers)), "{slots} {readers}");
            }
        }
    }

    #[test]
    fn none_is_refused() {
        let said = |call: OutboxUse| call.check().map_err(|error| error.to_string());
        assert_eq!(said(used(None, None)), Ok(()));
        assert_eq!(said(used(Some(1), Some(u32::MAX))), Ok(()));
        assert_eq!(said(used(Some(0), None)).unwrap_err(), "outbox piece is 0, allowed: 1 or more");
        assert_eq!(said(used(None, Some(0))).unwrap_err(), "outbox slots is 0, allowed: 1 or more");
    }
}
