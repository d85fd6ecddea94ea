//! Parts of an arena whose memory comes and goes: which may be taken away.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::port::Span;

/// Tells old from new by the calls of a device. What was given back before a call began, and that call's first kernel has run: what was enqueued
/// before it, as reads of what was given back, has ended.
#[derive(Debug, Default)]
pub struct Ages {
    begun: AtomicU64,
    settled: AtomicU64,
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

    /// The age of what is given back now: the last call that has begun.
    pub fn now(&self) -> u64 {
        self.begun.load(Ordering::Acquire)
    }

    /// Whether a call that began later has come so far.
    pub fn is_settled(&self, age: u64) -> bool {
        age < self.settled.load(Ordering::Acquire)
    }
}

/// A part that came, and may go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    /// Where it lies.
    pub span: Span,
    /// When something of it was last given back.
    pub given: u64,
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

    /// Something was given back.
    pub(super) fn touch(&mut self, given: Span) {
        let now = self.ages.now();
        let meets = |span: &Span| span.offset.0 < given.end() && given.offset.0 < span.end();
        self.all.iter_mut().filter(|piece| meets(&piece.span)).for_each(|piece| piece.given = now);
    }

    /// Those all of which is in one of the `free` ranges, and has been since before a call that has come so far began.
    pub(super) fn spare(&self, free: &[Span]) -> Vec<Piece> {
        let is_free = |span: &Span| free.iter().any(|free| free.offset <= span.offset && span.end() <= free.end());
        self.all.iter().filter(|piece| self.ages.is_settled(piece.given) && is_free(&piece.span)).copied().collect()
    }

    pub(super) fn went(&mut self, piece: &Piece) {
        self.all.retain(|other| other.span != piece.span);
    }
}
