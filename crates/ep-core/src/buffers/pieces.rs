//! Parts of an arena whose memory comes and goes: which may be taken away.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::port::Span;

/// Says when memory that was given back is read by nobody.
///
/// Work that may read it was enqueued before the endpoint's next call, which waits for it. So when the first kernel of a later call has run, the reads have
/// ended. Between calls [marks](Self::mark) do as well.
#[derive(Debug, Default)]
pub struct Ages {
    begun: AtomicU64,
    settled: AtomicU64,
    marked: AtomicU64,
    reached: AtomicU64,
}

/// When something was given back: the last call that had begun, and the last mark.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Age {
    call: u64,
    mark: u64,
}

impl Ages {
    /// A call begins, behind all that was enqueued before. Returns its number.
    pub fn begin(&self) -> u64 {
        self.begun.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// The first kernel of that call has run.
    pub fn settle(&self, call: u64) {
        self.settled.fetch_max(call, Ordering::AcqRel);
    }

    /// Marks a moment. Behind it, its caller comes behind all that may read what was given back before it. Returns its number.
    pub fn mark(&self) -> u64 {
        self.marked.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// What that mark's caller came behind has ended, and no peer may touch what was given back before.
    pub fn reach(&self, mark: u64) {
        self.reached.fetch_max(mark, Ordering::AcqRel);
    }

    /// The age of what is given back now.
    pub fn now(&self) -> Age {
        Age { call: self.begun.load(Ordering::Acquire), mark: self.marked.load(Ordering::Acquire) }
    }

    /// Whether nobody reads any more what was given back then: a later call's first kernel has run, or a later mark was reached. One call more than needed is
    /// waited for: the call that began next may have been ordered before the memory was given back.
    pub fn is_settled(&self, age: Age) -> bool {
        age.call.saturating_add(1) < self.settled.load(Ordering::Acquire)
            || age.mark < self.reached.load(Ordering::Acquire)
    }
}

/// A part that came, and may go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    /// Where it lies.
    pub span: Span,
    /// When something of it was last given back.
    pub given: Age,
}

/// All of them.
#[derive(Debug, Default)]
pub(super) struct Pieces {
    all: Vec<Piece>,
    ages: Arc<Ages>,
}

impl Pieces {
    pub(super) fn new(ages: &Arc<Ages>) -> Self {
        Self { all: Vec::new(), ages: Arc::clone(ages) }
    }

    pub(super) fn came(&mut self, span: Span) {
        self.all.push(Piece { span, given: self.ages.now() });
    }

    /// Whether a piece begins or ends there. No block lies in two: tools that look for accesses out of bounds take each for an allocation.
    pub(super) fn has_edge(&self, at: u64) -> bool {
        self.all.iter().any(|piece| piece.span.offset.0 == at || piece.span.end() == at)
    }

    /// Something was given back.
    pub(super) fn touch(&mut self, given: Span) {
        let now = self.ages.now();
        let meets = |span: &Span| span.offset.0 < given.end() && given.offset.0 < span.end();
        self.all.iter_mut().filter(|piece| meets(&piece.span)).for_each(|piece| piece.given = now);
    }

    /// Those all of which is in one of the `free` ranges, and has been since before a call that has come so far began.
    pub(super) fn spare(&self, free: &[Span]) -> Vec<Piece> {
        self.all.iter().filter(|piece| self.ages.is_settled(piece.given) && is_in(&piece.span, free)).copied().collect()
    }

    /// Whether there is one that would be [spare](Self::spare) but for a call that has not come so far.
    pub(super) fn is_waiting(&self, free: &[Span]) -> bool {
        self.all.iter().any(|piece| !self.ages.is_settled(piece.given) && is_in(&piece.span, free))
    }

