//! What was last done to each byte of a window, as intervals.

use std::collections::BTreeMap;

use ep_core::port::Span;

use super::clock::known;
use crate::violation::AccessKind;

/// One access, as later ones are checked against it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mark {
    /// The component whose event `at` must be known to whoever comes after this access.
    pub(super) component: u32,
    pub(super) at: u32,
    /// For reports: who, how, which bytes.
    pub(super) actor: u32,
    pub(super) kind: AccessKind,
    pub(super) span: Span,
}

impl Mark {
    fn known_to(&self, clock: &[u32]) -> bool {
        known(clock, self.component) >= self.at
    }
}

/// Bytes with the same history.
#[derive(Clone, Debug)]
struct Piece {
    end: u64,
    write: Option<Mark>,
    /// Reads since the write, the last of each component.
    reads: Vec<Mark>,
}

impl Piece {
    /// Adds an access by someone who knows `clock`, or returns one that it is not ordered after.
    fn touch(&mut self, mark: &Mark, clock: &[u32]) -> Result<(), Mark> {
        if let Some(write) = self.write.filter(|write| !write.known_to(clock)) {
            return Err(write);
        }
        if !mark.kind.writes() {
            match self.reads.iter_mut().find(|read| read.component == mark.component) {
                Some(read) => *read = *mark,
                None => self.reads.push(*mark),
            }
            return Ok(());
        }
        if let Some(read) = self.reads.iter().find(|read| !read.known_to(clock)) {
            return Err(*read);
        }
        self.write = Some(*mark);
        self.reads.clear();
        Ok(())
    }
}

/// The history of one window. Pieces are split where accesses begin and end and are never merged: a protocol touches
/// the same ranges again and again.
#[derive(Debug, Default)]
pub(super) struct Shadow {
    pieces: BTreeMap<u64, Piece>,
}

impl Shadow {
    /// Adds an access by someone who knows `clock`, or returns one that it is not ordered after.
    pub(super) fn touch(&mut self, mark: &Mark, clock: &[u32]) -> Result<(), Mark> {
        let (start, end) = (mark.span.offset.0, mark.span.end());
        if !self.pieces.contains_key(&start) {
            self.split(start);
        }
        let mut at = start;
        while at < end {
            match self.pieces.get_mut(&at) {
                Some(piece) if piece.end <= end => {
                    piece.touch(mark, clock)?;
                    at = piece.end;
                }
                Some(_) => self.split(end),
                None => {
                    let next = self.pieces.range(at..end).next().map_or(end, |(&next, _)| next);
                    self.pieces.insert(at, Piece { end: next, write: None, reads: Vec::new() });
                }
            }
        }
        Ok(())
    }

    /// Cuts the piece around `at` in two, if there is one.
    fn split(&mut self, at: u64) {
        if let Some((_, piece)) = self.pieces.range_mut(..at).next_back().filter(|(_, piece)| piece.end > at) {
            let right = piece.clone();
            piece.end = at;
            self.pieces.insert(at, right);
        }
    }
}
