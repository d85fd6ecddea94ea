//! Cursors of a credit ring: who may write which slot, and what must be published when.
//!
//! A ring has one producer, one consumer and `slots` slots of one row each. The *tail* (slots filled, ever) is
//! published to the consumer every `chunk` rows, the *head* (slots consumed, ever) to the producer every `credit`
//! rows. The producer may fill slot `i % slots` while `i - head < slots`, so `0 <= tail - head <= slots` always.
//!
//! ```text
//!        head                 tail
//!          v                    v
//!   . . . [r r r r r r r r r r r] . . .      counts grow to the right, for ever; slot = (count - origin) % slots
//!          consumer takes   producer fills
//! ```
//!
//! *Polite waiting*: before a role waits on anything it publishes what is pending on all its rings ([`Producer::pending`],
//! [`Consumer::pending`]). Without that the producer can wait for credit that the consumer holds back, while the
//! consumer waits for a tail that the producer holds back: `u` rows unpublished and `v` rows of credit unreturned fill
//! the ring, `u + v = slots`, `u < chunk`, `v < credit`. So a ring with `slots >= chunk + credit - 1` never hangs;
//! with fewer slots it does after a tail was published in the middle of a chunk, as at the end of an operation. (While
//! all tails and heads are multiples of `chunk` and `credit`, so is `v` of their greatest common divisor `g`, and rings
//! hang exactly when `slots < chunk + credit - g`.) `tests/ring.rs` tries every interleaving of small rings.
//!
//! *Geometry*: a communicator's calls may cut the same memory into rings differently. A producer changes geometry only
//! when its ring is empty ([`Producer::is_empty`]); both sides then count slots from there ([`Producer::restart`]).
//!
//! The cursors hold no memory and never wait.

/// Sizes of one ring, all in rows.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Geometry {
    /// Rows that fit.
    pub slots: u32,
    /// Rows after which a tail is due; at most `slots`.
    pub chunk: u32,
    /// Rows after which credit is due; at most `slots`.
    pub credit: u32,
}

impl Geometry {
    /// Slots of a ring's staging memory on the producer's side: two chunks, at most the ring.
    #[inline]
    pub const fn staging_slots(&self) -> u32 {
        let two = self.chunk.saturating_mul(2);
        if two < self.slots { two } else { self.slots }
    }

    /// The slot behind `slot`.
    #[inline]
    const fn after(&self, slot: u32) -> u32 {
        if slot + 1 >= self.slots { 0 } else { slot + 1 }
    }
}

/// A peer published a counter that no correct peer can publish.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("a ring counter stands at {seen}, at most {limit} is possible")]
pub struct Overrun {
    /// The value seen.
    pub seen: u64,
    /// The highest value that could be right.
    pub limit: u64,
}

/// The filling side of a ring.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Producer {
    geometry: Geometry,
    /// Slots that may be filled at a time.
    window: u32,
    origin: u64,
    /// `index % slots`: a division less for every row.
    at: u32,
    tail: u64,
    published: u64,
    head: u64,
}

impl Producer {
    /// A producer of an empty ring whose counters stand at zero.
    pub const fn new(geometry: Geometry) -> Self {
        Self { geometry, window: geometry.slots, origin: 0, at: 0, tail: 0, published: 0, head: 0 }
    }

    /// The slot to fill next, or none while the ring is full.
    #[inline]
    pub fn slot(&self) -> Option<u32> {
        (self.tail - self.head < u64::from(self.window)).then_some(self.at)
    }

    /// The head that must be seen before the next slot may be filled.
    #[inline]
    pub const fn awaited_head(&self) -> u64 {
        (self.tail + 1).saturating_sub(self.window as u64)
    }

    /// Counts the slot named by [`Producer::slot`] as filled; returns the tail to publish when a chunk is full.
    #[inline]
    pub fn push(&mut self) -> Option<u64> {
        debug_assert!(self.slot().is_some(), "pushed into a full ring");
        self.tail += 1;
        self.at = self.geometry.after(self.at);
        (self.tail - self.published >= u64::from(self.geometry.chunk)).then(|| self.take_tail())
    }

    /// As [`Producer::push`], of a ring whose slot was taken for free because of another reader's head: only where a test planted that.
    #[inline]
    pub(crate) fn push_unlooked(&mut self) -> Option<u64> {
        self.tail += 1;
        self.at = self.geometry.after(self.at);
        (self.tail - self.published >= u64::from(self.geometry.chunk)).then(|| self.take_tail())
    }

    /// The tail to publish before waiting, if rows are unpublished; counts as published.
    #[inline]
    pub fn pending(&mut self) -> Option<u64> {
        (self.tail > self.published).then(|| self.take_tail())
    }

    #[inline]
    const fn take_tail(&mut self) -> u64 {
        self.published = self.tail;
        self.tail
    }

    /// Takes note of a head that the consumer published. Heads that are no news are ignored.
    ///
    /// # Errors
    /// [`Overrun`] when the head claims rows that were never sent.
    #[inline]
    pub fn saw_head(&mut self, head: u64) -> Result<(), Overrun> {
        if head > self.tail {
            return Err(Overrun { seen: head, limit: self.tail });
        }
        self.head = self.head.max(head);
        Ok(())
    }

    /// Slots filled since the geometry last changed.
    #[inline]
    pub const fn index(&self) -> u64 {
        self.tail - self.origin
    }