    pub(super) fn went(&mut self, piece: &Piece) {
        self.all.retain(|other| other.span != piece.span);
    }
}

/// Whether all of `span` is in one of the `free` ranges.
fn is_in(span: &Span, free: &[Span]) -> bool {
    free.iter().any(|free| free.offset <= span.offset && span.end() <= free.end())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffers::Arena;
    use crate::layout::{RowFormat, SLOT_ALIGN};
    use crate::port::Offset;
    use crate::shape::Shape;

    /// An arena of two blocks, the second of which is a piece that came, and that piece.
    fn grown(format: &RowFormat, ages: &Arc<Ages>) -> (Arena, Span) {
        let len = format.block_bytes(1);
        let piece = Offset(SLOT_ALIGN + len).span(len);
        let arena = Arena::growing(Offset(SLOT_ALIGN).span(4 * len), piece.offset, ages);
        let first = arena.take(format, 1).unwrap();
        assert!(arena.take(format, 1).is_none(), "there is no memory behind the first block");
        arena.came(piece);
        arena.give(&first);
        (arena, piece)
    }

    #[test]
    fn no_block_lies_in_two_pieces() {
        let format = RowFormat::new(&Shape::builder().hidden(32).topk(1).build().unwrap());
        let (arena, piece) = grown(&format, &Arc::default());
        let most = (1..).take_while(|&rows| format.block_bytes(rows) <= piece.len).last().unwrap();
        assert!(arena.has_room(format.block_bytes(most)) && !arena.has_room(format.block_bytes(most + 1)));
        let both = [(); 2].map(|()| arena.take(&format, 1).unwrap());
        both.iter().for_each(|block| arena.give(block));
        assert!(!arena.has_room(format.block_bytes(most + 1)), "nor when all is free again");
    }

    /// A call that comes so far.
    fn call(ages: &Ages) {
        ages.settle(ages.begin());
    }

    /// A kernel that reads rows which were given back runs before the first kernel of the next call, or beside that of one under way.
    #[test]
    fn a_piece_goes_when_a_call_has_come_so_far_that_was_made_after_it_was_given_back() {
        let format = RowFormat::new(&Shape::builder().hidden(32).topk(1).build().unwrap());
        let ages = Arc::new(Ages::default());
        let (arena, piece) = grown(&format, &ages);
        let both = [(); 2].map(|()| arena.take(&format, 1).unwrap());
        let early = ages.begin();
        both.iter().for_each(|block| arena.give(block));
        ages.settle(early);
        assert!(arena.spare().is_empty(), "that call began before");
        call(&ages);
        assert!(arena.spare().is_empty(), "that call may have been made before, and begun after");
        let late = ages.begin();
        assert!(arena.spare().is_empty(), "that call has not come so far");
        ages.settle(late);
        let spare = arena.spare();
        assert_eq!(spare.iter().map(|spare| spare.span).collect::<Vec<_>>(), [piece], "the first block never goes");
        let again = [(); 2].map(|()| arena.take(&format, 1).unwrap());
        assert!(arena.spare().is_empty() && !arena.withdraw(&spare[0]), "somebody has it");
        again.iter().for_each(|block| arena.give(block));
        assert!(!arena.withdraw(&spare[0]), "somebody had it since");
        (0..2).for_each(|_| call(&ages));
        assert!(arena.withdraw(&arena.spare()[0]) && arena.spare().is_empty());
        assert!(arena.take(&format, 1).is_some() && arena.take(&format, 1).is_none(), "the first block is there");
        arena.came(piece);
        assert!(arena.spare().is_empty(), "as old as the last call");
    }

    /// Where no call comes, a mark does as well, and says nothing of what is given back behind it.
    #[test]
    fn a_piece_goes_when_a_mark_behind_it_is_reached() {
        let format = RowFormat::new(&Shape::builder().hidden(32).topk(1).build().unwrap());
        let ages = Arc::new(Ages::default());
        let (arena, piece) = grown(&format, &ages);
        let both = [(); 2].map(|()| arena.take(&format, 1).unwrap());
        call(&ages);
        let early = ages.mark();
        assert!(!arena.is_waiting(), "somebody has the piece");
        both.iter().for_each(|block| arena.give(block));
        assert!(arena.is_waiting());
        ages.reach(early);
        assert!(arena.is_waiting() && arena.spare().is_empty(), "it was given back behind that mark");
        let late = ages.mark();
        assert!(arena.is_waiting() && arena.spare().is_empty(), "that mark is not reached");
        call(&ages);
        assert!(arena.spare().is_empty(), "that call may have been made before, whatever was marked");
        ages.reach(late);
        assert_eq!(arena.spare().iter().map(|spare| spare.span).collect::<Vec<_>>(), [piece]);
        assert!(!arena.is_waiting() && arena.withdraw(&arena.spare()[0]));
    }

    /// Without it the longest range would be too short, which is long enough with it.
    #[test]
    fn a_piece_is_needed_where_only_it_is_long_enough() {
        let format = RowFormat::new(&Shape::builder().hidden(32).topk(1).build().unwrap());
        let ages = Arc::new(Ages::default());
        let (arena, piece) = grown(&format, &ages);
        let first = arena.take(&format, 1).unwrap();
        (0..2).for_each(|_| call(&ages));
        let spare = arena.spare()[0];
        assert!(arena.needs(&spare, piece.len), "the first block is taken");
        assert!(!arena.needs(&spare, piece.len + 1), "nor is there as much with it");
        arena.give(&first);
        assert!(!arena.needs(&spare, piece.len), "the first block is as long");
    }

    #[test]
    fn no_piece_goes_of_which_a_peer_was_told_that_may_come_late() {
        let format = RowFormat::new(&Shape::builder().hidden(32).topk(1).build().unwrap());
        let ages = Arc::new(Ages::default());
        let (arena, _) = grown(&format, &ages);
        let both = [(); 2].map(|()| arena.take(&format, 1).unwrap());
        arena.suspect(&both[1]);
        both.iter().for_each(|block| arena.give(block));
        (0..2).for_each(|_| call(&ages));
        assert!(arena.spare().is_empty(), "before the recovery");
        arena.recovered(true);
        (0..2).for_each(|_| call(&ages));
        assert!(arena.spare().is_empty(), "a lost rank may touch it for ever");
    }
}