    /// Slots filled so far, ever.
    pub const fn tail(&self) -> u64 {
        self.tail
    }

    /// Takes note that the consumer has returned everything.
    pub const fn settle(&mut self) {
        self.head = self.tail;
    }

    /// Whether the consumer has returned everything.
    pub const fn is_empty(&self) -> bool {
        self.tail == self.head
    }

    /// The geometry in use.
    pub const fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Starts counting slots from here with another geometry. Only on an empty ring.
    pub fn restart(&mut self, geometry: Geometry) {
        debug_assert!(self.is_empty(), "geometry changed on a ring that holds rows");
        self.geometry = geometry;
        self.window = geometry.slots;
        self.origin = self.tail;
        self.at = 0;
    }

    /// Until the geometry changes, fills at most so many slots at a time; which slots those are stays as it is, so the consumer need not know.
    pub fn narrow(&mut self, window: u32) {
        debug_assert!(window > 0, "a ring that nothing may be put into");
        self.window = window.min(self.geometry.slots);
    }
}

/// The emptying side of a ring.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Consumer {
    geometry: Geometry,
    /// `(head - origin) % slots`, as the producer's.
    at: u32,
    head: u64,
    returned: u64,
    tail: u64,
}

impl Consumer {
    /// A consumer of an empty ring whose counters stand at zero.
    pub const fn new(geometry: Geometry) -> Self {
        Self { geometry, at: 0, head: 0, returned: 0, tail: 0 }
    }

    /// The slot to read next, or none while no more rows are known to be there.
    #[inline]
    pub fn slot(&self) -> Option<u32> {
        (self.head < self.tail).then_some(self.at)
    }

    /// The tail that must be seen before the next slot may be read.
    #[inline]
    pub const fn awaited_tail(&self) -> u64 {
        self.head + 1
    }

    /// Counts the slot named by [`Consumer::slot`] as read; returns the head to publish when credit is due.
    #[inline]
    pub fn pop(&mut self) -> Option<u64> {
        debug_assert!(self.slot().is_some(), "popped from an empty ring");
        self.head += 1;
        self.at = self.geometry.after(self.at);
        (self.head - self.returned >= u64::from(self.geometry.credit)).then(|| self.take_head())
    }

    /// The head to publish before waiting, if credit is unreturned; counts as returned.
    #[inline]
    pub fn pending(&mut self) -> Option<u64> {
        (self.head > self.returned).then(|| self.take_head())
    }

    #[inline]
    const fn take_head(&mut self) -> u64 {
        self.returned = self.head;
        self.head
    }

    /// Takes note of a tail that the producer published. Tails that are no news are ignored.
    ///
    /// # Errors
    /// [`Overrun`] when the tail claims more rows than the ring holds.
    #[inline]
    pub fn saw_tail(&mut self, tail: u64) -> Result<(), Overrun> {
        let limit = self.head + u64::from(self.geometry.slots);
        if tail > limit {
            return Err(Overrun { seen: tail, limit });
        }
        self.tail = self.tail.max(tail);
        Ok(())
    }

    /// Slots consumed so far, ever.
    pub const fn head(&self) -> u64 {
        self.head
    }

    /// The geometry in use.
    pub const fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Starts counting slots from here with another geometry, where the producer does so too: after everything that
    /// was sent with the old one has been read, and before the next [`Consumer::saw_tail`]. (Once the last row's credit
    /// has left, the producer may be sending with the new geometry, which may hold more rows than the old.)
    pub fn restart(&mut self, geometry: Geometry) {
        debug_assert!(self.head == self.tail, "geometry changed on a ring that holds rows");
        self.geometry = geometry;
        self.at = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RING: Geometry = Geometry { slots: 4, chunk: 2, credit: 1 };

    #[test]
    fn a_narrow_ring_is_filled_so_far_and_no_farther() {
        let mut ring = Producer::new(RING);
        ring.narrow(3);
        for slot in 0..3 {
            assert_eq!(ring.slot(), Some(slot));
            ring.push();
        }
        assert_eq!((ring.slot(), ring.awaited_head()), (None, 1));
        ring.saw_head(1).unwrap();
        assert_eq!(ring.slot(), Some(3), "which slots those are stays as it is");
        ring.settle();
        ring.narrow(9);
        assert_eq!(ring.awaited_head(), 0, "never more than there are");
        ring.narrow(1);
        ring.restart(RING);
        assert_eq!(ring.slot(), Some(0));
        for _ in 0..4 {
            ring.push();
        }
        assert_eq!(ring.slot(), None, "a new geometry has all its slots");
        assert_eq!((ring.tail(), ring.index()), (7, 4), "what is counted anew, and what is not");
    }

    #[test]
    fn staging_memory_holds_two_chunks_and_no_more_than_the_ring() {
        let staged = |slots, chunk| Geometry { slots, chunk, credit: 1 }.staging_slots();
        assert_eq!([(256, 64), (8, 4), (7, 4), (4, 4)].map(|(slots, chunk)| staged(slots, chunk)), [128, 8, 7, 4]);
        assert_eq!(staged(u32::MAX, u32::MAX), u32::MAX);
    }

    #[test]
    fn a_slot_that_is_filled_without_looking_counts_as_any_other() {
        let [mut looked, mut unlooked] = [Producer::new(RING), Producer::new(RING)];
        for _ in 0..4 {
            assert_eq!(looked.push(), unlooked.push_unlooked());
            assert_eq!(looked, unlooked);
        }
    }
}
